"""A sweep: what is done is not done again, what fails is named, and a signal stops all of it."""

import csv
import dataclasses
import json
import os
import signal
import sys

import pytest
import tiny
from mistakes import check

from fastgrpo import train
from fastgrpo.config.settings import GRPOConfig
from fastgrpo.config.sweep import runs_of, take_sweep
from fastgrpo.run import sweep
from fastgrpo.run.folder import RunFolder, made_in
from fastgrpo.run.resume import open_run

# In the place of `python -m fastgrpo.train`, so that a run takes a moment. FOLDER/wanted says what its run is to do.
CHILD = """
import json, shutil, signal, sys, time
from pathlib import Path
signal.signal(signal.SIGINT, lambda *_: sys.exit(130))
run = Path(sys.argv[sys.argv.index("--output_dir") + 1])
wanted = json.loads((run.parent.parent / "wanted").read_text()).get(run.name, "end")
print("a line", file=sys.stderr)
if wanted == "fail":
    sys.exit("error: the reason")
run.mkdir(exist_ok=True)
shutil.copy(run.parent.parent / f"{run.name}.config", run / "config.json")
(run / "metrics.jsonl").write_text('{"step": 1, "reward": 0.5}\\n')
while wanted == "wait":
    time.sleep(0.01)
summary = {"accuracy_before": 0.25, "accuracy_after": 0.5, "steps": 1, "num_tokens": 9, "wall_seconds": 1.0}
if wanted != "no summary":
    (run / "summary.json").write_text(json.dumps(summary))
"""
FLAGS = "--max_steps 1 --sweep num_generations=2,4 --sweep_seeds 0,1"
NAMES = [f"num_generations={g},seed={s}" for g in (2, 4) for s in (0, 1)]


@pytest.fixture
def make(tmp_path, monkeypatch, capsys):
    """Run a sweep whose runs do as they are told, and return what was printed."""
    (tmp_path / "child.py").write_text(CHILD)
    monkeypatch.setattr(sweep, "COMMAND", (sys.executable, str(tmp_path / "child.py")))
    monkeypatch.setattr(sweep, "draw_sweep", lambda path, runs, say: path.write_text(str(len(runs))))
    monkeypatch.setattr(sweep, "POLL_SECONDS", 0.01)

    def make(wanted=None, flags=FLAGS):
        flags = [*flags.split(), "--output_dir", str(tmp_path / "sweep")]
        asked, runs = (parsed := take_sweep(flags))[1], runs_of(*parsed)
        for run in runs:
            (tmp_path / f"{run.name}.config").write_text(json.dumps(dataclasses.asdict(run.config)))
        (tmp_path / "wanted").write_text(json.dumps(wanted or {}))
        sweep.run_sweep(asked, runs)
        return capsys.readouterr().out

    return make


def test_every_run_is_made_once(make, tmp_path):
    told, folder = make(), tmp_path / "sweep"
    assert "4 runs, 0 of them done already" in told and f"table {folder / 'sweep.csv'}, picture" in told
    assert f"{NAMES[2]}: accuracy 0.250 -> 0.500, reward 0.500, 1.0 s" in told
    with open(folder / "sweep.csv", newline="") as file:
        assert [row["folder"] for row in csv.DictReader(file)] == NAMES
    assert {"sweep.csv", "sweep.png", f"{NAMES[0]}.log"} <= made_in(folder)
    told = make({name: "fail" for name in NAMES})  # and this one does none of them again
    assert "4 of them done already" in told and (folder / "sweep.png").read_text() == "4"
    told = make(flags=FLAGS + ",2 --sweep_jobs 2")  # a larger sweep in the same folder does the new runs alone
    assert "6 runs, 4 of them done already" in told and f"{NAMES[0]}: accuracy" not in told
    assert (folder / f"{NAMES[0]}.log").read_text() == "a line\n"


def test_a_run_that_fails_is_named_and_the_others_go_on(make, tmp_path, capsys):
    with pytest.raises(ValueError, match=f"1 of 4 runs failed: {NAMES[1]}; mend what .* again$"):
        make({NAMES[1]: "fail"})
    told = capsys.readouterr().out
    assert f"{NAMES[1]}: failed with exit code 1; the end of {tmp_path / 'sweep' / NAMES[1]}.log" in told
    assert "  a line\n  error: the reason\n" in told and f"{NAMES[3]}: accuracy" in told
    assert (tmp_path / "sweep" / "sweep.png").read_text() == "3"
    assert "3 of them done already" in make()


def test_a_quiet_sweep_tells_of_failures_and_where_its_table_is(make, tmp_path, capsys):
    folder = tmp_path / "sweep"
    with pytest.raises(ValueError, match=f"1 of 4 runs failed: {NAMES[1]}"):
        make({NAMES[1]: "fail"}, FLAGS + " --quiet")
    told = capsys.readouterr().out.splitlines()
    assert told[0].startswith(f"{NAMES[1]}: failed with exit code 1") and told[1:3] == [
        "  a line",
        "  error: the reason",
    ]
    assert told[3:] == [f"table {folder / 'sweep.csv'}, picture {folder / 'sweep.png'}"]


@pytest.mark.parametrize("number, error", [(signal.SIGINT, KeyboardInterrupt), (signal.SIGTERM, SystemExit)])
def test_a_signal_stops_the_runs(make, tmp_path, monkeypatch, capsys, number, error):
    """The run that has begun gets the signal, and no other one is started."""
    state = sweep._Processes._state

    def stop_once_it_runs(self, run):
        if (tmp_path / "sweep" / run.name / "metrics.jsonl").exists():
            os.kill(os.getpid(), number)
            monkeypatch.setattr(sweep._Processes, "_state", state)
        return state(self, run)

    monkeypatch.setattr(sweep._Processes, "_state", stop_once_it_runs)
    with pytest.raises(error):
        make({name: "wait" for name in NAMES})
    told = capsys.readouterr().out
    assert f"{NAMES[0]}: stopped" in told and "the sweep was stopped; the same command goes on with it" in told
    assert not (tmp_path / "sweep" / NAMES[1]).exists()
    assert "0 of them done already" in make()


def test_a_run_with_other_settings_is_not_taken_for_done(make, tmp_path):
    make()
    with pytest.raises(
        ValueError, match=r"seed=0 holds a run with beta=0.005, now it is 0.5; choose another output_dir"
    ):
        make(flags=FLAGS + " --beta 0.5")
    assert "0 of them done already" in make(flags=FLAGS.replace("max_steps 1", "max_steps 2"))  # it goes on


def test_a_run_that_goes_on_is_not_done(tmp_path, make):
    """It has written its settings anew, after the summary of the run before."""
    make()
    path, (run, *_) = tmp_path / "sweep" / NAMES[0], runs_of(*take_sweep(FLAGS.split()))
    assert sweep.is_done(run, path)
    after = (path / "summary.json").stat().st_mtime + 1
    os.utime(path / "config.json", (after, after))
    assert not sweep.is_done(run, path)
    assert not sweep.is_done(run, tmp_path / "nothing")


DAMAGES = {
    "settings that are a list": ("config.json", "[]"),
    "settings that are nested too deeply": ("config.json", "[" * 100_000),
    "a summary that is a list": ("summary.json", "[]"),
    "half a summary": ("summary.json", '{"steps": 1'),
    "a summary without figures": ("summary.json", "{}"),
    "a figure that is text": ("summary.json", '{"accuracy_before": "x"}'),
    "no summary": ("summary.json", None),
    "no metrics": ("metrics.jsonl", None),
}


def test_a_run_with_a_damaged_file_is_not_done(make, tmp_path):
    flags = "--max_steps 1 --sweep_seeds 0"
    make(flags=flags)
    (run,), path = runs_of(*take_sweep(flags.split())), tmp_path / "sweep" / "seed=0"
    for name, (file, text) in DAMAGES.items():
        whole = (path / file).read_text()
        (path / file).unlink() if text is None else (path / file).write_text(text)
        assert not sweep.is_done(run, path), name
        (path / file).write_text(whole)
        os.utime(path / "config.json", (0, 0))  # the settings are older than the summary
        assert sweep.is_done(run, path), name


def test_a_run_that_leaves_no_summary_costs_nothing_of_the_others(make, tmp_path, capsys):
    with pytest.raises(ValueError, match="1 of 2 runs failed"):
        make({"seed=1": "no summary"}, flags="--max_steps 1 --sweep_seeds 0,1")
    assert "seed=1: left no summary.json or metrics.jsonl to read; the end of" in capsys.readouterr().out
    assert (tmp_path / "sweep" / "sweep.csv").read_text().count("seed=0") == 1
    assert "1 of them done already" in make(flags="--max_steps 1 --sweep_seeds 0,1")


def test_runs_that_outlive_their_sweep_are_named(make, tmp_path):
    flags = "--max_steps 1 --sweep_seeds 0,1"
    make(flags=flags)
    (tmp_path / "sweep" / "seed=1" / "summary.json").unlink()
    alive = RunFolder(tmp_path / "sweep" / "seed=1")
    with pytest.raises(ValueError, match="seed=1 is in use by "):
        make(flags=flags)
    alive.close()
    assert "1 of them done already" in make(flags=flags)


def test_a_single_run_leaves_the_folder_of_a_sweep_alone(make, tmp_path):
    make(flags="--max_steps 1 --sweep_seeds 0")
    path = tmp_path / "sweep"
    before = sorted(path.rglob("*"))
    for changes in ({"resume_from_checkpoint": "auto"}, {"overwrite_output_dir": True}, {}):
        with pytest.raises(ValueError, match=f"output_dir {path} holds a sweep; choose another output_dir"):
            open_run(GRPOConfig(output_dir=str(path), **changes), print)
    assert sorted(path.rglob("*")) == before


def test_a_sweep_of_real_runs(tmp_path, monkeypatch, capfd):
    """Through the command line, in a process; a second sweep finds the folder in use, or the run done."""
    model = tiny.save(tmp_path / "model")
    (tmp_path / "rows.jsonl").write_text('{"prompt": "ab", "nums": [1, 2], "target": 3}\n' * 2)
    argv = (
        f"--task dataset --dataset_name {tmp_path / 'rows.jsonl'} --model_name_or_path {model} --device cpu "
        "--reward_funcs fastgrpo.rewards.countdown:correctness --max_steps 1 --prompts_per_step 2 --logging_steps 1 "
        f"--max_completion_length 4 --output_dir {tmp_path / 'sweep'} --sweep num_generations=2"
    ).split()
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(sys.path))
    assert train.main(argv) == 0
    told = capfd.readouterr().out
    assert "num_generations=2,seed=42: accuracy not measured -> not measured, reward 0.000" in told
    assert (tmp_path / "sweep" / "sweep.png").stat().st_size > 10_000
    assert (tmp_path / "sweep" / "num_generations=2,seed=42" / "checkpoint-1" / "manifest.json").exists()
    monkeypatch.setattr(sweep, "COMMAND", ("no such command",))
    assert train.main(argv) == 0 and "1 of them done already" in capfd.readouterr().out
    folder = RunFolder(tmp_path / "sweep")
    check(train.main, argv, "in use", capfd)
    folder.close()

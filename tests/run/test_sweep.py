"""A sweep makes each run once, skips finished runs, names failures, and stops on a signal."""

import dataclasses
import json
import multiprocessing
import os
import signal
import sys
import threading
from pathlib import Path

import pytest
from processes import awaited

from fastgrpo.config.settings import GRPOConfig
from fastgrpo.run import sweep
from fastgrpo.run.folder import NAMES, made_in
from fastgrpo.run.log import RunLog
from fastgrpo.run.resume import open_run
from fastgrpo.run.sweep import figures_of, take_sweep

# In the place of `python -m fastgrpo.train`, so that a run takes a moment. FOLDER/wanted says what its run is to do.
CHILD = """
import json, os, shutil, sys, time
from pathlib import Path
run = Path(sys.argv[len(sys.argv) - sys.argv[::-1].index("--output_dir")])  # the last one counts
wanted = json.loads((run.parent.parent / "wanted").read_text()).get(run.name, "end")
print("a line", file=sys.stderr)
resumes = ["--resume_from_checkpoint", "auto", "--overwrite_output_dir", "False"]
assert sys.argv[-6:] == [*resumes, "--quiet", "False"]  # a log has all lines, however quiet the sweep itself is
if wanted == "fail":
    sys.exit("error: the reason")
run.mkdir(exist_ok=True)
shutil.copy(run.parent.parent / "settings" / run.name / "config.json", run)
(run / "pid").write_text(str(os.getpid()))
(run / "metrics.jsonl").write_text("".join(json.dumps({"step": i, "reward": i}) + "\\n" for i in range(1, 13)))
while wanted == "wait":
    time.sleep(0.01)
summary = {"accuracy_before": 0.25, "accuracy_after": 0.5, "steps": 1, "num_tokens": 9, "wall_seconds": 1.0}
(run / "summary.json").write_text(json.dumps(summary))
"""
FLAGS = "--max_steps 1 --sweep num_generations=2,4 --sweep_seeds 0"
RUNS = [f"num_generations={g},seed=0" for g in (2, 4)]


def test_makes_a_run_for_each_combination_and_seed():
    assert (sys.executable, "-m", "fastgrpo.train") == sweep.COMMAND
    line = "--max_steps 3 --sweep num_generations=2,4 --sweep=learning_rate=1e-4,2e-4 --sweep_seeds 0,7"
    found = take_sweep(line.split())
    assert [(r.config.num_generations, r.config.learning_rate, r.config.seed) for r in found] == [
        (generations, rate, seed) for generations in (2, 4) for rate in (1e-4, 2e-4) for seed in (0, 7)
    ]
    assert {r.config.max_steps for r in found} == {3}
    assert found[1].setting == "num_generations=2,learning_rate=1e-4"
    assert found[1].name == "num_generations=2,learning_rate=1e-4,seed=7"
    assert [(r.setting, r.name) for r in take_sweep(["--sweep_seeds", "1,2"])] == [("", "seed=1"), ("", "seed=2")]
    seeds_first = take_sweep(["--sweep", "seed=0,1", "--sweep", "beta=0,0.1"])
    assert [run.setting for run in seeds_first] == ["beta=0", "beta=0.1"] * 2
    assert take_sweep(["--max_steps", "3"]) is None
    assert len(take_sweep(["--sweep", "beta=0,0.0,1"])) == 2  # a value in two spellings is one run
    one, two = take_sweep(["--sweep", "lora_target_modules=q_proj k_proj,v_proj", "--use_peft", "True"])
    assert one.config.lora_target_modules == ("q_proj", "k_proj") and two.config.lora_target_modules == ("v_proj",)


def test_every_value_has_its_own_folder():
    values = ["a/b", "a-b", "a//b", "ä", "ö", "模" * 90, *("/models/" + "x" * 300 + end for end in "12")]
    names = [run.name for run in take_sweep(["--task", "gsm8k", "--sweep", f"model_name_or_path={','.join(values)}"])]
    assert len(set(names)) == len(values) and "model_name_or_path=a-b" in names
    assert all(name.isascii() and len(name) < 200 and NAMES.fullmatch(f"{name}.log") for name in names)


@pytest.fixture
def make(tmp_path, monkeypatch, capsys):
    """Run a sweep whose runs do as they are told, and return what was printed."""
    (tmp_path / "child.py").write_text(CHILD)
    monkeypatch.setattr(sweep, "COMMAND", (sys.executable, str(tmp_path / "child.py")))

    def make(wanted=None, flags=FLAGS):
        runs = take_sweep([*flags.split(), "--output_dir", str(tmp_path / "sweep")])
        for run in runs:
            if not (tmp_path / "settings" / run.name).exists():
                RunLog(dataclasses.replace(run.config, output_dir=str(tmp_path / "settings" / run.name))).close()
        (tmp_path / "wanted").write_text(json.dumps(wanted or {}))
        sweep.run_sweep(runs)
        return capsys.readouterr().out

    return make


def test_makes_every_run_once_and_continues_after_a_failure(make, tmp_path, capsys):
    folder = tmp_path / "sweep"
    with pytest.raises(ValueError, match=f"1 of 2 runs failed: {RUNS[1]}; to continue it, repeat the command"):
        make({RUNS[1]: "fail"}, FLAGS + " --quiet")
    told = capsys.readouterr().out.splitlines()
    assert told[0].startswith(f"{RUNS[1]}: failed with exit code 1")
    assert told[1:3] == ["  a line", "  error: the reason"]
    assert f"table {folder / 'sweep.csv'}, picture {folder / 'sweep.png'}" in told
    assert "2 runs, 1 of them done already" in make()
    titles, first, *rest = (folder / "sweep.csv").read_text().splitlines()
    assert titles == "setting,seed,accuracy_before,accuracy_after,reward,steps,num_tokens,wall_seconds"
    assert first == "num_generations=2,0,0.25,0.5,7.5,1,9,1.0" and len(rest) == 1
    assert {"sweep.csv", "sweep.png", f"{RUNS[0]}.log"} <= made_in(folder)
    assert (folder / "sweep.png").stat().st_size > 10_000
    assert (folder / f"{RUNS[0]}.log").read_text() == "a line\n"
    # A run is done with its settings only, and a single run leaves the folder of a sweep alone.
    run = take_sweep(FLAGS.split())[0]
    assert figures_of(run, folder) and not figures_of(take_sweep([*FLAGS.split(), "--beta", "0.5"])[0], folder)
    summary, settings = folder / run.name / "summary.json", folder / run.name / "config.json"
    after = summary.stat().st_mtime + 1
    os.utime(settings, (after, after))  # as where it was resumed, and goes on
    assert not figures_of(run, folder)
    kept = json.loads(settings.read_text())
    del kept["adam_beta1"]  # as an earlier version without this setting
    settings.write_text(json.dumps(kept))
    os.utime(settings, (0, 0))
    assert figures_of(run, folder)
    summary.write_text('{"steps": 1')
    assert not figures_of(run, folder)
    before = sorted(folder.rglob("*"))
    with pytest.raises(ValueError, match=f"output_dir {folder} holds a sweep"):
        open_run(GRPOConfig(output_dir=str(folder), overwrite_output_dir=True), print)
    assert sorted(folder.rglob("*")) == before


def test_a_signal_stops_the_runs(make, tmp_path, capsys, monkeypatch):
    def stop_once_it_runs():
        awaited((tmp_path / "sweep" / RUNS[0] / "metrics.jsonl").exists)
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=stop_once_it_runs, daemon=True).start()
    advanced = []
    monkeypatch.setattr(sweep.Terminal, "advance", lambda _: advanced.append(1))
    with pytest.raises(SystemExit):
        make({name: "wait" for name in RUNS})
    assert "the sweep was stopped; to continue it, repeat the command" in capsys.readouterr().out
    assert not (tmp_path / "sweep" / RUNS[1]).exists() and not advanced
    assert "0 of them done already" in make()


@pytest.mark.slow
def test_a_run_ends_when_its_sweep_is_killed(make, tmp_path):
    process = multiprocessing.get_context("fork").Process(target=make, args=({name: "wait" for name in RUNS},))
    process.start()
    run = tmp_path / "sweep" / RUNS[0]
    awaited((run / "metrics.jsonl").exists)
    process.kill()
    stat = Path("/proc", (run / "pid").read_text(), "stat")
    awaited(lambda: not stat.exists() or ") Z " in stat.read_text())
    assert "0 of them done already" in make()

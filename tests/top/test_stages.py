"""The command stages: the order of its processes, what each is given, and how it goes on."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from mistakes import check
from paths import ROOT

from fastgrpo import stages, train
from fastgrpo.run.folder import RunFolder

SHORT = """
all: {task: arithmetic, device: cpu, max_eval_samples: 4, max_completion_length: 20, eval_num_generations: 2}
sft: {max_steps: 2, batch_size: 4}
train: {max_steps: 2, prompts_per_step: 2, num_generations: 2}
distill: {num_generations: 2}
distilled: {max_steps: 2, batch_size: 4}
"""


@pytest.fixture
def commands(tmp_path, monkeypatch):
    """Stands in for the processes: notes each command line, and leaves what a finished stage leaves."""
    started = []

    def run(command, process_group):
        started.append(command[2:])
        if any(word.startswith("--output_dir=") for word in command):
            folder = Path(flag(command, "--output_dir"))
            (folder / "checkpoint-2").mkdir(parents=True)
            (folder / "summary.json").write_text("{}")
            (folder / "metrics.jsonl").write_text(json.dumps({"step": 2, "eval/accuracy": 0.5}) + "\n")
        else:
            Path(flag(command, "--output")).write_text("rows\n")
        return SimpleNamespace(returncode=0, poll=lambda: 0)

    monkeypatch.setattr(stages.subprocess, "Popen", run)
    (tmp_path / "short.yaml").write_text(SHORT)
    return started


def flag(command, name):
    """The value behind a flag, or in one word with it."""
    return next(word.partition("=")[2] for word in command if word.startswith(name + "="))


def test_each_stage_is_given_what_the_one_before_it_made(tmp_path, commands, capsys):
    out = tmp_path / "out"
    argv = ["--config", str(tmp_path / "short.yaml"), "--output_dir", str(out)]
    assert stages.main(argv) == 0
    assert [command[0] for command in commands] == [f"fastgrpo.{n}" for n in ("sft", "train", "distill", "sft")]
    sft, train, distill, distilled = commands
    assert not [word for word in sft if word.startswith(("--model_name_or_path", "--train_file"))]
    assert flag(train, "--model_name_or_path") == str(out / "sft" / "checkpoint-2")
    assert distill[1] == str(out / "train" / "checkpoint-2")
    assert flag(distilled, "--train_file") == str(out / "distilled.jsonl")
    assert not [word for word in distilled if word.startswith("--model_name_or_path")]
    assert all(flag(c, "--resume_from_checkpoint") == "auto" for c in (sft, train, distilled))
    told = capsys.readouterr().out
    assert "| stage     | accuracy" in told and (out / "stages.png").exists()
    assert stages.main(argv) == 0 and len(commands) == 4  # what is done is passed over
    for name in ("train", "distilled"):
        (out / name / "summary.json").unlink()
        (out / name / "checkpoint-2").rmdir()
    (out / "distilled.jsonl").unlink()
    (out / "train" / "merged").mkdir()
    assert stages.main(argv) == 0
    assert [command[0] for command in commands[4:]] == ["fastgrpo.train", "fastgrpo.distill", "fastgrpo.sft"]
    assert commands[5][1] == str(out / "train" / "merged")  # adapters are merged into it


def test_quiet_stages_are_all_quiet(tmp_path, commands, capsys):
    out = tmp_path / "out"
    argv = ["--config", str(tmp_path / "short.yaml"), "--output_dir", str(out)]
    assert stages.main([*argv, "--quiet"]) == 0
    assert len(commands) == 4 and all(flag(command, "--quiet") == "True" for command in commands)
    assert capsys.readouterr().out == f"picture {out / 'stages.png'}, folder {out}\n"
    assert stages.main(argv) == 0 and len(commands) == 4  # how much is printed is no setting of the stages


def test_a_folder_is_for_one_file_of_settings_and_one_chain(tmp_path, commands, capfd):
    out = tmp_path / "out"
    argv = ["--config", str(tmp_path / "short.yaml"), "--output_dir", str(out)]
    assert stages.main(argv) == 0
    (tmp_path / "other.yaml").write_text(SHORT.replace("sft: {max_steps: 2", "sft: {max_steps: 3"))
    check(stages.main, ["--config", str(tmp_path / "other.yaml"), *argv[2:]], "holds stages with other settings", capfd)
    (out / "sft" / "summary.json").unlink()
    check(stages.main, argv, "the stage sft is to be run, and .*train.*summary.json was made from an earlier", capfd)
    (out / "sft" / "summary.json").write_text("{}")
    (out / "sft" / "checkpoint-2").rmdir()
    assert stages.main(argv) == 0 and len(commands) == 4  # what is done needs no checkpoint
    for name in ("train", "distilled"):
        (out / name / "summary.json").unlink()
    (out / "distilled.jsonl").unlink()
    check(stages.main, argv, "sft is done and has lost its checkpoints; delete this folder", capfd)
    assert len(commands) == 4


def test_what_stages_did_not_make_they_do_not_touch(tmp_path, commands, capfd):
    out = tmp_path / "out"
    out.mkdir()
    argv = ["--config", str(tmp_path / "short.yaml"), "--output_dir", str(out)]
    (out / "distilled.part").write_text("mine")
    check(stages.main, argv, "is not empty and holds no stages to go on with", capfd)
    (out / "distilled.part").unlink()
    assert stages.main(argv) == 0
    (out / "stages.png").unlink()
    (out / "stages.png").write_text("noted as ours, so it is drawn again")
    assert stages.main(argv) == 0 and (out / "stages.png").read_bytes().startswith(b"\x89PNG")
    for flags in ("--resume_from_checkpoint auto", "--overwrite_output_dir True"):
        check(train.main, ["--output_dir", str(out), *flags.split()], "holds stages; choose another output_dir", capfd)
    lock = RunFolder(out)
    try:
        check(stages.main, argv, "is in use by", capfd)
    finally:
        lock.close()


def test_a_stage_that_fails_ends_the_command(tmp_path, commands, monkeypatch, capfd):
    failed = SimpleNamespace(returncode=2, poll=lambda: 2)
    monkeypatch.setattr(stages.subprocess, "Popen", lambda command, process_group: failed)
    argv = ["--config", str(tmp_path / "short.yaml"), "--output_dir", str(tmp_path / "out")]
    check(stages.main, argv, "the stage sft ended with exit code 2, for the reason above", capfd)
    check(stages.main, ["--config", "none"], "no such file: none", capfd)


def test_the_stages_as_processes(tmp_path, capfd):
    """A reward that is always given keeps what a model without skill writes, so that every stage has its input."""
    (tmp_path / "stage_rewards.py").write_text(
        "def given(completions, **columns):\n    return [1.0] * len(completions)\n"
    )
    text = SHORT.replace("distill: {", "distill: {reward_funcs: ['stage_rewards:given'], max_prompts: 40, ")
    (tmp_path / "short.yaml").write_text(text)
    command = [sys.executable, "-m", "fastgrpo.stages", "--config", "short.yaml", "--output_dir", "out"]
    path = {**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}"}
    done = subprocess.run(command, cwd=tmp_path, env=path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert [line.split("|")[1].strip() for line in done.stdout.splitlines() if line.startswith("| ")][2:] == [
        "sft", "train", "distilled",
    ]  # fmt: skip
    rows = [json.loads(line) for line in (tmp_path / "out" / "distilled.jsonl").read_text().splitlines()]
    state = json.loads((tmp_path / "out" / "distilled" / "checkpoint-2" / "trainer_state.json").read_text())
    assert rows and state["rows"] == len(rows)


@pytest.mark.parametrize(
    "number, code", [pytest.param(signal.SIGINT, 130, marks=pytest.mark.slow), (signal.SIGTERM, 143)]
)
def test_a_signal_is_passed_on_to_the_stage_which_saves(tmp_path, number, code):
    """The stage is stopped in its first steps, leaves a checkpoint, and the command ends as the signal asks.

    Slow is SIGINT, which goes the same way; tests/run/test_signals.py sends it to a run.
    """
    (tmp_path / "long.yaml").write_text(SHORT.replace("max_steps: 2", "max_steps: 100000"))
    command = [sys.executable, "-m", "fastgrpo.stages", "--config", str(tmp_path / "long.yaml")]
    metrics = tmp_path / "out" / "sft" / "metrics.jsonl"
    process = subprocess.Popen([*command, "--output_dir", str(tmp_path / "out")], stdout=subprocess.DEVNULL, cwd=ROOT)
    while not (metrics.exists() and '"loss"' in metrics.read_text()):
        assert process.poll() is None
        time.sleep(0.1)
    process.send_signal(number)
    assert process.wait() == code
    assert list((tmp_path / "out" / "sft").glob("checkpoint-*"))


@pytest.mark.slow
def test_the_bars_of_the_embedded_task(tmp_path, capsys):
    """GRPO gains at least 0.2 on its supervised start, and distillation into a fresh model keeps at least 0.1."""
    assert stages.main(["--output_dir", str(tmp_path / "out")]) == 0
    accuracy = {}
    for name in ("sft", "train", "distilled"):
        accuracy[name] = json.loads((tmp_path / "out" / name / "summary.json").read_text())["accuracy_after"]
    with capsys.disabled():
        print(f"\n{accuracy}")
    assert accuracy["train"] >= accuracy["sft"] + 0.2 and accuracy["distilled"] >= accuracy["sft"] + 0.1

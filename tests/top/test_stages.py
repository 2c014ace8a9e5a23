"""The command stages: the order of its processes, what each is given, and how it goes on."""

import json
import signal
import subprocess
import sys
import time
from types import SimpleNamespace

import pytest
from mistakes import check
from paths import ROOT

from fastgrpo import stages

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
        flags = dict(zip(command[3::2], command[4::2], strict=False))
        if "--output_dir" in flags:
            folder = stages.Path(flags["--output_dir"])
            (folder / "checkpoint-2").mkdir(parents=True)
            (folder / "summary.json").write_text("{}")
            (folder / "metrics.jsonl").write_text(json.dumps({"step": 2, "eval/accuracy": 0.5}) + "\n")
        else:
            stages.Path(command[command.index("--output") + 1]).write_text("rows\n")
        return SimpleNamespace(returncode=0, poll=lambda: 0)

    monkeypatch.setattr(stages.subprocess, "Popen", run)
    (tmp_path / "short.yaml").write_text(SHORT)
    return started


def flag(command, name):
    return command[command.index(name) + 1]


def test_each_stage_is_given_what_the_one_before_it_made(tmp_path, commands, capsys):
    out = tmp_path / "out"
    argv = ["--config", str(tmp_path / "short.yaml"), "--output_dir", str(out)]
    assert stages.main(argv) == 0
    assert [command[0] for command in commands] == [f"fastgrpo.{n}" for n in ("sft", "train", "distill", "sft")]
    sft, train, distill, distilled = commands
    assert "--model_name_or_path" not in sft and "--train_file" not in sft
    assert flag(train, "--model_name_or_path") == str(out / "sft" / "checkpoint-2")
    assert distill[1] == str(out / "train" / "checkpoint-2")
    assert flag(distilled, "--train_file") == str(out / "distilled.jsonl") and "--model_name_or_path" not in distilled
    assert all(flag(c, "--resume_from_checkpoint") == "auto" for c in (sft, train, distilled))
    told = capsys.readouterr().out
    assert "| stage     | accuracy" in told and (out / "stages.png").exists()
    assert stages.main(argv) == 0 and len(commands) == 4  # what is done is passed over
    (out / "train" / "summary.json").unlink()
    (out / "train" / "checkpoint-2").rmdir()
    (out / "distilled.jsonl").unlink()
    assert stages.main(argv) == 0
    assert [command[0] for command in commands[4:]] == ["fastgrpo.train", "fastgrpo.distill"]


def test_a_stage_that_fails_ends_the_command(tmp_path, commands, monkeypatch, capfd):
    failed = SimpleNamespace(returncode=2, poll=lambda: 2)
    monkeypatch.setattr(stages.subprocess, "Popen", lambda command, process_group: failed)
    argv = ["--config", str(tmp_path / "short.yaml"), "--output_dir", str(tmp_path / "out")]
    check(stages.main, argv, "the stage sft ended with exit code 2; give the same command again", capfd)
    check(stages.main, ["--config", "none"], "no such file: none", capfd)


@pytest.mark.parametrize("number, code", [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_is_passed_on_to_the_stage_which_saves(tmp_path, number, code):
    """The stage is stopped in its first steps, leaves a checkpoint, and the command ends as the signal asks."""
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

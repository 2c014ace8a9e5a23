"""Runs in processes of their own that are killed, and go on."""

import json
import os
import random
import subprocess
import sys
import time

import pytest
import tiny
from paths import ROOT
from resumed import assert_same_run

from fastgrpo.run.checkpoint import checkpoints

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("without_curves")]
REWARD = """
import random

def share_of_a(completions, **columns):
    return [text.count("a") / max(len(text), 1) + 0.1 * random.random() for text in completions]
"""


@pytest.fixture
def folder(tmp_path):
    tiny.save(tmp_path / "model")
    rows = "".join(json.dumps({"prompt": text}) + "\n" for text in ("ab", "c", "hello ", "1+1=", "?"))
    for name, text in (("train.jsonl", rows), ("test.jsonl", rows), ("toy_reward.py", REWARD)):
        (tmp_path / name).write_text(text)
    return tmp_path


def flags(folder, name, steps):
    """The command line of a run."""
    settings = {
        "task": "dataset", "dataset_name": folder, "model_name_or_path": folder / "model",
        "reward_funcs": "toy_reward:share_of_a", "output_dir": folder / name, "max_steps": steps,
        "prompts_per_step": 2, "num_generations": 4, "max_completion_length": 6, "learning_rate": 1e-3, "beta": 0.05,
        "logging_steps": 3, "eval_steps": 7, "save_steps": 1, "save_total_limit": 3, "device": "cpu",
        "gradient_checkpointing": False, "resume_from_checkpoint": "auto",
    }  # fmt: skip
    return [str(part) for name, value in settings.items() for part in (f"--{name}", value)]


def start(folder, *run):
    """The process of a run; `run` as in `flags`."""
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}:{folder}", "OMP_NUM_THREADS": "1", "TQDM_DISABLE": "1"}
    return subprocess.Popen(
        [sys.executable, "-m", "fastgrpo.train", *flags(folder, *run)], env=environment, cwd=folder, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip


def wait_for_a_save(process, run, at_start=()):
    """Until the process has written a checkpoint that was not there when it started, or has ended."""
    while process.poll() is None and set(checkpoints(run) if run.exists() else ()) <= set(at_start):
        time.sleep(0.01)


def test_kills_at_random_moments_change_nothing(folder, kills=20, steps=600):
    """SIGKILL, every second one within a few steps of a new checkpoint, every tenth one while the process starts."""
    process = start(folder, "whole", steps)
    said, _ = process.communicate()
    assert process.returncode == 0, said
    rng, run, report = random.Random(0), folder / "run", []
    for kill in range(kills):
        before = list(checkpoints(run)) if run.exists() else []
        process = start(folder, "run", steps)
        if kill % 10 == 9:
            time.sleep(rng.uniform(0.1, 8))
        else:
            wait_for_a_save(process, run, before)
            time.sleep(rng.uniform(0, 0.15 if kill % 2 else 1.5))
        assert process.poll() is None, process.communicate()[0]  # it was alive
        process.kill()
        process.communicate()
        report.append((list(checkpoints(run))[-1], len(list(run.glob(".tmp-checkpoint-*")))))
    process = start(folder, "run", steps)
    said, _ = process.communicate()
    assert process.returncode == 0, said
    print(f"\n{kills} kills after steps {[step for step, _ in report]}, {sum(n for _, n in report)} inside of a save")
    assert "damaged" not in said
    assert_same_run(run, folder / "whole")

"""A script: whole runs of two ranks, in each of which one of them fails, or both fail alike."""

import errno
import functools
import os
import signal
import sys
from pathlib import Path

import ranks as support
import tiny
import torch

from fastgrpo import GRPOConfig, GRPOTrainer
from fastgrpo.config.command import run_command

ROWS = [{"prompt": text} for text in ("ab", "c", "hello ", "1+1=")]


def share_of_a(completions, **_):
    return [text.count("a") / max(len(text), 1) for text in completions]


def on_one(rank, act):
    """A reward function that does something else on one rank in the second step."""

    def reward(completions, trainer_state, **columns):
        if int(os.environ["RANK"]) == rank and trainer_state.global_step == 1:
            return act(completions)
        return share_of_a(completions)

    return reward


def broken(completions):
    raise KeyError("a bug of the reward")


def killed_in_the_update(completions):
    torch.autograd.backward = lambda *_, **__: os.kill(os.getpid(), signal.SIGKILL)
    return [index % 2 for index in range(len(completions))]  # so that there is something to learn


def make(folder, reward=share_of_a, **settings):
    defaults = {
        "output_dir": str(folder / "run"), "max_steps": 3, "prompts_per_step": 4, "num_generations": 4,
        "max_completion_length": 6, "logging_steps": 1, "device": "cpu", "gradient_checkpointing": False,
        "ddp_timeout": 50,
    }  # fmt: skip
    return GRPOTrainer(str(folder.parent / "model"), reward, GRPOConfig(**defaults | settings), ROWS)


def train(folder, reward=share_of_a, **settings):
    """Train as a command does."""
    return run_command(lambda argv: make(folder, reward, **settings).train(), [])


def train_with_full_disk(folder):
    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device", "metrics.jsonl")

    def command(argv):
        trainer = make(folder)
        if trainer.ranks.lead:
            trainer.log.write = full
        trainer.train()

    return run_command(command, [])


def train_in_a_script(folder, reward):
    make(folder, reward).train()


def missing_model(folder):
    return run_command(lambda argv: make(folder / "nowhere"), [])


CASES = {
    "reward": functools.partial(train, reward=on_one(1, broken)),
    "killed": functools.partial(train, reward=on_one(1, killed_in_the_update), parallel="fsdp2"),
    "script": functools.partial(train_in_a_script, reward=on_one(0, broken)),
    "disk": train_with_full_disk,
    "no-model": missing_model,
}

if __name__ == "__main__":
    root = Path(sys.argv[1])
    tiny.save(root / "model")
    support.fork({case: functools.partial(body, root / f"{case}.run") for case, body in CASES.items()}, root, 2, 2)

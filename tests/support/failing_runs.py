"""A script: whole runs of two ranks, in each of which one of them fails alone, or both fail alike."""

import errno
import functools
import os
import signal
import sys
from pathlib import Path

import ranks as support
import tiny

from fastgrpo import GRPOConfig, GRPOTrainer
from fastgrpo.config.command import run_command
from fastgrpo.train import main

ROWS = [{"prompt": text} for text in ("ab", "c", "hello ", "1+1=")]


def share_of_a(completions, **_):
    return [text.count("a") / max(len(text), 1) for text in completions]


def on_one(rank, act, when):
    """A reward function that does something else on one rank."""

    def reward(completions, trainer_state, **columns):
        if int(os.environ["RANK"]) == rank and when(completions, trainer_state):
            return act(completions)
        return share_of_a(completions)

    return reward


def second_step(completions, state):
    return state.global_step == 1 and len(completions) > 2  # two are of the evaluation


def evaluation(completions, state):
    return state.global_step == 2 and len(completions) <= 2


def not_a_number(completions):
    return [float("nan")] * len(completions)


def broken(completions):
    raise KeyError("a bug of the reward")


def killed(completions):
    os.kill(os.getpid(), signal.SIGKILL)


def make(folder, reward=share_of_a, **settings):
    defaults = {
        "output_dir": str(folder / "run"), "max_steps": 3, "prompts_per_step": 4, "num_generations": 4,
        "max_completion_length": 6, "logging_steps": 1, "device": "cpu", "gradient_checkpointing": False,
        "ddp_timeout": 50, "eval_steps": 2, "eval_on_start": False,
    }  # fmt: skip
    return GRPOTrainer(str(folder.parent / "model"), reward, GRPOConfig(**defaults | settings), ROWS, ROWS[:4])


def train(folder, reward=share_of_a, **settings):
    """Train as a command does."""
    return run_command(lambda argv: make(folder, reward, **settings).train(), [])


def train_with_full_disk(folder):
    def command(argv):
        trainer = make(folder)
        if trainer.ranks.lead:

            def full(*_):
                raise OSError(errno.ENOSPC, "No space left on device", "metrics.jsonl")

            trainer.log.write = full
        trainer.train()

    return run_command(command, [])


def train_in_a_script(folder, reward):
    make(folder, reward).train()


def missing_model(folder):
    def command(argv):
        GRPOTrainer(str(folder / "nothing"), share_of_a, GRPOConfig(device="cpu"), ROWS)

    return run_command(command, [])


def wrong_flag(folder):
    return main(["--learning_rat", "1"])


CASES = {
    "reward": functools.partial(train, reward=on_one(1, broken, second_step)),
    "nan": functools.partial(train, reward=on_one(1, not_a_number, second_step)),
    "evaluation": functools.partial(train, reward=on_one(1, broken, evaluation)),
    "killed": functools.partial(train, reward=on_one(1, killed, second_step)),
    "script": functools.partial(train_in_a_script, reward=on_one(0, broken, second_step)),
    "disk": train_with_full_disk,
    "no-model": missing_model,
    "no-flag": wrong_flag,
    "no-folder": functools.partial(train, output_dir="/proc/nothing"),
}

if __name__ == "__main__":
    root = Path(sys.argv[1])
    tiny.save(root / "model")
    folders = {case: root / f"{case}.run" for case in CASES}
    support.fork({case: functools.partial(body, folders[case]) for case, body in CASES.items()}, root, 2, at_once=2)

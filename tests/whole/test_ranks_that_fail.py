"""Runs of two ranks of which one fails or dies: it says why, and the other one ends with a line of its own."""

import errno
import os
import re
import signal
import sys
from functools import partial
from pathlib import Path

import pytest
import tiny
import torch
from ranks import fork, forked
from runs import make_trainer, share_of_a

from fastgrpo.config.command import run_command

pytestmark = pytest.mark.slow


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
    given = {"model": str(folder.parent / "model"), "max_steps": 3, "ddp_timeout": 50, **settings}
    return make_trainer(folder, reward, **given)


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


CASES = {
    "reward": partial(train, reward=on_one(1, broken)),
    "killed": partial(train, reward=on_one(1, killed_in_the_update), parallel="fsdp2"),
    "disk": train_with_full_disk,
}
SECOND = "the completions that the ranks drew in step 2"


@pytest.fixture(scope="module")
def ended(tmp_path_factory):
    return forked(__file__, tmp_path_factory.mktemp("failing"))


@pytest.mark.parametrize("case, failing, code, error, waited", [
    ("reward", 1, 2, "reward function 'reward' raised KeyError: 'a bug of the reward'", SECOND),
    ("disk", 0, 2, "the disk is full, writing metrics.jsonl failed", "the decision whether to stop after step 1"),
])  # fmt: skip
def test_the_rank_that_fails_says_why_and_the_other_one_ends_with_a_line(ended, case, failing, code, error, waited):
    codes, told = ended(case)
    assert (codes[failing], codes[1 - failing]) == (code, 1), told
    assert re.search(rf"^error on rank {failing}:\s{error}", told[failing], re.MULTILINE | re.DOTALL), told[failing]
    line = told[1 - failing].splitlines()[-1]
    assert line.startswith(f"rank {1 - failing} stops while it waits for {waited}: rank {failing} failed: "), line
    assert "Traceback" not in told[1 - failing] and "error on" not in told[1 - failing]


def test_a_rank_that_is_killed_ends_the_other_with_a_line(ended):
    codes, told = ended("killed")
    assert codes == [1, -9]
    assert told[0].splitlines()[-1].startswith("rank 0 stops while it waits for an update in step 2: another rank died")


if __name__ == "__main__":
    root = Path(sys.argv[1])
    tiny.save(root / "model")
    fork({case: partial(body, root / f"{case}.run") for case, body in CASES.items()}, root, 2, 2)

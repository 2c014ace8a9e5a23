"""Runs of two ranks of which one fails or dies: it says why, and the other one ends with a line of its own."""

import re

import pytest
from ranks import forked

pytestmark = pytest.mark.slow
SECOND = "the completions that the ranks drew in step 2"


@pytest.fixture(scope="module")
def ended(tmp_path_factory):
    return forked("failing_runs.py", tmp_path_factory.mktemp("failing"))


@pytest.mark.parametrize(
    "case, failing, code, error, waited",
    [
        ("reward", 1, 2, "reward function 'reward' raised KeyError: 'a bug of the reward'", SECOND),
        ("script", 0, 1, "Traceback.*reward function 'reward' raised KeyError", SECOND),
        ("disk", 0, 2, "the disk is full, writing metrics.jsonl failed", "the decision whether to stop after step 1"),
    ],
)
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


def test_a_mistake_that_all_ranks_make_is_reported_once(ended):
    codes, told = ended("no-model")
    assert codes == [2, 2]
    silent = told.index("")  # the rank that came second
    assert told[1 - silent].startswith(f"error on rank {1 - silent}: no such model folder: ")

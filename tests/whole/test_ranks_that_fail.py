"""Runs of two ranks that nobody ends from outside: one fails alone, and the other one ends with a line of its own."""

import re

import pytest
from ranks import forked

REWARD = "reward function 'reward' "
SECOND = "the completions that the ranks drew in step 2"


@pytest.fixture(scope="module")
def ended(tmp_path_factory):
    return forked("failing_runs.py", tmp_path_factory.mktemp("failing"))


@pytest.mark.parametrize(
    "case, failing, code, error, waited",
    [
        ("reward", 1, 2, f"{REWARD}raised KeyError: 'a bug of the reward'", SECOND),
        ("nan", 1, 2, f"{REWARD}returned nan for completion 0", SECOND),
        (
            "evaluation", 1, 2, f"{REWARD}raised KeyError",
            "the completions that the ranks drew in the evaluation after step 2",
        ),
        ("script", 0, 1, f"Traceback.*{REWARD}raised KeyError", SECOND),
        ("disk", 0, 2, "the disk is full, writing metrics.jsonl failed", "the decision whether to stop after step 1"),
        ("no-folder", 0, 2, "output_dir /proc/nothing cannot be written", "the folder of the run"),
    ],
)  # fmt: skip
def test_the_rank_that_fails_says_why_and_the_other_one_says_so_in_a_line(ended, case, failing, code, error, waited):
    codes, told = ended(case)
    assert (codes[failing], codes[1 - failing]) == (code, 1), told
    assert re.search(rf"^error on rank {failing}:\s{error}", told[failing], re.MULTILINE | re.DOTALL), told[failing]
    line = told[1 - failing].splitlines()[-1]
    assert line.startswith(f"rank {1 - failing} stops while it waits for {waited}: rank {failing} failed: "), line
    assert "Traceback" not in told[1 - failing] and "error on" not in told[1 - failing]


@pytest.mark.parametrize(
    "case, waited, known",
    [("killed", SECOND, "rank 1"), ("sharded", "an update in step 2", "another rank")],
)
def test_a_rank_that_is_killed_ends_the_other_with_a_line(ended, case, waited, known):
    codes, told = ended(case)
    assert codes == [1, -9]
    line = f"rank 0 stops while it waits for {waited}: {known} died or did not come in time"
    assert told[0].splitlines()[-1] == line


@pytest.mark.parametrize(
    "case, error",
    [("no-model", "no such model folder: "), ("no-flag", "Unrecognized options: --learning_rat, 1; did you mean ")],
)
def test_a_mistake_that_all_ranks_make_is_told_once(ended, case, error):
    codes, told = ended(case)
    assert codes == [2, 2]
    silent = told.index("")  # the rank that came second
    assert told[1 - silent].startswith(f"error on rank {1 - silent}: {error}")

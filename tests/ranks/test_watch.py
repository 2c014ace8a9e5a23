"""A rank whose main thread waits in C for a lost one ends with a line, and never because another rank has finished."""

import pytest
from ranks import forked


@pytest.fixture(scope="module")
def ended(tmp_path_factory):
    return forked("stuck_ranks.py", tmp_path_factory.mktemp("stuck"))


@pytest.mark.parametrize(
    "how, code, why",
    [("fail", 1, "rank 1 failed: KeyError: 'a bug'"), ("die", -9, "rank 1 died; it was last at the first")],
)
def test_who_waits_in_c_ends_with_a_line_that_names_the_missing_rank(ended, how, code, why):
    codes, told = ended(how)
    assert codes == [1, code, 1], told
    assert [told[rank] for rank in (0, 2)] == [
        f"rank {rank} stops while it waits for an update: {why}\n" for rank in (0, 2)
    ]
    assert told[1].count("Traceback") == (how == "fail")


def test_a_rank_that_has_finished_ends_no_other_and_rank_0_warns_for_all(ended):
    assert ended("leave") == ([0, 0, 0], ["a warning\n", "", ""])

"""Two ranks with TRL's trainer, Liger's loss and verl's head, forked from one process that has imported them."""

import sys
from functools import partial
from pathlib import Path

import pytest
import tiny
from ranks import fork, forked


@pytest.fixture(scope="module")
def ended(tmp_path_factory):
    return forked(__file__, tmp_path_factory.mktemp("ranks"), tiny.save(tmp_path_factory.mktemp("model")))


@pytest.mark.parametrize("case", ["trl", "trl-formula", "liger", "verl"])
def test_two_ranks_compute_what_one_process_does(ended, case):
    codes, outputs = ended(case)
    assert codes == [0, 0], "\n".join(outputs)


if __name__ == "__main__":
    import test_liger
    import test_trl
    import test_verl

    folder, model = map(Path, sys.argv[1:])
    cases = {
        "trl": partial(test_trl.compare_on_rank, model, folder / "runs"),
        "trl-formula": partial(test_trl.notice_on_rank, model, folder / "other"),
        "liger": test_liger.count_on_rank,
        "verl": test_verl.compare_on_rank,
    }
    fork(cases, folder, count=2)

"""Three updates give the same gradients, weights and metrics, however many ranks compute them, and in whichever way.

As a script, `python test_matrix.py FOLDER` forks two ranks, which compute the cases of every commit.
"""

import functools
import sys

import pytest
import torch
from matrix import LEARNING_RATE, SELECTION, Case, main, trajectory
from ranks import LIMIT, fork, forked

GRADIENT, METRIC, DRIFT = 5e-7, 5e-7, 5e-8  # weights are in fp64, some sums in fp32
QUICK = [
    Case("grpo", 0.04, parallel="ddp", budget=60),
    Case("luspo", 0.0, parallel="fsdp2", budget=60),
    Case("vespo", 0.0, parallel="ddp", budget=60, adaptive=True),
    Case("dapo", 0.0, "few", "ddp", 60),
    Case("dapo", 0.0, "none", "fsdp2", 60),
    Case("dapo", 0.04, "apart", "fsdp2", 60),
    Case("dapo", 0.1, parallel="fsdp2", knobs=(("kl", "full"),)),
    Case("dapo", 0.04, parallel="fsdp2", budget=60, minibatches=2, selection=SELECTION, adaptive=True),
    Case("dapo", 0.04, "few", "fsdp2", lora=True),
]

truth = functools.cache(trajectory)  # of one rank, with one micro-batch an update


def compared(results):
    """The signed residuals of the gradients along the true ones, after each case has been compared with the truth."""
    signed = []
    for case, got in results.items():
        want = truth(case.truth)
        mine, true = (of["gradients"].double().flatten() for of in (got, want))  # of all three updates
        assert (mine - true).norm() <= GRADIENT * true.norm(), case
        if true.norm() > 0:
            signed.append(((mine - true) @ true / (true @ true)).item())
        assert (got["weights"] - want["weights"]).abs().max() <= 0.01 * LEARNING_RATE, case
        assert got["metrics"].keys() == want["metrics"].keys(), case
        for name, value in want["metrics"].items():
            assert got["metrics"][name] == pytest.approx(value, rel=METRIC, abs=METRIC), (case, name)
    return signed


def results_of(count, folder, script, *argv):
    codes, outputs = forked(script, folder, *argv)("ranks")
    assert codes == [0] * count, "\n".join(outputs)
    return torch.load(folder / "results.pt", weights_only=False)


def test_two_ranks_give_the_trajectory_of_one(tmp_path):
    results = results_of(2, tmp_path, __file__)
    signed = compared(results)
    assert [*results] == QUICK and len(signed) == len(QUICK) - 1  # "none" stands still
    assert abs(sum(signed) / len(signed)) <= DRIFT
    # Where the trajectories were all the same, or stood still, the comparisons would prove nothing.
    ends = [truth(case.truth)["weights"][-1] - truth(case.truth)["weights"][0] for case in QUICK]
    moved = sorted(end.abs().max().item() for end in ends)
    assert moved[0] == 0 and moved[1] > LEARNING_RATE / 2
    assert len({end.sum().item() for end in ends}) == len(ends)


@pytest.mark.slow
@pytest.mark.parametrize("count", [1, 2, 3, 4])
def test_every_number_of_ranks_gives_the_trajectory_of_one(count, tmp_path):
    signed = compared(results_of(count, tmp_path, "matrix.py", count, 3600))
    assert abs(sum(signed) / len(signed)) <= DRIFT


if __name__ == "__main__":
    fork({"ranks": functools.partial(main, f"{sys.argv[1]}/results.pt", QUICK)}, sys.argv[1], count=2, limit=3 * LIMIT)

"""Three updates give the same gradients, weights and metrics, however many ranks compute them, and in whichever way."""

import functools

import pytest
import torch
from matrix import LEARNING_RATE, cases, trajectory
from ranks import LIMIT, forked

GRADIENT, METRIC, DRIFT = 5e-7, 5e-7, 5e-8  # weights are in fp64, some sums in fp32

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


def results_of(count, size, folder, limit=LIMIT):
    codes, outputs = forked("matrix.py", folder, size, count, limit)("ranks")
    assert codes == [0] * count, "\n".join(outputs)
    return torch.load(folder / "results.pt", weights_only=False)


def test_the_truth_moves_and_depends_on_what_is_computed():
    """Where the trajectories were all the same, or stood still, the comparisons would prove nothing."""
    ends = [truth(key)["weights"][-1] - truth(key)["weights"][0] for key in {c.truth for c in cases("small")}]
    moved = sorted(end.abs().max().item() for end in ends)
    assert moved[0] == 0 and moved[2] > LEARNING_RATE / 2  # "none" without a KL stands still
    assert len({end.sum().item() for end in ends}) == len(ends)


def test_two_ranks_give_the_trajectory_of_one(tmp_path):
    results = results_of(2, "small", tmp_path, limit=3 * LIMIT)
    signed = compared(results)
    assert set(results) == set(cases("small")) and len(signed) > len(results) - 5
    assert abs(sum(signed) / len(signed)) <= DRIFT


@pytest.mark.slow
@pytest.mark.parametrize("count", [1, 2, 3, 4])
def test_every_number_of_ranks_gives_the_trajectory_of_one(count, tmp_path):
    signed = compared(results_of(count, "whole", tmp_path, limit=900))
    assert abs(sum(signed) / len(signed)) <= DRIFT

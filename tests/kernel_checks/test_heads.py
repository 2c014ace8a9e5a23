"""The judge of the losses' kernels finds what is wrong, and lets pass what rounding does."""

import torch

from fastgrpo import Objective
from fastgrpo.kernel_checks import heads


def test_a_wrong_gradient_is_beyond_what_is_allowed():
    head = heads.random_head(20, 8, 30)
    objective = Objective(beta=0.1)
    scalar = heads.policy_scalar(head.rows(objective), objective)
    true = heads.truth(head, scalar)
    right = heads.judge(heads.plain(head, scalar), head, scalar)
    assert right.keys() == {"logps", "entropy", "loss", "hidden", "weight"}
    assert all(0 <= error <= allowed < 2e-5 for error, allowed in right.values())
    for name in right:
        wrong = heads.judge({name: true[name] * 1.001 + 1e-3}, head, scalar)
        assert wrong[name][0] > wrong[name][1], name


def test_bf16_errs_more_and_may():
    head = heads.random_head(20, 8, 30, torch.bfloat16)
    objective = Objective(beta=0.1)
    scalar = heads.policy_scalar(head.rows(objective), objective)
    judged = heads.judge(heads.plain(head, scalar), head, scalar)
    assert 1e-4 < judged["hidden"][0] <= judged["hidden"][1] < 0.1

"""Heads to try the Triton kernels on, and the tolerance that they are held to, from fastgrpo/kernel_checks/heads.py."""

from fastgrpo.kernel_checks import heads
from fastgrpo.kernel_checks.heads import FACTORS, SLACK, Head, error, judge, plain, random_head, truth


def check(ours, head, scalar):
    """ours: a dict with some of truth's entries."""
    for name, (mine, bound) in judge(ours, head, scalar).items():
        assert mine <= bound, (name, mine, bound)


def policy_scalar(head, objective, **fields):
    """The loss of `objective` as a function of logps and entropy, for truth and plain."""
    return heads.policy_scalar(head.rows(objective, **fields), objective)


__all__ = ["FACTORS", "SLACK", "Head", "check", "error", "plain", "policy_scalar", "random_head", "truth"]

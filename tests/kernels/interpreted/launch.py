"""What every launcher does: on which device it launches, and what it does with strides.

Run by test_interpreted.py, in a process with TRITON_INTERPRET=1.
"""

import pytest
import torch
from head_runs import run_grpo, run_logprob
from heads import random_head

from fastgrpo import Objective
from fastgrpo.kernels import launch
from fastgrpo.kernels import logits as logits_kernels

DAPO = Objective(beta=0.1)


def test_a_row_of_any_stride():
    """torch calls one row contiguous whatever its stride; bulk copies refuse a pitch of 0."""
    row = torch.randn(16).as_strided((1, 16), (0, 1))
    assert row.is_contiguous() and row.contiguous().stride() == (0, 1)
    assert launch.rows_contiguous(row).stride() == (16, 1) and torch.equal(launch.rows_contiguous(row), row)
    column = torch.randn(16, 1).T
    assert launch.rows_contiguous(column).stride() == (16, 1)
    wide = torch.randn(5, 40)[:, 8:24]
    assert launch.rows_contiguous(wide) is wide


@pytest.mark.parametrize("softcap", [None, 5.0])
def test_every_launch_is_on_the_device_of_its_tensors(softcap, monkeypatch):
    """Triton launches on the current device, whatever device the tensors are on."""
    from triton.runtime.interpreter import GridExecutor

    inside, launches = [], []

    class Guard:
        def __init__(self, tensor):
            self.tensor = tensor

        def __enter__(self):
            inside.append(self.tensor)

        def __exit__(self, *_):
            inside.pop()

    call = GridExecutor.__call__

    def watched(self, *args, **kwargs):
        launches.append(len(inside))
        return call(self, *args, **kwargs)

    monkeypatch.setattr(torch.cuda, "device_of", Guard)
    monkeypatch.setattr(GridExecutor, "__call__", watched)
    head = random_head(20, 16, 50, softcap=softcap)
    bonus = torch.full((20,), 0.3 / 20)
    run_grpo(head, Objective(beta=0.1, entropy_coef=0.3), chunk_rows=8, entropy_weights=bonus)
    run_logprob(head)
    logits = (head.hidden @ head.weight.T).requires_grad_()
    for inplace in (False, True):
        given = logits.clone()
        loss, _ = logits_kernels.logits_grpo_loss(given, head.rows(DAPO), DAPO, inplace=inplace)
        torch.autograd.grad(2 * loss, logits)
    assert len(launches) > 20 and min(launches) == 1 and not inside

"""The loss of given log-probs on the CPU. linear_grpo.py runs every objective.

Run by test_interpreted.py, in a process with TRITON_INTERPRET=1.
"""

import pytest
import torch
from loss_runs import OBJECTIVES, N, check_compiled, device_only_mask, run, same

from fastgrpo import grpo_loss


@pytest.mark.parametrize("name", ("dapo", "gspo"))
def test_grpo_loss(name, batch, monkeypatch):
    _, _, kwargs = batch
    del kwargs["targets"]
    kwargs |= OBJECTIVES[name]
    logps = kwargs["old_logps"] + 0.2 * torch.randn(N)
    theirs = run(grpo_loss, (logps,), kwargs, "chunked")
    same(run(grpo_loss, (logps,), kwargs, "triton"), theirs)
    device_only_mask(monkeypatch)
    same(run(grpo_loss, (logps,), kwargs, "triton"), theirs)


def test_torch_compile(batch):
    hidden, weight, kwargs = batch
    kwargs["rows"] = torch.arange(0, N, 2)
    targets = kwargs.pop("targets")

    def loss(hidden, weight):
        return grpo_loss((hidden * weight[targets]).sum(-1), backend="triton", **kwargs).loss

    check_compiled(loss, hidden, weight, "aot_eager")

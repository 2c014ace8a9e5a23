"""A ragged batch, runs of the public losses on interpreted kernels, and their comparison with the chunked backend."""

import torch

import fastgrpo.loss.losses
from fastgrpo import logits_grpo_loss
from fastgrpo.kernel_checks import cases

LENGTHS = [3, 7, 1, 9, 0, 4]
N, D, V = sum(LENGTHS), 16, 70
OBJECTIVES = {
    "dapo": {"beta": 0.1}, "grpo": {"loss_type": "grpo"},
    "gspo": {"importance_sampling_level": "sequence", "beta": 0.1}, "bonus": {"entropy_coef": 0.2},
    "vespo": {"loss_type": "vespo", "importance_sampling_mode": "token_mask"},
}  # fmt: skip


def ragged_batch():
    leaves, tokens = cases.random_head(N, D, V, torch.float32)
    return leaves["hidden"].detach(), leaves["weight"].detach(), {
        "targets": tokens["targets"], "advantages": torch.randn(len(LENGTHS)), "mask": torch.rand(N) > 0.3,
        "cu_seqlens": torch.tensor([0, *LENGTHS]).cumsum(0), "old_logps": tokens["old_logps"],
        "ref_logps": tokens["ref_logps"],
    }  # fmt: skip


def device_only_mask(monkeypatch):
    """Do as on a GPU, where the host does not learn which tokens carry gradient."""
    monkeypatch.setattr(fastgrpo.loss.losses, "compacts", lambda compact, backend, tokens: False)


def run(function, tensors, kwargs, backend, factor=1.0):
    """Return (GRPOLossOutput, gradients). Logits are handed over as a copy, since they may be overwritten."""
    leaves = [x.detach().clone().requires_grad_() for x in tensors]
    given = [leaves[0].clone()] if function is logits_grpo_loss else leaves
    out = function(*given, backend=backend, **kwargs)
    return out, torch.autograd.grad(out.loss * factor, leaves)


def same(ours, theirs):
    (a, a_grads), (b, b_grads) = ours, theirs
    torch.testing.assert_close(a.loss, b.loss, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(a.logps, b.logps, rtol=1e-5, atol=5e-6)
    assert torch.equal(a.active, b.active) and a.metrics.keys() == b.metrics.keys()
    for name in a.metrics:
        torch.testing.assert_close(a.metrics[name], b.metrics[name], rtol=1e-4, atol=2e-6, check_dtype=False)
    for x, y in zip(a_grads, b_grads, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-4, atol=1e-6)

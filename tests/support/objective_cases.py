"""Objectives by name, and a ragged batch to try them on: for the tests of objectives and of peers."""

from types import SimpleNamespace

import oracle
import torch

from fastgrpo import Objective, linear_grpo_loss
from fastgrpo.kernels import reference
from fastgrpo.kernels.objectives import PolicyRows, compute_dtype

LOSS_TYPES = {
    "grpo": {"loss_type": "grpo"},
    "bnpo": {"loss_type": "bnpo"},
    "dapo": {"loss_type": "dapo"},
    "dr_grpo": {"loss_type": "dr_grpo", "max_completion_length": 11},
    "cispo": {"loss_type": "cispo", "epsilon_high": 1.2},
    "sapo": {"loss_type": "sapo"},
    "vespo": {"loss_type": "vespo", "importance_sampling_mode": "token_truncate"},
    "luspo": {"loss_type": "luspo", "importance_sampling_level": "sequence"},
    "gspo": {"loss_type": "grpo", "importance_sampling_level": "sequence"},
}
SEQUENCE = {"importance_sampling_level": "sequence"}
# Cases that TRL has too: the knobs are its knobs.
CASES = LOSS_TYPES | {
    "dapo-sequence": {**LOSS_TYPES["dapo"], **SEQUENCE},
    "cispo-sequence": {**LOSS_TYPES["cispo"], **SEQUENCE},
    "sapo-sequence": {**LOSS_TYPES["sapo"], **SEQUENCE},
    "clip-higher": {"epsilon": 0.1, "epsilon_high": 0.5},
    "delta": {"delta": 1.25, "epsilon_high": 0.1},
    "gspo-delta": {**LOSS_TYPES["gspo"], "delta": 1.1, "epsilon": 0.05},
    "sapo-temperatures": {"loss_type": "sapo", "sapo_temperature_pos": 2.0, "sapo_temperature_neg": 0.5},
    "vespo-shape": {**LOSS_TYPES["vespo"], "vespo_k_pos": 1.0, "vespo_lambda_pos": 0.5, "vespo_lambda_neg": 1.5},
    "entropy": {"entropy_coef": 0.3},
    "entropy-luspo-k3": {**LOSS_TYPES["luspo"], "entropy_coef": -0.2, "beta": 0.1},
    **{f"{name}-k3": {**knobs, "beta": 0.3} for name, knobs in LOSS_TYPES.items()},
    **{
        f"{name}-corrected": {**LOSS_TYPES[name], "beta": 0.3, "use_bias_correction_kl": True}
        for name in ("dapo", "cispo", "gspo", "luspo", "vespo")
    },
}
OWN_CASES = {
    f"{kl}{'-corrected' * corrected}-{name}": {
        **LOSS_TYPES[name], "beta": 0.3, "kl": kl, "use_bias_correction_kl": corrected
    }
    for kl in ("k1", "k2", "abs")
    for corrected in (False, True)
    for name in ("dapo", "gspo")
}  # fmt: skip
# Cases with sampler_logps.
BOUNDS = {"importance_sampling_clip_min": 0.8, "importance_sampling_clip_max": 1.3}
SAMPLER_CASES = {
    **{
        f"{name}-{mode}": {**LOSS_TYPES[name], "importance_sampling_mode": mode, **BOUNDS}
        for name in ("dapo", "gspo", "cispo", "sapo")
        for mode in ("token_truncate", "token_mask", "sequence_truncate", "sequence_mask")
    },
    "default-bounds": {"beta": 0.3},
    "no-cap": {"importance_sampling_mode": "sequence_mask", "importance_sampling_clip_max": None},
    "vespo-token_truncate": {"loss_type": "vespo", "importance_sampling_mode": "token_truncate", **BOUNDS},
    "vespo-token_mask": {"loss_type": "vespo", "importance_sampling_mode": "token_mask"},
    "luspo-token_truncate": {**LOSS_TYPES["luspo"], "importance_sampling_mode": "token_truncate", **BOUNDS},
}
V, D = 23, 6


def problem(dtype=torch.float64, lengths=(7, 4, 6, 0, 5, 2), seed=0, width=7):
    """A ragged padded batch: everything [B, width]; the third advantage is 0, the fourth sequence is masked out."""
    generator = torch.Generator().manual_seed(seed)

    def noise(*shape, scale=1.0):
        return scale * torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)

    b = len(lengths)
    p = SimpleNamespace(
        hidden=noise(b, width, D),
        weight=noise(V, D),
        bias=noise(V),
        targets=torch.randint(V, (b, width), generator=generator),
        advantages=torch.tensor([1.3, -0.7, 0.0, 0.9, -1.1, 0.4], dtype=dtype)[:b],
        mask=torch.arange(width) < torch.tensor(lengths)[:, None],
        temperature=0.7,
    )
    logps = reference.linear_logprob(
        p.hidden.flatten(0, 1), p.weight, p.targets.flatten(), bias=p.bias, temperature=p.temperature
    ).view(b, width)
    p.old_logps, p.ref_logps = logps + noise(b, width, scale=0.3), logps + noise(b, width, scale=0.5)
    p.sampler_logps = p.old_logps + noise(b, width, scale=0.2)
    return p


def leaves(p):
    return [t.detach().clone().requires_grad_() for t in (p.hidden, p.weight, p.bias)]


def run(p, knobs, *, old=True, sampler=False, **kwargs):
    """Our fused loss and its gradients of hidden, weight, bias."""
    hidden, weight, bias = leaves(p)
    out = linear_grpo_loss(
        hidden, weight, p.targets, p.advantages, mask=p.mask, bias=bias, temperature=p.temperature,
        old_logps=p.old_logps if old else None, ref_logps=p.ref_logps if knobs.get("beta") else None,
        sampler_logps=p.sampler_logps if sampler else None, **knobs, **kwargs,
    )  # fmt: skip
    out.loss.backward()
    return out, [hidden.grad, weight.grad, bias.grad]


def run_reference(p, knobs, *, old=True, sampler=False, rows=None):
    """The truth over the tokens in the mask (or `rows`): (loss, logps, metrics, gradients)."""
    objective = Objective(**knobs)
    mask = p.mask.flatten()
    index = mask.nonzero()[:, 0] if rows is None else rows.flatten().nonzero()[:, 0]
    starts = torch.arange(p.mask.shape[0] + 1) * p.mask.shape[1]
    advantages = p.advantages if p.advantages.ndim == 2 else p.advantages[:, None].expand(p.mask.shape)
    exact = compute_dtype(p.hidden)
    weights = objective.token_weights(mask, starts, dtype=exact)
    entropy_weights = objective.entropy_weights(mask, dtype=exact)
    kept = PolicyRows(
        index=index, targets=p.targets.flatten()[index], temperature=p.temperature,
        advantages=advantages.flatten()[index], weights=weights[index],
        old_logps=p.old_logps.flatten()[index] if old else None, ref_logps=p.ref_logps.flatten()[index],
        lengths=torch.searchsorted(index, starts).diff(),
        sampler_logps=p.sampler_logps.flatten()[index] if sampler else None,
        entropy_weights=entropy_weights[index] if objective.entropy_coef else None,
    )  # fmt: skip
    hidden, weight, bias = leaves(p)
    flat = {"hidden": hidden.detach().flatten(0, 1).requires_grad_(), "weight": weight, "bias": bias}
    loss, logps, metrics, grads = oracle.kept_truth(flat, kept, objective)
    return loss, logps, metrics, [grads["hidden"].view_as(hidden), grads["weight"], grads["bias"]]


def assert_close(actual, expected, tolerance):
    """Relative to the largest entry of what is expected."""
    scale = expected.abs().max().clamp(min=1e-30)
    assert ((actual - expected).abs().max() / scale).item() <= tolerance, (actual, expected)

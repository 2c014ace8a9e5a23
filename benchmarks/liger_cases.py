"""Batches in Liger-Kernel's terms, their truth in fp64, and a table of where Liger differs (docs/integrations.md).

    TRITON_INTERPRET=1 python -m benchmarks.liger_cases [--search]

prints the table or, with --search, the differences over `CASES` that it does not list. The truth is
kernels/reference.py over the tokens of the mask, differentiated by autograd. Liger's class runs on the CPU, and its
Triton function under the interpreter. Without the variable, tests without Triton can use this module.

Shapes: B sequences, T tokens of each (padded), V vocabulary, D hidden.
"""

import sys
import warnings
from types import SimpleNamespace

import torch

from fastgrpo import Objective
from fastgrpo.integrations import liger as ours
from fastgrpo.kernels import reference
from fastgrpo.loss.objective import LOSS_TYPES

V, D, T = 19, 5, 6
RAGGED, FULL = (6, 3, 5, 0, 2), (6, 6, 6, 6, 6)
TEMPERATURE = 0.8
CLOSE = 2e-5  # relative tolerance of fp32 against fp64
DEFAULTS = {
    "loss_type": "dapo", "importance_sampling_level": "token", "beta": 0.0, "use_bias_correction_kl": False,
    "delta": None, "epsilon_low": 0.2, "epsilon_high": 0.2, "max_completion_length": None,
    "sapo_temperature_pos": 1.0, "sapo_temperature_neg": 1.05, "vespo_k_pos": 2.0, "vespo_lambda_pos": 3.0,
    "vespo_k_neg": 3.0, "vespo_lambda_neg": 2.0,
}  # fmt: skip
SEQUENCE = {"importance_sampling_level": "sequence"}
KINDS = {
    **{kind: {"loss_type": kind} for kind in ("grpo", "bnpo", "dapo", "sapo", "luspo", "vespo")},
    "dr_grpo": {"loss_type": "dr_grpo", "max_completion_length": 11},
    "cispo": {"loss_type": "cispo", "epsilon_high": 1.2},
    "cispo-low-cap": {"loss_type": "cispo", "epsilon_high": 0.6},
    **{f"{kind}-sequence": {"loss_type": kind, **SEQUENCE} for kind in ("grpo", "dapo", "sapo", "luspo")},
    "cispo-sequence-low-cap": {"loss_type": "cispo", **SEQUENCE, "epsilon_high": 0.9},
    "delta": {"delta": 1.05, "epsilon_high": 0.5},
    "sequence-delta": {**SEQUENCE, "delta": 1.05, "epsilon_low": 0.05},
}
K3, CORRECTED = {"beta": 0.3}, {"beta": 0.3, "use_bias_correction_kl": True}
FORMS = {
    "plain": ({}, {}),
    "first-update-k3": (K3, {"old": False}),
    "corrected": (CORRECTED, {}),
    "ratio-k3": (K3, {"ratio": "token"}),
    "ratio-first-update-corrected": (CORRECTED, {"ratio": "token", "old": False}),
    "ratio-of-sequences": ({}, {"ratio": "sequence"}),
    "flat-ratio-first-update": ({}, {"ratio": "flat", "old": False}),
}
# Every loss in every form: name -> (settings, options of the batch).
CASES = {f"{kind}-{form}": (KINDS[kind] | FORMS[form][0], FORMS[form][1]) for kind in KINDS for form in FORMS}


def is_right(name, lengths):
    """Return whether Liger supports the case and computes it as in the papers; docs/integrations.md has the others."""
    knobs, options = CASES[name]
    loss_type = knobs.get("loss_type", "dapo")
    if loss_type in ("cispo", "sapo") and knobs.get("importance_sampling_level") == "sequence":
        return False
    padded = lengths == RAGGED and (loss_type == "luspo" or (loss_type == "vespo" and options.get("ratio") == "token"))
    return not padded


def batch(lengths=RAGGED, *, old=True, ratio=None, stray=None, seed=0):
    """Draw a batch in fp32. `lengths` are the tokens of each sequence before the padding.

    `ratio` names the weights against the sampler: "token" [B, T], "sequence" [B, 1], "flat" [B], or None. `stray` puts
    unusual values into the padding: "old" (log-probs of -1000) or "hidden" (infinite states).
    """
    g = torch.Generator().manual_seed(seed)

    def noise(*shape, scale=1.0):
        return scale * torch.randn(*shape, generator=g)

    b = len(lengths)
    hidden, weight, bias = noise(b, T, D), noise(V, D), noise(V)
    ids = torch.randint(V, (b, T), generator=g)
    mask = torch.arange(T) < torch.tensor(lengths)[:, None]
    logps = reference.linear_logprob(hidden.flatten(0, 1), weight, ids.flatten(), bias=bias, temperature=TEMPERATURE)
    logps = logps.view(b, T)
    old_logps, ref_logps = logps + noise(b, T, scale=0.3), logps + noise(b, T, scale=0.5)
    ratios = torch.rand(b, T, generator=g) + 0.5
    if stray == "old":
        old_logps = old_logps.masked_fill(~mask, -1000.0)
    if stray == "hidden":
        hidden = hidden.masked_fill(~mask[..., None], torch.inf)
    return SimpleNamespace(
        hidden=hidden, weight=weight, bias=bias, ids=ids, mask=mask, ref_logps=ref_logps,
        advantages=torch.tensor([1.3, -0.7, 0.0, 0.9, -1.1])[:b], old_logps=old_logps if old else None,
        ratio={None: None, "token": ratios, "sequence": ratios[:, :1], "flat": ratios[:, 0]}[ratio],
    )  # fmt: skip


def truth(p, knobs, num_items=None, token_weights=None):
    """Return (loss, metrics, gradients by name) in fp64 over the masked-in tokens. `token_weights` are [B, T]."""
    knobs = DEFAULTS | knobs
    kind = knobs["loss_type"]
    hidden, weight, bias = (x.double().requires_grad_() for x in (p.hidden, p.weight, p.bias))
    rows = hidden[p.mask]
    logits = rows @ weight.T + bias
    logits.retain_grad()
    counts = p.mask.sum(1)
    sequences, total = len(counts), counts.sum().item()
    lengths = counts.repeat_interleave(counts).double()
    weights = {
        "sequence_mean": 1 / (sequences * lengths), "batch_tokens": torch.full_like(lengths, 1 / total),
        "step_tokens": torch.full_like(lengths, 1 / (num_items or total)),
        "sequence_sum": torch.full_like(lengths, 1 / sequences),
        "sequence_constant": torch.full_like(lengths, 1 / (sequences * (knobs["max_completion_length"] or 1))),
    }[LOSS_TYPES[kind][1]]  # fmt: skip
    weights = weights if token_weights is None else token_weights[p.mask].double()
    clip = (1 - knobs["epsilon_low"], 1 + knobs["epsilon_high"])
    objective = SimpleNamespace(
        **{**vars(Objective()), **knobs}, surrogate=LOSS_TYPES[kind][0], importance_bounds=(0.0, torch.inf),
        clip_high=knobs["epsilon_high"],
        ratio_bounds={"clip": clip, "cispo": (0.0, knobs["epsilon_high"])}.get(LOSS_TYPES[kind][0], (0.0, torch.inf)),
    )  # fmt: skip
    objective.epsilon, objective.importance_sampling_mode = knobs["epsilon_low"], "token_truncate"
    kept = {
        name: getattr(p, name)[p.mask].double() for name in ("old_logps", "ref_logps") if getattr(p, name) is not None
    }
    sampler = None
    if p.ratio is not None:
        ratio = (p.ratio[:, None] if p.ratio.ndim == 1 else p.ratio).double()
        if ratio.shape[1] == 1 and kind == "vespo":  # its W is a product over the tokens
            ratio = ratio ** (1 / counts[:, None].clamp(min=1))
        logps = reference.logits_logprob(logits.detach(), p.ids[p.mask], temperature=TEMPERATURE)
        sampler = kept.get("old_logps", logps) - ratio.expand(p.mask.shape)[p.mask].log()
    loss, _, metrics = reference.logits_grpo_loss(
        logits, p.ids[p.mask], p.advantages.double().repeat_interleave(counts), weights, objective,
        sampler_logps=sampler, lengths=counts, temperature=TEMPERATURE, **kept,
    )  # fmt: skip
    loss.backward()
    dlogits = torch.zeros(*p.mask.shape, V, dtype=torch.float64)
    dlogits[p.mask] = logits.grad
    clipped = metrics["clip_ratio/low_mean"] + metrics["clip_ratio/high_mean"]
    return loss.detach(), [metrics["kl"]] * (knobs["beta"] != 0) + [clipped], {
        "hidden": hidden.grad, "weight": weight.grad, "bias": bias.grad, "logits": dlogits
    }  # fmt: skip


def run_class(module, p, knobs, num_items=None, **reference_inputs):
    """Return (loss, metrics, gradients) of Liger's class or ours, in fp32."""
    knobs = DEFAULTS | knobs
    loss_of = module(temperature=TEMPERATURE, compiled=False, use_ref_model=knobs["beta"] != 0, **knobs)
    leaves = {name: getattr(p, name).clone().requires_grad_() for name in ("hidden", "weight", "bias")}
    loss, metrics = loss_of(
        leaves["hidden"], leaves["weight"], p.ids, p.mask.float(), p.advantages, bias=leaves["bias"],
        old_per_token_logps=p.old_logps, vllm_is_ratio=p.ratio, num_items_in_batch=num_items,
        **(reference_inputs or {"ref_per_token_logps": p.ref_logps if knobs["beta"] else None}),
    )  # fmt: skip
    loss.backward()
    return loss.detach(), list(metrics), {name: leaf.grad for name, leaf in leaves.items()}


def logits_of(p):
    """Return logits [B, T + 1, V] of the batch, with an unused last row per sequence."""
    logits = p.hidden @ p.weight.T + p.bias
    return torch.nn.functional.pad(logits, (0, 0, 0, 1), value=torch.nan)


def function_knobs(knobs):
    """Return the settings under the argument names of the function."""
    knobs = DEFAULTS | knobs
    return {{"epsilon_low": "eps_low", "epsilon_high": "eps_high"}.get(name, name): knobs[name] for name in knobs}


def run_function(function, p, knobs, num_items=None):
    """Return (loss, metrics, gradients) of Liger's function or ours, in fp32, reduced."""
    logits = logits_of(p).requires_grad_()
    loss, metrics = function(
        logits, p.old_logps, p.ref_logps if knobs.get("beta") else None, p.ids, p.advantages, p.mask.int(),
        temperature=TEMPERATURE, inplace=False, reduce=True, vllm_is_ratio=p.ratio, num_items_in_batch=num_items,
        **function_knobs(knobs),
    )  # fmt: skip
    loss.backward()
    return loss.detach(), list(metrics), {"logits": logits.grad[:, :-1]}


def gap(found, true):
    """Return the largest relative difference of loss, metrics and gradients (in norm); inf if one is not finite."""
    pairs = [(found[0], true[0]), *zip(found[1], true[1], strict=True)]
    pairs += [(gradient, true[2][name]) for name, gradient in found[2].items()]
    gaps = [((mine - theirs).norm() / theirs.norm().clamp(min=0.1)).item() for mine, theirs in pairs]
    return max(value if value == value else float("inf") for value in gaps)


# Cases in which Liger differs: description -> settings, and options of the batch.
DIFFERENCES = {
    "luspo": ({"loss_type": "luspo", **SEQUENCE}, {}),
    "luspo, beta 0.3": ({"loss_type": "luspo", **SEQUENCE, "beta": 0.3}, {}),
    "luspo, `vllm_is_ratio` [B, T]": ({"loss_type": "luspo", **SEQUENCE}, {"ratio": "token"}),
    "luspo, token-level ratio": ({"loss_type": "luspo"}, {}),
    "luspo, token-level ratio, no padding": ({"loss_type": "luspo"}, {"lengths": FULL}),
    "vespo, `vllm_is_ratio` [B, T]": ({"loss_type": "vespo"}, {"ratio": "token"}),
    "cispo, sequence-level ratio": ({"loss_type": "cispo", **SEQUENCE, "epsilon_high": 1.1}, {}),
    "sapo, sequence-level ratio": ({"loss_type": "sapo", **SEQUENCE}, {}),
    "dapo, delta 1.05 below 1 + epsilon_high 1.5": ({"delta": 1.05, "epsilon_high": 0.5}, {}),
    "dapo, `old_per_token_logps` -1000 in the padding": ({}, {"stray": "old"}),
    "dapo, infinite states in the padding": ({}, {"stray": "hidden"}),
}
# Cases in which Liger's backward reads a [B, 1] tensor as [B, T]: beyond its end, the values change between runs.
BEYOND = ("luspo, token-level ratio", "luspo, token-level ratio, no padding")
HEADER = "| case | fp64 truth | Liger's class | Liger's function | class and function here |\n|---|---|---|---|---|\n"


def cell(run, implementation, case, true, beyond=False):
    """Return the text for a run: that it agrees with the truth, or the errors of loss and gradient."""
    try:
        loss, _, gradients = run(implementation, *case)
    except ValueError:
        return "error"
    far = max(((mine - true[2][name]).norm() / true[2][name].norm()).item() for name, mine in gradients.items())
    value = "agrees" if (loss - true[0]).abs() <= CLOSE * true[0].abs().clamp(min=0.1) else f"{loss.item():.4f}"
    if beyond:
        return f"{value}, gradient from beyond its tensor"
    if far <= CLOSE:
        return "agrees" if value == "agrees" else f"{value}, gradient agrees"
    return f"{value}, gradient off by {far:.0%}" if far < float("inf") else f"{value}, gradient nan"


def table():
    """Return the table of Liger's differences. Liger's function needs TRITON_INTERPRET=1, or a GPU."""
    from liger_kernel.chunked_loss.grpo_loss import LigerFusedLinearGRPOLoss
    from liger_kernel.transformers.grpo_loss import triton_grpo_loss

    lines = []
    for name, (knobs, options) in DIFFERENCES.items():
        p = batch(**options)
        case, true = (p, knobs), truth(p, knobs)
        here = {
            cell(run_class, ours.LigerFusedLinearGRPOLoss, case, true),
            cell(run_function, ours.triton_grpo_loss, case, true),
        }
        theirs = cell(run_class, LigerFusedLinearGRPOLoss, case, true)
        function = cell(run_function, triton_grpo_loss, case, true, beyond=name in BEYOND)
        lines.append(f"| {name} | {true[0].item():.4f} | {theirs} | {function} | {' / '.join(sorted(here))} |\n")
    return HEADER + "".join(lines)


def search():
    """Run Liger's class and function over all CASES, with and without padding, and return unlisted differences."""
    from liger_kernel.chunked_loss.grpo_loss import LigerFusedLinearGRPOLoss
    from liger_kernel.transformers.grpo_loss import triton_grpo_loss

    found = []
    for name, (knobs, options) in CASES.items():
        for lengths in (FULL, RAGGED):
            p = batch(lengths, **options)
            true, right = truth(p, knobs), is_right(name, lengths)
            if right and gap(run_class(LigerFusedLinearGRPOLoss, p, knobs), true) > CLOSE:
                found.append(f"class: {name} {lengths}")
            right = right and "delta" not in knobs and knobs.get("loss_type") != "luspo"
            if right and gap(run_function(triton_grpo_loss, p, knobs), true) > CLOSE:
                found.append(f"function: {name} {lengths}")
    return f"{2 * len(CASES)} batches, {', '.join(found) or 'nothing beside the table'}\n"


if __name__ == "__main__":
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # numpy under the interpreter
        print(search() if "--search" in sys.argv else table(), end="")

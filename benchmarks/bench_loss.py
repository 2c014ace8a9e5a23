"""linear_grpo_loss against full logits in plain PyTorch and against TRL's fused head, forward and backward.

Shapes: N rows (tokens), V vocabulary, D hidden. Every variant computes the clipped GRPO loss and the gradients of
hidden [N, D] and weight [V, D], with all rows active and with 40% of them. The variants run in turns; what they are
held to is reported in `extra_info["bars"]` and never asserted: the neighbours of a shared machine are no regression.

    pytest benchmarks/bench_loss.py --benchmark-only
    FASTGRPO_BENCH_SMALL=1: tiny shapes and two rounds, to see that it runs; nothing is written to results/.
"""

import os
from functools import partial
from importlib.metadata import version
from typing import NamedTuple

import torch

from benchmarks.compare import append, compare, rows_of
from fastgrpo import Objective, linear_grpo_loss
from fastgrpo.kernels import reference

SMALL = os.environ.get("FASTGRPO_BENCH_SMALL") == "1"
N, D, V = (256, 16, 2048) if SMALL else (2048, 512, 32768)
ROUNDS = 2 if SMALL else 5
ACTIVE = 0.4
TRL_CHUNK_SIZE = 32768  # what its trainer passes
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


class Batch(NamedTuple):
    """hidden [N, D], weight [V, D]; targets, advantages, old_logps, mask [N]."""

    hidden: torch.Tensor
    weight: torch.Tensor
    targets: torch.Tensor
    advantages: torch.Tensor
    old_logps: torch.Tensor
    mask: torch.Tensor


def make_batch():
    torch.manual_seed(0)
    hidden = torch.randn(N, D, device=DEVICE, requires_grad=True)
    weight = (torch.randn(V, D, device=DEVICE) / D**0.5).requires_grad_()
    targets = torch.randint(V, (N,), device=DEVICE)
    with torch.no_grad():
        logps = reference.linear_logprob(hidden, weight, targets)
    old_logps = logps + 0.1 * torch.randn(N, device=DEVICE)
    mask = torch.ones(N, dtype=torch.bool, device=DEVICE)
    return Batch(hidden, weight, targets, torch.randn(N, device=DEVICE), old_logps, mask)


def fastgrpo(batch):
    """Rows that are not active are never projected."""
    output = linear_grpo_loss(
        batch.hidden, batch.weight, batch.targets, batch.advantages, mask=batch.mask, old_logps=batch.old_logps
    )
    return torch.autograd.grad(output.loss, (batch.hidden, batch.weight))


def plain_loss(logps, batch):
    weights = batch.mask / batch.mask.sum()
    return reference.policy_loss(logps, batch.old_logps, None, batch.advantages, weights, Objective())[0]


def full_logits(batch):
    logps = reference.linear_logprob(batch.hidden, batch.weight, batch.targets)
    return torch.autograd.grad(plain_loss(logps, batch), (batch.hidden, batch.weight))


def trl_head():
    """TRL's head as its trainer calls it, less the entropy, which is for the logs; the plain loss on top.

    Like the trainer, it compacts the rows where Triton runs, and scores all of them elsewhere.
    """
    from trl.kernels.chunked_logprob import ChunkedLogProbFunction, _use_triton

    def trl(batch):
        compact = _use_triton(batch.hidden.device)
        logps = ChunkedLogProbFunction.apply(
            batch.hidden[batch.mask] if compact else batch.hidden,
            batch.weight,
            None,
            batch.targets[batch.mask] if compact else batch.targets,
            1.0,
            TRL_CHUNK_SIZE,
            None,
            1.0,
            ("log_probs",),
        )[0]
        if compact:
            logps = logps.new_zeros(batch.mask.shape).masked_scatter(batch.mask, logps)
        else:
            logps = logps.masked_fill(~batch.mask, 0)
        return torch.autograd.grad(plain_loss(logps, batch), (batch.hidden, batch.weight))

    return trl


def same_gradients(gradients, expected):
    for mine, theirs in zip(gradients, expected, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-3, atol=1e-4 * theirs.abs().max().item())


def test_linear_grpo_loss(benchmark):
    heads, missing = {"fastgrpo": fastgrpo, "full logits": full_logits}, {}
    try:
        heads["trl"] = trl_head()
    except ImportError as error:
        missing["trl"] = str(error)
    every = make_batch()
    some = every._replace(mask=torch.arange(N, device=DEVICE) % 5 < 5 * ACTIVE)
    batches = {"all rows": every, f"{ACTIVE:.0%} of the rows": some}
    variants = {}
    for case, batch in batches.items():
        expected = full_logits(batch)
        for head, function in heads.items():
            same_gradients(function(batch), expected)
            variants[head, case] = partial(function, batch)
    results = compare(variants, ROUNDS, DEVICE)

    def ratio(key, one, other):
        return round(results[one][key] / results[other][key], 3)

    all_rows, some_rows = batches
    mine = "fastgrpo", all_rows
    bars = {
        "time, of full logits": (ratio("median_s", mine, ("full logits", all_rows)), 1.0),
        "peak memory, of full logits": (ratio("peak_bytes", mine, ("full logits", all_rows)), 0.2),
        f"time at {some_rows}, of its own at all": (ratio("median_s", ("fastgrpo", some_rows), mine), 0.55),
    }
    if "trl" in heads:
        bars["time, of trl"] = (ratio("median_s", mine, ("trl", all_rows)), 1.0)
    versions = {"trl": "missing" if missing else version("trl")}
    rows = []
    for case in batches:
        chosen = {head: results[head, case] for head in heads}
        rows += rows_of(chosen, **versions, benchmark="linear_grpo_loss", n=N, d=D, v=V, dtype="float32", case=case)
    benchmark.extra_info.update(
        rows=rows,
        missing=missing,
        bars={name: {"value": value, "at most": bar, "met": value <= bar} for name, (value, bar) in bars.items()},
    )
    if not SMALL:
        append(rows, DEVICE)
    benchmark.pedantic(variants[mine], rounds=ROUNDS)

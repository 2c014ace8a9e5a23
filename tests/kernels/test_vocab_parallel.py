"""A head sharded by rows of the vocabulary gives what one process gives, by kernels too (TRITON_INTERPRET=1)."""

import multiprocessing
import os
import warnings
from datetime import timedelta
from functools import partial

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from fastgrpo import linear_grpo_loss, linear_logprob
from fastgrpo.kernels import head_torch, reference
from fastgrpo.loss.dispatch import HAS_TRITON

TRITON = HAS_TRITON and os.environ.get("TRITON_INTERPRET") == "1"
BACKEND, TOLERANCE = ("triton", 5e-6) if TRITON else ("chunked", 1e-10)
DTYPE = torch.float32 if TRITON else torch.float64
N, D, V = 20, 8, 70
CU_SEQLENS = torch.tensor([0, 6, 13, 13, N])
SHARDS = [41, 29] if TRITON else [41, 1, 28]  # rows of each rank: uneven, one with one row
FLAGGED = {3: 60, 7: 5}  # row -> the vocabulary entry 80 nats above the rest: on the other rank, on its target's own
TARGETS = {0: 0, 1: V - 1, 2: 40, 3: 2, 4: 41, 7: 30}  # the first and the last id, the shards' border
KNOBS = {
    "gspo": {"loss_type": "grpo", "importance_sampling_level": "sequence"},
    "softcap": {"logit_softcap": 20.0, "entropy_coef": 0.3, "beta": 0.2},
}
if not TRITON:
    KNOBS["vespo-bonus"] = {"loss_type": "vespo", "entropy_coef": 0.3}


def problem(dtype):
    generator = torch.Generator().manual_seed(2)
    noise = partial(torch.randn, generator=generator, dtype=torch.float64)
    head = {"hidden": noise(N, D), "weight": noise(V, D), "bias": noise(V)}
    for row, entry in FLAGGED.items():
        head["weight"][entry] += 70 * head["hidden"][row] / head["hidden"][row].square().sum()
    targets = torch.randint(V, (N,), generator=generator)
    targets[list(TARGETS)] = torch.tensor(list(TARGETS.values()))
    logps = reference.linear_logprob(**head, targets=targets, temperature=0.8)
    assert all(logps[row] < -75 for row in FLAGGED)
    rest = {"targets": targets, "advantages": noise(N), "mask": torch.rand(N, generator=generator) < 0.8,
            "old_logps": logps + 0.3 * noise(N), "ref_logps": logps + 0.3 * noise(N)}  # fmt: skip
    rest = {name: x.to(dtype) if x.is_floating_point() else x for name, x in rest.items()}
    return {name: x.to(dtype) for name, x in head.items()}, {**rest, "temperature": 0.8, "cu_seqlens": CU_SEQLENS}


def set_chunk(rows):
    head_torch.chunk_rows = lambda *_: rows
    if TRITON:
        from fastgrpo.kernels import head

        function = head.linear_grpo_loss
        head.linear_grpo_loss = partial(getattr(function, "func", function), chunk_rows=rows)


def results(head, rest, group, backend):
    found = {}
    for size in (100, 4) if TRITON else (100, 9, 4):  # one chunk, chunks of sequences, sequences longer than a chunk
        set_chunk(size)
        for name, knobs in KNOBS.items():
            leaves = {key: value.detach().clone().requires_grad_() for key, value in head.items()}
            out = linear_grpo_loss(**leaves, return_entropy=True, process_group=group, backend=backend, **rest, **knobs)
            (1.5 * out.loss).backward()
            found[name, size] = {"loss": out.loss.detach(), "logps": out.logps, "entropy": out.metrics["entropy"]}
            found[name, size] |= {key: leaf.grad for key, leaf in leaves.items()}
    for summed in (True, False):
        leaves = {key: value.detach().clone().requires_grad_() for key, value in head.items()}
        logps, entropy = linear_logprob(
            **leaves, targets=rest["targets"], temperature=0.8, return_entropy=True, process_group=group,
            sum_hidden_grad=summed, backend=backend,
        )  # fmt: skip
        (logps * rest["advantages"] + entropy).sum().backward()
        if group is not None and not summed:
            dist.all_reduce(leaves["hidden"].grad, group=group)
        found["linear_logprob", summed] = {"logps": logps.detach(), "entropy": entropy.detach()}
        found["linear_logprob", summed] |= {key: leaf.grad for key, leaf in leaves.items()}
    return found


def check(group):
    rank = dist.get_rank()
    head, rest = problem(DTYPE)
    expected = results(head, rest, None, "chunked")
    sharded = {key: value.split(SHARDS)[rank] if key != "hidden" else value for key, value in head.items()}
    actual = results(sharded, rest, group, BACKEND)
    for case, values in expected.items():
        for name, whole in values.items():
            value = whole.split(SHARDS)[rank] if name in ("weight", "bias") else whole
            scale = whole.abs().max().clamp(min=1 if name == "loss" else 0)  # the loss sums terms of both signs
            assert actual[case][name].dtype == value.dtype and actual[case][name].shape == value.shape
            error = (actual[case][name] - value).abs().max()
            assert value.isfinite().all() and error <= TOLERANCE * scale, (case, name)
    replicated = torch.cat([values[name].flatten() for values in actual.values() for name in ("logps", "hidden")])
    first = replicated.clone()
    dist.broadcast(first, 0, group=group)
    assert torch.equal(first, replicated)  # ranks may not drift apart


def check_errors(group):
    head, rest = problem(DTYPE)
    half = {**head, "weight": head["weight"][:5], "bias": None}
    with pytest.raises(ValueError, match=rf"targets must be in \[0, {5 * len(SHARDS)}\)"):
        linear_grpo_loss(**half, **{**rest, "targets": rest["targets"] + 100}, process_group=group, backend=BACKEND)
    leaf = head["weight"].split(SHARDS)[dist.get_rank()].clone().requires_grad_()  # no row is kept
    rest |= {"mask": torch.zeros(N)}
    out = linear_grpo_loss(head["hidden"], leaf, **rest, process_group=group, backend=BACKEND)
    out.loss.backward()
    assert out.loss == 0 and (leaf.grad == 0).all()


def check_bounded(group, tau=0.2):
    """With a tolerance each rank leaves out columns of its shard, and the bound holds for the whole vocabulary."""
    set_chunk(100)
    generator = torch.Generator().manual_seed(4)
    hidden, weight = (torch.randn(n, 24, generator=generator, dtype=torch.float64) for n in (14, 400))
    targets, advantages = torch.randint(400, (14,), generator=generator), torch.randn(14, generator=generator).double()
    hidden = (2 * hidden).requires_grad_()
    mine = weight.chunk(dist.get_world_size())[dist.get_rank()].clone().requires_grad_()
    exact = linear_grpo_loss(hidden, weight, targets, advantages)
    out = linear_grpo_loss(hidden, mine, targets, advantages, backward_tolerance=tau, process_group=group)
    assert abs(out.loss - exact.loss) < 1e-12
    (whole,) = torch.autograd.grad(exact.loss, hidden)
    found, head = torch.autograd.grad(out.loss, (hidden, mine))
    g = (advantages / 14).abs() * (1 - exact.logps.exp())  # the ratio is 1
    assert ((found - whole).norm(dim=1) <= tau * g * weight.norm(dim=1).max()).all()
    assert 0.2 * tau < out.metrics["head/dropped_mass"] <= tau and out.metrics["head/kept_columns"] < 0.9
    left_out = (head == 0).all(1).sum()
    dist.all_reduce(left_out, group=group)
    assert abs(1 - left_out / 400 - out.metrics["head/kept_columns"]) < 1e-6
    first = found.clone()
    dist.broadcast(first, 0, group=group)
    assert torch.equal(first, found)


def worker(rank, folder):
    torch.set_num_threads(1)
    warnings.simplefilter("ignore", RuntimeWarning)  # numpy warns of every exp that overflows on its way to a flag
    torch.utils.deterministic.fill_uninitialized_memory = True
    torch.use_deterministic_algorithms(True, warn_only=True)
    store, count = dist.FileStore(f"{folder}/store", len(SHARDS)), len(SHARDS)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=count, timeout=timedelta(seconds=120))
    check(dist.group.WORLD)
    check_errors(dist.group.WORLD)
    if not TRITON:
        check_bounded(dist.group.WORLD)
    dist.barrier()
    dist.destroy_process_group()


def test_equals_one_process(tmp_path):
    multiprocessing.set_forkserver_preload(["torch", "fastgrpo.loss"])
    mp.start_processes(worker, args=(str(tmp_path),), nprocs=len(SHARDS), start_method="forkserver")

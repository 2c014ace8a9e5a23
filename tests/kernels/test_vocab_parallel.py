"""A head sharded by vocabulary rows over 2 and 4 processes gives what one process gives."""

import multiprocessing
import traceback
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from fastgrpo import linear_grpo_loss, linear_logprob
from fastgrpo.kernels import head_torch, reference

N, D = 14, 5
CU_SEQLENS = torch.tensor([0, 5, 9, 9, 14])
SHARDS = {2: [9, 12], 4: [7, 1, 8, 5]}  # rows of each rank: uneven, one rank with a single row
V = 21
KNOBS = {
    "dapo-k3": {"beta": 0.2},
    "gspo": {"loss_type": "grpo", "importance_sampling_level": "sequence"},
    "vespo-entropy": {"loss_type": "vespo", "entropy_coef": 0.3},
}


def problem(dtype=torch.float64):
    generator = torch.Generator().manual_seed(2)

    def noise(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    head = {"hidden": noise(N, D).to(dtype), "weight": noise(V, D).to(dtype), "bias": noise(V).to(dtype)}
    if dtype == torch.float64:
        head["weight"][17] += 40 * head["hidden"][3].sign()  # one logit far above the rest, on one rank
    targets = torch.randint(V, (N,), generator=generator)
    targets[:3] = torch.tensor([0, V - 1, 8])  # the first and the last id, and a shard's border
    logps = reference.linear_logprob(**head, targets=targets, temperature=0.8)
    mask = torch.rand(N, generator=generator) < 0.8
    rest = {"mask": mask, "old_logps": logps + 0.3 * noise(N), "temperature": 0.8}
    return head, targets, noise(N), rest, logps + 0.3 * noise(N)


def results(head, targets, advantages, rest, ref, group):
    """Everything the two public functions return, and every gradient, by name."""
    found = {}
    for size in (100, 6, 3):  # one chunk, chunks of sequences, sequences longer than a chunk
        head_torch.chunk_rows = lambda vocab_size, size=size: size
        for name, knobs in KNOBS.items():
            leaves = {key: value.detach().clone().requires_grad_() for key, value in head.items()}
            out = linear_grpo_loss(
                **leaves, targets=targets, advantages=advantages, cu_seqlens=CU_SEQLENS, return_entropy=True,
                ref_logps=ref if "beta" in knobs else None, process_group=group, **rest, **knobs,
            )  # fmt: skip
            (1.5 * out.loss).backward()
            found[name, size] = {"loss": out.loss.detach(), "logps": out.logps, "entropy": out.metrics["entropy"]}
            found[name, size] |= {key: leaf.grad for key, leaf in leaves.items()}
        for summed in (True, False):
            leaves = {key: value.detach().clone().requires_grad_() for key, value in head.items()}
            logps, entropy = linear_logprob(
                **leaves, targets=targets, temperature=0.8, return_entropy=True, process_group=group,
                sum_hidden_grad=summed,
            )  # fmt: skip
            (logps * advantages + entropy).sum().backward()
            if group is not None and not summed:
                dist.all_reduce(leaves["hidden"].grad, group=group)
            case = "linear_logprob", summed, size
            found[case] = {"logps": logps.detach(), "entropy": entropy.detach()}
            found[case] |= {key: leaf.grad for key, leaf in leaves.items()}
    return found


def shard(tensor, rank, sizes):
    return tensor.split(sizes)[rank]


def check(group, sizes, dtype, tolerance):
    """This rank's results against the whole head on this process alone."""
    rank = dist.get_rank(group)
    head, *rest = problem(dtype)
    expected = results(head, *rest, group=None)
    sharded = {key: shard(value, rank, sizes) if key != "hidden" else value for key, value in head.items()}
    actual = results(sharded, *rest, group=group)
    for case, values in expected.items():
        for name, whole in values.items():
            value = shard(whole, rank, sizes) if name in ("weight", "bias") else whole
            scale = whole.abs().max().clamp(min=1 if name == "loss" else 0)  # the loss sums terms of both signs
            assert actual[case][name].dtype == value.dtype and actual[case][name].shape == value.shape
            assert (actual[case][name] - value).abs().max() <= tolerance * scale, (case, name)
    replicated = torch.cat([values[name].flatten() for values in actual.values() for name in ("logps", "hidden")])
    first = replicated.clone()
    dist.broadcast(first, 0, group=group)
    assert torch.equal(first, replicated)  # ranks may not drift apart


def check_errors(group):
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    head, targets, advantages, rest, _ = problem()
    empty = {**head, "weight": head["weight"][: 0 if rank else V], "bias": None}
    with pytest.raises(ValueError, match=r"at least one row on every rank of process_group, got \[21, 0"):
        linear_logprob(**empty, targets=targets, process_group=group)
    half = {**head, "weight": head["weight"][:5], "bias": None}
    with pytest.raises(ValueError, match=rf"targets must be in \[0, {5 * size}\)"):
        linear_grpo_loss(**half, targets=targets + 100, advantages=advantages, process_group=group, **rest)


def check_bounded(group, tau=0.2):
    """With a tolerance each rank leaves out columns of its shard, and the bound holds for the whole vocabulary."""
    head_torch.chunk_rows = lambda vocab_size: 100  # one chunk, which keeps one set of columns
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    generator = torch.Generator().manual_seed(4)
    hidden, weight = (torch.randn(n, 24, generator=generator, dtype=torch.float64) for n in (N, 400))
    targets, advantages = torch.randint(400, (N,), generator=generator), torch.randn(N, generator=generator)
    hidden = (2 * hidden).requires_grad_()
    mine = weight.chunk(size)[rank].clone().requires_grad_()
    exact = linear_grpo_loss(hidden, weight, targets, advantages.double())
    out = linear_grpo_loss(
        hidden, mine, targets, advantages.double(), backward_tolerance=tau, process_group=group
    )  # fmt: skip
    assert abs(out.loss - exact.loss) < 1e-12
    (whole,) = torch.autograd.grad(exact.loss, hidden)
    found, head = torch.autograd.grad(out.loss, (hidden, mine))
    g = (advantages / N).double().abs() * (1 - exact.logps.exp())  # the ratio is 1
    assert ((found - whole).norm(dim=1) <= tau * g * weight.norm(dim=1).max()).all()
    assert 0.2 * tau < out.metrics["head/dropped_mass"] <= tau and out.metrics["head/kept_columns"] < 0.9
    left_out = (head == 0).all(1).sum()
    dist.all_reduce(left_out, group=group)
    assert abs(1 - left_out / 400 - out.metrics["head/kept_columns"]) < 1e-6
    first = found.clone()
    dist.broadcast(first, 0, group=group)
    assert torch.equal(first, found)


def worker(rank, folder):
    """Every group of ranks in turn, the smaller one a part of the world; what fails is written down for its test."""
    torch.set_num_threads(1)
    store = dist.FileStore(f"{folder}/store", max(SHARDS))
    dist.init_process_group("gloo", store=store, rank=rank, world_size=max(SHARDS), timeout=timedelta(seconds=60))
    for world, sizes in SHARDS.items():
        group = dist.new_group(range(world))
        if rank < world:
            try:
                check(group, sizes, torch.float64, 1e-10)
                check(group, sizes, torch.float32, 3e-6)
                check_errors(group)
                check_bounded(group)
                found = "as one process"
            except Exception:
                found = traceback.format_exc()
            Path(folder, f"{world}-{rank}").write_text(found)
    dist.barrier()
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """What each rank found, by size of the group: the processes start once, from a server that has imported torch."""
    folder = tmp_path_factory.mktemp("ranks")
    multiprocessing.set_forkserver_preload(["torch", "fastgrpo.loss"])
    mp.start_processes(worker, args=(str(folder),), nprocs=max(SHARDS), start_method="forkserver")
    return {world: [Path(folder, f"{world}-{rank}").read_text() for rank in range(world)] for world in SHARDS}


@pytest.mark.parametrize("world", SHARDS)
def test_equals_one_process(found, world):
    assert found[world] == ["as one process"] * world, "\n".join(found[world])

"""The Triton kernels of a head sharded by vocabulary rows over 2 processes give what one process gives.

Run by test_interpreted.py, in a process with TRITON_INTERPRET=1.
"""

import warnings
from datetime import timedelta
from functools import partial

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

import fastgrpo.loss.dispatch
from fastgrpo import linear_grpo_loss, linear_logprob
from fastgrpo.kernels import head as head_kernels
from fastgrpo.kernels import head_torch, launch, reference

N, D, V = 20, 8, 70
SHARDS = [41, 29]
CU_SEQLENS = torch.tensor([0, 6, 13, 13, N])
FLAGGED = {3: 60, 7: 5}  # row -> the vocabulary entry 80 nats above the rest: on the other rank, on its target's own
TARGETS = {0: 0, 1: V - 1, 2: 40, 3: 2, 4: 41, 7: 30}  # the first and the last id, the shards' border
CASES = {
    "dapo-k3": {"beta": 0.2},
    "gspo": {"loss_type": "grpo", "importance_sampling_level": "sequence"},
    "bonus": {"entropy_coef": 0.3},
    "softcap": {"logit_softcap": 20.0, "entropy_coef": 0.3},
}


def problem():
    generator = torch.Generator().manual_seed(2)

    def noise(*shape):
        return torch.randn(*shape, generator=generator)

    head = {"hidden": noise(N, D), "weight": noise(V, D), "bias": noise(V)}
    for row, entry in FLAGGED.items():
        head["weight"][entry] += 70 * head["hidden"][row] / head["hidden"][row].square().sum()
    targets = torch.randint(V, (N,), generator=generator)
    targets[list(TARGETS)] = torch.tensor(list(TARGETS.values()))
    logps = reference.linear_logprob(**head, targets=targets, temperature=0.8)
    assert all(logps[row] < -75 for row in FLAGGED)
    rest = {"targets": targets, "advantages": noise(N), "mask": torch.rand(N, generator=generator) < 0.8,
            "old_logps": logps + 0.3 * noise(N), "temperature": 0.8, "cu_seqlens": CU_SEQLENS}  # fmt: skip
    return head, rest, logps + 0.3 * noise(N)


def results(head, rest, ref, group):
    """Everything the two public functions return, and every gradient, by name."""
    found = {}
    whole = head_kernels.linear_grpo_loss
    for chunk_rows in (launch.CHUNK_ROWS, 9):
        head_kernels.linear_grpo_loss = partial(whole, chunk_rows=chunk_rows)
        for name, knobs in CASES.items():
            leaves = {key: value.detach().clone().requires_grad_() for key, value in head.items()}
            out = linear_grpo_loss(
                **leaves, ref_logps=ref if "beta" in knobs else None, return_entropy=True, process_group=group,
                backend="triton", **rest, **knobs,
            )  # fmt: skip
            (1.5 * out.loss).backward()
            outputs = {"loss": out.loss.detach(), "logps": out.logps, "entropy": out.metrics["entropy"]}
            found[chunk_rows, name] = outputs | {key: leaf.grad for key, leaf in leaves.items()}
    head_kernels.linear_grpo_loss = whole
    for summed in (True, False):
        leaves = {key: value.detach().clone().requires_grad_() for key, value in head.items()}
        logps, entropy = linear_logprob(
            **leaves, targets=rest["targets"], temperature=0.8, return_entropy=True, process_group=group,
            sum_hidden_grad=summed, backend="triton",
        )  # fmt: skip
        (logps * rest["advantages"] + entropy).sum().backward()
        if group is not None and not summed:
            dist.all_reduce(leaves["hidden"].grad)
        outputs = {"logps": logps.detach(), "entropy": entropy.detach()}
        found["linear_logprob", summed] = outputs | {key: leaf.grad for key, leaf in leaves.items()}
    return found


def shard(tensor, rank):
    return tensor.split(SHARDS)[rank]


def check(rank):
    """This rank's results against the whole head on this process alone."""
    head, rest, ref = problem()
    expected = results(head, rest, ref, None)
    sharded = {key: shard(value, rank) if key != "hidden" else value for key, value in head.items()}
    actual = results(sharded, rest, ref, dist.group.WORLD)
    for case, values in expected.items():
        for name, whole in values.items():
            value = shard(whole, rank) if name in ("weight", "bias") else whole
            assert actual[case][name].dtype == value.dtype and actual[case][name].shape == value.shape
            assert value.isfinite().all(), (case, name)
            scale = whole.abs().max().clamp(min=1 if name == "loss" else 0)  # the loss sums terms of both signs
            assert (actual[case][name] - value).abs().max() <= 5e-6 * scale, (case, name)
    replicated = torch.cat([values[name].flatten() for values in actual.values() for name in ("logps", "hidden")])
    first = replicated.clone()
    dist.broadcast(first, 0)
    assert torch.equal(first, replicated)  # ranks may not drift apart


def check_bad_targets(rank):
    """A target that no rank has is NaN on every rank, in its row alone. (The public function raises on the CPU.)"""
    head, rest, _ = problem()
    vocabulary = head_torch.Vocabulary.of(shard(head["weight"], rank), dist.group.WORLD)
    for bad in (-1, V, -100):
        targets = rest["targets"].clone()
        targets[5] = bad
        located, group = vocabulary.located(targets, SHARDS[rank])
        logps, _ = head_kernels.linear_logprob(head["hidden"], shard(head["weight"], rank), located, group=group)
        assert logps.isnan().nonzero().flatten().tolist() == [5]


def check_no_rows(rank):
    head, _, _ = problem()
    leaves = {key: head[key].clone().requires_grad_() for key in ("hidden", "weight")}
    leaves["weight"] = shard(head["weight"], rank).clone().requires_grad_()
    out = linear_grpo_loss(
        **leaves, targets=torch.zeros(N, dtype=torch.long), advantages=torch.zeros(N), process_group=dist.group.WORLD,
        backend="triton",
    )  # fmt: skip
    out.loss.backward()
    assert out.loss == 0 and all((leaf.grad == 0).all() for leaf in leaves.values())


def worker(rank, path):
    torch.set_num_threads(1)
    warnings.simplefilter("ignore", RuntimeWarning)  # numpy tells of every exp that overflows on its way to a flag
    torch.utils.deterministic.fill_uninitialized_memory = True
    torch.use_deterministic_algorithms(True, warn_only=True)
    store = dist.FileStore(path, len(SHARDS))
    dist.init_process_group("gloo", store=store, rank=rank, world_size=len(SHARDS), timeout=timedelta(seconds=120))
    check(rank)
    check_bad_targets(rank)
    check_no_rows(rank)
    dist.destroy_process_group()


def test_equals_one_process(tmp_path):
    assert fastgrpo.loss.dispatch.HAS_TRITON
    mp.spawn(worker, args=(str(tmp_path / "store"),), nprocs=len(SHARDS))

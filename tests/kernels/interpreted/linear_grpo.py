"""The fused loss on the CPU in each form (one chunk, several, recomputing), and what autograd asks of it.

Run by test_interpreted.py, in a process with TRITON_INTERPRET=1.
"""

import weakref
from contextlib import contextmanager

import pytest
import torch
from heads import check_grpo, random_head, run_grpo, run_logprob

from fastgrpo import Objective
from fastgrpo.kernels import head as head_kernels
from fastgrpo.kernels import logits as logits_kernels

DAPO = Objective(beta=0.1)


def test_entropy_bonus_of_several_chunks():
    head, objective = random_head(37, 16, 50, softcap=5.0), Objective(beta=0.1, entropy_coef=0.3)
    check_grpo(head, objective, 16, entropy_weights=torch.full((37,), 0.3 / 37))


def test_several_chunks_are_exact_and_repeat_bit_for_bit():
    head = random_head(70, 16, 50, bias=True, temperature="row", softcap=5.0, scale=3.0)
    ours, again = (check_grpo(head, DAPO, 32) for _ in range(2))
    assert all(torch.equal(ours[name], again[name]) for name in ours)


@pytest.mark.parametrize("chunk_rows", [pytest.param(64, marks=pytest.mark.slow), 16], ids=["whole sequences", "parts"])
def test_sequence_level_ratios_over_several_chunks(chunk_rows):
    head, objective = random_head(100, 16, 50), Objective(importance_sampling_level="sequence", beta=0.1)
    check_grpo(head, objective, chunk_rows)


@pytest.mark.parametrize(("chunk_rows", "frozen"), [(16, ("hidden",)), (8192, ("weight", "bias"))])
def test_frozen_inputs_grad_output_and_retain_graph(chunk_rows, frozen):
    head = random_head(37, 16, 50, bias=True)
    full = run_grpo(head, DAPO, chunk_rows=chunk_rows)
    leaves = head.leaves()
    for name in frozen:
        leaves[name].requires_grad_(False)
    loss, _ = head_kernels.linear_grpo_loss(*leaves.values(), head.rows(DAPO), DAPO, chunk_rows=chunk_rows)
    loss.backward(retain_graph=True)
    first = {name: leaf.grad.clone() for name, leaf in leaves.items() if name not in frozen}
    assert all(leaves[name].grad is None for name in frozen)
    assert all(torch.equal(grad, full[name]) for name, grad in first.items())
    (3 * loss).backward()
    for name, grad in first.items():
        torch.testing.assert_close(leaves[name].grad, 4 * grad, rtol=1e-5, atol=1e-8)


def test_gradients_of_several_chunks_are_rounded_once(monkeypatch):
    """Formed before grad_output is known, they stay fp32 until it is: 3 round(x) is not round(3 x)."""
    head, kept = random_head(70, 24, 50, torch.float16), []
    head.targets[:] = (head.hidden.float() @ head.weight.float().T).argmax(-1)  # E <= 1: fp16 holds it
    original = head_kernels.empty_gradients

    def watched(*args, **options):
        sums = original(*args, **options)
        kept.extend(x for x in sums if x is not None)
        return sums

    monkeypatch.setattr(head_kernels, "empty_gradients", watched)
    ours = run_grpo(head, DAPO, chunk_rows=32, factor=3.0)
    assert [x.dtype for x in kept] == [torch.float32] * 2
    for name, total in zip(("hidden", "weight"), kept, strict=True):
        assert torch.equal(ours[name], (3 * total).half()) and not torch.equal(ours[name], 3 * total.half())


def test_one_chunk_of_exponentials_at_a_time_and_none_without_gradient(monkeypatch):
    head, alive, kept = random_head(128, 16, 50), [], []
    empty_exps, rows_fwd = head_kernels.empty_exps, head_kernels.rows_fwd

    def tracked(*args):
        assert not any(reference() is not None for reference in alive), "two chunks of exponentials at once"
        exps = empty_exps(*args)
        if exps.shape[0]:
            alive.append(weakref.ref(exps.untyped_storage()))
        return exps

    monkeypatch.setattr(head_kernels, "empty_exps", tracked)
    run_grpo(head, DAPO, chunk_rows=32)
    assert len(alive) == 4
    monkeypatch.setattr(
        head_kernels, "rows_fwd", lambda head, exps=None, *more: kept.append(exps) or rows_fwd(head, exps, *more)
    )
    with torch.no_grad():
        head_kernels.linear_grpo_loss(*head.leaves().values(), None, head.rows(DAPO), DAPO)
        head_kernels.linear_logprob(*head.leaves().values(), head.targets)
    assert kept == [None, None]


@pytest.mark.parametrize("softcap", [None, 5.0])
def test_every_launch_is_on_the_device_of_its_tensors(softcap, monkeypatch):
    """Triton launches on the current device, whatever device the tensors are on."""
    from triton.runtime.interpreter import GridExecutor

    inside, launches = [], []

    @contextmanager
    def guard(tensor):
        inside.append(tensor)
        yield
        inside.pop()

    call = GridExecutor.__call__

    def watched(self, *args, **kwargs):
        launches.append(len(inside))
        return call(self, *args, **kwargs)

    monkeypatch.setattr(torch.cuda, "device_of", guard)
    monkeypatch.setattr(GridExecutor, "__call__", watched)
    head = random_head(20, 16, 50, softcap=softcap)
    bonus = torch.full((20,), 0.3 / 20)
    run_grpo(head, Objective(beta=0.1, entropy_coef=0.3), chunk_rows=8, entropy_weights=bonus)
    run_logprob(head)
    logits = (head.hidden @ head.weight.T).requires_grad_()
    for inplace in (False, True):
        loss, _ = logits_kernels.logits_grpo_loss(logits.clone(), head.rows(DAPO), DAPO, inplace=inplace)
        torch.autograd.grad(2 * loss, logits)
    assert len(launches) > 20 and min(launches) == 1 and not inside

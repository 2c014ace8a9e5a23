"""Our LigerFusedLinearGRPOLoss and triton_grpo_loss: Liger's signatures, and the values of the reference."""

import inspect
import os
import runpy
import subprocess
import sys

import pytest
import torch
import torch.distributed as dist
from liger_kernel.chunked_loss.grpo_loss import LigerFusedLinearGRPOLoss as TheirClass
from liger_kernel.transformers.grpo_loss import triton_grpo_loss as their_function
from paths import ROOT

from benchmarks import liger_cases
from benchmarks.liger_cases import CASES, CLOSE, batch, gap, logits_of, run_class, run_function, truth
from fastgrpo import Objective
from fastgrpo.integrations import liger
from fastgrpo.integrations.liger import LigerFusedLinearGRPOLoss, step_tokens, triton_grpo_loss


def parameters(function):
    return [(name, p.kind, p.default) for name, p in inspect.signature(function).parameters.items()]


def test_signatures_are_ligers():
    assert parameters(triton_grpo_loss) == parameters(their_function)
    for name in ("__init__", "forward"):
        assert parameters(getattr(LigerFusedLinearGRPOLoss, name)) == parameters(getattr(TheirClass, name))
    settings = {name: default for name, _, default in parameters(LigerFusedLinearGRPOLoss.__init__) if name != "self"}
    assert {name: getattr(LigerFusedLinearGRPOLoss(), name) for name in settings} == settings


def test_liger_need_not_be_installed(monkeypatch):
    monkeypatch.setitem(sys.modules, "liger_kernel", None)
    assert "triton_grpo_loss" in runpy.run_path(liger.__file__)


@pytest.mark.parametrize("name", CASES)
def test_every_loss_equals_the_reference_and_liger_where_liger_is_right(name):
    knobs, options = CASES[name]
    p = batch(**options)
    true = truth(p, knobs)
    assert gap(run_class(LigerFusedLinearGRPOLoss, p, knobs), true) <= CLOSE
    assert gap(run_function(triton_grpo_loss, p, knobs), true) <= CLOSE
    for lengths in (liger_cases.FULL, liger_cases.RAGGED):
        if liger_cases.is_right(name, lengths):
            p = batch(lengths, **options)
            ours, theirs = (run_class(kind, p, knobs) for kind in (LigerFusedLinearGRPOLoss, TheirClass))
            assert gap(ours, theirs) <= CLOSE


def arguments(p, knobs, **more):
    return {
        "old_logp": p.old_logps, "ref_logp": p.ref_logps if knobs.get("beta") else None, "completion_ids": p.ids,
        "advantages": p.advantages, "completion_mask": p.mask, "temperature": liger_cases.TEMPERATURE,
        "vllm_is_ratio": p.ratio, **liger_cases.function_knobs(knobs), **more,
    }  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_every_token_loss_equals_the_reference(name):
    knobs, options = CASES[name]
    p = batch(**options)
    weights = torch.randn(p.mask.shape, generator=torch.Generator().manual_seed(2))
    logits = logits_of(p).requires_grad_()
    losses, kls, clipped = triton_grpo_loss(logits, **arguments(p, knobs, inplace=False))
    assert (losses[~p.mask] == 0).all() and (clipped[~p.mask] == 0).all()
    total = (losses * weights).sum()
    total.backward()
    assert (kls is None) == (not knobs.get("beta"))
    metrics = [values.sum() / p.mask.sum() for values in (kls, clipped) if values is not None]
    found = total.detach(), metrics, {"logits": logits.grad[:, :-1]}
    assert gap(found, truth(p, knobs, token_weights=weights)) <= CLOSE
    assert (logits.grad[:, -1] == 0).all()


@pytest.mark.parametrize("loss_type", ["dapo", "cispo", "vespo", "grpo"])
def test_divides_by_the_tokens_of_the_step(loss_type):
    p, knobs = batch(), {"loss_type": loss_type, "epsilon_high": 1.5}
    true = truth(p, knobs, num_items=37)
    assert gap(run_class(LigerFusedLinearGRPOLoss, p, knobs, num_items=37), true) <= CLOSE
    assert gap(run_class(TheirClass, p, knobs, num_items=torch.tensor(37)), true) <= CLOSE
    if loss_type != "grpo":
        assert gap(run_function(triton_grpo_loss, p, knobs, num_items=37), true) <= CLOSE


@pytest.mark.parametrize("use_ref_model", [True, False])
def test_accepts_hidden_states_of_the_reference(use_ref_model):
    p, noise = batch(), torch.Generator().manual_seed(1)
    states = {
        "ref_input": p.hidden + 0.3 * torch.randn(p.hidden.shape, generator=noise),
        "ref_weight": p.weight + 0.1 * torch.randn(p.weight.shape, generator=noise),
        "ref_bias": p.bias + 0.1 * torch.randn(p.bias.shape, generator=noise),
    }
    results = []
    for kind in (TheirClass, LigerFusedLinearGRPOLoss):
        hidden = p.hidden.clone().requires_grad_()
        loss_of = kind(compiled=False, temperature=liger_cases.TEMPERATURE, use_ref_model=use_ref_model, beta=0.2)
        loss, metrics = loss_of(hidden, p.weight, p.ids, p.mask, p.advantages, p.bias, **states)
        loss.backward()
        assert isinstance(metrics, tuple) and all(m.shape == () and m.dtype == torch.float32 for m in (loss, *metrics))
        results.append((loss.detach(), metrics, {"hidden": hidden.grad}))
    assert gap(*results) <= CLOSE and (results[1][1][0] > 0) == use_ref_model


@pytest.mark.parametrize("name", ["grpo-ratio-k3", "luspo-sequence-plain", "vespo-ratio-of-sequences"])
def test_padding_is_not_read(name):
    knobs, options = CASES[name]
    clean, stray = batch(**options), batch(**options)
    for values in (stray.hidden, stray.old_logps, stray.ref_logps):
        values[~stray.mask] = torch.nan
    stray.ids[~stray.mask] = -100
    if options.get("ratio") == "token":
        stray.ratio[~stray.mask] = 1e9
    assert gap(*(run_class(LigerFusedLinearGRPOLoss, p, knobs) for p in (stray, clean))) == 0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_losses_accept_other_dtypes(dtype):
    p = batch(ratio="token")
    constants = [x.requires_grad_() for x in (p.advantages, p.old_logps, p.ref_logps, p.ratio)]
    logits, hidden = (x.detach().to(dtype).requires_grad_() for x in (logits_of(p), p.hidden))
    loss, _ = triton_grpo_loss(logits, **arguments(p, {"beta": 0.2}, reduce=True))
    weight = p.weight.to(dtype)
    other, _ = LigerFusedLinearGRPOLoss(use_ref_model=False)(hidden, weight, p.ids, p.mask, p.advantages)
    (loss + other).backward()
    assert loss.dtype == other.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    assert logits.grad.dtype == hidden.grad.dtype == dtype
    assert all(x.grad is None for x in (*constants, weight))


@pytest.mark.parametrize("name", ["dapo-corrected", "grpo-sequence-plain"])
def test_the_gradient_overwrites_the_logits_only_in_the_backward(name):
    knobs, options = CASES[name]
    p = batch(**options)
    apart, over = (logits_of(p).requires_grad_() for _ in range(2))
    before = over.detach().clone()
    triton_grpo_loss(apart, **arguments(p, knobs, inplace=False))[0].sum().backward()
    losses, *_ = triton_grpo_loss(over, **arguments(p, knobs))
    assert torch.equal(over.detach().nan_to_num(), before.nan_to_num())
    losses.sum().backward(retain_graph=True)
    assert torch.equal(over.grad, apart.grad) and torch.equal(over.detach(), apart.grad)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        losses.sum().backward()
    loss, _ = triton_grpo_loss(apart, **arguments(p, knobs, reduce=True))
    with pytest.raises(RuntimeError, match="has no second derivatives"):
        torch.autograd.grad(loss, apart, create_graph=True)


@pytest.mark.parametrize("lengths", [(0, 0), (0, 3)])
def test_accepts_sequences_without_tokens(lengths):
    p, knobs = batch(lengths), CASES["grpo-corrected"][0]
    loss, metrics, gradients = run_function(triton_grpo_loss, p, knobs)
    assert gap((loss, metrics, {}), run_class(LigerFusedLinearGRPOLoss, p, knobs)) <= CLOSE
    assert (gradients["logits"][0] == 0).all() and loss.isfinite() and (loss == 0) == (not any(lengths))


@pytest.mark.parametrize("argument, change", [
    ("logits", {"logits": torch.zeros(5, 6, liger_cases.V)}), ("vllm_is_ratio", {"vllm_is_ratio": torch.ones(3, 1)}),
    ("ref_logps", {"beta": 0.1}), ("delta", {"loss_type": "sapo", "delta": 1.5}),
])  # fmt: skip
def test_wrong_arguments_are_rejected_by_name(argument, change):
    p = batch()
    with pytest.raises(ValueError, match=argument):
        triton_grpo_loss(**{"logits": logits_of(p), **arguments(p, {}), **change})
    with pytest.raises(ValueError, match="loss_type"):
        LigerFusedLinearGRPOLoss(loss_type="ppo")
    with pytest.raises(ValueError, match="ref_per_token_logps"):
        run_class(LigerFusedLinearGRPOLoss, p, {"beta": 0.2}, ref_input=p.hidden)


def count_on_rank():
    """DDP averages the gradients: each of two processes divides by the tokens of both over the processes."""
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    mask = torch.tensor([[True, True, False], [True, False, False]][: 2 - rank])  # 3 and 2 tokens
    assert [float(step_tokens(Objective(), mask, count)) for count in (None, 7, torch.tensor(7))] == [2.5, 3.5, 3.5]
    if rank == 0:  # an objective that does not read the count asks nobody: the other rank makes no call
        assert step_tokens(Objective("bnpo"), mask, None) is None
    dist.barrier()
    dist.destroy_process_group()


@pytest.mark.slow
def test_liger_differs_from_the_reference_in_the_documented_cases():
    """The list in docs/integrations.md. Liger's Triton function runs in the interpreter, in a process of its own."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "TRITON_INTERPRET": "1"}
    command = [sys.executable, liger_cases.__file__]
    table, found = (
        subprocess.run([*command, *more], capture_output=True, text=True, cwd=ROOT, env=environment, check=True).stdout
        for more in ((), ("--search",))
    )
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in table.splitlines()[2:]]
    theirs, functions, here = ({row[0] for row in rows if row[i] == "agrees"} for i in (2, 3, 4))
    assert here == set(liger_cases.DIFFERENCES)
    assert theirs == {
        "luspo", "luspo, token-level ratio, no padding", "dapo, delta 1.05 below 1 + epsilon_high 1.5"
    }  # fmt: skip
    assert functions == {"dapo, `old_per_token_logps` -1000 in the padding", "dapo, infinite states in the padding"}
    assert found == f"{2 * len(CASES)} batches, nothing beside the table\n"

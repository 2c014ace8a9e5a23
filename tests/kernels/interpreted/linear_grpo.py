"""The fused loss on the CPU: every objective and form (one chunk, several, recomputing), and what autograd asks of it.

Run by test_interpreted.py, in a process with TRITON_INTERPRET=1.
"""

import math

import pytest
import torch
from head_runs import OPTIONS, run_grpo
from heads import check, error, policy_scalar, random_head, truth

from fastgrpo import Objective
from fastgrpo.kernels import head as head_kernels
from fastgrpo.kernels.objectives import PolicyRows

DAPO = Objective(beta=0.1)


OBJECTIVES = {
    "dapo": {},
    "k1": {"beta": 0.3, "kl": "k1"},
    "k2": {"beta": 0.3, "kl": "k2"},
    "k3": {"beta": 0.3},
    "abs": {"beta": 0.3, "kl": "abs"},
    "corrected": {"beta": 0.3, "use_bias_correction_kl": True},
    "delta": {"delta": 1.25, "epsilon_high": 0.1},
    "cispo": {"loss_type": "cispo", "epsilon_high": 1.2},
    "sapo": {"loss_type": "sapo"},
    "vespo": {"loss_type": "vespo", "importance_sampling_mode": "token_truncate"},
    "gspo": {"importance_sampling_level": "sequence", "beta": 0.1},
    "gspo-corrected": {"importance_sampling_level": "sequence", "beta": 0.3, "use_bias_correction_kl": True},
}


@pytest.mark.parametrize("name", OBJECTIVES)
def test_every_objective(name):
    head, objective = random_head(37, 16, 50), Objective(**OBJECTIVES[name])
    check(run_grpo(head, objective), head, policy_scalar(head, objective))


@pytest.mark.parametrize("mode", ("token_truncate", "token_mask", "sequence_truncate", "sequence_mask"))
@pytest.mark.parametrize("loss_type", ("dapo", "vespo"))
def test_importance_weights_against_the_sampler(mode, loss_type):
    if loss_type == "vespo" and mode.startswith("sequence"):
        pytest.skip("vespo takes token-level weights alone")
    head = random_head(37, 16, 50)
    objective = Objective(loss_type, importance_sampling_mode=mode, importance_sampling_clip_max=1.3)
    sampler = head.old_logps + 0.2 * torch.randn(37, generator=torch.Generator().manual_seed(1))
    sampler[3] = math.nan
    ours = run_grpo(head, objective, sampler_logps=sampler)
    check(ours, head, policy_scalar(head, objective, sampler_logps=sampler))


@pytest.mark.parametrize("softcap", (None, 5.0))
@pytest.mark.parametrize("chunk_rows", (16, 8192))
def test_entropy_bonus(chunk_rows, softcap):
    head, objective = random_head(37, 16, 50, softcap=softcap), Objective(beta=0.1, entropy_coef=0.3)
    bonus = torch.full((37,), 0.3 / 37)
    ours = run_grpo(head, objective, chunk_rows=chunk_rows, entropy_weights=bonus)
    check(ours, head, policy_scalar(head, objective, entropy_weights=bonus))


@pytest.mark.parametrize("options", OPTIONS, ids=lambda o: "-".join(o) or "plain")
def test_several_chunks(options):
    head = random_head(70, 16, 50, **options)
    check(run_grpo(head, DAPO, chunk_rows=32), head, policy_scalar(head, DAPO))


@pytest.mark.parametrize("chunk_rows", (64, 16))  # chunks end with sequences; a sequence is longer than a chunk
def test_sequence_level_ratios_over_several_chunks(chunk_rows):
    head, objective = random_head(100, 16, 50), Objective(importance_sampling_level="sequence", beta=0.1)
    ours = run_grpo(head, objective, chunk_rows=chunk_rows)
    check(ours, head, policy_scalar(head, objective))


def test_dw_over_64_chunks_is_as_good_as_over_one():
    head = random_head(128, 16, 30)
    true = truth(head, policy_scalar(head, DAPO))["weight"]
    one, many = (run_grpo(head, DAPO, chunk_rows=rows)["weight"] for rows in (128, 2))
    assert error("weight", many, true) <= 1.5 * error("weight", one, true) + 1e-6


@pytest.mark.parametrize("frozen", (("hidden",), ("weight",), ("hidden", "weight"), ("weight", "bias")))
@pytest.mark.parametrize("chunk_rows", (16, 8192))
def test_frozen(chunk_rows, frozen):
    head = random_head(37, 16, 50, bias=True)
    full = run_grpo(head, DAPO, chunk_rows=chunk_rows)
    leaves = head.leaves()
    for name in frozen:
        leaves[name].requires_grad_(False)
    loss, _ = head_kernels.linear_grpo_loss(*leaves.values(), head.rows(DAPO), DAPO, chunk_rows=chunk_rows)
    loss.backward()
    for name, leaf in leaves.items():
        assert (leaf.grad is None) if name in frozen else torch.equal(leaf.grad, full[name])


@pytest.mark.parametrize("chunk_rows", (16, 8192))
def test_grad_output_and_retain_graph(chunk_rows):
    head = random_head(37, 16, 50, bias=True)
    scalar = policy_scalar(head, DAPO)
    tripled = run_grpo(head, DAPO, chunk_rows=chunk_rows, factor=3.0)
    del tripled["loss"]
    check(tripled, head, lambda *args: 3 * scalar(*args))
    leaves = head.leaves()
    loss, _ = head_kernels.linear_grpo_loss(*leaves.values(), head.rows(DAPO), DAPO, chunk_rows=chunk_rows)
    first = torch.autograd.grad(loss, list(leaves.values()), retain_graph=True)
    second = torch.autograd.grad(loss, list(leaves.values()))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


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


def test_two_runs_give_the_same_bits():
    head = random_head(70, 16, 50, bias=True)
    first, second = (run_grpo(head, DAPO, chunk_rows=32) for _ in range(2))
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_products_run_once_in_a_checkpointed_region(monkeypatch):
    """The one-chunk form forms gradients in the backward: the first pass of a checkpoint costs its forward alone."""
    head, counts = random_head(37, 16, 50), {"hidden_product": 0, "add_weight_product_": 0}
    for name in counts:
        original = getattr(head_kernels, name)

        def counted(*args, original=original, name=name):
            counts[name] += 1
            return original(*args)

        monkeypatch.setattr(head_kernels, name, counted)
    leaves = head.leaves()

    def region(hidden, weight):
        return head_kernels.linear_grpo_loss(hidden, weight, None, head.rows(DAPO), DAPO)[0]

    torch.utils.checkpoint.checkpoint(region, *leaves.values(), use_reentrant=False).backward()
    assert counts == {"hidden_product": 1, "add_weight_product_": 1}
    torch.testing.assert_close(leaves["weight"].grad, run_grpo(head, DAPO)["weight"])


def test_one_chunk_of_exponentials_at_a_time(monkeypatch):
    head, alive = random_head(128, 16, 50), []
    original = head_kernels.empty_exps

    def tracked(*args):
        import weakref

        assert not any(reference() is not None for reference in alive), "two chunks of exponentials at once"
        exps = original(*args)
        if exps.shape[0]:
            alive.append(weakref.ref(exps.untyped_storage()))
        return exps

    monkeypatch.setattr(head_kernels, "empty_exps", tracked)
    run_grpo(head, DAPO, chunk_rows=32)
    assert len(alive) == 4


def test_no_rows():
    head = random_head(37, 16, 50, bias=True)
    none = torch.arange(0)
    leaves = head.leaves()
    rows = PolicyRows(none, head.targets[:0], 1.0, head.advantages[:0], head.weights[:0], None, None, None)
    loss, outputs = head_kernels.linear_grpo_loss(*leaves.values(), rows, Objective())
    assert loss.item() == 0 and len(outputs["logps"]) == 0
    assert all((g == 0).all() for g in torch.autograd.grad(loss, list(leaves.values())))
    logps, _ = head_kernels.linear_logprob(leaves["hidden"][:0], leaves["weight"], none)
    assert logps.shape == (0,) and (torch.autograd.grad(logps.sum(), leaves["weight"])[0] == 0).all()


def test_no_grad_does_no_gradient_work(monkeypatch):
    head = random_head(37, 16, 50)
    kept = []
    original = head_kernels.rows_fwd
    monkeypatch.setattr(
        head_kernels,
        "rows_fwd",
        lambda head, exps=None, *more: kept.append(exps) or original(head, exps, *more),
    )
    leaves = head.leaves()
    with torch.no_grad():
        head_kernels.linear_grpo_loss(*leaves.values(), None, head.rows(DAPO), DAPO)
        head_kernels.linear_logprob(*leaves.values(), head.targets)
    assert kept == [None, None]

"""A backward with a tolerance leaves out no more of any row than that. Everything else is exact."""

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from fastgrpo import grpo_loss, linear_grpo_loss, linear_logprob
from fastgrpo.kernels import head_torch, reference
from fastgrpo.kernels.head_torch import Vocabulary

N, V, D = 48, 700, 24


def sharp(scale=3.0):
    """Rows whose probability lies on few columns, as those of a language model."""
    hidden = torch.randn(N, D, dtype=torch.float64) * scale
    return hidden, torch.randn(V, D, dtype=torch.float64), torch.randint(V, (N,))


def heads():
    """Rows that are hard to bound, by name: their logits z [N, V] and targets [N]."""
    hidden, weight, targets = sharp()
    logits = hidden @ weight.T
    one_hot = torch.full((N, V), -40.0, dtype=torch.float64).scatter_(1, targets[:, None], 40.0)
    tail = -3 * torch.arange(1, V + 1, dtype=torch.float64).log().expand(N, V)
    return {
        "sharp": (logits, targets), "uniform": (torch.zeros_like(logits), targets),
        "one-hot on another column": (one_hot, (targets + 1) % V),
        "heavy tail": (tail.gather(1, torch.stack([torch.randperm(V) for _ in range(N)])), targets),
        "heavy tail, one order": (tail, targets), "ties": (logits.round(), targets),
        "sure and unsure rows": (torch.where(torch.arange(N)[:, None] % 2 == 0, one_hot, 0), targets),
        "all targets equal": (logits, torch.full_like(targets, 5)),
    }  # fmt: skip


@settings(max_examples=60)
@given(st.sampled_from(sorted(heads())), st.floats(0.003, 0.3), st.sampled_from([torch.float32, torch.float64]))
@example("uniform", 0.003, torch.float32)
@example("sharp", 0.1, torch.float64)
def test_no_row_loses_more_than_the_tolerance(case, tau, dtype):
    torch.manual_seed(0)
    logits, targets = heads()[case]
    g = torch.randn(N, dtype=torch.float64) * torch.logspace(-6, 3, N, dtype=torch.float64)
    g[3] = 0
    probs = logits.to(dtype).softmax(-1)
    before, whole = probs.clone(), Vocabulary(0, V, V, None)
    found = head_torch.bounded_gradient(probs, targets, whole, g, tau)
    assert torch.equal(probs, before)
    truth = logits.softmax(-1)
    exact = -g[:, None] * truth
    exact.scatter_add_(1, targets[:, None], g[:, None])
    if found.dz is None:
        assert found.kept == 1 and not found.dropped.any()
        return
    columns = found.columns
    assert torch.equal(columns, columns.unique()) and set(targets.tolist()) <= set(columns.tolist())
    assert found.kept == pytest.approx(len(columns) / V)
    left_out = torch.ones(V, dtype=torch.bool).index_fill(0, columns, False)
    others = truth.scatter(1, targets[:, None], 0)
    lost = others[:, left_out].sum(1) / others.sum(1)
    assert (lost[g != 0] <= tau).all()
    torch.testing.assert_close(found.dropped[g != 0].double(), lost[g != 0], rtol=1e-3, atol=1e-6)
    error = (exact[:, left_out].abs().sum(1) / (2 * g.abs() * others.sum(1)))[g != 0]
    assert (error <= tau / 2 * (1 + 1e-6)).all()  # the bound of the docstring, on the 1-norm of the row's gradient
    torch.testing.assert_close(found.dz.double(), exact[:, columns], rtol=1e-4, atol=1e-9)


@pytest.mark.parametrize("size, softcap, level", [(100, None, "token"), (20, 20.0, "token"), (20, None, "sequence")])
def test_the_loss_is_exact_and_its_gradient_errs_within_the_bound(size, softcap, level, monkeypatch):
    monkeypatch.setattr(head_torch, "chunk_rows", lambda *_: size)
    hidden, weight, targets = sharp()
    bias = torch.randn(V, dtype=torch.float64)
    leaves = [x.requires_grad_() for x in (hidden, weight, bias)]
    old = reference.linear_logprob(hidden.detach(), weight.detach(), targets, bias=bias.detach(), logit_softcap=softcap)
    data = {"bias": bias, "logit_softcap": softcap, "old_logps": old + 0.1 * torch.randn(N, dtype=torch.float64),
            "ref_logps": old, "beta": 0.04, "mask": torch.arange(N) % 7 != 0, "importance_sampling_level": level,
            "cu_seqlens": torch.tensor([0, 10, 31, N])}  # fmt: skip
    advantages, tau = torch.randn(N, dtype=torch.float64), 0.1
    exact = linear_grpo_loss(hidden, weight, targets, advantages, **data)
    ours = linear_grpo_loss(hidden, weight, targets, advantages, backward_tolerance=tau, **data)
    assert ours.loss == exact.loss and torch.equal(ours.logps, exact.logps)
    assert {name: value for name, value in ours.metrics.items() if "head/" not in name} == exact.metrics
    assert 0.001 < ours.metrics["head/kept_columns"] < 0.9 and 0.01 < ours.metrics["head/dropped_mass"] <= tau
    found, true = (torch.autograd.grad(out.loss, leaves) for out in (ours, exact))
    # |dH_n - exact| <= tau |g_n| m_n max |W_v|; g_n from the loss of log-probs alone
    alone = exact.logps.detach().where(exact.active, old).requires_grad_()
    rest = {key: data[key] for key in data if key not in ("bias", "logit_softcap", "old_logps")}
    per_row = torch.autograd.grad(grpo_loss(alone, data["old_logps"], advantages, **rest).loss, alone)[0]
    bounds = tau * per_row.abs() * (1 - alone.detach().exp()) * weight.detach().norm(dim=1).max()
    assert ((found[0] - true[0]).norm(dim=1) <= bounds * (1 + 1e-9)).all()
    for mine, theirs in zip(found, true, strict=True):
        assert 0 < (mine - theirs).norm() < 0.1 * theirs.norm()


def test_log_probs_of_a_tolerance_are_exact_and_their_gradient_nearly():
    hidden, weight, targets = sharp()
    leaves = [hidden.requires_grad_(), weight.requires_grad_()]
    exact, ours = (linear_logprob(*leaves, targets, backward_tolerance=tau) for tau in (0, 0.05))
    assert torch.equal(exact, ours)
    found, true = (torch.autograd.grad(logps.sum(), leaves) for logps in (ours, exact))
    for mine, theirs in zip(found, true, strict=True):
        assert 0 < (mine - theirs).norm() < 0.05 * theirs.norm()
    spoilt = hidden.detach().index_fill(0, torch.tensor([2]), torch.nan).requires_grad_()
    logps = linear_logprob(spoilt, weight, targets, backward_tolerance=0.1)
    assert torch.autograd.grad(logps.sum(), spoilt)[0][2].isnan().any()


@pytest.mark.parametrize("name, arguments", [
    ("backward_tolerance", {"backward_tolerance": 1.0}), ("backward_tolerance", {"backward_tolerance": -0.1}),
    ("entropy_coef", {"entropy_coef": 0.1}), ("kl='full'", {"kl": "full", "beta": 0.1}),
    ("backend='triton'", {"backend": "triton"}),
])  # fmt: skip
def test_what_has_no_bound_is_refused(name, arguments):
    head = sharp()
    with pytest.raises(ValueError, match=name):
        linear_grpo_loss(*head, torch.ones(N), **{"backward_tolerance": 0.1, **arguments})
    with pytest.raises(ValueError, match="return_entropy"):
        linear_logprob(*head, backward_tolerance=0.1, return_entropy=True)

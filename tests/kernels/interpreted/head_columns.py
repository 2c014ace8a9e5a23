"""The backward over fewer columns on the CPU: the bound of every row, and everything else as without a tolerance.

Run by test_interpreted.py, in a process with TRITON_INTERPRET=1.
"""

import pytest
import torch
from head_runs import PATHS
from heads import random_head

from fastgrpo import Objective, linear_grpo_loss, linear_logprob
from fastgrpo.kernels import head as head_kernels
from fastgrpo.kernels.head import Rows

N, D, V = 40, 16, 400
DAPO = Objective(beta=0.1)
OPTIONS = ({}, {"softcap": 30.0}, {"bias": True, "temperature": "row", "softcap": 20.0})
F32, F16, BF16 = torch.float32, torch.float16, torch.bfloat16
WAYS = (("anchored", F32), ("anchored", BF16), ("recompute", F32), ("recompute", F16))

# The others join the same pieces otherwise.
HALF_OF_THE_WAYS = [
    pytest.param(path, rows, marks=[] if (path == "anchored") == (rows > N) else pytest.mark.slow)
    for path in PATHS
    for rows in (16, 8192)
]


def sharp(dtype=torch.float32, **options):
    """A head whose probability lies on few columns, as that of a language model; half of its rows are confident."""
    return random_head(N, D, V, dtype, scale=options.pop("scale", 6.0), **options)


def exps_of(head, path):
    """E and its Rows as the forms of the loss make them for a choice of columns."""
    ts, t = (head.temperature, 1.0) if isinstance(head.temperature, torch.Tensor) else (None, head.temperature)
    anchored = path == "anchored"
    common = (head.hidden, head.weight, head.bias, head.targets, t, ts, head.softcap)
    rows, exps = head_kernels.linear_logprob_fwd(*common, anchored, anchored, False, 64, None, False)
    if not anchored:
        exps, rows = head_kernels.head_shares(*common, rows)
    return exps, rows, (t, ts, head.softcap)


def truth_of(head):
    """Probabilities and d logits / d capped logits in fp64, [N, V] each."""
    y = head.hidden.double() @ head.weight.double().T
    y = y if head.bias is None else y + head.bias.double()
    slope = torch.ones_like(y)
    if head.softcap is not None:
        slope = 1 - (y / head.softcap).tanh().square()
        y = head.softcap * (y / head.softcap).tanh()
    t = head.temperature.double()[:, None] if isinstance(head.temperature, torch.Tensor) else head.temperature
    return (y / t).softmax(-1), slope, t


@pytest.mark.parametrize("options", OPTIONS, ids=lambda o: "-".join(o) or "plain")
@pytest.mark.parametrize(("path", "dtype"), WAYS)
def test_no_row_loses_more_than_the_tolerance(path, dtype, options, request):
    if dtype == BF16:
        request.getfixturevalue("bf16")
    head = sharp(dtype, **options)
    exps, rows, how = exps_of(head, path)
    before, g = exps.clone(), head.grad_logps.clone()
    g[3] = 0
    tau = 0.2
    choice = head_kernels.choose_columns(exps, head.targets, Rows(*rows), g, tau)
    assert torch.equal(exps, before)
    columns, count, kept, dropped = head_kernels.head_columns_(exps, head.targets, rows, g, *how, tau, None)
    assert count.item() == choice.count < 0.9 * V and kept == pytest.approx(choice.count / V)
    columns = columns[: choice.count]
    assert torch.equal(columns, columns.unique()) and set(head.targets.tolist()) <= set(columns.tolist())
    p, slope, t = truth_of(head)
    others = p.scatter(1, head.targets[:, None], 0)
    lost = others.index_fill(1, columns, 0).sum(1) / others.sum(1)
    assert 0.2 * tau < lost[g != 0].max() <= tau and dropped[3] == 0
    # A mass is a sum of rounded numbers, divided by one.
    rtol = max(2e-3, torch.finfo(dtype).eps / 2)
    torch.testing.assert_close(dropped[g != 0].double(), lost[g != 0], rtol=rtol, atol=1e-5)
    exact = (-g.double()[:, None] * p).scatter_add(1, head.targets[:, None], g.double()[:, None]) * slope / t
    ours = exps[:, : choice.count].double() * (g * rows[3]).double()[:, None]
    error = (ours - exact[:, columns]).norm() / exact.norm()
    # E is rounded to its dtype, and under a soft-cap again with its slope.
    assert error < {F32: 1e-5, F16: 1e-3, BF16: 4e-3}[dtype]


@pytest.mark.parametrize("case", ("uniform", "nan"))
def test_where_no_step_fits_everything_stays(case):
    head = sharp()
    head.hidden[:] = 0 if case == "uniform" else head.hidden
    if case == "nan":
        head.hidden[2, 0] = torch.nan
    exps, rows, how = exps_of(head, "anchored")
    before = exps.clone()
    _, count, kept, dropped = head_kernels.head_columns_(
        exps, head.targets, rows, head.grad_logps, *how, 0.05, None
    )  # fmt: skip
    assert count.item() == V and kept == 1 and not dropped.any()
    assert torch.equal(exps.nan_to_num(), before.nan_to_num())


def gradients(head, path, chunk_rows, tolerance):
    leaves = head.leaves()
    loss, outputs = head_kernels.linear_grpo_loss(
        leaves["hidden"], leaves["weight"], leaves.get("bias"), head.rows(DAPO), DAPO, softcap=head.softcap, path=path,
        chunk_rows=chunk_rows, tolerance=tolerance,
    )  # fmt: skip
    first = torch.autograd.grad(2 * loss, list(leaves.values()), retain_graph=True)
    second = torch.autograd.grad(2 * loss, list(leaves.values()))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    return loss, outputs, dict(zip(leaves, first, strict=True))


@pytest.mark.parametrize("softcap", (None, 30.0))
@pytest.mark.parametrize(("path", "chunk_rows"), HALF_OF_THE_WAYS)
def test_the_loss_is_exact_and_its_gradient_errs_within_the_bound(path, chunk_rows, softcap):
    head = sharp(bias=True, softcap=softcap)
    tau = 0.2
    exact, given, true = gradients(head, path, chunk_rows, 0.0)
    loss, outputs, found = gradients(head, path, chunk_rows, tau)
    assert torch.equal(loss, exact) and all(torch.equal(outputs[name], given[name]) for name in given)
    assert outputs.keys() - given.keys() == {"kept_columns", "dropped_mass"}
    assert outputs["kept_columns"].mean() < 0.9 and 0.1 * tau < outputs["dropped_mass"].max() <= tau
    for name, gradient in found.items():
        assert 0 < (gradient - true[name]).norm() < 0.1 * true[name].norm(), name
    if chunk_rows > N:
        left_out = (found["weight"] == 0).all(1)
        assert 1 - left_out.float().mean() == pytest.approx(outputs["kept_columns"][0].item())
        assert torch.equal(left_out, found["bias"] == 0)


@pytest.mark.parametrize(("path", "chunk_rows"), HALF_OF_THE_WAYS)
def test_log_probs_are_exact_and_their_gradient_nearly(path, chunk_rows):
    head, found = sharp(softcap=30.0), {}
    for tolerance in (0.0, 0.2):
        leaves = head.leaves()
        logps, _ = head_kernels.linear_logprob(
            leaves["hidden"], leaves["weight"], head.targets, softcap=30.0, path=path, chunk_rows=chunk_rows,
            tolerance=tolerance,
        )  # fmt: skip
        grads = [
            torch.autograd.grad(logps.sum(), list(leaves.values()), retain_graph=True) for _ in range(2)
        ]  # the second time, E is as it was
        assert all(torch.equal(a, b) for a, b in zip(*grads, strict=True))
        found[tolerance] = logps.detach(), grads[0]
    assert torch.equal(found[0.0][0], found[0.2][0])
    for ours, theirs in zip(found[0.2][1], found[0.0][1], strict=True):
        assert 0 < (ours - theirs).norm() < 0.1 * theirs.norm()


@pytest.mark.parametrize("path", PATHS)
def test_the_public_calls_leave_out_what_they_say(path, monkeypatch):
    monkeypatch.setitem(head_kernels.PATHS, torch.float32, path)
    monkeypatch.setenv("FASTGRPO_SELF_CHECK", "raise")
    head = sharp()
    leaves = list(head.leaves().values())
    mask = torch.arange(N) % 5 != 0
    out = linear_grpo_loss(*leaves, head.targets, head.advantages, mask=mask, backward_tolerance=0.2, backend="triton")
    assert out.metrics["head/kept_columns"] < 0.9 and 0.04 < out.metrics["head/dropped_mass"] <= 0.2
    assert torch.autograd.grad(out.loss, leaves[0])[0][~mask].count_nonzero() == 0
    logps = linear_logprob(*leaves, head.targets, backward_tolerance=0.2, backend="triton")
    assert (torch.autograd.grad(logps.sum(), leaves[1])[0] == 0).all(1).any()
    with torch.no_grad():
        out = linear_grpo_loss(*leaves, head.targets, head.advantages, backward_tolerance=0.2, backend="triton")
    assert "head/kept_columns" not in out.metrics


def test_the_ladder():
    assert head_kernels.ladder(16) == ()
    for vocab in (50, 32_003, 151_936):
        steps = head_kernels.ladder(vocab)
        assert list(steps) == sorted(set(steps)) and 0 < len(steps) <= head_kernels.STEPS
        assert all((vocab - step) % head_kernels.MULTIPLE == 0 for step in steps) and steps[0] >= 0.1 * vocab

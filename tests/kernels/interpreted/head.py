"""The fused head on the CPU: log-probs and loss by chunks, in bf16, at extremes, and what autograd asks of them."""

import math
from contextlib import contextmanager
from functools import partial

import pytest
import torch

from fastgrpo import linear_grpo_loss, linear_logprob, logits_grpo_loss
from fastgrpo.kernel_checks import cases
from fastgrpo.kernels import head as head_kernels
from fastgrpo.kernels import launch, reference

RAGGED, ROW, TILES = (37, 24, 101), (1, 16, 33), (16, 19, 64)  # the last: whole tiles, a depth that no bulk copy takes
SOFTCAP = {"softcap": 5.0}


def check(trial):
    """Hold the values of a trial, as `doctor --check` has them, to the tolerance of the checks, and return them."""
    found = trial.ours()
    for name, (error, allowed) in trial.judge(found).items():
        assert error <= allowed, (name, error, allowed)
    return found


def set_chunk(monkeypatch, rows):
    for name in ("linear_grpo_loss", "linear_logprob"):
        monkeypatch.setattr(head_kernels, name, partial(getattr(head_kernels, name), chunk_rows=rows))


def random_head(*shape, dtype=torch.float32, bias=False, softcap=None):
    """Return the leaves of a head, and the arguments of the public loss by Triton."""
    leaves, tokens = cases.random_head(*shape, dtype, bias=bias, softcap=softcap)
    return leaves, {**tokens, "objective": cases.DAPO, "logit_softcap": softcap, "backend": "triton"}


@pytest.mark.parametrize(
    ("shape", "options"), [(RAGGED, cases.EVERYTHING), (ROW, cases.EVERYTHING), (TILES, {"flagged": True})], ids=str
)
def test_log_probs_of_any_shape(shape, options, monkeypatch):
    monkeypatch.setitem(cases.HEAD_SIZES, "interpreter", shape)
    for entropy in (False, True):
        check(cases.logprob("interpreter", torch.float32, entropy=entropy, **options))


BY_CHUNKS = {
    "loss": partial(cases.fused_loss, **cases.EVERYTHING),
    "bonus": partial(cases.fused_loss, objective=cases.BONUS, **SOFTCAP),
    "log-probs": partial(cases.logprob, bias=True),
}


@pytest.mark.parametrize("name", BY_CHUNKS)
def test_several_chunks_are_exact_and_repeat_bit_for_bit(name, monkeypatch):
    set_chunk(monkeypatch, 16)
    trial = BY_CHUNKS[name]("interpreter", torch.float32)
    first, again = check(trial), trial.ours()
    assert all(torch.equal(first[name], again[name]) for name in first)


IN_BF16 = {
    "loss by chunks": partial(cases.fused_loss, bias=True, temperature="row"),
    "bonus": partial(cases.fused_loss, objective=cases.BONUS),
    "recomputed": partial(cases.fused_loss, objective=cases.BONUS, **SOFTCAP),
    "log-probs": partial(cases.logprob, **cases.EVERYTHING),
    "unlikely targets": partial(cases.logprob, flagged=True),  # computed again, from their maximum
}
QUICK = ("loss by chunks", "unlikely targets")


@pytest.mark.parametrize("name", [pytest.param(x, marks=() if x in QUICK else pytest.mark.slow) for x in IN_BF16])
def test_bf16(name, bf16, monkeypatch):
    """The dtype on a GPU, and there the anchored path. With fewer tokens the errors differ more by chance."""
    monkeypatch.setitem(cases.HEAD_SIZES, "interpreter", (128, 16, 50))
    if "chunks" in name:
        set_chunk(monkeypatch, 48)
    check(IN_BF16[name]("interpreter", torch.bfloat16))


def test_sums_over_many_vocabulary_tiles():
    """A real vocabulary has hundreds of tiles, more than one step of the sum reads."""
    tiles = torch.rand(2 * launch.REDUCE_TILES + 3, 40)
    torch.testing.assert_close(head_kernels.reduce_fwd(tiles), tiles.sum(0), rtol=1e-5, atol=0)


def test_targets_far_below_the_rest():
    """Up to 200 nats; from 60 on the anchor moves, although sums fit fp32 up to 88."""
    leaves, rest = random_head(40, 16, 100)
    leaves["hidden"].data *= torch.linspace(1, 20, 40)[:, None]
    targets = (leaves["hidden"] @ leaves["weight"].T).argmin(-1).repeat_interleave(2)[::2]  # not contiguous

    def weighted(logps, entropy):
        loss = (logps * rest["advantages"] + entropy * rest["old_logps"]).sum()
        return {"loss": loss, "logps": logps, "entropy": entropy}

    def ours():
        found = weighted(*linear_logprob(**leaves, targets=targets, return_entropy=True, backend="triton"))
        return found | cases.gradients(found["loss"], leaves)

    def of_logits(logits):
        return weighted(*reference.logits_logprob(logits, targets, return_entropy=True))

    distances = check(cases.head_trial(leaves, None, ours, of_logits))["logps"]
    assert ((distances < -62) & (distances > -85)).sum() > 3 and distances.min() < -100


@pytest.mark.parametrize("target", (True, False))
def test_one_logit_60_nats_above(target):
    leaves, rest = random_head(20, 16, 50, bias=True)
    leaves["bias"].data[7] += 60
    targets = torch.full((20,), 7 if target else 9)
    logps = linear_logprob(**leaves, targets=targets, backend="triton")
    gradients = torch.autograd.grad(logps @ rest["advantages"], [leaves["hidden"], leaves["weight"]])
    hidden, weight, bias = (leaf.detach().double() for leaf in leaves.values())
    z = hidden @ weight.T + bias
    others = z.index_fill(1, targets[:1], -math.inf)
    odds = (others - z[:, targets[:1]]).exp().sum(-1)
    torch.testing.assert_close(logps.double(), -odds.log1p(), rtol=1e-5, atol=0 if target else 1e-4)
    dz = -z.softmax(-1)
    dz[:, targets[0]] = odds / (1 + odds)  # 1 - p_t: the difference has no digit left even in fp64
    dz *= rest["advantages"][:, None].double()
    assert cases.error("hidden", gradients[0], dz @ weight) < 1e-4
    assert cases.error("weight", gradients[1], dz.T @ hidden) < 1e-4


def test_a_bad_target_poisons_only_its_row():
    leaves, rest = random_head(20, 16, 50)
    for bad in (-1, 50, -100):
        logps, _ = head_kernels.linear_logprob(*leaves.values(), rest["targets"].index_fill(0, torch.tensor([5]), bad))
        assert logps.isnan().nonzero().flatten().tolist() == [5]


@pytest.mark.parametrize(("chunk_rows", "frozen"), [(16, ("hidden",)), (8192, ("weight", "bias"))])
def test_frozen_inputs_grad_output_and_retain_graph(chunk_rows, frozen, monkeypatch):
    set_chunk(monkeypatch, chunk_rows)
    leaves, rest = random_head(37, 16, 50, bias=True)
    full = dict(zip(leaves, torch.autograd.grad(linear_grpo_loss(**leaves, **rest).loss, leaves.values()), strict=True))
    for name in frozen:
        leaves[name].requires_grad_(False)
    loss = linear_grpo_loss(**leaves, **rest).loss
    loss.backward(retain_graph=True)
    for name, leaf in leaves.items():
        assert leaf.grad is None if name in frozen else torch.equal(leaf.grad, full[name])
    (3 * loss).backward()
    for name in leaves.keys() - set(frozen):
        torch.testing.assert_close(leaves[name].grad, 4 * full[name], rtol=1e-5, atol=1e-8)


def test_strides():
    """A slice of a wider hidden, a transposed weight; torch calls one row contiguous whatever its stride."""
    leaves, rest = random_head(37, 16, 50)
    straight = linear_grpo_loss(**leaves, **rest)
    wide = torch.randn(37, 40)
    wide[:, 8:24] = leaves["hidden"].detach()
    hidden, weight = wide[:, 8:24].requires_grad_(), leaves["weight"].detach().T.contiguous().T.requires_grad_()
    out = linear_grpo_loss(hidden, weight, **rest)
    expected = straight.logps, torch.autograd.grad(straight.loss, leaves.values())
    torch.testing.assert_close((out.logps, torch.autograd.grad(out.loss, (hidden, weight))), expected)
    row = torch.randn(16).as_strided((1, 16), (0, 1))  # bulk copies refuse a pitch of 0
    assert launch.rows_contiguous(row).stride() == (16, 1) and torch.equal(launch.rows_contiguous(row), row)
    assert launch.rows_contiguous(torch.randn(16, 1).T).stride() == (16, 1)
    assert launch.rows_contiguous(wide[:, 8:24]).stride() == (40, 1)


def test_rows_past_2_to_the_31():
    """Three rows of hidden states or exponentials, 2^30 elements apart: of 4 GB a few pages are touched."""
    hidden, weight = torch.randn(3, 16).half(), torch.randn(50, 16).half()
    targets = (hidden.float() @ weight.float().T).argmax(-1)
    far = torch.empty_strided((3, 16), (2**30, 1), dtype=torch.float16).copy_(hidden)
    assert torch.equal(*[head_kernels.linear_logprob(states, weight, targets)[0] for states in (hidden, far)])
    arguments = head_kernels.Head(hidden, weight, None, targets, 1.0, None, None).checked()
    far = torch.empty_strided((3, 50), (2**30, 1), dtype=torch.float16)
    near = head_kernels.empty_exps(3, 50, far)
    for logs in (False, True):
        both = [exps.view(torch.int16) if logs else exps for exps in (far, near)]
        rows = [head_kernels.rows_fwd(arguments, exps, True, None, logs) for exps in both]
        assert torch.equal(*rows) and torch.equal(*both)
    for exps in (far, near):
        head_kernels.head_entropy_bwd(exps.view(torch.int16), targets, rows[0], *torch.ones(2, 3), exps)
    assert torch.equal(far, near)


def test_gradients_of_several_chunks_are_rounded_once(monkeypatch):
    """Formed before grad_output is known, they stay fp32 until it is: 3 round(x) is not round(3 x)."""
    set_chunk(monkeypatch, 32)
    leaves, rest = random_head(70, 24, 50, dtype=torch.float16)
    loss = linear_grpo_loss(**leaves, **rest).loss
    one, three = (torch.autograd.grad(factor * loss, leaves.values(), retain_graph=True) for factor in (1, 3))
    assert not any(map(torch.equal, three, (3 * gradient for gradient in one)))


@pytest.mark.parametrize("softcap", [None, 5.0])
def test_every_launch_is_on_the_device_of_its_tensors(softcap, monkeypatch):
    """Triton launches on the current device, whatever device the tensors are on."""
    from triton.runtime.interpreter import GridExecutor

    inside, launches, call = [], [], GridExecutor.__call__

    @contextmanager
    def guard(tensor):
        inside.append(tensor)
        yield
        inside.pop()

    def watched(self, *args, **kwargs):
        launches.append(len(inside))
        return call(self, *args, **kwargs)

    monkeypatch.setattr(torch.cuda, "device_of", guard)
    monkeypatch.setattr(GridExecutor, "__call__", watched)
    set_chunk(monkeypatch, 12)
    leaves, rest = random_head(20, 16, 50, softcap=softcap)
    linear_grpo_loss(**leaves, **{**rest, "objective": cases.BONUS}).loss.backward()
    how = {"logit_softcap": softcap, "return_entropy": True, "backend": "triton"}
    logps, entropy = linear_logprob(**leaves, targets=rest["targets"], **how)
    (logps + entropy).sum().backward()
    del rest["logit_softcap"]
    for inplace in (False, True):
        (2 * logits_grpo_loss(leaves["hidden"] @ leaves["weight"].T, **rest, inplace=inplace).loss).backward()
    assert len(launches) > 20 and min(launches) == 1 and not inside

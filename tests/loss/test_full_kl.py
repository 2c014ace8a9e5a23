"""kl="full" in linear_grpo_loss against the reference, its parts, and unsupported combinations."""

import math
from dataclasses import replace

import pytest
import torch
from oracle import CHUNKS, make_case, run, set_chunk, token_weights
from torch.distributions import Categorical, kl_divergence

import fastgrpo.loss.dispatch
from benchmarks.compare import compare
from fastgrpo import Objective, linear_grpo_loss
from fastgrpo.kernel_checks.cases import error
from fastgrpo.kernels import reference
from fastgrpo.kernels.head_torch import full_kl, full_kl_gradient_

FULL = {"beta": 0.3, "kl": "full"}
LENGTHS, V, R = (5, 1, 7, 3), 11, 4  # the reference's hidden size is not the policy's
N = sum(LENGTHS)
VARIANTS = {  # knobs beside FULL
    "plain": {},
    "gspo": {"loss_type": "grpo", "importance_sampling_level": "sequence"},
    "vespo": {"loss_type": "vespo", "importance_sampling_mode": "token_mask"},
    "bonus": {"entropy_coef": 0.2},
}


def make(**kwargs):
    case = make_case(LENGTHS, V, ref=False, **kwargs)
    shapes = {"ref_hidden": (N, R), "ref_weight": (V, R), "ref_bias": (V,)}
    return case, {name: torch.randn(shape).to(case.hidden.dtype) for name, shape in shapes.items()}


def truth(case, ref, softcap=None, **knobs):
    """The reference over the tokens in the mask: (loss, mean KL, gradients)."""
    objective, keep, head = Objective(**FULL | knobs), case.mask, case.head()
    weights, bonus = token_weights(objective, keep, case.cu_seqlens)
    temperature = case.temperature[keep] if isinstance(case.temperature, torch.Tensor) else case.temperature
    loss, _, metrics = reference.linear_grpo_loss(
        head["hidden"][keep], head["weight"], case.targets[keep], case.advantages[keep], weights[keep], objective,
        bias=head.get("bias"), logit_softcap=softcap, temperature=temperature,
        old_logps=None if case.old_logps is None else case.old_logps[keep],
        entropy_weights=bonus[keep] if objective.entropy_coef else None,
        lengths=torch.searchsorted(keep.nonzero()[:, 0], case.cu_seqlens).diff(),
        **ref | {"ref_hidden": ref["ref_hidden"][keep]},
    )  # fmt: skip
    return loss.detach(), metrics["kl"], dict(zip(head, torch.autograd.grad(loss, list(head.values())), strict=True))


@pytest.mark.parametrize("chunk", [None, 4, 8])
@pytest.mark.parametrize("name", VARIANTS)
def test_beside_every_part_of_the_loss(monkeypatch, name, chunk):
    set_chunk(monkeypatch, chunk)
    case, ref = make(bias=True, per_token_temperature=True)
    loss, kl, expected = truth(case, ref, softcap=3.0, **VARIANTS[name])
    spoilt = ref | {"ref_hidden": ref["ref_hidden"].masked_fill(~case.mask[:, None], torch.nan)}
    for rows in (None, case.mask.nonzero()[:, 0]):
        output, actual = run(case, linear_grpo_loss, logit_softcap=3.0, rows=rows, **spoilt, **FULL, **VARIANTS[name])
        torch.testing.assert_close((output.loss, output.metrics["kl"]), (loss, kl), rtol=1e-12, atol=1e-14)
        torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-14)


def test_padded_tokens_give_the_loss_of_packed_ones():
    case, ref = make()
    rows = {name: x.view(2, 8) for name, x in case.per_token().items()}
    padded = replace(case, cu_seqlens=None, hidden=case.hidden.view(2, 8, -1), **rows)
    expected, gradients = run(case, linear_grpo_loss, **ref, **FULL)
    output, actual = run(padded, linear_grpo_loss, **ref | {"ref_hidden": ref["ref_hidden"].view(2, 8, R)}, **FULL)
    torch.testing.assert_close(output.loss, expected.loss)
    torch.testing.assert_close(actual["weight"], gradients["weight"])


@CHUNKS
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_as_exact_as_plain_pytorch(monkeypatch, dtype, chunk):
    set_chunk(monkeypatch, chunk)
    case, ref = make(dtype=dtype, bias=True)
    loss, kl, exact = truth(case.to(torch.float64), {name: value.double() for name, value in ref.items()})
    output, actual = run(case, linear_grpo_loss, **ref, **FULL)
    assert output.loss.item() == pytest.approx(loss.item(), rel=1e-5)
    assert output.metrics["kl"].item() == pytest.approx(kl.item(), rel=1e-5)
    for name, gradient in actual.items():
        assert gradient.dtype == dtype
        assert error("gradient", gradient, exact[name]) < (1e-5 if dtype == torch.float32 else 4e-3), name


def test_nan_of_the_reference_makes_the_loss_nan():
    case, ref = make()
    for name in ref:
        spoilt = ref[name].clone()
        spoilt.view(-1)[0] = torch.nan
        output, gradients = run(case, linear_grpo_loss, **ref | {name: spoilt}, **FULL)
        assert output.loss.isnan() and gradients["hidden"].isnan().any()


@pytest.mark.parametrize("softcap, chunks", [(None, 3), (5.0, 4)])
def test_three_chunks_are_alive_at_a_time(monkeypatch, softcap, chunks):
    chunk, vocab = 8, 8192
    set_chunk(monkeypatch, chunk)
    case = make_case((16, 16), vocab, 4, torch.float32, ref=False, masked=0.0)
    head = case.head()
    ref = {"ref_hidden": torch.randn(32, R), "ref_weight": torch.randn(vocab, R)}

    def loss():
        output = linear_grpo_loss(**head, **case.rest(), **ref, **FULL, logit_softcap=softcap)
        return torch.autograd.grad(output.loss, list(head.values()))

    assert compare({"loss": loss}, 1)["loss"]["peak_bytes"] <= (chunks + 0.1) * 4 * chunk * vocab + case.weight.nbytes


REFUSED = {
    "ref_hidden": (None, torch.zeros(N - 1, R), torch.ones(N, R).long()),
    "ref_weight": (None, torch.zeros(V + 1, R), torch.zeros(V, R + 1), [0.0], torch.zeros(V, R, device="meta"),
                   torch.zeros(V, R, requires_grad=True)),
    "ref_bias": (torch.zeros(V + 1),),
    "backend": ("triton",), "process_group": (object(),), "use_bias_correction_kl": (True,),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_rejects_unsupported_combinations_by_name(name):
    case, ref = make()
    for value in REFUSED[name]:
        with pytest.raises(ValueError, match=rf"\b{name}\b"):
            linear_grpo_loss(**case.head(), **{**case.rest(), **ref, **FULL, name: value})


def test_auto_takes_the_chunked_path(monkeypatch):
    monkeypatch.setattr(fastgrpo.loss.dispatch, "HAS_TRITON", True)
    monkeypatch.setattr(fastgrpo.loss.dispatch, "_fits", lambda *_: True)
    case, ref = make()
    output, _ = run(case, linear_grpo_loss, **ref, **FULL)
    torch.testing.assert_close(output.loss, truth(case, ref)[0])


INF = math.inf


def ours(z, ref, g):
    """KL and its gradient by z, of logits at temperature 1."""
    probs = z.softmax(-1)
    kl, log_ratio = full_kl(probs, ref.clone())
    return kl, full_kl_gradient_(probs, log_ratio, kl, g)


def test_value_and_gradient_are_those_of_torch():
    z, ref = (2 * torch.randn(2, 6, 9)).double()
    z.requires_grad_()
    g = torch.arange(6.0, dtype=torch.float64) - 2.5
    expected = kl_divergence(Categorical(logits=z), Categorical(logits=ref))
    (expected_dz,) = torch.autograd.grad(expected, z, g)
    kl, dz = ours(z.detach(), ref, g)
    plain = reference.full_kl(z, ref)
    plain_dz = torch.autograd.grad(plain, z, g)[0]
    torch.testing.assert_close((kl, dz), (expected.detach(), expected_dz), rtol=1e-13, atol=1e-14)
    torch.testing.assert_close((plain, plain_dz), (expected, expected_dz), rtol=1e-13, atol=1e-14)
    for temperature in (0.7, torch.rand(6).double() + 0.5):
        column = temperature[:, None] if isinstance(temperature, torch.Tensor) else temperature
        divided = kl_divergence(Categorical(logits=z / column), Categorical(logits=ref / column))
        torch.testing.assert_close(reference.full_kl(z, ref, temperature=temperature), divided)
    kl, dz = ours(z.detach(), ref.index_fill(0, torch.tensor([2]), math.nan), g)
    assert kl.isnan().tolist() == dz.isnan().all(-1).tolist() == [False, False, True, False, False, False]


def test_accepts_tokens_with_no_probability_under_the_reference():
    kl, dz = ours(torch.tensor([[0.0, 0.0]]), torch.tensor([[0.0, 500.0]]), torch.ones(1))
    assert kl.item() == pytest.approx(250 - math.log(2))
    assert dz[0].tolist() == pytest.approx([125, -125])
    assert ours(torch.zeros(1, 3), torch.tensor([[0.0, 0.0, -INF]]), torch.ones(1))[0].item() == INF


@pytest.mark.parametrize("low", [-INF, -500.0], ids=["ruled-out", "underflow"])
@pytest.mark.parametrize("ref_low", [-INF, 1.0], ids=["by-both", "by-the-policy"])
def test_tokens_with_no_probability_under_the_policy_add_zero(low, ref_low):
    z, ref = torch.tensor([[1.0, 0.0, low]]), torch.tensor([[0.5, 0.25, ref_low]])
    kl, dz = ours(z, ref, torch.ones(1))
    p, log_q = z[0].double().softmax(-1)[:2], ref[0].double().log_softmax(-1)[:2]
    assert kl.item() == pytest.approx((p * (p.log() - log_q)).sum().item())
    assert dz.isfinite().all() and dz[0, 2] == 0 and dz.sum().item() == pytest.approx(0, abs=1e-6)

"""kl="full" in linear_grpo_loss: against torch.distributions and the specification, and who refuses it."""

from dataclasses import replace

import oracle
import pytest
import torch
from torch.distributions import Categorical, kl_divergence

import fastgrpo.loss.dispatch
from benchmarks.compare import compare
from fastgrpo import Objective, grpo_loss, linear_grpo_loss, logits_grpo_loss
from fastgrpo.kernel_checks.cases import error
from fastgrpo.kernels import head_torch, reference

FULL = {"beta": 0.3, "kl": "full"}
LENGTHS, V, R = (5, 1, 7, 3), 11, 4  # the reference's hidden size is not the policy's
# knobs beside FULL, and arguments
VARIANTS = {
    "plain": {},
    "grpo": {"loss_type": "grpo"},
    "gspo": {"loss_type": "grpo", "importance_sampling_level": "sequence"},
    "vespo": {"loss_type": "vespo", "importance_sampling_mode": "token_mask"},
    "bonus": {"entropy_coef": 0.2},
}


def make(seed=0, **kwargs):
    """A packed case without log-probs of a reference, and the reference's head."""
    case = oracle.make_case(LENGTHS, V, ref=False, **kwargs)
    generator = torch.Generator().manual_seed(seed)

    def noise(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(case.hidden.dtype)

    return case, {"ref_hidden": noise(sum(LENGTHS), R), "ref_weight": noise(V, R), "ref_bias": noise(V)}


def truth(case, ref, softcap=None, **knobs):
    """The specification over the tokens in the mask: (loss, mean KL, gradients)."""
    objective, keep = Objective(**FULL | knobs), case.mask
    head = case.head()
    index = keep.nonzero()[:, 0]
    weights = objective.token_weights(keep, case.cu_seqlens, dtype=torch.float64)
    bonus = objective.entropy_weights(keep, dtype=torch.float64)[keep] if objective.entropy_coef else None
    temperature = case.temperature[keep] if isinstance(case.temperature, torch.Tensor) else case.temperature
    loss, _, metrics = reference.linear_grpo_loss(
        head["hidden"][keep], head["weight"], case.targets[keep], case.advantages[keep], weights[keep], objective,
        bias=head.get("bias"), logit_softcap=softcap, old_logps=case.old_logps[keep], temperature=temperature,
        entropy_weights=bonus, lengths=torch.searchsorted(index, case.cu_seqlens).diff(),
        **ref | {"ref_hidden": ref["ref_hidden"][keep]},
    )  # fmt: skip
    grads = torch.autograd.grad(loss, list(head.values()))
    return loss.detach(), metrics["kl"], dict(zip(head, grads, strict=True))


@pytest.mark.parametrize("chunk", [None, 1, 4, 7])
@pytest.mark.parametrize("softcap", [None, 2.0], ids=["linear", "softcap"])
@pytest.mark.parametrize("per_token", [False, True], ids=["T-float", "T-tensor"])
def test_value_and_gradients_are_those_of_torch(monkeypatch, chunk, softcap, per_token):
    """Without advantages the loss is the mean KL; hidden, weight and bias get its gradient."""
    oracle.set_chunk(monkeypatch, chunk)
    case, ref = make(bias=True, per_token_temperature=per_token, old=False)
    case = replace(case, advantages=torch.zeros_like(case.advantages))

    def distribution(hidden, weight, bias):
        z = hidden @ weight.T + bias
        z = z if softcap is None else softcap * torch.tanh(z / softcap)
        return Categorical(logits=z / (case.temperature[:, None] if per_token else case.temperature))

    head = case.head()
    kl = kl_divergence(distribution(**head), distribution(*ref.values()))[case.mask].mean()
    expected = dict(zip(head, torch.autograd.grad(FULL["beta"] * kl, list(head.values())), strict=True))
    output, actual = oracle.run(case, linear_grpo_loss, logit_softcap=softcap, **ref, **FULL)
    torch.testing.assert_close(output.loss, FULL["beta"] * kl.detach(), rtol=1e-13, atol=1e-14)
    torch.testing.assert_close(output.metrics["kl"], kl.detach(), rtol=1e-13, atol=1e-14)
    torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("chunk", [None, 4, 8])
@pytest.mark.parametrize("name", VARIANTS)
def test_beside_every_part_of_the_loss(monkeypatch, name, chunk):
    """Old log-probs, sequence-level ratios over several chunks, an entropy bonus, masked-out tokens."""
    oracle.set_chunk(monkeypatch, chunk)
    case, ref = make(bias=True)
    loss, kl, expected = truth(case, ref, softcap=3.0, **VARIANTS[name])
    output, actual = oracle.run(case, linear_grpo_loss, logit_softcap=3.0, **ref, **FULL, **VARIANTS[name])
    torch.testing.assert_close(output.loss, loss)
    torch.testing.assert_close(output.metrics["kl"], kl)
    torch.testing.assert_close(actual, expected)


@oracle.CHUNKS
def test_rows_and_what_the_mask_leaves_out(monkeypatch, chunk):
    """Only the kept tokens' states are read; to name them in `rows` changes nothing."""
    oracle.set_chunk(monkeypatch, chunk)
    case, ref = make()
    expected, gradients = oracle.run(case, linear_grpo_loss, **ref, **FULL)
    spoilt = ref | {"ref_hidden": ref["ref_hidden"].masked_fill(~case.mask[:, None], torch.nan)}
    rows = case.mask.nonzero()[:, 0]
    for given in ({}, {"rows": rows}):
        output, actual = oracle.run(case, linear_grpo_loss, **spoilt, **given, **FULL)
        assert torch.equal(output.loss, expected.loss)
        assert all(torch.equal(actual[name], gradients[name]) for name in gradients)


@oracle.CHUNKS
def test_padded_and_packed_agree(monkeypatch, chunk):
    oracle.set_chunk(monkeypatch, chunk)
    case, ref = make()
    hidden, old, ref_hidden = torch.zeros(4, 7, 6).double(), torch.zeros(4, 7).double(), torch.zeros(4, 7, R).double()
    targets, mask, advantages = torch.zeros(4, 7).long(), torch.zeros(4, 7).bool(), torch.zeros(4, 7).double()
    for i, (start, length) in enumerate(zip(case.cu_seqlens.tolist(), LENGTHS, strict=False)):
        part = slice(start, start + length)
        for padded, packed in ((hidden, case.hidden), (old, case.old_logps), (ref_hidden, ref["ref_hidden"]),
                               (targets, case.targets), (mask, case.mask), (advantages, case.advantages)):  # fmt: skip
            padded[i, :length] = packed[part]
    expected, gradients = oracle.run(case, linear_grpo_loss, loss_type="grpo", **ref, **FULL)
    weight = case.weight.clone().requires_grad_()
    out = linear_grpo_loss(
        hidden, weight, targets, advantages, mask=mask, old_logps=old, temperature=case.temperature, loss_type="grpo",
        **ref | {"ref_hidden": ref_hidden}, **FULL,
    )  # fmt: skip
    out.loss.backward()
    torch.testing.assert_close(out.loss, expected.loss)
    torch.testing.assert_close(weight.grad, gradients["weight"])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@oracle.CHUNKS
def test_as_exact_as_plain_pytorch(monkeypatch, dtype, chunk):
    """Gradients are rounded once; against fp64 on the same rounded inputs."""
    oracle.set_chunk(monkeypatch, chunk)
    case, ref = make(dtype=dtype, bias=True)
    loss, kl, exact = truth(case.to(torch.float64), {name: value.double() for name, value in ref.items()})
    output, actual = oracle.run(case, linear_grpo_loss, **ref, **FULL)
    assert output.loss.item() == pytest.approx(loss.item(), rel=1e-5)
    assert output.metrics["kl"].item() == pytest.approx(kl.item(), rel=1e-5)
    for name, gradient in actual.items():
        assert gradient.dtype == dtype
        assert error("gradient", gradient, exact[name]) < (1e-5 if dtype == torch.float32 else 4e-3), name


@oracle.CHUNKS
def test_frozen_inputs_and_no_grad(monkeypatch, chunk):
    oracle.set_chunk(monkeypatch, chunk)
    case, ref = make(bias=True)
    expected, gradients = oracle.run(case, linear_grpo_loss, **ref, **FULL)
    head = case.head()
    head["weight"].requires_grad_(False)
    linear_grpo_loss(**head, **case.rest(), **ref, **FULL).loss.backward()
    assert head["weight"].grad is None and torch.equal(head["hidden"].grad, gradients["hidden"])
    with torch.no_grad():
        output = linear_grpo_loss(**case.head(), **case.rest(), **ref, **FULL)
    assert torch.equal(output.loss, expected.loss) and not output.loss.requires_grad


def test_under_torch_compile(monkeypatch):
    oracle.set_chunk(monkeypatch, 8)
    torch._dynamo.reset()
    case, ref = make(dtype=torch.float32)
    expected, gradients = oracle.run(case, linear_grpo_loss, **ref, **FULL)

    @torch.compile(backend="eager")
    def loss(hidden, weight, ref_hidden):
        given = ref | {"ref_hidden": ref_hidden}
        return linear_grpo_loss(hidden * 1.0, weight, **case.rest(), **given, **FULL).loss

    head = case.head()
    found = loss(*head.values(), ref["ref_hidden"])
    found.backward()
    torch.testing.assert_close(found, expected.loss)
    torch.testing.assert_close({name: tensor.grad for name, tensor in head.items()}, gradients)


def test_second_derivatives_are_refused():
    case, ref = make()
    head = case.head()
    loss = linear_grpo_loss(**head, **case.rest(), **ref, **FULL).loss
    with pytest.raises(RuntimeError, match="linear_grpo_loss has no second derivatives"):
        torch.autograd.grad(loss, head["hidden"], create_graph=True)


@pytest.mark.parametrize("name", ["ref_hidden", "ref_weight", "ref_bias"])
def test_nan_of_the_reference_makes_the_loss_nan(name):
    """As with log-probs that are NaN: a trainer skips such an update, and goes on."""
    case, ref = make()
    ref[name].view(-1)[0] = torch.nan
    output, gradients = oracle.run(case, linear_grpo_loss, **ref, **FULL)
    assert output.loss.isnan() and gradients["hidden"].isnan().any()


@pytest.mark.parametrize("softcap, chunks", [(None, 3), (5.0, 4)])
def test_three_chunks_are_alive_at_a_time(monkeypatch, softcap, chunks):
    """The policy's logits, the reference's, and one to compute with, whatever N; and the slope of a soft-cap."""
    chunk, vocab = 8, 8192
    oracle.set_chunk(monkeypatch, chunk)
    case = oracle.make_case((16, 16), vocab, 4, torch.float32, ref=False, masked=0.0)
    head = case.head()
    ref = {"ref_hidden": torch.randn(32, R), "ref_weight": torch.randn(vocab, R)}

    def loss():
        output = linear_grpo_loss(**head, **case.rest(), **ref, **FULL, logit_softcap=softcap)
        return torch.autograd.grad(output.loss, list(head.values()))

    peak = compare({"loss": loss}, 1)["loss"]["peak_bytes"]
    assert peak <= (chunks + 0.1) * 4 * chunk * vocab + case.weight.nbytes


def tensor(*shape, **kwargs):
    return torch.zeros(*shape, dtype=torch.float64, **kwargs)


N = sum(LENGTHS)
REFUSED = {
    "no-hidden": ({"ref_hidden": None}, "beta=0.3 with kl='full' needs ref_hidden; pass it, or beta=0"),
    "no-weight": ({"ref_weight": None}, "beta=0.3 with kl='full' needs ref_weight"),
    "tokens": ({"ref_hidden": tensor(N - 1, R)}, r"ref_hidden must have the shape \[..., R\]=\(16, 4\)"),
    "vocabulary": ({"ref_weight": tensor(V + 1, R)}, r"ref_weight must have the shape \[V, R\]=\(11, 4\)"),
    "width": ({"ref_weight": tensor(V, R + 1)}, r"ref_weight must have the shape \[V, R\]=\(11, 4\), got \(11, 5\)"),
    "bias": ({"ref_bias": tensor(V + 1)}, r"ref_bias must have the shape \[V\]=\(11,\), got \(12,\)"),
    "integers": ({"ref_hidden": torch.ones(N, R).long()}, "ref_hidden must be floating point, got torch.int64"),
    "list": ({"ref_weight": [0.0]}, "ref_weight must be a tensor, got list"),
    "device": ({"ref_weight": tensor(V, R, device="meta")}, "ref_weight must be on cpu like the tokens, got meta"),
    "grad": ({"ref_weight": tensor(V, R, requires_grad=True)}, "ref_weight must not require grad: .*; detach it"),
    "triton": ({"backend": "triton"}, "backend='triton' does not compute kl='full'; use backend='auto' or 'chunked'"),
    "sharded": ({"process_group": object()}, "kl='full' cannot be computed over a head .* sharded by process_group"),
    "corrected": ({"use_bias_correction_kl": True}, "use_bias_correction_kl .* kl='full' is no estimate"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name):
    change, message = REFUSED[name]
    case, ref = make()
    with pytest.raises(ValueError, match=f"^{message}"):
        linear_grpo_loss(**case.head(), **{**case.rest(), **ref, **FULL, **change})


def test_without_beta_the_reference_is_not_read():
    case, _ = make()
    expected, _ = oracle.run(case, linear_grpo_loss)
    output, _ = oracle.run(case, linear_grpo_loss, kl="full", ref_hidden=[torch.nan])
    assert torch.equal(output.loss, expected.loss)


def test_the_losses_of_logits_and_log_probs_refuse_it():
    case, _ = make()
    remedy = "use linear_grpo_loss with ref_hidden and ref_weight, or an estimator, such as kl='k3'"
    with pytest.raises(ValueError, match=f"^kl='full' cannot be computed from logits and ref_logps: {remedy}"):
        logits_grpo_loss(case.hidden, case.targets, case.advantages, **FULL)
    with pytest.raises(ValueError, match=f"^kl='full' cannot be computed from log-probs and ref_logps: {remedy}"):
        grpo_loss(case.old_logps, None, case.advantages, **FULL)


def test_auto_takes_the_chunked_path_and_says_why(caplog, monkeypatch):
    """Also where the Triton kernels would take the tensors."""
    monkeypatch.setattr(fastgrpo.loss.dispatch, "HAS_TRITON", True)
    monkeypatch.setattr(fastgrpo.loss.dispatch, "_fits", lambda *_: True)
    fastgrpo.loss.dispatch._log_choice.cache_clear()
    calls = []
    apply = head_torch.LinearGRPO.apply
    monkeypatch.setattr(head_torch.LinearGRPO, "apply", lambda *args: calls.append(1) or apply(*args))
    case, ref = make()
    with caplog.at_level("INFO", "fastgrpo.loss.dispatch"):
        for _ in range(2):
            oracle.run(case, linear_grpo_loss, **ref, **FULL)
    message = "backend='auto' runs the chunked path, the only one that computes kl='full'"
    assert calls == [1, 1] and [record.message for record in caplog.records] == [message]
    fastgrpo.loss.dispatch._log_choice.cache_clear()

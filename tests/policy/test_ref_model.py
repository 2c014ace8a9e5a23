"""The reference: choice of the kind, frozen weights, streaming, quantization and synchronization."""

import pytest
import tiny
import torch
from runs import lines, make_trainer, samples_of

from fastgrpo.policy import ref_model
from fastgrpo.policy.model import Policy
from fastgrpo.policy.quantized import quantize
from fastgrpo.policy.ref_model import FrozenCopy, Scoring, StreamedCopy, score

pytestmark = pytest.mark.usefixtures("without_curves")

PACKAGES = {"int8": "torchao", "nf4": "bitsandbytes"}
# Relative error of a random weight, in the Frobenius norm: 8 bits with one scale a row of 32 to 64, 4 bits in blocks.
WEIGHT_ERROR = {"int8": 0.01, "nf4": 0.12}
WHOLE = Scoring(1.0, 10_000)


def wide(**changes):
    """A policy whose layers have multiples of 64 inputs, as nf4 needs."""
    return tiny.model(hidden_size=64, **changes)


@pytest.fixture(params=sorted(PACKAGES))
def quantization(request):
    pytest.importorskip(PACKAGES[request.param], reason="not installed (extra: quantization)")
    return request.param


def same(found, expected):
    return all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


@pytest.mark.parametrize("kind", [FrozenCopy, StreamedCopy])
def test_sync_is_trls_formula(kind):
    policy, reference = Policy(tiny.model(seed=1)), kind(Policy(tiny.model(seed=2)))
    before = {name: p.clone() for name, p in reference.policy.module.named_parameters()}
    reference.sync(policy, 0.6)
    for name, parameter in reference.policy.module.named_parameters():
        expected = before[name].mul(1.0 - 0.6).add(policy.module.get_parameter(name).data, alpha=0.6)
        torch.testing.assert_close(parameter, expected, rtol=1e-6, atol=1e-7)
    reference.sync(policy, 1.0)
    expected = score(policy, samples_of(), WHOLE)
    torch.testing.assert_close(reference.score(samples_of(), WHOLE), expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("name, layers", [("qwen2", 1), ("qwen3", 2), ("llama", 5), ("smollm3-like", 5)])
def test_streamed_equals_resident(name, layers):
    policy = Policy(tiny.model(name, num_hidden_layers=layers))
    resident, streamed = FrozenCopy(policy), StreamedCopy(policy)
    for max_tokens in (10_000, 12):  # one pass, and several
        how = Scoring(0.9, max_tokens)
        assert same(streamed.score(samples_of(), how), resident.score(samples_of(), how))


def test_weights_side_by_side_keep_their_dtypes():
    values = [torch.randn(3, 5), torch.randn(7).bfloat16(), torch.randn(2, 2).double()]
    parameters = [torch.nn.Parameter(value.clone(), requires_grad=False) for value in values]
    packed = ref_model.HostWeights(parameters, pin=False)
    buffer = packed.host.clone()
    packed.attach(buffer)
    for parameter, value in zip(parameters, values, strict=True):
        assert parameter.dtype == value.dtype and torch.equal(parameter, value)
        assert parameter.untyped_storage().data_ptr() == buffer.untyped_storage().data_ptr()


@pytest.mark.gpu
def test_streams_at_most_two_layers_to_a_gpu():
    model = tiny.model(num_hidden_layers=12, hidden_size=512, intermediate_size=2048).cuda().bfloat16()
    resident, streamed = FrozenCopy(Policy(model)), StreamedCopy(Policy(model))
    expected = resident.score(samples_of(), Scoring(0.9, 12))
    layer, rest = (len(weights.host) for weights in (streamed.stream.layers[0], streamed.stream.rest))
    assert streamed.stream.layers[0].host.is_pinned()
    del resident
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    for _ in range(3):
        got = streamed.score(samples_of(), Scoring(0.9, 12))
        assert same(got, expected)
    assert torch.cuda.max_memory_allocated() - before < 2 * layer + rest + 2**23
    del got
    torch.cuda.synchronize()
    assert torch.cuda.memory_allocated() - before < 2**20


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_quantized_layers_are_near_and_small_and_the_head_is_exact(quantization, dtype):
    model, exact = wide().to(dtype), wide().to(dtype)
    quantized = quantize(model.requires_grad_(False), quantization, "cpu")
    assert torch.get_float32_matmul_precision() == "highest"  # torchao switches TF32 on, unless it is told not to
    assert torch.equal(quantized.lm_head.weight, exact.lm_head.weight) and quantized.lm_head.weight.dtype == dtype
    assert torch.equal(quantized.base_model.embed_tokens.weight, exact.base_model.embed_tokens.weight)
    for name in ("layers.0.self_attn.q_proj", "layers.1.mlp.down_proj"):
        ours, theirs = quantized.base_model.get_submodule(name), exact.base_model.get_submodule(name)
        bias = 0 if theirs.bias is None else theirs.bias
        weight = (ours(torch.eye(theirs.in_features, dtype=dtype)) - bias).T
        assert weight.dtype == dtype
        error = (weight - theirs.weight).float().norm() / theirs.weight.float().norm()
        assert 0.1 * WEIGHT_ERROR[quantization] < error < WEIGHT_ERROR[quantization]
        data, entries = getattr(ours.weight, "qdata", ours.weight.data), theirs.weight.numel()
        assert data.nbytes == {"int8": entries, "nf4": entries * 9 // 16}[quantization]


@pytest.mark.parametrize("kl", ["k3", "full"])
def test_the_error_of_quantization_is_logged_once(quantization, tmp_path, kl):
    trainer = make_trainer(tmp_path, model=wide(vocab_size=258), beta=0.1, kl=kl, ref_storage=quantization)
    reference, exact, seen = trainer.reference, FrozenCopy(trainer.policy), []
    measure = reference.measure
    reference.measure = lambda samples, *how: (seen.append(samples), measure(samples, *how))[1]
    trainer.train()
    errors = [row.get("ref/kl_error") for row in lines(tmp_path / "run")]
    assert errors[0] > 0 and errors[1:] == [None] and reference.exact is None
    quantized, truth = (torch.cat(r.score(seen[0], WHOLE)) for r in (reference, exact))
    d = (quantized - truth).double()
    assert errors[0] == pytest.approx((d.exp() - d - 1).mean().item(), rel=1e-3)

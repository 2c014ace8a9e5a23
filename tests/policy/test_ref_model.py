"""The reference: which kind is made, that it stays what it was, quantization and its error, and synchronization."""

import sys

import pytest
import tiny
import torch
from runs import PROMPTS, lines, make_trainer, samples_of, share_of_a

from fastgrpo import GRPOConfig, GRPOTrainer
from fastgrpo.data.records import Batch
from fastgrpo.policy.model import Policy
from fastgrpo.policy.ref_model import (
    AdaptersOff,
    FrozenCopy,
    QuantizedCopy,
    Scoring,
    StreamedCopy,
    make_reference,
    quantize,
    score,
)

pytestmark = pytest.mark.usefixtures("without_curves")

PACKAGES = {"int8": "torchao", "nf4": "bitsandbytes"}
# Relative error of a random weight, in the Frobenius norm: 8 bits with one scale a row of 32 to 64, 4 bits in blocks.
WEIGHT_ERROR = {"int8": 0.01, "nf4": 0.12}


def wide(**changes):
    """A policy whose layers have multiples of 64 inputs, as nf4 on a CPU needs."""
    return tiny.model(hidden_size=64, **changes)


@pytest.fixture(params=sorted(PACKAGES))
def quantization(request):
    pytest.importorskip(PACKAGES[request.param], reason="not installed (extra: quantization)")
    return request.param


def test_which_reference():
    model = tiny.model()
    assert make_reference(Policy.of(model), 0.0) is None
    assert type(make_reference(Policy.of(model), 0.1)) is FrozenCopy
    assert type(make_reference(Policy.of(model), 0.1, device="cpu")) is StreamedCopy
    pytest.importorskip("peft", reason="peft is not installed (extra: lora)")
    from fastgrpo.policy.lora import add_lora

    assert type(make_reference(Policy.of(add_lora(model)), 0.1)) is AdaptersOff


@pytest.mark.parametrize("kind", [FrozenCopy, StreamedCopy])
def test_a_copy_stays_when_the_policy_moves(kind):
    model = tiny.model("smollm3-like")
    reference = kind(Policy(model))
    expected = score(Policy.of(model), samples_of(), Scoring(1.0, 10_000))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.1)
    for got, want in zip(reference.score(samples_of(), Scoring(1.0, 10_000)), expected, strict=True):
        assert torch.equal(got, want)
    assert not any(p.requires_grad for p in reference.policy.module.parameters())
    assert (
        reference.policy.module.lm_head.weight is reference.policy.module.base_model.embed_tokens.weight
    )  # tied stays tied


def check_states(reference):
    """States and head together give the log-probs of `score`, carry no gradient, and last after the pass."""
    samples = samples_of()
    batch = Batch.pack(samples, "cpu")
    states, (weight, bias, softcap) = reference.states(batch)
    assert not states.requires_grad and not weight.requires_grad and bias is None and softcap is None
    assert torch.equal(weight, reference.policy.head.weight)
    logps = (states @ weight.T / 0.9).log_softmax(-1).gather(-1, batch.targets[:, None])[:, 0]
    expected = torch.cat(reference.score(samples, Scoring(0.9, 10_000)))
    torch.testing.assert_close(logps, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("kind", [FrozenCopy, StreamedCopy])
def test_states_of_a_copy(kind):
    check_states(kind(Policy(tiny.model("smollm3-like"))))


def test_states_with_adapters_off():
    pytest.importorskip("peft", reason="peft is not installed (extra: lora)")
    from fastgrpo.policy.lora import add_lora

    model = add_lora(tiny.model())
    torch.nn.init.normal_(model.get_parameter("model.layers.0.self_attn.q_proj.lora_B.default.weight"))
    check_states(AdaptersOff(Policy(model)))


def test_states_of_a_quantized_copy(quantization):
    check_states(QuantizedCopy(Policy(wide()), quantization))


@pytest.mark.parametrize("kind", [FrozenCopy, StreamedCopy])
def test_sync_is_trls_formula(kind):
    policy, reference = Policy(tiny.model(seed=1)), kind(Policy(tiny.model(seed=2)))
    before = {name: p.clone() for name, p in reference.policy.module.named_parameters()}
    reference.sync(policy, 0.6)
    for name, parameter in reference.policy.module.named_parameters():
        expected = before[name].mul(1.0 - 0.6).add(policy.module.get_parameter(name).data, alpha=0.6)
        torch.testing.assert_close(parameter, expected, rtol=1e-6, atol=1e-7)
    reference.sync(policy, 1.0)
    for got, want in zip(
        reference.score(samples_of(), Scoring(1.0, 99)),
        score(Policy.of(policy), samples_of(), Scoring(1.0, 99)),
        strict=True,
    ):
        torch.testing.assert_close(got, want, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("device", [None, "cpu"])
def test_the_trainer_syncs_every_so_many_steps(tmp_path, device):
    trainer = make_trainer(
        tmp_path, beta=0.1, sync_ref_model=True, ref_model_sync_steps=2, ref_model_mixup_alpha=1.0, max_steps=4,
        learning_rate=1e-2, ref_storage=device,
    )  # fmt: skip
    reference = trainer.updates.reference.policy.module
    start, weights = reference.lm_head.weight.clone(), reference.lm_head.weight
    trainer.step()
    assert torch.equal(weights, start) and not torch.equal(trainer.model.lm_head.weight, start)
    trainer.step()
    assert torch.equal(reference.lm_head.weight, trainer.model.lm_head.weight)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_quantized_layers_are_near_and_the_head_is_exact(quantization, dtype):
    model, exact = wide().to(dtype), wide().to(dtype)
    quantized = quantize(model.requires_grad_(False), quantization, "cpu")
    assert torch.equal(quantized.lm_head.weight, exact.lm_head.weight) and quantized.lm_head.weight.dtype == dtype
    assert torch.equal(quantized.base_model.embed_tokens.weight, exact.base_model.embed_tokens.weight)
    for name in ("layers.0.self_attn.q_proj", "layers.1.mlp.down_proj"):
        ours, theirs = quantized.base_model.get_submodule(name), exact.base_model.get_submodule(name)
        x = torch.eye(theirs.in_features, dtype=dtype)
        bias = 0 if theirs.bias is None else theirs.bias
        weight = (ours(x) - bias).T
        assert weight.dtype == dtype
        error = (weight - theirs.weight).float().norm() / theirs.weight.float().norm()
        assert 0.1 * WEIGHT_ERROR[quantization] < error < WEIGHT_ERROR[quantization]


def test_quantized_layers_take_the_memory_they_promise(quantization):
    model = quantize(tiny.model(hidden_size=256, intermediate_size=512).bfloat16(), quantization, "cpu")
    layer = model.base_model.layers[0].mlp.up_proj
    weight, entries = layer.weight, 256 * 512
    data = weight.qdata if quantization == "int8" else weight.data
    assert data.numel() * data.element_size() == {"int8": entries, "nf4": entries // 2}[quantization]


def test_the_error_of_quantization_is_logged_once(quantization, tmp_path):
    args = GRPOConfig(
        output_dir=str(tmp_path / "run"), beta=0.1, ref_storage=quantization, max_steps=2, prompts_per_step=4,
        max_completion_length=6, num_generations=4, learning_rate=1e-3, logging_steps=1, device="cpu",
    )  # fmt: skip
    trainer = GRPOTrainer(wide(vocab_size=258), share_of_a, args, PROMPTS, processing_class=tiny.tokenizer())
    reference, samples = trainer.reference, None
    exact = FrozenCopy(trainer.policy)
    measure = reference.measure

    def keep(scored, *how):
        nonlocal samples
        samples = samples or scored
        return measure(scored, *how)

    reference.measure = keep
    trainer.train()
    errors = [row.get("ref/kl_error") for row in lines(tmp_path / "run" / "metrics.jsonl")]
    assert errors[0] > 0 and errors[1:] == [None]
    assert reference.exact is None
    quantized, truth = (torch.cat(r.score(samples, Scoring(1.0, 10_000))) for r in (reference, exact))
    d = (quantized - truth).double()
    assert errors[0] == pytest.approx((d.exp() - d - 1).mean().item(), rel=1e-3)


def test_the_error_is_measured_with_the_full_kl_too(quantization, tmp_path):
    model = wide(vocab_size=258)
    trainer = make_trainer(tmp_path, model=model, beta=0.1, kl="full", ref_storage=quantization)
    trainer.train()
    rows = lines(tmp_path / "run" / "metrics.jsonl")
    assert rows[0]["ref/kl_error"] > 0 and rows[0]["kl"] > 0 and "ref/kl_error" not in rows[1]


def test_int8_errs_less_than_nf4():
    for package in PACKAGES.values():
        pytest.importorskip(package, reason="not installed (extra: quantization)")
    errors = {}
    for name in PACKAGES:
        reference = QuantizedCopy(Policy(wide()), name)
        errors[name] = reference.measure(samples_of(), Scoring(1.0, 10_000))["ref/kl_error"]
        assert reference.measure(samples_of(), Scoring(1.0, 10_000)) == {}
    assert 0 < errors["int8"] < 0.1 * errors["nf4"]


def test_nf4_on_a_cpu_refuses_what_it_would_get_wrong():
    pytest.importorskip("bitsandbytes", reason="not installed (extra: quantization)")
    with pytest.raises(ValueError, match=r"q_proj has 32 inputs.*multiple of 64"):
        quantize(tiny.model(), "nf4", "cpu")


@pytest.mark.parametrize("name", sorted(PACKAGES))
def test_a_package_that_is_not_there_is_named(name, monkeypatch):
    for module in [*sys.modules]:
        if module.split(".")[0] == PACKAGES[name]:
            monkeypatch.delitem(sys.modules, module)
    monkeypatch.setitem(sys.modules, PACKAGES[name], None)
    with pytest.raises(ValueError, match=rf"{name} needs {PACKAGES[name]}: pip install 'fastgrpo\[quantization\]'"):
        quantize(tiny.model(), name, "cpu")


@pytest.mark.parametrize(
    "settings, match",
    [
        ({"ref_storage": "cpu"}, "ref_storage has an effect only where beta is above 0; leave it out"),
        ({"sync_ref_model": True}, "sync_ref_model has an effect only where beta is above 0"),
        ({"beta": 0.1, "ref_storage": "disk"}, "ref_storage must be one of None, cpu, int8, nf4, got 'disk'"),
        ({"beta": 0.1, "sync_ref_model": True, "use_peft": True}, "sync_ref_model does not go with use_peft"),
        ({"beta": 0.1, "ref_storage": "cpu", "use_peft": True}, "ref_storage does not go with use_peft"),
        (
            {"beta": 0.1, "sync_ref_model": True, "ref_storage": "int8"},
            "sync_ref_model does not go with ref_storage=int8",
        ),
        ({"ref_model_mixup_alpha": 0}, "ref_model_mixup_alpha must be in"),
        ({"ref_model_sync_steps": 0}, "ref_model_sync_steps must be at least 1"),
    ],
)
def test_settings_that_do_not_fit(settings, match):
    with pytest.raises(ValueError, match=match):
        GRPOConfig(**settings)

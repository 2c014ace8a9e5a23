"""Adapters: they learn, the base stays as it was, files reload, the reference is the policy without them."""

import json

import pytest
import tiny
import torch
from runs import PROMPTS, lines, samples_of
from transformers import AutoModelForCausalLM

from fastgrpo import GRPOConfig, GRPOTrainer
from fastgrpo.data.records import Batch
from fastgrpo.loss.objective import Objective
from fastgrpo.policy.load import read_weights
from fastgrpo.policy.model import Policy
from fastgrpo.policy.ref_model import Scoring, make_reference, score
from fastgrpo.rollout.engine import RolloutEngine
from fastgrpo.rollout.sampling import SamplingParams
from fastgrpo.trainer.optim import MasterAdamW, make_schedule
from fastgrpo.trainer.update import GRPOUpdate, Learner

peft = pytest.importorskip("peft", reason="peft is not installed (extra: lora)")

from fastgrpo.policy.lora import add_lora, has_adapters, merged  # noqa: E402

pytestmark = pytest.mark.usefixtures("without_curves")
ALL = ("all-linear",)
IDS = torch.tensor([[5, 9, 2, 33, 17, 8, 60]])


def base_weights(model):
    return {name.replace(".base_layer", ""): p for name, p in model.named_parameters() if ".lora_" not in name}


def loaded(model, path):
    """The model with the adapters of a checkpoint folder."""
    policy = Policy(model)
    policy.load_state_dict(read_weights(policy, path))
    return model


def with_adapters(name="qwen2", seed=1, **changes):
    """A policy whose adapters do something."""
    model = add_lora(tiny.model(name, **changes), r=4, target_modules=ALL)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if ".lora_B" in name:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.2)
    return model


def make_update(model, beta=0.0, max_tokens=10_000):
    optimizer = MasterAdamW(model, learning_rate=3e-2)
    schedule = make_schedule(optimizer, "constant", warmup_steps=0, total_steps=1)
    learner = Learner(Policy.of(model), optimizer, schedule, max_grad_norm=1.0, max_tokens=max_tokens)
    return GRPOUpdate(
        Policy.of(model), make_reference(Policy.of(model), beta), learner, Objective(beta=beta), temperature=1.0
    )


def vowels(completions, **_):
    """The share of vowels: about 0.02 at random."""
    return [sum(character in "aeiou" for character in text) / 6 for text in completions]


def test_the_reward_climbs_and_the_base_does_not_move(tmp_path):
    before = tiny.model(vocab_size=258)
    with torch.no_grad():  # the head stays as it is, and a small one cannot be sure of any token
        before.get_output_embeddings().weight.mul_(10)
    before.save_pretrained(tmp_path / "model")
    run = tmp_path / "run"
    args = GRPOConfig(
        output_dir=str(run), max_steps=20, num_generations=32, prompts_per_step=8, max_completion_length=6,
        learning_rate=2e-2, lr_scheduler_type="constant", beta=1e-3, use_peft=True, lora_target_modules=ALL,
        logging_steps=1, device="cpu",
    )  # fmt: skip
    trainer = GRPOTrainer(str(tmp_path / "model"), vowels, args, PROMPTS, processing_class=tiny.tokenizer())
    trainer.train()
    rewards = [row["reward"] for row in lines(run / "metrics.jsonl") if "reward" in row]
    assert rewards[0] <= 0.2 and max(rewards) >= 0.9
    after = base_weights(trainer.policy.module)
    assert all(torch.equal(after.pop(name), p) for name, p in before.named_parameters()) and not after
    kls = [row["kl"] for row in lines(run / "metrics.jsonl") if "kl" in row]
    assert kls[0] == pytest.approx(0, abs=1e-6) and kls[-1] > 0.1

    # What is saved: adapters in peft's own format, and a plain model.
    checkpoint = run / "checkpoint-20"
    assert not (checkpoint / "model.safetensors").exists()
    assert json.loads((checkpoint / "adapter_config.json").read_text())["r"] == 16
    logits = trainer.model(IDS).logits
    loaded = peft.PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(tmp_path / "model"), checkpoint)
    torch.testing.assert_close(loaded(IDS).logits, logits, atol=0, rtol=0)
    whole = AutoModelForCausalLM.from_pretrained(run / "merged")
    torch.testing.assert_close(whole(IDS).logits, logits, atol=2e-4, rtol=1e-4)
    assert (before(IDS).logits - logits).abs().max() > 0.1


def test_adapters_start_as_nothing_and_the_seed_makes_them():
    plain, model = tiny.model(), add_lora(tiny.model(), target_modules=ALL, seed=3)
    assert torch.equal(model(IDS).logits, plain(IDS).logits)
    again, other = (add_lora(tiny.model(), target_modules=ALL, seed=seed) for seed in (3, 4))
    same = [torch.equal(a, b) for a, b in zip(model.parameters(), again.parameters(), strict=True)]
    assert all(same)
    assert not all(torch.equal(a, b) for a, b in zip(model.parameters(), other.parameters(), strict=True))


def test_torchs_own_random_state_is_left_alone():
    expected = torch.manual_seed(5) and torch.rand(3)
    torch.manual_seed(5)
    model = tiny.model()
    torch.manual_seed(5)
    add_lora(model)
    assert torch.equal(torch.rand(3), expected)


@pytest.mark.parametrize("name", ["qwen2", "qwen3", "llama", "smollm3-like"])
def test_merged_equals_adapters_on(name):
    model = with_adapters(name)
    plain = merged(model)
    assert [n for n, _ in plain.named_parameters()] == [n for n, _ in tiny.model(name).named_parameters()]
    torch.testing.assert_close(plain(IDS).logits, model(IDS).logits, atol=1e-4, rtol=1e-4)
    tied = plain.get_output_embeddings().weight is plain.get_input_embeddings().weight
    assert tied == plain.config.tie_word_embeddings


def test_adapters_reload_in_place(tmp_path):
    model = with_adapters()
    model.save_pretrained(tmp_path)
    other = add_lora(tiny.model(), r=4, target_modules=ALL)
    assert not torch.equal(other(IDS).logits, model(IDS).logits)
    assert torch.equal(loaded(other, tmp_path)(IDS).logits, model(IDS).logits)
    adapters = {name: value for name, value in with_adapters(seed=2).state_dict().items() if ".lora_" in name}
    model.save_pretrained(tmp_path, state_dict=adapters)  # as a copy of them on the host is saved
    assert torch.equal(loaded(other, tmp_path)(IDS).logits, with_adapters(seed=2)(IDS).logits)
    for settings in ({"r": 8, "target_modules": ALL}, {"r": 4, "target_modules": ["q_proj"]}):
        with pytest.raises(ValueError, match="other modules or shapes"):
            loaded(add_lora(tiny.model(), **settings), tmp_path)


def test_the_reference_is_the_policy_without_adapters():
    model, samples = with_adapters(), samples_of()
    reference = make_reference(Policy.of(model), 0.1)
    assert reference.policy.module is model
    expected = score(Policy.of(tiny.model()), samples, Scoring(0.9, 20))
    for got, want in zip(reference.score(samples, Scoring(0.9, 20)), expected, strict=True):
        torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-5)
    on = score(Policy.of(model), samples, Scoring(0.9, 20))
    assert (on[0] - expected[0]).abs().max() > 1e-2  # and they are on again
    trainable = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    assert trainable and all(".lora_" in name for name in trainable)


@pytest.mark.parametrize("checkpointing", [False, True])
def test_gradients_equal_those_of_the_merged_weights(checkpointing):
    """dA = scale B^T dW, dB = scale dW A^T, with dW of the model in which the adapters are merged."""
    model = tiny.model(gradient_checkpointing=checkpointing).double()
    add_lora(model, r=4, alpha=12, target_modules=["q_proj", "down_proj"])
    for name, parameter in model.named_parameters():
        if ".lora_B" in name:
            parameter.data.normal_(generator=torch.Generator().manual_seed(1))
    plain = merged_exactly(model)
    batch = Batch.pack(samples_of(), "cpu")
    for policy in (model, plain):
        Policy.of(policy).completion_states(batch).square().sum().backward()
    for name in ("layers.0.self_attn.q_proj", "layers.1.mlp.down_proj"):
        layer = model.base_model.get_submodule(name)
        a, b = layer.lora_A["default"].weight, layer.lora_B["default"].weight
        dw = plain.base_model.get_submodule(name).weight.grad
        torch.testing.assert_close(a.grad, 3 * b.T @ dw, atol=1e-9, rtol=1e-9)
        torch.testing.assert_close(b.grad, 3 * dw @ a.T, atol=1e-9, rtol=1e-9)
    assert all(p.grad is None for p in base_weights(model).values())


def merged_exactly(model):
    """The same model with plain fp64 weights W + 3 B A."""
    plain = tiny.model().double()
    for name, parameter in plain.named_parameters():
        if not name.endswith("_proj.weight") or ("q_proj" not in name and "down_proj" not in name):
            continue
        layer = model.get_submodule(name.removesuffix(".weight"))
        parameter.data += 3 * layer.lora_B["default"].weight.data @ layer.lora_A["default"].weight.data
    return plain


def test_rollouts_see_the_adapters():
    model = with_adapters()
    sampling = SamplingParams(temperature=0.0, max_tokens=8)
    drawn = [rollout.ids for rollout in RolloutEngine(model).generate([[5, 9, 2], [3, 40]], 1, sampling)]
    same = [rollout.ids for rollout in RolloutEngine(merged(model)).generate([[5, 9, 2], [3, 40]], 1, sampling)]
    base = [rollout.ids for rollout in RolloutEngine(tiny.model()).generate([[5, 9, 2], [3, 40]], 1, sampling)]
    assert drawn == same != base


def test_the_heads_gradient_is_not_computed():
    """Only the products of the layers and two of the head's three: hidden [M, D] x [D, V], and dH."""
    model = with_adapters("llama", vocab_size=96)  # a size that nothing else has
    weight, _, _ = Policy.of(model).head
    assert not weight.requires_grad
    products = []

    class Count(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            if func in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default, torch.ops.aten.mm.out,
                        torch.ops.aten.addmm_.default):  # fmt: skip
                products.append(tuple(out.shape))
            return out

    with Count():
        make_update(model)([samples_of()])
    vocabulary = model.config.vocab_size
    assert sum(vocabulary in shape for shape in products) == 1  # the logits
    assert (vocabulary, model.config.hidden_size) not in products
    assert weight.grad is None


def test_bf16_adapters_have_masters_and_learn_with_the_reference_switching_them_off():
    model = add_lora(tiny.model().bfloat16(), r=4, target_modules=ALL)
    update = make_update(model, beta=0.1)
    optimizer = update.learner.optimizer
    assert {p.dtype for p in optimizer.masters} == {torch.float32}
    assert len(optimizer.pairs) == sum(p.requires_grad for p in model.parameters())
    before = [master.clone() for master in optimizer.masters]
    for _ in range(2):
        update([samples_of()])
    assert not any(torch.equal(a, b) for a, b in zip(before, optimizer.masters, strict=True))


@pytest.mark.parametrize(
    "targets, match",
    [
        (["lm_head"], "must not name the embedding or the head"),
        (["embed_tokens"], "must not name the embedding or the head"),
        (["nonsense"], r"lora_target_modules \['nonsense'\]: .*not found in the base model"),
    ],
)
def test_targets_that_do_not_fit(targets, match):
    with pytest.raises(ValueError, match=match):
        add_lora(tiny.model(), target_modules=targets)


def test_an_architecture_that_peft_does_not_know_needs_targets():
    with pytest.raises(ValueError, match=r"^peft has no choice of layers for a SmolLM3ForCausalLM: set lora_targ"):
        add_lora(tiny.model("smollm3"))
    assert has_adapters(add_lora(tiny.model("smollm3"), target_modules=ALL))


def test_adapters_on_adapters_are_refused():
    with pytest.raises(ValueError, match="adapters already"):
        add_lora(with_adapters())


@pytest.mark.parametrize("settings", [{}, {"use_peft": True}])
def test_training_starts_from_merged_weights(tmp_path, settings):
    args = GRPOConfig(output_dir=str(tmp_path / "run"), max_steps=1, device="cpu", **settings)
    with pytest.raises(ValueError, match="has adapters already; start from merged weights"):
        GRPOTrainer(with_adapters(vocab_size=258), vowels, args, PROMPTS, processing_class=tiny.tokenizer())
    assert not (tmp_path / "run").exists()


def test_settings():
    for name, value in (("lora_r", 4), ("lora_alpha", 8), ("lora_target_modules", "q_proj")):
        with pytest.raises(ValueError, match=f"{name} has an effect only where use_peft is True; leave it out"):
            GRPOConfig(**{name: value})
    assert GRPOConfig(use_peft=True, lora_target_modules="all-linear").lora_target_modules == ("all-linear",)
    for name in ("lora_r", "lora_alpha"):
        with pytest.raises(ValueError, match=f"{name} must be at least 1"):
            GRPOConfig(**{name: 0})


def test_a_peft_that_transformers_cannot_save_with_is_refused_before_the_first_step(monkeypatch):
    monkeypatch.setattr("transformers.integrations.peft.MIN_PEFT_VERSION", "999.0")
    with pytest.raises(ValueError, match=r"needs peft 999\.0 or newer, and this is peft "):
        add_lora(tiny.model(), r=4)

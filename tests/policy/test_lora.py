"""Adapters: they learn, the base does not change, files reload, the reference is the policy without adapters."""

import copy

import pytest
import tiny
import torch
import transformers
from runs import PROMPTS, lines, samples_of

from fastgrpo import GRPOConfig, GRPOTrainer
from fastgrpo.policy.model import Policy
from fastgrpo.policy.ref_model import Scoring, make_reference, score
from fastgrpo.rollout.engine import RolloutEngine
from fastgrpo.rollout.sampling import SamplingParams

peft = pytest.importorskip("peft", reason="peft is not installed (extra: lora)")

from fastgrpo.policy import lora  # noqa: E402
from fastgrpo.policy.load import load_model, refuse_changed  # noqa: E402
from fastgrpo.policy.lora import add_lora, base_weights, has_adapters, lora_settings, merged, unwrapped  # noqa: E402

pytestmark = pytest.mark.usefixtures("without_curves")
ALL = ("all-linear",)
IDS = torch.tensor([[5, 9, 2, 33, 17, 8, 60]])


def with_adapters(name="qwen2", seed=1, **changes):
    """Adapters that do something: fresh ones have B = 0."""
    return tiny.stir(add_lora(tiny.model(name, **changes), r=4, target_modules=ALL), ".lora_B", seed=seed)


def vowels(completions, **_):
    return [sum(character in "aeiou" for character in text) / 6 for text in completions]


def test_the_reward_climbs_and_the_base_does_not_move(tmp_path):
    before = tiny.model(vocab_size=258)
    with torch.no_grad():  # the head stays as it is, and a small one cannot be sure of any token
        before.get_output_embeddings().weight.mul_(10)
    before.save_pretrained(tmp_path / "model")
    run = tmp_path / "run"
    args = GRPOConfig(
        output_dir=str(run), max_steps=12, num_generations=32, prompts_per_step=8, max_completion_length=6,
        learning_rate=2e-2, lr_scheduler_type="constant", beta=1e-3, use_peft=True, lora_target_modules=ALL,
        logging_steps=1, device="cpu",
    )  # fmt: skip
    trainer = GRPOTrainer(str(tmp_path / "model"), vowels, args, PROMPTS, processing_class=tiny.tokenizer())
    trainer.train()
    rows = lines(run)
    rewards, kls = ([row[name] for row in rows if name in row] for name in ("reward", "kl"))
    assert rewards[0] <= 0.2 and max(rewards) >= 0.6
    assert kls[0] == pytest.approx(0, abs=1e-6) and kls[-1] > 0.1
    after, start = base_weights(trainer.policy.module), before.state_dict()
    assert after.keys() == start.keys() and all(torch.equal(after[name], value) for name, value in start.items())


def test_new_adapters_change_nothing_and_depend_only_on_the_seed():
    first, again, other = (add_lora(tiny.model(), target_modules=ALL, seed=seed) for seed in (3, 3, 4))
    assert torch.equal(first(IDS).logits, tiny.model()(IDS).logits)
    assert all(map(torch.equal, first.parameters(), again.parameters()))
    assert not all(map(torch.equal, first.parameters(), other.parameters()))
    model, state = tiny.model(), torch.get_rng_state()
    add_lora(model)
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("name", ["qwen2", "qwen3", "smollm3-like"])
def test_merged_weights_equal_the_adapters_also_in_rollouts(name):
    model = with_adapters(name)
    plain = merged(model)
    assert [n for n, _ in plain.named_parameters()] == [n for n, _ in tiny.model(name).named_parameters()]
    torch.testing.assert_close(plain(IDS).logits, model(IDS).logits, atol=1e-4, rtol=1e-4)
    tied = plain.get_output_embeddings().weight is plain.get_input_embeddings().weight
    assert tied == plain.config.tie_word_embeddings
    sampling = SamplingParams(temperature=0.0, max_tokens=8)
    drawn, same, base = (
        [rollout.ids for rollout in RolloutEngine(each).generate([[5, 9, 2], [3, 40]], 1, sampling)]
        for each in (model, plain, tiny.model(name))
    )
    assert drawn == same != base


def test_the_reference_is_the_policy_without_adapters():
    model, samples = with_adapters(), samples_of()
    reference = make_reference(Policy.of(model), 0.1)
    assert reference.policy.module is model
    expected = score(Policy.of(tiny.model()), samples, Scoring(0.9, 20))
    torch.testing.assert_close(reference.score(samples, Scoring(0.9, 20)), expected, atol=1e-5, rtol=1e-5)
    on = score(Policy.of(model), samples, Scoring(0.9, 20))
    assert (on[0] - expected[0]).abs().max() > 1e-2  # and they are on again
    trainable = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    assert trainable and all(".lora_" in name for name in trainable)


@pytest.mark.parametrize("name, targets", [("qwen2", ["lm_head"]), ("qwen2", ["embed_tokens"]), ("qwen2", ["nonsense"]),
                                           ("smollm3", ())])  # fmt: skip
def test_rejects_layers_that_cannot_be_adapted(name, targets):
    with pytest.raises(ValueError, match="lora_target_modules"):
        add_lora(tiny.model(name), target_modules=targets)
    assert has_adapters(add_lora(tiny.model(name), target_modules=ALL))


@pytest.mark.parametrize("family", ["Mixtral", "Phimoe", "Glm4Moe"])
def test_adapts_neither_fused_experts_nor_a_router(family):
    """Peft would wrap the parameters of Mixtral's experts, and treat Phimoe's router, a subclass, as a product.

    It would also take the dense MLP of Glm4Moe's first layer for experts.
    """
    config = getattr(transformers, f"{family}Config")(
        **tiny.SHAPE, num_local_experts=2, sliding_window=None, n_routed_experts=2, num_experts_per_tok=1
    )
    model = getattr(transformers, f"{family}ForCausalLM")(config)
    add_lora(model, target_modules=ALL)
    adapted = {name.split(".")[-1] for name, module in model.named_modules() if hasattr(module, "lora_A")}
    assert adapted == {"q_proj", "k_proj", "v_proj", "o_proj"} and model(IDS).logits.isfinite().all()
    if family == "Mixtral":
        with pytest.raises(ValueError, match="fused experts"):
            add_lora(transformers.MixtralForCausalLM(config), target_modules=["q_proj", "gate"])


@pytest.mark.parametrize("settings", [{}, {"use_peft": True}])
def test_rejects_a_model_that_has_adapters(tmp_path, settings):
    args = GRPOConfig(output_dir=str(tmp_path / "run"), max_steps=1, device="cpu", **settings)
    with pytest.raises(ValueError, match="adapters already"):
        GRPOTrainer(with_adapters(vocab_size=258), vowels, args, PROMPTS, processing_class=tiny.tokenizer())
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("options", [
    {"modules_to_save": ["lm_head"]}, {"use_dora": True}, {"target_modules": ["lm_head"]}, {"lora_bias": True},
])  # fmt: skip
def test_rejects_files_with_adapters_that_are_not_in_fastgrpo(tmp_path, options):
    tiny.model().save_pretrained(tmp_path / "base")
    base = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    config = peft.LoraConfig(**{"target_modules": ["q_proj"], "task_type": "CAUSAL_LM", "lora_dropout": 0.1, **options})
    peft.get_peft_model(base, config).save_pretrained(tmp_path / "adapters")
    with pytest.raises(ValueError, match=f"adapters with {next(iter(options))}"):
        load_model(tmp_path / "adapters")


@pytest.mark.parametrize("change", [
    lambda model: model.resize_token_embeddings(260),
    lambda model: model.model.layers[0].mlp.up_proj.weight.data.mul_(2),
])  # fmt: skip
def test_rejects_a_model_that_was_changed_in_memory(tmp_path, change):
    tiny.model(vocab_size=258).save_pretrained(tmp_path / "base")
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "base", dtype=torch.bfloat16).float()
    refuse_changed(model)
    change(model)
    args = GRPOConfig(output_dir=str(tmp_path / "run"), max_steps=1, device="cpu", use_peft=True)
    with pytest.raises(ValueError, match="changed after it was loaded"):
        GRPOTrainer(model, vowels, args, PROMPTS, processing_class=tiny.tokenizer())


@pytest.mark.parametrize("options, targets", [
    ({}, ()), ({"target_modules": ["v_proj", "q_proj"]}, ("q_proj", "v_proj")),
    ({"target_modules": "all-linear", "task_type": "CAUSAL_LM", "inference_mode": True}, ("all-linear",)),
])  # fmt: skip
def test_configs_of_peft_become_settings(options, targets):
    settings = lora_settings(peft.LoraConfig(r=4, lora_alpha=12, **options))
    assert settings == {"use_peft": True, "lora_r": 4, "lora_alpha": 12, "lora_target_modules": targets}


@pytest.mark.parametrize("options", [
    {"lora_dropout": 0.1}, {"use_dora": True}, {"modules_to_save": ["lm_head"]}, {"rank_pattern": {"q_proj": 2}},
    {"target_modules": ".*q_proj"}, {"task_type": "SEQ_CLS"},
])  # fmt: skip
def test_rejects_options_of_peft_that_are_not_in_fastgrpo(options):
    with pytest.raises(ValueError, match=next(iter(options))):
        lora_settings(peft.LoraConfig(**options))


def test_a_wrapper_gives_its_model_and_settings():
    def wrapped(name="default"):
        config = peft.LoraConfig(r=4, lora_alpha=12, target_modules=["q_proj"], task_type="CAUSAL_LM")
        return peft.get_peft_model(tiny.model(), config, adapter_name=name)

    wrapper = wrapped()
    assert lora.is_wrapper(wrapper) and not lora.is_wrapper(wrapper.get_base_model())
    model, settings = unwrapped(wrapper, allow_trained=False)
    assert model is wrapper.get_base_model()
    assert settings["lora_target_modules"] == ("q_proj",)
    assert base_weights(model).keys() == tiny.model().state_dict().keys()
    assert lora.taken_over(wrapper) is wrapper and has_adapters(model)
    plain = copy.deepcopy(wrapper).merge_and_unload()
    assert not has_adapters(plain) and has_adapters(model)
    tiny.stir(model, ".lora_B")  # adapters that have learned something are no reference
    assert unwrapped(wrapper, allow_trained=True)[0] is model
    with pytest.raises(ValueError, match="beta"):
        unwrapped(wrapper, allow_trained=False)
    with pytest.raises(ValueError, match="adapters mine"):
        unwrapped(wrapped("mine"), allow_trained=True)
    with pytest.raises(ValueError, match="PromptTuningConfig"):
        lora_settings(peft.PromptTuningConfig(num_virtual_tokens=2))

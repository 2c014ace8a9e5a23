"""Loading a policy: what ends a completion, what is taken over, and what does not fit is named."""

import pytest
import tiny
import torch

from fastgrpo.config.settings import GRPOConfig
from fastgrpo.policy.load import (
    check_vocabulary,
    load_policy,
    policy_and_tokenizer,
    prepare,
    read_weights,
    stop_token_ids,
)
from fastgrpo.policy.model import Policy


@pytest.mark.parametrize("configured, ids", [(None, (1,)), (1, (1,)), (7, (1, 7)), ([9, 1, 4], (1, 4, 9))])
def test_a_completion_ends_at_the_tokenizers_token_and_at_the_configs(configured, ids):
    policy = Policy.of(tiny.model())
    policy.module.generation_config.eos_token_id = configured
    assert stop_token_ids(policy, tiny.tokenizer()) == ids


def test_without_an_end_token_no_completion_could_end():
    policy, tokenizer = Policy.of(tiny.model()), tiny.tokenizer()
    policy.module.generation_config.eos_token_id = tokenizer.eos_token = None
    with pytest.raises(ValueError, match="the tokenizer has no end token"):
        stop_token_ids(policy, tokenizer)


def test_a_tokenizer_with_more_tokens_than_embeddings_is_refused():
    with pytest.raises(ValueError, match="the tokenizer has 258 tokens, the model's embedding only 64"):
        check_vocabulary(Policy.of(tiny.model(vocab_size=64)), tiny.tokenizer())
    check_vocabulary(Policy.of(tiny.model(vocab_size=258)), tiny.tokenizer())


def test_a_folder_gives_the_policy_and_its_tokenizer(tmp_path):
    policy, tokenizer = load_policy(tiny.save(tmp_path / "model"), device="cpu")
    assert isinstance(policy, Policy) and policy.dtype == torch.float32
    assert tokenizer.decode(tokenizer("ab")["input_ids"]) == "ab"
    with pytest.raises(ValueError, match=r"no such model folder: .*nowhere"):
        load_policy(tmp_path / "nowhere")


def test_whatever_loads_a_policy_gives_it_the_layers_that_are_wanted(tmp_path, monkeypatch):
    """`apply_liger` decides by the device and the package; here it is only seen to be asked."""
    asked, path = [], tiny.save(tmp_path / "model")
    monkeypatch.setattr("fastgrpo.policy.load.apply_liger", lambda *asks: asked.append(asks))
    policies = [load_policy(path, device="cpu")[0]]
    for wanted in (True, False, None):
        config = GRPOConfig(device="cpu", use_liger_kernel=wanted)
        policies += [policy_and_tokenizer(path, None, config)[0]]
        policies += [policy_and_tokenizer(tiny.model(vocab_size=258), tiny.tokenizer(), config)[0]]
    wants = [None, True, True, False, False, None, None]
    assert asked == [(policy.module, wanted) for policy, wanted in zip(policies, wants, strict=True)]


def test_weights_of_another_model_are_no_checkpoint_of_the_policy(tmp_path):
    policy = Policy.of(tiny.model())
    tiny.model(num_hidden_layers=1).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="lacks 12 of its weights"):
        read_weights(policy, tmp_path)
    tiny.model(num_hidden_layers=3).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"has 12 weights of layers beyond those that config.json counts"):
        read_weights(policy, tmp_path)
    tiny.model(intermediate_size=32).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="has 6 weights of other shapes"):
        read_weights(policy, tmp_path)


def test_a_model_of_peft_is_refused_with_the_remedy():
    peft = pytest.importorskip("peft", reason="peft is not installed (extra: lora)")
    model = peft.get_peft_model(tiny.model(vocab_size=258), peft.LoraConfig(target_modules=["q_proj"]))
    with pytest.raises(ValueError, match=r"a PeftModel: pass model.merge_and_unload\(\) .* with use_peft=True"):
        policy_and_tokenizer(model, tiny.tokenizer(), GRPOConfig(device="cpu"))
    merged, _ = policy_and_tokenizer(model.merge_and_unload(), tiny.tokenizer(), GRPOConfig(device="cpu"))
    assert isinstance(merged, Policy)


@pytest.mark.parametrize("model, kind", [(None, "NoneType"), (torch.nn.Linear(1, 1), "Linear"), (7, "int")])
def test_what_is_no_model_is_refused_by_its_type(model, kind):
    with pytest.raises(
        ValueError, match=f"model is of type {kind}; pass a folder, a hub id, a GGUF file or a transformers causal LM"
    ):
        policy_and_tokenizer(model, None, GRPOConfig(device="cpu"))


def test_a_model_without_a_head_or_with_quantized_weights_is_refused():
    model = tiny.model()
    with pytest.raises(ValueError, match="Qwen2Model is no causal LM; load the model with AutoModelForCausalLM"):
        prepare(model.base_model)
    model.is_quantized = True
    with pytest.raises(ValueError, match="Qwen2ForCausalLM has quantized weights, and training needs plain ones"):
        prepare(model)


def test_an_end_token_beyond_the_vocabulary_is_left_out_unless_it_is_the_only_one(caplog):
    policy, tokenizer = Policy.of(tiny.model()), tiny.tokenizer()
    policy.module.generation_config.eos_token_id = 50256  # the default of a GPT-2 config, whatever its vocabulary
    assert stop_token_ids(policy, tokenizer) == (1,)
    assert "names end tokens [50256], but the model has only 64 tokens: completions end at [1]" in caplog.text
    tokenizer.eos_token = None
    with pytest.raises(ValueError, match=r"name end tokens \[50256\], .* 64 .*so no completion could end; set"):
        stop_token_ids(policy, tokenizer)

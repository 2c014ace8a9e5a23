"""Reward models: what they are made of, what they judge, and which names are theirs."""

import pytest
import tiny
import torch
from transformers import (
    LlamaForSequenceClassification,
    Qwen2ForSequenceClassification,
    RobertaConfig,
    RobertaForSequenceClassification,
)

from fastgrpo.config.settings import GRPOConfig
from fastgrpo.rewards import find_reward, find_rewards, names_model
from fastgrpo.rewards.call import Rewards
from fastgrpo.rewards.models import RewardModel


def classifier(seed=0, labels=1, name="qwen2", **changes):
    torch.manual_seed(seed)
    kind = {"qwen2": Qwen2ForSequenceClassification, "llama": LlamaForSequenceClassification}[name]
    config = tiny.config(name, **{"vocab_size": 258, "pad_token_id": None, **changes})
    config.num_labels = labels
    return kind(config)


def saved(path, chat=False, **settings):
    classifier(**settings).save_pretrained(path)
    tiny.tokenizer(chat).save_pretrained(path)
    return path


def truth(model, text):
    """The logit of one text alone, which nothing pads."""
    ids = torch.tensor([tiny.tokenizer()(text)["input_ids"]])
    with torch.no_grad():
        return model(ids).logits[0, 0].item()


@pytest.mark.parametrize("name", ["qwen2", "llama"])
def test_each_text_is_judged_as_if_it_were_alone(name, monkeypatch):
    monkeypatch.setattr("fastgrpo.rewards.models.BATCH_TOKENS", 16)
    model = classifier(name=name)
    judge = RewardModel(model, tiny.tokenizer())
    prompts, completions = ["ab", "c", "hello "], ["x", "yyyyyyy", ""]
    rewards = judge(prompts, completions, answer=[1, 2, 3])
    assert rewards == pytest.approx([truth(model, p + c) for p, c in zip(prompts, completions, strict=True)], abs=1e-5)
    assert len(set(rewards)) == 3


def test_messages_go_through_the_template_of_the_reward_model():
    model = classifier()
    prompt, completion = [{"role": "user", "content": "ab"}], [{"role": "assistant", "content": "c"}]
    rewards = RewardModel(model, tiny.tokenizer(chat=True))([prompt], [completion])
    assert rewards == pytest.approx([truth(model, "<user>ab\n<assistant>c\n")], abs=1e-5)
    with pytest.raises(ValueError, match=r"has no chat template; pass one that has as reward_processing_classes"):
        RewardModel(model, tiny.tokenizer())([prompt], [completion])


def test_what_a_reward_model_needs():
    with pytest.raises(ValueError, match=r"Qwen2ForSequenceClassification with 2 labels"):
        RewardModel(classifier(labels=2), tiny.tokenizer())
    with pytest.raises(ValueError, match=r"is a Qwen2ForCausalLM .* a function f\(prompts"):
        RewardModel(tiny.model(), tiny.tokenizer())
    with pytest.raises(ValueError, match=r"in memory and has no tokenizer to load; pass reward_processing_classes"):
        RewardModel(classifier())
    tokenizer = tiny.tokenizer()
    tokenizer.pad_token = None
    with pytest.raises(ValueError, match=r"has no padding token.*set tokenizer.pad_token to a token that no text has"):
        RewardModel(classifier(), tokenizer)


def test_one_rule_reads_names(tmp_path):
    folder = saved(tmp_path / "judge")
    assert names_model(str(folder)) and names_model("org/model") and not names_model("math:sqrt")
    assert isinstance(find_reward(str(folder)), RewardModel)
    with pytest.raises(ValueError, match=r"no reward function 'accuracy'.* model by its folder or as ORG/MODEL"):
        find_rewards("accuracy", None)
    with pytest.raises(ValueError, match=r"the reward model of 'no/such' cannot be loaded"):
        find_rewards("no/such", None)


def test_rewards_of_all_kinds_stand_side_by_side(tmp_path):
    def length(completions, **_):
        return [float(len(text)) for text in completions]

    tokenizer = tiny.tokenizer()
    mixed = [length, str(saved(tmp_path / "judge", seed=1)), classifier()]
    functions = find_rewards(mixed, [None, None, tokenizer])
    assert functions[0] is length and functions[2].tokenizer is tokenizer
    assert Rewards(functions).names == ["length", "judge", "Qwen2ForSequenceClassification"]
    functions[2].model.to(torch.bfloat16)
    rewards = Rewards(functions)
    assert rewards.device(torch.device("meta")) == torch.device("meta")
    assert rewards.device(torch.device("meta"), "cpu") == torch.device("cpu")
    rewards.place(torch.device("meta"))
    for judge in functions[1:]:
        assert judge.model.device.type == "meta" and judge.model.dtype == torch.float32 and not judge.pooled


def test_a_device_for_reward_models_that_are_not_there_is_refused():
    rewards = Rewards(lambda completions, **_: [1.0] * len(completions))
    with pytest.raises(ValueError, match="device=cpu of reward_model_kwargs has an effect only where"):
        rewards.device(torch.device("cpu"), "cpu")
    with pytest.raises(ValueError, match=r"^device of reward_model_kwargs must be cuda, .*, got 'tpu7'"):
        Rewards(RewardModel(classifier(), tiny.tokenizer())).device(torch.device("cpu"), "tpu7")


def test_arguments_of_reward_models_are_texts():
    with pytest.raises(ValueError, match="device of reward_model_kwargs must be text, got 1; change it or leave it"):
        GRPOConfig(reward_model_kwargs={"device": 1})


def test_texts_that_are_too_long_get_no_reward(caplog):
    judge = RewardModel(classifier(), tiny.tokenizer())
    assert judge(["ab", "", ""], ["x" * 254, "", "y" * 257]) == [judge(["ab"], ["x" * 254])[0], None, None]
    assert "Qwen2ForSequenceClassification has 256 positions, and a prompt with its completion takes 257" in caplog.text
    assert judge([], []) == []


def test_an_encoder_reads_its_special_tokens_and_as_many_tokens_as_have_positions(caplog):
    torch.manual_seed(0)
    config = RobertaConfig(
        vocab_size=262, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16,
        max_position_embeddings=18, num_labels=1, pad_token_id=1,
    )  # fmt: skip
    model, tokenizer = RobertaForSequenceClassification(config).eval(), tiny.encoder_tokenizer()
    judge = RewardModel(model, tokenizer)

    def alone(text):
        ids = [tokenizer.cls_token_id, *tiny.tokenizer()(text)["input_ids"], tokenizer.sep_token_id]
        return model(torch.tensor([ids])).logits[0, 0].item()

    rewards = judge(["ab", "c", "c"], ["x" * 12, "y" * 3, "x" * 14])  # 16, 6 and 17 tokens
    assert rewards[:2] == pytest.approx([alone("ab" + "x" * 12), alone("cyyy")], abs=1e-5) and rewards[2] is None
    assert "has 16 positions, and a prompt with its completion takes 17 tokens" in caplog.text
    framed = judge(["[CLS]ab", "[CLS]c"], ["x", "y"])  # as a template could write
    assert framed == pytest.approx([framed_alone(model, tokenizer, text) for text in ("abx", "cy")], abs=1e-5)


def framed_alone(model, tokenizer, text):
    ids = [tokenizer.cls_token_id, *tiny.tokenizer()(text)["input_ids"]]
    return model(torch.tensor([ids])).logits[0, 0].item()


def test_there_are_as_many_tokenizers_as_rewards():
    with pytest.raises(ValueError, match=r"has 1 entries, which must match the 2 reward_funcs"):
        find_rewards([classifier(), classifier()], tiny.tokenizer())
    judge = find_rewards(classifier(), tiny.tokenizer())
    assert len(judge) == 1


def test_another_model_is_not_taken_for_one_with_a_head_made_at_random(tmp_path):
    tiny.save(tmp_path / "model")
    with pytest.raises(ValueError, match=r"is no reward model, for its files lack score\.weight; name a sequence"):
        find_reward(str(tmp_path / "model"))

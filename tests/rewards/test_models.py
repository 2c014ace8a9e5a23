"""Reward models and process reward models of both forms, against forward passes of one text each, without padding."""

import pytest
import tiny
import torch
import transformers
from samples import answer, length
from tokenizers import AddedToken
from transformers import Qwen2ForSequenceClassification, RobertaConfig, RobertaForSequenceClassification

from fastgrpo import GRPOConfig
from fastgrpo.data.records import Prompt
from fastgrpo.rewards import find_reward, find_rewards, names_model, prm_options
from fastgrpo.rewards.call import Rewards
from fastgrpo.rewards.models import ProcessRewardModel, RewardModel

PROMPTS = ["1+1=", "a long prompt: 2+2=", "x"]
COMPLETIONS = ["first\n\nsecond step\n\nthird", "only one", "a\n\nb\n\n"]
STEPS = [["first", "second step", "third"], ["only one"], ["a", "b"]]


def classifier(labels=1, seed=0, kind=Qwen2ForSequenceClassification, **changes):
    torch.manual_seed(seed)
    config = tiny.config(**{"vocab_size": 260, "pad_token_id": None, **changes})
    config.num_labels = labels
    return kind(config)


def labelled(labels=2, **changes):
    return classifier(labels, kind=transformers.Qwen2ForTokenClassification, **changes)


def causal(seed=0, **changes):
    return tiny.model(seed=seed, **{"vocab_size": 260, **changes})


def with_tag():
    tokenizer = tiny.tokenizer()
    tokenizer.add_tokens([AddedToken("<extra_0>", special=True)])
    return tokenizer


def saved(path, model, chat=False):
    model.save_pretrained(path)
    tiny.tokenizer(chat).save_pretrained(path)
    return str(path)


def ids_of(text, tokenizer=None):
    return (tokenizer or tiny.tokenizer())(text)["input_ids"]


@torch.no_grad()
def truth(model, ids):
    return model(torch.tensor([ids])).logits[0, 0].item()


@torch.no_grad()
def by_labels(model, prompt, steps, tag, tokenizer=None):
    """TRL's PRMTrainer reads the pieces one by one; the label stands at the last token of each tag."""
    ids, rewards = ids_of(prompt, tokenizer), []
    for step in steps:
        ids = ids + ids_of(step) + ids_of(tag, tokenizer)  # a tokenizer that knows no tag reads a step as text
        rewards.append(model(torch.tensor([ids])).logits[0, -1].softmax(-1)[1].item())
    return rewards


@torch.no_grad()
def by_tokens(model, prompt, steps, tag="ки", good="+", bad="-"):
    """Math-Shepherd: the next token after each tag, good against bad."""
    text, rewards = prompt + " ", []
    for i, step in enumerate(steps):
        text += ("\n" if i else "") + f"{step} {tag}"
        logits = model(torch.tensor([ids_of(text)])).logits[0, -1]
        rewards.append(logits[[ids_of(good)[0], ids_of(bad)[0]]].softmax(-1)[0].item())
    return rewards


def close(values, expected):
    assert values == [None if each is None else pytest.approx(each, abs=1e-5) for each in expected]


def test_each_text_is_judged_as_if_it_were_alone(monkeypatch):
    monkeypatch.setattr("fastgrpo.rewards.models.BATCH_TOKENS", 16)
    model = classifier()
    prompts, completions = ["ab", "c", "hello "], ["x", "yyyyyyy", ""]
    rewards = RewardModel(model, tiny.tokenizer())(prompts, completions, answer=[1, 2, 3])
    close(rewards, [truth(model, ids_of(p + c)) for p, c in zip(prompts, completions, strict=True)])
    assert len(set(rewards)) == 3
    prompt, completion = [{"role": "user", "content": "ab"}], [{"role": "assistant", "content": "c"}]
    rewards = RewardModel(model, tiny.tokenizer(chat=True))([prompt, "a"], [completion, "b"])
    close(rewards, [truth(model, ids_of(text)) for text in ("<user>ab\n<assistant>c\n", "ab")])
    with pytest.raises(ValueError, match="chat template"):
        RewardModel(model, tiny.tokenizer())([prompt], [completion])


LAST = GRPOConfig(reward_model_kwargs={"aggregation": "last"})
UNPADDED = tiny.tokenizer()
UNPADDED.pad_token = None
REFUSED = [
    ("reward_processing_classes", lambda: RewardModel(classifier())),
    ("padding token", lambda: RewardModel(classifier(), UNPADDED)),
    ("Qwen2ForSequenceClassification with 2 labels", lambda: RewardModel(classifier(2), tiny.tokenizer())),
    ("a Qwen2ForCausalLM", lambda: RewardModel(causal(), tiny.tokenizer())),
    ("a Qwen2ForTokenClassification", lambda: ProcessRewardModel(labelled(3), tiny.tokenizer())),
    ("aggregation", lambda: ProcessRewardModel(causal(), tiny.tokenizer(), aggregation="sum")),
    ("good_token", lambda: ProcessRewardModel(causal(), tiny.tokenizer(), good_token="yes!")),
    ("aggregation of reward_model_kwargs", lambda: prm_options(LAST, [len, "math:sqrt"])),
]


@pytest.mark.parametrize("told, call", REFUSED)
def test_rejects_models_that_are_not_reward_models(told, call):
    with pytest.raises(ValueError, match=told):
        call()


def test_finds_models_by_name_and_folder(tmp_path):
    outcome, steps = saved(tmp_path / "judge", classifier()), saved(tmp_path / "steps", labelled())
    assert names_model(outcome) and names_model("org/model") and not names_model("math:sqrt")
    assert isinstance(find_reward(outcome), RewardModel)
    found = find_reward(f"prm:{steps}")
    assert isinstance(found, ProcessRewardModel) and found.__name__ == "steps" and not found.pooled
    tiny.save(tmp_path / "policy")  # would get a head made at random
    for name in ("accuracy", "no/such", f"prm:{steps}/nowhere", f"prm:{outcome}", steps, f"{tmp_path}/policy"):
        with pytest.raises(ValueError, match=r"reward|process|no such model"):
            find_rewards(name, None)


def test_combines_functions_and_reward_models(tmp_path):
    tokenizer = tiny.tokenizer()
    mixed = [length, saved(tmp_path / "judge", classifier(seed=1)), classifier()]
    functions = find_rewards(mixed, [None, None, tokenizer])
    assert functions[0] is length and functions[2].tokenizer is tokenizer
    functions[2].model.to(torch.bfloat16)
    rewards = Rewards(functions)
    assert rewards.names == ["length", "judge", "Qwen2ForSequenceClassification"]
    assert rewards.device(torch.device("meta")) == torch.device("meta")
    assert rewards.device(torch.device("meta"), "cpu") == torch.device("cpu")
    rewards.place(torch.device("meta"))
    for judge in functions[1:]:
        assert judge.model.device.type == "meta" and judge.model.dtype == torch.float32 and not judge.pooled


def test_rotary_frequencies_of_a_16_bit_reward_model_stay_exact(monkeypatch):
    monkeypatch.setattr("fastgrpo.rewards.models.choose_dtype", lambda name, device: torch.bfloat16)
    judge = RewardModel(classifier(), tiny.tokenizer())
    frequencies = judge.model.model.rotary_emb.inv_freq.clone()
    judge.place(torch.device("cpu"))
    assert judge.model.dtype == torch.bfloat16
    assert torch.equal(judge.model.model.rotary_emb.inv_freq, frequencies)


@pytest.mark.parametrize(
    "judge, make", [(RewardModel, classifier), (ProcessRewardModel, labelled), (ProcessRewardModel, causal)]
)
def test_texts_that_are_too_long_get_no_reward_and_one_warning(judge, make, caplog):
    judge = judge(make(), tiny.tokenizer())
    assert judge(["ab", "", ""], ["x" * 200, "x" * 300, "y" * 257]) == [judge(["ab"], ["x" * 200])[0], None, None]
    assert caplog.text.count("256 positions") == 1
    assert judge([], []) == []


def test_an_encoder_reads_its_special_tokens_and_as_many_tokens_as_have_positions(caplog):
    torch.manual_seed(0)
    config = RobertaConfig(
        vocab_size=262, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16,
        max_position_embeddings=18, num_labels=1, pad_token_id=1,
    )  # fmt: skip
    model, tokenizer = RobertaForSequenceClassification(config).eval(), tiny.encoder_tokenizer()
    judge, first, last = RewardModel(model, tokenizer), tokenizer.cls_token_id, tokenizer.sep_token_id
    rewards = judge(["ab", "c", "c"], ["x" * 12, "y" * 3, "x" * 14])  # 16, 6 and 17 tokens
    close(rewards, [*(truth(model, [first, *ids_of(text), last]) for text in ("ab" + "x" * 12, "cyyy")), None])
    assert "16 positions" in caplog.text
    framed = judge(["[CLS]ab", "[CLS]c"], ["x", "y"])  # as a template could write
    close(framed, [truth(model, [first, *ids_of(text)]) for text in ("abx", "cy")])


@pytest.mark.parametrize("budget", [10, 10_000])
@pytest.mark.parametrize("form", [labelled, causal])
def test_each_step_is_judged_as_if_its_text_were_alone(form, budget, monkeypatch):
    monkeypatch.setattr("fastgrpo.rewards.models.BATCH_TOKENS", budget)
    model, logged, shapes = form(), {}, []
    judge = ProcessRewardModel(model, tiny.tokenizer(), aggregation="mean")
    if form is causal:
        model.lm_head.register_forward_hook(lambda _, states, logits: shapes.append(logits.shape))
    rewards = judge(PROMPTS, COMPLETIONS, log_extra=logged.__setitem__)
    assert sum(shape[1] for shape in shapes) == (6 if form is causal else 0)  # no logits but those of the steps
    ((name, found),) = logged.items()
    assert name == f"{type(model).__name__}/steps"
    for reward, mine, prompt, steps in zip(rewards, found, PROMPTS, STEPS, strict=True):
        expected = by_labels(model, prompt, steps, "\n\n") if form is labelled else by_tokens(model, prompt, steps)
        close([*mine, reward], [*expected, sum(expected) / len(expected)])
    assert len({reward for of_one in found for reward in of_one}) == 6


def test_the_tag_of_qwen_is_found_in_the_tokenizer():
    tokenizer, model = with_tag(), labelled()
    tokenizer.chat_template = tiny.CHAT_TEMPLATE
    judge = ProcessRewardModel(model, tokenizer, aggregation="last")
    assert judge.step_tag == "<extra_0>"
    prompts = [[{"role": "user", "content": p}] for p in PROMPTS]
    completions = [[{"role": "assistant", "content": c}] for c in COMPLETIONS]
    texts = [tokenizer.apply_chat_template(p, tokenize=False, add_generation_prompt=True) for p in prompts]
    expected = [by_labels(model, t, s, "<extra_0>", tokenizer) for t, s in zip(texts, STEPS, strict=True)]
    close(judge(prompts, completions), [of_one[-1] for of_one in expected])


SPELT = ["one <extra_0> two", "th<eos>ree"]  # a completion that spells the tag, and the end token


def spelt(text):
    return [token for char in text.encode() for token in ids_of(chr(char))]


def test_reads_a_tag_in_a_completion_as_text():
    """Otherwise a policy could set step tags of its own."""
    tokenizer, model = with_tag(), labelled()
    judge, tag = ProcessRewardModel(model, tokenizer, aggregation="min"), ids_of("<extra_0>", tokenizer)
    ids = [*ids_of("p"), *spelt(SPELT[0]), *tag, *spelt(SPELT[1]), *tag]
    probabilities = model(torch.tensor([ids])).logits.softmax(-1)[0, :, 1]
    close(judge(["p"], ["\n\n".join(SPELT)]), [probabilities[[len(spelt(SPELT[0])) + 1, -1]].min().item()])


def test_a_special_token_that_a_completion_spells_is_text_of_a_causal_lm_too():
    tokenizer, tag = with_tag(), "<extra_0>"
    judge, end = ProcessRewardModel(causal(), tokenizer, step_tag=tag), ids_of(tag, tokenizer)
    one, two = (spelt(f"{before}{step} ") for before, step in zip(" \n", SPELT, strict=True))
    ids, places = judge._text_with_tags("p", SPELT)
    assert ids == [*ids_of("p"), *one, *end, *two, *end] and places == [len(one) + len(end), len(ids) - 1]


def test_steps_are_logged_in_tokens_of_the_policy():
    model, name = labelled(), "Qwen2ForTokenClassification"
    rewards = Rewards(ProcessRewardModel(model, tiny.tokenizer()))
    rewards.place(rewards.device(torch.device("cpu")), tiny.tokenizer())

    def drawn(prompt, text):
        ids = [*ids_of(text), 1]
        return answer(Prompt(ids_of(prompt), prompt), ids, text, -torch.ones(len(ids)))

    judged = rewards([drawn(p, c) for p, c in zip(PROMPTS, COMPLETIONS, strict=True)])
    ends = [[end for end, _ in c.steps[name]] for c in judged.completions]
    # "first\n\n", "second step\n\n", "third" and the stop token; "a\n\n", and "b\n\n" with the stop token.
    assert ends == [[7, 20, 26], [9], [3, 7]]
    expected, first = by_labels(model, PROMPTS[0], STEPS[0], "\n\n"), judged.completions[0]
    close([reward for _, reward in first.steps[name]], expected)
    close(first.extras[f"{name}/steps"], expected)
    close([first.rewards[name]], [min(expected)])


def test_steps_of_a_dialogue_end_after_its_calls_and_answers():
    judge, logged = ProcessRewardModel(labelled(), tiny.tokenizer()), []
    judge.policy_tokenizer, last = tiny.tokenizer(), "it is 7\n\nyes"
    ids = [*ids_of(start := "it is 7\n\nadd.<tool_call>...</tool_call>\ntool: 7\n"), *ids_of(last)]
    turns = [{"role": r, "content": text} for r, text in (("assistant", "add."), ("tool", "7"), ("assistant", last))]
    judge(["p"], [turns], [ids], log_steps=lambda *steps: logged.append(steps))
    assert logged[0][0] == [[13, len(start) + 7, len(ids)]]


def test_settings_reach_the_model_of_a_folder(tmp_path):
    name = f"prm:{saved(tmp_path / 'steps', causal(seed=1))}"
    settings = {"separator": "; ", "step_tag": "#", "good_token": "y", "bad_token": "n", "aggregation": "product"}
    config = GRPOConfig(reward_funcs=[name], reward_model_kwargs=settings)
    (judge,) = find_rewards(name, None, prm=prm_options(config, name))
    prompt = [{"role": "system", "content": "be good"}, {"role": "user", "content": "1+1="}]
    one, two = by_tokens(causal(seed=1).eval(), "1+1=", ["one", "two"], "#", "y", "n")
    close(judge([prompt], [[{"role": "assistant", "content": "one; two"}]]), [one * two])
    assert judge(["p", "p"], ["", " ; "]) == [None, None]  # no step, no reward

"""Process reward models of both forms against forward passes of one text each, without padding."""

import json

import pytest
import tiny
import torch
from samples import answer
from tokenizers import AddedToken
from transformers import Qwen2ForSequenceClassification, Qwen2ForTokenClassification

from fastgrpo import GRPOConfig
from fastgrpo.data.records import Prompt
from fastgrpo.rewards import find_reward, find_rewards, prm_options
from fastgrpo.rewards.call import Rewards
from fastgrpo.rewards.models import ProcessRewardModel, aggregate

PROMPTS = ["1+1=", "a long prompt: 2+2=", "x"]
COMPLETIONS = ["first\n\nsecond step\n\nthird", "only one", "a\n\nb\n\n"]
STEPS = [["first", "second step", "third"], ["only one"], ["a", "b"]]


def classifier(labels=2, seed=0, kind=Qwen2ForTokenClassification, **changes):
    torch.manual_seed(seed)
    config = tiny.config(**{"vocab_size": 260, "max_position_embeddings": 256, **changes})
    config.num_labels = labels
    return kind(config)


def causal(seed=0, **changes):
    return tiny.model(seed=seed, **{"vocab_size": 260, **changes})


def ids_of(text, tokenizer=None):
    return (tokenizer or tiny.tokenizer())(text)["input_ids"]


def by_labels(model, prompt, steps, tag, tokenizer=None):
    """TRL's PRMTrainer reads the pieces one by one; the label stands at the last token of each tag."""
    ids, rewards = ids_of(prompt, tokenizer), []
    for step in steps:
        ids = ids + ids_of(step) + ids_of(tag, tokenizer)  # a tokenizer that knows no tag reads a step as text
        with torch.no_grad():
            rewards.append(model(torch.tensor([ids])).logits[0, -1].softmax(-1)[1].item())
    return rewards


def by_tokens(model, prompt, steps, tag="ки", good="+", bad="-"):
    """Math-Shepherd: the next token after each tag, good against bad."""
    text, rewards = prompt + " ", []
    for i, step in enumerate(steps):
        text += ("\n" if i else "") + f"{step} {tag}"
        with torch.no_grad():
            logits = model(torch.tensor([ids_of(text)])).logits[0, -1]
        rewards.append(logits[[ids_of(good)[0], ids_of(bad)[0]]].softmax(-1)[0].item())
    return rewards


def close(values, truth):
    assert [v is None for v in values] == [t is None for t in truth]
    assert [v for v in values if v is not None] == pytest.approx([t for t in truth if t is not None], abs=1e-5)


@pytest.mark.parametrize("budget", [10, 10_000])
def test_labels_at_the_end_of_each_step(budget, monkeypatch):
    monkeypatch.setattr("fastgrpo.rewards.models.BATCH_TOKENS", budget)
    model, logged = classifier(), {}
    judge = ProcessRewardModel(model, tiny.tokenizer(), aggregation="mean")
    rewards = judge(PROMPTS, COMPLETIONS, log_extra=logged.__setitem__)
    truth = [by_labels(model, p, steps, "\n\n") for p, steps in zip(PROMPTS, STEPS, strict=True)]
    close(rewards, [sum(of_one) / len(of_one) for of_one in truth])
    for mine, of_one in zip(logged["Qwen2ForTokenClassification/steps"], truth, strict=True):
        close(mine, of_one)
    assert len({reward for of_one in truth for reward in of_one}) == 6


def test_the_tag_of_qwen_is_found_in_the_tokenizer():
    tokenizer = tiny.tokenizer(chat=True)
    tokenizer.add_tokens([AddedToken("<extra_0>", special=True)])
    model = classifier()
    judge = ProcessRewardModel(model, tokenizer, aggregation="last")
    assert judge.step_tag == "<extra_0>"
    prompts = [[{"role": "user", "content": p}] for p in PROMPTS]
    completions = [[{"role": "assistant", "content": c}] for c in COMPLETIONS]
    texts = [tokenizer.apply_chat_template(p, tokenize=False, add_generation_prompt=True) for p in prompts]
    truth = [by_labels(model, t, s, "<extra_0>", tokenizer) for t, s in zip(texts, STEPS, strict=True)]
    close(judge(prompts, completions), [of_one[-1] for of_one in truth])


def test_good_and_bad_tokens_after_each_tag(monkeypatch):
    model, logged, shapes = causal(), {}, []
    judge = ProcessRewardModel(model, tiny.tokenizer(), aggregation="min")
    with monkeypatch.context() as patch:
        forward = model.lm_head.forward
        patch.setattr(model.lm_head, "forward", lambda states: shapes.append(states.shape) or forward(states))
        rewards = judge(PROMPTS, COMPLETIONS, log_extra=logged.__setitem__)
    assert shapes == [(1, sum(map(len, STEPS)), 32)]  # logits are made after the steps, and nowhere else
    truth = [by_tokens(model, p, steps) for p, steps in zip(PROMPTS, STEPS, strict=True)]
    close(rewards, [min(of_one) for of_one in truth])
    for mine, of_one in zip(logged["Qwen2ForCausalLM/steps"], truth, strict=True):
        close(mine, of_one)


def test_tag_and_tokens_of_ones_own_and_messages_without_a_template():
    model = causal(seed=1)
    judge = ProcessRewardModel(
        model, tiny.tokenizer(), separator="; ", step_tag="#", good_token="y", bad_token="n", aggregation="product"
    )
    prompts = [[{"role": "system", "content": "be good"}, {"role": "user", "content": "1+1="}]]
    rewards = judge(prompts, [[{"role": "assistant", "content": "one; two"}]])
    one, two = by_tokens(model, "1+1=", ["one", "two"], "#", "y", "n")
    close(rewards, [one * two])


SPELT = ["one <extra_0> two", "th<eos>ree"]  # a completion that spells the tag, and the end token


def test_a_tag_that_a_completion_spells_is_text():
    tokenizer = tiny.tokenizer()
    tokenizer.add_tokens([AddedToken("<extra_0>", special=True)])
    model = classifier()
    judge = ProcessRewardModel(model, tokenizer, aggregation="min")
    plain = [[t for char in step.encode() for t in ids_of(chr(char))] for step in SPELT]
    tag = ids_of("<extra_0>", tokenizer)
    ids = [*ids_of("p"), *plain[0], *tag, *plain[1], *tag]
    assert judge._ids_with_tags("p", SPELT) == (ids, [len(plain[0]) + 1, len(ids) - 1])
    probabilities = model(torch.tensor([ids])).logits.softmax(-1)[0, :, 1]
    close(judge(["p"], ["\n\n".join(SPELT)]), [probabilities[[len(plain[0]) + 1, -1]].min().item()])


@pytest.mark.parametrize("tag", ["<extra_0>", "ки"])
def test_a_special_token_that_a_completion_spells_is_text_of_a_causal_lm_too(tag):
    tokenizer = tiny.tokenizer()
    tokenizer.add_tokens([AddedToken("<extra_0>", special=True)])
    judge = ProcessRewardModel(causal(), tokenizer, step_tag=tag)
    ids, places = judge._text_with_tags("p", SPELT)
    end = ids_of(tag, tokenizer)
    pieces = [
        [t for char in f"{before}{step} ".encode() for t in ids_of(chr(char))]
        for before, step in zip(" \n", SPELT, strict=True)
    ]
    assert ids == [*ids_of("p"), *pieces[0], *end, *pieces[1], *end]
    assert places == [len(pieces[0]) + len(end), len(ids) - 1]


@pytest.mark.parametrize("chat", [False, True])
def test_the_text_of_an_encoder_begins_with_its_first_token(chat):
    tokenizer = tiny.encoder_tokenizer()
    judge = ProcessRewardModel(classifier(vocab_size=262), tokenizer)
    prompt = "p"
    if chat:
        tokenizer.chat_template, prompt = tiny.CHAT_TEMPLATE, [{"role": "user", "content": "p"}]
    ids, places = judge._ids_with_tags(prompt, ["a"])
    text = "<user>p\n<assistant>" if chat else "p"
    assert ids == [tokenizer.cls_token_id, *ids_of(text), *ids_of("a"), *ids_of("\n\n")] and places == [len(ids) - 1]


def test_how_steps_become_one_reward():
    steps = [0.5, 0.25, 1.0]
    values = [aggregate(steps, how) for how in ("min", "mean", "last", "product")]
    assert values == [0.25, 1.75 / 3, 1.0, 0.125]


@pytest.mark.parametrize("form", [classifier, causal])
def test_what_cannot_be_judged_has_no_reward(form, caplog):
    judge = ProcessRewardModel(form(), tiny.tokenizer())
    rewards = judge(["p", "p", "p"], ["", " \n\n ", "x" * 300])
    assert rewards == [None] * 3
    assert "has 256 positions, and a prompt with its completion takes 3" in caplog.text
    judge(["p"], ["x" * 300])
    assert caplog.text.count("positions") == 1
    assert judge([], []) == []


def test_steps_are_logged_in_tokens_of_the_policy():
    model = classifier()
    judge = ProcessRewardModel(model, tiny.tokenizer())
    rewards = Rewards(judge)
    rewards.place(rewards.device(torch.device("cpu")), tiny.tokenizer())

    def drawn(prompt, text, stop=(1,)):
        ids = [*ids_of(text), *stop]
        return answer(Prompt(ids_of(prompt), prompt), ids, text, -torch.ones(len(ids)))

    judged = rewards([drawn(p, c) for p, c in zip(PROMPTS, COMPLETIONS, strict=True)])
    name = "Qwen2ForTokenClassification"
    ends = [[end for end, _ in c.steps[name]] for c in judged.completions]
    # "first\n\n", "second step\n\n", "third" and the stop token; "a\n\n", and "b\n\n" with the stop token.
    assert ends == [[7, 20, 26], [9], [3, 7]]
    truth = by_labels(model, PROMPTS[0], STEPS[0], "\n\n")
    assert [reward for _, reward in judged.completions[0].steps[name]] == pytest.approx(truth, abs=1e-5)
    assert judged.completions[0].extras[f"{name}/steps"] == pytest.approx(truth, abs=1e-5)
    assert judged.completions[0].rewards[name] == pytest.approx(min(truth), abs=1e-5)


def test_models_of_another_kind_are_refused(tmp_path):
    tokenizer = tiny.tokenizer()
    with pytest.raises(ValueError, match=r"is a Qwen2ForTokenClassification, which judges no steps; .* with 2 labels"):
        ProcessRewardModel(classifier(labels=3), tokenizer)
    outcome = classifier(kind=Qwen2ForSequenceClassification, labels=1)
    with pytest.raises(ValueError, match=r"is a Qwen2ForSequenceClassification, .* name it without prm:"):
        ProcessRewardModel(outcome, tokenizer)
    with pytest.raises(ValueError, match=r"ForTokenClassification with 2 labels; .* process reward model is named"):
        find_rewards(classifier(), tokenizer)
    outcome.save_pretrained(tmp_path / "outcome")
    with pytest.raises(ValueError, match=r"is a Qwen2ForSequenceClassification; .* name it without prm:"):
        find_reward(f"prm:{tmp_path / 'outcome'}")
    with pytest.raises(ValueError, match=r"no such model folder|no config"):
        find_reward(f"prm:{tmp_path / 'nowhere'}")


@pytest.mark.parametrize(
    "settings, match",
    [
        ({"aggregation": "sum"}, "aggregation must be one of min, mean, last, product, got 'sum'"),
        ({"separator": ""}, "separator must not be empty"),
        ({"good_token": "yes!"}, "good_token='yes!' is not one token of Qwen2ForCausalLM, but 4"),
        ({"bad_token": ""}, "bad_token='' is not one token"),
    ],
)
def test_arguments_that_cannot_be(settings, match):
    with pytest.raises(ValueError, match=match):
        ProcessRewardModel(causal(), tiny.tokenizer(), **settings)


@pytest.mark.parametrize("form", [classifier, causal])
def test_a_folder_is_found_by_its_name_with_the_settings(form, tmp_path):
    folder = tmp_path / "steps"
    form().save_pretrained(folder)
    tiny.tokenizer().save_pretrained(folder)
    config = GRPOConfig(reward_funcs=[f"prm:{folder}"], reward_model_kwargs={"aggregation": "mean", "separator": "."})
    judge = find_reward(f"prm:{folder}", prm=config.prm)
    assert isinstance(judge, ProcessRewardModel) and (judge.aggregation, judge.separator) == ("mean", ".")
    assert judge.__name__ == "steps" and not judge.pooled
    (again,) = find_rewards(f"prm:{folder}", None, prm=prm_options(config, f"prm:{folder}"))
    model = form().eval()
    truth = by_labels(model, "p", ["a", "b"], ".") if form is classifier else by_tokens(model, "p", ["a", "b"])
    close(again(["p"], ["a.b"]), [sum(truth) / 2])


def test_settings_of_process_reward_models_without_one_are_refused():
    config = GRPOConfig(reward_model_kwargs={"aggregation": "last"})
    with pytest.raises(ValueError, match=r"^aggregation of reward_model_kwargs has an effect only where"):
        prm_options(config, [len, "math:sqrt"])
    assert json.dumps(prm_options(GRPOConfig(), []))

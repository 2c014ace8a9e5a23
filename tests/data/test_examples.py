"""Rows for supervised training as token ids: what is given, and what is learned."""

import pytest
import tiny

from fastgrpo.data.prompts import to_examples

QUESTION = {"role": "user", "content": "one"}
ANSWER = {"role": "assistant", "content": "two"}


def test_a_completion_is_learned_with_its_end_and_without_a_beginning():
    tokenizer = tiny.tokenizer()
    [example] = to_examples({"prompt": "one", "completion": "two"}, tokenizer)
    assert example.prompt_ids == tokenizer("one")["input_ids"]
    assert example.ids == [*tokenizer("two", add_special_tokens=False)["input_ids"], tokenizer.eos_token_id]
    assert len(example) == len(example.prompt_ids) + len(example.ids)


def test_messages_are_an_example_for_each_answer():
    tokenizer = tiny.tokenizer(chat=True)
    talk = [{"role": "system", "content": "s"}, QUESTION, ANSWER, QUESTION, {"role": "assistant", "content": "three"}]
    first, second = to_examples({"messages": talk}, tokenizer)
    assert first == to_examples({"prompt": talk[:2], "completion": talk[2:3]}, tokenizer)[0]
    whole = tokenizer.apply_chat_template(talk, tokenize=True, return_dict=True)["input_ids"]
    assert whole == [*second.prompt_ids, *second.ids[:-1]] and second.ids[-1] == 1
    assert "three" in tokenizer.decode(second.ids)
    assert "three" not in tokenizer.decode(second.prompt_ids)


def with_end(tokenizer, end):
    """A chat template that ends each message as real ones do, with a token and a line break."""
    tokenizer.chat_template = (
        "{% for m in messages %}[{{ m.role }}]{{ m.content }}" + end + "\n{% endfor %}"
        "{% if add_generation_prompt %}[assistant]{% endif %}"
    )
    return tokenizer


def test_what_is_learned_ends_where_a_rollout_stops():
    """At the template's own end where it is a stop token; by the end token, behind the template's text, where not."""
    row = {"prompt": [QUESTION], "completion": [ANSWER]}
    [cut] = to_examples(row, with_end(tiny.tokenizer(), "<eos>"))
    assert cut.ids == [*tiny.tokenizer()("two")["input_ids"], 1]
    [other] = to_examples(row, with_end(tiny.tokenizer(), "<pad>"), stops=(0, 1))  # the model's config names another
    assert other.ids == [*tiny.tokenizer()("two")["input_ids"], 0]
    [behind] = to_examples(row, with_end(tiny.tokenizer(), "!"))
    assert behind.ids == [*tiny.tokenizer()("two!\n")["input_ids"], 1]
    endless = tiny.tokenizer()
    endless.eos_token = None
    [plain] = to_examples({"prompt": "a", "completion": "b"}, endless, stops=(5, 7))
    assert plain.ids[-1] == 5


def test_an_answer_that_begins_with_line_breaks_is_tokenized_by_itself():
    """As a policy draws it: a tokenizer that joins the template's line break with them would hide the boundary."""
    tokenizer = with_end(tiny.tokenizer(), "<eos>")
    tokenizer.chat_template = tokenizer.chat_template.replace("]", "]\n")
    answer = {"role": "assistant", "content": "\n\n4"}
    [example] = to_examples({"messages": [QUESTION, answer]}, tokenizer)
    assert tokenizer.decode(example.ids) == "\n\n4<eos>"


MISTAKES = {
    "no dict": ("text", "a row must be a dict with a prompt and a completion, got 'text'"),
    "no completion": ({"prompt": "a", "answer": "b"}, "no column 'completion', only prompt, answer"),
    "no prompt": ({"completion": "a"}, "no column 'prompt', only completion"),
    "an empty completion": ({"prompt": "a", "completion": ""}, "the completion is empty"),
    "an empty prompt": ({"prompt": "", "completion": "a"}, "the prompt is empty, and nothing stands before"),
    "an empty answer": ({"messages": [QUESTION, {**ANSWER, "content": ""}]}, "the completion is empty"),
    "half a character": ({"prompt": "a", "completion": "b\ud83d"}, "the completion has the lone surrogate"),
    "nothing": ({}, "no column 'prompt', only nothing"),
    "null messages": ({"messages": None, "prompt": "a"}, "no column 'completion', only prompt"),
    "a number": ({"prompt": "a", "completion": 3}, "the completion must be a string where the prompt is one, got 3"),
    "text after messages": ({"prompt": [QUESTION], "completion": "a"}, "a list with one assistant message, got 'a'"),
    "another's turn": ({"prompt": [QUESTION], "completion": [QUESTION]}, "a message with the role assistant"),
    "no answer": ({"messages": [QUESTION]}, "no assistant message after the first"),
    "no list": ({"messages": "a"}, "messages must be a list of messages, got 'a'"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_mistakes_are_named(name):
    row, message = MISTAKES[name]
    with pytest.raises(ValueError, match=message):
        to_examples(row, tiny.tokenizer(chat=True))


def test_a_template_that_rewrites_the_conversation_is_refused():
    tokenizer = tiny.tokenizer(chat=True)
    tokenizer.chat_template = "{% for m in messages %}{{ messages | length }}{{ m.content }}{% endfor %}"
    with pytest.raises(ValueError, match="cannot be told apart; give them as text"):
        to_examples({"messages": [QUESTION, ANSWER]}, tokenizer)


def test_a_chat_template_gets_its_keyword_arguments():
    tokenizer = tiny.tokenizer(chat=True)
    tokenizer.chat_template = tiny.MOODY_TEMPLATE
    [example] = to_examples({"messages": [QUESTION, ANSWER]}, tokenizer, template_kwargs={"mood": "calm"})
    assert tokenizer.decode(example.prompt_ids) == "[calm]<user>one\n<assistant>"
    assert tokenizer.decode(example.ids, skip_special_tokens=True) == "two\n"
    with pytest.raises(ValueError, match="no mood"):
        to_examples({"messages": [QUESTION, ANSWER]}, tokenizer)

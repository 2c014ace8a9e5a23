"""Rows for supervised training as token ids: what is given, and what is learned."""

import pytest
import tiny

from fastgrpo.data.examples import to_examples

QUESTION = {"role": "user", "content": "one"}
ANSWER = {"role": "assistant", "content": "two"}


def test_a_completion_is_learned_with_its_end_and_without_a_beginning():
    tokenizer = tiny.tokenizer()
    [example] = to_examples({"prompt": "one", "completion": "two"}, tokenizer)
    assert example.prompt_ids == tokenizer("one")["input_ids"]
    assert example.completion_ids == [*tokenizer("two", add_special_tokens=False)["input_ids"], tokenizer.eos_token_id]
    assert len(example) == len(example.prompt_ids) + len(example.completion_ids)


def test_messages_are_an_example_for_each_answer():
    tokenizer = tiny.tokenizer(chat=True)
    talk = [{"role": "system", "content": "s"}, QUESTION, ANSWER, QUESTION, {"role": "assistant", "content": "three"}]
    first, second = to_examples({"messages": talk}, tokenizer)
    assert first == to_examples({"prompt": talk[:2], "completion": talk[2:3]}, tokenizer)[0]
    whole = tokenizer.apply_chat_template(talk, tokenize=True, return_dict=True)["input_ids"]
    learned = [*second.prompt_ids, *second.completion_ids]
    assert whole[: len(learned)] == learned and "three" in tokenizer.decode(second.completion_ids)
    assert "three" not in tokenizer.decode(second.prompt_ids)


MISTAKES = {
    "no dict": ("text", "a row must be a dict with a prompt and a completion, got 'text'"),
    "no completion": ({"prompt": "a", "answer": "b"}, "no column 'completion', only prompt, answer"),
    "no prompt": ({"completion": "a"}, "no column 'prompt', only completion"),
    "an empty completion": ({"prompt": "a", "completion": ""}, "the completion is empty"),
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

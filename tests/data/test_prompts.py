"""Rows become prompts, and drawn tokens what reward functions see."""

import threading

import pytest
import tiny
import torch

from fastgrpo.data.prompts import RESERVED, to_completion, to_prompt
from fastgrpo.data.records import Prompt, Rollout


def test_prompts():
    plain = to_prompt({"prompt": "ab", "answer": 3}, tiny.tokenizer())
    assert plain == Prompt(plain.ids, "ab", {"answer": 3}) and len(plain.ids) == 2
    chat = tiny.tokenizer(chat=True)
    messages = [{"role": "user", "content": "hi"}]
    conversational = to_prompt({"prompt": messages}, chat)
    assert chat.decode(conversational.ids) == "<user>hi\n<assistant>"
    ids = chat("ok")["input_ids"] + [chat.eos_token_id]
    drawn = Rollout(ids, torch.zeros(len(ids)), "stop")
    assert to_completion(conversational, drawn, chat).content == [{"role": "assistant", "content": "ok"}]
    assert to_completion(plain, drawn, chat).content == "ok"


def test_refused_prompts():
    with pytest.raises(ValueError, match="no column 'prompt', only question"):
        to_prompt({"question": "?"}, tiny.tokenizer())
    with pytest.raises(ValueError, match="no chat template"):
        to_prompt({"prompt": [{"role": "user", "content": "hi"}]}, tiny.tokenizer())


@pytest.mark.parametrize("name", RESERVED)
def test_a_column_cannot_take_the_place_of_an_argument_of_reward_functions(name):
    with pytest.raises(ValueError, match=f"^the column '{name}' has the name of an argument of reward functions"):
        to_prompt({"prompt": "a", name: 1}, tiny.tokenizer())


def test_every_other_column_is_kept():
    columns = {"function": "f", "completion": "c", "prompt ": "p", "self": 1}
    assert to_prompt({"prompt": "a", **columns}, tiny.tokenizer()).columns == columns


@pytest.mark.parametrize(
    "columns, match",
    [
        ({3: "x"}, "^the name of a column must be text, got 3"),
        (
            {"judge": threading.Lock()},
            r"^the column 'judge' holds a value that cannot be copied .*TypeError",
        ),
        ({"calls": (x for x in "ab")}, "^the column 'calls' holds a value that cannot be copied"),
    ],
)
def test_a_column_that_reward_functions_cannot_get_is_refused(columns, match):
    with pytest.raises(ValueError, match=match):
        to_prompt({"prompt": "a", **columns}, tiny.tokenizer())

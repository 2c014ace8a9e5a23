"""Rows become prompts, and drawn tokens what reward functions see."""

import pytest
import tiny
import torch

from fastgrpo.data.prompts import to_completion, to_prompt
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

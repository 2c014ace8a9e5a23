"""Rows become prompts, and prompts that the model cannot hold are refused."""

import pytest
import tiny

from fastgrpo.data.prompts import check_prompts, to_completion, to_prompt
from fastgrpo.data.records import Prompt


def test_prompts_that_the_model_cannot_hold():
    model = tiny.model(vocab_size=258)  # a context of 256

    def prompt(*ids):
        return Prompt(list(ids), [{"role": "user", "content": "a long\nstory " * 9}])

    check_prompts([prompt(*range(250))], model, 6)
    with pytest.raises(ValueError, match=r"the prompt 'a long.*\.\.\.' has 251 tokens; .* 6 it exceeds .* of 256"):
        check_prompts([prompt(5), prompt(*range(251))], model, 6)
    with pytest.raises(ValueError, match="has the token id 258, but the model has only 258 embeddings"):
        check_prompts([prompt(258)], model, 6)
    with pytest.raises(ValueError, match="has no tokens"):
        check_prompts([prompt()], model, 6)


def test_prompts():
    plain = to_prompt({"prompt": "ab", "answer": 3}, tiny.tokenizer())
    assert plain == Prompt(plain.ids, "ab", {"answer": 3}) and len(plain.ids) == 2
    chat = tiny.tokenizer(chat=True)
    messages = [{"role": "user", "content": "hi"}]
    conversational = to_prompt({"prompt": messages}, chat)
    assert chat.decode(conversational.ids) == "<user>hi\n<assistant>"
    ids = chat("ok")["input_ids"] + [chat.eos_token_id]
    assert to_completion(conversational, ids, chat) == [{"role": "assistant", "content": "ok"}]
    assert to_completion(plain, ids, chat) == "ok"


def test_refused_prompts():
    with pytest.raises(ValueError, match="no column 'prompt', only question"):
        to_prompt({"question": "?"}, tiny.tokenizer())
    with pytest.raises(ValueError, match="no chat template"):
        to_prompt({"prompt": [{"role": "user", "content": "hi"}]}, tiny.tokenizer())

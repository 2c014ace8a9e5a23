"""Whether prompts fit the policy."""

import pytest
import tiny

from fastgrpo.data.records import Prompt
from fastgrpo.policy.characters import character_model
from fastgrpo.policy.fit import check_prompts, check_rows, prompts_of
from fastgrpo.policy.model import Policy


def test_prompts_that_the_model_cannot_hold():
    policy = Policy(tiny.model(vocab_size=258))  # a context of 256

    def prompt(*ids):
        return Prompt(list(ids), [{"role": "user", "content": "a long\nstory " * 9}])

    check_prompts([prompt(*range(250))], policy, 6)
    with pytest.raises(ValueError, match=r"the prompt 'a long.*\.\.\.' has 251 tokens; .*=6 it exceeds .* of 256"):
        check_prompts([prompt(5), prompt(*range(251))], policy, 6)
    with pytest.raises(ValueError, match="has the token id 258, but the model has only 258 embeddings"):
        check_prompts([prompt(258)], policy, 6)
    with pytest.raises(ValueError, match="has no tokens"):
        check_prompts([prompt()], policy, 6)


def test_every_row_is_looked_at():
    policy, tokenizer = Policy(tiny.model(vocab_size=258)), tiny.tokenizer()
    check_rows([{"prompt": "ab"}, {"prompt": "c"}], tokenizer, policy, 200)
    with pytest.raises(ValueError, match=r"data row 1: the prompt 'cc.*max_completion_length=200 it exceeds"):
        check_rows([{"prompt": "ab"}, {"prompt": "c" * 60}], tokenizer, policy, 200)
    with pytest.raises(ValueError, match="data row 1: the row has no column 'prompt', only question"):
        check_rows([{"prompt": "ab"}, {"question": "?"}], tokenizer, policy, 200)


def test_a_row_that_could_exceed_a_sliding_window_is_refused_before_the_first_step():
    model, tokenizer = tiny.model("mistral", vocab_size=258, sliding_window=20), tiny.tokenizer()
    rows = [{"prompt": "ab"}, {"prompt": "c" * 10}]
    check_rows(rows, tokenizer, Policy(model), 10)
    message = (
        "data row 1: .* 10 tokens; .*=11 it exceeds the sliding window of 20 of MistralForCausalLM.*rollout_backend hf"
    )
    with pytest.raises(ValueError, match=message):
        check_rows(rows, tokenizer, Policy(model), 11)
    check_rows(rows, tokenizer, Policy(model, own_attention=True), 11)


def test_prompts_of_rows():
    tokenizer = tiny.tokenizer()
    (prompt,) = prompts_of([{"prompt": "ab", "n": 1}], tokenizer, Policy(tiny.model(vocab_size=258)), 6)
    assert prompt == Prompt(tokenizer("ab")["input_ids"], "ab", {"n": 1})


def test_a_template_that_renders_nothing():
    chat = tiny.tokenizer(chat=True)
    chat.chat_template = "{% if false %}{% endif %}"
    with pytest.raises(ValueError, match="data row 0: the prompt 'hi' has no tokens"):
        check_rows([{"prompt": [{"role": "user", "content": "hi"}]}], chat, Policy(tiny.model(vocab_size=258)), 6)


def test_a_character_that_would_become_the_end_token_is_refused():
    model, tokenizer = character_model("ab=", seed=0)
    check_rows([{"prompt": "ab="}, {"prompt": "a<eos>b"}], tokenizer, Policy.of(model), 8)
    with pytest.raises(ValueError, match=r"data row 1: the prompt 'ab!z=' has characters .* no token for: '!z'; leave"):
        check_rows([{"prompt": "ab="}, {"prompt": "ab!z="}], tokenizer, Policy.of(model), 8)

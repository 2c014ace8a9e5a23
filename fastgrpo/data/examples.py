"""Turns rows for supervised training into token ids: what is given, and what is learned.

A row has a `prompt` and a `completion`, both text or both lists of messages; or `messages`, a conversation whose
assistant messages are learned, each after all that came before it. A completion is tokenized by itself, as a policy
draws it after the prompt, and ends with a token at which rollouts stop.
"""

from collections.abc import Mapping, Sequence
from reprlib import repr as brief
from typing import Any

from transformers import PreTrainedTokenizerBase

from fastgrpo.data.prompts import check_text, shortened, to_prompt
from fastgrpo.data.records import Sample


def is_example(row: dict) -> bool:
    """Tell whether a row has something to learn, beyond a prompt."""
    return isinstance(row, Mapping) and any(row.get(name) is not None for name in ("completion", "messages"))


def to_examples(
    row: dict,
    tokenizer: PreTrainedTokenizerBase,
    stops: Sequence[int] = (),
    template_kwargs: Mapping[str, Any] | None = None,
) -> list[Sample]:
    """Tokenize a row for supervised training."""
    if not isinstance(row, Mapping):
        raise ValueError(f"a row must be a dict with a prompt and a completion, got {brief(row)}")
    turns = [_pair(row)] if row.get("messages") is None else _turns(row["messages"])
    return [_example(prompt, completion, tokenizer, stops, template_kwargs) for prompt, completion in turns]


def _pair(row):
    """Return the prompt and the completion of a row that is no conversation."""
    for name in ("prompt", "completion"):
        if row.get(name) is None:
            found = ", ".join(str(column) for column, value in row.items() if value is not None) or "nothing"
            raise ValueError(
                f"the row has no column {name!r}, only {found}; supervised training needs a prompt and a completion, "
                "or messages"
            )
    prompt, completion = row["prompt"], row["completion"]
    if not isinstance(prompt, list):
        if not isinstance(completion, str):
            raise ValueError(f"the completion must be a string where the prompt is one, got {brief(completion)}")
        return prompt, completion
    if not isinstance(completion, list) or len(completion) != 1:
        raise ValueError(
            "the prompt is a list of messages, so the completion must be a list with one assistant message, got "
            f"{brief(completion)}"
        )
    return prompt, completion[0]


def _turns(messages):
    """Return each assistant message of a conversation, and what came before it."""
    if not isinstance(messages, list):
        raise ValueError(f"messages must be a list of messages, got {brief(messages)}")
    turns = [i for i, m in enumerate(messages) if i and isinstance(m, dict) and m.get("role") == "assistant"]
    if not turns:
        raise ValueError("the messages have no assistant message after the first one, so there is nothing to learn")
    return [(messages[:i], messages[i]) for i in turns]


def _example(prompt, completion, tokenizer, stops, template_kwargs):
    """Tokenize a prompt and what is learned after it."""
    ids = to_prompt({"prompt": prompt}, tokenizer, template_kwargs).ids
    if not ids:
        raise ValueError("the prompt is empty, and nothing stands before the first token that is learned")
    plain = isinstance(completion, str)
    text = completion if plain else _answer(prompt, completion, tokenizer, template_kwargs or {})
    if not text:
        raise ValueError("the completion is empty; leave out rows that teach nothing")
    check_text(text, "the completion")
    learned = list(tokenizer(text, add_special_tokens=False)["input_ids"])
    stops = [*stops] or [tokenizer.eos_token_id]
    ends = [] if plain else [i for i, token in enumerate(learned) if token in stops]
    if ends:
        return Sample(ids, learned[: ends[-1] + 1], advantage=1.0)  # templates write a line break behind the end
    end = stops[0] if tokenizer.eos_token_id is None else tokenizer.eos_token_id
    return Sample(ids, [*learned, end], advantage=1.0)


def _answer(before, message, tokenizer, template_kwargs):
    """Return what the chat template writes behind a conversation where an assistant message follows it."""
    if not isinstance(message, dict) or message.get("role") != "assistant":
        raise ValueError(f"the completion must be a message with the role assistant, got {brief(message)}")
    to_prompt({"prompt": [*before, message]}, tokenizer, template_kwargs)  # refuses a message that is none
    if not message.get("content") and not message.get("tool_calls"):
        raise ValueError("the completion is empty; leave out rows that teach nothing")
    start = tokenizer.apply_chat_template(before, add_generation_prompt=True, tokenize=False, **template_kwargs)
    whole = tokenizer.apply_chat_template([*before, message], tokenize=False, **template_kwargs)
    if not whole.startswith(start):
        raise ValueError(
            f"the chat template writes the conversation before {shortened([message])} otherwise where the answer "
            "follows, so prompt and completion cannot be told apart; give them as text"
        )
    return whole[len(start) :]

"""Tokenizes data rows: prompts for rollouts, and examples for supervised training.

A row has a `prompt` (a string, or a list of messages) and any columns that the rewards need. A row for supervised
training also has a `completion` of the same type, or only `messages`: a conversation. Each assistant message of it is
an example, with all earlier messages as the prompt, and `join_turns` makes one example of all of them. A completion is
tokenized together with its prompt if the tokens of the prompt stay the same, otherwise separately. It ends with a stop
token.
"""

import contextlib
import json
import re
from collections.abc import Mapping, Sequence
from copy import deepcopy
from reprlib import repr as brief
from typing import TYPE_CHECKING, Any

from fastgrpo.data.records import Prompt, Sample

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# Arguments that the trainer passes to reward functions. Columns may have any other name.
RESERVED = (
    "prompts", "completions", "completion_ids", "tool_mask", "environments", "trainer_state", "log_metric",
    "log_extra", "log_steps",
)  # fmt: skip
_UNCHANGING = {type(None), bool, int, float, complex, str, bytes}  # immutable types, not copied


def to_prompt(
    row: dict, tokenizer: "PreTrainedTokenizerBase", template_kwargs: Mapping[str, Any] | None = None
) -> Prompt:
    """Tokenize the prompt of a row: messages with the chat template, a string without."""
    prompt, columns = checked_row(row)
    return Prompt(_tokenized(prompt, tokenizer, template_kwargs), prompt, columns)


def checked_row(row: dict) -> tuple[str | list, dict[str, Any]]:
    """Return the prompt and the columns of a row, or raise ValueError if training cannot use them."""
    if not isinstance(row, Mapping):
        raise ValueError(f"a row must be a dict with a prompt, got {brief(row)}")
    if "prompt" not in row:
        found = ", ".join(map(str, row))
        raise ValueError(f"the row has no column 'prompt', only {found}" if row else "the row is empty")
    prompt, columns = row["prompt"], {name: value for name, value in row.items() if name != "prompt"}
    check_turns(prompt, "the prompt")
    _check_columns(columns)
    return prompt, columns


def check_turns(given: Any, name: str) -> None:
    """Check that a prompt or a completion is a string or messages, and can be written to samples.jsonl."""
    if isinstance(given, list):
        if not given:
            raise ValueError(f"{name} is an empty list; a list of messages must have at least one")
        for index, message in enumerate(given):
            _check_message(message, f"message {index} of {name}")
    elif not isinstance(given, str):
        raise ValueError(f"{name} must be a string or a list of messages, got {brief(given)}")
    check_text(given, name)


def check_text(value: Any, name: str) -> None:
    """Check that text or messages can be written as JSON."""
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        raise ValueError(
            f"{name} has the lone surrogate {error.object[error.start]!r}, which is half of a character; fix the code "
            "that cut or decoded the text"
        ) from None
    except (TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"{name} must be JSON-serializable: {error}") from None


def _check_message(message, name):
    """Check that a message has a role and text content. A message with tool calls needs no content."""
    if not isinstance(message, dict):
        raise ValueError(f"{name} must be a dict with a role and a content, got {brief(message)}")
    for field in ("role", "content"):
        value = message.get(field)
        if isinstance(value, str) or (field == "content" and value is None and message.get("tool_calls")):
            continue
        if field not in message:
            raise ValueError(
                f"{name} has no {field!r}, only {', '.join(map(str, message))}; each message must have a role and a "
                "content"
            )
        remedy = "; join its text parts into one string" if isinstance(value, list) else ""
        raise ValueError(f"the {field} of {name} must be a string, got {brief(value)}{remedy}")


def _tokenized(prompt, tokenizer, template_kwargs):
    """Return the token ids of a checked prompt. Templates and tokenizers may raise any exception."""
    conversational = isinstance(prompt, list)
    if conversational and tokenizer.chat_template is None:
        raise ValueError("the prompt is a list of messages, but the tokenizer has no chat template; use plain strings")
    try:
        if conversational:
            how = {"add_generation_prompt": True, "tokenize": True, "return_dict": True, **(template_kwargs or {})}
            encoded = _rendered(prompt, tokenizer, how)
        else:
            encoded = tokenizer(prompt)
        return list(encoded["input_ids"])
    except Exception as error:
        part, remedy = "tokenizer", "fix the prompt, or use another tokenizer"
        if conversational:
            part, remedy = "tokenizer's chat template", "fix the messages or the template"
            if any(message["role"] == "system" for message in prompt):
                remedy = "if the template has no system role, remove the system prompt"
        reason = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
        raise ValueError(f"the {part} fails on the prompt {shortened(prompt)}: {reason}; {remedy}") from error


def _rendered(messages, tokenizer, how):
    """Apply the chat template. Most templates expect the arguments of tool calls as dicts, others as JSON text."""
    # Tables give every message the keys of all, and some templates only test whether a message has tool_calls.
    messages = [{k: v for k, v in m.items() if k == "content" or v not in (None, [])} for m in messages]
    calls = [message.get("tool_calls") for message in messages]
    if not any(calls):
        return tokenizer.apply_chat_template(messages, **how)

    def written(as_text):
        pairs = zip(messages, calls, strict=True)
        return [{**m, "tool_calls": [_call(call, as_text) for call in own]} if own else m for m, own in pairs]

    try:
        return tokenizer.apply_chat_template(written(as_text=False), **how)
    except Exception:
        return tokenizer.apply_chat_template(written(as_text=True), **how)


def _call(call, as_text):
    """Return a tool call with its arguments as a dict, or as JSON text."""
    if isinstance(call.get("function"), dict):
        return {**call, "function": _call(call["function"], as_text)}
    arguments = call.get("arguments")
    if isinstance(arguments, dict):
        arguments = _without_none(arguments)
        return {**call, "arguments": json.dumps(arguments, ensure_ascii=False) if as_text else arguments}
    with contextlib.suppress(ValueError, TypeError):  # other values stay as they are
        if not as_text and isinstance(parsed := json.loads(arguments), dict):
            return {**call, "arguments": parsed}
    return call


def _without_none(value):
    """Drop the keys of dicts, at any depth, whose value is None: datasets.Dataset adds the keys of other rows."""
    if isinstance(value, dict):
        return {key: _without_none(item) for key, item in value.items() if item is not None}
    return [_without_none(item) for item in value] if isinstance(value, list) else value


def _check_columns(columns):
    """Check that columns can be passed to reward functions by name, as copies."""
    for name, value in columns.items():
        if not isinstance(name, str):
            raise ValueError(f"the names of columns must be strings, got {brief(name)}")
        if name in RESERVED:
            raise ValueError(f"the column {name!r} has the name of an argument of reward functions; rename it")
        try:
            copied(value)
        except Exception as error:  # rows from Python may hold objects of any class
            raise ValueError(
                f"the column {name!r} holds a value that cannot be copied for reward functions "
                f"({type(error).__name__}: {error}); pass it in another way, such as a global variable"
            ) from None


def copied(value: Any) -> Any:
    """Deep-copy a value of a row. Lists and dicts take a tenth of the time of `deepcopy`."""
    kind = type(value)
    if kind is list:
        return value.copy() if _UNCHANGING.issuperset(map(type, value)) else [copied(item) for item in value]
    if kind is dict:
        return {name: copied(item) for name, item in value.items()}
    return value if kind in _UNCHANGING else deepcopy(value)


def shortened(text: str | list, limit: int = 60) -> str:
    """Return the beginning of a prompt or completion on one line, for error messages."""
    if isinstance(text, list) and text:
        text = text[-1].get("content", text[-1]) if isinstance(text[-1], dict) else text[-1]
    shown = repr(str(text))
    return shown if len(shown) <= limit else shown[:limit] + "...'"


def transcript(messages: list[dict]) -> str:
    """Return messages for a reader: a line each, with its role and the calls of tools."""
    lines = []
    for message in messages:
        calls = [call.get("function", call) for call in message.get("tool_calls") or ()]
        parts = (message.get("content"), *(f"{call.get('name')}({call.get('arguments')})" for call in calls))
        lines.append(" ".join([f"{message['role']}:", *(str(part) for part in parts if part)]))
    return "\n".join(lines)


def with_system(row: Mapping[str, Any], system_prompt: str, writes: bool = False, chat: bool = False) -> dict[str, Any]:
    """Put the system prompt before a prompt, or replace its system message. Other values stay unchanged.

    `writes`: an environment writes the prompt, so a row without one gets an empty user message. `chat`: a prompt of
    text becomes a user message, as tools need.
    """
    changed = dict(row)
    if writes and row.get("prompt") is None and row.get("messages") is None:
        changed["prompt"] = [{"role": "user", "content": ""}]
        row = changed
    for name in ("prompt", "messages"):
        given = row.get(name)
        if isinstance(given, str) and chat:
            given = [{"role": "user", "content": given}]
        if isinstance(given, str):
            changed[name] = f"{system_prompt}\n\n{given}"
        elif isinstance(given, list) and given:
            replaced = isinstance(given[0], dict) and given[0].get("role") == "system"
            changed[name] = [{"role": "system", "content": system_prompt}, *given[replaced:]]
    return changed


def is_example(row: dict) -> bool:
    """Return whether a row is an example for supervised training."""
    return isinstance(row, Mapping) and any(row.get(name) is not None for name in ("completion", "messages"))


def to_examples(
    row: dict,
    tokenizer: "PreTrainedTokenizerBase",
    stops: Sequence[int] = (),
    template_kwargs: Mapping[str, Any] | None = None,
) -> list[Sample]:
    """Tokenize a row for supervised training, with its `tools` and `chat_template_kwargs`, as TRL does."""
    if not isinstance(row, Mapping):
        raise ValueError(f"a row must be a dict with a prompt and a completion, got {brief(row)}")
    turns = [_pair(row)] if row.get("messages") is None else _turns(row["messages"])
    tools, own = (_parsed(row, name) for name in ("tools", "chat_template_kwargs"))
    if not isinstance(own or {}, Mapping):
        raise ValueError(f"chat_template_kwargs must be a dict, got {brief(own)}")
    tools = {"tools": tools if isinstance(row["tools"], str) else _without_none(tools)} if tools else {}
    kwargs = {**(template_kwargs or {}), **tools, **(own or {})}
    return [_example(prompt, completion, tokenizer, stops, kwargs) for prompt, completion in turns]


def join_turns(examples: Sequence[Sample]) -> list[Sample]:
    """Join the examples of a conversation, so that each token is computed once; the loss is the same.

    A new example begins where the chat template changes earlier turns, as some do to remove reasoning, or writes no
    stop token after them.
    """
    joined = []
    for example in examples:
        last = joined[-1] if joined else example
        seen = [*last.prompt_ids, *last.ids]
        if example.prompt_ids[: len(seen)] != seen:
            joined.append(example.replace(tool_mask=[1] * len(example.ids)))
        else:
            between = example.prompt_ids[len(seen) :]
            joined[-1] = last.replace(
                ids=[*last.ids, *between, *example.ids],
                tool_mask=[*last.tool_mask, *[0] * len(between), *[1] * len(example.ids)],
            )
    return joined


def _parsed(row, name):
    """Return a column of a row, which may be JSON text."""
    value = row.get(name)
    try:
        return json.loads(value) if isinstance(value, str) else value
    except ValueError as error:
        raise ValueError(f"{name} is not JSON: {error}") from None


def _pair(row):
    """Return the prompt and the completion of a row."""
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
            raise ValueError(f"the completion must be a string like the prompt, got {brief(completion)}")
        return prompt, completion
    if not isinstance(completion, list) or len(completion) != 1:
        raise ValueError(
            "the prompt is a list of messages, so the completion must be a list with one assistant message, got "
            f"{brief(completion)}"
        )
    return prompt, completion[0]


def _turns(messages):
    """Return each assistant message of a conversation, with the messages before it."""
    if not isinstance(messages, list):
        raise ValueError(f"messages must be a list of messages, got {brief(messages)}")
    turns = [i for i, m in enumerate(messages) if i and isinstance(m, dict) and m.get("role") == "assistant"]
    if not turns:
        raise ValueError("the messages have no assistant message after the first one, so there is nothing to learn")
    return [(messages[:i], messages[i]) for i in turns]


def _example(prompt, completion, tokenizer, stops, template_kwargs):
    """Tokenize a prompt and its completion."""
    ids = to_prompt({"prompt": prompt}, tokenizer, template_kwargs).ids
    if not ids:
        raise ValueError("the prompt is empty; the first token of the completion needs a token before it")
    plain = isinstance(completion, str)
    before, text = (prompt, completion) if plain else _answer(prompt, completion, tokenizer, template_kwargs or {})
    if not text:
        raise ValueError("the completion is empty; remove the row")
    check_text(text, "the completion")
    whole = list(tokenizer(before + text, add_special_tokens=plain)["input_ids"])
    # Some tokenizers put a space before a text, which the completion must not get in the middle of a conversation.
    joined = whole[: len(ids)] == ids
    learned = whole[len(ids) :] if joined else list(tokenizer(text, add_special_tokens=False)["input_ids"])
    stops, last = [*stops] or [tokenizer.eos_token_id], len(learned) - 1
    ends = [i for i, token in enumerate(learned) if token in stops]
    if plain:  # an unknown character may have the id of a stop token
        ends = [i for i in ends if i == last and text.endswith(tokenizer.decode(learned[i:]))]
    if ends:
        return Sample(ids, learned[: ends[-1] + 1], advantage=1.0)  # templates add a line break after the stop token
    end = stops[0] if tokenizer.eos_token_id is None else tokenizer.eos_token_id
    return Sample(ids, [*learned, end], advantage=1.0)


def _answer(before, message, tokenizer, template_kwargs):
    """Return the text of a conversation, and the text that the chat template adds for an assistant message."""
    if not isinstance(message, dict) or message.get("role") != "assistant":
        raise ValueError(f"the completion must be a message with the role assistant, got {brief(message)}")
    to_prompt({"prompt": [*before, message]}, tokenizer, template_kwargs)  # validates the message
    if not message.get("content") and not message.get("tool_calls"):
        raise ValueError("the completion is empty; remove the row")
    how = {"tokenize": False, **template_kwargs}
    start = _rendered(before, tokenizer, how | {"add_generation_prompt": True})
    whole = _rendered([*before, message], tokenizer, how)
    if not whole.startswith(start):
        raise ValueError(
            f"the chat template changes the conversation before {shortened([message])} when the answer follows, so "
            "prompt and completion cannot be separated; pass them as strings"
        )
    text = whole[len(start) :]
    names = [call.get("function", call).get("name") for call in message.get("tool_calls") or ()]
    if not all(str(name) in text for name in names):
        raise ValueError("the chat template does not write tool calls; set tokenizer.chat_template to one that does")
    content = "" if names else message["content"]  # some templates write either calls or content
    parts = [*re.split("</?think>", content), message.get("reasoning_content"), message.get("thinking")]
    if lost := [part for part in parts if isinstance(part, str) and part.strip() not in text]:
        raise ValueError(
            f"the chat template leaves out {shortened(lost[0])} of the answer; set tokenizer.chat_template to one that "
            "keeps it, or pass prompt and completion as strings"
        )
    return start, text

"""Parses the text of a drawn turn into an assistant message: content, thoughts and tool calls.

The chat templates of models write calls in one of these formats:

    tagged   <tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>, as in Hermes and Qwen. Between the tags may
             also be a list of calls (SmolLM2), or <function=add><parameter=a>1</parameter></function> (Qwen3-Coder)
    bare     {"name": "add", "parameters": {"a": 1}} at the start of the turn, as in Llama 3
    written  add(1), for models whose tokens are characters

Text that cannot be parsed stays content. The turn is malformed if this text begins a call.
"""

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

MARKERS = ("<think>", "</think>", "<tool_call>", "</tool_call>", "<|python_tag|>")  # may be special tokens

Calls = list[tuple[str, dict]]
# Takes the text of a turn and the JSON schemas of the tools. Returns content, calls, and whether it is malformed.
Format = Callable[[str, Sequence[dict]], tuple[str, Calls, bool]]


@dataclass(frozen=True)
class Parsed:
    """A parsed turn."""

    message: dict
    """An assistant message with `content`, and `reasoning_content` and `tool_calls` where the turn has them."""
    malformed: bool
    """Whether the turn begins a tool call that cannot be read."""


def parse_turn(text: str, tools: Sequence[dict], form: Format, thinking: bool = False) -> Parsed:
    """Parse the text of a turn. `thinking` says that the prompt ends with <think>."""
    thoughts, content = _split_thoughts(text, thinking)
    content, calls, malformed = form(content, tools)
    return Parsed(_message(content, thoughts, calls), malformed)


def parse_with_template(tokenizer: Any, ids: list[int], prompt_ids: list[int], tools: Sequence[dict]) -> Parsed:
    """Parse a turn with the tokenizer's own `response_template`."""
    try:
        found = tokenizer.parse_response(tokenizer.decode(ids), prefix=tokenizer.decode(prompt_ids), tools=[*tools])
        calls = [_checked(call) for call in found.get("tool_calls") or []]
        content, thoughts = found.get("content") or "", found.get("reasoning_content") or found.get("thinking")
        if not (isinstance(content, str) and isinstance(thoughts, str | None)):
            raise ValueError(f"the content or the thoughts are no text: {found}")
    except Exception:  # the template's regular expressions and parsers fail in their own ways
        return Parsed(_message(tokenizer.decode(ids, skip_special_tokens=True), None, []), True)
    return Parsed(_message(content, thoughts, calls), False)


def _message(content, thoughts, calls):
    message = {"role": "assistant", "content": content}
    if thoughts:
        message["reasoning_content"] = thoughts
    if calls:
        message["tool_calls"] = [to_call(name, arguments) for name, arguments in calls]
    return message


def to_call(name: str, arguments: dict) -> dict:
    """Make the entry of `tool_calls` in an assistant message."""
    return {"type": "function", "function": {"name": name, "arguments": arguments}}


def _split_thoughts(text, thinking):
    """Split a turn into thoughts and the rest. Thoughts that do not end are content."""
    start = text.lstrip()
    if not (thinking or start.startswith("<think>")):
        return None, text
    thoughts, closed, rest = start.removeprefix("<think>").partition("</think>")
    return (thoughts.strip("\n"), rest.lstrip("\n")) if closed else (None, text)


def tagged(text: str, tools: Sequence[dict]) -> tuple[str, Calls, bool]:
    """Read calls between <tool_call> and </tool_call>."""
    calls, kept, malformed, rest = [], [], False, text
    while "<tool_call>" in rest:
        before, _, rest = rest.partition("<tool_call>")
        body, closed, rest = rest.partition("</tool_call>")
        kept.append(before)
        try:
            if not closed:
                raise ValueError("the call does not end")
            calls += [_xml_call(body, tools)] if "<function=" in body else _json_calls(body)
        except (ValueError, RecursionError):
            kept.append(f"<tool_call>{body}{closed}")
            malformed = True
    content = "".join([*kept, rest])
    return content.strip() if calls else content, calls, malformed


def _json_calls(body):
    found = json.loads(body)
    return [_checked(call) for call in (found if isinstance(found, list) else [found])]


def _xml_call(body, tools):
    function = re.fullmatch(r"\s*<function=([^>\n]+)>(.*)</function>\s*", body, re.DOTALL)
    if not function:
        raise ValueError("the function does not end")
    *pieces, rest = function[2].split("</parameter>")
    pairs = [re.fullmatch(r"\s*<parameter=([^>\n]+)>\n?(.*?)\n?", piece, re.DOTALL) for piece in pieces]
    if rest.strip() or not all(pairs):
        raise ValueError("a parameter cannot be read")
    types = _parameters(function[1], tools)
    arguments = {pair[1]: _typed(pair[2], types.get(pair[1], {})) for pair in pairs}
    return _checked({"name": function[1], "arguments": arguments})


def bare(text: str, tools: Sequence[dict]) -> tuple[str, Calls, bool]:
    """Read JSON objects at the start of the turn."""
    calls, names = [], {_function(tool).get("name") for tool in tools}
    rest = text.lstrip().removeprefix("<|python_tag|>").lstrip()
    malformed = text.lstrip().startswith("<|python_tag|>")
    while rest.startswith("{"):
        try:
            item, end = json.JSONDecoder().raw_decode(rest)
            if not {"arguments", "parameters", "function"} & item.keys() and item.get("name") not in names:
                break  # an answer in JSON
            calls.append(_checked(item))
        except (ValueError, TypeError, RecursionError):
            malformed = malformed or re.match(r'\{\s*"name"\s*:', rest) is not None
            return rest if calls else text, calls, malformed
        malformed, rest = False, rest[end:].lstrip(" \n\t;,")
    return rest if calls else text, calls, malformed


def written(text: str, tools: Sequence[dict]) -> tuple[str, Calls, bool]:
    """Read `tool(arguments)`. Arguments have the order of the parameters of the tool."""
    names = "|".join(re.escape(_function(tool).get("name", "")) for tool in tools)
    start = re.compile(rf"(?<!\w)({names})\(")
    calls, kept, at = [], [], 0
    while names and (found := start.search(text, at)):
        end = _closing(text, found.end())
        if end is None:
            return text, calls, True
        values, types = text[found.end() : end].strip(), _parameters(found[1], tools)
        split = values.split(",", max(len(types) - 1, 0)) if values else []
        arguments = {name: _typed(value.strip(), types[name]) for name, value in zip(types, split, strict=False)}
        try:
            if values and not types:
                raise ValueError("the tool takes no arguments")
            calls.append(_checked({"name": found[1], "arguments": arguments}))
        except (ValueError, RecursionError):
            return text, calls, True
        kept.append(text[at : found.start()])
        at = end + 1
    content = "".join([*kept, text[at:]])
    return content.strip() if calls else content, calls, False


def _closing(text, at):
    """Return the index of the bracket that closes one opened before `at`, or None."""
    depth = 1
    for bracket in re.finditer(r"[()]", text[at:]):
        depth += 1 if bracket[0] == "(" else -1
        if not depth:
            return at + bracket.start()
    return None


def plain(text: str, tools: Sequence[dict]) -> tuple[str, Calls, bool]:
    """Read no calls."""
    return text, [], False


FORMATS: tuple[Format, ...] = (tagged, bare, written)


def _checked(call):
    """Return the name and the arguments of a call, or raise ValueError."""
    call = call.get("function", call) if isinstance(call, dict) else call
    if not isinstance(call, dict) or not isinstance(name := call.get("name"), str) or not name:
        raise ValueError(f"not a call: {call}")
    arguments = call.get("arguments", call.get("parameters"))
    if isinstance(arguments, str):
        arguments = json.loads(arguments) if arguments.strip() else None
    if not isinstance(arguments, dict | None):
        raise ValueError(f"the arguments are not an object: {arguments}")
    json.dumps([name, arguments], ensure_ascii=False, allow_nan=False).encode()  # NaN, and halves of a character
    return name, arguments or {}


def _function(tool):
    return tool.get("function", tool)


def _parameters(name, tools):
    """Return the JSON schemas of a tool's parameters by name, in their order."""
    found = [_function(tool) for tool in tools if _function(tool).get("name") == name]
    return found[0].get("parameters", {}).get("properties", {}) if found else {}


def _typed(value, schema):
    """Convert an argument given as text to the type in its schema. Booleans are Python's, as in chat templates."""
    types = schema.get("type", "string")
    if types == "string" or "string" in types:
        return value
    try:
        return json.loads({"True": "true", "False": "false", "None": "null"}.get(value, value))
    except (ValueError, RecursionError):
        return value

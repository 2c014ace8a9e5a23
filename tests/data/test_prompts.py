"""Rows become prompts, and drawn tokens what reward functions see."""

import datetime
import threading

import pytest
import tiny

from fastgrpo.data.prompts import RESERVED, copied, to_prompt
from fastgrpo.data.records import Prompt, Sample, with_text


def test_prompts():
    plain = to_prompt({"prompt": "ab", "answer": 3}, tiny.tokenizer())
    assert plain == Prompt(plain.ids, "ab", {"answer": 3}) and len(plain.ids) == 2
    chat = tiny.tokenizer(chat=True)
    messages = [{"role": "user", "content": "hi"}]
    conversational = to_prompt({"prompt": messages}, chat)
    assert chat.decode(conversational.ids) == "<user>hi\n<assistant>"
    ids = chat("ok")["input_ids"] + [chat.eos_token_id]
    drawn = Sample(plain.ids, ids)
    assert with_text(drawn, conversational, chat).content == [{"role": "assistant", "content": "ok"}]
    assert with_text(drawn, plain, chat).content == "ok"


def test_a_chat_template_gets_its_keyword_arguments():
    chat, row = tiny.tokenizer(chat=True), {"prompt": [{"role": "user", "content": "hi"}]}
    chat.chat_template = tiny.MOODY_TEMPLATE
    assert chat.decode(to_prompt(row, chat, {"mood": "calm"}).ids) == "[calm]<user>hi\n<assistant>"
    with pytest.raises(ValueError, match=r"the tokenizer's chat template refuses the prompt 'hi': .* no mood"):
        to_prompt(row, chat)
    assert to_prompt({"prompt": "hi"}, chat, {"mood": "calm"}).ids == chat("hi")["input_ids"]  # text has no template


def user(content):
    return {"prompt": [{"role": "user", "content": content}]}


def nested(depth):
    value = []
    for _ in range(depth):
        value = [value]
    return value


def endless():
    value = []
    value.append(value)
    return value


REFUSED = {
    "no dict": (["ab"], r"a row must be a dict with a prompt, got \['ab'\]"),
    "no prompt": ({"question": "?"}, "the row has no column 'prompt', only question"),
    "column without a name": ({"prompt": "ab", 3: "x"}, "the names of columns must be strings, got 3"),
    "None": ({"prompt": None}, "the prompt must be a string or a list of messages, got None"),
    "dict": ({"prompt": {"role": "user"}}, "the prompt must be a string or a list of messages, got {'role': 'user'}"),
    "deep": ({"prompt": [nested(100_000)]}, r"message 0 of the prompt must be a dict .*, got \[\[\[\[\[\[\[\.\.\."),
    "no messages": ({"prompt": []}, "a list of messages must have at least one"),
    "message of text": ({"prompt": ["hi"]}, "message 0 of the prompt must be a dict with a role .*, got 'hi"),
    "no role": ({"prompt": [{"content": "hi"}]}, "message 0 of the prompt has no 'role', only content; .* each with a"),
    "role of a number": ({"prompt": [{"role": 3, "content": ""}]}, "the role of message 0 of .* a string, got 3"),
    "content of None": (user(None), "the content of message 0 of the prompt must be a string, got None"),
    "content of a dict": (user({"text": "hi"}), "must be a string, got {'text': 'hi'}"),
    "content of a number": (user(7), "must be a string, got 7"),
    "content of parts": (
        user([{"type": "text", "text": "hi"}]), "got .*'text'.*; join the texts of its parts into one string",
    ),
    "call of no tools": ({"prompt": [{"role": "assistant", "tool_calls": []}]}, "has no 'content', only role, tool_ca"),
    "surrogate in text": ({"prompt": "a\ud83d"}, r"the prompt has the lone surrogate '\\ud83d', .*; mend the row"),
    "surrogate in a message": (user("a\udc00"), r"the prompt has the lone surrogate '\\udc00'"),
    "surrogate in a further key": (
        {"prompt": [{"role": "user", "content": "a", "name": "\ud800"}]}, r"the lone surrogate '\\ud800'",
    ),
    "what samples.jsonl cannot hold": (
        {"prompt": [{"role": "user", "content": "a", "at": datetime.date(2020, 1, 1)}]},
        "the prompt must be made of what JSON can hold: .*date",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_refused_rows(name):
    row, message = REFUSED[name]
    with pytest.raises(ValueError, match=message):
        to_prompt(row, tiny.tokenizer(chat=True))


def test_messages_need_a_template():
    with pytest.raises(ValueError, match="no chat template; use plain strings"):
        to_prompt(user("hi"), tiny.tokenizer())


def test_what_users_of_trl_have_works():
    """Messages with further keys, calls of tools without content, an empty system prompt; the row stays as it is."""
    chat = tiny.tokenizer(chat=True)
    call = {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f", "arguments": {"a": 1}}}]}
    messages = [
        {"role": "system", "content": ""},
        {"role": "user", "content": "hi", "weight": 1, "tool_calls": None},
        call,
        {"role": "tool", "name": "f", "content": "3"},
    ]
    prompt = to_prompt({"prompt": messages}, chat)
    assert chat.decode(prompt.ids) == "<system>\n<user>hi\n<assistant>None\n<tool>3\n<assistant>"
    assert prompt.prompt is messages
    del call["content"]
    assert chat.decode(to_prompt({"prompt": messages}, chat).ids).endswith("<assistant>\n<tool>3\n<assistant>")


@pytest.mark.parametrize(
    "template, reason",
    [
        ("{{ raise_exception('no') }}", "TemplateError: no"),
        ("{{ 'a' + 1 }}", "TypeError: can only concatenate str"),
        ("{{ messages[0].tools.names }}", "UndefinedError: .* has no attribute"),
        ("{{ 1 / 0 }}", "ZeroDivisionError: division by zero"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "RecursionError: maximum recursion depth"),
        ("{% if %}", "TemplateSyntaxError: "),
    ],
)
def test_a_template_may_fail_in_any_way(template, reason):
    chat = tiny.tokenizer(chat=True)
    chat.chat_template = template
    with pytest.raises(ValueError, match=f"chat template refuses the prompt 'hi': {reason}.*; mend the messages"):
        to_prompt(user("hi"), chat)


def test_a_tokenizer_may_fail_in_any_way(monkeypatch):
    def fail(*args, **kwargs):
        raise KeyError("unk")

    tokenizer = tiny.tokenizer()
    monkeypatch.setattr(type(tokenizer), "__call__", fail)
    with pytest.raises(ValueError, match="the tokenizer refuses the prompt 'hi': KeyError: 'unk'; mend the prompt"):
        to_prompt({"prompt": "hi"}, tokenizer)


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
        (
            {"judge": threading.Lock()},
            r"^the column 'judge' holds a value that cannot be copied .*TypeError",
        ),
        ({"calls": (x for x in "ab")}, "^the column 'calls' holds a value that cannot be copied"),
        ({"calls": endless()}, "^the column 'calls' holds a value that cannot be copied .*RecursionError"),
    ],
)
def test_a_column_that_reward_functions_cannot_get_is_refused(columns, match):
    with pytest.raises(ValueError, match=match):
        to_prompt({"prompt": "a", **columns}, tiny.tokenizer())


def test_copies_share_nothing_that_can_be_changed(monkeypatch):
    row = {"grid": [[1, 2.0], [None, "a"]], "case": {"in": [b"x"], "out": {"y": [True]}}, "marks": [{1, 2}, (3, [4])]}
    copy = copied(row)
    assert copy == row
    for change in (
        lambda row: row["grid"][0].append(3),
        lambda row: row["case"]["out"]["y"].clear(),
        lambda row: row["marks"][0].add(3),
        lambda row: row["marks"][1][1].append(5),
    ):
        change(copy)
        assert copy != row
        copy = copied(row)
    monkeypatch.setattr("fastgrpo.data.prompts.deepcopy", None)  # which is slow where numbers are many
    assert copied(row["grid"]) == row["grid"]

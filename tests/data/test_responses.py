"""Drawn turns become assistant messages, whatever the model wrote."""

import json

import pytest
import tiny
from hypothesis import example, given, settings
from hypothesis import strategies as st

from fastgrpo.data.responses import FORMATS, bare, parse_turn, tagged, to_call, written
from fastgrpo.data.turns import TurnBuilder


def tool(name, **types):
    properties = {parameter: {"type": kind} for parameter, kind in types.items()}
    return {"type": "function", "function": {"name": name, "parameters": {"type": "object", "properties": properties}}}


TOOLS = [tool("add", a="integer", b="integer"), tool("say", text="string"), tool("look"), tool("calc", term="string"),
         tool("set", on="boolean")]  # fmt: skip
ADD = ("add", {"a": 1, "b": 2})
HERMES = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 2}}\n</tool_call>'
LLAMA = '{"name": "add", "parameters": {"a": 1, "b": 2}}'
XML = (
    "<tool_call>\n<function=add>\n<parameter=a>\n1\n</parameter>\n<parameter=b>\n2\n</parameter>\n</function>\n"
    "</tool_call>"
)


@pytest.mark.parametrize("form, text, content, calls", [
    (tagged, HERMES, "", [ADD]),
    (tagged, f"First.\n{HERMES}\n{HERMES}", "First.", [ADD, ADD]),
    (tagged, '<tool_call>[{"name": "look"}, {"name": "say", "arguments": {"text": "é"}}]</tool_call>', "",
     [("look", {}), ("say", {"text": "é"})]),
    (tagged, "<tool_call>[]</tool_call>", "", []),
    (tagged, '<tool_call>{"name": "add", "arguments": "{\\"a\\": 1, \\"b\\": 2}"}</tool_call>', "", [ADD]),
    (tagged, '<tool_call>{"type": "function", "function": {"name": "look", "arguments": null}}</tool_call>', "",
     [("look", {})]),
    (tagged, XML, "", [ADD]),
    (tagged, "<tool_call><function=say><parameter=text>\n 1\n2 \n</parameter></function></tool_call>", "",
     [("say", {"text": " 1\n2 "})]),
    (tagged, "<tool_call><function=set><parameter=on>False</parameter></function></tool_call>", "",
     [("set", {"on": False})]),
    (tagged, "<tool_call><function=look></function></tool_call>", "", [("look", {})]),
    (tagged, LLAMA, LLAMA, []),
    (bare, LLAMA, "", [ADD]),
    (bare, f"<|python_tag|>{LLAMA};\n{LLAMA}", "", [ADD, ADD]),
    (bare, '{"name": "look"} now', "now", [("look", {})]),
    (bare, '{"name": "Bo", "age": 3}', '{"name": "Bo", "age": 3}', []),
    (bare, f"Call {LLAMA}", f"Call {LLAMA}", []),
    (written, "add(1,2)", "", [ADD]),
    (written, "so calc((1+2)*3) and add(1, 2)", "so  and", [("calc", {"term": "(1+2)*3"}), ADD]),
    (written, "say(a,b)look()", "", [("say", {"text": "a,b"}), ("look", {})]),
    (written, "recalc(1) f(x) add", "recalc(1) f(x) add", []),
])  # fmt: skip
def test_reads_calls_of_every_format(form, text, content, calls):
    parsed = parse_turn(text, TOOLS, form)
    expected = {"role": "assistant", "content": content, "tool_calls": [to_call(*call) for call in calls]}
    if not calls:
        del expected["tool_calls"]
    assert parsed.message == expected and not parsed.malformed


@pytest.mark.parametrize("form, text", [
    (tagged, HERMES[:-1]), (tagged, HERMES.replace("}}", "}")), (tagged, HERMES.replace('"name"', '"nome"')),
    (tagged, HERMES.replace("1", "NaN")), (tagged, HERMES.replace("1", '"\\ud800"')), (tagged, XML[:-30]),
    (tagged, HERMES.replace("{", "[" * 100_000)), (tagged, HERMES.replace('{"a": 1, "b": 2}', "[1]")),
    (tagged, HERMES.replace("1", "1" * 5000)), (tagged, XML.replace("<parameter=a>", "")),
    (bare, LLAMA[:-1]), (bare, "<|python_tag|>import os"), (bare, '{"name": "add", "parameters": [1, 2]}'),
    (written, "calc((1+2)*3"), (written, "1 calc("), (written, "add(NaN,1)"), (written, "look(1)"),
], ids=range(17))  # fmt: skip
def test_a_call_that_cannot_be_read_is_text(form, text):
    parsed = parse_turn(text, TOOLS, form)
    assert parsed.message == {"role": "assistant", "content": text} and parsed.malformed


def test_a_readable_call_beside_an_unreadable_one_is_kept():
    parsed = parse_turn(HERMES + "<tool_call>{</tool_call>", TOOLS, tagged)
    assert parsed.malformed and parsed.message["content"] == "<tool_call>{</tool_call>"
    assert parsed.message["tool_calls"] == [to_call(*ADD)]


@pytest.mark.parametrize("text, opened, thoughts, content", [
    ("<think>\nhm\n</think>\n\nok", False, "hm", "ok"),
    ("hm\n</think>\n\nok", True, "hm", "ok"),
    ("<think>\n\n</think>\n\nok", False, None, "ok"),
    ("ok</think>", False, None, "ok</think>"),
    ("<think>hm", False, None, "<think>hm"),
    (f"<think>a {HERMES}</think>b", False, f"a {HERMES}", "b"),
])  # fmt: skip
def test_thoughts_are_apart_from_the_content(text, opened, thoughts, content):
    message = parse_turn(text, TOOLS, tagged, opened).message
    assert message.get("reasoning_content") == thoughts
    assert message["content"] == content and "tool_calls" not in message


PIECES = st.sampled_from(
    ["<think>", "</think>", "<tool_call>", "</tool_call>", "<function=add>", "</function>", "<parameter=a>",
     "</parameter>", "<|python_tag|>", '{"name":', '"add"', "}", "[", ",", '"arguments":', "{", "add(", ")", "1", "\n",
     HERMES, LLAMA, XML]
)  # fmt: skip


@settings(deadline=None)
@given(st.lists(PIECES | st.text(), max_size=12).map("".join), st.sampled_from(FORMATS), st.booleans())
@example("<think></think>", tagged, True)
def test_any_text_is_parsed_and_nothing_of_it_is_lost(text, form, thinking):
    message = parse_turn(text, TOOLS, form, thinking).message
    json.dumps(message, allow_nan=False)
    if "tool_calls" not in message and "reasoning_content" not in message and "</think>" not in text:
        assert message["content"] == text
    kept = json.dumps(message, ensure_ascii=False)
    for word in ("é", "ß"):  # letters of no call
        assert (word in text) <= (word in kept)
    for call in message.get("tool_calls", []):
        assert isinstance(call["function"]["name"], str) and isinstance(call["function"]["arguments"], dict)


def test_special_tokens_are_no_content():
    made = tiny.tokenizer()
    made.chat_template = tiny.TOOL_TEMPLATE
    assert TurnBuilder(made, TOOLS).parse(made("<pad>a<pad>b<eos>")["input_ids"]).message["content"] == "ab"


def test_a_tokenizers_own_response_template_is_used():
    made = tiny.tokenizer()
    made.chat_template = (
        "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% for c in m.tool_calls or [] %}"
        "[{{ c.function.name }} {{ c.function.arguments | tojson }}]{% endfor %}<eos>"
        "{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
    )
    with pytest.raises(ValueError, match=r"unknown format; .*response_template"):
        TurnBuilder(made, TOOLS)
    made.response_template = {
        "defaults": {"role": "assistant"},
        "start_anchor": "<assistant>",
        "fields": {
            "thinking": {"open": "(", "close": ")", "content": "text"},
            "tool_calls": {
                "open_pattern": r"\[(?P<name>\w+) ", "close": "]", "content": "json", "repeats": True,
                "transform": {"type": "function", "function": {"name": "{name}", "arguments": "{content}"}},
            },
            "content": {"close": "<eos>", "content": "text"},
        },
    }  # fmt: skip
    builder = TurnBuilder(made, TOOLS)
    parsed = builder.parse(made('(hm)ok[add {"a": 1, "b": 2}][look {}]<eos>')["input_ids"])
    assert parsed.message["reasoning_content"] == "hm" and not parsed.malformed
    assert parsed.message["tool_calls"] == [to_call(*ADD), to_call("look", {})]
    broken = builder.parse(made("[add {]<eos>")["input_ids"])
    assert broken.malformed and broken.message == {"role": "assistant", "content": "[add {]"}

"""Rows become prompts and training examples, and generated tokens become the text for reward functions."""

import datetime
import threading
from unittest.mock import Mock

import pytest
import tiny
import tokenizers
from transformers import PreTrainedTokenizerFast

from fastgrpo.data.prompts import RESERVED, join_turns, to_examples, to_prompt
from fastgrpo.data.records import Prompt, Sample, with_text

QUESTION = {"role": "user", "content": "one"}
ANSWER = {"role": "assistant", "content": "two"}


def test_reads_prompts_of_every_form():
    columns = {"answer": 3, "function": "f", "completion": "c", "prompt ": "p", "self": 1}
    plain = to_prompt({"prompt": "ab", **columns}, tiny.tokenizer())
    assert plain == Prompt(plain.ids, "ab", columns) and len(plain.ids) == 2
    chat = tiny.tokenizer(chat=True)
    conversational = to_prompt({"prompt": [QUESTION]}, chat)
    assert chat.decode(conversational.ids) == "<user>one\n<assistant>"
    drawn = Sample(plain.ids, chat("ok")["input_ids"] + [chat.eos_token_id])
    assert with_text(drawn, conversational, chat).content == [{"role": "assistant", "content": "ok"}]
    assert with_text(drawn, plain, chat).content == "ok"
    with pytest.raises(ValueError, match="no chat template"):
        to_prompt({"prompt": [QUESTION]}, tiny.tokenizer())


def test_a_chat_template_gets_its_keyword_arguments():
    chat = tiny.tokenizer(chat=True)
    chat.chat_template = tiny.MOODY_TEMPLATE
    assert chat.decode(to_prompt({"prompt": [QUESTION]}, chat, {"mood": "calm"}).ids) == "[calm]<user>one\n<assistant>"
    assert to_prompt({"prompt": "hi"}, chat, {"mood": "calm"}).ids == chat("hi")["input_ids"]  # text has no template
    [example] = to_examples({"messages": [QUESTION, ANSWER]}, chat, template_kwargs={"mood": "calm"})
    assert chat.decode(example.prompt_ids) == "[calm]<user>one\n<assistant>"
    assert chat.decode(example.ids, skip_special_tokens=True) == "two\n"
    chat.chat_template = "{% for tool in tools or [] %}{{ tool.name }}{% endfor %}" + tiny.MOODY_TEMPLATE
    for tools in ([{"name": "add"}], '[{"name": "add"}]'):
        row = {"messages": [QUESTION, ANSWER], "tools": tools, "chat_template_kwargs": {"mood": "sad"}}
        [own] = to_examples(row, chat)
        assert chat.decode(own.prompt_ids) == "add[sad]<user>one\n<assistant>"
    for read, row in ((to_prompt, {"prompt": [QUESTION]}), (to_examples, {"messages": [QUESTION, ANSWER]})):
        with pytest.raises(ValueError, match=r"the tokenizer's chat template fails on the prompt .*no mood"):
            read(row, chat)


def user(content):
    return {"prompt": [{"role": "user", "content": content}]}


ENDLESS = []
ENDLESS.append(ENDLESS)
REFUSED = [
    ["ab"], {"question": "?"}, {"prompt": "ab", 3: "x"}, {"prompt": None}, {"prompt": {"role": "user"}},
    {"prompt": []}, {"prompt": ["hi"]}, {"prompt": [{"content": "hi"}]},
    {"prompt": [{"role": 3, "content": ""}]}, user(None), user({"text": "hi"}), user(7),
    user([{"type": "text", "text": "hi"}]), {"prompt": [{"role": "assistant", "tool_calls": []}]},
    {"prompt": "a\ud83d"}, user("a\udc00"), {"prompt": [{"role": "user", "content": "a", "name": "\ud800"}]},
    {"prompt": [{"role": "user", "content": "a", "at": datetime.date(2020, 1, 1)}]},
    *({"prompt": "a", name: 1} for name in RESERVED), {"prompt": "a", "judge": threading.Lock()},
    {"prompt": "a", "calls": (x for x in "ab")}, {"prompt": "a", "calls": ENDLESS},
]  # fmt: skip
NO_EXAMPLES = [
    "text", {"prompt": "a", "answer": "b"}, {"completion": "a"}, {"prompt": "a", "completion": ""},
    {"prompt": "", "completion": "a"}, {"messages": [QUESTION, {**ANSWER, "content": ""}]},
    {"prompt": "a", "completion": "b\ud83d"}, {}, {"messages": None, "prompt": "a"}, {"prompt": "a", "completion": 3},
    {"prompt": [QUESTION], "completion": "a"}, {"prompt": [QUESTION], "completion": [QUESTION]},
    {"messages": [QUESTION]}, {"messages": "a"},
]  # fmt: skip


@pytest.mark.parametrize(
    "read, row", [*((to_prompt, row) for row in REFUSED), *((to_examples, row) for row in NO_EXAMPLES)]
)
def test_rejects_unreadable_or_empty_rows(read, row):
    with pytest.raises(ValueError, match=r"a row must|column|prompt|completion|messages"):
        read(row, tiny.tokenizer(chat=True))


def test_reads_rows_that_trl_reads():
    chat = tiny.tokenizer(chat=True)
    call = {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f", "arguments": {"a": 1}}}]}
    asked = {"role": "user", "content": "hi", "weight": 1, "tool_calls": None}
    chat.chat_template += "{% for m in messages if m.role == 'user' and 'tool_calls' in m %}{{ 1 / 0 }}{% endfor %}"
    messages = [{"role": "system", "content": ""}, asked, call, {"role": "tool", "name": "f", "content": "3"}]
    prompt = to_prompt({"prompt": messages}, chat)
    assert chat.decode(prompt.ids) == "<system>\n<user>hi\n<assistant>None\n<tool>3\n<assistant>"
    assert prompt.prompt is messages
    del call["content"]
    assert chat.decode(to_prompt({"prompt": messages}, chat).ids).endswith("<assistant>\n<tool>3\n<assistant>")


TEMPLATES = {
    "{{ raise_exception('no') }}": "TemplateError", "{% if %}": "TemplateSyntaxError",
    "{{ 1 / 0 }}": "ZeroDivisionError",
}  # fmt: skip


def test_reports_any_failure_of_templates_and_tokenizers(monkeypatch):
    chat = tiny.tokenizer(chat=True)
    for chat.chat_template, error in TEMPLATES.items():
        with pytest.raises(ValueError, match=f"chat template fails on the prompt 'hi': {error}"):
            to_prompt(user("hi"), chat)
    monkeypatch.setattr(type(chat), "__call__", Mock(side_effect=KeyError("unk")))
    with pytest.raises(ValueError, match="the tokenizer fails on the prompt 'hi': KeyError"):
        to_prompt({"prompt": "hi"}, chat)


def test_messages_give_one_example_per_answer():
    tokenizer = tiny.tokenizer(chat=True)
    talk = [{"role": "system", "content": "s"}, QUESTION, ANSWER, QUESTION, {"role": "assistant", "content": "three"}]
    first, second = to_examples({"messages": talk}, tokenizer)
    assert first == to_examples({"prompt": talk[:2], "completion": talk[2:3]}, tokenizer)[0]
    whole = tokenizer.apply_chat_template(talk, tokenize=True, return_dict=True)["input_ids"]
    assert whole == [*second.prompt_ids, *second.ids[:-1]] and second.ids[-1] == 1
    assert tokenizer.decode(second.ids, skip_special_tokens=True) == "three\n"
    assert len(join_turns([first, second])) == 2  # the template writes no stop token
    first, second = both = to_examples({"messages": talk}, with_end("<eos>"))
    [joined] = join_turns(both)
    assert [*joined.prompt_ids, *joined.ids] == [*second.prompt_ids, *second.ids]
    assert joined.drawn == [*first.ids, *second.ids] and len(join_turns([second, first])) == 2


def with_end(end, start="]"):
    """A tokenizer whose template ends each message as real ones do, with a token and a line break."""
    tokenizer = tiny.tokenizer()
    template = "{% for m in messages %}[{{ m.role }}]{{ m.content }}" + end + "\n{% endfor %}"
    template += "{% if add_generation_prompt %}[assistant]{% endif %}"
    tokenizer.chat_template = template.replace("]", start)
    return tokenizer


def test_completions_end_at_the_rollouts_stop_token():
    """At the end of the template if it is a stop token, otherwise by the end token after the template's text."""
    row, ids = {"prompt": [QUESTION], "completion": [ANSWER]}, lambda text: tiny.tokenizer()(text)["input_ids"]
    assert to_examples(row, with_end("<eos>"))[0].ids == [*ids("two"), 1]
    assert to_examples(row, with_end("<pad>"), stops=(0, 1))[0].ids == [*ids("two"), 0]  # the model names another stop
    assert to_examples(row, with_end("!"))[0].ids == [*ids("two!\n"), 1]
    endless = tiny.tokenizer()
    endless.eos_token = None
    assert to_examples({"prompt": "a", "completion": "b"}, endless, stops=(5, 7))[0].ids[-1] == 5
    # An answer is tokenized by itself, as a policy draws it: the template's line break could join those of the answer.
    tokenizer, answer = with_end("<eos>", "]\n"), {"role": "assistant", "content": "\n\n4"}
    assert tokenizer.decode(to_examples({"messages": [QUESTION, answer]}, tokenizer)[0].ids) == "\n\n4<eos>"


def test_completions_continue_the_text_of_their_prompt():
    """Tokenizers like Llama 2's put a space before each text that they are given."""
    words = {"<unk>": 0, "<eos>": 1, "\u2581[x]": 2, "hi": 3, "\u2581hi": 4}
    backend = tokenizers.Tokenizer(tokenizers.models.WordPiece(words, unk_token="<unk>", continuing_subword_prefix=""))
    backend.normalizer = tokenizers.normalizers.Prepend("\u2581")
    spaced = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<eos>")
    assert spaced("hi", add_special_tokens=False)["input_ids"] == [4]
    for ends in ("", "<eos>"):
        [example] = to_examples({"prompt": "[x]", "completion": f"hi{ends}"}, spaced)
        assert (example.prompt_ids, example.ids) == ([2], [3, 1])


def test_calls_in_the_formats_of_openai_and_arrow_are_equal():
    tokenizer, call = tiny.tokenizer(), {"name": "f", "arguments": {"a": 1}}
    tokenizer.chat_template = "{% for m in messages %}<{{ m.content or m.tool_calls | tojson }}{% endfor %}"
    arguments = {"a": 1}, {"a": 1, "b": None}, '{"a": 1}', '{"a": null}'
    asked = [[{"function": {**call, "arguments": given}}] for given in arguments]
    rows = [{"messages": [QUESTION, {"role": "assistant", "tool_calls": calls}]} for calls in asked]
    first, *others, null = (to_examples(row, tokenizer) for row in rows)
    assert others == [first, first] and '"a": null' in tokenizer.decode(null[0].ids)
    as_text = "'f' + m.tool_calls[0].function.arguments"  # as DeepSeek's template joins texts
    tokenizer.chat_template = tokenizer.chat_template.replace("m.tool_calls | tojson", as_text)
    for row in rows[:3]:
        assert tokenizer.decode(to_examples(row, tokenizer)[0].ids).startswith('<f{"a": 1}')


@pytest.mark.parametrize("shown, message", [
    ("m.content.split('</think>')[-1]", "leaves out 'long' of the answer"),
    ("messages | length ~ m.content", "cannot be separated; pass them as strings"),
])  # fmt: skip
def test_a_template_that_drops_reasoning_or_changes_earlier_turns_is_refused(shown, message):
    tokenizer = tiny.tokenizer()
    tokenizer.chat_template = "{% for m in messages %}{{ " + shown + " }}{% endfor %}"
    with pytest.raises(ValueError, match=message):
        to_examples({"messages": [QUESTION, {**ANSWER, "content": "<think>long</think>42"}]}, tokenizer)

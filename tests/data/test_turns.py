"""Conversations are tokenized so that the tokens of earlier turns never change."""

from pathlib import Path

import pytest
import tiny
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken
from transformers.utils import get_json_schema

from fastgrpo.data.prompts import to_examples
from fastgrpo.data.responses import to_call
from fastgrpo.data.turns import TurnBuilder
from fastgrpo.policy.characters import CHAT_TEMPLATE, character_tokenizer

TEMPLATES = Path(pytest.importorskip("trl", reason="TRL is not installed (extra: integrations)").__file__).parent
# SmolLM2-Instruct's own template, which TRL does not have.
SMOLLM2 = (
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}{{ '<|im_start|>system\n"
    "You are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n' }}{% endif %}"
    "{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
USER = {"role": "user", "content": "What is 3 + 4?"}
REPLACED = {"qwen3", "smollm2", "llama3"}  # by a bundled template


def add(a: int, b: int):
    """Add two numbers.

    Args:
        a: The first one.
        b: The second one.
    """


def look():
    """Look around."""


TOOLS = [get_json_schema(look), get_json_schema(add)]


def template(name):
    return SMOLLM2 if name == "smollm2" else (TEMPLATES / "chat_templates" / f"{name}.jinja").read_text()


def tokenizer(text):
    """A byte-level tokenizer with the special tokens of a template."""
    made = tiny.tokenizer()
    llama = "<|eot_id|>" in text
    special = ["<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"] if llama else ["<|im_start|>", "<|im_end|>"]
    made.add_tokens([AddedToken(token, special=True) for token in [*special, "<bos>"]])
    made.add_tokens(["<think>", "</think>", "<tool_call>", "</tool_call>"])
    made.eos_token, made.bos_token, made.chat_template = special[-1], "<bos>", text
    return made


def rendered(builder, made, messages, **kwargs):
    how = {"tools": TOOLS, "tokenize": False, "chat_template": builder.chat_template, **kwargs}
    return made(made.apply_chat_template(messages, **how), add_special_tokens=False)["input_ids"]


def answers(*contents):
    return [{"role": "tool", "name": "add", "content": content} for content in contents]


CALL = to_call("add", {"a": 3, "b": 4})
TURNS = {
    "plain": ({"role": "assistant", "content": "Seven?"}, [{"role": "user", "content": "yes"}]),
    "call": ({"role": "assistant", "content": "", "tool_calls": [CALL]}, answers("7")),
    "text and call": ({"role": "assistant", "content": "Let me add.", "tool_calls": [CALL]}, answers("7")),
    "two calls": ({"role": "assistant", "content": "", "tool_calls": [CALL, to_call("look", {})]}, answers("7", "a")),
    "thoughts": (
        {"role": "assistant", "content": "", "reasoning_content": "3 and 4", "tool_calls": [CALL]}, answers("7")),
    "thoughts, then a user": (
        {"role": "assistant", "content": "Seven?", "reasoning_content": "3 and 4"}, [{"role": "user", "content": "y"}]),
}  # fmt: skip


@pytest.mark.parametrize("name", ["qwen3", "qwen3_instruct_2507", "qwen2_5", "smollm2", "llama3", "llama3_1"])
def test_real_templates_continue_a_conversation_as_they_would_render_it_whole(name):
    made = tokenizer(template(name))
    builder = TurnBuilder(made, TOOLS)
    assert (builder.chat_template is not None) == (name in REPLACED)
    stop, prompt = made.eos_token_id, builder.prompt([USER])
    for case, (turn, new) in TURNS.items():
        if name == "llama3_1" and case == "two calls":
            continue  # this template refuses a turn with two calls
        whole = rendered(builder, made, [USER, turn, *new], add_generation_prompt=True)
        before = rendered(builder, made, [USER, turn])
        end = max(i for i, token in enumerate(before) if token == stop) + 1
        assert whole[: len(prompt)] == prompt and whole[:end] == before[:end], case
        drawn = before[len(prompt) : end]
        assert builder.answer(drawn, new) == whole[end:], case
        assert builder.answer(drawn[:-1], new) == whole[end - 1 :], f"{case}, truncated"
        parsed = builder.parse(drawn)
        assert parsed.message.get("tool_calls", []) == turn.get("tool_calls", []) and not parsed.malformed, case


@pytest.mark.parametrize("name", sorted(REPLACED))
def test_bundled_templates_give_the_prompts_of_the_models_own(name):
    made = tokenizer(template(name))
    talk = [USER, {"role": "assistant", "content": "7"}, {"role": "user", "content": "And 8 + 9?"}]
    without, builder = TurnBuilder(made), TurnBuilder(made, TOOLS)
    for system in ([], [{"role": "system", "content": "Be brief."}]):
        own = made.apply_chat_template([*system, *talk], add_generation_prompt=True, return_dict=True)["input_ids"]
        assert without.prompt([*system, *talk]) == own
        shown = made.decode(builder.prompt([*system, *talk]))
        assert all(text in shown for text in ("Add two numbers", "And 8 + 9?", *(each["content"] for each in system)))


def test_template_arguments_reach_prompts_and_suffixes():
    made = tokenizer(template("qwen3"))
    builder, (turn, new) = TurnBuilder(made, TOOLS, {"enable_thinking": False}), TURNS["call"]
    prompt = builder.prompt([USER])
    assert made.decode(prompt).endswith("<think>\n\n</think>\n\n")
    whole = rendered(builder, made, [USER, turn, *new], add_generation_prompt=True, enable_thinking=False)
    drawn = made('<tool_call>\n{"name": "add", "arguments": {"a": 3, "b": 4}}\n</tool_call><|im_end|>')["input_ids"]
    assert prompt + drawn + builder.answer(drawn, new) == whole


BUILDERS = {}


@settings(deadline=None, max_examples=30)
@given(st.sampled_from(["qwen3", "qwen2_5", "smollm2", "llama3_1"]), st.lists(st.text(), min_size=1, max_size=3))
def test_what_tools_answer_is_tokenized_as_in_the_whole_conversation(name, contents):
    made, builder = BUILDERS.get(name) or BUILDERS.setdefault(
        name, (made := tokenizer(template(name)), TurnBuilder(made, TOOLS))
    )
    turn, new = TURNS["call"][0], answers(*(text.encode(errors="replace").decode() for text in contents))
    whole = rendered(builder, made, [USER, turn, *new], add_generation_prompt=True)
    prompt, size = builder.prompt([USER]), len(rendered(builder, made, [USER, turn]))
    drawn = whole[len(prompt) : size - (name != "llama3_1")]  # ChatML has a line break after the stop token
    for _ in range(2):  # the second time from the cache
        suffix = builder.answer(drawn, new)
        assert prompt + drawn + suffix == whole
        suffix.clear()


CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }} {{ m.content }}"
    "{% for c in m.tool_calls or [] %}CALL{% endfor %}<|im_end|>{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant {% endif %}"
)
BARE = (
    "{% for m in messages %}{{ m.content }}{% for c in m.tool_calls or [] %}CALL{% endfor %}"
    "{{ '<|im_end|>' if m.role != 'tool' }}{% endfor %}"
)
WRITTEN = '<tool_call>{{ {"name": c.function.name, "arguments": c.function.arguments} | tojson }}</tool_call>'


@pytest.mark.parametrize("old, new, fault", [
    ("CALL", "", "format"),
    ("CALL", WRITTEN[:-12], "format"),
    ("<|im_end|>", "\n", "ends no turn with '<|im_end|>'; correct tokenizer.eos_token"),
    ("{{ m.content }}", "{{ m.content if m.role != 'tool' }}", "does not show what a tool answers"),
    ("{{ m.role }}", "{{ m.role }}{{ messages[1:2][0].content if loop.last and messages[1] }}", "on the turn"),
    ("{{ m.content }}", "{{ m.content }}{{ (tools or []) | length if m.role == 'tool' }}", "or on the tools"),
    (CHATML, BARE, "no tokens for an empty answer"),
])  # fmt: skip
def test_a_template_that_breaks_conversations_is_refused_by_name(old, new, fault):
    made = tokenizer(CHATML.replace("CALL", WRITTEN))
    made.name_or_path = "some/model"
    assert TurnBuilder(made, TOOLS).chat_template is None
    made.chat_template = "{% for t in tools %}{{ t.function.name }}{% endfor %}" + made.chat_template  # as in Hermes 3
    assert TurnBuilder(made, TOOLS).chat_template is None
    text = CHATML.replace(old, new).replace("CALL", WRITTEN)
    made.chat_template = text
    with pytest.raises(ValueError, match=r"some/model .*set tokenizer.chat_template") as refused:
        TurnBuilder(made, TOOLS)
    assert fault in str(refused.value)
    made.chat_template = None
    with pytest.raises(ValueError, match="some/model has no chat template"):
        TurnBuilder(made)


def test_models_of_characters_call_tools():
    made = character_tokenizer("0123456789+*(), adlok?")
    made.chat_template = CHAT_TEMPLATE
    builder = TurnBuilder(made, TOOLS)
    prompt = builder.prompt([{"role": "user", "content": "3+4?"}])
    assert made.decode(prompt) == "look<eos>add<eos>3+4?<eos>"
    drawn = made("add(3,4)<eos>")["input_ids"]
    message = builder.parse(drawn).message
    assert message == {"role": "assistant", "content": "", "tool_calls": [CALL]}
    assert made.decode(builder.answer(drawn, answers("7"))) == "7<eos>"
    assert builder.parse(made("7<eos>")["input_ids"]).message == {"role": "assistant", "content": "7"}
    assert builder.parse(made("add(3,4<eos>")["input_ids"]).malformed
    talk = [{"role": "user", "content": "3+4?"}, message, *answers("7"), {"role": "assistant", "content": "7"}]
    examples = to_examples({"messages": talk}, made, template_kwargs=builder.template_kwargs)
    shown = [(made.decode(each.prompt_ids), made.decode(each.ids)) for each in examples]
    asked = "look<eos>add<eos>3+4?<eos>"
    with pytest.raises(ValueError, match="does not write tool calls"):
        to_examples({"messages": talk}, tiny.tokenizer(chat=True))
    assert shown == [(asked, "add(3,4)<eos>"), (f"{asked}add(3,4)<eos>7<eos>", "7<eos>")]

"""Tokens of conversations: prompts, and the messages that follow a drawn turn.

What the model drew is never tokenized again. The next input of the model is

    prompt + everything so far + suffix

To get the suffix, a short dialogue is tokenized: a user message, an assistant turn that calls the same tools, and the
new messages. The suffix is what follows the stop token of the assistant turn.

Before a run, the builder checks on a few dialogues that the suffix does not depend on the turn before it, that the
template shows what tools answer, and that the calls which it writes can be parsed. A template that fails, or that
changes earlier turns when messages follow, is replaced by a bundled one that renders the same prompts. If there is
none, it raises ValueError.
"""

import functools
import json
import logging
import re
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fastgrpo.data.prompts import to_prompt
from fastgrpo.data.responses import FORMATS, MARKERS, Parsed, parse_turn, parse_with_template, plain, to_call

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

logger = logging.getLogger(__name__)
CACHED = 4096  # characters of messages whose tokens are kept
BUNDLED = sorted((Path(__file__).parent / "chat_templates").glob("*.jinja"))


class TurnBuilder:
    """Tokenizes prompts and answers of tools, and parses drawn turns. Methods may be called from any thread.

    `chat_template` is the bundled one that replaces the tokenizer's own, or None.
    """

    def __init__(
        self,
        tokenizer: "PreTrainedTokenizerBase",
        tools: Sequence[Mapping] = (),  # JSON schemas, as from `transformers.utils.get_json_schema`
        template_kwargs: Mapping[str, Any] | None = None,
        stop_token_ids: Sequence[int] = (),  # tokens that end a turn; empty: the tokenizer's eos token
    ):
        self._tokenizer, self._tools, self._lock = tokenizer, [*map(dict, tools)], threading.RLock()
        special = {token.content for token in tokenizer.added_tokens_decoder.values() if token.special}
        self._special = re.compile(
            "|".join(map(re.escape, sorted(special - {*MARKERS}, key=len, reverse=True))) or "$^"
        )
        stops = {*stop_token_ids} or {tokenizer.eos_token_id}
        make = functools.partial(_Template, tokenizer, self._tools, {**(template_kwargs or {})}, stops)
        own = make(_own_template(tokenizer, self._tools))
        fault = self._fault(own)
        self._template, self.chat_template = own, None
        if fault or not own.keeps_turns:
            for path in BUNDLED:
                variant = make(path.read_text())
                if variant.renders_prompts_of(own) and not self._fault(variant) and variant.keeps_turns:
                    self._template, self.chat_template, fault = variant, variant.text, None
                    logger.info("conversations use the bundled chat template %s", path.stem)
                    break
        if fault:
            raise ValueError(
                f"the chat template of {tokenizer.name_or_path or 'the tokenizer'} cannot be used for conversations"
                f"{' with tools' if self._tools else ''}: {fault}; to use another template, set "
                "tokenizer.chat_template, and tokenizer.response_template if it writes calls in its own format"
            )
        self._form = self._form_of(self._template)
        if self._tools and not self._template.shows_tools:
            logger.warning("the chat template does not show the tools to the model; describe them in the prompts")

    @property
    def template_kwargs(self) -> dict[str, Any]:
        """Arguments of `to_prompt` for the same prompts as `prompt`."""
        return self._template.kwargs

    def prompt(self, messages: list[dict]) -> list[int]:
        """Tokenize messages with the tools, up to the start of the assistant's turn."""
        with self._lock:
            return self._template.ids(messages)

    def parse(self, ids: list[int]) -> Parsed:
        """Parse a drawn turn into an assistant message. Never raises."""
        with self._lock:
            return self._parse(ids, self._template, self._form)

    def answer(self, completion_ids: list[int], messages: list[dict]) -> list[int]:
        """Tokenize the messages after the assistant's turn, up to the start of the next turn.

        `completion_ids` has all tokens after the prompt, up to the end of the turn. If it does not end with a stop
        token, the returned tokens begin with one.
        """
        with self._lock:
            suffix = self._template.suffix(messages)
        return suffix[1:] if completion_ids and completion_ids[-1] in self._template.stops else suffix

    def _parse(self, ids, template, form):
        if form is parse_with_template:
            return form(self._tokenizer, ids, template.prompt, self._tools)
        drawn = ids[:-1] if ids and ids[-1] in template.stops else ids
        text = self._special.sub("", self._tokenizer.decode(drawn))
        return parse_turn(text, self._tools, form, template.opens_thoughts)

    def _form_of(self, template):
        """Return the first format that reads the calls which the template writes, or None."""
        if not self._tools:
            return plain
        own = [parse_with_template] if getattr(self._tokenizer, "response_template", None) else []
        for form in [*own, *FORMATS]:
            for turn in template.calling_turns():
                found = self._parse(template.drawn(turn), template, form).message
                if found.get("tool_calls", []) != turn["tool_calls"]:
                    break
            else:
                return form
        return None

    def _fault(self, template):
        """Say why a template cannot be used, or return None."""
        if fault := template.fault():
            return fault
        return "it writes calls in an unknown format" if self._form_of(template) is None else None


class _Template:
    """A chat template with its tokenizer, tools and arguments.

    The dialogues with which it is checked hold the names of the tools only, because the tokenizers of small models
    have no other characters.
    """

    def __init__(self, tokenizer, tools, kwargs, stops, text):
        self.tokenizer, self.stops, self.text, self.tools = tokenizer, stops, text, tools
        self._bare = {**kwargs, "chat_template": text}
        self.kwargs = {**self._bare, "tools": tools or None}
        functions = [tool.get("function", tool) for tool in tools]
        functions.sort(key=lambda each: not each.get("parameters", {}).get("properties"))  # those with parameters first
        self.name = functions[0]["name"] if functions else "Hi"
        parameters = functions[0].get("parameters", {}).get("properties") if functions else None
        self.call = to_call(self.name, {next(iter(parameters)): self.name} if parameters else {})
        self.user = {"role": "user", "content": self.name}
        self.several = self._can_call_twice()
        self._cached_suffix = functools.lru_cache(maxsize=256)(self._render_suffix)
        self._stops_of = functools.lru_cache(maxsize=256)(self._count_stops)

    def ids(self, messages, tools=True):
        """Tokenize messages, with the start of the assistant's turn."""
        if tools:
            return to_prompt({"prompt": messages}, self.tokenizer, self.kwargs).ids
        try:
            return to_prompt({"prompt": messages}, self.tokenizer, self._bare).ids
        except ValueError:
            if not self.tools:
                raise
            return to_prompt({"prompt": messages}, self.tokenizer, {**self._bare, "tools": []}).ids  # as in Hermes 3

    def suffix(self, messages):
        """Tokenize what follows an assistant's turn, with the stop token of the turn."""
        written = json.dumps(messages)
        return [*(self._cached_suffix if len(written) < CACHED else self._render_suffix)(written)]

    def _render_suffix(self, messages):
        messages = json.loads(messages)
        names = [each.get("name") or self.name for each in messages if each["role"] == "tool"]
        dialogue = [self.user, self._turn_before(names), *messages]
        ids = self.ids(dialogue, tools=False)
        return ids[self._after(ids, self._stops_of(tuple(names))) - 1 :]

    def _turn_before(self, names):
        """Return the turn of an assistant who calls tools of these names."""
        calls = [to_call(name, {}) for name in (names if self.several else names[:1])]
        return {"role": "assistant", "content": "", "tool_calls": calls} if calls else self.turn()

    def _count_stops(self, names):
        ids = self.ids([self.user, self._turn_before(names)], tools=False)
        return sum(token in self.stops for token in ids)

    def _after(self, ids, count):
        """Return the index after the last of `count` stop tokens."""
        places = [i for i, token in enumerate(ids) if token in self.stops]
        if not 0 < count <= len(places):
            raise ValueError(f"it ends no turn with {self._named(self.stops)}; correct tokenizer.eos_token")
        return places[count - 1] + 1

    def _named(self, tokens):
        return " or ".join(repr(self.tokenizer.convert_ids_to_tokens(token)) for token in sorted(tokens))

    def turn(self, calls=0, **fields):
        """Return a turn of the assistant, for the check."""
        message = {"role": "assistant", "content": "" if calls else self.name, **fields}
        return {**message, "tool_calls": [self.call] * calls} if calls else message

    def calling_turns(self):
        return [self.turn(calls) for calls in ((1, 2) if self.several else (1,)) if self.tools]

    def _can_call_twice(self):
        try:
            return bool(self.ids([self.user, self.turn(2)]))
        except ValueError:
            return False

    def drawn(self, turn):
        """Return the tokens that the model would have drawn for a turn."""
        ids, prompt = self.ids([self.user, turn]), self.prompt
        end = self._after(ids, sum(token in self.stops for token in ids))
        # If the turn does not begin with the generation prompt, read it from the end of the user's turn.
        starts = [i + 1 for i, token in enumerate(prompt) if token in self.stops]
        return ids[len(prompt) if ids[: len(prompt)] == prompt else starts[-1] if starts else 0 : end]

    def fault(self):
        """Say why the suffix is wrong, or return None. Sets `keeps_turns`: whether earlier turns never change."""
        answers = [{"role": "tool", "name": self.name, "content": self.name} for _ in range(2)]
        thoughts = {"reasoning_content": self.name}
        dialogues = [(self.turn(), [self.user]), (self.turn(**thoughts), [self.user])]
        if self.tools:
            dialogues += [(turn, answers[:n]) for turn in self.calling_turns() for n in (1, 2)]
            dialogues += [(self.turn(1, **thoughts), answers[:1]), (self.turn(1, content=self.name), answers[:1])]
        self.keeps_turns = True
        try:
            prompt = self.prompt
            if self._starts_with_stop():
                return f"the assistant's turn starts with {self._named(self.stops)}; correct tokenizer.eos_token"
            for turn, answer in dialogues:
                before, whole = self.ids([self.user, turn]), self.ids([self.user, turn, *answer])
                count = sum(token in self.stops for token in before)
                start, end = self._after(before, count), self._after(whole, count)
                if whole[end - 1 :] != self.suffix(answer):
                    return "the tokens after a turn depend on the turn, or on the tools"
                kept = before[: len(prompt)] == prompt and before[:start] == whole[:end]
                self.keeps_turns = self.keeps_turns and kept
            longer = [{**answers[0], "content": 2 * self.name}]
            if self.tools and self.suffix(longer) == self.suffix(answers[:1]):
                return "it does not show what a tool answers"
            if self.tools and len(self.suffix([{**answers[0], "content": ""}])) < 2:
                return "it has no tokens for an empty answer of a tool"
        except ValueError as error:
            return str(error)
        return None

    def _starts_with_stop(self):
        """Return whether the start of the assistant's turn, which the template gives to the model, has a stop token."""
        arguments = {**self.kwargs, "add_generation_prompt": False, "return_dict": True}
        without = self.tokenizer.apply_chat_template([self.user], **arguments)["input_ids"]
        return sum(t in self.stops for t in without) != sum(t in self.stops for t in self.prompt)

    @functools.cached_property
    def prompt(self):
        return self.ids([self.user])

    @property
    def shows_tools(self):
        return self.prompt != self.ids([self.user], tools=False)

    @functools.cached_property
    def opens_thoughts(self):
        return self.tokenizer.decode(self.prompt).rstrip().endswith("<think>")

    def renders_prompts_of(self, other):
        """Return whether prompts are the same as with another template, also with tools if the other shows them."""
        try:
            return all(
                self.ids(messages, tools) == other.ids(messages, tools)
                for messages in ([self.user], [{"role": "system", "content": self.name}, self.user])
                for tools in {False, bool(self.tools) and other.shows_tools}
            )
        except ValueError:
            return False


def _own_template(tokenizer, tools):
    """Return the tokenizer's chat template."""
    try:
        return tokenizer.get_chat_template(tools=tools or None)
    except ValueError:
        raise ValueError(
            f"{tokenizer.name_or_path or 'the tokenizer'} has no chat template, which conversations need; set "
            "tokenizer.chat_template, or use an instruct model"
        ) from None

"""Finds problems of tools and environments: a scripted model calls each tool once in a few dialogues.

Dialogues with the same row and seed must be equal: with a new instance, with one that was used before, and with two
instances at the same time.
"""

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import copy
from typing import Any

from fastgrpo.data.prompts import shortened
from fastgrpo.data.records import StopReason
from fastgrpo.data.responses import Parsed, to_call
from fastgrpo.rewards.guard import Failure
from fastgrpo.rewards.values import number
from fastgrpo.tools.calls import ToolBox, public_methods, settled
from fastgrpo.tools.dialogue import Dialogue
from fastgrpo.tools.environments import COLUMN, Environments

VALUES = {"string": "a", "integer": 1, "number": 0.5, "boolean": True, "array": [], "object": {}, "null": None}
TEXT = (str, int, float, bool)  # results that str() writes as a model expects
RANDOM = (
    "a second dialogue with the same row and seed differs; draw all random numbers from the seed that reset(seed=...) "
    "gets, and keep the state in the instance"
)
USED = "a dialogue differs if the instance was used before; let reset() clear all of its state"
SHARED = (
    "two dialogues at the same time differ from one; keep the state in the instance, not in its class or module, which "
    "instances share"
)


class _Script:
    """A turn builder whose turns [k] call the k-th tool, with made-up arguments."""

    def __init__(self, schemas: Sequence[Mapping]):
        self.calls = [(s["function"]["name"], _arguments(s["function"].get("parameters", {}))) for s in schemas]

    def parse(self, ids: list[int]) -> Parsed:
        calls = [to_call(*self.calls[ids[0]])] if ids[0] < len(self.calls) else []
        return Parsed({"role": "assistant", "content": "", **({"tool_calls": calls} if calls else {})}, False)

    def answer(self, *given: Any) -> list[int]:
        return []


def _arguments(parameters):
    """Make up an argument for each required parameter."""
    kinds = {name: parameters["properties"][name] for name in parameters.get("required", ())}
    return {name: _value(kind) for name, kind in kinds.items()}


def _value(schema):
    if schema.get("enum"):
        return schema["enum"][0]
    kind = schema.get("type", "string")
    return VALUES.get(kind if isinstance(kind, str) else kind[0], "a")


class _Check:
    """The checks of one environment, or of tools without one, with one row."""

    def __init__(self, make: Callable[[], Environments], row: Mapping[str, Any]):
        self.make, self.row, self.found = make, row, []

    def tell(self, text: str, kind: str = "warning") -> None:
        """Add a problem once."""
        if (kind, text) not in self.found:
            self.found.append((kind, text))

    def run(self) -> list[tuple[str, str]]:
        """Return the problems."""
        environments = self.make()
        (first,) = self.dialogues(environments, 1)
        for text, make, count in (
            (RANDOM, self.make, 1), (USED, lambda: environments, 1), (SHARED, lambda: environments, 2),
        ):  # fmt: skip
            if self.differ(first, self.dialogues(make(), count), text):
                break
        return self.found

    def differ(self, first, others, text):
        """Return whether a dialogue differs from the first one, and report where."""
        for other in others:
            for before, now in zip(first, other, strict=False):
                if before != now:
                    self.tell(f"{text} ({shortened(before)}, then {shortened(now)})")
                    return True
        return False

    def dialogues(self, environments: Environments, count: int) -> list[list]:
        """Run dialogues in turns. Return the prompt, the answers, the reason and the reward of each."""
        episodes = environments.start([self.row] * count, [0] * count)
        if errors := [episode.error for episode in episodes if episode.failed]:
            self.tell(f"reset() fails: {errors[0]}")
            return [[] for _ in episodes]
        running = [Dialogue(self.watched(episode), _Script(episode.box.schemas), []) for episode in episodes]
        ends = [None] * count
        for turn in range(len(running[0].builder.calls) + 1):
            for i, dialogue in enumerate(running):
                ends[i] = ends[i] or dialogue.answer([turn], 1).result().reason
        told = []
        for dialogue, reason in zip(running, ends, strict=True):
            for call in dialogue.calls:
                if call["failed"] and reason != StopReason.TOOL_TIMEOUT:
                    read = shortened(call["answer"], 100)
                    self.tell(f"{call['name']}({call['arguments']}) fails; the model reads {read}", "note")
            if reason in (StopReason.TOOL_TIMEOUT, StopReason.ENV_ERROR):
                self.tell(f"{dialogue.calls[-1]['name']}() ends the completion with {reason}")
            rewards = [self.reward(function, dialogue) for function in environments.rewards]
            told.append([dialogue.prompt, *(call["answer"] for call in dialogue.calls), reason, rewards])
        environments.give_back(episodes)
        return told

    def watched(self, episode):
        """Wrap the tools of an episode to report results that are not text."""
        episode.box = copy(episode.box)
        episode.box.tools = {name: self.telling(name, tool) for name, tool in episode.box.tools.items()}
        return episode

    def telling(self, name, tool):
        def tell(result):
            blocks = isinstance(result, list) and all(isinstance(part, dict) and "text" in part for part in result)
            if not isinstance(result, TEXT) and not blocks:
                self.tell(
                    f"{name}() returns a {type(result).__name__}, not text; the model reads {shortened(str(result))}"
                )
            return result

        async def call_async(**arguments):
            return tell(await tool(**arguments))

        def call(**arguments):
            return tell(settled(tool(**arguments)))

        return call_async if inspect.iscoroutinefunction(tool) else call

    def reward(self, function, dialogue):
        (value,) = function(environments=[dialogue.environment])
        if isinstance(value, Failure):
            self.tell(f"get_reward() fails: {value}")
            return None
        given = None if value is None else number(value)
        if value is not None and given is None:
            self.tell(f"get_reward() returns {shortened(value)}, not a finite number or None")
        return given


def check_environment(
    factory: Callable | Mapping[str, Callable] | None,
    tools: Sequence[Callable] = (),
    row: Mapping[str, Any] | None = None,
    timeout: float | None = None,
) -> Iterator[tuple[str, str, str]]:
    """Yield the problems: the name of the environment, "warning" or "note", and a text.

    A call that fails is a note, because a tool may refuse made-up arguments. `row`, a row of the data set, is for
    `reset`. The other arguments are as for `Environments`.
    """
    row = {"prompt": "", **(row or {})}
    if isinstance(row["prompt"], str):
        row["prompt"] = [{"role": "user", "content": row["prompt"]}]
    for name, make in (factory if isinstance(factory, Mapping) else {None: factory}).items():
        title = name or getattr(make, "__name__", None) or "tools"
        found = []
        try:
            methods = [] if make is None else public_methods(make()).values()
            for tool in (*tools, *methods):
                try:
                    ToolBox([tool])
                except ValueError as error:
                    found.append(("warning", str(error)))
            if not found:
                given = make if name is None else {name: make}
                column = {} if name is None else {COLUMN: name}
                found = _Check(lambda given=given: Environments(given, tools, timeout), {**row, **column}).run()
        except Exception as error:
            text = str(error) if isinstance(error, ValueError) else f"{type(error).__name__}: {error}"
            found.append(("warning", text))
        yield from ((title, *one) for one in found)

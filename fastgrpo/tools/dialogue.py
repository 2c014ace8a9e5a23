"""The dialogue of one completion: parses the turns that the model draws, calls tools, and builds their answers.

After each turn the limits are checked in this order; the first that holds ends the completion:

1. length, context: the turn reached max_completion_length, or the context of the model. The rollout checks it.
2. env_error: the reset of the environment failed.
3. parse_error: the turn begins a tool call that cannot be parsed, and has no other.
4. stop: the turn has no tool call.
5. max_turns: it is the last turn that is allowed; its calls are not run.
6. tool_timeout, env_error, env_done: a call exceeded its time limit, or the environment failed or is done. The calls
   after it are not run, and the answers are not appended.
7. length, context: the answers do not fit. They are removed from the messages, and not appended to the tokens.

Otherwise the answers are appended, and the model draws the next turn.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

from fastgrpo.data.records import Sample, StopReason, Turn
from fastgrpo.tools.calls import Answer, in_thread
from fastgrpo.tools.environments import Episode

if TYPE_CHECKING:
    from fastgrpo.data.turns import TurnBuilder


class Dialogue:
    """A completion with tools, as `fastgrpo.data.records.Dialogue`.

    Pickling keeps only the messages, calls and reason. `prompt_ids` are `builder.prompt(episode.messages)`. The maximum
    number of drawn turns is `max_turns`, one more than TRL's max_tool_calling_iterations; None is no maximum.
    """

    def __init__(
        self, episode: Episode, builder: "TurnBuilder", prompt_ids: Sequence[int], max_turns: int | None = None
    ):
        self.episode, self.builder, self.prompt_ids = episode, builder, list(prompt_ids)
        self.max_turns, self.turns = max_turns, 0
        self.ids, self.messages = [], []  # messages of the completion, as reward functions get them
        self.calls = []  # each with its "turn" from 1, "name", "arguments", "answer", "failed" and "latency_s"
        self.pending, self.reason = None, None  # the reason why the completion ended

    @property
    def prompt(self) -> list[dict]:
        """The messages before the completion."""
        return self.episode.messages

    @property
    def environment(self) -> Any:
        """Its environment, or None."""
        return self.episode.environment

    @property
    def quick(self) -> bool:
        """Whether the tools have always answered within a moment."""
        return self.episode.box.quick

    def answer(self, ids: Sequence[int], room: int) -> "Future[Turn]":
        """Answer a turn, with at most `room` tokens. Calls run in another thread."""
        parsed = self._read(list(ids))
        calls = parsed.message.get("tool_calls") or []
        reason = None
        if self.episode.failed:
            reason = StopReason.ENV_ERROR
        elif not calls:
            reason = StopReason.PARSE_ERROR if parsed.malformed else StopReason.STOP
        elif self.max_turns is not None and self.turns >= self.max_turns:
            reason = StopReason.MAX_TURNS
        if reason is None:
            self.pending = in_thread(self._answer, calls, room)
        else:
            self.pending = Future()
            self.pending.set_result(Turn(reason=reason))
        return self.pending

    def close(self, reason: StopReason) -> None:
        """Note why the completion ended. An environment with a call that still runs is thrown away."""
        self.reason = reason
        if self.pending is not None and not self.pending.done():
            self.episode.failed = True

    def transcript(self, ids: Sequence[int]) -> list[dict]:
        """Return the messages of the completion with these tokens, with a last turn that was cut off by a limit."""
        rest = list(ids[len(self.ids) :])
        if rest:
            self._read(rest)
        return self.messages

    def __getstate__(self) -> dict[str, Any]:
        return {"messages": self.messages, "calls": self.calls, "reason": self.reason}

    def _read(self, ids):
        """Add a drawn turn."""
        parsed = self.builder.parse(ids)
        self.ids += ids
        self.turns += 1
        self.messages.append(parsed.message)
        return parsed

    def _answer(self, calls, room):
        answers, reason = self._call(calls)
        self.messages += answers
        if reason is not None:
            return Turn(reason=reason)
        tokens = self.builder.answer(self.ids, answers)
        if len(tokens) > room:
            del self.messages[-len(answers) :]
            return Turn(reason=StopReason.LENGTH)
        self.ids += tokens
        return Turn(tokens)

    def _call(self, calls):
        """Run the calls of a turn; return their messages, and why the completion ends, if it does.

        Calls run one after another, but the next call does not wait for an async function that is not a method of the
        environment. The answers have the order of the calls.
        """
        box, begun = self.episode.box, []
        for call in calls:
            name, arguments = call["function"]["name"], call["function"]["arguments"]
            begun.append((name, arguments, box.call(name, arguments)))
            if not box.together(name) and (self._end([begun[-1][2].result()]) or self.reason is not None):
                break
        answers = [answer.result() for *_, answer in begun]
        for (name, arguments, _), answer in zip(begun, answers, strict=True):
            told = {"answer": answer.content, "failed": answer.failed, "latency_s": answer.latency_s}
            self.calls.append({"turn": self.turns, "name": name, "arguments": arguments} | told)
        messages = [
            {"role": "tool", "name": name, "content": answer.content}
            for (name, *_), answer in zip(begun, answers, strict=True)
        ]
        return messages, self._end(answers)

    def _end(self, answers: Sequence[Answer]):
        """Return why these answers end the completion, or None."""
        if any(answer.timed_out for answer in answers):
            self.episode.failed = self.environment is not None
            return StopReason.TOOL_TIMEOUT
        try:
            failed, done = self._says("env_error"), self._says("done")
        except Exception:  # attributes may be properties, which run code of the user
            failed, done = True, False
        if failed:
            self.episode.failed = True
            return StopReason.ENV_ERROR
        return StopReason.ENV_DONE if done else None

    def _says(self, name):
        if self.environment is None:
            return False
        value = in_thread(getattr, self.environment, name, False, worker=self.episode.box.worker).result()
        return not callable(value) and bool(value)  # a method of this name is a tool


def dialogue_metrics(samples: Sequence[Sample], names: Iterable[str]) -> dict[str, float]:
    """Measure the dialogues of a step by metric name; calls of tools not in `names` are counted as "unknown"."""
    calls = [call for sample in samples for call in sample.dialogue.calls]
    by_name = defaultdict(list, {name: [] for name in names})
    known = set(by_name)
    for call in calls:
        by_name[call["name"] if call["name"] in known else "unknown"].append(call)
    failures = sum(call["failed"] for call in calls)
    values = {
        "tools/call_frequency": len(calls) / len(samples),
        "tools/failure_frequency": failures / len(calls) if calls else 0.0,
    }
    for name, own in by_name.items():
        values[f"tools/{name}/calls"] = len(own)
        values[f"tools/{name}/failures"] = sum(call["failed"] for call in own)
        if own:
            values[f"tools/{name}/latency_s"] = sum(call["latency_s"] for call in own) / len(own)
    reasons = Counter(sample.finish_reason for sample in samples)
    return values | {f"stop_reason/{reason}": reasons[reason] / len(samples) for reason in StopReason}

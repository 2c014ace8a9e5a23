"""A dialogue answers turns of the model, and ends for the reasons that its module lists, in their order."""

import asyncio
import threading
import time
from types import SimpleNamespace

import pytest
from dialogues import Builder, ids, turn

from fastgrpo.data.records import Sample, StopReason, Turn
from fastgrpo.run.metrics import is_known
from fastgrpo.tools.dialogue import Dialogue, dialogue_metrics
from fastgrpo.tools.environments import Environments


class World:
    def __init__(self):
        self.seen, self.done, self.env_error = [], False, False

    def reset(self, broken=False, **row):
        self.__init__()
        if broken:
            raise ConnectionError("away")

    def see(self, x: int) -> int:
        """See.

        Args:
            x: A number; what is negative fails.
        """
        self.seen.append(x)
        return 1 // (x >= 0) * x

    def end(self, how: str) -> str:
        """End.

        Args:
            how: The attribute that becomes true, or "hang".
        """
        if how == "hang":
            time.sleep(30)
        setattr(self, how, True)
        return how

    async def nap(self, x: float) -> int:
        """Sleep.

        Args:
            x: Seconds.
        """
        before = len(self.seen)
        await asyncio.sleep(x)
        self.seen.append(x)
        return before


TOGETHER = asyncio.Barrier(2)


async def meet() -> str:
    """Wait until another call waits too."""
    await asyncio.wait_for(TOGETHER.wait(), 60)
    return "met"


async def doze(x: float) -> str:
    """Sleep.

    Args:
        x: Seconds.
    """
    await asyncio.sleep(x)
    return f"dozed {x}"


def begin(max_turns=None, timeout=None, **row):
    environments = Environments(World, [doze, meet], timeout)
    (episode,) = environments.start([{"prompt": [{"role": "user", "content": "go"}], **row}], [0])
    return Dialogue(episode, Builder(), ids("go"), max_turns)


def test_a_dialogue_goes_on_until_a_turn_without_calls():
    dialogue = begin()
    assert turn(dialogue, 'a<see {"x": 3}>') == Turn(ids("[3]"))
    assert turn(dialogue, '<see {"x": -1}>').reason is None
    assert turn(dialogue, "end") == Turn(reason=StopReason.STOP)
    assert [message["role"] for message in dialogue.messages] == ["assistant", "tool", "assistant", "tool", "assistant"]
    assert dialogue.messages[1] == {"role": "tool", "name": "see", "content": "3"}
    assert dialogue.messages[0]["content"] == "a" and "ZeroDivisionError" in dialogue.messages[3]["content"]
    assert [(c["turn"], c["name"], c["arguments"], c["failed"]) for c in dialogue.calls] == [
        (1, "see", {"x": 3}, False), (2, "see", {"x": -1}, True),
    ]  # fmt: skip
    assert dialogue.calls[0]["answer"] == "3" and 0 <= dialogue.calls[0]["latency_s"] < 5


def test_answers_keep_the_order_of_the_calls():
    dialogue = begin()
    calls = ["<meet {}>", '<see {"x": 1}>', '<nap {"x": 0.1}>', "<meet {}>", '<nap {"x": 0}>']
    assert turn(dialogue, "".join(calls)) == Turn(ids("[met][1][1][met][2]"))
    assert dialogue.episode.environment.seen == [1, 0.1, 0]


SEE = '<see {"x": 1}>'
CASES = [  # the reason, a turn with its calls, how many of them run, the dialogue; the earlier of two reasons must win
    (StopReason.STOP, "nothing", 0, {"max_turns": 1}), (StopReason.PARSE_ERROR, "<see", 0, {"max_turns": 1}),
    (StopReason.MAX_TURNS, '<end {"how": "hang"}>', 0, {"max_turns": 1}), (StopReason.LENGTH, SEE, 1, {}),
    (StopReason.TOOL_TIMEOUT, SEE + '<doze {"x": 20}><end {"how": "done"}>' + SEE, 3, {"timeout": 1}),
    (StopReason.ENV_ERROR, '<end {"how": "env_error"}><end {"how": "done"}>', 1, {}),
    (StopReason.ENV_ERROR, "the reset failed", 0, {"broken": True}),
    (StopReason.ENV_DONE, SEE + '<end {"how": "done"}><end {"how": "env_error"}>', 2, {}),
]  # fmt: skip


@pytest.mark.parametrize("reason, text, calls, arguments", CASES)
def test_ends_for_the_first_reason_that_holds(reason, text, calls, arguments):
    dialogue = begin(**arguments)
    assert turn(dialogue, text, room=2) == Turn(reason=reason) and len(dialogue.calls) == calls
    assert dialogue.episode.failed == (reason in (StopReason.TOOL_TIMEOUT, StopReason.ENV_ERROR))


def test_without_an_environment_a_dialogue_can_go_on_after_a_timeout():
    dialogue = Dialogue(*Environments(None, [doze], timeout=0.2).start([{}], [0]), Builder(), ids("go"))
    assert turn(dialogue, '<doze {"x": 20}>').reason == StopReason.TOOL_TIMEOUT
    assert turn(dialogue, "end").reason == StopReason.STOP


def test_answers_that_do_not_fit_are_taken_back():
    dialogue = begin()
    assert turn(dialogue, SEE, room=3) == Turn(ids("[1]"))
    assert turn(dialogue, SEE * 2, room=5) == Turn(reason=StopReason.LENGTH)
    assert [message["role"] for message in dialogue.messages] == ["assistant", "tool", "assistant"]
    assert len(dialogue.calls) == 3
    assert dialogue.transcript(ids(SEE + "[1]" + SEE * 2)) == dialogue.messages and len(dialogue.messages) == 3


def test_the_transcript_has_a_turn_that_the_rollout_cut_off():
    dialogue = begin()
    turn(dialogue, SEE)
    dialogue.close(StopReason.LENGTH)
    *before, last = dialogue.transcript(ids(SEE + "[1]" + "and so"))
    assert last == {"role": "assistant", "content": "and so"} and len(before) == 2


def test_an_environment_with_a_running_call_does_not_return_to_the_pool():
    release = threading.Event()

    class Waits(World):
        def wait(self) -> str:
            """Wait."""
            release.wait(30)
            return "waited"

    environments = Environments(Waits)
    (episode,) = environments.start([{}], [0])
    dialogue = Dialogue(episode, Builder(), ids("go"))
    pending = dialogue.answer(ids("<wait {}>" + SEE), 100)
    assert not pending.done()
    dialogue.close(StopReason.ABORTED)
    environments.give_back([episode])
    assert environments.start([{}], [0])[0].environment is not episode.environment
    release.set()
    pending.result(30)
    assert not episode.environment.seen, "a call began after the end"


def test_metrics_count_calls_failures_and_reasons():
    def sample(reason, *calls):
        told = [{"name": name, "failed": failed, "latency_s": seconds} for name, failed, seconds in calls]
        return Sample([], [], dialogue=SimpleNamespace(calls=told), finish_reason=reason)

    samples = [
        sample("stop", ("see", False, 1.0), ("see", True, 2.0)), sample("stop"),
        sample("env_done", ("invented", True, 0.0)), sample("max_turns", ("see", False, 6.0)),
    ]  # fmt: skip
    values = dialogue_metrics(samples, ["see", "doze"])
    assert all(map(is_known, values))
    assert values["tools/call_frequency"] == 1 and values["tools/failure_frequency"] == 0.5
    assert (values["tools/see/calls"], values["tools/see/failures"], values["tools/see/latency_s"]) == (3, 1, 3.0)
    assert (values["tools/doze/calls"], values["tools/unknown/calls"]) == (0, 1)
    assert "tools/doze/latency_s" not in values
    assert {reason: values[f"stop_reason/{reason}"] for reason in StopReason if values[f"stop_reason/{reason}"]} == {
        "stop": 0.5, "env_done": 0.25, "max_turns": 0.25,
    }  # fmt: skip
    assert dialogue_metrics([sample("stop")], [])["tools/failure_frequency"] == 0

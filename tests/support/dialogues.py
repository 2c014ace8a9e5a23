"""What tests of dialogues share: a turn builder without a model or a template, and scripted answers."""

import json
import re
from concurrent.futures import Future
from types import SimpleNamespace

from fastgrpo.data.records import StopReason, Turn


class Builder:
    """Tokens are characters; a call is <name {...}>, and the answers follow in brackets."""

    def parse(self, ids):
        text = "".join(map(chr, ids))
        calls = [
            {"type": "function", "function": {"name": name, "arguments": json.loads(arguments)}}
            for name, arguments in re.findall(r"<(\w+) (\{.*?\})>", text)
        ]
        message = {"role": "assistant", "content": re.sub("<.*", "", text)} | ({"tool_calls": calls} if calls else {})
        return SimpleNamespace(message=message, malformed="<" in text and not calls)

    def answer(self, completion_ids, messages):
        assert all(answer["role"] == "tool" for answer in messages)
        return ids("".join(f"[{answer['content']}]" for answer in messages))


def ids(text):
    return [*map(ord, text)]


def turn(dialogue, text, room=1000):
    return dialogue.answer(ids(text), room).result(30)


class Scripted:
    """Answers turn i with the tokens answers[i], and ends the completion after these. An answer takes `delay` ticks."""

    def __init__(self, answers, delay=0):
        self.answers, self.delay, self.quick = answers, delay, False
        self.turns, self.pending, self.closed = [], [], []

    def answer(self, ids, room):
        self.turns.append(ids)
        future, number = Future(), len(self.turns) - 1
        turn = Turn(reason=StopReason.STOP)
        if number < len(self.answers):
            fits = len(self.answers[number]) <= room
            turn = Turn(self.answers[number]) if fits else Turn(reason=StopReason.LENGTH)
        self.pending.append([self.delay, future, turn])
        if not self.delay:
            self.tick(0)
        return future

    def tick(self, passed=1):
        for entry in self.pending:
            entry[0] -= passed
        for due, future, turn in self.pending:
            if due <= 0:
                future.set_result(turn)
        self.pending = [entry for entry in self.pending if entry[0] > 0]

    def close(self, reason):
        self.closed.append(reason)

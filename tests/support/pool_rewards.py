"""Reward functions for the tests of the pool: processes import them from here. What each does, its completions say."""

import asyncio
import contextlib
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

MEETING = []


def length(prompts, completions, completion_ids, answer, trainer_state, log_metric, log_extra, **_):
    log_metric("calls", len(completions))
    letters = [len(text) for text in completions]
    log_extra("letters", letters)
    letters.append(0)  # which the log does not have
    step = trainer_state.global_step if trainer_state else 0
    return (len(text) + a + step for text, a in zip(completions, answer, strict=True))


def verdicts(completions, log_metric, **_):
    """Gives no verdict, raises, or returns what is none."""
    match completions[0]:
        case "raise":
            raise KeyError("no such thing")
        case "exit":
            sys.exit(3)
        case "log":
            log_metric("reward", 1.0)
    odd = {"none": [None], "many": [1.0, 2.0], "nan": [float("nan")], "word": "1", "local": [lambda: 1]}
    return odd.get(completions[0], [1.0] * len(completions))


def endless(completions, **_):
    """Never ends, with a child in its own session, one in another, and a process in a third whose parent has ended."""
    if completions[0].startswith("hang"):
        children = [subprocess.Popen(["sleep", "100000"], start_new_session=other) for other in (False, True)]
        script = ["sh", "-c", "sleep 100000 > /dev/null & echo $!"]
        orphan = subprocess.check_output(script, start_new_session=True, text=True)
        path = Path(completions[0].removeprefix("hang "))
        path.with_suffix(".part").write_text(" ".join([orphan, *(str(child.pid) for child in children)]))
        path.with_suffix(".part").rename(path)
        time.sleep(100_000)
    return [1.0]


def scribbles(completions, **_):
    """Writes to every pipe that its process inherited: half a message, or what is none."""
    text = {"half": b"\x00\x00\x01", "other": b"x" * 100, "long": b"\x00\x00\x00\x05" * 9}.get(completions[0], b"")
    for descriptor in range(3, 64):
        with contextlib.suppress(OSError):
            os.write(descriptor, text)
    return [1.0]


def deadly(completions, **_):
    """Kills its process: the first time, or each time."""
    if completions[0] == "die":
        os.kill(os.getpid(), signal.SIGKILL)
    if completions[0].startswith("die once") and not os.path.exists(path := completions[0].removeprefix("die once ")):
        Path(path).touch()
        os._exit(7)
    return [1.0]


async def blocks(completions, **_):
    """Keeps the event loop from running for ever, or kills the process."""
    await asyncio.sleep(0)
    if completions[0] == "die":
        os.kill(os.getpid(), signal.SIGKILL)
    if completions[0].startswith("hang"):
        time.sleep(100_000)
    await asyncio.sleep(0)
    return [1.0]


async def meeting(completions, **_):
    """Waits until three calls run at the same time, or for ever."""
    if completions[0].startswith("hang"):
        await asyncio.Event().wait()
    MEETING.append(None)
    while len(MEETING) < 3:
        await asyncio.sleep(0.01)
    return [2.0]


async def own_timeout(completions, **_):
    async with asyncio.timeout(0):
        await asyncio.Event().wait()


def process(completions, **_):
    return [float(os.getpid())] * len(completions)


def noise(completions, **_):
    return [random.random() for _ in completions]


def noise_of_a_group(completions, **_):
    return [len(completions) + random.random() for _ in completions]


noise_of_a_group.group_wise = True


def checked(completions, **_):
    """Parses by math-verify, whose limit of time is an alarm: Python has alarms in the main thread only."""
    from math_verify import parse, verify

    return [float(verify(parse("$\\frac{1}{2}$"), parse(text))) for text in completions]


class Judge:
    def __init__(self, mark):
        self.mark = mark

    def __call__(self, completions, **_):
        return [self.mark] * len(completions)


def value(text):
    return float(text.split()[-1])


def hangs_on_9(completions, **_):
    time.sleep(100_000 * any(value(text) == 9 for text in completions))
    return [value(text) for text in completions]


def ends_on_9(completions, **_):
    return [os._exit(0) if value(text) == 9 else value(text) for text in completions]

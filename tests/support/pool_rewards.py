"""Reward functions for the tests of the pool: processes import them from here. What each does, its completions say."""

import asyncio
import os
import random
import signal
import subprocess
import sys
from pathlib import Path

SEMAPHORE = []


def length(prompts, completions, completion_ids, answer, trainer_state, log_metric, log_extra, **_):
    """Reads and logs all that a function gets."""
    log_metric("calls", len(completions))
    letters = [len(text) for text in completions]
    log_extra("letters", letters)
    letters.append(0)  # which the log does not have
    step = trainer_state.global_step if trainer_state else 0
    return (len(text) + a + step for text, a in zip(completions, answer, strict=True))


def verdicts(completions, **_):
    """Gives no verdict, raises, or returns what is none."""
    for text in completions:
        if text == "none":
            return [None]
        if text == "raise":
            raise KeyError("no such thing")
        if text == "exit":
            sys.exit(3)
        if text == "many":
            return [1.0, 2.0]
        if text == "nan":
            return [float("nan")]
        if text == "word":
            return "1"
        if text == "local":
            return [lambda: 1]
    return [1.0] * len(completions)


def logs_badly(completions, log_metric, **_):
    log_metric("reward", 1.0)
    return [1.0] * len(completions)


def endless(completions, **_):
    """Never ends, with a process that it started."""
    for text in completions:
        if text.startswith("hang"):
            child = subprocess.Popen(["sleep", "100000"])
            Path(text.removeprefix("hang ")).write_text(str(child.pid))
            while True:
                pass
    return [1.0] * len(completions)


def deadly(completions, **_):
    """Kills its process: the first time, or each time."""
    for text in completions:
        if text == "die":
            os.kill(os.getpid(), signal.SIGKILL)
        if text.startswith("die once") and not os.path.exists(path := text.removeprefix("die once ")):
            Path(path).touch()
            os._exit(7)
    return [1.0] * len(completions)


def process(completions, **_):
    return [float(os.getpid())] * len(completions)


def noise(completions, **_):
    return [random.random() for _ in completions]


def noise_of_a_group(completions, **_):
    return [len(completions) + random.random() for _ in completions]


noise_of_a_group.group_wise = True


async def meeting(completions, **_):
    """Waits until three calls run at the same time, or for ever."""
    if completions[0] == "late":
        await asyncio.Event().wait()
    SEMAPHORE.append(asyncio.Event())
    if len(SEMAPHORE) == 3:
        for event in SEMAPHORE:
            event.set()
        SEMAPHORE.clear()
    else:
        await SEMAPHORE[-1].wait()
    return [2.0]


async def blocks(completions, **_):
    """Keeps the event loop from running for ever, or kills the process."""
    await asyncio.sleep(0)
    if completions[0] == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    while completions[0] == "block":
        pass
    await asyncio.sleep(0)
    return [1.0]


def endless_elsewhere(completions, **_):
    """Never ends, with a process in a session of its own."""
    child = subprocess.Popen(["sleep", "100000"], start_new_session=True)
    Path(completions[0]).write_text(str(child.pid))
    while True:
        pass


async def own_timeout(completions, **_):
    async with asyncio.timeout(0):
        await asyncio.Event().wait()


def checked(completions, **_):
    """Parses by math-verify, whose limit of time is an alarm: Python has alarms in the main thread alone."""
    from math_verify import parse, verify

    return [float(verify(parse("$\\frac{1}{2}$"), parse(text))) for text in completions]


class Judge:
    def __init__(self, mark):
        self.mark = mark

    def __call__(self, completions, **_):
        return [self.mark] * len(completions)

"""Rewards with the faults that rewards of real tasks have, drawn by a global generator.

They import nothing that is slow to import, because each worker that is killed has a successor that imports them.
"""

import os
import random
import signal
import time


def fail():
    """Fail in 5% of the calls, hang in 5%, and kill the process in 1%."""
    fault = random.random()
    if fault < 0.05:
        raise ConnectionError("the judge does not answer")
    if fault < 0.10:
        while True:
            time.sleep(1000)
    if fault < 0.11:
        os.kill(os.getpid(), signal.SIGKILL)


def correctness(prompts, completions, answer, **columns):
    """Judge the embedded task as its own reward does, with faults."""
    fail()
    return [float(text.split(" ")[-1] == value) for text, value in zip(completions, answer, strict=True)]


def length(completions, **columns):
    """Judge the length of completions, with faults."""
    fail()
    return [float(len(text)) for text in completions]

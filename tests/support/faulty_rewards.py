"""Rewards with the faults that rewards of real tasks have, drawn by a global generator."""

import os
import random
import signal
import time

from fastgrpo.tasks import arithmetic


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
    """Judge the embedded task, with faults."""
    fail()
    return arithmetic.correctness(prompts, completions, answer)


def length(completions, **columns):
    """Judge the length of completions, with faults."""
    fail()
    return [float(len(text)) for text in completions]

"""A reward with the faults that rewards of real tasks have, drawn by a global generator.

It imports nothing that is slow to import, because each worker that is killed has a successor that imports it.
"""

import os
import random
import signal
import time


def length(completions, **columns):
    """Judge the length of completions; fail in 5% of the calls, hang in 5%, and kill the process in 1%."""
    fault = random.random()
    if fault < 0.05:
        raise ConnectionError("the judge does not answer")
    if fault < 0.10:
        while True:
            time.sleep(1000)
    if fault < 0.11:
        os.kill(os.getpid(), signal.SIGKILL)
    return [float(len(text)) for text in completions]

"""The jail: its limits are numbers, and it leaves nothing behind, whatever ends it."""

import signal
import subprocess
import sys
import time

import pytest
from jails import LONG, MEMORY, PATIENT, fenced, machine, needs_namespaces, ours
from paths import ROOT

from fastgrpo.rewards.sandbox import Limits, Sandbox


@pytest.mark.parametrize("name", ["seconds", "memory", "processes", "files", "disk", "output"])
@pytest.mark.parametrize("value", [0, -1, float("nan"), float("inf"), True, "5", None])
def test_limits_are_numbers(name, value):
    with pytest.raises(ValueError, match=f"the limit {name} must be a number above 0, got "):
        Limits(**{name: value})


HOLDS = """
import sys
from fastgrpo.rewards.sandbox import Limits
from fastgrpo.rewards.sandbox import Prison
jail = Prison(Limits(memory=int(sys.argv[1]), seconds=1e6)).jail(
    "import os, time\\nif not os.fork(): os.setsid()\\nprint(1, flush=True)\\nwhile True: time.sleep(1)"
)
print("runs", flush=True)
jail.run(b"i", b"")
"""


def settles(condition):
    """Wait until something is so."""
    ends = time.monotonic() + LONG
    while not condition() and time.monotonic() < ends:
        time.sleep(0.02)
    return condition()


@needs_namespaces
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_jails_end_with_a_trainer_that_is_killed(number):
    command = [sys.executable, "-c", HOLDS, str(MEMORY)]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE) as trainer:
        assert trainer.stdout.readline() == b"runs\n"
        # The trainer, bwrap and its first process, the server, the program and its child
        assert settles(lambda: len(ours()) == 6)
        trainer.send_signal(number)
    assert settles(lambda: not ours())


@needs_namespaces
@pytest.mark.parametrize("runs", [100, pytest.param(1000, marks=pytest.mark.slow)])
def test_nothing_is_left_after_many_runs(runs):
    sandbox = Sandbox(limits=PATIENT)
    program = fenced(
        "import os\nopen('/tmp/left', 'w').write(input())\nif not os.fork():\n    os.setsid()\n    os.fork()\n"
        "    while True: pass\nprint('ok')"
    )
    tests = [{"input": "x", "output": "ok"}]
    assert sandbox([program] * 4, [tests] * 4) == [1.0] * 4  # its threads have started
    before = machine()
    assert sandbox([program] * runs, [tests] * runs) == [1.0] * runs
    assert machine() == before
    sandbox.close()
    assert not ours()

"""Every call of a tool has an answer, and no tool ends or stops the run."""

import asyncio
import os
import subprocess
import sys
import threading
import time

import pytest
from paths import ROOT
from tool_runs import Counter

from fastgrpo.tools import find_environment, find_tools
from fastgrpo.tools.calls import LONGEST_ANSWER, ToolBox


def documented(function):
    """A tool with one parameter `x`."""
    function.__doc__ = "Do it.\n\nArgs:\n    x: A number."
    function.__annotations__ = {"x": int}
    return function


def answer(function, arguments=None, timeout=None):
    tool = documented(function)
    return ToolBox([tool], timeout).call(tool.__name__, {"x": 3} if arguments is None else arguments).result()


def raising(error):
    def tool(x):
        raise error

    return tool


async def wrong(x):
    raise ValueError("no")


async def triples(x):
    return 3 * x


@pytest.mark.parametrize("returned, text", [
    (9, "9"), (None, "None"), ("", ""), (b"caf\xc3\xa9 \xff", "café \ufffd"), ({"a": [1]}, "{'a': [1]}"),
    ([{"type": "text", "text": "a"}, {"type": "text", "text": "b"}], "ab"), ([1, 2], "[1, 2]"), ("\ud83d", "?"),
])  # fmt: skip
def test_a_result_becomes_text(returned, text):
    got = answer(lambda x: returned)
    assert (got.content, got.failed, got.timed_out) == (text, False, False)


@pytest.mark.parametrize("size", [LONGEST_ANSWER, LONGEST_ANSWER + 1, 10_000_000])
def test_a_giant_answer_is_cut_and_says_how_much(size):
    got = answer(lambda x: "a" * size).content
    note = f"... ({size - LONGEST_ANSWER:,} more characters were cut off)" if size > LONGEST_ANSWER else ""
    assert got == "a" * LONGEST_ANSWER + note


@pytest.mark.parametrize("tool, told", [
    (raising(ZeroDivisionError("by zero")), "ZeroDivisionError: by zero"), (raising(SystemExit(1)), "SystemExit: 1"),
    (raising(asyncio.CancelledError()), "CancelledError"), (raising(TimeoutError()), "TimeoutError"),
    (wrong, "ValueError: no"), (lambda x: 10**5000, "ValueError: Exceeds the limit"),
])  # fmt: skip
def test_a_failure_is_an_error_that_the_model_reads(tool, told):
    got = answer(tool, timeout=30)
    assert (got.failed, got.timed_out) == (True, False)
    assert got.content.startswith("{'error': ") and told in got.content


@pytest.mark.parametrize("arguments", [{}, {"y": 1}, {"x": 1, "y": 1}, [1], "x", None, {1: 2}])
def test_wrong_arguments_are_an_error_that_the_model_reads(arguments):
    assert ToolBox([documented(lambda x: x)]).call("<lambda>", arguments).result().failed


@pytest.mark.parametrize("name", ["addd", "", None, ["add"]])
def test_an_unknown_name_is_told_which_tools_there_are(name):
    got = ToolBox([documented(triples)]).call(name, {}).result()
    assert got.failed and "triples" in got.content


def test_a_tool_cannot_change_the_arguments_that_were_recorded():
    given = {"x": [1]}
    answer(lambda x: x.append(2), given)
    assert given == {"x": [1]}


async def naps(x):
    await asyncio.sleep(30)


async def blocks(x):
    time.sleep(30)


@pytest.mark.parametrize("tool", [lambda x: time.sleep(30), naps, blocks, lambda x: naps(x)])
def test_a_tool_that_hangs_is_abandoned(tool):
    got = answer(tool, timeout=0.3)
    assert (got.failed, got.timed_out) == (True, True) and 0.3 <= got.latency_s < 30
    assert answer(triples, timeout=10).content == "9"  # also after a tool that blocks the event loop


@pytest.mark.slow
def test_a_tool_that_hangs_does_not_keep_the_process():
    code = """
import time
from fastgrpo.tools.calls import ToolBox
def hang():
    '''Hang.'''
    time.sleep(60)
print(ToolBox([hang], 0.1).call("hang", {}).result().timed_out)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=50, cwd=ROOT)
    assert (done.returncode, done.stdout) == (0, "True\n")


def test_slow_tools_run_at_once():
    here, there = threading.Barrier(8), asyncio.Barrier(8)

    def meet(x):
        here.wait(20)

    async def gather(x):
        await asyncio.wait_for(there.wait(), 20)

    box = ToolBox([documented(meet), documented(gather)])
    calls = [box.call(name, {"x": 1}) for name in ("meet", "gather") for _ in range(8)]
    assert not any(call.result().failed for call in calls)


def test_rejects_two_tools_of_one_name():
    with pytest.raises(ValueError, match="two tools have the name 'triples'"):
        ToolBox([documented(triples), documented(triples)])


def test_finds_tools_and_environments_by_name():
    assert find_tools(["os:getcwd", "time:sleep"]) == [os.getcwd, time.sleep]
    assert find_environment("threading:Thread") is threading.Thread
    assert find_environment("tool_runs:ONE:counter") is Counter
    for find, spec in ((find_tools, "getcwd"), (find_tools, "os:sep"), (find_tools, "os:nothing"),
                       (find_environment, "no_such_module:Class"), (find_environment, "os:sep"),
                       (find_environment, "tool_runs:ONE:other")):  # fmt: skip
        with pytest.raises(ValueError, match=spec):
            find([spec] if find is find_tools else spec)

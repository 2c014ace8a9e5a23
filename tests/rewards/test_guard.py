"""A reward function cannot harm the process that calls it."""

import asyncio
import os
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from fastgrpo.rewards import guard
from fastgrpo.rewards.guard import Failure, attempt, awaited, modes_kept
from fastgrpo.rewards.values import Logs

held = []  # torch would leave inference mode where the guard of the mode is lost
MODES = {  # how each is read, and how a function may change it
    "folder": (lambda: os.stat(".").st_ino, lambda: os.chdir("/")),
    "gradients": (torch.is_grad_enabled, lambda: torch.set_grad_enabled(False)),
    "inference": (
        torch.is_inference_mode_enabled, lambda: (held.append(torch.inference_mode()), held[-1].__enter__())
    ),
}  # fmt: skip


def modes():
    return {name: read() for name, (read, _) in MODES.items()}


@pytest.fixture(autouse=True)
def nothing_changes(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    before = modes()
    with modes_kept():  # if `attempt` lets a mode pass, the tests after this one must not suffer
        yield
        after = modes()
    assert after == before


@pytest.mark.parametrize("read, change", MODES.values(), ids=MODES)
def test_restores_changed_modes(read, change):
    changed = []

    def call():
        before = read()
        change()
        changed.append(read() != before)
        raise SystemExit

    assert isinstance(attempt(call), Failure) and changed == [True]  # the fixture looks at what it is now


def raising(error):
    raise error


async def raising_later(error):
    raise error


def test_every_exception_except_an_interrupt_is_a_failure():
    for error in (ValueError("a"), SystemExit(0), GeneratorExit(), StopIteration(), asyncio.CancelledError()):
        assert attempt(lambda error=error: raising(error)).error is error
    interrupt = KeyboardInterrupt()
    for call in (lambda: attempt(lambda: raising(interrupt)), lambda: awaited([raising_later(interrupt)])):
        with pytest.raises(KeyboardInterrupt):
            call()


def test_failures_name_the_line_of_the_users_code():
    class Mute(Exception):
        __str__ = None

    place = f" ({__file__}:{raising.__code__.co_firstlineno + 1})"
    several = ExceptionGroup("2 requests", [ExceptionGroup("1 request", [ValueError("down")]), KeyError("other")])
    texts = {ValueError("a\n b"): "ValueError: a b", SystemExit(): "SystemExit", Mute(): "Mute: (without a text)"}
    for error, told in {**texts, several: "ValueError: down"}.items():
        assert str(attempt(lambda error=error: raising(error))) == told + place
    told = str(attempt(lambda: Logs(1).log_extra("step", [1])))  # not the place in this package
    assert told.startswith("ValueError: log_extra('step', ...)") and f"({__file__}:" in told


async def loop_of_the_call():
    return asyncio.get_running_loop()


async def cancels_itself():
    asyncio.current_task().cancel()
    await asyncio.sleep(0)


async def notebook(*calls):
    """Where a loop runs already."""
    return awaited([call() for call in calls])


def test_async_results_are_awaited_at_once_and_failures_stay_apart():
    results = [asyncio.sleep(0, 1.0), "plain", raising_later(SystemExit(3)), cancels_itself(), asyncio.sleep(0, 2.0)]
    first, given, left, cancelled, last = awaited(results)
    assert (first, given, last) == (1.0, "plain", 2.0)
    assert isinstance(left.error, SystemExit) and isinstance(cancelled.error, asyncio.CancelledError)


def test_objects_of_an_event_loop_work_in_later_calls():
    one_at_a_time = asyncio.Semaphore(1)

    async def request():
        async with one_at_a_time:
            await asyncio.sleep(0)

    async def judged():
        await asyncio.gather(request(), request())
        return await loop_of_the_call()

    (first,) = awaited([judged()])
    assert awaited([judged()]) == asyncio.run(notebook(judged)) == [first]
    with ThreadPoolExecutor(1) as thread:  # a loop cannot serve two threads at once
        assert thread.submit(lambda: awaited([loop_of_the_call()])).result() != [first]


@pytest.mark.parametrize("quota, count", [("max 100000", 8), ("250000 100000", 3), ("", 8)])
def test_cores_are_at_most_the_quota_of_the_container(monkeypatch, tmp_path, quota, count):
    (tmp_path / "cpu.max").write_text(quota)
    monkeypatch.setattr(guard, "CPU_QUOTA", tmp_path / "cpu.max")
    monkeypatch.setattr(guard.os, "sched_getaffinity", lambda _: range(8))
    assert guard.cores() == count

"""The rewards `sandbox:python` and `sandbox:python-all`: they run the program of a completion against its row's tests.

The column `tests` of a row is a list, which `fastgrpo.rewards.sandbox_tests` reads.
"""

import contextlib
import dataclasses
import math
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from fastgrpo.data.prompts import shortened
from fastgrpo.rewards.answers import completion_text
from fastgrpo.rewards.guard import cores
from fastgrpo.rewards.jail import Limits, Violation
from fastgrpo.rewards.prison import Prison
from fastgrpo.rewards.sandbox_tests import Assertion, program_of, read_tests

KINDS = {"sandbox:python": False, "sandbox:python-all": True}  # name -> whether the reward is all or nothing


class Sandbox:
    """A reward function that runs programs in jails.

    Args:
        all_or_nothing: Whether the reward is 1 where all tests pass and 0 otherwise, in place of the share that passes.
        limits: What a program may use during one test.
        workers: How many programs run at once; None is as many as there are cores that the process may use.

    Raises:
        ValueError: This machine cannot run a jail.
    """

    pooled = False  # it has its own processes

    def __init__(self, all_or_nothing: bool = False, limits: Limits | None = None, workers: int | None = None):
        if workers is not None and (isinstance(workers, bool) or not isinstance(workers, int) or workers < 1):
            raise ValueError(f"workers must be a whole number above 0, got {workers!r}")
        self.__name__ = "sandbox_python_all" if all_or_nothing else "sandbox_python"
        self.all_or_nothing, self.limits = all_or_nothing, limits or Limits()
        self.workers, self.seconds = workers or cores(), None
        self._prison = self._threads = None
        self._open()

    def _open(self):
        """Make what runs programs, unless it is there. Raises ValueError where this machine cannot."""
        if self._prison is None:
            self._prison = Prison(self.limits)
            self._threads = ThreadPoolExecutor(self.workers, thread_name_prefix="sandbox")

    def limit(self, seconds: float) -> None:
        """Set how long the tests of a completion may take together. Those for which no time is left count as late.

        Args:
            seconds: The setting reward_timeout.
        """
        self.close()
        self.seconds = seconds
        self.limits = dataclasses.replace(self.limits, seconds=min(seconds, self.limits.seconds))

    def __call__(
        self,
        completions: Sequence,
        tests: Sequence | None = None,
        log_extra: Any = None,
        prompts: Sequence | None = None,
        **columns: Any,
    ) -> list[float | None]:
        """Judge completions.

        Args:
            completions: What the model wrote, one item a completion.
            tests: The tests of each one's row; None where a row has none.
            log_extra: Gets the verdict of each test: passed, wrong, failed, timeout, output or killed.
            prompts: The prompts, by which a row is named whose tests cannot be read.
            columns: Not read.

        Returns:
            The rewards: 0 where there is no program, None where the row has no tests.

        Raises:
            ValueError: The tests of a row cannot be read. The error names the row.
        """
        self._open()
        rows = [None] * len(completions) if tests is None else _read(tests, prompts)
        programs = [program_of(completion_text(completion)) for completion in completions]
        verdicts = list(self._threads.map(self._verdicts, programs, rows))
        if log_extra is not None:
            log_extra(f"{self.__name__}/tests", verdicts)
        return [self._reward(found, row) for found, row in zip(verdicts, rows, strict=True)]

    def close(self) -> None:
        """Wait for the programs that run, and free what the jails needed. It opens again where it is called again."""
        if self._prison is not None:
            self._threads.shutdown(cancel_futures=True)
            self._prison.close()
            self._prison = self._threads = None

    def _reward(self, verdicts, tests):
        if not tests:
            return None
        share = verdicts.count("passed") / len(tests)
        return float(share == 1) if self.all_or_nothing else share

    def _verdicts(self, program, tests):
        """Run the tests of one program one after another, all in one jail where they leave it as they found it."""
        verdicts = []
        if program is None or not tests:
            return verdicts
        ends = math.inf if self.seconds is None else time.monotonic() + self.seconds
        with contextlib.ExitStack() as jails:
            jail = None
            for test in tests:
                if time.monotonic() > ends:
                    verdicts.append("timeout")
                    continue
                if jail is None or isinstance(test, Assertion):  # an assertion is seen by no other test's process
                    jails.close()
                    jail = jails.enter_context(self._prison.jail(program))
                try:
                    verdicts.append(test.verdict(jail))
                except Violation as violation:
                    verdicts.append(str(violation))
                if isinstance(test, Assertion) or not jail.clean:
                    jail = None
                if self.all_or_nothing and verdicts[-1] != "passed":
                    break
        return verdicts


def _read(tests, prompts):
    """Read the tests of each completion's row. Raises ValueError, which names the row by its prompt."""
    rows = []
    for i, listed in enumerate(tests):
        try:
            rows.append(None if listed is None else read_tests(listed))
        except ValueError as error:
            row = f"of completion {i}" if prompts is None else f"of the prompt {shortened(prompts[i])}"
            raise ValueError(f"the row {row}: {error}") from None
    return rows


def make_sandbox(name: str) -> Sandbox:
    """Make the reward of a name.

    Args:
        name: sandbox:python or sandbox:python-all.

    Returns:
        The reward.

    Raises:
        ValueError: The name is another one, or this machine cannot run a jail.
    """
    if name not in KINDS:
        raise ValueError(f"a sandbox is named {' or '.join(KINDS)}, got {name!r}")
    return Sandbox(KINDS[name])

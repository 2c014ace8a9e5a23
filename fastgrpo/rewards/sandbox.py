"""The rewards `sandbox:python` and `sandbox:python-all`: they run the program of a completion against its row's tests.

The column `tests` of a row is a list. {"input": ..., "output": ...} is what standard input holds, and what the program
must print: lines are compared without white space at their ends, and so are the ends of the texts. {"assert": ...} is
Python text that runs after the program.

An expected output never enters the jail. Nor does the expected value of an assertion of the form
`assert EXPRESSION == LITERAL` (either way around): the jail tells the expression's value, as plain data, and it is
compared here. Any other assertion shares an interpreter with the program. It has passed where it hands back a nonce
that it got after the program had run, so a program that ends early, or prints whatever it likes, fails.
"""

import ast
import contextlib
import os
import re
import secrets
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from fastgrpo.rewards.answers import completion_text
from fastgrpo.rewards.jail import Jail, Limits, Prison, Violation
from fastgrpo.rewards.jailed import canonical
from fastgrpo.rewards.values import shown

KINDS = {"sandbox:python": False, "sandbox:python-all": True}  # name -> whether the reward is all or nothing
_FENCE = re.compile(r"[ \t]*```[ \t]*(\S*)[ \t]*")
_LANGUAGES = ("", "python", "python3", "py")


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
        self.all_or_nothing = all_or_nothing
        self._prison = Prison(limits or Limits())
        self._threads = ThreadPoolExecutor(workers or len(os.sched_getaffinity(0)), thread_name_prefix="sandbox")

    def __call__(
        self, completions: Sequence, tests: Sequence | None = None, log_extra: Any = None, **columns: Any
    ) -> list[float | None]:
        """Judge completions.

        Args:
            completions: What the model wrote, one item a completion.
            tests: The tests of each one's row; None where a row has none.
            log_extra: Gets the verdict of each test: passed, wrong, failed, timeout, output or killed.
            columns: Not read.

        Returns:
            The rewards: 0 where there is no program, None where the row has no tests.

        Raises:
            ValueError: The tests of a row cannot be read.
        """
        rows = [None if listed is None else read_tests(listed) for listed in tests or [None] * len(completions)]
        programs = [program_of(completion_text(completion)) for completion in completions]
        verdicts = list(self._threads.map(self._verdicts, programs, rows))
        if log_extra is not None:
            log_extra(f"{self.__name__}/tests", verdicts)
        return [self._reward(found, row) for found, row in zip(verdicts, rows, strict=True)]

    def close(self) -> None:
        """Wait for the programs that run, and free what the jails needed."""
        self._threads.shutdown(cancel_futures=True)
        self._prison.close()

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
        with contextlib.ExitStack() as jails:
            jail = None
            for test in tests:
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


class Output:
    """A test of what a program prints.

    Args:
        given: What standard input holds.
        expected: What the program must print.
    """

    def __init__(self, given: str, expected: str):
        self.given, self.expected = given.encode("utf-8", "surrogatepass"), _trimmed(expected)

    def verdict(self, jail: Jail) -> str:
        """Run the program.

        Args:
            jail: Where it runs.

        Returns:
            passed, wrong, or failed where it ended with an error.
        """
        out, failed = jail.run(b"i", self.given)
        if failed:
            return "failed"
        return "passed" if _trimmed(out.decode(errors="replace")) == self.expected else "wrong"


class Value:
    """A test of the value of an expression.

    Args:
        expression: Python text.
        expected: Its value, plain data.
    """

    def __init__(self, expression: str, expected: Any):
        self.request, self.expected = b"\n" + expression.encode(), canonical(expected).encode()

    def verdict(self, jail: Jail) -> str:
        """Run the program, then evaluate the expression.

        Args:
            jail: Where it runs.

        Returns:
            passed, wrong, or failed where there is no value or none of plain data.
        """
        out, failed = jail.run(b"a", self.request, wait_ready=True)
        if failed:
            return "failed"
        return "passed" if out == b"r" + self.expected else "wrong"


class Assertion:
    """A test by any Python text, which shares an interpreter with the program.

    Args:
        text: The text, which passes where it raises nothing.
    """

    def __init__(self, text: str):
        self.text = text.encode()

    def verdict(self, jail: Jail) -> str:
        """Run the program, then the text.

        Args:
            jail: Where it runs.

        Returns:
            passed or failed.
        """
        nonce = secrets.token_hex(32).encode()
        out, _ = jail.run(b"a", nonce + b"\n" + self.text, wait_ready=True)
        return "passed" if out == b"r" + nonce else "failed"


def program_of(text: str) -> str | None:
    """Find the program of a completion.

    Args:
        text: What the model wrote.

    Returns:
        What stands in the last block between fences of three backticks that is closed, and named python, py, python3
        or nothing. None where there is no such block.

    Example:
        >>> program_of("Try ```x```:\\n```python\\nprint(1)\\n```")
        'print(1)\\n'
    """
    program, block, language = None, None, ""
    for line in text.split("\n"):
        fence = _FENCE.fullmatch(line.rstrip("\r"))
        if block is None and fence:
            block, language = [], fence[1].lower()
        elif block is not None and fence and not fence[1]:
            program = "".join(f"{each}\n" for each in block) if language in _LANGUAGES else program
            block = None
        elif block is not None:
            block.append(line)
    return program


def read_tests(tests: Any) -> list[Output | Value | Assertion]:
    """Read the column `tests` of a row.

    Args:
        tests: A list of dicts, each with `input` and `output`, or with `assert`. Keys whose value is None count as
            absent, because a data set gives all of its dicts the same keys.

    Returns:
        The tests.

    Raises:
        ValueError: It is no such list, or an assertion is no Python text.
    """
    if not isinstance(tests, (list, tuple)):
        raise ValueError(
            f'the column tests must be a list such as [{{"input": "1", "output": "2"}}], got {shown(tests)}'
        )
    return [_read_test(test) for test in tests]


def _read_test(test):
    given = {key: value for key, value in test.items() if value is not None} if isinstance(test, dict) else {}
    if given.keys() not in ({"input", "output"}, {"output"}, {"assert"}) or not all(
        isinstance(value, str) for value in given.values()
    ):
        raise ValueError(
            "a test in the column tests must have the texts input and output, or the text assert, and nothing else; "
            f"got {shown(test)}"
        )
    if "output" in given:
        return Output(given.get("input", ""), given["output"])
    text = given["assert"]
    try:
        statements = ast.parse(text).body
    except (SyntaxError, ValueError) as error:
        raise ValueError(f"a test in the column tests is no Python text: {error}; got {shown(text)}") from None
    return _comparison(statements) or Assertion(text)


def _comparison(statements):
    """Read `assert EXPRESSION == LITERAL`, either way around; None is any other text."""
    match statements:
        case [ast.Assert(test=ast.Compare(left=left, ops=[ast.Eq()], comparators=[right]))]:
            for expression, literal in ((left, right), (right, left)):
                with contextlib.suppress(ValueError, TypeError):
                    return Value(ast.unparse(expression), ast.literal_eval(literal))
    return None


def _trimmed(text):
    return "\n".join(line.rstrip() for line in text.split("\n")).rstrip()

"""Which program a completion has, and the tests of a row: how they are read, and what each asks of a jail.

{"input": ..., "output": ...} is what standard input holds, and what the program must print: lines are compared without
white space at their ends, and so are the ends of the texts. {"assert": ...} is Python text that runs after the program.

An expected output never enters the jail. Nor does the expected value of an assertion of the form
`assert EXPRESSION == LITERAL` (either way around): the jail tells the expression's value, as plain data, and it is
compared here. Any other assertion shares an interpreter with the program. It has passed where it hands back a nonce
that it got after the program had run, so a program that ends early, or prints whatever it likes, fails. One that reads
the descriptors of its own process for the nonce passes: only what is compared here is beyond a program's reach.
"""

import ast
import contextlib
import secrets
from typing import Any

from fastgrpo.rewards.jail import Jail
from fastgrpo.rewards.jailed import canonical
from fastgrpo.rewards.values import shown

_LANGUAGES = ("", "python", "python3", "py")


class Output:
    """A test of what a program prints."""

    def __init__(self, given: str, expected: str):
        self.given, self.expected = given.encode("utf-8", "surrogatepass"), _trimmed(expected)

    def verdict(self, jail: Jail) -> str:
        """Run the program."""
        out, failed = jail.run(b"i", self.given)
        if failed:
            return "failed"
        return "passed" if _trimmed(out.decode(errors="replace")) == self.expected else "wrong"


class Value:
    """A test of the value of an expression."""

    def __init__(self, expression: str, expected: Any):
        self.request, self.expected = b"\n" + expression.encode(), canonical(expected).encode()

    def verdict(self, jail: Jail) -> str:
        """Run the program, then evaluate the expression."""
        out, failed = jail.run(b"a", self.request, wait_ready=True)
        if failed:
            return "failed"
        return "passed" if out == b"r" + self.expected else "wrong"


class Assertion:
    """A test by any Python text, which shares an interpreter with the program."""

    def __init__(self, text: str):
        self.text = text.encode()

    def verdict(self, jail: Jail) -> str:
        """Run the program, then the text."""
        nonce = secrets.token_hex(32).encode()
        out, _ = jail.run(b"a", nonce + b"\n" + self.text, wait_ready=True)
        return "passed" if out == b"r" + nonce else "failed"


def program_of(text: str) -> str | None:
    """Find the program of a completion.

    Examples:
        >>> program_of("Try ```x```:\\n```python\\nprint(1)\\n```")
        'print(1)\\n'
    """
    program, block, language = None, None, ""
    for line in text.split("\n"):
        words = line.strip(" \t\r")
        named = words[3:].strip()
        fence = words.startswith("```") and not any(map(str.isspace, named))
        if block is None and fence:
            block, language = [], named.lower()
        elif block is not None and fence and not named:
            program = "".join(f"{each}\n" for each in block) if language in _LANGUAGES else program
            block = None
        elif block is not None:
            block.append(line)
    return program


def read_tests(tests: Any) -> list[Output | Value | Assertion]:
    """Read the column `tests` of a row."""
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

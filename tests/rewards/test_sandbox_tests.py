"""Which program a completion has, and which tests a row has."""

import pytest

from fastgrpo.rewards.sandbox import Assertion, Output, Value, program_of, read_tests


@pytest.mark.parametrize(
    "text, program",
    [
        ("```python\nprint(1)\n```", "print(1)\n"),
        ("a\n```\nx\n```\nb\n  ```Python3  \ny\nz\n  ```\nc", "y\nz\n"),
        ("```py\r\nx\r\n```", "x\r\n"),
        ("```python\n```", ""),
        ("```python\nx\n```\n```js\nlet y\n```", "x\n"),  # another language is no program
        ("```python\nx\n```\n```python\ny", "x\n"),  # cut off
        ("```python\ns = '''\n```text\n'''\n```", "s = '''\n```text\n'''\n"),
        ("print(1)", None),
        ("`print(1)` ```print(2)```", None),
        ("```python\nprint(1)", None),
        ("```js\nlet x\n```", None),
        ("", None),
    ],
)
def test_the_last_fenced_block_is_the_program(text, program):
    assert program_of(text) == program


def test_which_tests_are_read():
    kinds = [
        ({"input": "1", "output": "2"}, Output),
        ({"output": "2"}, Output),
        ({"input": "1", "output": "2", "assert": None}, Output),
        ({"input": None, "output": None, "assert": "assert f(1) == [1, {2: (3,)}], 'no'"}, Value),
        ({"assert": "assert -1 == f(1)"}, Value),
        ({"assert": "assert f(1) == g(1)"}, Assertion),
        ({"assert": "assert f(1) is None"}, Assertion),
        ({"assert": "x = f(1)\nassert x == 1"}, Assertion),
        ({"assert": "assert 1 < f(1) == 2"}, Assertion),
    ]
    assert [type(test) for test in read_tests([test for test, _ in kinds])] == [kind for _, kind in kinds]


@pytest.mark.parametrize(
    "tests, told",
    [
        ("[]", "the column tests must be a list such as"),
        ({"input": "1", "output": "2"}, "the column tests must be a list such as"),
        (["assert f(1)"], "got 'assert f"),
        ([{"input": "1"}], "must have the texts input and output, or the text assert"),
        ([{"input": "1", "output": 2}], "must have the texts input and output, or the text assert"),
        ([{"input": "1", "output": "2", "assert": "assert f"}], "and nothing else"),
        ([{"assert": "assert f("}], "no Python text: .* got 'assert f"),
    ],
)
def test_tests_that_cannot_be_read_are_named(tests, told):
    with pytest.raises(ValueError, match=told):
        read_tests(tests)

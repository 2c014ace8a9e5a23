"""The reward of the sandbox: how it runs programs, and what the verdicts of their tests are worth."""

import threading

import pytest
from jails import PATIENT, fenced, judge, needs_namespaces
from samples import answer

from fastgrpo.data.records import Prompt
from fastgrpo.rewards import find_reward
from fastgrpo.rewards.call import Rewards
from fastgrpo.rewards.sandbox import Limits, Sandbox


@pytest.fixture(scope="module")
def sandbox():
    made = Sandbox(limits=PATIENT)
    yield made
    made.close()


def test_names():
    with pytest.raises(ValueError, match="a sandbox is named sandbox:python or sandbox:python-all, got 'sandbox:perl'"):
        find_reward("sandbox:perl")


@needs_namespaces
def test_a_row_whose_tests_cannot_be_read_is_named(sandbox):
    good, bad = [{"output": "1"}], [{"input": "1", "expected": "2"}]
    rows = [Prompt([], f"row {i}", {"tests": tests}) for i, tests in enumerate((good, good, bad))]
    given = [answer(row, [1], fenced("print(1)")) for row in rows]
    with pytest.raises(
        ValueError, match="the row of the prompt 'row 2': a test in the column tests must have"
    ) as error:
        Rewards(sandbox)(given)
    assert "in a call of 3 completions, the first of them on the prompt 'row 0'" in str(error.value)
    with pytest.raises(ValueError, match="the row of completion 1: the column tests must be a list"):
        sandbox([fenced("print(1)")] * 2, tests=[good, "print(1)"])


@needs_namespaces
def test_it_opens_again_after_it_was_closed():
    sandbox = Sandbox(limits=PATIENT)
    for _ in range(2):
        assert judge(sandbox, "print(1)", {"output": "1"}) == (["passed"], 1.0)
        sandbox.close()
        sandbox.close()


@needs_namespaces
def test_the_limit_of_a_completion_is_that_of_all_its_tests():
    sandbox = Sandbox(limits=PATIENT)
    Rewards(sandbox, timeout=2.0)
    endless = {"input": "", "output": "1"}
    assert sandbox.limits.seconds == 2.0
    assert judge(sandbox, "while True: pass", *[endless] * 200) == (["timeout"] * 200, 0.0)  # 400 s one after another
    sandbox.close()


@needs_namespaces
class TestRuns:
    """Programs in jails."""

    def test_output_is_compared_without_white_space_at_ends(self, sandbox):
        program = "import sys\nfor line in sys.stdin: print(line.strip() + '  ')\nprint()"
        tests = [{"input": "a b\nc", "output": "a b\nc"}, {"input": "a", "output": "a \n\n"}]
        wrong = [
            {"input": "a b", "output": "a  b"},
            {"input": "a\nb", "output": "a b"},
            {"input": " a", "output": " a"},
        ]
        assert judge(sandbox, program, *tests, *wrong) == (["passed"] * 2 + ["wrong"] * 3, 0.4)

    def test_text_of_any_kind(self, sandbox):
        program = "# -*- coding: utf-8 -*-\nprint(input() + 'é\u2028\U0001f600')"
        assert judge(sandbox, program, {"input": "ß", "output": "ßé\u2028\U0001f600"}) == (["passed"], 1.0)
        for broken in ("print(1)\0", "\ud800", "def f(:", "(" * 10_000, "'''"):
            assert judge(sandbox, broken, {"output": "1"}) == (["failed"], 0.0)
        long = "x = 0\n" * 200_000 + "print(x)"  # longer than what a command line takes
        assert judge(sandbox, long, {"output": "0"})[0] == ["passed"]

    def test_much_input_and_output(self, sandbox):
        lines = "\n".join(map(str, range(100_000)))
        assert judge(sandbox, "import sys\nprint(sys.stdin.read())", {"input": lines, "output": lines})[1] == 1.0
        assert judge(sandbox, "print(1)", {"input": lines, "output": "1"})[1] == 1.0  # which nobody reads

    def test_a_program_is_a_script_for_outputs_and_a_module_for_assertions(self, sandbox):
        program = "def f(x):\n    return 2 * x\n\nif __name__ == '__main__':\n    print(f(int(input())))"
        tests = [{"input": "2", "output": "4"}, {"assert": "assert f(2) == 4"}, {"assert": "assert f(2) > 3"}]
        assert judge(sandbox, program, *tests) == (["passed"] * 3, 1.0)

    def test_an_error_fails(self, sandbox):
        for program in ("print(1)\n1 / 0", "print(1)\nraise SystemExit(2)", "print(1)\nimport os\nos.abort()"):
            assert judge(sandbox, program, {"output": "1"}) == (["failed"], 0.0)
        assert judge(sandbox, "print(1)\nraise SystemExit", {"output": "1"})[1] == 1.0

    def test_values_are_compared_as_python_does(self, sandbox):
        program = (
            "from collections import Counter, namedtuple\nimport enum\nP = namedtuple('P', 'x y')\n"
            "def f(x): return x\nclass E(enum.IntEnum):\n    A = 3"
        )
        true = [
            "f(1.0) == 1", "f(True) == 1", "f({2, 1}) == {1, 2}", "f(Counter('aa')) == {'a': 2}", "P(1, 2) == (1, 2)",
            "E.A == 3", "f(frozenset()) == set()", "f(b'x') == b'x'", "f('\\u2028') == '\\u2028'",
            "f(0.1 + 0.2) == 0.30000000000000004",
            "f({'b': [1], 'a': None}) == {'a': None, 'b': [1]}", "f(2**70) == 1180591620717411303424",
        ]  # fmt: skip
        false = [
            "f([1]) == (1,)",
            "f('1') == 1",
            "f(float('nan')) == 1",
            "f(object()) == 1",
            "f(0.3) == 0.30000000000000004",
        ]
        tests = [{"assert": f"assert {text}"} for text in true + false]
        verdicts, _ = judge(sandbox, program, *tests)
        assert verdicts[: len(true)] == ["passed"] * len(true) and "passed" not in verdicts[len(true) :]

    def test_rewards(self, sandbox):
        tests = [{"input": str(i), "output": str(i)} for i in range(4)]
        program = "x = int(input())\nprint(x if x < 3 else -1)"
        chat = [{"role": "assistant", "content": fenced("print(input())")}]
        completions = [fenced(program), chat, "no program", fenced(program), fenced(program)]
        rows = [tests, tests, tests, None, []]
        assert sandbox(completions, rows) == [0.75, 1.0, 0.0, None, None]
        assert sandbox(completions) == [None] * 5
        strict = find_reward("sandbox:python-all")
        assert strict(completions, rows) == [0.0, 1.0, 0.0, None, None]
        strict.close()

    def test_programs_run_at_once(self, tmp_path):
        """All jails must be alive before the first program may go on."""
        made = Sandbox(limits=PATIENT, workers=3)
        together = threading.Barrier(3)
        start = made._prison.jail

        def jail(program):
            started = start(program)
            together.wait(PATIENT.seconds)
            return started

        made._prison.jail = jail
        assert made([fenced("print(1)")] * 3, [[{"output": "1"}]] * 3) == [1.0] * 3
        made.close()

    def test_limits_are_ones_own(self):
        small = Sandbox(limits=Limits(seconds=300.0, files=10, disk=2**20, output=100, processes=4, memory=2**28))
        program = (
            "made = 0\ntry:\n    while True:\n        open(f'/tmp/{made}', 'w')\n        made += 1\n"
            "except OSError:\n    print(made)"
        )
        assert judge(small, program, {"output": "10"})[0] == ["passed"]
        assert judge(small, "print('x' * 101)", {"output": "x" * 101})[0] == ["output"]
        assert judge(small, "bytearray(2**28)", {"output": ""})[0] == ["failed"]
        small.close()

    def test_in_the_trainers_rewards(self, sandbox):
        assert Sandbox.pooled is False
        rewards = Rewards([sandbox, find_reward("sandbox:python-all")])
        assert rewards.names == ["sandbox_python", "sandbox_python_all"]
        tests = [{"input": "", "output": "1"}, {"input": "", "output": "2"}]
        judged = rewards([answer(Prompt([1], "?", {"tests": tests}), [3], fenced("print(1)"))])
        assert judged.completions[0].rewards == {"sandbox_python": 0.5, "sandbox_python_all": 0.0}
        assert judged.completions[0].extras["sandbox_python/tests"] == ["passed", "wrong"]
        rewards.functions[1].close()

"""The reward of the sandbox: reading programs and tests, running them, and the reward of their verdicts."""

import collections
import enum
import itertools
import platform
import struct
import threading

import pytest
from jails import PATIENT, fenced, judge, needs_namespaces
from runs import make_trainer
from samples import answer

from fastgrpo.data.records import Prompt
from fastgrpo.rewards import find_reward
from fastgrpo.rewards.call import Rewards
from fastgrpo.rewards.jailed import canonical
from fastgrpo.rewards.sandbox import REFUSED, Assertion, Limits, Output, Sandbox, Value, make_filter, read_tests


@pytest.fixture(scope="module")
def sandbox():
    made = Sandbox(limits=PATIENT)
    yield made
    made.close()


def test_reads_every_kind_of_test():
    outputs = [{"output": "2"}, {"input": "1", "output": "2", "assert": None}]
    values = ["assert f(1) == [1, {2: (3,)}], 'no'", "assert -1 == f(1)"]
    others = ["assert f(1) == g(1)", "assert f(1) is None", "x = f(1)\nassert x == 1", "assert 1 < f(1) == 2"]
    tests = outputs + [{"input": None, "output": None, "assert": text} for text in values + others]
    assert [type(test) for test in read_tests(tests)] == [Output] * 2 + [Value] * 2 + [Assertion] * 4


@pytest.mark.parametrize("tests", [
    "[]", {"input": "1", "output": "2"}, ["assert f(1)"], [{"input": "1"}], [{"input": "1", "output": 2}],
    [{"input": "1", "output": "2", "assert": "assert f"}], [{"assert": "assert f("}],
], ids=str)  # fmt: skip
def test_rejects_unreadable_tests(tests):
    with pytest.raises(ValueError, match="the column tests"):
        read_tests(tests)


def test_rejects_limits_that_are_not_positive_numbers():
    for value in (0, float("nan"), float("inf"), True, "5"):
        with pytest.raises(ValueError, match="the limit memory "):
            Limits(memory=value)


Point = collections.namedtuple("Point", "x y")
Colour = enum.IntEnum("Colour", "RED")
VALUES = [
    None, ..., True, False, 0, 1, 1.0, -1, 0.5, 1e300, 10**300, 2**53, 2**53 + 1, float("inf"), float("-inf"),
    0.1 + 0.2, 0.3, -0.0, 1j, 1 + 0j, "", "1", "a", "'", '"', "a,b", "\u2028", "\ud800", b"", b"a", bytearray(b"a"),
    [], (), set(), frozenset(), {}, [1], (1,), {1}, {1.0}, [1, 2], [2, 1], {1, 2}, {2, 1}, [[1], 2], [[1, 2]],
    ["a", "b"], ["a,b"], ["a', 'b"], {"a": 1, "b": 2}, {"b": 2, "a": 1}, {1: "a"}, {True: "a"}, {(1, 2): [None]},
    Point(1, 2), (1, 2), Colour.RED, collections.Counter("a"), {"a": 1}, collections.OrderedDict(b=2, a=1),
]  # fmt: skip


def test_canonical_text_is_equal_for_equal_values():
    for one, other in itertools.combinations(VALUES, 2):
        assert (canonical(one) == canonical(other)) == (one == other), (one, other)

    class Any(int):
        __eq__ = lambda *_: True  # noqa: E731
        __hash__ = int.__hash__

    class Text(str):
        __str__ = __repr__ = lambda self: "other"

    assert canonical(Any(3)) == canonical(3) and canonical(Text("a")) == canonical("a")
    for value, error in ((object(), TypeError), ([range(3)], TypeError), ([float("nan")], ValueError)):
        with pytest.raises(error):
            canonical(value)


ARCHITECTURES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}  # linux/audit.h
ALLOW, REFUSE, INTEL_32 = 0x7FFF0000, 0x00050001, 0x40000003


def decide(program, number, architecture):
    """What the kernel would do with a call: an interpreter of classic BPF."""
    data, at, value, instructions = {0: number, 4: architecture}, 0, 0, list(struct.iter_unpack("=HBBI", program))
    while True:
        code, yes, no, constant = instructions[at]
        if code == 0x06:
            return constant
        at += 1
        if code == 0x20:
            value = data[constant]
        else:
            at += yes if {0x15: value == constant, 0x35: value >= constant}[code] else no


@pytest.mark.parametrize("column, machine", list(enumerate(ARCHITECTURES)))
def test_the_filter_refuses_the_listed_calls_and_every_call_of_another_table(column, machine):
    program, own = make_filter(machine), ARCHITECTURES[machine]
    found = {number: decide(program, number, own) for number in range(1000)}
    assert found == dict.fromkeys(found, ALLOW) | {pair[column]: REFUSE for pair in REFUSED.values()}
    assert decide(program, 0x40000000, own) == decide(program, 0xFFFFFFFF, own) == REFUSE
    assert {decide(program, 0, other) for other in {*ARCHITECTURES.values(), INTEL_32} - {own}} == {REFUSE}


@needs_namespaces
class TestRuns:
    def test_the_kernel_refuses_each_call_of_the_filter(self, sandbox):
        numbers = [pair[platform.machine() == "aarch64"] for pair in REFUSED.values()]
        numbers += [0x40000000 + numbers[0], 0xFFFFFFFF]  # of x32, the other table of an x86 kernel
        program = (
            f"import ctypes\nlibc = ctypes.CDLL(None, use_errno=True)\nfor number in {numbers}:\n"
            "    print(libc.syscall(number, 0, 0, 0, 0, 0), ctypes.get_errno())"
        )
        assert judge(sandbox, program, {"output": "-1 1\n" * len(numbers)}) == (["passed"], 1.0)

    def test_passes_texts_of_any_kind_and_length(self, sandbox):
        program = "# -*- coding: utf-8 -*-\nprint(input() + 'é\u2028\U0001f600')"
        assert judge(sandbox, program, {"input": "ß", "output": "ßé\u2028\U0001f600"}) == (["passed"], 1.0)
        for broken in ("print(1)\0", "\ud800", "def f(:", "(" * 10_000):
            assert judge(sandbox, broken, {"output": "1"}) == (["failed"], 0.0)
        long = "x = 0\n" * 200_000 + "print(x)"  # longer than what a command line takes
        assert judge(sandbox, long, {"output": "0"})[0] == ["passed"]
        lines = "\n".join(map(str, range(100_000)))
        assert judge(sandbox, "import sys\nprint(sys.stdin.read())", {"input": lines, "output": lines})[1] == 1.0
        assert judge(sandbox, "print(1)", {"input": lines, "output": "1"})[1] == 1.0  # which nobody reads

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

    def test_programs_run_at_once(self):
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

    def test_applies_custom_limits(self):
        small = Sandbox(limits=Limits(seconds=300.0, files=10, disk=2**20, output=100, processes=4, memory=2**28))
        program = (
            "made = 0\ntry:\n    while True:\n        open(f'/tmp/{made}', 'w')\n        made += 1\n"
            "except OSError:\n    print(made)"
        )
        assert judge(small, program, {"output": "10"})[0] == ["passed"]
        assert judge(small, "print('x' * 101)", {"output": "x" * 40})[0] == ["output"]
        assert judge(small, "print('x' * 101)", {"output": "x" * 101})[0] == ["passed"]
        assert judge(small, "bytearray(2**28)", {"output": ""})[0] == ["failed"]
        small.close()

    def test_the_limit_of_a_completion_is_that_of_all_its_tests(self):
        made, endless = Sandbox(limits=PATIENT), {"input": "", "output": "1"}
        made.close()
        made.close()
        assert judge(made, "print(1)", {"output": "1"}) == (["passed"], 1.0)
        for timeout, of_test in ((1000.0, PATIENT.seconds), (None, PATIENT.seconds), (1.0, 1.0)):
            Rewards(made, timeout=timeout)
            assert made.limits.seconds == of_test  # a longer limit of a completion makes no test longer
        assert judge(made, "while True: pass", *[endless] * 200) == (["timeout"] * 200, 0.0)  # not one after another
        made.close()

    def test_works_in_the_trainers_rewards(self, sandbox, tmp_path):
        assert Sandbox.pooled is False
        rewards = Rewards([sandbox, find_reward("sandbox:python-all")])
        assert rewards.names == ["sandbox_python", "sandbox_python_all"]
        good, bad = [{"input": "", "output": "1"}, {"output": "2"}], [{"input": "1", "expected": "2"}]
        judged = rewards([answer(Prompt([1], "?", {"tests": good}), [3], fenced("print(1)"))])
        assert judged.completions[0].rewards == {"sandbox_python": 0.5, "sandbox_python_all": 0.0}
        assert judged.completions[0].extras["sandbox_python/tests"] == ["passed", "wrong"]
        rows = [Prompt([], f"row {i}", {"tests": tests}) for i, tests in enumerate((good, good, bad))]
        with pytest.raises(ValueError, match="the row of the prompt 'row 2': a test in the column tests"):
            rewards([answer(row, [1], fenced("print(1)")) for row in rows])
        rewards.functions[1].close()
        given = [{"prompt": f"row {i}", "tests": tests} for i, tests in enumerate((good, bad))]
        with pytest.raises(ValueError, match="row 1: a test in the column tests"):
            make_trainer(tmp_path, sandbox, given[:1], given).train()
        with pytest.raises(ValueError, match="sandbox:perl"):
            find_reward("sandbox:perl")

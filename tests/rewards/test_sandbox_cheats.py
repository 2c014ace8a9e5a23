"""Programs that would fake success: none of these passes."""

import pytest
from jails import PATIENT, judge, needs_namespaces

from fastgrpo.rewards.sandbox import Sandbox

pytestmark = needs_namespaces
SOLVED = {"assert": "assert f(20) == 6765"}  # compared outside of the jail
SHARED = {"assert": "assert f(20) > 6764"}  # shares an interpreter with the program
PRINTED = {"input": "20", "output": "6765"}

EVERYWHERE = (
    "import os\nfor fd in range(3, 256):\n    for told in (b'r', b'passed', b'r' * 65, b'0' * 64):\n        try:\n"
    "            os.write(fd, told)\n        except OSError:\n            pass\n"
)
CHEATS = {
    "leaves": "import os\nos._exit(0)",
    "leaves politely": "raise SystemExit(0)",
    "leaves when it is called": "import os\ndef f(x): os._exit(0)",
    "leaves politely when it is called": "import sys\ndef f(x): sys.exit(0)",
    "prints": "print('passed')\nprint('OK', 1, True)\ndef f(x): print('passed')",
    "writes everywhere": EVERYWHERE,
    "writes everywhere when it is called": f"def f(x):\n    exec({EVERYWHERE!r})\n    os._exit(0)\nimport os",
    "redefines the error": "import builtins\nclass AssertionError(BaseException): pass\n"
    "builtins.AssertionError = AssertionError\ndef f(x): return 0",
    "no error is an error": "import builtins, sys\nbuiltins.AssertionError = None\nsys.excepthook = print\n"
    "def f(x): return 0",
    "replaces exec": "import builtins\nbuiltins.exec = builtins.eval = builtins.compile = lambda *_: None\n"
    "def f(x): return 0",
    "replaces os": "import os\nwrite = os.write\nos.write = lambda fd, data: write(fd, b'passed')\n"
    "os._exit = lambda code: None\ndef f(x): return 0",
    "leaves at exit": "import atexit, os\natexit.register(os._exit, 0)\ndef f(x): return 0",
    "forks and leaves": "import os\nif os.fork(): os._exit(0)\ndef f(x): return 0",
    "leaves by a thread": "import os, threading\ndef f(x):\n    threading.Thread(target=os._exit, args=(0,)).start()\n"
    "    while True: pass",
    "ends its server": "import os, signal\nos.kill(os.getppid(), signal.SIGKILL)",
    "becomes another program": "import os, sys\nos.execv('/usr/bin/python3', ['python3', '-c', 'print(1)'])",
}


@pytest.fixture(scope="module")
def sandbox():
    made = Sandbox(limits=PATIENT)
    yield made
    made.close()


@pytest.mark.parametrize("name", CHEATS)
def test_a_cheat_does_not_pass(sandbox, name):
    verdicts, reward = judge(sandbox, CHEATS[name], SOLVED, SHARED, PRINTED)
    assert reward == 0.0 and len(verdicts) == 3 and not {"passed", "timeout"} & set(verdicts)


def test_an_honest_program_passes(sandbox):
    program = "def f(n):\n    a, b = 0, 1\n    for _ in range(n): a, b = b, a + b\n    return a\n"
    program += "if __name__ == '__main__': print(f(int(input())))"
    assert judge(sandbox, program, SOLVED, SHARED, PRINTED) == (["passed"] * 3, 1.0)


EQUAL = "class Equal(int):\n    def __eq__(self, other): return True\n    def __hash__(self): return 0\n"


@pytest.mark.parametrize("value", ["Equal(0)", "[Equal(0)]", "type('Any', (), {'__eq__': lambda *_: True})()"])
def test_an_object_that_equals_everything_does_not(sandbox, value):
    program = f"{EQUAL}def f(x): return {value}"
    tests = [SOLVED, {"assert": "assert f(1) == [5]"}, {"assert": "assert 7 == f(1)"}]
    verdicts, reward = judge(sandbox, program, *tests)
    assert reward == 0.0 and "passed" not in verdicts


READS = """
import gc, os, sys
def f(x):
    frame, seen = sys._getframe(), []
    while frame:
        seen.append(repr((frame.f_code.co_consts, frame.f_locals, frame.f_globals)))
        frame = frame.f_back
    seen += [repr(each) for each in gc.get_objects()]
    for name in ("self", "1", str(os.getppid())):
        for part in ("environ", "cmdline"):
            with open(f"/proc/{name}/{part}", "rb") as file:
                seen.append(repr(file.read()))
    with open(f"/proc/{os.getppid()}/maps") as maps, open(f"/proc/{os.getppid()}/mem", "rb") as memory:
        for line in maps:
            first, last = (int(end, 16) for end in line.split()[0].split("-"))
            if " rw" in line:
                memory.seek(first)
                seen.append(memory.read(last - first).decode("latin-1"))
    return WANTED in "".join(seen)
if __name__ == "__main__":
    print(f(0))
"""


def test_expected_outputs_are_nowhere_in_the_jail(sandbox):
    """Looked for in frames, objects, environments, command lines and the memory of the server."""
    program = READS.replace("WANTED", "str(6764 + 1) * 4")  # so that it does not find itself
    secret = "6765" * 4
    tests = [{"input": "1", "output": secret}, {"assert": f"assert f(20) == {secret}"}]
    assert judge(sandbox, program, *tests) == (["wrong"] * 2, 0.0)
    shown = [{"input": "1", "output": "False"}, {"assert": "assert f(20) == False"}]
    assert judge(sandbox, program, tests[0], *shown) == (["wrong", "passed", "passed"], 2 / 3)


def test_an_assertion_is_not_seen_by_another_ones_process(sandbox):
    """The first assertion, which the program may read while it is judged, is kept nowhere for the second one."""
    program = (
        "import os, sys\nos.makedirs('/tmp/kept', exist_ok=True)\n"
        "def f(x):\n    known = os.listdir('/tmp/kept')\n    open(f'/tmp/kept/{x}', 'w').close()\n    return known"
    )
    tests = [{"assert": f"assert len(f({i})) == 0 and True"} for i in range(3)]
    assert judge(sandbox, program, *tests) == (["passed"] * 3, 1.0)

"""A command has a time limit that its children cannot outlive, and its end is told in a line."""

import os
import sys

import pytest

from fastgrpo.kernel_checks.processes import Server, run_limited

ENVIRONMENT = dict(os.environ)


def python(code, seconds=60):
    return run_limited([sys.executable, "-c", code], seconds, ENVIRONMENT)


def test_what_ends_well_has_no_problem():
    ended = python("import sys; print('out'); print('err', file=sys.stderr)")
    assert ended == ("out\n", "err\n", None)


def test_the_problem_is_the_exception():
    assert python("raise KeyError('gone')").problem == "KeyError: 'gone'"
    code = "import sys; print('a.b.CudaError: bad access\\nset THIS for more', file=sys.stderr); sys.exit(3)"
    assert python(code).problem == "a.b.CudaError: bad access"
    assert python("raise SystemExit(3)").problem == "exit code 3"
    compilation = "raise TypeError('at 12:4:\\nunsupported operand')"
    assert python(compilation).problem == "TypeError: at 12:4: unsupported operand"


def test_a_killed_process_names_its_signal():
    assert python("import os; os.abort()").problem == "killed by SIGABRT"


def test_children_end_with_the_command():
    """The child would hold a pipe open for an hour."""
    code = "import subprocess, sys, time; subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(3600)'])"
    assert python(code).problem is None
    assert python(code + "; time.sleep(3600)", seconds=1).problem == "not done after 1 s"


@pytest.fixture
def serve():
    """Servers that run code with their input as `lines`."""
    started = []

    def start(code):
        started.append(Server([sys.executable, "-uc", f"import os, sys, time; lines = sys.stdin\n{code}"], ENVIRONMENT))
        return started[-1]

    yield start
    for server in started:
        server.close()


def test_answers_among_noise(serve):
    """Lines before and after an answer that are no JSON object, and the ends of other ones, are passed over."""
    server = serve("for line in lines: print(f'NCCL INFO\\n3\\n{{not}}\\n{{\"x\": {line.strip()}}}\\nbye')")
    assert [server.ask(str(i), 60) for i in (4, 5)] == [{"x": 4}, {"x": 5}]


@pytest.mark.parametrize(
    ("code", "problem"),
    (
        ("pass", "it ended without a result"),
        ("next(lines); print('no result')", "it ended without a result"),
        ("next(lines); raise KeyError('gone')", "KeyError: 'gone'"),
        ("next(lines); os.abort()", "killed by SIGABRT"),
        ("sys.exit(3)", "exit code 3"),
    ),
)
def test_what_gives_no_answer_has_a_problem(serve, code, problem):
    assert serve(code).ask("4", 60) == {"problem": problem}


def test_an_answer_has_a_time_limit(serve):
    """Also where the process has closed its output and stays."""
    assert serve("time.sleep(3600)").ask("4", 1) == {"problem": "not done after 1 s"}
    assert serve("os.close(1); time.sleep(3600)").ask("4", 1) == {"problem": "not done after 1 s"}

"""A command has a time limit that its children cannot outlive, and its end is told in a line."""

import os
import sys

from fastgrpo.check.processes import run_limited

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

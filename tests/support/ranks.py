"""Processes that torchrun or accelerate starts, each a rank, with a limit on their time and an end in any case."""

import os
import signal
import subprocess
import sys
import tempfile
from contextlib import contextmanager, suppress
from pathlib import Path

from paths import ROOT

LIMIT = 60.0  # seconds
STANDALONE = ("--standalone",)  # torchrun finds a free port by itself
# Variables of a launcher that runs the tests themselves must not reach the ranks.
_LAUNCHER = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")


class Job:
    """What a launcher started, and what its ranks said.

    Attributes:
        process: The launcher, which leads a session of its own.
        folder: Holds the output of each rank.
    """

    def __init__(self, command, folder, environment):
        self.folder = Path(folder)
        with open(self.folder / "launcher", "w", encoding="utf-8") as out:
            self.process = subprocess.Popen(
                command,
                cwd=ROOT,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def wait(self, limit=LIMIT):
        """Wait for the launcher's end, and return its exit code."""
        try:
            return self.process.wait(limit)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"not ended after {limit} s:\n{self.told()}") from None

    def launcher(self):
        """What the launcher wrote."""
        return (self.folder / "launcher").read_text(encoding="utf-8")

    def rank(self, number, attempt=0):
        """What one rank wrote, stdout before stderr."""
        parts = sorted(self.folder.glob(f"*/attempt_{attempt}/{number}/std*.log"), reverse=True)
        return "".join(path.read_text(encoding="utf-8") for path in parts)

    def told(self):
        """What all wrote, for the message of a failing test."""
        parts = [f"--- launcher\n{self.launcher()}"]
        for path in sorted(self.folder.glob("*/attempt_*/*/std*.log")):
            parts.append(f"--- {path.relative_to(self.folder)}\n{path.read_text(encoding='utf-8')}")
        return "\n".join(parts)

    def descendants(self):
        """The processes that the launcher started and that are alive: torchrun gives each a session of its own."""
        parents = {}
        for stat in Path("/proc").glob("[0-9]*/stat"):
            try:
                after = stat.read_text().rpartition(")")[2].split()
            except OSError:
                continue  # it has ended meanwhile
            if after[0] != "Z":
                parents[int(stat.parent.name)] = int(after[1])
        found, new = set(), {self.process.pid}
        while new:
            found |= new
            new = {child for child, parent in parents.items() if parent in new} - found
        return found - {self.process.pid}

    def kill(self):
        """End the launcher and all that it started."""
        started = self.descendants()  # while their parent is there
        for pid in {self.process.pid, *started}:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.process.wait()


@contextmanager
def start(command, *, count=2, launcher=STANDALONE, **environment):
    """Start ranks by torchrun.

    Args:
        command: What each rank runs: the path of a script, or -m and a module, and arguments.
        count: How many ranks one launcher starts.
        launcher: Options of torchrun.
        environment: Variables of the ranks, beside those of this process.

    Yields:
        The job. Whatever happens, nothing that it started lives on.
    """
    with tempfile.TemporaryDirectory() as folder:
        arguments = [*launcher, "--nproc_per_node", str(count), "--log_dir", folder, "--redirects", "3"]
        run = [sys.executable, "-m", "torch.distributed.run", *arguments, *map(str, command)]
        with started(run, folder, **environment) as job:
            yield job


@contextmanager
def started(command, folder, **environment):
    """Start a launcher.

    Args:
        command: The launcher and its arguments.
        folder: Where output is collected.
        environment: Variables of the ranks, beside those of this process.

    Yields:
        The job. Whatever happens, nothing that it started lives on.
    """
    kept = {name: value for name, value in os.environ.items() if name not in _LAUNCHER}
    path = os.pathsep.join([str(ROOT), str(ROOT / "tests" / "support")])
    job = Job(command, folder, {**kept, "OMP_NUM_THREADS": "1", "PYTHONPATH": path, **environment})
    try:
        yield job
    finally:
        job.kill()

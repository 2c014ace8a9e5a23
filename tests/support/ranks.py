"""Processes that are ranks: started by torchrun or accelerate, or forked, with a limit on their time and a sure end."""

import atexit
import json
import multiprocessing
import os
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil
from paths import ROOT

LIMIT = 60.0  # seconds that a case may take
START = 120.0  # seconds that processes may take to import what they need, on a busy machine
HANGING = {}  # the ranks of a case that never end
# Variables of a launcher that runs the tests themselves must not reach the ranks.
_LAUNCHER = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")


class Job:
    """A launcher and the output of its ranks. Its processes, of many sessions, are known by an inherited variable."""

    def __init__(self, command, folder, environment):
        self.folder, self.mark = Path(folder), f"JOB_{uuid.uuid4().hex}"
        with open(self.folder / "launcher", "w", encoding="utf-8") as out:
            self.process = subprocess.Popen(
                command, cwd=ROOT, env=environment | {self.mark: "1"}, stdin=subprocess.DEVNULL, stdout=out,
                stderr=subprocess.STDOUT, start_new_session=True,
            )  # fmt: skip

    def wait(self, limit=START + LIMIT):
        try:
            return self.process.wait(limit)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"not ended after {limit} s:\n{self.told()}") from None

    def launcher(self):
        return (self.folder / "launcher").read_text(encoding="utf-8")

    def rank(self, number, attempt=0):
        parts = sorted(self.folder.glob(f"*/attempt_{attempt}/{number}/std*.log"), reverse=True)
        return "".join(path.read_text(encoding="utf-8") for path in parts)

    def told(self):
        """What all wrote, for the message of a failing test."""
        paths = sorted(self.folder.glob("*/attempt_*/*/std*.log"))
        texts = [f"--- {path.relative_to(self.folder)}\n{path.read_text(encoding='utf-8')}" for path in paths]
        return "\n".join([f"--- launcher\n{self.launcher()}", *texts])

    def alive(self):
        """The processes of this job that live, the launcher among them."""
        return {each.pid for each in psutil.process_iter(["environ"]) if self.mark in (each.info["environ"] or ())}

    def kill(self):
        """End the launcher and all that it started, also where the launcher has ended before."""
        while living := self.alive():
            for pid in living:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.02)
        self.process.wait()


@contextmanager
def start(command, *, count=2, launcher=("--standalone",), **environment):
    """Start ranks by torchrun: each runs a script, or -m and a module. Yields the job, of which nothing lives on."""
    with tempfile.TemporaryDirectory() as folder:
        arguments = [*launcher, "--nproc_per_node", str(count), "--log_dir", folder, "--redirects", "3"]
        run = [sys.executable, "-m", "torch.distributed.run", *arguments, *map(str, command)]
        with started(run, folder, **environment) as job:
            yield job


@contextmanager
def started(command, folder, **environment):
    """Start a launcher whose output goes to a folder. Yields the job, of which nothing lives on."""
    kept = {name: value for name, value in os.environ.items() if name not in _LAUNCHER}
    path = [str(ROOT), str(ROOT / "tests" / "support"), *filter(None, [os.environ.get("PYTHONPATH")])]
    job = Job(command, folder, {**kept, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(path), **environment})
    try:
        yield job
    finally:
        job.kill()


def fork(cases, folder, count=3, at_once=4, limit=LIMIT):
    """Fork ranks for each of several cases, from a process that has imported what they need.

    `cases` has what each rank of a case does, by the case's name. A rank's output goes to CASE/RANK in the folder, and
    the exit codes of all to codes.json: None for ranks that had to be killed after `limit` seconds. When a rank fails,
    nothing ends the others, as torchrun would: they must end by themselves.
    """
    forking, folder, codes = multiprocessing.get_context("fork"), Path(folder), {}
    reading, writing = forking.Pipe(duplex=False)
    keeper = forking.Process(target=_keep_stores, args=(len(cases), writing), daemon=True)
    keeper.start()
    waiting = list(zip(cases.items(), reading.recv(), strict=True))
    while waiting:
        running = {}
        for (case, body), port in waiting[:at_once]:
            (folder / case).mkdir()
            for rank in range(count):
                arguments = body, folder / case / str(rank), rank, count, port
                running[case, rank] = forking.Process(target=_be_rank, args=arguments)
                running[case, rank].start()
        del waiting[:at_once]
        end = time.monotonic() + limit
        for (case, rank), process in running.items():
            if rank not in HANGING.get(case, ()):
                process.join(max(0, end - time.monotonic()))
        for (case, rank), process in running.items():
            codes.setdefault(case, {})[rank] = process.exitcode
            process.kill()
    keeper.kill()
    (folder / "codes.json").write_text(json.dumps(codes))


def _keep_stores(count, ports):
    """Keep stores, as torchrun does, and send their ports."""
    import torch.distributed as dist

    stores = [dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False) for _ in range(count)]
    ports.send([store.port for store in stores])
    signal.pause()


def _be_rank(body, path, rank, count, port):
    """Run one rank of a case, as a launcher would start it, and end the process."""
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(count), "LOCAL_RANK": str(rank)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "TORCHELASTIC_USE_AGENT_STORE": "True"}
    out = os.open(path, os.O_CREAT | os.O_WRONLY | os.O_APPEND)
    os.dup2(out, 1), os.dup2(out, 2)
    try:
        code = body()
    except Exception as error:
        sys.excepthook(type(error), error, error.__traceback__)
        code = 1
    finally:
        atexit._run_exitfuncs()
    sys.exit(code)


def forked(script, folder, *argv, limit=30 * LIMIT):
    """Run a script that calls `fork` with an empty folder; a relative path is one in tests/support.

    Returns a function from the name of a case to the exit codes and the outputs of its ranks.
    """
    command = [sys.executable, str(ROOT / "tests" / "support" / script), *map(str, (folder, *argv))]
    with started(command, folder) as job:
        job.wait(limit)
        assert (folder / "codes.json").exists(), job.launcher()
    codes = json.loads((folder / "codes.json").read_text())

    def ended(case):
        paths = sorted((folder / case).iterdir())
        return [codes[case].get(path.name) for path in paths], [path.read_text() for path in paths]

    return ended

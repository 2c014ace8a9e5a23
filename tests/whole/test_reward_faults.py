"""Runs whose rewards fail, hang, die and lose their server end as runs without faults do, and leave no process."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import faulty_rewards
import psutil
import pytest
from paths import ROOT
from runs import make_trainer
from transformers import TrainerCallback

from fastgrpo.tasks.arithmetic import correctness

pytestmark = pytest.mark.usefixtures("without_curves")

STEPS, CLOSE = 500, 0.03
PATHS = os.pathsep.join([str(ROOT), str(ROOT / "tests" / "support")])
ENVIRONMENT = os.environ | {"PYTHONPATH": PATHS, "OMP_NUM_THREADS": "1"}


def start(folder, *flags):
    """Start a run of the embedded task in a session of its own, by which its processes are known."""
    command = [sys.executable, "-m", "fastgrpo.train", "--output_dir", str(folder), "--disable_tqdm", "True", *flags]
    with open(folder.with_suffix(".txt"), "w") as output:
        return subprocess.Popen(command, cwd=ROOT, env=ENVIRONMENT, stdout=output, stderr=output)


def lines(folder):
    path = folder / "metrics.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def ended(run, folder, seen):
    """Wait for the end of a run, and check that it ended well and left nothing behind."""
    assert run.wait() == 0, folder.with_suffix(".txt").read_text()[-3000:]
    _, left = psutil.wait_procs(seen, timeout=60)
    assert not [process for process in left if process.is_running() and process.status() != psutil.STATUS_ZOMBIE]
    return lines(folder)


def descendants(pid):
    try:
        return set(psutil.Process(pid).children(recursive=True))
    except psutil.NoSuchProcess:
        return set()


def workers(pid):
    """The processes that judge: the run's guard, which runs no worker, is not one."""
    found = []
    for process in descendants(pid):
        try:
            found += [process] * ("pool._serve" in " ".join(process.cmdline()))
        except psutil.NoSuchProcess:
            continue
    return found


class Judge(BaseHTTPRequestHandler):
    """Judges as the embedded task does: prompts, completions and columns in, {"rewards": [...]} out."""

    def do_POST(self):
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        rewards = correctness(asked["prompts"], asked["completions"], asked["answer"])
        body = json.dumps({"rewards": rewards}).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_):
        """Say nothing."""


class Server:
    """An HTTP scorer that can be restarted on its port."""

    def __init__(self):
        self.port = 0
        self.start()

    def start(self):
        """Serve, on the same port as before."""
        self.server = ThreadingHTTPServer(("127.0.0.1", self.port), Judge)
        self.port = self.server.server_port
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def restart(self):
        """Refuse connections for a second, and serve again."""
        self.stop()
        time.sleep(1)
        self.start()

    def stop(self):
        """Refuse connections."""
        self.server.shutdown()
        self.server.server_close()


class Killer(TrainerCallback):
    """Kills two workers, after step 5 and later."""

    killed = 0

    def on_step_end(self, args, state, control, **_):
        """Kill a worker, where one is up: a fault of a reward may have ended them just now."""
        if state.global_step >= 5 * (self.killed + 1) and self.killed < 2 and (found := workers(os.getpid())):
            found[0].kill()
            self.killed += 1


def test_twenty_steps_with_faults_end_and_leave_no_process(tmp_path):
    before, killer = descendants(os.getpid()), Killer()
    trainer = make_trainer(
        tmp_path, faulty_rewards.length, max_steps=20, prompts_per_step=2, callbacks=[killer],
        reward_errors="skip", reward_timeout=2, reward_workers=2,
    )  # fmt: skip
    trainer.train()
    found = lines(tmp_path / "run")
    assert not descendants(os.getpid()) - before and killer.killed == 2 and found[-1]["step"] == 20
    for kind in ("errors", "timeouts"):
        assert sum(line.get(f"rewards/length/{kind}", 0) for line in found) > 0, kind


def accuracy(folder):
    """Measure the last checkpoint of a run on held-out problems, with rewards that have no faults."""
    command = [sys.executable, "-m", "fastgrpo.evaluate", str(folder / f"checkpoint-{STEPS}"), "--output"]
    command += [str(folder.with_suffix(".jsonl")), "--reward_funcs", "correctness", "--device", "cpu"]
    subprocess.run(command, cwd=ROOT, env=ENVIRONMENT, check=True, capture_output=True)
    rows = [json.loads(line) for line in folder.with_suffix(".jsonl").read_text().splitlines()]
    return sum(row["rewards"]["correctness"] for row in rows) / len(rows)


@pytest.mark.slow
def test_500_steps_with_faults_learn_as_much_as_without(tmp_path):
    """About half an hour. A reward of two parts, one of which fails, hangs and dies, and one that is on a server."""
    size = ("--max_steps", str(STEPS), "--eval_steps", str(STEPS), "--eval_on_start", "False", "--seed", "45")
    plain, folder = tmp_path / "plain", tmp_path / "faulty"
    ended(start(plain, *size, "--reward_funcs", "correctness"), plain, ())
    server, seen, killed, restarts = Server(), set(), 0, 0
    url = f"http://127.0.0.1:{server.port}/judge"
    rewards = ("--reward_funcs", "faulty_rewards:correctness", url, "--reward_weights", "0.5", "0.5")
    # What hangs sleeps, so there may be more workers than cores.
    run = start(folder, *size, "--reward_errors", "skip", "--reward_workers", "4", "--reward_timeout", "0.25", *rewards)
    try:
        while run.poll() is None:
            seen |= descendants(run.pid)
            done = len(lines(folder))
            if done > 50 * (killed + 1) and (found := workers(run.pid)):
                found[0].send_signal(signal.SIGKILL)
                killed += 1
            if restarts < 2 and done > 150 * (restarts + 1):
                server.restart()
                restarts += 1
            time.sleep(0.2)
    finally:
        server.stop()
    found = ended(run, folder, seen)
    assert restarts == 2 and killed > 2
    name = "rewards/correctness"
    for kind in ("errors", "timeouts"):
        share = sum(line.get(f"{name}/{kind}", 0) for line in found) / (STEPS * 32 * 8)
        assert share > 0.03, kind
    faulty, exact = accuracy(folder), accuracy(plain)
    print(f"accuracy {exact:.3f} without faults, {faulty:.3f} with them; {killed} workers were killed by hand")
    assert abs(faulty - exact) <= CLOSE

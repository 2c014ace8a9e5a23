"""500 steps of the embedded example while rewards fail and the run is stopped again and again (slow): `make soak`."""

import json
import os
import random
import signal
import statistics
import subprocess
import sys
import time
from pathlib import Path

import pytest
from paths import ROOT

STEPS = 500
STOPS = (70, 140, 210)  # steps around which SIGTERM comes; the last life is the longest, and memory is measured in it
WARM = 60  # steps of the last life before memory counts: allocators fill their pools
WINDOW = 80  # steps in each of the two windows that are compared
FLAT = 0.02
# glibc's first thresholds, held: they would grow with what is freed, and unused memory would stay resident for a while.
ALLOCATOR = {"MALLOC_MMAP_THRESHOLD_": str(128 * 1024), "MALLOC_TRIM_THRESHOLD_": str(128 * 1024)}
REWARD = """
import random

from fastgrpo.tasks import arithmetic


def correctness(prompts, completions, answer, **columns):
    if random.random() < 0.03:
        raise ConnectionError("the judge does not answer")
    rewards = arithmetic.correctness(prompts, completions, answer)
    return [float("nan") if random.random() < 0.02 else reward for reward in rewards]
"""


def start(folder):
    flags = {
        "reward_funcs": "flaky_judge:correctness", "reward_errors": "skip", "output_dir": folder / "run",
        "max_steps": STEPS, "save_steps": 10, "save_total_limit": 2, "metric_for_best_model": "eval/accuracy",
        "eval_steps": 10, "max_eval_samples": 100, "seed": 0, "device": "cpu", "resume_from_checkpoint": "auto",
    }  # fmt: skip
    arguments = [str(part) for name, value in flags.items() for part in (f"--{name}", value)]
    environment = {**os.environ, **ALLOCATOR, "PYTHONPATH": f"{ROOT}:{folder}", "TQDM_DISABLE": "1"}
    return subprocess.Popen(
        [sys.executable, "-m", "fastgrpo.train", *arguments], env=environment, cwd=folder,
        stdout=open(folder / "said.txt", "a"), stderr=subprocess.STDOUT,
    )  # fmt: skip


def resident(process):
    """MiB in memory, or None where the process has ended."""
    try:
        pages = int(Path(f"/proc/{process.pid}/statm").read_text().split()[1])
    except (FileNotFoundError, IndexError):
        return None
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20 or None


def rows(folder):
    """The whole rows of metrics.jsonl so far."""
    path = folder / "run" / "metrics.jsonl"
    lines = path.read_text().split("\n")[:-1] if path.exists() else []
    return [json.loads(line) for line in lines]


def live(folder, stop_at=None):
    """One life of the run. Returns its exit code and [(step, MiB)], looked at twice a second."""
    process, seen, sent = start(folder), [], False
    while process.poll() is None:
        time.sleep(0.5)
        written, memory = rows(folder), resident(process)
        step = written[-1]["step"] if written else 0
        if memory is not None:
            seen.append((step, memory))
        if stop_at is not None and not sent and step >= stop_at:
            process.send_signal(signal.SIGTERM)
            sent = True
    return process.returncode, seen


@pytest.mark.slow
def test_the_soak(tmp_path):
    (tmp_path / "flaky_judge.py").write_text(REWARD)
    rng, started, codes, lives = random.Random(0), time.perf_counter(), [], []
    for stop_at in (*(step + rng.randrange(-9, 10) for step in STOPS), None):
        code, seen = live(tmp_path, stop_at)
        codes.append(code)
        lives.append(seen)
    assert codes == [143] * len(STOPS) + [0], (tmp_path / "said.txt").read_text()[-2000:]

    written = rows(tmp_path)
    steps = [row["step"] for row in written if "step_time" in row]
    evaluations = [row["step"] for row in written if "eval/accuracy" in row]
    samples = [json.loads(line)["step"] for line in (tmp_path / "run" / "samples.jsonl").read_text().splitlines()]
    failed = sum(row.get("rewards/correctness/errors", 0) for row in written)
    begin = next(step for step, _ in lives[-1] if step > STOPS[-1] + 10)
    early = [memory for step, memory in lives[-1] if begin + WARM <= step < begin + WARM + WINDOW]
    late = [memory for step, memory in lives[-1] if STEPS - WINDOW < step < STEPS]
    growth = statistics.median(late) / statistics.median(early) - 1
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    memory = f"{statistics.median(early):.1f} MiB early, {statistics.median(late):.1f} MiB late in the last life"
    print(f"\n{failed} of {len(samples)} rewards failed; {memory}; {time.perf_counter() - started:.0f} s")
    (tmp_path / "memory.json").write_text(json.dumps(lives))

    assert steps == list(range(1, STEPS + 1))
    assert evaluations == list(range(0, STEPS + 1, 10))
    assert samples == [step for step in range(1, STEPS + 1) for _ in range(256)]
    tokens = [row["num_tokens"] for row in written if "num_tokens" in row]
    assert tokens == sorted(set(tokens))
    assert failed > 0.01 * len(samples)
    assert summary["accuracy_after"] > summary["accuracy_before"]
    assert len(list((tmp_path / "run").glob("checkpoint-*"))) == 2
    assert growth < FLAT

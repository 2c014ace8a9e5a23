"""500 steps of the built-in example while rewards fail and the run is stopped again and again: `make soak`."""

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
from runs import lines

from fastgrpo.trainer.collect import KEPT_SAMPLES

STEPS = 500
STOPS = (30, 60, 90)  # steps around which SIGTERM comes; the last life is the longest, and memory is measured in it
# Steps before memory counts, which libraries need to cache every shape; steps of each window; growth between the two.
WARM, WINDOW, FLAT = 250, 60, 0.02
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


def live(folder, stop_at):
    """One life of the run: its exit code, and [(step, MiB in memory)], looked at twice a second."""
    flags = {
        "reward_funcs": "flaky_judge:correctness", "reward_errors": "skip", "output_dir": folder / "run",
        "max_steps": STEPS, "save_steps": 10, "save_total_limit": 2, "metric_for_best_model": "eval/accuracy",
        "eval_steps": 10, "max_eval_samples": 100, "seed": 0, "device": "cpu", "resume_from_checkpoint": "auto",
    }  # fmt: skip
    arguments = [str(part) for name, value in flags.items() for part in (f"--{name}", value)]
    environment = {**os.environ, **ALLOCATOR, "PYTHONPATH": f"{ROOT}:{folder}", "TQDM_DISABLE": "1"}
    seen, metrics, step = [], folder / "run" / "metrics.jsonl", 0
    with open(folder / "said.txt", "a") as said:
        command = [sys.executable, "-m", "fastgrpo.train", *arguments]
        process = subprocess.Popen(command, env=environment, stdout=said, stderr=said)
    while process.poll() is None:
        time.sleep(0.5)
        if metrics.exists() and (rows := metrics.read_text().split("\n")[:-1]):
            step = json.loads(rows[-1])["step"]
        statm = Path(f"/proc/{process.pid}/statm")
        pages = statm.read_text().split()[1:2] if statm.exists() else ()
        seen += [(step, int(page) * os.sysconf("SC_PAGE_SIZE") / 2**20) for page in pages if int(page)]
        if stop_at is not None and step >= stop_at:
            process.send_signal(signal.SIGTERM)
            stop_at = None
    return process.returncode, seen


@pytest.mark.slow
def test_a_long_run_leaks_nothing(tmp_path):
    (tmp_path / "flaky_judge.py").write_text(REWARD)
    rng, codes = random.Random(0), []
    for stop_at in (*(step + rng.randrange(-9, 10) for step in STOPS), None):
        code, seen = live(tmp_path, stop_at)
        codes.append(code)
    assert codes == [143] * len(STOPS) + [0], (tmp_path / "said.txt").read_text()[-2000:]
    written = lines(tmp_path / "run")
    samples = [row["step"] for row in lines(tmp_path / "run", "samples.jsonl")]
    assert [row["step"] for row in written if "step_time" in row] == list(range(1, STEPS + 1))
    assert [row["step"] for row in written if "eval/accuracy" in row] == list(range(0, STEPS + 1, 10))
    assert samples == [step for step in range(1, STEPS + 1) for _ in range(KEPT_SAMPLES)]
    tokens = [row["num_tokens"] for row in written if "num_tokens" in row]
    assert tokens == sorted(set(tokens))
    assert sum(row.get("rewards/correctness/errors", 0) for row in written) > 0.01 * 256 * STEPS
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["accuracy_after"] > summary["accuracy_before"]
    assert len(list((tmp_path / "run").glob("checkpoint-*"))) == 2
    begin = next(step for step, _ in seen if step > STOPS[-1] + 10)
    early = statistics.median(memory for step, memory in seen if begin + WARM <= step < begin + WARM + WINDOW)
    late = statistics.median(memory for step, memory in seen if STEPS - WINDOW < step < STEPS)
    print(f"\n{early:.1f} MiB early, {late:.1f} MiB late in the last life")
    assert late / early - 1 < FLAT

"""Training steps on a CPU whose cores are shared with another process, by how the threads of torch wait for each other.

Between two parallel loops the threads of OpenMP spin or sleep. The variants, each in a process of its own:

    fastgrpo             as torch runs by itself: idle threads spin for a while
    fastgrpo, sleeping   idle threads sleep at once (OMP_WAIT_POLICY=passive)
    fastgrpo, 1 thread   one thread has nobody to wait for

Each takes its turns on cores that nothing else uses (`quiet`) and beside a process that computes without a pause on one
thread (`beside another process`), which is stopped in between. A step is that of bench_step.py, and, where
FASTGRPO_SMOLLM2 names a folder that `python -m fastgrpo.recipes.smollm2 FOLDER` has made, that of bench_pretrained.py.

    pytest benchmarks/bench_busy.py --benchmark-only

Results are added to results/cpu.jsonl. With FASTGRPO_BENCH_SMALL=1 there are two rounds, and nothing is written.
"""

import contextlib
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest
from pytest_benchmark.fixture import BenchmarkFixture

from benchmarks import bench_pretrained, bench_step
from benchmarks.compare import in_turns, rows_of
from benchmarks.contestants import Contestant, taking_part
from benchmarks.harness import CUDA, SMALL, at_least, finish

VARIANTS = {
    "fastgrpo": {},
    "fastgrpo, sleeping": {"OMP_WAIT_POLICY": "passive"},
    "fastgrpo, 1 thread": {"OMP_NUM_THREADS": "1"},
}
CASES = ("quiet", "beside another process")
LEAST = {"quiet": 0.95, "beside another process": 1.0}  # of the speed with spinning threads: what a default would need
# It ends by itself where the benchmark was killed.
OTHER = """import os, torch
torch.set_num_threads(1)
a, parent = torch.randn(512, 512), os.getppid()
while os.getppid() == parent:
    a @ a
"""


@contextlib.contextmanager
def another_process() -> Iterator[Callable[[bool], None]]:
    """Start a process that computes on one thread, stopped at first.

    Yields:
        A function that lets it go on (True) or stops it (False).
    """
    process = subprocess.Popen([sys.executable, "-c", OTHER])
    process.send_signal(signal.SIGSTOP)
    try:
        yield lambda runs: process.send_signal(signal.SIGCONT if runs else signal.SIGSTOP)
    finally:
        process.kill()
        process.wait()


def seconds_beside(contestant: Contestant, other: Callable[[bool], None]) -> float:
    """Take a step while the other process runs, and return its seconds.

    Args:
        contestant: The one whose turn it is.
        other: What `another_process` yields.
    """
    other(True)
    try:
        return contestant.seconds("fastgrpo")
    finally:
        other(False)


def contestants_of(model: str, folder: Path) -> dict[str, Contestant]:
    """Return the trainers by variant, each of which will be in a process of its own.

    Args:
        model: "0.8m" or "SmolLM2-135M".
        folder: Where they may write.
    """
    if model == "0.8m":
        bench_step.save_model(folder / "model", model)
        entry, options = "benchmarks.bench_step:our_entry", {"path": str(folder / "model"), "size": model}
    else:
        entry, options = "benchmarks.bench_pretrained:our_entry", {"path": bench_pretrained.MODEL, "beta": 0.0}
    return {
        name: Contestant(name, entry, "cpu", environment, folder=str(folder / name.replace(", ", "-")), **options)
        for name, environment in VARIANTS.items()
    }


@pytest.mark.skipif(CUDA, reason="the threads of a CPU are measured")
@pytest.mark.parametrize("model", ["0.8m"] + ["SmolLM2-135M"] * bool(bench_pretrained.MODEL and not SMALL))
def test_busy(benchmark: BenchmarkFixture, capsys: pytest.CaptureFixture[str], tmp_path: Path, model: str) -> None:
    rounds = 2 if SMALL else 15 if model == "0.8m" else 3
    contestants = contestants_of(model, tmp_path)
    with taking_part(list(contestants.values())), another_process() as other:
        clocks = {}
        for name, contestant in contestants.items():
            contestant.entry()
            contestant.seconds("fastgrpo")  # the warm-up
            clocks[CASES[0], name] = partial(contestant.seconds, "fastgrpo")
            clocks[CASES[1], name] = partial(seconds_beside, contestant, other)
        results = in_turns(clocks, dict.fromkeys(clocks), rounds)
        rows, bars = [], {}
        for case in CASES:
            found = {name: results[case, name] for name in VARIANTS}
            seconds = {name: result["median_s"] for name, result in found.items()}
            extras = {"fastgrpo, 1 thread": {"threads": 1}}
            rows += rows_of(found, None, extras, benchmark="busy", model=model, case=case, dtype="float32")
            ratio = seconds["fastgrpo"] / seconds["fastgrpo, sleeping"]
            bars[f"{model}: sleeping threads, times the speed of spinning ones, {case}"] = at_least(ratio, LEAST[case])
        finish(benchmark, capsys, rows, bars, clocks[CASES[0], "fastgrpo"], 1)

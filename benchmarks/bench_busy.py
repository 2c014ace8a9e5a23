"""Training steps on a CPU shared with another process, for different wait policies of torch's threads.

Between two parallel loops, OpenMP threads spin or sleep. The variants, each in its own process:

    fastgrpo             the default: idle threads spin for a while
    fastgrpo, sleeping   idle threads sleep immediately (OMP_WAIT_POLICY=passive)
    fastgrpo, 1 thread   one thread, which never waits

Each is timed on idle cores (`quiet`) and beside a process that computes continuously on one thread (`beside another
process`), which is otherwise stopped. A step is that of bench_step.py and, if FASTGRPO_SMOLLM2 names a folder made by
`python -m fastgrpo.recipes.smollm2 FOLDER`, also that of bench_pretrained.py.

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
LEAST = {"quiet": 0.95, "beside another process": 1.0}  # speed relative to spinning threads, to become the default
# It exits if the benchmark is killed.
OTHER = """import os, torch
torch.set_num_threads(1)
a, parent = torch.randn(512, 512), os.getppid()
while os.getppid() == parent:
    a @ a
"""


@contextlib.contextmanager
def another_process() -> Iterator[Callable[[bool], None]]:
    """Start a process that computes on one thread, initially stopped. Yield a function that continues or stops it."""
    process = subprocess.Popen([sys.executable, "-c", OTHER])
    process.send_signal(signal.SIGSTOP)
    try:
        yield lambda runs: process.send_signal(signal.SIGCONT if runs else signal.SIGSTOP)
    finally:
        process.kill()
        process.wait()


def seconds_beside(contestant: Contestant, other: Callable[[bool], None]) -> float:
    """Run a step while the other process runs, and return its seconds."""
    other(True)
    try:
        return contestant.seconds("fastgrpo")
    finally:
        other(False)


def contestants_of(model: str, folder: Path) -> dict[str, Contestant]:
    """Return the trainers by variant, for the model "0.8m" or "SmolLM2-135M"."""
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

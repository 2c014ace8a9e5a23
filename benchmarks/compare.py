"""Times variants in turns, measures their peak memory, and saves the results.

A variant is a function without arguments that does the work once. Every benchmark passes its variants to `compare`,
converts the results to rows with `rows_of`, and adds the rows to results/ with `append` (see harness.py).
"""

import json
import os
import platform
import re
import subprocess
import time
from collections.abc import Callable, Hashable
from datetime import UTC, datetime
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

RESULTS = Path(__file__).parent / "results"
# If a kernel fails its self-check, raise: otherwise plain PyTorch would be measured under its name.
KERNELS_ONLY = {"FASTGRPO_SELF_CHECK": "raise"}
# Equal in all rows of one run: child processes inherit both from their parent.
STARTED_VARIABLE, COMMIT_VARIABLE = "FASTGRPO_BENCH_STARTED", "FASTGRPO_BENCH_COMMIT"
STARTED = os.environ.get(STARTED_VARIABLE) or datetime.now(UTC).isoformat(timespec="seconds")
PACKAGES = ("triton", "transformers", "trl", "liger-kernel", "cut-cross-entropy")  # their versions are in every row
L2_BYTES = 256 * 2**20  # more than the L2 cache of any GPU, so that zeroing this much memory flushes it
# Zeroing the cache this often takes the GPU two to three milliseconds. In this time the host launches the variant's
# first kernels, so that the measured time does not include launch latency, as in training. The host reaches the first
# product of the loss after 1 ms (on an H200's machine).
HEAD_STARTS = 32

Call = Callable[[], Any]


def compare(
    variants: dict[Hashable, Call], rounds: int, device: str | torch.device = "cpu", seconds: float | None = None
) -> dict[Hashable, dict[str, float]]:
    """Time variants in turns, and measure the peak memory of each.

    First every variant is called once under the memory measurement, which is also the warm-up. Then every round calls
    every variant once, and each round starts with another variant. So a changing clock, or the load of a shared
    machine, affects all variants equally. No round after the first one starts after `seconds`.

    A variant returns the tensors that it must leave in memory (its gradients), and leaves nothing else. On "cpu", wall
    time is measured; on "cuda", the time between two events of the current stream, with the L2 cache flushed before
    each call. The results of a name are "rounds", the number of timed calls; "median_s", "p20" and "p80", quantiles of
    its time in seconds; and "peak_bytes", the peak memory of the call in addition to its inputs and results.
    """
    peak, clock = instruments(device)
    peaks = {name: peak(call) for name, call in variants.items()}
    return in_turns({name: partial(clock, call) for name, call in variants.items()}, peaks, rounds, seconds)


def instruments(device: str | torch.device) -> tuple[Callable[[Call], int], Callable[[Call], float]]:
    """Return two functions of a call on a device: one returns its peak memory in bytes, one its time in seconds."""
    if torch.device(device).type == "cuda":
        return _cuda_peak, _CudaClock(device)
    return _cpu_peak, _cpu_seconds


def in_turns(
    clocks: dict[Hashable, Callable[[], float | None]], peaks: dict[Hashable, int | None], rounds: int,
    seconds: float | None = None,
) -> dict[Hashable, dict[str, float]]:  # fmt: skip
    """Time variants in turns, after the warm-up; every round starts with another variant. Returns as `compare`.

    A clock runs its variant once and returns the seconds. If it returns None, the variant is removed from all rounds
    and from the results. `peaks` are in bytes.
    """
    times = {name: [] for name in clocks}
    names = list(clocks)
    start = time.monotonic()
    for i in range(rounds):
        if i and seconds is not None and time.monotonic() - start > seconds:
            break
        first = i % len(names)
        for name in names[first:] + names[:first]:
            if name not in times:
                continue
            measured = clocks[name]()
            if measured is None:
                del times[name]
            else:
                times[name].append(measured)
    results = {}
    for name, values in times.items():
        p20, median, p80 = torch.tensor(values, dtype=torch.float64).quantile(torch.tensor([0.2, 0.5, 0.8]).double())
        quantiles = {"median_s": median.item(), "p20": p20.item(), "p80": p80.item()}
        results[name] = {"rounds": len(values), **quantiles, "peak_bytes": peaks[name]}
    return results


def _cpu_seconds(call: Call) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


class _CudaClock:
    """Times a call on the GPU, in seconds, with a cold L2 cache. `peak` is then its peak memory in bytes."""

    def __init__(self, device: str | torch.device):
        self.cache, self.peak = torch.empty(L2_BYTES, dtype=torch.uint8, device=device), None

    def __call__(self, call: Call) -> float:
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda.synchronize()
        for _ in range(HEAD_STARTS):
            self.cache.zero_()
        torch.cuda.reset_peak_memory_stats()
        start.record()
        call()
        end.record()
        torch.cuda.synchronize()
        self.peak = torch.cuda.max_memory_allocated() - torch.cuda.memory_allocated()
        return start.elapsed_time(end) / 1e3


def _cpu_peak(call: Call) -> int:
    """Return the peak memory of a call in bytes, from the profiler's record of torch's allocations and frees.

    The record is exact. A TorchDispatchMode that follows storages would miss temporaries inside an operator (logsumexp
    allocates one of the size of its input), and the resident set size would include cached pages. The scratch memory of
    the matrix library is not allocated by torch, and is not counted for any variant.
    """
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        result = call()
    events = profiler.profiler.kineto_results.events()
    changes = sorted((e.start_ns(), i, e.nbytes()) for i, e in enumerate(events) if e.name() == "[memory]")
    alive = peak = 0
    for _, _, nbytes in changes:
        alive += nbytes
        peak = max(peak, alive)
    del result  # kept until here, so that `alive` ends at the size of the result
    return peak - alive


def _cuda_peak(call: Call) -> int:
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    result = call()
    torch.cuda.synchronize()
    peak = torch.cuda.max_memory_allocated() - torch.cuda.memory_allocated()
    del result
    return peak


def versions() -> dict[str, str]:
    """Return the versions of Triton and of each peer, or "missing" if it is not installed."""
    found = {}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = "missing"
    return found


def _commit():
    """Return the measured commit, with -dirty if the tree has changes."""
    described = subprocess.run(
        ["git", "describe", "--always", "--dirty"],
        cwd=Path(__file__).parent.parent,
        capture_output=True,
        text=True,
        env={**os.environ, "GIT_OPTIONAL_LOCKS": "0"},
    )
    return described.stdout.strip() or "unknown"


def _processor():
    """Return the name of the CPU from Linux, or else from Python."""
    path = Path("/proc/cpuinfo")
    names = re.findall(r"^model name\s*:\s*(.+)$", path.read_text(), re.MULTILINE) if path.exists() else []
    return names[0] if names else platform.processor()


PROCESSOR = _processor()
# Read once, because the first results of a run change the tree.
COMMIT = os.environ.get(COMMIT_VARIABLE) or _commit()
SAME_RUN = {STARTED_VARIABLE: STARTED, COMMIT_VARIABLE: COMMIT}  # environment of child processes


def rows_of(
    results: dict[str, dict[str, float | None]],
    missing: dict[str, str] | None = None,
    extras: dict[str, dict[str, Any]] | None = None,
    **description: Any,
) -> list[dict[str, Any]]:
    """Convert the results of `compare` to rows for `append`, one per variant, with time in ms and memory in MiB.

    A "peak_bytes" of None means that memory was not measured. The row of a missing variant has the reason instead of
    figures. `extras` are further figures of a variant, and `description` (name, shapes, dtype) is in all rows.
    """
    run = {
        "date": STARTED,
        "commit": COMMIT,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "processor": PROCESSOR,
        "threads": torch.get_num_threads(),
        **versions(),
        **description,
    }
    rows = [
        {
            **run,
            "variant": name,
            "rounds": result["rounds"],
            "ms_p20": round(1e3 * result["p20"], 3),
            "ms_p50": round(1e3 * result["median_s"], 3),
            "ms_p80": round(1e3 * result["p80"], 3),
            "peak_mib": None if result["peak_bytes"] is None else round(result["peak_bytes"] / 2**20, 2),
            **(extras or {}).get(name, {}),
        }
        for name, result in results.items()
    ]
    return rows + [{**run, "variant": name, "missing": reason} for name, reason in (missing or {}).items()]


def results_file(device: str | torch.device, folder: Path = RESULTS) -> Path:
    """Return the results file of a device, named after the GPU, such as nvidia-h200.jsonl, or cpu.jsonl."""
    name = torch.cuda.get_device_name(device) if torch.device(device).type == "cuda" else "cpu"
    return folder / f"{name.lower().replace(' ', '-')}.jsonl"


def append(rows: list[dict[str, Any]], device: str | torch.device, folder: Path = RESULTS) -> Path:
    """Append rows to the results file of a device, one JSON object per line, and return the file."""
    folder.mkdir(exist_ok=True)
    path = results_file(device, folder)
    with path.open("a") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)
    return path

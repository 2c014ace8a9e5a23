"""Time variants against one another in turns, measure their peak memory, and write the results down.

A variant is a function without arguments that does the work once. Every benchmark here gives its variants to `compare`,
turns what comes back into rows with `rows_of`, and adds the rows to results/ with `append` (see harness.py).
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
# Where the check of its first use distrusts a kernel, that is an error here: plain PyTorch would take its place, and be
# measured under its name.
KERNELS_ONLY = {"FASTGRPO_SELF_CHECK": "raise"}
# The same in all rows of one run, also where its parts are processes: they get both from the one that starts them.
STARTED_VARIABLE, COMMIT_VARIABLE = "FASTGRPO_BENCH_STARTED", "FASTGRPO_BENCH_COMMIT"
STARTED = os.environ.get(STARTED_VARIABLE) or datetime.now(UTC).isoformat(timespec="seconds")
PACKAGES = ("triton", "trl", "liger-kernel", "cut-cross-entropy")  # their versions stand in every row
L2_BYTES = 256 * 2**20  # more than the L2 cache of any GPU: zeroing so much evicts what the variant before left there
# Zeroing the cache this often takes the GPU half a millisecond. Meanwhile the host launches the variant's first
# kernels, as it runs ahead of the GPU in training too, so that the time on the GPU contains no wait for the host.
HEAD_STARTS = 8

Call = Callable[[], Any]


def compare(
    variants: dict[Hashable, Call], rounds: int, device: str | torch.device = "cpu", seconds: float | None = None
) -> dict[Hashable, dict[str, float]]:
    """Time variants in turns, and measure the peak memory of each.

    Every variant is called once first, under the memory measurement; that call is the warm-up too. Then every round
    calls every variant once, and each round starts with another variant. A clock that changes with heat, or a
    neighbour's load on a shared machine, thus meets all variants alike.

    Args:
        variants: The function to call for each name. It returns what it has to leave in memory (its gradients); nothing
            else may stay.
        rounds: Timed calls of each variant, at most.
        device: Where the variants run. On "cpu", wall time is measured. On "cuda", it is the time between two events of
            the current stream, and the L2 cache is flushed before each call.
        seconds: Once the rounds so far have taken this long, no further one starts. The first one always runs. None
            sets no limit.

    Returns:
        For each name: "rounds", how often it was timed; "median_s", "p20" and "p80", quantiles of its time in seconds;
        "peak_bytes", the most bytes alive during the call, beyond those alive before it (inputs) and those that it
        leaves (gradients).
    """
    peak, clock = instruments(device)
    peaks = {name: peak(call) for name, call in variants.items()}
    return in_turns({name: partial(clock, call) for name, call in variants.items()}, peaks, rounds, seconds)


def instruments(device: str | torch.device) -> tuple[Callable[[Call], int], Callable[[Call], float]]:
    """Return what measures the peak memory of a call in bytes, and what measures its time in seconds.

    Args:
        device: Where the calls run.
    """
    if torch.device(device).type == "cuda":
        return _cuda_peak, _CudaClock(device)
    return _cpu_peak, _cpu_seconds


def in_turns(
    clocks: dict[Hashable, Callable[[], float | None]], peaks: dict[Hashable, int | None], rounds: int,
    seconds: float | None = None,
) -> dict[Hashable, dict[str, float]]:  # fmt: skip
    """Time variants in turns that are warm already; every round starts with another one.

    Args:
        clocks: For each name, a function that runs the variant once and returns its seconds; None takes the variant out
            of this round and all others, and out of the results.
        peaks: The peak memory of each, in bytes.
        rounds: As in `compare`.
        seconds: As in `compare`.

    Returns:
        As `compare`.
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
    """Times a call on the GPU, in seconds, with a cold L2 cache."""

    def __init__(self, device: str | torch.device):
        self.cache = torch.empty(L2_BYTES, dtype=torch.uint8, device=device)

    def __call__(self, call: Call) -> float:
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda.synchronize()
        for _ in range(HEAD_STARTS):
            self.cache.zero_()
        start.record()
        call()
        end.record()
        torch.cuda.synchronize()
        return start.elapsed_time(end) / 1e3


def _cpu_peak(call: Call) -> int:
    """Return the peak memory of a call in bytes, from the profiler's record of torch's allocations and frees.

    The record is exact. A TorchDispatchMode that follows storages would miss the temporaries inside of one operator
    (logsumexp makes one as large as its input), and the resident set size would count pages that are only cached. The
    scratch memory of the matrix library is no torch allocation, and is counted for no variant.
    """
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        result = call()
    events = profiler.profiler.kineto_results.events()
    changes = sorted((e.start_ns(), i, e.nbytes()) for i, e in enumerate(events) if e.name() == "[memory]")
    alive = peak = 0
    for _, _, nbytes in changes:
        alive += nbytes
        peak = max(peak, alive)
    del result  # it had to live up to here, so that `alive` ends at what the call leaves
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
    """Return the version of Triton and of each peer; "missing" stands for a package that is not installed."""
    found = {}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = "missing"
    return found


def _commit():
    """Name the commit that is measured; -dirty where the tree differs from it."""
    described = subprocess.run(
        ["git", "describe", "--always", "--dirty"],
        cwd=Path(__file__).parent.parent,
        capture_output=True,
        text=True,
        env={**os.environ, "GIT_OPTIONAL_LOCKS": "0"},
    )
    return described.stdout.strip() or "unknown"


def _processor():
    """Name the CPU as Linux does, or as Python does elsewhere."""
    path = Path("/proc/cpuinfo")
    names = re.findall(r"^model name\s*:\s*(.+)$", path.read_text(), re.MULTILINE) if path.exists() else []
    return names[0] if names else platform.processor()


PROCESSOR = _processor()
# Asked for once, because the first results that a run writes make the tree differ.
COMMIT = os.environ.get(COMMIT_VARIABLE) or _commit()
SAME_RUN = {STARTED_VARIABLE: STARTED, COMMIT_VARIABLE: COMMIT}  # for the environment of a run's parts


def rows_of(
    results: dict[str, dict[str, float | None]],
    missing: dict[str, str] | None = None,
    extras: dict[str, dict[str, Any]] | None = None,
    **description: Any,
) -> list[dict[str, Any]]:
    """Turn the results of `compare` into rows for `append`, one a variant.

    Args:
        results: What `compare` returned. A "peak_bytes" of None says that memory was not measured.
        missing: The reason for each variant that was not run. Its row has the reason in place of figures.
        extras: Further figures of a variant, by its name.
        description: What all rows share: the benchmark's name, its shapes, its dtype.

    Returns:
        Rows with the date and commit of the run, the versions that it ran with, the description, the variant's name,
        its time in milliseconds and its peak memory in MiB.
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
    """Return the file of a device's results, which bears the name of the GPU, as nvidia-h200.jsonl, or is cpu.jsonl.

    Args:
        device: Where they were measured.
        folder: Folder of the results.
    """
    name = torch.cuda.get_device_name(device) if torch.device(device).type == "cuda" else "cpu"
    return folder / f"{name.lower().replace(' ', '-')}.jsonl"


def append(rows: list[dict[str, Any]], device: str | torch.device, folder: Path = RESULTS) -> Path:
    """Add rows to the results of a device, one JSON object a line.

    Args:
        rows: What `rows_of` made.
        device: Where they were measured.
        folder: Folder of the results.

    Returns:
        The file, `results_file`.
    """
    folder.mkdir(exist_ok=True)
    path = results_file(device, folder)
    with path.open("a") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)
    return path

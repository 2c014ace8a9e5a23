"""One way to time variants against one another, and to write down what came out."""

import json
import os
import platform
import subprocess
import time
from datetime import UTC, datetime
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

RESULTS = Path(__file__).parent / "results"
STARTED = datetime.now(UTC).isoformat(timespec="seconds")  # the same in all rows of one run
L2_BYTES = 256 * 2**20  # more than the L2 cache of any GPU: zeroing it evicts what the variant before left there
# Zeroing it so often takes half a millisecond, in which the host gets ahead of the device, as it does in training: the
# device is timed, and not the host's first launches.
HEAD_STARTS = 8


def compare(variants, rounds, device="cpu", seconds=None):
    """Time variants in turns, and measure the peak memory of each.

    One call of each comes first, under the memory measurement; it is the warm-up too. Then every round calls every
    variant once, and each round starts with another one: a clock that changes with heat or with the neighbours' load
    changes it for all of them.

    Args:
        variants: name -> callable without arguments. It returns what it has to leave in memory (its gradients), and
            nothing else may stay.
        rounds: timed calls of each, at most.
        seconds: no round starts once the rounds before it have taken this long; the first always runs. None: no limit.
        device: where they run. "cpu": wall time. "cuda": time between two events of the current stream, the L2 cache
            flushed before each call.

    Returns:
        name -> {"rounds", "median_s", "p20", "p80": seconds, "peak_bytes": most bytes alive during the call, beyond
        those alive before it and those it leaves: beyond inputs and gradients}.
    """
    peak = _cuda_peak if torch.device(device).type == "cuda" else _cpu_peak
    clock = _CudaClock(device) if torch.device(device).type == "cuda" else _cpu_seconds
    peaks = {name: peak(call) for name, call in variants.items()}
    times = {name: [] for name in variants}
    names = list(variants)
    start = time.monotonic()
    for i in range(rounds):
        if i and seconds is not None and time.monotonic() - start > seconds:
            break
        first = i % len(names)
        for name in names[first:] + names[:first]:
            times[name].append(clock(variants[name]))
    results = {}
    for name, values in times.items():
        p20, median, p80 = torch.tensor(values, dtype=torch.float64).quantile(torch.tensor([0.2, 0.5, 0.8]).double())
        quantiles = {"median_s": median.item(), "p20": p20.item(), "p80": p80.item()}
        results[name] = {"rounds": len(values), **quantiles, "peak_bytes": peaks[name]}
    return results


def _cpu_seconds(call):
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


class _CudaClock:
    def __init__(self, device):
        self.cache = torch.empty(L2_BYTES, dtype=torch.uint8, device=device)

    def __call__(self, call):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda.synchronize()
        for _ in range(HEAD_STARTS):
            self.cache.zero_()
        start.record()
        call()
        end.record()
        torch.cuda.synchronize()
        return start.elapsed_time(end) / 1e3


def _cpu_peak(call):
    """Bytes of torch's CPU allocator: the profiler sees each of its allocations and frees.

    Exact, where a TorchDispatchMode that follows storages would miss the temporaries inside of one operator (logsumexp
    makes one as large as its input), and the resident set size would count pages that are only cached. The scratch
    memory of the matrix library is no torch allocation and is not in it, for any variant.
    """
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        result = call()
    events = profiler.profiler.kineto_results.events()
    changes = sorted((e.start_ns(), i, e.nbytes()) for i, e in enumerate(events) if e.name() == "[memory]")
    alive = peak = 0
    for _, _, nbytes in changes:
        alive += nbytes
        peak = max(peak, alive)
    del result  # it lived up to here, so that `alive` ends at what the call leaves
    return peak - alive


def _cuda_peak(call):
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    result = call()
    torch.cuda.synchronize()
    peak = torch.cuda.max_memory_allocated() - torch.cuda.memory_allocated()
    del result
    return peak


def rows_of(results, missing=None, extras=None, **description):
    """The results of `compare` as rows for `append`: commit, versions, description, variant, ms, MiB
    (a peak that was not measured is None).

    missing: variant -> why it was not run; each is a row with the reason in the place of figures. extras: variant ->
    dict of further figures.
    """
    root = Path(__file__).parent.parent
    described = subprocess.run(
        ["git", "describe", "--always", "--dirty"],
        cwd=root,
        capture_output=True,
        text=True,
        env={**os.environ, "GIT_OPTIONAL_LOCKS": "0"},
    )
    run = {
        "date": STARTED,
        "commit": described.stdout.strip() or "unknown",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
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


def append(rows, device, folder=RESULTS):
    """Add rows to <folder>/<device>.jsonl, one JSON object a line; the device is "cpu" or the GPU's name."""
    name = torch.cuda.get_device_name(device) if torch.device(device).type == "cuda" else "cpu"
    folder.mkdir(exist_ok=True)
    path = folder / f"{name.lower().replace(' ', '-')}.jsonl"
    with path.open("a") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)
    return path

"""Times the stages of every step, and traces some steps on request.

The seconds of a stage exclude stages inside it. Remaining time is `other`, so the stages add up to the step. On CUDA,
events on the stream take the times. They are read at the end of the step, so the host syncs only once.
"""

import re
import resource
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, record_function
from transformers.pytorch_utils import Conv1D

from fastgrpo.run.folder import RunFolder

STAGES = ("rollout", "reward", "reference", "forward", "loss", "backward", "optimizer", "other")
UPDATE = ("forward", "loss", "backward", "optimizer")  # the stages that the MFU measures
WARMUP_STEPS = 2  # steps before the profiler measures anything: the first ones compile kernels and fill caches

# Peak FLOP/s of dense bf16 and fp16 products, from NVIDIA's data sheets. The first key that is in the GPU's name, as
# whole words, counts.
PEAK_FLOPS = {
    "GB200": 2500e12,
    "B200": 2250e12,
    "GH200": 989e12,
    "H200": 989e12,
    "H100 PCIe": 756e12,
    "H100 NVL": 835e12,
    "H100": 989e12,
    "A100": 312e12,
    "L40S": 362e12,
    "RTX 4090": 165e12,
    "L40": 181e12,
    "A10": 125e12,
    "A10G": 70e12,
    "L4": 121e12,
}


def peak_flops(device: torch.device, dtype: torch.dtype) -> float | None:
    """Look up the peak FLOP/s of a device."""
    if device.type != "cuda" or dtype not in (torch.bfloat16, torch.float16):
        return None
    name = torch.cuda.get_device_name(device)
    return next((peak for known, peak in PEAK_FLOPS.items() if re.search(rf"\b{known}\b", name)), None)


def update_flops(body: torch.nn.Module, head_weight: torch.Tensor) -> tuple[int, int]:
    """Count the FLOPs of a forward and a backward pass for one token.

    A weight of a linear layer or of the head costs 2 FLOPs per token in the forward pass, 2 in the backward pass
    for the gradient of the input, and 2 more for the gradient of the weight where it is trained. The products inside
    attention, a few percent at the usual lengths, and recomputation are not counted, so the MFU is slightly too low.
    Mixtures of experts have no count, (0, 0): a token uses only some of their weights.
    """
    if any(parameter.dim() == 3 for parameter in body.parameters()):
        return 0, 0

    def cost(weight, count):
        return 2 * count * (3 if weight.requires_grad else 2)

    layers = [module for module in body.modules() if isinstance(module, (torch.nn.Linear, Conv1D))]
    of_layers = sum(cost(layer.weight, _size(layer)) for layer in layers)
    return of_layers, cost(head_weight, head_weight.numel())


def _size(layer):
    """Count the weights of a layer. A tensor of packed 4-bit weights has fewer elements."""
    return layer.weight.numel() if isinstance(layer, Conv1D) else layer.in_features * layer.out_features


class StageTimer:
    """Measures the seconds of each stage of a step. Between `stop` and the next `start` it does nothing.

    The update adds its FLOPs to the attribute `flops`.
    """

    def __init__(self, device: torch.device | str, peak: float | None = None) -> None:
        self.device, self.peak = torch.device(device), peak
        self.marks, self.open, self.flops = None, [], 0

    def start(self) -> None:
        """Begin a step."""
        self.marks, self.open, self.flops = [], ["other"], 0
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)
        self._mark()

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Time this context as a stage, and name it in the trace."""
        if self.marks is None:
            yield
            return
        self.open.append(name)
        self._mark()
        try:
            with record_function(name):
                yield
        finally:
            self.open.pop()
            self._mark()

    def _mark(self):
        """Record the time at which the innermost open stage starts or continues."""
        if self.device.type == "cuda":
            now = torch.cuda.Event(enable_timing=True)
            now.record(torch.cuda.current_stream(self.device))
        else:
            now = time.perf_counter()
        self.marks.append((self.open[-1], now))

    def stop(self) -> dict[str, float]:
        """End the step, and wait until its stream is done. Other streams, such as that of copies, continue.

        mfu = FLOPs / (seconds of the stages in UPDATE) / peak
        """
        self._mark()
        seconds = dict.fromkeys(STAGES, 0.0)
        if self.device.type == "cuda":
            self.marks[-1][1].synchronize()
        for (name, begin), (_, end) in pairwise(self.marks):
            seconds[name] += begin.elapsed_time(end) / 1e3 if self.device.type == "cuda" else end - begin
        self.marks = None
        values = {f"time/{name}": value for name, value in seconds.items()}
        if self.peak is not None and self.flops:
            values["mfu"] = self.flops / sum(seconds[name] for name in UPDATE) / self.peak
        if self.device.type == "cuda":
            values["memory/peak_gib"] = torch.cuda.max_memory_allocated(self.device) / 2**30
        return values


def peak_gib(history: Sequence[Mapping[str, Any]]) -> float:
    """Return the peak GPU memory of the logged steps in GiB, or without a GPU the peak RSS of this process."""
    peaks = [row["memory/peak_gib"] for row in history if row.get("memory/peak_gib") is not None]
    unit = 1 if sys.platform == "darwin" else 2**10  # bytes per unit of ru_maxrss
    return round(max(peaks) if peaks else resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 2**30, 3)


class Profiler:
    """Prints a table of the time that some steps took, and writes a trace of as many further steps.

    After a warm-up, `steps` steps are timed and as many again are traced into trace.json.gz, which ui.perfetto.dev and
    chrome://tracing open. They are not the same steps, because tracing slows a step down.
    """

    def __init__(self, steps: int, folder: RunFolder, say: Callable[[str], None]) -> None:
        self.steps, self.folder, self.say = steps, folder, say
        self.seen, self.timed, self.trace = 0, [], None

    def step(self, values: dict[str, float], left: int) -> None:
        """Record a step. Called after every step of the run."""
        needed = needed_steps(self.steps)
        if not self.seen and self.steps and 1 + left < needed:  # a run that resumes near its end
            self.say(f"profile={self.steps} needs {needed} steps, {1 + left} are left, so this run is not profiled")
            self.steps = 0
        if not self.steps:
            return
        self.seen += 1
        if WARMUP_STEPS < self.seen <= WARMUP_STEPS + self.steps:
            self.timed.append(values)
        if self.seen == WARMUP_STEPS + self.steps:
            self.say(stage_table(self.timed))
            cuda = [ProfilerActivity.CUDA] if torch.cuda.is_available() else []
            self.trace = profile(activities=[ProfilerActivity.CPU, *cuda])
            self.trace.start()
        if self.seen == needed:
            self.trace.stop()
            path = self.folder.claim("trace.json.gz")
            self.trace.export_chrome_trace(str(path))
            self.trace = None
            self.say(f"trace of {self.steps} steps: {path}")


def needed_steps(steps: int) -> int:
    """Return the number of steps that profiling needs: warmup, timed and traced."""
    return WARMUP_STEPS + 2 * steps


def stage_table(steps: list[dict[str, float]]) -> str:
    """Format the mean seconds of each stage as a table, with tokens per second, MFU and peak memory below."""
    means = defaultdict(float)
    for values in steps:
        for name, value in values.items():
            means[name] += value / len(steps)
    total = means["step_time"]
    rows = [*((stage, means[f"time/{stage}"]) for stage in STAGES), ("step", total)]
    lines = [f"  {'stage':<10} {'seconds':>9} {'share':>7}"]
    lines += [f"  {name:<10} {seconds:>9.4f} {seconds / total:>7.1%}" for name, seconds in rows]
    ends = [f"{means['tokens/s']:,.0f} completion tokens/s"]
    if "mfu" in means:
        ends.append(f"MFU of the update {means['mfu']:.1%}")
    if "memory/peak_gib" in means:
        ends.append(f"peak memory {max(values['memory/peak_gib'] for values in steps):.2f} GiB")
    return "\n".join([f"mean of {len(steps)} steps", *lines, "  " + ", ".join(ends)])

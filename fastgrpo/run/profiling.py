"""Where a step's time goes: seconds of each stage every step, and on request a trace of some steps.

A stage's seconds are its own: while a stage inside of it runs, its clock stands. What no stage claims is `other`, so
the stages of a step add up to it. On CUDA the marks are events on the stream, read once when the step ends; nothing
waits before that.
"""

import time
from collections import defaultdict
from contextlib import contextmanager
from itertools import pairwise

import torch
from torch.profiler import ProfilerActivity, profile, record_function

STAGES = ("rollout", "reward", "reference", "forward", "loss", "backward", "optimizer", "other")
UPDATE = ("forward", "loss", "backward", "optimizer")
WARMUP_STEPS = 2

# Dense bf16 and fp16 FLOP/s by part of the GPU's name, from NVIDIA's data sheets. The first that fits counts.
PEAK_FLOPS = {
    "B200": 2250e12,
    "H200": 989e12,
    "H100 PCIe": 756e12,
    "H100 NVL": 835e12,
    "H100": 989e12,
    "A100": 312e12,
    "L40S": 362e12,
    "RTX 4090": 165e12,
    "A10": 125e12,
    "L4": 121e12,
}


def peak_flops(device, dtype):
    """FLOP/s of the device in this dtype; None where unknown: on CPUs, in fp32, on a GPU that is not in the table."""
    if device.type != "cuda" or dtype not in (torch.bfloat16, torch.float16):
        return None
    name = torch.cuda.get_device_name(device)
    return next((peak for known, peak in PEAK_FLOPS.items() if known in name), None)


def update_flops(body, head_weight):
    """What a forward and backward pass needs: FLOPs a token in the body, FLOPs a row in the head.

    2 a weight and token in the forward pass, 2 in the backward pass for the input's gradient and 2 for the weight's,
    where it is trained. Attention's own products, a few percent at these lengths, and recomputation are not counted, so
    an MFU made of this is rather too low.

    Args:
        body: the module of the layers. head_weight: [V, D].
    """

    def cost(weight):
        return 2 * weight.numel() * (3 if weight.requires_grad else 2)

    layers = [module for module in body.modules() if isinstance(module, torch.nn.Linear)]
    return sum(cost(layer.weight) for layer in layers), cost(head_weight)


class StageTimer:
    """Seconds of the stages of one step after another. Outside of `start` and `stop` it does nothing."""

    def __init__(self, device, peak=None):
        """peak: FLOP/s of the device, or None."""
        self.device, self.peak = torch.device(device), peak
        self.marks, self.open, self.flops = None, [], 0

    def start(self):
        """A step begins."""
        self.marks, self.open, self.flops = [], ["other"], 0
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)
        self._mark()

    @contextmanager
    def stage(self, name):
        """What runs inside is of this stage, a name of `STAGES`, in the trace too."""
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
        """From now on it is the turn of the innermost open stage."""
        if self.device.type == "cuda":
            now = torch.cuda.Event(enable_timing=True)
            now.record(torch.cuda.current_stream(self.device))
        else:
            now = time.perf_counter()
        self.marks.append((self.open[-1], now))

    def stop(self):
        """The step ends; waits for the device.

        Returns:
            metrics: time/STAGE, seconds; mfu, the FLOPs counted over the update's seconds and the peak, where that is
            known; memory/peak_gib on CUDA.
        """
        self._mark()
        seconds = dict.fromkeys(STAGES, 0.0)
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        for (name, begin), (_, end) in pairwise(self.marks):
            seconds[name] += begin.elapsed_time(end) / 1e3 if self.device.type == "cuda" else end - begin
        self.marks = None
        values = {f"time/{name}": value for name, value in seconds.items()}
        if self.peak is not None:
            values["mfu"] = self.flops / sum(seconds[name] for name in UPDATE) / self.peak
        if self.device.type == "cuda":
            values["memory/peak_gib"] = torch.cuda.max_memory_allocated(self.device) / 2**30
        return values


class Profiler:
    """Times `steps` steps after a warm-up, prints their table, and traces as many again into trace.json.gz, which
    ui.perfetto.dev and chrome://tracing open. Tracing slows a step down; so the table is made without it.
    """

    def __init__(self, steps, folder, say):
        """steps: 0 is off. folder: of the run. say: prints a text."""
        self.steps, self.path, self.say = steps, folder / "trace.json.gz", say
        self.seen, self.timed, self.trace = 0, [], None

    def step(self, values, left):
        """To be called after each step with its metrics and the number of steps left."""
        if not self.seen and self.steps and 1 + left < needed_steps(self.steps):  # a run that goes on near its end
            self.say(
                f"profile={self.steps} needs {needed_steps(self.steps)} steps, only {1 + left} are left: it is off"
            )
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
        if self.seen == needed_steps(self.steps):
            self.trace.stop()
            self.trace.export_chrome_trace(str(self.path))
            self.trace = None
            self.say(f"trace of {self.steps} steps: {self.path}")


def needed_steps(steps):
    """Steps of a run that can be profiled for this many: warm-up, timed, traced."""
    return WARMUP_STEPS + 2 * steps


def stage_table(steps):
    """Metrics of some steps -> a table of their mean seconds by stage, with tokens/s, MFU and peak memory below."""
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

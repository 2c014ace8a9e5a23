"""The parts of `make first-gpu` that are no program of their own: python -m benchmarks.first_parts NAME.

A part prints what it found as lines of JSON, each as soon as it is known, so that a part that is ended loses only the
rest: {"rows": rows for results/, "bars": what `at_most` and `at_least` judged, "note": a remark, "machine": facts}.
With FASTGRPO_BENCH_SMALL=1 the sizes are tiny, and without a GPU the kernels run in Triton's interpreter.
"""

import json
import subprocess
import sys
import tempfile
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from benchmarks import bench_head, bench_rollout, bench_step, variants
from benchmarks.batches import make_batch
from benchmarks.compare import compare, rows_of, versions
from benchmarks.contestants import contest, taking_part
from benchmarks.first_sizes import (
    FLATTEN_SIZES,
    FP32_SIZE,
    HEAD_SHAPES,
    ROLLOUT_SIZE,
    SANITIZED,
    STEP_SIZE,
    size_name,
)
from benchmarks.harness import CUDA, DEVICE, DTYPE, SMALL, Bar, at_least, at_most, name_of
from benchmarks.peers import PEERS, peers
from fastgrpo import linear_grpo_loss, linear_logprob
from fastgrpo.check import rollouts, runner
from fastgrpo.check.cases import modes_here
from fastgrpo.check.worker import find_cases

ROUNDS = 2 if SMALL else 10
SECONDS = 8  # time limit of the rounds of one shape
GRAPHS, *_, EAGER = bench_rollout.ENGINES


def tell(
    rows: list[dict[str, Any]] | None = None, bars: dict[str, Bar] | None = None, note: str = "",
    machine: dict[str, str] | None = None,
) -> None:  # fmt: skip
    """Print what a part found.

    Args:
        rows: Rows for results/.
        bars: Judgements by name.
        note: A remark for the table.
        machine: Facts about the machine.
    """
    found = {"rows": rows or [], "bars": bars or {}, "note": note, "machine": machine or {}}
    print("\n" + json.dumps(found), flush=True)


def show_versions() -> None:
    """Tell what is installed, and what the GPU is."""
    facts = {"torch": torch.__version__, "CUDA of torch": torch.version.cuda or "none", **versions()}
    if CUDA:
        about = torch.cuda.get_device_properties(0)
        facts |= {"GPU": about.name, "capability": f"{about.major}.{about.minor}",
                  "memory": f"{about.total_memory / 2**30:.1f} GiB", "driver": _driver()}  # fmt: skip
    tell(machine=facts, note="; ".join(f"{name} {value}" for name, value in facts.items()))


def _driver():
    """Return the version of the driver, or what nvidia-smi says in its place."""
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout.split("\n")[0]


def check_kernels() -> None:
    """Run the checks of `doctor --check`; small, one of them."""
    modes = modes_here()
    other = runner.other_assembler() if "gpu" in modes else {}
    cases = find_cases(runner.TABLE)
    count, failed = 0, []
    for mode in modes[:1] if SMALL else modes:
        for line in runner.check(runner.TABLE, cases[:1] if SMALL else cases, mode, other):
            print(line, flush=True)
            count += 1
            if not line.passed:
                failed.append(line.name)
            note = f"{count - len(failed)} of {count} passed" + (f"; failed: {', '.join(failed)}" if failed else "")
            tell(bars={"kernels that fail their check": at_most(len(failed), 0)}, note=note)


def time_head() -> None:
    """Time the head beside the bare products, TRL's head and Liger's."""
    others, missing = peers(compiled=not SMALL)
    heads = {"fastgrpo": variants.fastgrpo, "fastgrpo, forward only": variants.fastgrpo_forward,
             "bare products": variants.bare_products, "one product": variants.one_product}  # fmt: skip
    heads |= {name: others[name] for name in ("trl", "liger") if name in others}
    for shape in HEAD_SHAPES:
        batch = make_batch(shape.n, shape.d, shape.v, length=shape.length, dtype=DTYPE, device=DEVICE)
        calls, absent = {}, {name: why for name, why in missing.items() if name in ("trl", "liger")}
        for name, head in heads.items():
            try:
                head(batch)
            except Exception as error:
                if name not in PEERS:
                    raise
                absent[name] = f"failed: {type(error).__name__}: {error}"[:300]
                continue
            calls[name] = partial(head, batch)
        measured = compare(calls, ROUNDS, DEVICE, SECONDS)
        rows = rows_of(measured, absent, benchmark="head", n=shape.n, d=shape.d, v=shape.v, dtype=name_of(DTYPE),
                       active_rows=shape.n, case="all rows")  # fmt: skip
        bars = bench_head.bars_of(shape._replace(active_bar=None), {1.0: measured})
        note = "; ".join(f"{name}: {why}" for name, why in absent.items())
        tell(rows, {f"{size_name(shape)}: {name}": bar for name, bar in bars.items()}, note)
        del batch, calls


def time_rollout() -> None:
    """Time rollouts with and without CUDA graphs."""
    with taking_part(bench_rollout.contestants_of(ROLLOUT_SIZE, [GRAPHS, EAGER], ["equal"], peers=False)) as taking:
        found = contest(taking, 2)
    rows, bars = bench_rollout.judged(ROLLOUT_SIZE, found, ["equal"])
    times = found.results
    bars["graphs, times without"] = at_least(
        times[f"equal/{EAGER}"]["median_s"] / times[f"equal/{GRAPHS}"]["median_s"], 1.0
    )
    tell(rows, {f"{ROLLOUT_SIZE}: {name}": bar for name, bar in bars.items()})


def time_step() -> None:
    """Time one GRPO step beside TRL's."""
    with tempfile.TemporaryDirectory() as folder:
        contestants, missing = bench_step.contestants_of(STEP_SIZE, Path(folder), ["trl"])
        with taking_part(contestants):
            found = contest(contestants, 2 if SMALL else 1, missing)
    rows, bars = bench_step.judged(STEP_SIZE, found)
    note = "; ".join(f"{name}: {why}" for name, why in found.missing.items())
    tell(rows, {f"{STEP_SIZE}: {name}": bar for name, bar in bars.items()}, note)


def compare_choices() -> None:
    """Compare what was chosen without a GPU: `flatten` on and off, and the Triton path in fp32 with the one without."""
    from fastgrpo.kernels import linear_exp
    from fastgrpo.kernels.linear_logprob import linear_logprob as anchored

    for size in FLATTEN_SIZES:
        hidden, weight, targets = _operands(size, DTYPE)

        def call(flatten: bool, head: tuple = (hidden, weight, targets)) -> torch.Tensor:
            with torch.no_grad(), mock.patch.object(linear_exp, "flattens", lambda *options: flatten):
                return anchored(*head, path="anchored")[0]

        different = (call(True) != call(False)).sum().item()
        times = compare({flatten: partial(call, flatten) for flatten in (True, False)}, ROUNDS, DEVICE, SECONDS)
        bars = {
            "tokens that flatten gives other bits": at_most(different, 0),
            "time with flatten, of that without": at_most(times[True]["median_s"] / times[False]["median_s"], 1.0),
        }
        tell(bars={f"{size_name(size)}: {name}": bar for name, bar in bars.items()})
        del hidden, weight, targets, call
    hidden, weight, targets = _operands(FP32_SIZE, torch.float32)
    leaves = hidden.requires_grad_(), weight.requires_grad_()
    advantages = torch.ones(len(hidden), device=DEVICE)

    def step(backend: str) -> tuple[torch.Tensor, ...]:
        return torch.autograd.grad(linear_grpo_loss(*leaves, targets, advantages, backend=backend).loss, leaves)

    times = compare({backend: partial(step, backend) for backend in ("triton", "chunked")}, ROUNDS, DEVICE, SECONDS)
    ratio = times["triton"]["median_s"] / times["chunked"]["median_s"]
    tell(bars={f"{size_name(FP32_SIZE)} in fp32: time of triton, of chunked": at_most(ratio, 1.0)})


def _operands(size, dtype):
    """Draw hidden states, a weight and targets."""
    n, d, v = size
    hidden, weight = torch.randn(n, d, device=DEVICE).to(dtype), (torch.randn(v, d, device=DEVICE) / d**0.5).to(dtype)
    return hidden, weight, torch.randint(v, (n,), device=DEVICE)


def run_kernels() -> None:
    """Run the kernels of head and decoding once; compute-sanitizer watches this part."""
    from fastgrpo.kernels.group_decode import group_decode

    hidden, weight, targets = _operands(SANITIZED, DTYPE)
    leaves = hidden.requires_grad_(), weight.requires_grad_()
    torch.autograd.grad(linear_grpo_loss(*leaves, targets, torch.ones(len(hidden), device=DEVICE)).loss, leaves)
    linear_logprob(*leaves, targets, return_entropy=True)[1].sum().backward()
    for depth in (64, 128):
        lanes = torch.arange(8).view(2, 4)
        group_decode(**rollouts.random_decode(lanes.tolist(), [40, 33], [9] * 8, heads=(8, 2), depth=depth,
                                              dtype=DTYPE, device=DEVICE))  # fmt: skip
    if CUDA:
        torch.cuda.synchronize()


PARTS = {
    "versions": show_versions,
    "check": check_kernels,
    "head": time_head,
    "rollout": time_rollout,
    "step": time_step,
    "choices": compare_choices,
    "kernels": run_kernels,
}

if __name__ == "__main__":
    torch.manual_seed(0)
    PARTS[sys.argv[1]]()

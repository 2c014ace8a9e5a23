"""The parts of `make first-gpu` that are not separate programs: python -m benchmarks.first_parts NAME.

A part prints each result as a line of JSON as soon as it is known, so that a part that is killed loses only the rest:
{"rows": rows for results/, "bars": bars by name, "note": a remark, "machine": facts}. With FASTGRPO_BENCH_SMALL=1 the
sizes are tiny, and without a GPU the kernels run in Triton's interpreter.
"""

import gc
import json
import subprocess
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from benchmarks import bench_head, bench_rollout, bench_step, bench_trl, variants
from benchmarks.batches import make_batch
from benchmarks.compare import compare, rows_of, versions
from benchmarks.contestants import Contest, Contestant, Failed, contest, taking_part
from benchmarks.first_sizes import (
    DECODE,
    FLATTEN_SIZES,
    HEAD_SHAPES,
    STEP_SIZE,
    size_name,
)
from benchmarks.harness import CUDA, DEVICE, DTYPE, SMALL, Bar, at_least, at_most, name_of, none_of
from benchmarks.peers import PEERS, peers
from fastgrpo.kernel_checks import runner
from fastgrpo.kernel_checks.cases import CASES, modes_here
from fastgrpo.policy.load import prepare
from fastgrpo.policy.lora import add_lora
from fastgrpo.rollout.engine import RolloutEngine

ROUNDS = 2 if SMALL else 10
SECONDS = 8  # time limit of the rounds of one shape
FLATTEN_BAR = 1.01  # 1% is noise
CHECK_SECONDS = 45  # time limit of one check, including the start of its process
RACE_SECONDS = 25  # of training, for each trainer
COMPILE_SECONDS = 3  # of training before the race, in which our kernels are compiled


def tell(
    rows: list[dict[str, Any]] | None = None, bars: dict[str, Bar] | None = None, note: str = "",
    machine: dict[str, str] | None = None,
) -> None:  # fmt: skip
    """Print results of a part as JSON."""
    found = {"rows": rows or [], "bars": bars or {}, "note": note, "machine": machine or {}}
    print("\n" + json.dumps(found), flush=True)


def show_versions() -> None:
    """Print the versions of packages, and the GPU."""
    facts = {"torch": torch.__version__, "CUDA of torch": torch.version.cuda or "none", **versions()}
    if CUDA:
        about = torch.cuda.get_device_properties(0)
        facts |= {"GPU": about.name, "capability": f"{about.major}.{about.minor}",
                  "memory": f"{about.total_memory / 2**30:.1f} GiB", "driver": _driver()}  # fmt: skip
    tell(machine=facts, note="; ".join(f"{name} {value}" for name, value in facts.items()))


def _driver():
    """Return the version of the driver, or nvidia-smi's message."""
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=False).stdout.split("\n")[0]
    except OSError:  # slim containers have no nvidia-smi
        return "unknown"


def check_kernels() -> None:
    """Compare every kernel with its specification; at the small size, only one."""
    mode, lines = modes_here()[0], []
    count = 1 if SMALL else sum(mode in case.modes for case in CASES)
    for line in runner.check(runner.TABLE, mode, CHECK_SECONDS, count):
        lines.append(line)
        print(line, flush=True)
        failed = [line for line in lines if line.reason]
        note = f"{len(lines) - len(failed)} of {count} passed"
        note += "".join(f"; {line.name} failed: {line.reason}" for line in failed)
        tell(bars={"kernels that fail their check": none_of(len(failed), len(lines) == count)}, note=note)


def time_kernels() -> None:
    """Time every kernel at the size of its check."""
    mode, notes = modes_here()[0], []
    for case in [case for case in CASES if mode in case.modes][: 1 if SMALL else None]:
        seconds = compare({"ours": case.trial(mode).ours}, ROUNDS, DEVICE, SECONDS)["ours"]["median_s"]
        notes.append(f"{case.name} {1e3 * seconds:.3f} ms")
        tell(note="; ".join(notes))


def time_head() -> None:
    """Time the head against the bare products, TRL's head and, after all shapes, Liger's, which takes much longer."""
    others, missing = peers(compiled=not SMALL)
    heads = {"fastgrpo": variants.fastgrpo, "fastgrpo, forward only": variants.fastgrpo_forward,
             "bare products": variants.bare_products, "one product": variants.one_product}  # fmt: skip
    heads |= {"trl": others["trl"]} if "trl" in others else {}
    slow = {"fastgrpo": variants.fastgrpo, "liger": others["liger"]} if "liger" in others else {}
    for shape, chosen in [(shape, chosen) for chosen in (heads, slow) if chosen for shape in HEAD_SHAPES]:
        batch = make_batch(shape.n, shape.d, shape.v, length=shape.length, dtype=DTYPE, device=DEVICE)
        calls, absent = {}, {}
        if chosen is heads:
            absent = {name: why for name, why in missing.items() if name in ("trl", "liger")}
        for name, head in chosen.items():
            try:
                head(batch)
            except Exception as error:
                if name not in PEERS:
                    raise
                absent[name] = f"failed: {type(error).__name__}: {error}"[:300]
                continue
            calls[name] = partial(head, batch)
        measured, bars = compare(calls, ROUNDS if chosen is heads else min(3, ROUNDS), DEVICE, SECONDS), {}
        if chosen is heads:
            bars = bench_head.bars_of(shape._replace(active_bar=None), {1.0: measured})
        else:
            ours = measured.pop("fastgrpo")
            if "liger" in measured:
                ratio = ours["median_s"] / measured["liger"]["median_s"]
                bars["time, of liger, 100% active"] = at_most(ratio, 1.0)
        rows = rows_of(measured, absent, benchmark="head", n=shape.n, d=shape.d, v=shape.v, dtype=name_of(DTYPE),
                       active_rows=shape.n, case="all rows")  # fmt: skip
        note = "; ".join(f"{name}: {why}" for name, why in absent.items())
        tell(rows, {f"{size_name(shape)}: {name}": bar for name, bar in bars.items()}, note)
        del batch, calls


def tell_contest(
    contestants: list[Contestant], missing: dict[str, str],
    judge: Callable[[Contest], tuple[list[dict[str, Any]], dict[str, Bar]]], rounds: int = 2,
) -> None:  # fmt: skip
    """Time the first contestant alone and print its results, in case the others are slow; then time all in turns.

    `judge` returns rows and bars of a contest.
    """
    with taking_part(contestants):
        if len(contestants) > 1:
            tell(*judge(contest(contestants[:1], rounds)))
        found = contest(contestants, rounds, missing)
    tell(*judge(found), note="; ".join(f"{name}: {why}" for name, why in found.missing.items()))


def time_decode() -> None:
    """Time rollouts of several sizes and numbers of lanes, all of equal length, and with LoRA."""
    for name, (size, batches, tokens, lora, predicted) in DECODE.items():
        policy = prepare(bench_rollout.make_model(size))
        if lora:
            add_lora(policy.module, target_modules=["all-linear"])
        prompts = bench_rollout.make_prompts(policy.module.config.vocab_size) * batches
        lengths = [tokens] * len(prompts) * bench_rollout.GROUP
        engine = RolloutEngine(policy, max_num_seqs=len(lengths))
        call = partial(bench_rollout.ours, engine, prompts, lengths)
        call()  # the first run compiles, the second one captures graphs
        seconds = compare({name: call}, 3, DEVICE, SECONDS)[name]["median_s"]
        tell(bars={f"{name}: tokens/s": at_least(round(sum(lengths) / seconds), predicted)})
        del policy, engine, call
        gc.collect()  # layers of Liger are in reference cycles


def time_step() -> None:
    """Time one GRPO step against TRL's."""

    def judge(found: Contest) -> tuple[list[dict[str, Any]], dict[str, Bar]]:
        rows, bars = bench_step.judged(STEP_SIZE, found)
        return rows, {f"{STEP_SIZE}: {name}": bar for name, bar in bars.items()}

    with tempfile.TemporaryDirectory() as folder:
        contestants, missing = bench_step.contestants_of(STEP_SIZE, Path(folder), ["fastgrpo", "trl"])
        tell_contest(contestants, missing, judge, 2 if SMALL else 1)


def time_trl() -> None:
    """Time TRL's trainer with its own head and with ours."""
    with tempfile.TemporaryDirectory() as folder:
        tell_contest(bench_trl.contestants_of(Path(folder)), {}, bench_trl.judged)


def race_trainers() -> None:
    """Train the built-in example with fastgrpo and with TRL, each for `RACE_SECONDS`, and measure its accuracy."""
    from benchmarks.race import __main__ as race
    from benchmarks.race.examiner import Examiner
    from benchmarks.race.tasks import TASKS

    notes = {}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model"
        TASKS["embedded"].make_model(path, 0)
        examiner = Examiner(TASKS["embedded"], path)
        for _ in race.run("embedded", "fastgrpo", 0, path, examiner, COMPILE_SECONDS):
            pass
        for variant in ("fastgrpo", "TRL"):
            try:
                for row in race.run("embedded", variant, 0, path, examiner, RACE_SECONDS):
                    notes[variant] = f"accuracy {row['accuracy']:.3f} after {row['step']} steps, {row['seconds']:.0f} s"
                    tell(note="; ".join(map(": ".join, notes.items())))
            except Failed as error:
                if variant == "fastgrpo":
                    raise
                notes[variant] = str(error)
                tell(note="; ".join(map(": ".join, notes.items())))


def compare_choices() -> None:
    """Compare a choice that was made without a GPU: `flatten` on and off."""
    from fastgrpo.kernels import head as head_kernels
    from fastgrpo.kernels import launch
    from fastgrpo.kernels.head import linear_logprob as anchored

    for size in FLATTEN_SIZES:
        hidden, weight, targets = _operands(size, DTYPE)

        def call(flatten: bool, head: tuple = (hidden, weight, targets)) -> torch.Tensor:
            with torch.no_grad(), mock.patch.object(head_kernels, "flattens", lambda *options: flatten):
                return anchored(*head)[0]

        name = size_name(size)
        different = (call(True) != call(False)).sum().item()
        tell(bars={f"{name}: tokens that flatten gives other bits": at_most(different, 0)})
        bar = f"{name}: time with flatten, of that without"
        if launch.uses_descriptors(hidden, weight):
            times = compare({flatten: partial(call, flatten) for flatten in (True, False)}, ROUNDS, DEVICE, SECONDS)
            tell(bars={bar: at_most(times[True]["median_s"] / times[False]["median_s"], FLATTEN_BAR)})
        else:  # both run the same kernel
            tell(note="flatten has no effect without tensor descriptors")
        del hidden, weight, targets, call


def _operands(size, dtype):
    """Draw hidden states, a weight and targets."""
    n, d, v = size
    hidden, weight = torch.randn(n, d, device=DEVICE).to(dtype), (torch.randn(v, d, device=DEVICE) / d**0.5).to(dtype)
    return hidden, weight, torch.randint(v, (n,), device=DEVICE)


PARTS = {
    "versions": show_versions,
    "check": check_kernels,
    "head": time_head,
    "decode": time_decode,
    "step": time_step,
    "trl": time_trl,
    "race": race_trainers,
    "choices": compare_choices,
    "times": time_kernels,
}

if __name__ == "__main__":
    torch.manual_seed(0)
    PARTS[sys.argv[1]]()

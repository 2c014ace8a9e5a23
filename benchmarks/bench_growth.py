"""Growth of time and memory: the head over tokens and vocabulary, rollouts and training steps over their sizes.

Each axis grows one size and fixes the others (`AXES`). Its points are timed in turns. An exponent of 1 means twice the
time for twice the size. It is fitted over all sizes, and over sizes of at least a quarter of the largest, where fixed
costs are small. No exponent may exceed the exponent of the algorithm:

    head       time 1 in tokens N and vocabulary V, as for its matrix products. Memory 0 in N, because one chunk of
               logits is in memory; at most 1 in V, because a chunk has at least 128 rows, which matters above 131,072
               entries.
    rollout    time 1 in lanes. Up to 2 in the length of completions and prompts, because of attention. Memory 1, for
               keys and values.
    step       time 1 in the completions of a group. Up to 2 in their length. Memory 1, until a micro-batch is full.

    pytest benchmarks/bench_growth.py --benchmark-only

Results are added to results/cpu.jsonl. With FASTGRPO_BENCH_SMALL=1 the sizes are tiny and nothing is written.
"""

import dataclasses
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from pytest_benchmark.fixture import BenchmarkFixture

from benchmarks import bench_step
from benchmarks.batches import make_batch
from benchmarks.compare import compare, rows_of
from benchmarks.growth import last_exponent
from benchmarks.harness import CUDA, SMALL, Bar, at_most, finish
from benchmarks.models import random_policy
from benchmarks.variants import fastgrpo
from fastgrpo import GRPOConfig, GRPOTrainer
from fastgrpo.rollout.engine import RolloutEngine
from fastgrpo.rollout.sampling import SamplingParams

ROUNDS = 2 if SMALL else 5
SECONDS = 30  # no round of an axis starts after this many seconds
SLACK = 0.15  # tolerance of an exponent: over two doublings, times with 10% error give an error of 0.1
STEP_MODEL = "0.8m"
MODEL = bench_step.SIZES[STEP_MODEL]
GROUP = 8  # completions of a prompt, in rollouts


class Axis(NamedTuple):
    """One growing size."""

    part: str  # "head", "rollout" or "step"
    name: str
    sizes: tuple[int, ...]  # increasing
    fixed: str  # the other sizes, in words
    time: float  # maximum exponent of time
    memory: float  # maximum exponent of peak memory
    make: Callable[[int, Path], Callable[[], Any]]  # makes the call for one size, from the size and an empty folder


def head(n: int, v: int) -> Callable[[], Any]:
    """Make the head's forward and backward pass for n tokens, a vocabulary of v, and D = 128."""
    return partial(fastgrpo, make_batch(n, 128, v, length=64, dtype=torch.float32, device="cpu"))


def rollout(lanes: int, prompt: int, length: int) -> Callable[[], None]:
    """Make a rollout of `lanes` completions in flight, none of which ends early."""
    policy = random_policy(MODEL, 4096)
    prompts = torch.randint(MODEL.vocab, (lanes // GROUP, prompt), generator=torch.Generator().manual_seed(0)).tolist()

    def draw() -> None:
        engine = RolloutEngine(policy, max_num_seqs=lanes)  # a new engine, so that its keys and values are measured
        drawn = engine.generate(prompts, GROUP, SamplingParams(max_tokens=length, seed=0))
        assert all(len(rollout.ids) == length for rollout in drawn)

    return draw


def step(folder: Path, group: int, length: int) -> Callable[[], Any]:
    """Make a training step: 4 prompts of 8 tokens with `group` completions of `length` tokens, and a reference."""
    config = GRPOConfig(
        output_dir=str(folder / "run"), prompts_per_step=4, num_generations=group, max_completion_length=length,
        max_steps=10_000, device="cpu", max_num_seqs=4 * group, beta=0.04,
    )  # fmt: skip
    bench_step.save_model(folder / "model", STEP_MODEL)
    trainer = GRPOTrainer(str(folder / "model"), bench_step.parity, config, bench_step.make_rows(STEP_MODEL))
    making = trainer.collector
    making.sampling = dataclasses.replace(making.sampling, stop_token_ids=())  # no token ends a completion
    trainer.step()  # allocates the optimizer's state
    return trainer.step


def powers(first: int, last: int, factor: int = 4) -> tuple[int, ...]:
    """Return first, first * factor, ... up to last; with FASTGRPO_BENCH_SMALL=1 two small sizes."""
    sizes = [first]
    while sizes[-1] < last and not SMALL:
        sizes.append(sizes[-1] * factor)
    return (8, 16) if SMALL else tuple(sizes)


AXES = (
    Axis("head", "tokens N", powers(256, 16_384), "V = 16,384", 1, 0, lambda n, _: head(8 * n if SMALL else n, 16_384)),
    Axis("head", "vocabulary V", powers(4096, 262_144), "N = 512", 1, 1, lambda v, _: head(512, v)),
    Axis("rollout", "lanes", powers(8, 512), "64 + 64 tokens", 1, 1, lambda n, _: rollout(n, 64, 64)),
    Axis("rollout", "tokens of a completion", powers(32, 1024, 2), "32 lanes, prompts of 64 tokens", 2, 1,
         lambda n, _: rollout(32, 64, n)),
    Axis("rollout", "tokens of a prompt", powers(32, 2048), "32 lanes, 32 tokens drawn", 2, 1,
         lambda n, _: rollout(32, n, 32)),
    Axis("step", "completions of a group", powers(2, 32, 2), "32 tokens", 1, 1,
         lambda n, folder: step(folder, n, 32)),
    Axis("step", "tokens of a completion", powers(16, 256, 2), "groups of 8", 2, 1,
         lambda n, folder: step(folder, 8, n)),
)  # fmt: skip


def judged(axis: Axis, rows: list[dict[str, Any]]) -> dict[str, Bar]:
    """Compare the exponents of an axis at its large end with their limits."""
    name = f"{axis.part} over {axis.name}"
    return {
        f"{name}, time": at_most(last_exponent(rows, "ms_p50"), axis.time + SLACK),
        f"{name}, memory": at_most(last_exponent(rows, "peak_mib"), axis.memory + SLACK),
    }


@pytest.mark.skipif(CUDA, reason="growth is measured on a CPU")
@pytest.mark.parametrize("axis", AXES, ids=lambda axis: f"{axis.part} over {axis.name}".replace(" ", "-"))
def test_growth(benchmark: BenchmarkFixture, capsys: pytest.CaptureFixture[str], tmp_path: Path, axis: Axis) -> None:
    calls = {}
    for size in axis.sizes:
        (tmp_path / str(size)).mkdir()
        calls[size] = axis.make(size, tmp_path / str(size))
    results = compare(calls, ROUNDS, "cpu", SECONDS)
    rows = rows_of(
        results, None, {size: {"variant": "fastgrpo", "size": size} for size in results},
        benchmark="growth", part=axis.part, axis=axis.name, fixed=axis.fixed, dtype="float32",
        expected={"time": axis.time, "memory": axis.memory},
    )  # fmt: skip
    finish(benchmark, capsys, rows, judged(axis, rows), calls[axis.sizes[0]], 1)

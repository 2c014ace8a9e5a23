"""Whole training steps of a pretrained model on a CPU: fastgrpo's GRPOTrainer against TRL's.

SmolLM2-135M-Instruct in fp32 answers 4 questions with 8 completions each of at most 64 tokens, without a reference
(beta = 0) and with one (beta = 0.04). Each trainer runs in its own process. Its memory is the peak resident memory of
the process: weights, optimizer, reference, and the temporaries of a step. Neither trainer recomputes activations. TRL
trains on 8 completions at a time, its default: with all 32, the steps of the race were slower, in twice the memory.

    FASTGRPO_SMOLLM2=models/smollm2-135m pytest benchmarks/bench_pretrained.py --benchmark-only

The variable names a folder made by `python -m fastgrpo.recipes.smollm2 FOLDER`. Results are added to results/cpu.jsonl.
With FASTGRPO_BENCH_SMALL=1 it runs a tiny random model and writes nothing.
"""

import os
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from pytest_benchmark.fixture import BenchmarkFixture

from benchmarks import stepwise
from benchmarks.bench_step import make_rows, middle_step, parity, save_model
from benchmarks.compare import rows_of
from benchmarks.contestants import Contest, Contestant, Entry, contest, taking_part
from benchmarks.harness import CUDA, SMALL, Bar, at_least, at_most, finish
from benchmarks.models import unpack
from fastgrpo import GRPOConfig, GRPOTrainer

MODEL = os.environ.get("FASTGRPO_SMOLLM2")
ROUNDS, SECONDS = (2, 9) if SMALL else (3, 300)  # no round starts after this many seconds
PROMPTS, GROUP, MAX_TOKENS = (2, 4, 8) if SMALL else (4, 8, 64)
BETAS = (0.04,) if SMALL else (0.0, 0.04)
SPEED_BAR, MEMORY_BAR = 3.0, 0.45  # ratio to TRL's samples per second, and to its memory


def questions() -> list[dict[str, Any]]:
    """Return prompts: sums, as messages for the model's own chat template."""
    if SMALL:
        return make_rows("0.8m")
    pairs = [(a, a * 7 % 50) for a in range(10, 74)]
    texts = [f"What is {a} + {b}? Explain how you add the two numbers." for a, b in pairs]
    return [{"prompt": [{"role": "user", "content": text}]} for text in texts]


def our_entry(path: str, folder: str, beta: float) -> Entry:
    """Create fastgrpo's trainer for the model in `path`. Its variant runs one step and returns the metrics."""
    config = GRPOConfig(
        output_dir=folder, prompts_per_step=PROMPTS, num_generations=GROUP, max_completion_length=MAX_TOKENS, beta=beta,
        max_steps=10_000, device="cpu", gradient_checkpointing=False,
    )  # fmt: skip
    return Entry({"fastgrpo": GRPOTrainer(path, parity, config, questions()).step})


def trl_entry(path: str, folder: str, beta: float) -> Entry:
    """Create TRL's trainer for the model in `path`. Its variant runs one step."""
    return stepwise.trl_entry(
        "trl", path, parity, questions(),
        output_dir=folder, per_device_train_batch_size=GROUP, gradient_accumulation_steps=PROMPTS,
        num_generations=GROUP, max_completion_length=MAX_TOKENS, beta=beta, use_cpu=True, bf16=False,
        gradient_checkpointing=False, model_init_kwargs={"dtype": "float32"},
    )  # fmt: skip


def contestants_of(folder: Path, beta: float) -> tuple[list[Contestant], dict[str, str]]:
    """Return the trainers, and the reason for each missing one."""
    path = folder / "model"
    if SMALL:
        save_model(path, "0.8m")
    else:
        unpack(MODEL, path)
    entries = {"fastgrpo": "our_entry", "trl": "trl_entry"}
    missing = {} if find_spec("trl") else {"trl": "not installed: No module named 'trl'"}
    contestants = [
        Contestant(kind, f"benchmarks.bench_pretrained:{entry}", "cpu", path=str(path), folder=str(folder / kind),
                   beta=beta)
        for kind, entry in entries.items() if kind not in missing
    ]  # fmt: skip
    return contestants, missing


def judged(beta: float, found: Contest) -> tuple[list[dict[str, Any]], dict[str, Bar]]:
    """Return rows and bars of a contest."""
    results, samples = found.results, PROMPTS * GROUP
    extras = {name: {"samples_per_s": round(samples / result["median_s"], 2)} for name, result in results.items()}
    extras["fastgrpo"]["stages_ms"] = middle_step(found)[1]
    rows = rows_of(
        results, found.missing, extras, benchmark="pretrained", model="0.8m" if SMALL else "SmolLM2-135M",
        case=f"beta {beta:g}", prompts=PROMPTS, group=GROUP, max_tokens=MAX_TOKENS, beta=beta, dtype="float32",
    )  # fmt: skip
    bars = {}
    if "trl" in results:
        mine, other = results["fastgrpo"], results["trl"]
        bars = {
            f"samples a second, times trl, beta {beta:g}": at_least(other["median_s"] / mine["median_s"], SPEED_BAR),
            f"peak memory, of trl, beta {beta:g}": at_most(mine["peak_bytes"] / other["peak_bytes"], MEMORY_BAR),
        }
    return rows, bars


@pytest.mark.skipif(CUDA, reason="bench_step.py measures steps on a GPU")
@pytest.mark.skipif(not (SMALL or MODEL), reason="FASTGRPO_SMOLLM2 names no folder")
@pytest.mark.parametrize("beta", BETAS)
def test_pretrained(
    benchmark: BenchmarkFixture, capsys: pytest.CaptureFixture[str], tmp_path: Path, beta: float
) -> None:
    contestants, absent = contestants_of(tmp_path, beta)
    with taking_part(contestants):
        found = contest(contestants, ROUNDS, absent, SECONDS, whole=True)
        rows, bars = judged(beta, found)
        finish(benchmark, capsys, rows, bars, lambda: found.again("fastgrpo"), 1, missing=found.missing)

"""Training on a CPU in bfloat16 against float32: whole steps and rollouts, and the error of the log-probs.

SmolLM2-135M-Instruct learns sums in GSM8K's template. A step has 4 prompts with 8 completions each of at most 64 tokens
and a KL term. A rollout draws as many completions without stop tokens, so that both precisions draw the same number of
tokens. Each precision runs in its own process. The error is measured on log-probs of completions drawn by the model in
float32: bfloat16 against the published weights in float32, and against the weights rounded to bfloat16 and computed in
float32, which isolates the error of the computation.

    FASTGRPO_SMOLLM2=models/smollm2-135m pytest benchmarks/bench_dtype.py --benchmark-only

The variable names a folder made by `python -m fastgrpo.recipes.smollm2 FOLDER`. Results are added to results/cpu.jsonl.
With FASTGRPO_BENCH_SMALL=1 it runs a tiny random model and writes nothing.
"""

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from pytest_benchmark.fixture import BenchmarkFixture

from benchmarks import bench_step
from benchmarks.compare import rows_of
from benchmarks.contestants import Contest, Contestant, Entry, contest, taking_part
from benchmarks.harness import CUDA, SMALL, Bar, at_least, finish
from fastgrpo import GRPOConfig, GRPOTrainer
from fastgrpo.data.prompts import to_prompt
from fastgrpo.data.records import Batch, Sample
from fastgrpo.policy.load import cast, load_policy
from fastgrpo.policy.model import Policy
from fastgrpo.rewards.gsm8k import correctness, digits_reward, format_reward, length_reward
from fastgrpo.rollout.engine import RolloutEngine
from fastgrpo.rollout.sampling import SamplingParams
from fastgrpo.tasks.gsm8k import sums, to_row

MODEL = os.environ.get("FASTGRPO_SMOLLM2")
DTYPES = ("float32", "bfloat16")
ROUNDS = 2 if SMALL else 5
PROMPTS, GROUP, MAX_TOKENS = (2, 4, 6) if SMALL else (4, 8, 64)
BETA = 0.04
BAR = 1.5  # speed relative to float32


def make_rows() -> list[dict[str, Any]]:
    """Return the training rows: sums, or words of the small model."""
    return bench_step.make_rows("0.8m") if SMALL else [to_row(row, None, True) for row in sums()[0][:64]]


def rollout_of(policy: Policy, prompts: list[list[int]]) -> tuple[RolloutEngine, SamplingParams]:
    """Create an engine for all completions at once, and sampling parameters without stop tokens."""
    return RolloutEngine(policy, max_num_seqs=len(prompts) * GROUP), SamplingParams(max_tokens=MAX_TOKENS, seed=0)


def our_entry(path: str, folder: str, dtype: str) -> Entry:
    """Create the trainer of one precision. One variant runs a step and returns its metrics, the other a rollout."""
    config = GRPOConfig(
        output_dir=folder, prompts_per_step=PROMPTS, num_generations=GROUP, max_completion_length=MAX_TOKENS,
        beta=BETA, max_steps=10_000, device="cpu", dtype=dtype, gradient_checkpointing=False, use_liger_kernel=False,
        max_num_seqs=PROMPTS * GROUP,
    )  # fmt: skip
    rewards = bench_step.parity if SMALL else [correctness, format_reward, length_reward, digits_reward]
    trainer = GRPOTrainer(path, rewards, config, make_rows())
    prompts = [to_prompt(row, trainer.tokenizer, {}).ids for row in make_rows()[:PROMPTS]]
    engine, sampling = rollout_of(trainer.policy, prompts)

    def rollout() -> None:
        engine.generate(prompts, GROUP, sampling)

    return Entry({f"fastgrpo, {dtype}, step": trainer.step, f"fastgrpo, {dtype}, rollout": rollout})


@torch.no_grad()
def errors(path: str) -> dict[str, float]:
    """Measure the mean and largest error in nats of bfloat16's log-probs, and the mean negative log-prob.

    The error is the difference to float32 with the published weights, and with the rounded ones.
    """
    (exact, tokenizer), (policy, _) = (load_policy(path, dtype=dtype, device="cpu") for dtype in DTYPES)
    prompts = [to_prompt(row, tokenizer, {}).ids for row in make_rows()[:PROMPTS]]
    engine, sampling = rollout_of(exact, prompts)
    rollouts = engine.generate(prompts, GROUP, sampling)
    owners = [prompt for prompt in prompts for _ in range(GROUP)]
    samples = [Sample(prompt, rollout.ids, advantage=0.0) for prompt, rollout in zip(owners, rollouts, strict=True)]
    batch = Batch.pack(samples, torch.device("cpu"))
    found, published = policy.logps(batch), exact.logps(batch)
    cast(exact.module, torch.bfloat16)
    cast(exact.module, torch.float32)
    gaps = {"published": (found - published).abs(), "rounded": (found - exact.logps(batch)).abs()}
    figures = {"error_logp": gaps["published"].mean(), "error_logp_max": gaps["published"].max(),
               "error_logp_rounded": gaps["rounded"].mean(), "error_logp_rounded_max": gaps["rounded"].max(),
               "mean_nll": -published.mean()}  # fmt: skip
    return {name: round(value.item(), 5) for name, value in figures.items()}


def judged(found: Contest, measured: dict[str, float]) -> tuple[list[dict[str, Any]], dict[str, Bar]]:
    """Return rows and bars of a contest; `measured` is the result of `errors`."""
    extras, bars, samples = {}, {}, PROMPTS * GROUP
    for name, result in found.results.items():
        _, dtype, work = name.split(", ")
        drawn = samples * MAX_TOKENS
        if work == "step":  # the first call is the warm-up
            steps = found.values[name][1:]
            drawn = samples * sum(step["completions/mean_length"] for step in steps) / len(steps)
        extras[name] = {
            "case": work, "samples_per_s": round(samples / result["median_s"], 3),
            "tokens_per_s": round(drawn / result["median_s"]),
        }  # fmt: skip
        if dtype == "bfloat16":
            ratio = found.results[f"fastgrpo, float32, {work}"]["median_s"] / result["median_s"]
            bars[f"times float32, {work}"] = at_least(ratio, BAR)
            extras[name] |= measured
    rows = rows_of(
        found.results, found.missing, extras, benchmark="dtype", model="embedded" if SMALL else "SmolLM2-135M",
        prompts=PROMPTS, group=GROUP, max_tokens=MAX_TOKENS, beta=BETA, dtype=" and ".join(DTYPES),
    )  # fmt: skip
    return rows, bars


def obstacle() -> str | None:
    """Return why the benchmark cannot run, or None."""
    if CUDA:
        return "it compares the precisions of a CPU"
    if SMALL:
        return None
    if MODEL is None:
        return "FASTGRPO_SMOLLM2 names no folder"
    return None if torch.cpu._is_avx512_bf16_supported() else "the CPU has neither avx512_bf16 nor amx_bf16"


@pytest.mark.skipif(obstacle() is not None, reason=str(obstacle()))
def test_dtype(benchmark: BenchmarkFixture, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = MODEL
    if SMALL:
        path = str(tmp_path / "model")
        bench_step.save_model(Path(path), "0.8m")
    measured = errors(path)
    contestants = [
        Contestant(
            f"fastgrpo, {dtype}", "benchmarks.bench_dtype:our_entry", "cpu",
            path=path, folder=str(tmp_path / dtype), dtype=dtype,
        )
        for dtype in DTYPES
    ]  # fmt: skip
    with taking_part(contestants):
        found = contest(contestants, ROUNDS)
        rows, bars = judged(found, measured)
        finish(benchmark, capsys, rows, bars, lambda: found.again("fastgrpo, bfloat16, rollout"), 1)

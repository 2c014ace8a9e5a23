"""Rollouts of SmolLM2-135M on a CPU: fastgrpo's engine against vLLM's, in fp32, with random prompts.

All completions of a case have their own length, without stop tokens, and both engines return the log-prob of each
token. Each engine runs in its own process, and vLLM in an environment of its own, which `make test-vllm` creates.

    FASTGRPO_SMOLLM2=models/smollm2-135m pytest benchmarks/bench_vllm.py --benchmark-only

The variable names a folder made by `python -m fastgrpo.recipes.smollm2 FOLDER`. Results are added to results/cpu.jsonl.
With FASTGRPO_BENCH_SMALL=1 it runs a tiny random model without vLLM, and writes nothing.
"""

import os
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from pytest_benchmark.fixture import BenchmarkFixture

from benchmarks.bench_step import save_model
from benchmarks.compare import rows_of
from benchmarks.contestants import ROOT, Contestant, Entry, contest, taking_part
from benchmarks.harness import CUDA, SMALL, Bar, at_least, finish
from benchmarks.models import unpack
from fastgrpo.policy.load import load_policy
from fastgrpo.rollout.engine import RolloutEngine
from fastgrpo.rollout.sampling import SamplingParams

MODEL = os.environ.get("FASTGRPO_SMOLLM2")
VLLM = Path(os.environ.get("FASTGRPO_VLLM", ROOT / ".venv-vllm" / "bin" / "python"))
ROUNDS, TOKENS = (2, 4) if SMALL else (3, 128)
VOCABULARY = 30 if SMALL else 49_000
BARS = {"groups": 1.6, "alone": 1.2, "ragged": 1.0, "long prompts": 1.0}  # speed over vLLM


def make_cases() -> dict[str, dict[str, Any]]:
    """Return the prompts, the group size and the new tokens of the completions of each prompt, by case."""
    generator = torch.Generator().manual_seed(0)

    def case(count: int, prompt_tokens: int, group: int = 1, lengths: list[int] | None = None) -> dict[str, Any]:
        size = (count // 8, prompt_tokens // 20) if SMALL else (count, prompt_tokens)
        prompts = torch.randint(3, VOCABULARY, size, generator=generator).tolist()
        return {"prompts": prompts, "group": group, "lengths": (lengths or [TOKENS] * count)[: len(prompts)]}

    ragged = torch.randn(64, generator=generator).mul(0.8).exp().mul(TOKENS / 4).clamp(1, TOKENS).int().tolist()
    return {
        "groups": case(8, 100, 8), "alone": case(32, 100), "ragged": case(64, 100, lengths=ragged),
        "long prompts": case(8, 1000),
    }  # fmt: skip


def our_entry(path: str, cases: dict[str, dict[str, Any]]) -> Entry:
    """Create the engine for the model in `path`, with a variant per case."""
    engine = RolloutEngine(load_policy(path, dtype="float32", device="cpu")[0])
    sampling = SamplingParams(max_tokens=TOKENS)

    def roll(prompts: list[list[int]], group: int, lengths: list[int]) -> None:
        for prompt, limit in zip(prompts, lengths, strict=True):
            engine.add_request(prompt, group, sampling, max_tokens=[limit] * group)
        drawn = 0
        while engine.has_unfinished_requests():
            drawn += sum(len(sample.ids) for samples in engine.step().values() for sample in samples)
        assert drawn == group * sum(lengths)

    return Entry({f"{name}/fastgrpo": partial(roll, **case) for name, case in cases.items()})


def contestants_of(path: Path, cases: dict[str, dict[str, Any]]) -> tuple[list[Contestant], dict[str, str]]:
    """Return the engines, and the reason for each missing one."""
    if SMALL:
        save_model(path, "0.8m")
    else:
        unpack(MODEL, path)
    options, missing = {"path": str(path), "cases": cases}, {}
    contestants = [Contestant("fastgrpo", "benchmarks.bench_vllm:our_entry", "cpu", **options)]
    if VLLM.exists() and not SMALL:
        contestants.append(Contestant("vLLM", "benchmarks.vllm_engine:entry", "cpu", python=str(VLLM), **options))
    else:
        missing["vLLM"] = f"{VLLM} is missing: make .venv-vllm/.installed"
    return contestants, missing


@pytest.mark.skipif(CUDA, reason="it compares engines on a CPU")
@pytest.mark.skipif(not (SMALL or MODEL), reason="FASTGRPO_SMOLLM2 names no folder")
def test_vllm(benchmark: BenchmarkFixture, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    cases, rows, bars = make_cases(), [], dict[str, Bar]()
    contestants, absent = contestants_of(tmp_path / "model", cases)
    with taking_part(contestants):
        found = contest(contestants, ROUNDS, absent)
        for name, case in cases.items():
            mine = {full.partition("/")[2]: r for full, r in found.results.items() if full.startswith(f"{name}/")}
            tokens = case["group"] * sum(case["lengths"])
            extras = {
                one: {"tokens_per_s": round(tokens / r["median_s"]), **found.about[one]} for one, r in mine.items()
            }
            rows += rows_of(
                mine, found.missing, extras, benchmark="vllm", model="0.8m" if SMALL else "SmolLM2-135M", case=name,
                prompts=len(case["prompts"]), group=case["group"], new_tokens=tokens, dtype="float32",
            )  # fmt: skip
            if "vLLM" in mine:
                ratio = mine["vLLM"]["median_s"] / mine["fastgrpo"]["median_s"]
                bars[f"speed over vLLM, {name}"] = at_least(ratio, BARS[name])
        finish(benchmark, capsys, rows, bars, lambda: found.again("groups/fastgrpo"), 1, missing=found.missing)

"""Speculative decoding in the engine: rollouts with and without drafts from what a group has written.

SmolLM2-135M-Instruct in fp32 answers problems of GSM8K under the task's own template. The cases:

    batch 1, greedy           one completion at a time, as an evaluation draws it
    batch 1, temperature 1    one completion at a time
    tail, temperature 1       4 problems with 8 completions each, as training draws them, whose limits are long-tailed;
                              the last quarter of the completions is timed, and the rest is drawn before

    FASTGRPO_SMOLLM2=models/smollm2-135m FASTGRPO_GSM8K=FOLDER pytest benchmarks/bench_speculative.py --benchmark-only

The first variable names a folder that `python -m fastgrpo.recipes.smollm2 FOLDER` has made, and the second one with
GSM8K's test.jsonl. The variants take turns, with the same seeds, and both draw the same tokens: a completion where they
differ, because a random number lay at the border of two tokens, is counted and left out of no figure. Results are added
to results/cpu.jsonl. With FASTGRPO_BENCH_SMALL=1 a random model of a few weights runs, and nothing is written.
"""

import os
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from pytest_benchmark.fixture import BenchmarkFixture

from benchmarks.answers import Work, load_work
from benchmarks.compare import in_turns, rows_of
from benchmarks.harness import CUDA, SMALL, Bar, at_least, finish
from benchmarks.models import EMBEDDED, random_policy
from fastgrpo.data.records import Rollout
from fastgrpo.rollout.engine import RolloutEngine
from fastgrpo.rollout.sampling import SamplingParams

MODEL, DATA = os.environ.get("FASTGRPO_SMOLLM2"), os.environ.get("FASTGRPO_GSM8K")
DRAFTED = 7  # num_speculative_tokens
ROUNDS = {"batch 1": 2 if SMALL else 3, "tail": 2 if SMALL else 9}  # a tail is short, so its times scatter more
PROMPTS, GROUP, NEW_TOKENS = (2, 4, 12) if SMALL else (4, 8, 160)
LAST = 0.25  # the share of the completions that the tail is
CASES = {"batch 1, greedy": 1.3, "batch 1, temperature 1": 1.3, "tail, temperature 1": 1.2}  # and the bar of each
NEVER_BELOW = 0.97  # of the speed without drafts, in every case
VARIANTS = {"fastgrpo": 0, "fastgrpo, drafts": DRAFTED}


def make_work() -> Work:
    """Load the model and the prompts, or make small random ones."""
    if SMALL:
        return Work(random_policy(EMBEDDED, 64), [[1, 2, 3, 1, 2], [4, 5, 4, 5, 4]], (), NEW_TOKENS)
    return load_work(MODEL, DATA, PROMPTS, NEW_TOKENS)


def long_tailed() -> list[int]:
    """Return the limit of each completion of the tail's rollout: log-normal draws, whose median is half of the most."""
    draws = torch.randn(PROMPTS * GROUP, generator=torch.Generator().manual_seed(1)).mul(0.8).exp() * NEW_TOKENS / 2
    return draws.clamp(1, NEW_TOKENS).int().tolist()


def drawing(work: Work, case: str, drafted: int) -> tuple[Callable[[], float], RolloutEngine, list[Rollout]]:
    """Make a function that draws once and returns the seconds of what the case times.

    Args:
        work: What is drawn.
        case: A key of `CASES`.
        drafted: Most tokens that are drafted at once; 0 for none.

    Returns:
        The function, its engine, and a list that holds the completions of the latest call.
    """
    tail = case.startswith("tail")
    lanes = PROMPTS * GROUP if tail else 1
    engine = RolloutEngine(work.policy, max_num_seqs=lanes, num_speculative_tokens=drafted)
    sampling = SamplingParams(
        temperature=0 if case.endswith("greedy") else 1, max_tokens=work.max_tokens, stop_token_ids=work.stops, seed=0
    )
    limits, latest = long_tailed() if tail else [NEW_TOKENS] * PROMPTS, []
    group = GROUP if tail else 1

    def draw() -> float:
        outputs = {}
        for i, prompt in enumerate(work.prompts):
            mine = limits[i * group : (i + 1) * group]
            engine.add_request(prompt, group, sampling, request_id=i, max_tokens=mine)
        if tail:  # the rollout up to its last quarter is not timed
            while sum(running is not None for running in engine.running) > LAST * lanes or not engine.running:
                outputs |= {output.request_id: output.rollouts for output in engine.step()}
        start = time.perf_counter()
        while engine.has_unfinished_requests():
            outputs |= {output.request_id: output.rollouts for output in engine.step()}
        seconds = time.perf_counter() - start
        latest[:] = [rollout for i in range(len(work.prompts)) for rollout in outputs[i]]
        return seconds

    return draw, engine, latest


def judged(case: str, seconds: dict[str, float]) -> dict[str, Bar]:
    """Compare the speed with drafts to that without.

    Args:
        case: A key of `CASES`.
        seconds: Median seconds of each variant.
    """
    ratio = seconds["fastgrpo"] / seconds["fastgrpo, drafts"]
    return {
        f"times without drafts, {case}": at_least(ratio, CASES[case]),
        f"never slower, {case}": at_least(ratio, NEVER_BELOW),
    }


def compared(draws: dict[str, list[Rollout]]) -> dict[str, Any]:
    """Count how completions with and without drafts differ.

    Args:
        draws: The completions of each variant.

    Returns:
        How many have other tokens, and the largest difference of a log-prob among the others.
    """
    pairs = list(zip(*draws.values(), strict=True))
    gaps = [(a.logps - b.logps).abs().max().item() for a, b in pairs if a.ids == b.ids]
    return {"completions": len(pairs), "differ": len(pairs) - len(gaps), "logp_gap": max(gaps, default=0.0)}


@pytest.mark.skipif(CUDA, reason="drafts take effect on a CPU")
@pytest.mark.skipif(not (SMALL or (MODEL and DATA)), reason="FASTGRPO_SMOLLM2 and FASTGRPO_GSM8K name no folders")
@pytest.mark.parametrize("case", CASES)
def test_speculative(benchmark: BenchmarkFixture, capsys: pytest.CaptureFixture[str], case: str) -> None:
    work = make_work()
    made = {name: drawing(work, case, drafted) for name, drafted in VARIANTS.items()}
    for draw, _, _ in made.values():  # the first call warms up
        draw()
    results = in_turns(
        {name: draw for name, (draw, _, _) in made.items()}, dict.fromkeys(made), ROUNDS[case.partition(",")[0]]
    )
    differences = compared({name: latest for name, (_, _, latest) in made.items()})
    tokens = sum(len(rollout.ids) for rollout in made["fastgrpo"][2])
    measured = made["fastgrpo, drafts"][1].metrics()
    extras = {
        "fastgrpo, drafts": {
            "accepted": round(measured["rollout/draft_acceptance_rate"], 3),
            "tokens_per_step": round(measured["rollout/tokens_per_step"], 3),
            **differences,
        }
    }
    rows = rows_of(
        results, None, extras, benchmark="speculative", model="embedded" if SMALL else "SmolLM2-135M", case=case,
        prompts=len(work.prompts), new_tokens=NEW_TOKENS, drawn_tokens=tokens, drafted=DRAFTED, dtype="float32",
    )  # fmt: skip
    bars = judged(case, {name: result["median_s"] for name, result in results.items()})
    finish(benchmark, capsys, rows, bars, made["fastgrpo, drafts"][0], 1)

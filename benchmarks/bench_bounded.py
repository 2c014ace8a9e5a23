"""The head with a bounded backward on answers of a real model: kept columns, errors of the gradients, and time.

SmolLM2-135M-Instruct in fp32 draws 8 answers to each prompt at temperature 1, as in training. The cases:

    GSM8K, before training    4 problems of GSM8K in the task's template, at most 64 tokens
    sums, before training     8 prompts of the task `sums`, which `make real` trains on, at most 40 tokens
    sums, after training      the same prompts, answered by the newest checkpoint of `make real`

The last two differ only in the training. Each variant computes the clipped GRPO loss and its gradients of hidden
[N, D] and weight [V, D], forward and backward: `fastgrpo` exactly, `fastgrpo, tau 0.01` and so on with this
`backward_tolerance`, full logits, TRL's head, and Liger's head on answers padded to the longest. Errors are relative to
the exact gradients, in the Frobenius norm. Cut-cross-entropy's kernels need a GPU, so its filter is emulated, without a
time.

    FASTGRPO_SMOLLM2=models/smollm2-135m FASTGRPO_SMOLLM2_TRAINED=runs/smollm2-135m-sums/checkpoint-120 \
      FASTGRPO_GSM8K=FOLDER pytest benchmarks/bench_bounded.py --benchmark-only

The first variable names a folder made by `python -m fastgrpo.recipes.smollm2 FOLDER`, the last one a folder with
GSM8K's test.jsonl. A case without its folders is skipped, with the reason. Results are added to results/cpu.jsonl. With
FASTGRPO_BENCH_SMALL=1 it runs a tiny random model and writes nothing.
"""

import os
from functools import partial
from typing import Any

import pytest
from pytest_benchmark.fixture import BenchmarkFixture

from benchmarks.answers import Answers, Work, draw, load_work
from benchmarks.batches import relative_error
from benchmarks.bench_loss import assert_same_gradients
from benchmarks.compare import compare, rows_of
from benchmarks.harness import CUDA, DEVICE, SMALL, Bar, at_most, finish
from benchmarks.models import EMBEDDED, random_policy
from benchmarks.peers import filtered_gradients, peers
from benchmarks.variants import Gradients, fastgrpo, fastgrpo_bounded, full_logits, kept_and_dropped

TAUS = (0.1, 0.03, 0.01, 0.003, 0.001)
# Case -> the variable for the model's folder, the variable for the problems' folder (None: sums), number of prompts,
# maximum tokens, and the bar of the time relative to the exact head.
CASES = {
    "GSM8K, before training": ("FASTGRPO_SMOLLM2", "FASTGRPO_GSM8K", 4, 64, 0.75),
    "sums, before training": ("FASTGRPO_SMOLLM2", None, 8, 40, 0.75),
    "sums, after training": ("FASTGRPO_SMOLLM2_TRAINED", None, 8, 40, 0.6),
}
ERROR = 4e-3  # error of dH and dW that rounding to bf16 causes
ROUNDS, SECONDS = (2, 2) if SMALL else (9, 240)  # timed calls per variant; no round starts after this many seconds
FILTERED = "cut-cross-entropy's filter, emulated"


def named(tau: float) -> str:
    """Return the name of the variant with tolerance tau; 0 is the exact head."""
    return f"fastgrpo, tau {tau:g}" if tau else "fastgrpo"


def unset(case: str) -> list[str]:
    """Return the variables of a case that are not set."""
    return [name for name in CASES[case][:2] if name and not os.environ.get(name)]


def make_work(case: str) -> Work:
    """Load the model and the prompts of a case, or make small random ones."""
    model, problems, prompts, max_tokens, _ = CASES[case]
    if not SMALL:
        return load_work(os.environ[model], problems and os.environ[problems], prompts, max_tokens)
    policy = random_policy(EMBEDDED._replace(vocab=1500, tied=False), 64)
    policy.head.weight.data *= 25  # otherwise all tokens would be equally likely
    return Work(policy, [[1, 2, 3], [4, 5]], (0, *range(100, 200)), 9)


def errors(found: Gradients, exact: Gradients) -> dict[str, float]:
    """Return the relative errors of gradients as fields of a row."""
    pairs = zip(("error_hidden", "error_weight"), found, exact, strict=True)
    return {name: relative_error(mine, theirs) for name, mine, theirs in pairs}


def figures_of(answers: Answers) -> dict[str, dict[str, Any]]:
    """Return kept columns, dropped mass and errors of each tolerance, as fields of a row by the name of the variant."""
    exact, figures = fastgrpo(answers.batch), {}
    for tau in TAUS:
        kept, dropped = kept_and_dropped(answers.batch, tau)
        found = errors(fastgrpo_bounded(tau)(answers.batch), exact)
        figures[named(tau)] = {"tolerance": tau, "kept": kept, "dropped_of_tolerance": dropped / tau, **found}
    found, kept = filtered_gradients(answers.batch)
    figures[FILTERED] = {"kept": kept, **errors(found, exact)}
    return figures


def judged(case: str, seconds: dict[str, float], figures: dict[str, dict[str, Any]]) -> dict[str, Bar]:
    """Return the bars: the time of the largest tolerance with small enough errors, and the bound of all tolerances.

    `seconds` has the median of each variant, and `figures` is the result of `figures_of`.
    """
    precise = [tau for tau in TAUS if max(figures[named(tau)][f"error_{of}"] for of in ("hidden", "weight")) <= ERROR]
    tau = max(precise, default=0.0)  # the exact head if every tolerance is too coarse
    dropped = max(figures[named(tau)]["dropped_of_tolerance"] for tau in TAUS)
    return {
        f"time at tau {tau:g}, of exact, {case}": at_most(seconds[named(tau)] / seconds["fastgrpo"], CASES[case][-1]),
        f"most dropped mass, of tau, {case}": at_most(dropped, 1.0),
    }


@pytest.mark.skipif(CUDA, reason="the rows and the bars are those of a CPU")
@pytest.mark.parametrize("case", CASES)
def test_bounded(benchmark: BenchmarkFixture, capsys: pytest.CaptureFixture[str], case: str) -> None:
    if not SMALL and (names := unset(case)):
        reason = f"{case}: no folder in {' and '.join(names)}"
        with capsys.disabled():
            print(f"\nskipped: {reason}")
        pytest.skip(reason)
    answers = draw(make_work(case))
    batch, padded = answers.batch, answers.padded()
    heads = {named(tau): fastgrpo_bounded(tau) if tau else fastgrpo for tau in (0.0, *TAUS)}
    others, missing = peers(compiled=False)
    missing.pop("cut-cross-entropy", None)
    heads |= {"full logits": full_logits, **others}
    variants = {name: partial(head, padded if name == "liger" else batch) for name, head in heads.items()}
    exact = fastgrpo(batch)
    for name in ("full logits", *others):
        dh, dw = variants[name]()
        assert_same_gradients((dh[answers.places] if name == "liger" else dh, dw), exact)
    del exact, dh, dw
    figures = figures_of(answers)
    results = compare(variants, ROUNDS, DEVICE, SECONDS)
    (n, d), v = batch.hidden.shape, len(batch.weight)
    about = {"benchmark": "bounded", "model": "embedded" if SMALL else "SmolLM2-135M", "case": case, "n": n, "d": d,
             "v": v, "padded_n": len(padded.hidden), "dtype": "float32"}  # fmt: skip
    rows = rows_of(results, missing, figures, **about)
    untimed = rows_of({}, {FILTERED: ""}, **about)[0] | figures[FILTERED]
    del untimed["missing"]
    bars = judged(case, {name: result["median_s"] for name, result in results.items()}, figures)
    finish(benchmark, capsys, [*rows, untimed], bars, variants["fastgrpo"], 1, missing=missing)

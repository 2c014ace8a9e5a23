"""Asynchronous rollouts: samples/s and accuracy of training with max_staleness 0, 1 and 2.

    python -m benchmarks.staleness embedded|smollm2

A vLLM server has one core, and the trainer another one, each with one thread. Tasks and settings are those of the race
(race/tasks.py); all runs have the same importance weights. Each run makes the same steps. The first and the last ones
are not timed, because then batches are begun or used up faster than in the steps between. `embedded` runs in turns over
three seeds, and ends with the greedy accuracy on held-out prompts; `smollm2` makes a few steps of one seed.

vLLM has no attention on CPUs for heads of 16, so the heads of the embedded model are 2 of 32 instead of 4 of 16.
"""

import os
import statistics
import sys
import tempfile
import types
from collections.abc import Iterator
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import torch
from tqdm import tqdm

from benchmarks.compare import append, rows_of
from benchmarks.contestants import Contestant, Entry, taking_part
from benchmarks.harness import SMALL, Bar, at_least
from benchmarks.models import save_weights
from benchmarks.race.examiner import Examiner
from benchmarks.race.tasks import TASKS, RaceTask, warm_start
from benchmarks.race.trainers import WEIGHTS, our_trainer
from benchmarks.report import table
from benchmarks.vllm_server import PYTHON, VLLMServer
from fastgrpo.evaluation.estimators import wilson
from fastgrpo.policy.characters import character_model
from fastgrpo.tasks import arithmetic

STALENESS = (0, 1, 2)
FIRST, LAST = 3, max(STALENESS)  # steps that are not timed
STEPS = {"embedded": 50, "smollm2": 4}  # steps that are timed
SEEDS = {"embedded": 1 if SMALL else 3, "smollm2": 1}
MODELS = {"embedded": "0.2M, heads of 32", "smollm2": "SmolLM2-135M"}
T_QUANTILE = 4.303  # two-sided 95%, of the mean of three differences


def task_of(name: str) -> RaceTask:
    """Return a task of the race, with a model that vLLM loads."""
    if name != "embedded":
        return TASKS[name]
    changes = {"make_model": lambda seed: character_model(arithmetic.CHARACTERS, seed, heads=2)}
    if SMALL:
        changes["WARM_START"] = arithmetic.WARM_START | {"steps": 2}
    module = types.SimpleNamespace(**vars(arithmetic) | changes)
    return TASKS[name]._replace(make_model=partial(warm_start, module))


def entry(task: str, path: str, folder: str, seed: int, url: str, max_staleness: int, steps: int) -> Entry:
    """Create a trainer with calls for a step, which returns its metrics, and for saving its weights."""
    race = TASKS[task]
    trainer = our_trainer(
        race, path, race.rows(seed)[0], max_steps=steps, updates_per_rollout=race.updates, rollout_backend="vllm",
        vllm_server_base_url=url, vllm_server_timeout=600, max_staleness=max_staleness, output_dir=f"{folder}/run",
        importance_sampling_mode="token_truncate", seed=seed,
    )  # fmt: skip
    return Entry({"step": trainer.step, "save": partial(save_weights, trainer.model, f"{folder}/{WEIGHTS}")})


def run(name: str, path: Path, examiner: Examiner | None, seed: int, url: str, max_staleness: int) -> dict[str, Any]:
    """Train once, and return a row of results."""
    race, timed, variant = TASKS[name], 2 if SMALL else STEPS[name], f"max_staleness {max_staleness}"
    steps, samples = FIRST + timed + LAST, race.prompts * race.settings["num_generations"]
    with tempfile.TemporaryDirectory() as folder:
        trainer = Contestant(
            "fastgrpo", "benchmarks.staleness:entry", "cpu", {"OMP_NUM_THREADS": "1"}, task=name, path=str(path),
            folder=folder, seed=seed, url=url, max_staleness=max_staleness, steps=steps,
        )  # fmt: skip
        with taking_part([trainer]):
            trainer.entry()
            bar = tqdm(range(steps if examiner else FIRST + timed), desc=f"{name}, seed {seed}, {variant}")
            seconds = [trainer.seconds("step") for _ in bar][FIRST : FIRST + timed]
            metrics, total = trainer.values["step"][FIRST : FIRST + timed], sum(seconds)
            extras = {"samples_per_s": timed * samples / total}
            extras["idle"] = sum(step["sampler/idle_s"] for step in metrics) / total
            extras["staleness"] = [
                statistics.fmean(step.get(f"sampler/staleness_{age}", float(age == 0)) for step in metrics)
                for age in range(max_staleness + 1)
            ]
            if examiner:
                trainer.seconds("save")
                extras["accuracy"] = accuracy = examiner.accuracy(Path(folder) / WEIGHTS)
                extras["ci95"] = wilson(accuracy * len(examiner.rows), len(examiner.rows))
    p20, median, p80 = np.quantile(seconds, [0.2, 0.5, 0.8]).tolist()
    (row,) = rows_of(
        {variant: {"rounds": timed, "median_s": median, "p20": p20, "p80": p80, "peak_bytes": None}},
        extras={variant: extras}, benchmark=f"staleness_{name}", model=MODELS[name], dtype="float32",
        case=f"seed {seed}", steps=len(trainer.values["step"]), samples=len(trainer.values["step"]) * samples,
        transformers=version("transformers"), vllm=httpx.get(f"{url}/version").json()["version"],
    )  # fmt: skip
    return row


def measure(name: str, cores: list[int]) -> Iterator[dict[str, Any]]:
    """Run all variants in turns over the seeds on one server, and yield their rows."""
    task, server = task_of(name), None
    try:
        for seed in range(SEEDS[name]):
            with tempfile.TemporaryDirectory() as folder:
                path = Path(folder) / "model"
                task.make_model(path, seed)
                if server is None:  # each run sends its weights
                    os.sched_setaffinity(0, cores[:1])
                    server = VLLMServer(path, 64 if name == "embedded" else 512, OMP_NUM_THREADS="1")
                    os.sched_setaffinity(0, cores[1:2])
                examiner = Examiner(task, path) if name == "embedded" else None
                first = seed % len(STALENESS)
                for max_staleness in STALENESS[first:] + STALENESS[:first]:
                    yield run(name, path, examiner, seed, server.url, max_staleness)
    finally:
        if server:
            server.kill()


def bars_of(rows: list[dict[str, Any]]) -> dict[str, Bar]:
    """Compare staleness 1 and 2 with 0: speed, and the accuracy over seeds, less its interval."""
    of = {age: [row for row in rows if row["variant"] == f"max_staleness {age}"] for age in STALENESS}
    rate = {age: statistics.fmean(row["samples_per_s"] for row in of[age]) for age in STALENESS}
    bars = {f"samples/s of max_staleness {age}, of 0": at_least(rate[age] / rate[0], 1.0) for age in STALENESS[1:]}
    if len(of[0]) < 3:
        return bars
    accuracy = {age: {row["case"]: row["accuracy"] for row in of[age]} for age in STALENESS}
    for age in STALENESS[1:]:
        gains = [accuracy[age][case] - accuracy[0][case] for case in accuracy[0]]
        half = T_QUANTILE * statistics.stdev(gains) / len(gains) ** 0.5
        bars[f"accuracy of max_staleness {age}, less that of 0"] = at_least(statistics.fmean(gains), -half)
    return bars


def main(name: str) -> None:
    """Measure a task, add the rows to results/cpu.jsonl, and print the table."""
    cores, rows = sorted(os.sched_getaffinity(0)), []
    if len(cores) < 2 or not PYTHON.exists():
        raise SystemExit(f"this needs two cores, and {PYTHON}: make .venv-vllm/.installed")
    torch.set_num_threads(1)
    rows = list(measure(name, cores))
    rows[0]["bars"] = bars_of(rows)
    if not SMALL:
        append(rows, "cpu")
    print(table(rows, "cpu"))


if __name__ == "__main__":
    main(*sys.argv[1:])

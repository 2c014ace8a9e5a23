"""Run the race: python -m benchmarks.race [TASK ...] [--trainers NAME ...] [--seeds N ...] | --draw."""

import argparse
import json
import math
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import median_low
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np
import torch
from tqdm import tqdm

from benchmarks.compare import rows_of
from benchmarks.contestants import Contestant, Failed, taking_part
from benchmarks.harness import CUDA, DEVICE, SMALL
from benchmarks.race.examiner import Examiner
from benchmarks.race.tasks import TASKS
from benchmarks.race.trainers import VARIANTS, WEIGHTS
from benchmarks.report import PAGES, machine, write_table

HERE = Path(__file__).parent
RESULTS = HERE / "results.jsonl"
SETUP = "device", "processor", "threads", "torch", "trl"  # fields that the runs of one table share
AGREE = 1e-4  # largest relative difference of the trainers' first loss and gradient norm
ROUNDING = 1e-6  # difference that is rounding: if all completions have one length, the exact loss is 0


def contestant_of(variant: str, function: str, **options: Any) -> Contestant:
    """Return the process of a trainer, in which a function of trainers.py creates it."""
    return Contestant(variant, f"benchmarks.race.trainers:{function}", DEVICE, variant=variant, **options)


def first_steps(
    name: str, seed: int, path: Path, examiner: Examiner, trainers: Sequence[str]
) -> tuple[dict[str, dict[str, float]], dict[str, str]]:
    """Return loss and gradient norm of fastgrpo's and each trainer's first step on the same completions.

    Also return the errors of the trainers that failed. ValueError is raised for values that differ by more than `AGREE`
    and by more than `ROUNDING`.
    """
    found, failed = {}, {}
    with tempfile.TemporaryDirectory() as folder:
        draws = Path(folder) / "draws.json"
        draws.write_text(json.dumps(examiner.draws(TASKS[name], seed)))
        for variant in dict.fromkeys(("fastgrpo", *trainers)):
            options = {"task": name, "path": str(path), "folder": folder, "seed": seed, "draws": str(draws)}
            with taking_part([contestant_of(variant, "first_step", **options)]) as (contestant,):
                try:
                    contestant.entry()
                    contestant.seconds(variant)
                except Failed as error:
                    if variant == "fastgrpo":
                        raise
                    failed[variant] = str(error)
                    continue
            (found[variant],) = contestant.values[variant]
    for variant, values in found.items():
        for quantity, value in values.items():
            expected = found["fastgrpo"][quantity]
            if not (math.isfinite(value) and math.isclose(value, expected, rel_tol=AGREE, abs_tol=ROUNDING)):
                raise ValueError(f"{name}, {variant}: {quantity} of the first step is {value:.8g}, not {expected:.8g}")
    return found, failed


def run(
    name: str, variant: str, seed: int, path: Path, examiner: Examiner, limit: float | None = None
) -> Iterator[dict[str, Any]]:
    """Train one contestant, and yield the figures of each measurement.

    Each row has step, seconds of training and of its rollouts, accuracy, peak memory in MiB, and whether it is the
    last. The run ends after `limit` seconds of training, or after those of the task, or with the target if the task
    `ends` then. The memory is the peak resident memory of the process, or on a GPU the most that torch reserved; that
    excludes the memory which `fastgrpo.rollout.mapped` maps if GPU memory is short.
    """
    task = TASKS[name]
    steps, every = (4, 2) if SMALL else (task.steps, task.every)
    seconds = rollouts = 0.0
    yield {"step": 0, "seconds": 0.0, "accuracy": examiner.before}
    with (
        tempfile.TemporaryDirectory() as folder,
        taking_part([contestant_of(variant, "entry", task=name, path=str(path), folder=folder, seed=seed)]) as (it,),
    ):
        it.entry()
        for step in tqdm(range(1, steps + 1), desc=f"{name}, {variant}, seed {seed}"):
            seconds += it.seconds(variant)
            rollouts += it.values[variant][-1]["rollout_s"]
            last = step == steps or seconds > (limit or task.limit)
            if step % every == 0 or last:
                memory = round(it.resident / 2**20)
                it.seconds("save")
                accuracy = examiner.accuracy(Path(folder) / WEIGHTS)
                last = last or (task.ends and accuracy >= task.target)
                spent = {"seconds": round(seconds, 2), "rollout_s": round(rollouts, 2)}
                yield {"step": step, **spent, "accuracy": accuracy, "peak_mib": memory, "last": last}
            if last:
                return


def facts(name: str, variant: str, seed: int) -> dict[str, Any]:
    """Return what every row of a run has: the machine, the commit, versions, and the run itself."""
    (row,) = rows_of({}, {variant: ""}, benchmark="race")
    del row["missing"]
    return row | {"task": name, "seed": seed, "device": torch.cuda.get_device_name() if CUDA else "cpu"}


def race(name: str, trainers: Sequence[str], seeds: Sequence[int]) -> Iterator[dict[str, Any]]:
    """Run trainers on a task in turns over the seeds, and yield a row per measurement.

    A trainer whose first step fails does not run. One that has not reached the target at the task's time limit with
    the first seed runs with that seed only.
    """
    excluded, agreed = set(), {}
    for seed in seeds:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "model"
            TASKS[name].make_model(path, seed)
            examiner = Examiner(TASKS[name], path)
            first = seed == seeds[0]
            if first:
                agreed, failed = first_steps(name, seed, path, examiner, trainers)
                for variant, error in failed.items():
                    excluded.add(variant)
                    yield facts(name, variant, seed) | {"missing": error}
            at = seed % len(trainers)
            for variant in (*trainers[at:], *trainers[:at]):
                if variant in excluded:
                    continue
                about, best = facts(name, variant, seed) | {"first_step": agreed[variant] if first else None}, 0.0
                try:
                    for measured in run(name, variant, seed, path, examiner):
                        best = max(best, measured["accuracy"])
                        yield about | measured
                    if first and measured["seconds"] > TASKS[name].limit and best < TASKS[name].target:
                        excluded.add(variant)
                except Failed as error:
                    yield about | {"missing": str(error)}


def seconds_to(rows: list[dict[str, Any]], target: float) -> float | None:
    """Return the seconds of training after which a run measured the target, or None."""
    return next((row["seconds"] for row in rows if row["accuracy"] >= target), None)


def middle(runs: list[list[dict[str, Any]]], target: float, failed: int = 0) -> float:
    """Return the median of the seconds to the target; infinity for runs that missed it, and for `failed` more runs."""
    times = [time for run in runs if (time := seconds_to(run, target)) is not None]
    return median_low(times + [math.inf] * (len(runs) + failed - len(times)))


def newest(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the rows of the newest run of each trainer and seed that ended or failed, sorted by trainer and seed.

    All have the machine and versions of the last row.
    """
    begun, found = {}, {}
    for row in rows:
        if any(row[name] != rows[-1][name] for name in SETUP):
            continue
        key = VARIANTS.index(row["variant"]), row["seed"]
        if "missing" in row:
            found[key] = [row]
            continue
        if row["step"] == 0:
            begun[key] = []
        begun[key].append(row)
        if row.get("last"):
            found[key] = begun[key]
    return [row for key in sorted(found) for row in found[key]]


def runs_of(rows: list[dict[str, Any]]) -> dict[str, list[list[dict[str, Any]]]]:
    """Return the runs of each trainer that ended, one per seed."""
    found = {}
    for row in rows:
        if "missing" not in row:
            found.setdefault(row["variant"], {}).setdefault(row["seed"], []).append(row)
    return {variant: [*seeds.values()] for variant, seeds in found.items()}


def table(rows: list[dict[str, Any]]) -> str:
    """Format the results of a task: for each contestant the medians over its seeds, and the worst final accuracy.

    The column `rollouts` has the share of the time that generation took, in the runs which measured it. A run that
    failed or missed the target counts as infinitely slow. The memory is the largest of all runs.
    """
    first, task = rows[0], TASKS[rows[0]["task"]]
    of_step = task.prompts * task.settings["num_generations"]
    commits, days = (", ".join(sorted({row[key].split("T")[0] for row in rows})) for key in ("commit", "date"))
    lines = [
        f"{machine(first['device'], first)}, commit {commits}, torch {first['torch']}, TRL {first['trl']}, {days}.",
        "",
        f"| trainer | runs | seconds to {task.target:g} | steps | samples/s | rollouts "
        "| final accuracy, worst | peak MiB |",
        "|---|---|---|---|---|---|---|---|",
    ]
    missing = [row for row in rows if "missing" in row]
    for variant, runs in runs_of(rows).items():
        last = [run[-1] for run in runs]
        shares = [row["rollout_s"] / row["seconds"] for row in last if "rollout_s" in row]
        failed = sum(row["variant"] == variant for row in missing)
        missed = [run[-1]["seconds"] for run in runs if seconds_to(run, task.target) is None]
        tried, reached = len(runs) + failed, len(runs) - len(missed)
        median = middle(runs, task.target, failed)
        time = f"{median:.0f}" if median < math.inf else f"not in {max(missed):.0f}" if missed else "failed"
        cells = [
            variant,
            str(tried),
            time + f" (reached in {reached} of {tried})" * (0 < reached < tried),
            f"{median_low(row['step'] for row in last)}",
            f"{median_low(of_step * row['step'] / row['seconds'] for row in last):.2f}",
            f"{median_low(shares):.0%}" if shares else "",
            f"{median_low(row['accuracy'] for row in last):.3f}, {min(row['accuracy'] for row in last):.3f}",
            f"{max(row['peak_mib'] for row in last)}",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    lines += ["", *(f"{row['variant']}, seed {row['seed']}: {row['missing']}" for row in missing)] if missing else []
    return "\n".join(lines)


def draw(rows: list[dict[str, Any]], path: Path) -> None:
    """Draw the accuracy over the seconds of training: median and range over seeds, the peak memory in the legend."""
    figure, axis = plt.subplots(figsize=(8, 4.5), layout="constrained")
    task = TASKS[rows[0]["task"]]
    for variant, runs in runs_of(rows).items():
        times = np.linspace(0, min(run[-1]["seconds"] for run in runs), 200)
        curves = [np.interp(times, *([row[key] for row in run] for key in ("seconds", "accuracy"))) for run in runs]
        label = f"{variant}, seeds: {len(runs)}, peak: {max(run[-1]['peak_mib'] for run in runs):,} MiB"
        (line,) = axis.plot(times, np.median(curves, axis=0), label=label)
        axis.fill_between(times, np.min(curves, axis=0), np.max(curves, axis=0), alpha=0.2, color=line.get_color())
    axis.axhline(task.target, color="gray", linestyle=":", label=f"target {task.target:g}")
    axis.set(xlabel="seconds of training steps", ylabel="greedy accuracy, held-out", title=task.title)
    figure.legend(loc="outside lower center", ncols=2, fontsize="small")
    figure.savefig(path, dpi=100)
    plt.close(figure)


def results(name: str) -> list[dict[str, Any]]:
    """Return all rows of a task in the results file."""
    rows = map(json.loads, RESULTS.read_text().splitlines()) if RESULTS.exists() else ()
    return [row for row in rows if row["task"] == name]


def publish(name: str) -> None:
    """Make the picture of a task from the results file, and its table on the page that has it."""
    if rows := newest(results(name)):
        device = "cpu" if rows[0]["device"] == "cpu" else "cuda"
        draw(rows, HERE / f"race-{name}-{device}.png")
        write_table(PAGES, f"race-{name}-{device}", table(rows))


def measure(name: str, trainers: Sequence[str], seeds: Sequence[int]) -> None:
    """Run the race of a task, and print its table. A run that is interrupted keeps what it has measured."""
    rows = []
    try:
        for row in race(name, trainers, seeds):
            rows.append(row)
            if not SMALL:
                with RESULTS.open("a") as file:
                    file.write(json.dumps(row) + "\n")
    finally:
        print(table(ended) if (ended := newest(rows)) else f"{name}: nothing measured")


def main() -> None:
    """Run the race of each task, or publish the results."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.race", description="Run the race.")
    parser.add_argument("tasks", nargs="*", metavar="TASK", help=f"tasks (default: {', '.join(TASKS)})")
    parser.add_argument(
        "--trainers", nargs="+", metavar="NAME", choices=VARIANTS, default=VARIANTS,
        help=f"trainers (default: {', '.join(map(repr, VARIANTS))})",
    )  # fmt: skip
    parser.add_argument("--seeds", nargs="+", metavar="N", type=int, help="seeds (default: those of the task)")
    parser.add_argument("--draw", action="store_true", help="run nothing; make tables and pictures")
    args = parser.parse_args()
    if unknown := set(args.tasks) - {*TASKS}:
        parser.error(f"there is no task {unknown.pop()!r}")
    for name in args.tasks or TASKS:
        if args.draw:
            publish(name)
        else:
            measure(name, args.trainers, args.seeds or range(1 if SMALL else TASKS[name].seeds))


if __name__ == "__main__":
    main()

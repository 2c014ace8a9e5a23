"""Run the race: python -m benchmarks.race [TASK ...]."""

import json
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from statistics import median_low
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from safetensors.torch import load_model
from tqdm import tqdm

from benchmarks.compare import rows_of
from benchmarks.contestants import Contestant, Failed
from benchmarks.harness import SMALL
from benchmarks.race.tasks import TASKS, RaceTask
from benchmarks.race.trainers import VARIANTS, WEIGHTS
from fastgrpo.data.prompts import to_prompt
from fastgrpo.policy.load import load_policy, stop_token_ids
from fastgrpo.rollout.engine import RolloutEngine
from fastgrpo.rollout.sampling import SamplingParams

HERE = Path(__file__).parent
RESULTS = HERE / "results.jsonl"
SEEDS = 1 if SMALL else 3


class Examiner:
    """Measures the greedy accuracy of saved weights on the held-out rows of a task."""

    def __init__(self, task: RaceTask, path: Path):
        self.policy, self.tokenizer = load_policy(path, dtype="float32", device="cpu")
        _, rows = task.rows(0)
        self.rows, self.reward = rows, task.rewards[0]
        self.ids = [to_prompt(row, self.tokenizer).ids for row in rows]
        stops = stop_token_ids(self.policy, self.tokenizer)
        self.greedy = SamplingParams(
            temperature=0, max_tokens=task.settings["max_completion_length"], stop_token_ids=stops
        )

    def accuracy(self, weights: Path | None = None) -> float:
        """Return the accuracy of the weights in a file; of the first model without one."""
        if weights is not None:
            load_model(self.policy.module, weights)
        samples = RolloutEngine(self.policy).generate(self.ids, 1, self.greedy)
        texts = [self.tokenizer.decode(sample.ids, skip_special_tokens=True) for sample in samples]
        columns = {key: [row[key] for row in self.rows] for key in self.rows[0] if key != "prompt"}
        rewards = self.reward(prompts=[row["prompt"] for row in self.rows], completions=texts, **columns)
        return sum(reward == 1 for reward in rewards) / len(rewards)


def run(name: str, variant: str, seed: int, path: Path) -> Iterator[dict[str, Any]]:
    """Train one contestant, and yield step, seconds of training, accuracy and peak memory of each measurement."""
    task = TASKS[name]
    steps, every = (4, 2) if SMALL else (task.steps, task.every)
    examiner, seconds = Examiner(task, path), 0.0
    yield {"step": 0, "seconds": 0.0, "accuracy": examiner.accuracy()}
    with tempfile.TemporaryDirectory() as folder:
        entry = f"benchmarks.race.trainers:{'our' if variant == 'fastgrpo' else 'trl'}_entry"
        options = {"variant": variant, "task": name, "path": str(path), "folder": folder, "seed": seed}
        contestant = Contestant(variant, entry, "cpu", **options)
        try:
            contestant.entry()
            for step in tqdm(range(1, steps + 1), desc=f"{name}, {variant}, seed {seed}"):
                seconds += contestant.seconds(variant)
                if step % every == 0:
                    memory = round(contestant.resident / 2**20)  # before the weights are saved
                    contestant.seconds("save")
                    accuracy = examiner.accuracy(Path(folder) / WEIGHTS)
                    yield {"step": step, "seconds": round(seconds, 2), "accuracy": accuracy, "peak_mib": memory}
        finally:
            contestant.close()


def race(name: str) -> list[dict[str, Any]]:
    """Run all contestants of a task in turns over the seeds, and return a row per measurement."""
    rows = []
    for seed in range(SEEDS):
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "model"
            TASKS[name].make_model(path, seed)
            for variant in VARIANTS[seed % len(VARIANTS) :] + VARIANTS[: seed % len(VARIANTS)]:
                about = {"task": name, "variant": variant, "seed": seed}
                try:
                    rows += [about | measured for measured in run(name, variant, seed, path)]
                except Failed as error:
                    rows.append(about | {"missing": str(error)})
    (common,) = rows_of({}, {"all": ""}, benchmark="race")
    return [{key: value for key, value in common.items() if key not in ("variant", "missing")} | row for row in rows]


def seconds_to(rows: list[dict[str, Any]], target: float) -> float | None:
    """Return the seconds of training after which a run measured the target, or None."""
    return next((row["seconds"] for row in rows if row["accuracy"] >= target), None)


def runs_of(rows: list[dict[str, Any]]) -> dict[str, list[list[dict[str, Any]]]]:
    """Return the runs of each variant, one per seed, without failed ones."""
    found = {}
    for row in rows:
        if "missing" not in row:
            found.setdefault(row["variant"], {}).setdefault(row["seed"], []).append(row)
    return {variant: list(seeds.values()) for variant, seeds in found.items()}


def table(rows: list[dict[str, Any]]) -> str:
    """Format the results of a task: for each contestant the medians over its seeds, and the worst final accuracy."""
    target = TASKS[rows[0]["task"]].target
    lines = [
        f"| trainer | seconds to {target:g} | s per step | final accuracy, worst | peak MiB |",
        "|---|---|---|---|---|",
    ]
    for variant, runs in runs_of(rows).items():
        last = [run[-1] for run in runs]
        reached = [time for run in runs if (time := seconds_to(run, target)) is not None]
        time = f"{median_low(reached):.0f}" if reached else f"not in {max(row['seconds'] for row in last):.0f}"
        cells = [
            variant,
            time + f" ({len(reached)} of {len(runs)} runs)" * (0 < len(reached) < len(runs)),
            f"{median_low(row['seconds'] / row['step'] for row in last):.3f}",
            f"{median_low(row['accuracy'] for row in last):.3f}, {min(row['accuracy'] for row in last):.3f}",
            f"{max(row['peak_mib'] for row in last)}",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    lines += [f"{row['variant']}, seed {row['seed']}: {row['missing']}" for row in rows if "missing" in row]
    return "\n".join(lines)


def draw(rows: list[dict[str, Any]], path: Path) -> None:
    """Draw the accuracy over the seconds of training: a thin line per seed, the peak memory in the legend."""
    figure, axis = plt.subplots(figsize=(8, 4), layout="constrained")
    for i, (variant, runs) in enumerate(runs_of(rows).items()):
        label = f"{variant}, {max(run[-1]['peak_mib'] for run in runs)} MiB"
        for j, run in enumerate(runs):
            axis.plot([row["seconds"] for row in run], [row["accuracy"] for row in run], color=f"C{i}",
                      label=label if j == 0 else None)  # fmt: skip
    target = TASKS[rows[0]["task"]].target
    axis.axhline(target, color="gray", linestyle=":")
    axis.set(xlabel="seconds of training steps", ylabel="greedy accuracy, held-out", title=f"Race: {rows[0]['task']}")
    axis.legend()
    figure.savefig(path, dpi=100)
    plt.close(figure)


def main(names: list[str]) -> None:
    """Run the named tasks, or all, and print their tables."""
    for name in names or list(TASKS):
        rows = race(name)
        if not SMALL:
            with RESULTS.open("a") as file:
                file.writelines(json.dumps(row) + "\n" for row in rows)
            draw(rows, HERE / f"race-{name}.png")
        print(table(rows))


if __name__ == "__main__":
    main(sys.argv[1:])

"""The log of a run as scripts for transformers' trainers read it: `state.log_history`, and what `train` returns.

An entry is the dict of a line of metrics.jsonl. What was measured on held-out rows goes there by TRL's names as well as
by ours: "eval_reward" is the mean total reward of what was sampled where completions were sampled, as TRL evaluates,
and else of the greedy completions.
"""

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

RENAMED = {
    "mean_length": "completions/mean_length",
    "clipped_ratio": "completions/clipped_ratio",
    "time": "runtime",
}  # what is not called as in TRL behind eval/
SAMPLED = "sampled/"
LEARNING_RATE = "learning_rate"  # every line of training has it, and no line of an evaluation


def evaluated(values: Mapping[str, float], prefix: str = "eval") -> dict[str, float]:
    """Name what an evaluation measured as TRL does."""
    named, drawn = {}, {}
    for name, value in values.items():
        rest = name.removeprefix(f"{prefix}/")
        into = drawn if rest.startswith(SAMPLED) else named
        rest = rest.removeprefix(SAMPLED)
        into[f"{prefix}_{RENAMED.get(rest, rest)}"] = value
    return named | drawn


def entry(step: int, values: Mapping[str, float]) -> dict[str, Any]:
    """Make the entry of a line of metrics.jsonl."""
    made = {}
    for name, value in values.items():
        before, slash, _ = name.partition("/")
        # A line is of training or of one evaluation, all of whose metrics have its prefix, whatever that is.
        if slash and LEARNING_RATE not in values:
            made.setdefault(before, {})[name] = value
        else:
            made[name] = value
    held_out = [prefix for prefix, group in made.items() if isinstance(group, dict)]
    for prefix in held_out:
        made |= evaluated(made.pop(prefix), prefix)
    return {name: _finite(value) for name, value in made.items()} | {"step": step}


def _finite(value):
    return None if isinstance(value, float) and not math.isfinite(value) else value


def read(path: Path, size: int) -> list[dict[str, Any]]:
    """Read the entries of metrics.jsonl as it was when a checkpoint was written."""
    try:
        with open(path, "rb") as file:
            lines = file.read(size).decode(errors="replace").splitlines()
    except OSError:
        return []
    entries = []
    for line in lines:
        try:
            values = json.loads(line)
            entries.append(entry(values.pop("step"), values))
        except (ValueError, KeyError, AttributeError, RecursionError):
            continue
    return entries


def mean_loss(history: Iterable[Mapping[str, Any]]) -> float:
    """Compute the mean loss of all steps from the means of the logged lines."""
    total, steps, before = 0.0, 0, 0
    for line in history:
        if line.get("loss") is not None:
            total, steps = total + line["loss"] * (line["step"] - before), steps + line["step"] - before
            before = line["step"]
    return total / steps if steps else 0.0


def last_training(history: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Find the last entry that was written for training."""
    return dict(next((line for line in reversed(history) if LEARNING_RATE in line), {}))


class Summary(dict):
    """The summary of a run, a dict, with what transformers' `TrainOutput` has.

    Attributes:
        metrics: As given.
    """

    def __init__(self, summary: Mapping[str, Any], metrics: Mapping[str, float]) -> None:
        super().__init__(summary)
        self.metrics = dict(metrics)

    @property
    def global_step(self) -> int:
        """The number of steps that the run made."""
        return self["steps"]

    @property
    def training_loss(self) -> float:
        """The mean of the loss over the steps."""
        return self.metrics["train_loss"]

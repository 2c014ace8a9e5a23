"""Measures the accuracy of saved weights with `fastgrpo.evaluation`, and draws completions for the first steps."""

from pathlib import Path
from typing import Any

from safetensors.torch import load_model

from benchmarks.harness import DEVICE
from benchmarks.race.tasks import RaceTask
from fastgrpo.data.records import TrainerState
from fastgrpo.evaluation.heldout import evaluate
from fastgrpo.policy.load import load_policy, stop_token_ids
from fastgrpo.rewards.call import Rewards
from fastgrpo.rollout.engine import RolloutEngine
from fastgrpo.rollout.sampling import SamplingParams
from fastgrpo.tools.prompts import Prompts


class Examiner:
    """The model and the held-out rows of a task."""

    def __init__(self, task: RaceTask, path: Path):
        self.policy, tokenizer = load_policy(path, dtype="float32", device=DEVICE)
        self.source, self.rewards, self.rows = Prompts(tokenizer), Rewards(task.rewards), task.rows(0)[1]
        self.state = TrainerState(0, 0, 0.0, task.settings["max_completion_length"])
        self.sampling = SamplingParams(
            max_tokens=task.settings["max_completion_length"], stop_token_ids=stop_token_ids(self.policy, tokenizer)
        )

    def accuracy(self, weights: Path) -> float:
        """Return the accuracy of greedy completions with the weights in a file."""
        load_model(self.policy.module, weights)
        engine = RolloutEngine(self.policy)
        return evaluate(engine, self.source, self.rows, self.rewards, self.sampling, self.state).values["eval/accuracy"]

    def draws(self, task: RaceTask, seed: int) -> list[dict[str, Any]]:
        """Return the rows of a first step, and their prompts, completions and log-probs under the model."""
        rows, count = task.rows(seed)[0][: task.prompts], task.settings["num_generations"]
        prompts = [self.source(row).ids for row in rows]
        samples = RolloutEngine(self.policy).generate(prompts, count, self.sampling)
        return [
            {"row": row, "prompt_ids": ids, "completion_ids": [sample.ids for sample in group],
             "logprobs": [sample.logps.tolist() for sample in group]}
            for row, ids, group in zip(rows, prompts, zip(*[iter(samples)] * count, strict=True), strict=True)
        ]  # fmt: skip

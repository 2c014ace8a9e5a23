"""Measures the accuracy of saved weights with `fastgrpo.evaluation`, and draws completions for the first steps."""

from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from benchmarks.harness import DEVICE
from benchmarks.models import load_weights
from benchmarks.race.tasks import RaceTask
from fastgrpo.data.records import TrainerState
from fastgrpo.evaluation.heldout import evaluate
from fastgrpo.policy.load import load_policy, stop_token_ids
from fastgrpo.rewards.call import Rewards, judge_together, reward_matrix
from fastgrpo.rollout.backend import draw_groups
from fastgrpo.rollout.engine import RolloutEngine
from fastgrpo.rollout.sampling import SamplingParams
from fastgrpo.tools.environments import Environments
from fastgrpo.tools.prompts import Prompts


class Examiner:
    """The model and the held-out rows of a task."""

    def __init__(self, task: RaceTask, path: Path):
        self.path = path
        self.policy, tokenizer = load_policy(path, dtype="float32", device=DEVICE)
        self.rewards, self.rows = Rewards(task.rewards), task.rows(0)[1]
        self.state = TrainerState(0, 0, 0.0, task.settings["max_completion_length"])
        stops, turns = stop_token_ids(self.policy, tokenizer), task.settings.get("max_tool_calling_iterations", 0) + 1
        self.sampling = SamplingParams(max_tokens=task.settings["max_completion_length"], stop_token_ids=stops)
        self.engine = RolloutEngine(self.policy)
        self.source = Prompts(tokenizer, None, Environments(None, task.tools) if task.tools else None, stops, turns)

    @cached_property
    def before(self) -> float:
        """Accuracy of the model before training."""
        return self.accuracy(self.path / "model.safetensors")

    def accuracy(self, weights: Path) -> float:
        """Return the accuracy of greedy completions with the weights in a file."""
        load_weights(self.policy.module, weights)
        found = evaluate(self.engine, self.source, self.rows, self.rewards, self.sampling, self.state)
        return found.values["eval/accuracy"]

    def draws(self, task: RaceTask, seed: int) -> list[dict[str, Any]]:
        """Return the rows of a first step, and their prompts and completions.

        The completions have log-probs under the model, a mask of the drawn tokens, and rewards.
        """
        rows, count = task.rows(seed)[0][: task.prompts], task.settings["num_generations"]
        prompts = [self.source(row) for row in rows]
        drawn = draw_groups(self.engine, self.source.start(dict(enumerate(prompts)), count), self.sampling)
        samples = judge_together(self.rewards, drawn, prompts, self.source.tokenizer, self.state).completions
        rewards, found = self.rewards.total(reward_matrix(samples)).tolist(), []
        for i, sample in enumerate(samples):
            mask = sample.tool_mask or [1] * len(sample.ids)
            logps = torch.zeros(len(mask)).masked_scatter(torch.tensor(mask) > 0, sample.logps).tolist()
            if i % count == 0:
                found.append({"row": rows[i // count], "prompt_ids": sample.prompt_ids, "completions": []})
            found[-1]["completions"].append(
                {"completion_ids": sample.ids, "logprobs": logps, "env_mask": mask, "given": rewards[i]}
            )
        return found

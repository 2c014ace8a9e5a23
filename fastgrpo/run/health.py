"""Warnings about problems that spoil a GRPO run without an error, and the end of a run that only skips updates.

`CHECKS` is the table of the warnings. Each has a condition on the metrics of a step, and is given once, when the
condition has held for a number of steps in a row.
"""

import re
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from fastgrpo.config.settings import TrainingConfig
from fastgrpo.run.checkpoint import Checkpointer

# The run stops after this many updates in a row whose loss or gradient was not finite. A step in which an update
# changed the weights resets the count.
MAX_SKIPPED = 10


@dataclass(frozen=True)
class Check:
    """A warning and the condition under which it is given."""

    name: str  # a checkpoint stores this name after the warning
    holds: Callable  # (metrics of a step, settings) -> bool; the KeyError of an unmeasured metric counts as False
    steps: int  # number of steps in a row for which the condition must hold
    text: str  # symptom, meaning and remedy


CHECKS = (
    Check(
        "zero loss",
        lambda v, args: abs(v["loss"]) < 1e-4 and v["frac_informative"] > 0 and v["grad_norm"] > 0,
        1,
        "note: a loss near 0 is expected on the first update of a rollout: all ratios are 1 and the advantages of a "
        "group add up to 0, but the gradient is not 0 (see grad_norm). Watch reward and accuracy instead of the loss",
    ),
    Check(
        "no rewards",
        lambda v, args: v["frac_informative"] >= 0 and "reward" not in v,  # supervised training has neither metric
        1,
        "warning: no completion of this step got a reward, so the policy learned nothing from it. Check that the "
        "reward functions read columns that the rows of your data set have",
    ),
    Check(
        "reward errors",
        lambda v, args: any(value for name, value in v.items() if re.fullmatch("rewards/.+/errors", name)),
        1,
        "warning: reward functions fail on some completions, which are then treated as if they had no reward "
        "(rewards/FUNCTION/errors counts them). Pass --reward_errors raise to see the first failure",
    ),
    Check(
        "reward timeouts",
        lambda v, args: any(value for name, value in v.items() if re.fullmatch("rewards/.+/timeouts", name)),
        1,
        "warning: reward functions took longer than reward_timeout on some completions, which are then treated as if "
        "they had no reward (rewards/FUNCTION/timeouts counts them). Raise reward_timeout, or make the function faster",
    ),
    Check(
        "solved",
        lambda v, args: v["frac_informative"] == 0 and v["accuracy"] > 0.9,
        5,
        "note: in the last 5 steps no group had rewards that differ, and more than nine of ten completions were right "
        "(accuracy): the task may be solved. Stop here, or go on with harder prompts",
    ),
    Check(
        "no informative group",
        lambda v, args: v["frac_informative"] == 0 and not v.get("accuracy", 0) > 0.9,
        5,
        "warning: in the last 5 steps no group had rewards that differ, so every advantage is 0 and the policy learns "
        "nothing. Raise num_generations or temperature, choose prompts that the policy solves sometimes but not "
        "always, or reward partial success",
    ),
    Check(
        "refills run out",
        lambda v, args: v["dynamic_sampling/filled_groups"] > 0,
        5,
        "warning: in each of the last 5 steps, dynamic_sampling batches did not give prompts_per_step groups with "
        "different rewards, so the step also used groups with equal rewards. Raise dynamic_sampling, "
        "num_generations or temperature, or choose prompts that the policy solves sometimes but not always",
    ),
    Check(
        "truncated",
        lambda v, args: v["completions/clipped_ratio"] > 0.5 and args.max_completion_length > 1,
        3,
        "warning: more than half of the completions were truncated at max_completion_length in each of the last 3 "
        "steps, most likely before their answer was complete. Raise max_completion_length, or check that the model "
        "ends its answers (end token, chat template)",
    ),
    Check(
        "constant length",
        lambda v, args: (
            v["completions/min_length"] == v["completions/max_length"]
            and v["completions/clipped_ratio"] < 1
            and v["frac_informative"] == 0  # otherwise completions of a group differ, such as yes and no
            and not v.get("accuracy", 0) > 0.9  # the answers of a solved task may have one length
        ),
        10,
        "warning: in each of the last 10 steps all completions had the same length, so the policy may repeat one text "
        "instead of answering its prompts. Look at samples.jsonl, and raise temperature",
    ),
    Check(
        "kl",
        lambda v, args: v["kl"] > 1,
        3,
        "warning: the KL divergence to the reference was above 1 nat per token in each of the last 3 steps: the policy "
        "has moved far away from the reference. Lower learning_rate or raise beta",
    ),
    Check(
        "ratio",
        lambda v, args: not 0.5 < v["ratio/mean"] < 2 or v["ratio/max"] > 100,
        3,
        "warning: in each of the last 3 steps the ratio of the policy to the old policy had a mean outside 0.5 to 2 or "
        "a value above 100: the updates of one rollout move the policy too far. Lower learning_rate, num_iterations "
        "or updates_per_rollout",
    ),
    Check(
        "log-probs apart",
        lambda v, args: v["sampler/logp_gap_mean"] > 0.05 and not args.max_staleness,
        3,
        "warning: in each of the last 3 steps the log-probs of the sampler and of the trainer differed by more than "
        "0.05 nats on average (sampler/logp_gap_mean), so the completions come from another policy than the one that "
        "is trained. Try --dtype float32",
    ),
    Check(
        "always clipped",
        lambda v, args: 0 < args.max_grad_norm < v["grad_norm"],
        20,
        "warning: in each of the last 20 steps the norm of the gradient (grad_norm) was above max_grad_norm, so every "
        "gradient was scaled down to it, and its own size had no effect. Raise max_grad_norm, or lower learning_rate",
    ),
    Check(
        "skipped",
        lambda v, args: v["skipped_updates"] > 0,
        1,
        "warning: the loss or the gradient was not finite, so the update was skipped and the weights stay as they were "
        f"(skipped_updates counts this). The run stops after {MAX_SKIPPED} such updates in a row. Lower learning_rate, "
        "or try --dtype float32",
    ),
)


class Watch:
    """Checks the metrics of every step, warns once per check, and stops a run that only skips updates."""

    def __init__(self, args: TrainingConfig, checkpoints: Checkpointer) -> None:
        self.args, self.checkpoints = args, checkpoints
        self.streaks, self.told = Counter(), set()
        self.skipped = 0  # skipped updates in a row

    def observe(self, values: dict[str, float]) -> list[str]:
        """Check the metrics of one step, and return new warnings."""
        if values.get("grad_norm", 0.0) > 0:  # one of the step's updates moved the weights
            self.skipped = 0
        else:
            self.skipped += int(values["skipped_updates"])
        if self.skipped >= MAX_SKIPPED:
            last = self.checkpoints.newest
            raise ValueError(
                f"{self.skipped} updates in a row were skipped, because the loss or the gradient was not finite; the "
                "run stops; lower learning_rate, or try --dtype float32\n"
                f"  {f'the last good checkpoint is {last}' if last else 'no checkpoint had been saved'}"
            )
        texts = []
        for check in CHECKS:
            if check.name in self.told:
                continue
            self.streaks[check.name] = self.streaks[check.name] + 1 if _holds(check, values, self.args) else 0
            if self.streaks[check.name] == check.steps:
                self.told.add(check.name)
                texts.append(check.text)
        return texts

    def state_dict(self) -> dict[str, Any]:
        """Return the state, so that a resumed run does not repeat warnings."""
        return {"streaks": dict(self.streaks), "told": sorted(self.told), "skipped": self.skipped}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the state."""
        self.streaks, self.told, self.skipped = Counter(state["streaks"]), set(state["told"]), state["skipped"]


def _holds(check, values, args):
    try:
        return check.holds(values, args)
    except KeyError:
        return False

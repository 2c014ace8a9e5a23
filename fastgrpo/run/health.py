"""What breaks GRPO without an error, told once each with its remedy; and the end of a run that only skips updates.

`CHECKS` is the table: a condition on the metrics of a step, and for how many steps in a row it must hold.
"""

import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

MAX_SKIPPED = 10  # updates in a row that were not finite, after which the run stops


@dataclass(frozen=True)
class Check:
    """holds: (metrics of a step, settings) -> bool; a metric that is absent is a KeyError, which counts as False.
    steps: in a row. text: what a person reads."""

    name: str
    holds: Callable
    steps: int
    text: str


CHECKS = (
    Check(
        "zero loss",
        lambda v, args: abs(v["loss"]) < 1e-4 and v["frac_informative"] > 0 and v["grad_norm"] > 0,
        1,
        "note: a loss near 0 is right on the first update of a rollout: ratios are 1 and advantages cancel; the "
        "gradient is not 0 (grad_norm). Watch reward and accuracy instead",
    ),
    Check(
        "no rewards",
        lambda v, args: "reward" not in v,
        1,
        "warning: no completion of this step got a reward, so nothing was learnt; do the rewards fit the rows?",
    ),
    Check(
        "reward errors",
        lambda v, args: any(value for name, value in v.items() if name.endswith("/errors")),
        1,
        "warning: reward functions fail on some completions, which count as not rewarded (rewards/FUNCTION/errors); "
        "--reward_errors raise shows the first failure",
    ),
    Check(
        "no informative group",
        lambda v, args: v["frac_informative"] == 0,
        5,
        "warning: no group had rewards that differ for 5 steps, so nothing is learnt; raise num_generations or "
        "temperature, choose prompts that are neither hopeless nor sure, or reward partial success",
    ),
    Check(
        "refills run out",
        lambda v, args: v["dynamic_sampling/filled_groups"] > 0,
        5,
        "warning: for 5 steps, max_num_gen_batches was reached before there were prompts_per_step groups that teach "
        "something, and dropped ones filled up; raise it, num_generations or temperature, or choose prompts that are "
        "neither hopeless nor sure",
    ),
    Check(
        "truncated",
        lambda v, args: v["completions/clipped_ratio"] > 0.5,
        3,
        "warning: more than half of the completions are truncated for 3 steps; raise max_completion_length, or check "
        "that the model ends its answers (end token, chat template)",
    ),
    Check(
        "constant length",
        lambda v, args: (
            v["completions/min_length"] == v["completions/max_length"] and v["completions/clipped_ratio"] < 1
        ),
        10,
        "warning: all completions have one length for 10 steps; does the model answer the prompt at all? Look at "
        "samples.jsonl, and raise temperature",
    ),
    Check(
        "kl",
        lambda v, args: v["kl"] > 1,
        3,
        "warning: the KL to the reference is above 1 nat a token for 3 steps: the policy is far away; lower "
        "learning_rate or raise beta",
    ),
    Check(
        "ratio",
        lambda v, args: not 0.5 < v["ratio/mean"] < 2 or v["ratio/max"] > 100,
        3,
        "warning: the ratio to the old policy leaves its bounds (mean 0.5 to 2, largest 100) for 3 steps: updates of a "
        "rollout go too far; lower learning_rate, num_iterations or updates_per_rollout",
    ),
    Check(
        "log-probs apart",
        lambda v, args: v["rollout/logp_gap"] > 0.05,
        3,
        "warning: the log-probs of sampler and trainer are more than 0.05 nats apart on average for 3 steps "
        "(rollout/logp_gap): the gradient is off-policy; try --dtype float32",
    ),
    Check(
        "always clipped",
        lambda v, args: 0 < args.max_grad_norm < v["grad_norm"],
        20,
        "warning: every gradient was clipped for 20 steps, so max_grad_norm sets the pace; raise it, or lower "
        "learning_rate",
    ),
    Check(
        "skipped",
        lambda v, args: v["skipped_updates"] > 0,
        1,
        f"warning: loss or gradient was not finite: the update was skipped, weights are as before (skipped_updates); "
        f"the run stops after {MAX_SKIPPED} in a row. Lower learning_rate, or try --dtype float32",
    ),
)


class Watch:
    """Sees the metrics of every step, and says each thing once."""

    def __init__(self, args, checkpoints):
        """args: `GRPOConfig`. checkpoints: its `newest` is named where the run stops."""
        self.args, self.checkpoints = args, checkpoints
        self.streaks, self.told = Counter(), set()
        self.skipped = 0  # updates in a row

    def observe(self, values, norms):
        """What to tell after a step.

        Args:
            values: the metrics of the step. norms: the gradient norm of each of its updates: NaN where it was skipped,
                0 where there was nothing to learn from.

        Returns:
            a list of texts, most often empty.

        Raises:
            ValueError: `MAX_SKIPPED` updates in a row were skipped; the last good checkpoint is named.
        """
        for norm in norms:
            if math.isnan(norm):
                self.skipped += 1
            elif norm > 0:
                self.skipped = 0
        if self.skipped >= MAX_SKIPPED:
            last = self.checkpoints.newest
            raise ValueError(
                f"{self.skipped} updates in a row had a loss or a gradient that is not finite, and were skipped; "
                "lower learning_rate, or try --dtype float32\n"
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

    def state_dict(self):
        return {"streaks": dict(self.streaks), "told": sorted(self.told), "skipped": self.skipped}

    def load_state_dict(self, state):
        self.streaks, self.told, self.skipped = Counter(state["streaks"]), set(state["told"]), state["skipped"]


def _holds(check, values, args):
    try:
        return check.holds(values, args)
    except KeyError:
        return False

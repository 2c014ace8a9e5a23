"""Prompts -> rewarded groups: what was drawn for a step, and what of it the step trains on.

Dynamic sampling (DAPO, arXiv 2503.14476, section 3.2) drops the groups that teach nothing and draws as many new
prompts, batch after batch, until there are prompts_per_step that do, or max_num_gen_batches were drawn; the first
dropped groups then fill up. Oversampling starts more groups than are wanted and aborts those that finish last, which
favours prompts with short completions.

Metrics are over all groups that finished, dropped or not: over the kept ones alone, reward and accuracy would be those
of prompts chosen by reward and accuracy. Aborted groups are in none but their own.

Shapes: S completions, those of a prompt side by side, G a group; F reward functions.
"""

import dataclasses
import json
import math
from collections import Counter, defaultdict
from dataclasses import dataclass
from itertools import chain

import torch

from fastgrpo.data.prompts import check_prompts, to_completion, to_prompt
from fastgrpo.data.records import Prompt, Rollout, Sample
from fastgrpo.loss.advantage import decoupled_advantages, group_advantages
from fastgrpo.rewards.call import scalar
from fastgrpo.rollout.backend import first_finished
from fastgrpo.step.measure import reward_metrics, rollout_metrics

# Between the seeds of a step's batches. torch's CPU generator reads 32 bits of a seed: modulo 2**32, the multiples of
# the golden ratio keep farthest from one another, and so from the seeds of the next steps.
BATCH_STRIDE = 0x9E3779B1


@dataclass
class Draw:
    """One batch of prompts, drawn and rewarded.

    prompts, rollouts, completions: [S]; completions are what reward functions saw. per_function: [S, F] fp64, NaN where
    no reward was given. advantages: [S] fp64. extras: columns that reward functions logged, [S] each. custom: values
    that they logged, by name. errors: completions that they failed on, by name. live: what the engine measured. taken:
    prompts, the aborted ones too. lost_tokens: drawn of the aborted groups.
    """

    prompts: list[Prompt]
    rollouts: list[Rollout]
    completions: list
    per_function: torch.Tensor
    advantages: torch.Tensor
    extras: dict[str, list]
    custom: dict[str, list[float]]
    errors: Counter
    live: dict[str, float]
    taken: int
    lost_tokens: int


@dataclass
class Experience:
    """All that was drawn for a step.

    samples, prompts, rollouts, completions, per_function, extras: [S], as in `Draw`. groups: the samples that the step
    trains on, a list a prompt. taken: prompts. num_tokens: of prompts and completions, with those that were drawn of
    aborted groups. metrics: by name.
    """

    samples: list[Sample]
    prompts: list[Prompt]
    rollouts: list[Rollout]
    completions: list
    per_function: torch.Tensor
    extras: dict[str, list]
    groups: list[list[Sample]]
    taken: int
    num_tokens: int
    metrics: dict[str, float]


class ExperienceMaker:
    """Draws and rewards what a step trains on, under the settings of a `GRPOConfig`."""

    def __init__(self, source, tokenizer, engine, rewards, sampling, args, timer):
        """source: of rows. engine: a `RolloutBackend`. sampling: `SamplingParams`; seeds are a batch's own. timer: a
        `StageTimer`."""
        self.source, self.tokenizer, self.engine, self.rewards = source, tokenizer, engine, rewards
        self.sampling, self.args, self.timer = sampling, args, timer

    def __call__(self, state):
        """The `Experience` of the step that follows on `state`, a `TrainerState`."""
        args, draws, teaching = self.args, [], []
        for batch in range(args.max_num_gen_batches if args.dynamic_sampling else 1):
            draws.append(self.draw(state, batch, args.prompts_per_step - sum(teaching)))
            teaching += self.teaching(draws[-1])
            if sum(teaching) == args.prompts_per_step:
                break
        # Those that teach come first, dropped ones fill up; of each kind, the earliest. Their order stays.
        trained = sorted(sorted(range(len(teaching)), key=lambda i: not teaching[i])[: args.prompts_per_step])
        experience = self._joined(draws, trained)
        if args.dynamic_sampling:
            experience.metrics |= {
                "dynamic_sampling/num_gen_batches": len(draws),
                "dynamic_sampling/dropped_groups": len(teaching) - len(trained),
                "dynamic_sampling/filled_groups": len(trained) - sum(teaching),
            }
        if args.oversampling_factor > 1:
            experience.metrics |= {
                "oversampling/aborted_groups": experience.taken - len(teaching),
                "oversampling/aborted_tokens": sum(draw.lost_tokens for draw in draws),
            }
        return experience

    def draw(self, state, batch, count):
        """The `Draw` of `count` groups. batch: its number within the step."""
        taken = self.args.oversampled(count)
        prompts = [to_prompt(row, self.tokenizer) for row in self.source.take(taken)]
        check_prompts(prompts, self.engine.model, self.args.max_completion_length)
        seed = self.args.seed * 1_000_003 + state.global_step + batch * BATCH_STRIDE
        with self.timer.stage("rollout"):
            groups, lost_tokens = first_finished(
                self.engine,
                [prompt.ids for prompt in prompts],
                self.args.num_generations,
                dataclasses.replace(self.sampling, seed=seed),
                count,
            )
        prompts = [prompts[i] for i in groups for _ in groups[i]]
        rollouts = list(chain.from_iterable(groups.values()))
        with self.timer.stage("reward"):
            completions = [to_completion(p, r.ids, self.tokenizer) for p, r in zip(prompts, rollouts, strict=True)]
            per_function, extras, custom = self.score(prompts, completions, rollouts, state, refill=batch > 0)
        return Draw(
            prompts, rollouts, completions, per_function, self.advantages(per_function), extras, custom,
            self.rewards.errors, self.engine.metrics(), taken, lost_tokens,
        )  # fmt: skip

    def score(self, prompts, completions, rollouts, state, refill=False):
        """Rewards [S, F], the extra columns and the values that reward functions logged.

        refill: the prompts stand in for dropped ones. They may be few, and then it is no mistake that none of them gets
        a reward.
        """
        extras, custom = {}, defaultdict(list)

        def log_extra(column, values):
            values = [scalar(value) for value in values]
            if len(values) != len(completions):
                raise ValueError(
                    f"log_extra({column!r}, ...) takes one value a completion: {len(completions)}, got {len(values)}"
                )
            try:
                json.dumps(values)
            except (TypeError, ValueError) as error:
                raise ValueError(f"log_extra({column!r}, ...) takes what JSON can hold: {error}") from None
            extras[column] = values

        per_function = self.rewards(
            prompts,
            completions,
            [rollout.ids for rollout in rollouts],
            trainer_state=state,
            log_metric=lambda name, value: custom[name].append(float(value)),
            log_extra=log_extra,
            allow_none=refill,
        )
        return per_function, extras, custom

    def advantages(self, per_function):
        """Rewards [S, F] -> advantages [S]."""
        args = self.args
        if args.multi_objective_aggregation == "normalize_then_sum":
            return decoupled_advantages(
                per_function, self.rewards.weights, args.num_generations, clip=args.advantage_clip
            )
        return group_advantages(
            self.rewards.total(per_function),
            args.num_generations,
            scale=args.scale_rewards,
            baseline=args.advantage_baseline,
            clip=args.advantage_clip,
        )

    def masked(self, rollout):
        return self.args.mask_truncated_completions and rollout.truncated

    def teaching(self, draw):
        """Whether a group has an advantage on a completion that is not masked: a bool a group."""
        teaches = [a != 0 and not self.masked(r) for a, r in zip(draw.advantages.tolist(), draw.rollouts, strict=True)]
        return [any(group) for group in self.grouped(teaches)]

    def grouped(self, values):
        """[S] -> a list of G a group."""
        size = self.args.num_generations
        return [values[i : i + size] for i in range(0, len(values), size)]

    def _joined(self, draws, trained):
        """Batches of a step -> `Experience`. trained: indices of groups."""
        prompts, rollouts, completions = (
            list(chain.from_iterable(getattr(draw, name) for draw in draws))
            for name in ("prompts", "rollouts", "completions")
        )
        per_function = torch.cat([draw.per_function for draw in draws])
        advantages = torch.cat([draw.advantages for draw in draws])
        # Those that are trained on together are scaled together.
        rows = torch.tensor(list(chain.from_iterable(self.grouped(range(len(prompts)))[i] for i in trained)))
        advantages[rows] = self.advantages(per_function[rows])
        samples = [
            Sample(prompt.ids, rollout.ids, advantage, rollout.logps, masked=self.masked(rollout))
            for prompt, rollout, advantage in zip(prompts, rollouts, advantages.tolist(), strict=True)
        ]
        by_group = self.grouped(samples)
        names, totals = self.rewards.names, self.rewards.total(per_function)
        metrics = _logged(draws) | rollout_metrics(rollouts) | _means([draw.live for draw in draws])
        metrics |= reward_metrics(names, per_function, totals, advantages, self.args.num_generations)
        tokens = sum(len(sample) for sample in samples) + sum(draw.lost_tokens for draw in draws)
        return Experience(
            samples, prompts, rollouts, completions, per_function, _columns(draws), [by_group[i] for i in trained],
            sum(draw.taken for draw in draws), tokens, metrics,
        )  # fmt: skip


def _logged(draws):
    """Errors of reward functions, and the means of what they passed to log_metric, as metrics."""
    errors, custom = Counter(), defaultdict(list)
    for draw in draws:
        errors += draw.errors
        for name, values in draw.custom.items():
            custom[name] += values
    means = {f"custom/{name}": sum(values) / len(values) for name, values in custom.items()}
    means = {name: mean for name, mean in means.items() if math.isfinite(mean)}
    return {f"rewards/{name}/errors": count for name, count in errors.items()} | means


def _means(measured):
    """What the engine measured in each batch -> its means."""
    return {name: sum(values[name] for values in measured) / len(measured) for name in measured[0]}


def _columns(draws):
    """The extra columns of all batches, None where a batch lacks one."""
    names = dict.fromkeys(chain.from_iterable(draw.extras for draw in draws))
    return {
        name: [value for draw in draws for value in draw.extras.get(name, [None] * len(draw.prompts))] for name in names
    }

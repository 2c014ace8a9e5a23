"""Turns prompts into rewarded groups of completions, and chooses the groups that a step trains on.

Dynamic sampling (DAPO, arXiv 2503.14476, section 3.2) drops the groups that teach nothing, and draws as many new
prompts in their place, batch after batch. It ends when prompts_per_step groups teach something, or when
max_num_gen_batches batches were drawn; the first of the dropped groups then fill the step. Oversampling starts more
groups than are wanted and aborts those that finish last, which favours prompts with short completions.

The metrics cover all groups that finished, dropped or not, because the kept groups alone are chosen by their rewards.
Aborted groups are counted only in the metrics of oversampling.

Shapes: S completions, those of a prompt side by side, G completions a group; F reward functions.

Turns the rewards of completions that are trained on together into advantages, of completions or of their tokens.

With process_rewards "token", the step rewards that functions log (`log_steps`) become advantages of tokens, as in
DeepSeekMath (arXiv 2402.03300), section 4.1.3. The functions that logged none give each completion its advantage as
they always do, and a token's advantage is the sum of both. A function that logged steps counts by these alone: what it
returned is their summary.

With masked_completions_in_group False, the rewards of masked completions are treated as not given.

Summarizes the completions and rewards of a step, as metrics for metrics.jsonl and lines for samples.jsonl.

Shapes: S completions, those of a group side by side, G completions a group; F reward functions.
"""

import dataclasses
import math
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from fastgrpo.config.settings import GRPOConfig
from fastgrpo.data.prompts import to_prompt
from fastgrpo.data.records import Completion, Sample, TrainerState
from fastgrpo.data.sources import Source
from fastgrpo.data.token_text import TokenText
from fastgrpo.loss.advantage import decoupled_advantages, group_advantages, process_advantages
from fastgrpo.policy.fit import check_prompts
from fastgrpo.ranks import ALONE, Ranks
from fastgrpo.rewards.call import Judging, Rewards, reward_matrix
from fastgrpo.rewards.values import SAMPLE_COLUMNS
from fastgrpo.rollout.backend import RolloutBackend, first_finished
from fastgrpo.rollout.sampling import SamplingParams
from fastgrpo.run.profiling import StageTimer
from fastgrpo.run.resume import digest_of_rows

# The distance between the seeds of two batches of one step. torch's CPU generator reads 32 bits of a seed. Modulo
# 2**32, the multiples of the golden ratio stay far from one another, and so from the seeds of the next steps.
BATCH_STRIDE = 0x9E3779B1


@dataclass(frozen=True)
class Draw:
    """One batch of prompts, drawn and rewarded.

    Attributes:
        completions: [S] completions with rewards and advantages.
        errors: How many completions each reward function failed on, by name.
        timeouts: For how many completions each reward function took too long, by name.
        logged: The values that reward functions logged, by name.
        live: What the rollout backend measured.
        taken: How many prompts were taken from the source, including those of aborted groups.
        lost_tokens: How many tokens of aborted groups were drawn.
    """

    completions: list[Completion]
    errors: Counter
    timeouts: Counter
    logged: dict[str, list[float]]
    live: dict[str, float]
    taken: int
    lost_tokens: int


@dataclass(frozen=True)
class Experience:
    """All that was drawn for a step.

    Attributes:
        completions: [S] completions with rewards and advantages.
        trained: The index of each completion that the step trains on, group by group.
        taken: How many prompts were taken from the source.
        num_tokens: Prompt and completion tokens, including the drawn tokens of aborted groups.
        metrics: What was measured, by name.
    """

    completions: list[Completion]
    trained: list[list[int]]
    taken: int
    num_tokens: int
    metrics: dict[str, float]


class ExperienceMaker:
    """Draws and rewards what a step trains on."""

    def __init__(
        self,
        source: Source,
        tokenizer: PreTrainedTokenizerBase,
        engine: RolloutBackend,
        rewards: Rewards,
        sampling: SamplingParams,
        args: GRPOConfig,
        timer: StageTimer,
        ranks: Ranks = ALONE,
    ):
        self.ranks = ranks
        self.source, self.tokenizer, self.engine, self.rewards = source, tokenizer, engine, rewards
        self.sampling, self.args, self.timer = sampling, args, timer
        self.stepped = False  # whether any function has logged step rewards

    def __call__(self, state: TrainerState) -> Experience:
        """Draw until there are enough groups that teach something."""
        args, draws, teaching = self.args, [], []
        for batch in range(args.max_num_gen_batches if args.dynamic_sampling else 1):
            draws.append(self.draw(state, batch, args.prompts_per_step - sum(teaching)))
            teaching += self.teaching(draws[-1].completions)
            if sum(teaching) == args.prompts_per_step:
                break
        # Take the earliest groups that teach, then the earliest dropped ones, and keep them in the order of their draw.
        trained = sorted(sorted(range(len(teaching)), key=lambda i: not teaching[i])[: args.prompts_per_step])
        completions, trained = self._trained_together(_joined(draws), trained)
        taken, lost = sum(draw.taken for draw in draws), sum(draw.lost_tokens for draw in draws)
        totals = self.rewards.total(reward_matrix(completions))
        metrics = _logged(draws) | length_metrics(completions) | _means([draw.live for draw in draws])
        metrics |= reward_metrics(completions, totals, args.num_generations)
        if args.dynamic_sampling:
            metrics |= {
                "dynamic_sampling/num_gen_batches": len(draws),
                "dynamic_sampling/dropped_groups": len(teaching) - len(trained),
                "dynamic_sampling/filled_groups": len(trained) - sum(teaching),
            }
        if args.oversampling_factor > 1:
            metrics |= {
                "oversampling/aborted_groups": taken - len(teaching),
                "oversampling/aborted_tokens": lost,
            }
        return Experience(completions, trained, taken, sum(map(len, completions)) + lost, metrics)

    def state_dict(self) -> dict[str, Any]:
        """Return what a checkpoint keeps: whether any function has logged step rewards."""
        return {"stepped": self.stepped}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` returned."""
        self.stepped = state["stepped"]

    def draw(self, state: TrainerState, batch: int, count: int) -> Draw:
        """Draw and reward one batch of groups."""
        taken = self.args.oversampled(count)
        rows = list(self.source.take(taken))
        if len(rows) != taken:  # the rollout would wait for the groups that are missing
            raise ValueError(
                f"the source of training rows ({type(self.source).__name__}) gave {len(rows)} rows for take({taken}); "
                "let it begin again at its end"
            )
        prompts = [to_prompt(row, self.tokenizer, self.args.template_kwargs) for row in rows]
        check_prompts(prompts, self.engine.policy, self.args.max_completion_length)
        seed = self.args.seed * 1_000_003 + state.global_step + batch * BATCH_STRIDE
        # Each batch begins at another rank, so that the few prompts of refills do not all fall to the same one.
        mine = [i for i in range(taken) if (i + batch) % self.ranks.size == self.ranks.rank]
        wanted = sum(i < count for i in mine)
        judging = Judging(self.rewards, prompts, self.tokenizer, state, self.ranks)
        with self.timer.stage("rollout"):
            with self.engine.policy.gather():
                _, lost = first_finished(
                    self.engine,
                    {i: prompts[i].ids for i in mine},
                    self.args.num_generations,
                    dataclasses.replace(self.sampling, seed=seed),
                    wanted,
                    judging.add,
                )
            # All ranks wait for the slowest here, so that the time of the stage is that of the whole rollout.
            told = self.engine.metrics() if wanted else {}, lost, digest_of_rows(rows)
            live, lost, digests = zip(*self.ranks.gather(told, "what the rollouts measured"), strict=True)
        if len({*digests}) > 1:
            raise ValueError(
                f"the source of training rows ({type(self.source).__name__}) gave other rows on other ranks; its rows "
                "must follow from its state and from the settings alone"
            )
        with self.timer.stage("reward"):
            judged = judging.result(allow_none=batch > 0)
        self._need_steps(judged)
        completions = self.with_advantages(judged.completions)
        measured = _means(list(filter(None, live)))
        return Draw(completions, judged.errors, judged.timeouts, judged.logged, measured, taken, sum(lost))

    def _need_steps(self, judged):
        """Refuse a run that is to learn from step rewards, whose first batch has none."""
        if self.args.process_rewards != "token" or self.stepped:
            return
        self.stepped = any(any(completion.steps.values()) for completion in judged.completions)
        silent = (
            reward_matrix(judged.completions).isnan().all(0).any()
        )  # a function that gave no verdict, but may later
        if not self.stepped and not silent:
            raise ValueError(
                "process_rewards=token needs step rewards, and no reward function logged any for the first "
                f"completions; call log_steps(ends, rewards) in one of {', '.join(self.rewards.names)}, or name a "
                "process reward model (prm:DIR) in reward_funcs, or leave process_rewards out"
            )

    def with_advantages(self, completions: Sequence[Completion]) -> list[Completion]:
        """Turn the rewards of completions that are trained on together into advantages.

        Args:
            completions: [S] completions with rewards.
        """
        return with_advantages(completions, self.rewards, self.args)

    def teaching(self, completions: Sequence[Completion]) -> list[bool]:
        """Find the groups with an advantage on a completion that is not masked.

        Args:
            completions: [S] completions with advantages.
        """
        return [any(c.informative and not c.masked for c in group) for group in self._groups(completions)]

    def _groups(self, values):
        """Split a list of S values into one list of G values for each group."""
        size = self.args.num_generations
        return [values[i : i + size] for i in range(0, len(values), size)]

    def _trained_together(self, completions, groups):
        """Compute the advantages again, over all groups that the step trains on."""
        by_group = self._groups(range(len(completions)))
        trained = [list(by_group[group]) for group in groups]
        indices = list(chain.from_iterable(trained))
        for i, completion in zip(indices, self.with_advantages([completions[i] for i in indices]), strict=True):
            completions[i] = completion
        return completions, trained


def to_sample(completion: Completion, index: int | None = None, corrected: bool = False) -> Sample:
    """Make the sample that an update trains on from a completion."""
    rollout = completion.rollout
    return Sample(
        completion.prompt.ids,
        rollout.ids,
        completion.advantage,
        rollout_logps=rollout.logps,
        sampler_logps=rollout.sampler_logps if corrected else None,
        masked=completion.masked,
        index=index,
        token_advantages=completion.token_advantages,
    )


def _joined(draws):
    """Join the completions of all batches. Columns that were logged for one batch alone are None in the others."""
    completions = list(chain.from_iterable(draw.completions for draw in draws))
    columns = dict.fromkeys(chain.from_iterable(completion.extras for completion in completions))
    return [dataclasses.replace(c, extras=columns | c.extras) for c in completions]


def _logged(draws):
    """Return errors and timeouts of reward functions, and the means of the values that they logged, as metrics."""
    counts, logged = Counter(), defaultdict(list)
    for draw in draws:
        counts.update({f"rewards/{name}/errors": count for name, count in draw.errors.items()})
        counts.update({f"rewards/{name}/timeouts": count for name, count in draw.timeouts.items()})
        for name, values in draw.logged.items():
            logged[name] += values
    means = {name: sum(values) / len(values) for name, values in logged.items()}
    return dict(counts) | means


def _means(measured):
    """Average what rollout backends measured."""
    return {
        name: sum(values[name] for values in measured) / len(measured) for name in (measured[0] if measured else ())
    }


def with_advantages(completions: Sequence[Completion], rewards: Rewards, args: GRPOConfig) -> list[Completion]:
    """Turn the rewards of completions that are trained on together into advantages.

    Args:
        completions: [S] completions with rewards, those of a group side by side.
        rewards: The reward functions, whose weights count.
        args: The settings.
    """
    masked = [args.mask_truncated_completions and completion.rollout.truncated for completion in completions]
    left_out = [at for at, it in enumerate(masked) if it and not args.masked_completions_in_group]
    stepped = sorted({name for c in completions for name in c.steps}) if args.process_rewards == "token" else []
    per_function = reward_matrix(completions)
    per_function[left_out] = math.nan
    per_function[:, [rewards.names.index(name) for name in stepped]] = math.nan
    if args.multi_objective_aggregation == "normalize_then_sum":
        advantages = decoupled_advantages(per_function, rewards.weights, args.num_generations, clip=args.advantage_clip)
    else:
        advantages = group_advantages(
            rewards.total(per_function),
            args.num_generations,
            scale=args.scale_rewards,
            baseline=args.advantage_baseline,
            clip=None if stepped else args.advantage_clip,
        )
    done = [
        dataclasses.replace(completion, advantage=advantage, token_advantages=None, masked=out)
        for completion, advantage, out in zip(completions, advantages.tolist(), masked, strict=True)
    ]
    return _with_steps(done, stepped, {*left_out}, rewards, args) if stepped else done


def _with_steps(completions, stepped, left_out, rewards, args):
    """Add the advantages of steps to those of completions, token by token."""
    lengths = [len(completion.rollout.ids) for completion in completions]
    parts = [torch.full((n,), c.advantage, dtype=torch.float64) for n, c in zip(lengths, completions, strict=True)]
    for name in stepped:
        steps = [() if i in left_out else c.steps.get(name, ()) for i, c in enumerate(completions)]
        weight = rewards.weights[rewards.names.index(name)]
        own = process_advantages(steps, lengths, args.num_generations, scale=args.scale_rewards)
        parts = [part + weight * of_tokens for part, of_tokens in zip(parts, own, strict=True)]
    if args.advantage_clip is not None:
        parts = [part.clamp(-args.advantage_clip, args.advantage_clip) for part in parts]
    return [
        dataclasses.replace(completion, advantage=part.mean().item(), token_advantages=part.float())
        for completion, part in zip(completions, parts, strict=True)
    ]


def reward_metrics(completions: Sequence[Completion], totals: torch.Tensor, group_size: int) -> dict[str, float]:
    """Measure how the completions of a step were rewarded.

    Args:
        completions: [S], with rewards and advantages.
        totals: [S] total rewards, NaN where none was given.
        group_size: G.
    """
    per_function = reward_matrix(completions)
    advantages = torch.tensor([completion.advantage for completion in completions], dtype=torch.float64)
    sizes = torch.tensor([_advantage_size(completion) for completion in completions], dtype=torch.float64)
    informative = torch.tensor([completion.informative for completion in completions])
    spread = informative.view(-1, group_size).any(1).double().mean().item()
    values = {
        "reward": totals.nanmean().item(),
        "reward_std": totals.view(-1, group_size).std(1).nanmean().item(),
        "accuracy": (per_function[:, 0] >= 1).double().mean().item(),
        "frac_reward_zero_std": 1 - spread,
        "frac_informative": spread,
        "advantage/mean": advantages.mean().item(),
        "advantage/abs_mean": sizes.mean().item(),
    }
    for name, column in zip(completions[0].rewards, per_function.T, strict=True):
        given = column[~column.isnan()]
        if not len(given):
            continue
        values[f"rewards/{name}/mean"] = given.mean().item()
        values[f"rewards/{name}/std"] = given.std(correction=0).item()
    return {name: value for name, value in values.items() if not math.isnan(value)}


def _advantage_size(completion):
    """Return the magnitude of a completion's advantage, which is the mean over its tokens where each has its own."""
    own = completion.token_advantages
    return abs(completion.advantage) if own is None else own.double().abs().mean().item()


def length_metrics(completions: Sequence[Completion]) -> dict[str, float]:
    """Measure how long the completions of a step were, in tokens, and how many were truncated.

    Args:
        completions: [S].
    """
    lengths = [len(completion.rollout.ids) for completion in completions]
    ended = [len(completion.rollout.ids) for completion in completions if not completion.rollout.truncated]
    of_ended = (
        {
            "completions/mean_terminated_length": sum(ended) / len(ended),
            "completions/min_terminated_length": min(ended),
            "completions/max_terminated_length": max(ended),
        }
        if ended
        else {}
    )
    return of_ended | {
        "completions/mean_length": sum(lengths) / len(lengths),
        "completions/min_length": min(lengths),
        "completions/max_length": max(lengths),
        "completions/clipped_ratio": sum(completion.rollout.truncated for completion in completions) / len(lengths),
    }


def rates(tokens: int, rollout_seconds: float, seconds: float) -> dict[str, float]:
    """Measure how fast a step and its rollout were."""
    values = {"step_time": seconds, "tokens/s": tokens / seconds}
    if rollout_seconds:
        values |= {"rollout/tokens/s": tokens / rollout_seconds, "rollout/share": rollout_seconds / seconds}
    return values


def logged_groups(groups: int, group_size: int, most: int) -> list[int]:
    """Choose the groups whose completions samples.jsonl keeps: whole ones, evenly spread, the first among them."""
    count = min(max(most // group_size, 1), groups)
    return [i * groups // count for i in range(count)]


def sample_rows(
    step: int, completions: Sequence[Completion], group_size: int, groups: Sequence[int], text: TokenText
) -> Iterator[dict]:
    """Make the lines of samples.jsonl.

    Args:
        step: The step.
        completions: [S], after the update.
        group_size: G.
        groups: The indices of the groups that are kept.
        text: Finds where tokens end, see `TokenText`.
    """
    for group in groups:
        for completion in completions[group * group_size : (group + 1) * group_size]:
            rollout, ratios = completion.rollout, completion.ratios
            values = (
                step,
                group,
                completion.prompt.prompt,
                completion.content,
                {name: None if math.isnan(value) else value for name, value in completion.rewards.items()},
                completion.advantage,
                rollout.finish_reason,
                len(rollout.ids),
                len(completion.clipped) / max(len(rollout.ids), 1),
                text.ends(rollout.ids),
                [round(value, 4) for value in rollout.logps.tolist()],
                *(() if ratios is None else ([round(value, 4) for value in ratios], list(completion.clipped))),
            )
            yield dict(zip(SAMPLE_COLUMNS, values, strict=False)) | completion.extras

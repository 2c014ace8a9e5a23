"""From prompts to judged completions with advantages, and the choice of the groups that a step trains on.

    rows -> prompts -> rollout -> rewards -> advantages -> groups to train on

Dynamic sampling (DAPO, arXiv 2503.14476, section 3.2) replaces groups in which every sample is masked or has advantage
0 by groups of new prompts, batch after batch. It ends when prompts_per_step groups remain, or when dynamic_sampling
batches were drawn; the first of the replaced groups then fill the step. Oversampling starts more groups than are wanted
and aborts those that finish last, which favours prompts with short completions.

The metrics cover all groups that finished, dropped or not, because the kept groups are chosen by their rewards. Aborted
groups count only in the metrics of oversampling.

With max_staleness, batches are begun steps ahead, see `ahead.py`.

Shapes: S samples, those of a prompt side by side, G samples a group; F reward functions.
"""

import copy
import dataclasses
import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import chain, compress, repeat
from typing import Any

import torch

from fastgrpo.config.settings import GRPOConfig
from fastgrpo.data.prompts import copied, shortened
from fastgrpo.data.records import Prompt, Sample, StopReason, TrainerState
from fastgrpo.data.sources import Source
from fastgrpo.data.token_text import TokenText
from fastgrpo.loss.advantages import decoupled_advantages, group_advantages, process_advantages, sample_std
from fastgrpo.policy.fit import check_prompts
from fastgrpo.policy.model import Policy
from fastgrpo.ranks import ALONE, Ranks
from fastgrpo.rewards.call import Judging, Rewards, reward_matrix
from fastgrpo.rollout.backend import Drawing, RolloutBackend
from fastgrpo.rollout.sampling import SamplingParams, integers
from fastgrpo.run.log import RunLog
from fastgrpo.run.metrics import SAMPLE_COLUMNS, mean_given
from fastgrpo.run.profiling import StageTimer
from fastgrpo.run.resume import digest_of_rows
from fastgrpo.tools.prompts import Prompts
from fastgrpo.trainer.ahead import Ahead, Batch

# The distance between the seeds of two batches of one step. torch's CPU generator reads 32 bits of a seed. Modulo
# 2**32, the multiples of the golden ratio stay far from one another, and so from the seeds of the next steps.
BATCH_STRIDE = 0x9E3779B1


class Collector:
    """Draws and judges what a step trains on."""

    def __init__(
        self,
        source: Source,
        prompts: Prompts,
        engine: RolloutBackend,
        rewards: Rewards,
        sampling: SamplingParams,
        args: GRPOConfig,
        timer: StageTimer,
        ranks: Ranks = ALONE,
        rollout_func: Callable[[list], Mapping[str, list]] | None = None,
    ):
        self.source, self.prompts, self.engine, self.rewards = source, prompts, engine, rewards
        self.sampling, self.args, self.timer, self.ranks = sampling, args, timer, ranks
        self.rollout_func = rollout_func
        self.place = {}  # state of the source before it gave the rows of this step
        self.stepped = False  # whether any function has logged step rewards
        self.ahead = Ahead(engine)

    def __call__(self, state: TrainerState) -> tuple[list[Sample], dict[str, float]]:
        """Generate groups until prompts_per_step of them have an advantage, and choose the groups of the step.

        Count in `state` the rows that were taken, and the tokens of prompts and completions, including aborted groups.
        Return all finished samples, and the metrics. The step trains on the samples with `trained`.
        """
        args, samples, spread, useful = self.args, [], [], []
        counts, logged, live, taken, lost = Counter(), defaultdict(list), [], 0, 0
        size = args.num_generations
        for batch in range(args.dynamic_sampling or 1):
            wanted = args.prompts_per_step - sum(useful)
            taken += args.oversampled(wanted)
            with self.timer.stage("rollout"), self.engine.policy.gather():  # gather weights once for both calls
                drawn = self._begin(state, state.global_step, batch, wanted) if batch else self._of_step(state)
                measured, lost_now = self._finish(drawn)
            with self.timer.stage("reward"):
                judged = drawn.judging.result()
                self.prompts.finish(drawn.groups)
            self._need_steps(judged)
            live.append(measured)
            lost += lost_now
            for what, of_functions in (("errors", judged.errors), ("timeouts", judged.timeouts)):
                counts.update({f"rewards/{name}/{what}": count for name, count in of_functions.items()})
            for name, values in judged.logged.items():
                logged[name] += values
            of_batch = with_advantages(judged.completions, self.rewards, args)
            samples += of_batch
            groups = [of_batch[i : i + size] for i in range(0, len(of_batch), size)]
            spread += [any(s.informative for s in group) for group in groups]
            useful += [
                not args.dynamic_sampling or any(s.informative and not s.masked for s in group) for group in groups
            ]
            if sum(useful) == args.prompts_per_step:
                break
        columns = dict.fromkeys(chain.from_iterable(s.extras for s in samples))  # None where a batch lacks a column
        samples = [s.replace(extras=columns | s.extras) for s in samples]
        # Take the earliest groups with an advantage, then the earliest others, and keep them in the order of the draw.
        chosen = sorted(sorted(range(len(useful)), key=lambda i: not useful[i])[: args.prompts_per_step])
        trained = [i for group in chosen for i in range(group * size, (group + 1) * size)]
        of_step = [samples[i] for i in trained]
        if len(live) > 1:  # scale advantages over the trained groups, which come from several batches
            of_step = with_advantages(of_step, self.rewards, args)
        for i, sample in zip(trained, of_step, strict=True):
            samples[i] = sample.replace(trained=True)
        state.count(taken, sum(map(len, samples)) + lost, of=len(self.source))
        metrics = dict(counts) | {name: mean_given(values) for name, values in logged.items()}
        metrics |= length_metrics(samples) | self.prompts.metrics(samples) | _means(live)
        if "sampler/idle_s" in metrics:  # seconds since the last batch
            metrics["sampler/idle_s"] = sum(measured.get("sampler/idle_s", 0.0) for measured in live)
        metrics |= version_metrics(of_step, state.global_step, args.max_staleness)
        metrics |= reward_metrics(samples, self.rewards.total(reward_matrix(samples)), spread)
        if args.dynamic_sampling:
            metrics |= {
                "dynamic_sampling/num_gen_batches": len(live),
                "dynamic_sampling/dropped_groups": len(useful) - len(chosen),
                "dynamic_sampling/filled_groups": len(chosen) - sum(useful),
            }
        if args.oversampling_factor > 1:
            metrics |= {
                "oversampling/aborted_groups": taken - len(useful),
                "oversampling/aborted_tokens": lost,
            }
        return samples, metrics

    def _of_step(self, state):
        """Begin the batches up to `max_staleness` steps ahead, and return the batch of this step."""
        ahead, step = self.ahead.batches, state.global_step
        while self.ahead.saved:
            saved = self.ahead.saved[0]
            ahead.append(self._begin(state, saved["step"], 0, self.args.prompts_per_step, saved))
            self.ahead.saved.pop(0)
        last = min(step + self.args.max_staleness, max(state.max_steps - 1, step))
        for further in range(step + len(ahead), last + 1):
            ahead.append(self._begin(state, further, 0, self.args.prompts_per_step))
        drawn = ahead.popleft()
        self.place = drawn.place
        return drawn

    def _begin(self, state, step, batch, count, saved=None):
        """Begin to draw and judge one batch of `count` groups, except those that a checkpoint has."""
        taken, place = self.args.oversampled(count), copy.deepcopy(self.source.state_dict())
        if saved is not None:
            self.source.load_state_dict(copy.deepcopy(saved["place"]))
        rows = list(self.source.take(taken))
        if saved is not None:
            self.source.load_state_dict(place)
            place = saved["place"]
        if len(rows) != taken:  # the rollout would wait for the groups that are missing
            raise ValueError(
                f"the source of training rows ({type(self.source).__name__}) gave {len(rows)} rows for take({taken}); "
                "at the end of its rows, it must start again"
            )
        prompts = [self.prompts(row) for row in rows]
        check_prompts(prompts, self.engine.policy, self.args.max_completion_length)
        seed = self.args.seed * 1_000_003 + step + batch * BATCH_STRIDE
        # Each batch begins at another rank, so that the few prompts of refills do not all fall to the same one.
        mine = [i for i in range(taken) if (i + batch) % self.ranks.size == self.ranks.rank]
        judging = Judging(self.rewards, prompts, self.prompts.tokenizer, state, self.ranks, step)
        drawn = Batch(step, place, rows, judging)
        known = saved is not None and saved.get("digest") == digest_of_rows(rows)  # completions of the same rows
        for i, samples in (saved["finished"] if known else {}).items():
            drawn.restored[i] = [Sample(prompt_ids=prompts[i].ids, **values) for values in samples]
            judging.add(i, drawn.restored[i])
        wanted = sum(i < count for i in mine) - len(drawn.restored)
        left = [i for i in mine if i not in drawn.restored] if wanted else []
        drawn.groups = self.prompts.start({i: prompts[i] for i in left}, self.args.num_generations, step, batch)
        self.engine.sync(self.ranks, state.global_step)  # also for a rollout_func that asks the vLLM servers
        if self.rollout_func is None:
            sampling = dataclasses.replace(self.sampling, seed=seed)
            drawn.drawing = Drawing(self.engine, drawn.groups, sampling, wanted, judging.add, step % 2**14)
        return drawn

    def _finish(self, drawn):
        """Wait for a batch. Return what was measured, and the tokens aborted."""
        lost = 0
        if drawn.drawing is None:
            stop_ids = self.sampling.stop_token_ids
            own = rolled_out(self.rollout_func, drawn.groups, stop_ids, self.engine.policy)
            for i, samples in own.items():
                drawn.judging.add(i, samples)
        else:
            self.ahead.wait(drawn)
            lost = drawn.drawing.lost
        # All ranks wait for the slowest here, so that the stage's time covers the whole rollout.
        measured = self.engine.metrics() if drawn.groups else {}
        told = measured, lost, digest_of_rows(drawn.rows)
        live, lost, digests = zip(*self.ranks.gather(told, "what the rollouts measured"), strict=True)
        if len({*digests}) > 1:
            raise ValueError(
                f"the source of training rows ({type(self.source).__name__}) gave other rows on other ranks; its rows "
                "must depend only on its state and the settings"
            )
        return _means(list(filter(None, live))), sum(lost)

    def _need_steps(self, judged):
        """Raise if process_rewards is "token" and no function has logged step rewards for the first batch."""
        if self.args.process_rewards != "token" or self.stepped:
            return
        self.stepped = any(any(sample.steps.values()) for sample in judged.completions)
        # A function that returned only None may log steps later.
        silent = reward_matrix(judged.completions).isnan().all(0).any()
        if not self.stepped and not silent:
            raise ValueError(
                "process_rewards=token needs step rewards, and no reward function logged any for the first "
                f"completions; call log_steps(ends, rewards) in one of {', '.join(self.rewards.names)}, or name a "
                "process reward model (prm:DIR) in reward_funcs, or leave process_rewards out"
            )

    def state_dict(self) -> dict[str, Any]:
        """Return whether any function has logged step rewards."""
        return {"stepped": self.stepped}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` returned."""
        self.stepped = state["stepped"]


def _means(measured):
    """Average what rollout backends measured. What some did not report is 0 for them."""
    names = dict.fromkeys(name for values in measured for name in values)
    return {name: sum(values.get(name, 0) for values in measured) / len(measured) for name in names}


def rolled_out(
    function: Callable[[list], Mapping[str, list]],
    groups: Mapping[int, Sequence[Prompt]],
    stop_ids: Sequence[int],
    policy: Policy,
) -> dict[int, list[Sample]]:
    """Generate completions by TRL's `rollout_func`. Those that do not end with a stop token count as truncated."""
    prompts = [prompt for group in groups.values() for prompt in group]
    if not prompts:  # a refill of dynamic sampling may give this rank none
        return {}
    returned = dict(function([copied(prompt.prompt) for prompt in prompts]) or {})
    needed = ("prompt_ids", "completion_ids", "logprobs")
    lacking = [name for name in needed if returned.get(name) is None]
    if lacking:
        raise ValueError(f"rollout_func must return {', '.join(needed)}; {', '.join(lacking)} is missing")
    for name, values in returned.items():
        if isinstance(values, (str, Mapping)) or not hasattr(values, "__len__"):
            returned[name] = [values] * len(prompts)  # one value for all, as in TRL
    wrong = {name: len(values) for name, values in returned.items() if len(values) != len(prompts)}
    if wrong:
        raise ValueError(f"rollout_func must return one item per prompt, {len(prompts)} here, got {wrong}")
    masks = returned.pop("env_mask", None)
    masks = [None] * len(prompts) if masks is None else masks
    ids, drawn, logprobs = (returned.pop(name) for name in needed)
    ids, drawn = ([integers(item, "tokens of rollout_func") for item in items] for items in (ids, drawn))
    samples = []
    for i, prompt in enumerate(prompts):
        mask = None if masks[i] is None or all(masks[i]) else [int(bool(own)) for own in masks[i]]
        lengths = {len(drawn[i]), len(logprobs[i]), len(mask or drawn[i])}
        if len(lengths) > 1 or not drawn[i] or (mask and not any(mask)):
            raise ValueError(
                f"completion {i} of rollout_func must have at least one drawn token, and as many logprobs and env_mask "
                f"as tokens; got {len(drawn[i])} tokens, {len(logprobs[i])} logprobs and {len(mask or drawn[i])} "
                f"values of env_mask, of which {sum(mask or [1] * len(drawn[i]))} are drawn"
            )
        policy.check_ids(ids[i], f"prompt {i} of rollout_func")
        policy.check_ids(drawn[i], f"completion {i} of rollout_func")
        logps = torch.tensor([*map(_logprob, compress(logprobs[i], mask or repeat(1)))], dtype=torch.float32)
        own = {name: values[i] for name, values in returned.items()}
        reason = StopReason.STOP if drawn[i][-1] in stop_ids else StopReason.LENGTH
        samples.append(
            Sample(
                ids[i], drawn[i], logps=logps, sampler_logps=logps, finish_reason=reason, tool_mask=mask,
                columns=prompt.columns | own,
            )
        )  # fmt: skip
    size = len(prompts) // len(groups)
    return {i: samples[at * size : (at + 1) * size] for at, i in enumerate(groups)}


def _logprob(value):
    try:
        if math.isfinite(value):
            return float(value)
    except TypeError:  # not a number
        pass
    raise ValueError(f"logprobs of rollout_func must be finite numbers, one per token; got {shortened(value)}")


def with_advantages(
    samples: Sequence[Sample], rewards: Rewards, args: GRPOConfig, group_size: int | None = None
) -> list[Sample]:
    """Turn the rewards of samples that are trained on together into advantages, of completions or of their tokens.

    With process_rewards "token", the step rewards that functions log (`log_steps`) become advantages of tokens, as in
    DeepSeekMath (arXiv 2402.03300), section 4.1.3. The other functions give each completion its advantage as always,
    and a token's advantage is the sum of these two. Of a function that logged steps, only the step rewards count: what
    it returned is their summary.
    """
    size = group_size or args.num_generations
    per_function, stepped = _without_stepped(samples, rewards, args)
    if args.multi_objective_aggregation == "normalize_then_sum":
        advantages = decoupled_advantages(per_function, rewards.weights, size, clip=args.advantage_clip)
    else:
        advantages = group_advantages(
            rewards.total(per_function),
            size,
            scale=args.scale_rewards,
            baseline=args.advantage_baseline,
            clip=None if stepped else args.advantage_clip,
        )
    done = [
        sample.replace(
            advantage=advantage, token_advantages=None, masked=args.mask_truncated_completions and sample.truncated
        )
        for sample, advantage in zip(samples, advantages.tolist(), strict=True)
    ]
    return _with_steps(done, stepped, rewards, args, size) if stepped else done


def _without_stepped(samples, rewards, args):
    """Return the rewards [S, F], NaN for functions that logged step rewards, and the names of these functions."""
    stepped = sorted({name for s in samples for name in s.steps}) if args.process_rewards == "token" else []
    per_function = reward_matrix(samples)
    per_function[:, [rewards.names.index(name) for name in stepped]] = math.nan
    return per_function, stepped


def _with_steps(samples, stepped, rewards, args, size):
    """Add the advantages of steps to those of completions, token by token."""
    lengths = [len(sample.ids) for sample in samples]
    parts = [torch.full((n,), s.advantage, dtype=torch.float64) for n, s in zip(lengths, samples, strict=True)]
    for name in stepped:
        steps = [s.steps.get(name, ()) for s in samples]
        weight = rewards.weights[rewards.names.index(name)]
        own = process_advantages(steps, lengths, size, scale=args.scale_rewards)
        parts = [part + weight * of_tokens for part, of_tokens in zip(parts, own, strict=True)]
    if args.advantage_clip is not None:
        parts = [part.clamp(-args.advantage_clip, args.advantage_clip) for part in parts]
    drawn = [
        p if s.tool_mask is None else p[torch.tensor(s.tool_mask) > 0] for s, p in zip(samples, parts, strict=True)
    ]
    return [
        sample.replace(advantage=part.mean().item(), token_advantages=part.float())
        for sample, part in zip(samples, drawn, strict=True)
    ]


def reward_metrics(samples: Sequence[Sample], totals: torch.Tensor, spread: Sequence[bool]) -> dict[str, float]:
    """Measure how the samples of a step were rewarded.

    `totals` [S] are NaN where no reward was given. `spread` holds for each group whether an advantage is not 0.
    """
    per_function = reward_matrix(samples)
    advantages = torch.tensor([sample.advantage for sample in samples], dtype=torch.float64)
    # The size of an advantage is the mean over the tokens where each has its own.
    sizes = [abs(s.advantage) if s.token_advantages is None else _mean_size(s.token_advantages) for s in samples]
    informative = sum(spread) / len(spread)
    groups = totals.view(len(spread), -1)
    known = ~groups.isnan()
    deviations = sample_std(torch.where(known, groups - groups.nanmean(1, keepdim=True), 0.0), known, dim=1)[:, 0]
    values = {
        "reward": totals.nanmean().item(),
        "reward_std": deviations[known.sum(1) > 1].mean().item(),
        "accuracy": (per_function[:, 0] >= 1).double().mean().item(),
        "frac_reward_zero_std": 1 - informative,
        "frac_informative": informative,
        "advantage/mean": round(advantages.mean().item(), 12) + 0.0,  # 0 instead of 1e-17
        "advantage/abs_mean": torch.tensor(sizes, dtype=torch.float64).mean().item(),
    }
    for name, column in zip(samples[0].rewards, per_function.T, strict=True):
        given = column[~column.isnan()]
        if len(given):
            values[f"rewards/{name}/mean"] = given.mean().item()
            values[f"rewards/{name}/std"] = given.std(correction=min(1, len(given) - 1)).item()
    return {name: value for name, value in values.items() if not math.isnan(value)}


def _mean_size(of_tokens):
    return of_tokens.double().abs().mean().item()


def version_metrics(samples: Sequence[Sample], step: int, max_staleness: int) -> dict[str, float]:
    """Return the least and largest weight version (training step) that drew the tokens, and the share of each age."""
    given = [sample.versions for sample in samples if sample.versions is not None]
    versions = torch.cat(given) if given else torch.tensor([step])
    metrics = {"sampler/version_min": versions.min().item(), "sampler/version_max": versions.max().item()}
    for age in range(max_staleness + 1) if max_staleness else ():
        metrics[f"sampler/staleness_{age}"] = (versions == step - age).double().mean().item()
    return metrics


def length_metrics(samples: Sequence[Sample]) -> dict[str, float]:
    """Measure how long the completions of a step were, in drawn tokens, and how many were truncated."""
    values = {}
    ended = [len(sample.drawn) for sample in samples if not sample.truncated]
    for kind, lengths in (("_terminated", ended), ("", [len(sample.drawn) for sample in samples])):
        if lengths:
            values |= {
                f"completions/mean{kind}_length": sum(lengths) / len(lengths),
                f"completions/min{kind}_length": min(lengths),
                f"completions/max{kind}_length": max(lengths),
            }
    return values | {"completions/clipped_ratio": sum(sample.truncated for sample in samples) / len(samples)}


KEPT_SAMPLES = 64  # completions that samples.jsonl keeps of a logged step, unless log_completions keeps all


def logged_groups(groups: int, group_size: int, most: int) -> list[int]:
    """Choose the groups whose completions samples.jsonl keeps: whole ones, evenly spread, the first among them."""
    count = min(max(most // group_size, 1), groups)
    return [i * groups // count for i in range(count)]


def log_samples(
    step: int,
    samples: Sequence[Sample],
    args: GRPOConfig,
    ranks: Ranks,
    log: RunLog,
    text: TokenText,
) -> None:
    """Write some groups to samples.jsonl, with the ratios of the last update, gathered from all ranks."""
    size, samples = args.num_generations, list(samples)
    groups = logged_groups(len(samples) // size, size, len(samples) if args.log_completions else KEPT_SAMPLES)
    needed = {group * size + i for group in groups for i in range(size)}
    mine = {
        i: (sample.ratios.cpu(), sample.clipped.cpu())
        for i, sample in enumerate(samples)
        if sample.ratios is not None and i in needed
    }
    for known in ranks.gather(mine, "the ratios of the samples that are logged"):
        for i, (ratios, clipped) in known.items():
            samples[i] = samples[i].replace(ratios=ratios, clipped=clipped)
    if ranks.lead:
        spans = [(group, samples[group * size : (group + 1) * size]) for group in groups]
        rows = [row for group, of_group in spans for row in sample_rows(step, group, of_group, text)]
        log.samples(rows)
        if args.log_completions:
            log.completions(step, rows, args.num_completions_to_print)


def sample_rows(step: int, group: int, samples: Sequence[Sample], text: TokenText) -> Iterator[dict]:
    """Make the lines of samples.jsonl of one group, after the update."""
    for sample in samples:
        seen = () if sample.ratios is None else ([round(ratio, 4) for ratio in sample.ratios.tolist()],)
        clipped = [] if sample.clipped is None else sample.clipped.nonzero()[:, 0].tolist()
        values = (
            step,
            group,
            sample.prompt,
            sample.content,
            {name: None if math.isnan(value) else value for name, value in sample.rewards.items()},
            sample.advantage,
            sample.finish_reason,
            len(sample.drawn),
            len(clipped) / max(len(sample.drawn), 1),
            list(compress(text.ends(sample.ids), sample.tool_mask or repeat(1))),
            [round(value, 4) for value in sample.logps.tolist()],
            *((*seen, clipped) if seen else ()),
        )
        row = dict(zip(SAMPLE_COLUMNS, values, strict=False))
        if sample.dialogue is not None or sample.tool_mask is not None:
            row["turns"] = text.turns(sample.ids, sample.tool_mask or [1] * len(sample.ids))
            row["calls"] = [] if sample.dialogue is None else sample.dialogue.calls
        yield row | sample.extras


def rates(tokens: int, rollout_seconds: float, seconds: float) -> dict[str, float]:
    """Measure how fast a step and its rollout were."""
    values = {"step_time": seconds, "tokens/s": tokens / seconds}
    if rollout_seconds:
        values |= {"rollout/tokens/s": tokens / rollout_seconds, "rollout/share": rollout_seconds / seconds}
    return values

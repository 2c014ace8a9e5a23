"""The updates of one rollout: minibatches and passes over them, old and reference log-probs, loss and metrics.

    collected samples -> token weights -> reference and old log-probs -> selection -> loss -> AdamW

Each token has a weight in the loss of the whole update (`Sample.weights`), computed before any sample is dropped. So
the result depends neither on the split into micro-batches, nor on whether samples without gradient are dropped.

Shapes: D drawn tokens of a completion.
"""

import dataclasses
import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import partial
from itertools import accumulate, chain, pairwise
from typing import Any

import torch

from fastgrpo.config.settings import GRPOConfig
from fastgrpo.data.records import Batch, Sample
from fastgrpo.loss.losses import GRPOLossOutput, linear_grpo_loss
from fastgrpo.loss.objective import Objective
from fastgrpo.policy.micro_batches import Dealer
from fastgrpo.policy.model import Policy
from fastgrpo.policy.ref_model import Reference, Scoring, score
from fastgrpo.ranks import ALONE, Ranks
from fastgrpo.rollout.probe import DrawCheck
from fastgrpo.run.profiling import StageTimer, update_flops
from fastgrpo.trainer.optim import MasterAdamW

EXTREMES = {"min": min, "max": max}  # metrics that end in one of these names are not averaged
LARGEST = ("sampler/logp_gap_max", "head/dropped_mass")  # further metrics that are reduced by their maximum
SUMMED = ("policy_loss", "active_tokens")


class Learner:
    """Feeds samples to a loss in micro-batches of a token budget, and steps the optimizer.

    The loss of a micro-batch must be a sum of terms weighted over the whole update (`Sample.weights`). So loss and
    gradient do not depend on the split into micro-batches and over ranks. Gradients are summed over the ranks once,
    after the last micro-batch.
    """

    def __init__(
        self,
        policy: Policy,
        optimizer: MasterAdamW,
        schedule: torch.optim.lr_scheduler.LRScheduler,
        *,
        max_grad_norm: float,
        max_tokens: int,
        share_prompt: bool = True,
        timer: StageTimer | None = None,
        ranks: Ranks = ALONE,
    ):
        self.policy, self.optimizer, self.schedule = policy, optimizer, schedule
        self.max_grad_norm = max_grad_norm
        self.dealer = Dealer(max_tokens, share_prompt, ranks, policy.lockstep, policy.own_attention)
        self.timer, self.ranks = timer or StageTimer(policy.device), ranks
        self.after_backward = self.after_update = None  # called after each

    @property
    def learning_rate(self) -> float:
        """The learning rate of the next update."""
        return self.schedule.get_last_lr()[0]

    def step(
        self,
        samples: Sequence[Sample],
        loss_fn: Callable[[list[int], Batch], torch.Tensor],
        idle_fn: Callable[[], torch.Tensor] | None = None,
        veto: Callable[[torch.Tensor], torch.Tensor] | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Update once, and return the gradient norm before clipping and the loss, scalar tensors equal on all ranks.

        Without samples, the norm is 0, and AdamW steps with gradients of 0. If loss or gradient are not finite, the
        norm is NaN; a `veto` that returns NaN for the loss of this rank has the same effect. Then the weights do not
        change, and only the schedule advances.
        """
        total = None
        with self.ranks.waiting("an update"), self.optimizer.receiving():
            for loss in self._losses(samples, loss_fn, idle_fn):
                with self.timer.stage("backward"):
                    loss.backward()
                if self.after_backward is not None:
                    self.after_backward()
                total = loss.detach() if total is None else total + loss.detach()
            if veto is not None:
                total = veto(torch.zeros((), device=self.policy.device) if total is None else total)
            with self.timer.stage("optimizer"):
                total = self.optimizer.reduce(self.ranks, total)
                norm = self.optimizer.step(self.max_grad_norm, total)
            if self.after_update is not None:
                self.after_update()
        self.schedule.step()
        return norm, total

    @torch.no_grad()
    def measure(self, samples: Sequence[Sample], loss_fn: Callable, idle_fn: Callable) -> float:
        """Compute the loss of samples without an update."""
        with self.ranks.waiting("the held-out loss"):
            own = math.fsum(loss.item() for loss in self._losses(samples, loss_fn, idle_fn))
            return math.fsum(self.ranks.gather(own, "the held-out loss"))

    def _losses(self, samples, loss_fn, idle_fn):
        """Compute the loss of each micro-batch of this rank in turn."""
        self.dealer.meet("the passes")
        for indices in self.dealer.passes(samples, self.dealer.shares(samples)):
            part = [samples[i] for i in indices]
            batch = Batch.pack(part, self.policy.device, self.dealer.share_prompt) if part else None
            compute = partial(loss_fn, indices, batch) if part else idle_fn or self.policy.idle_loss
            yield self.policy.within(compute)


class AdaptiveEntropy:
    """Adaptive control of the entropy bonus (Skywork-OR1, arXiv 2505.22312, section 3.2.3).

    The coefficient `coef` increases by a fixed step after each update with an entropy at or below the target, and
    decreases after the others. It is applied only if the entropy of the last update was at or below the target.
    """

    def __init__(self, args: GRPOConfig):
        self.coef, self._entropy = args.entropy_coef, None
        self._low, self._high = args.entropy_coef_min, args.entropy_coef_max
        self._delta, self._target = args.entropy_coef_delta, args.entropy_target

    @property
    def applied(self) -> float:
        """The coefficient of the next update: 0 before the first update, and while the entropy exceeds the target."""
        return self.coef if self._entropy is not None and self._entropy <= self._target else 0.0

    def observe(self, entropy: float) -> None:
        """Adapt the coefficient after an update."""
        if not math.isfinite(entropy):
            return
        if entropy <= self._target:
            self.coef = min(self.coef + self._delta, self._high)
        else:
            self.coef = max(self.coef - self._delta, self._low)
        self._entropy = entropy

    def state_dict(self) -> dict[str, Any]:
        """Return the coefficient and the entropy of the last update."""
        return {"coef": self.coef, "entropy": self._entropy}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` returned."""
        self.coef, self._entropy = state["coef"], state["entropy"]


class Meter:
    """Collects the metrics of the micro-batches of a step's updates."""

    def __init__(self):
        self.entries = defaultdict(list)  # name -> (index of the update, value of a micro-batch)

    def add(self, out: GRPOLossOutput, batch: Batch, update: int) -> None:
        """Add the metrics of one micro-batch. Means are weighted by its active tokens."""
        tokens = out.metrics["active_tokens"]
        measured = {"loss": out.loss.detach()}
        for name, value in out.metrics.items():
            whole = name in (*SUMMED, *LARGEST) or name.rpartition("/")[2] in EXTREMES
            measured[name] = value if whole else value * tokens
        if batch.old_logps is None and batch.rollout_logps is not None:
            apart = (out.logps - batch.rollout_logps) * out.active
            gap, kl = apart.abs(), apart.expm1() - apart
            measured |= {"sampler/logp_gap_mean": gap.sum(), "sampler/logp_gap_max": gap.max(), "first_tokens": tokens}
            measured["sampler/kl"] = kl.sum()
        for name, value in measured.items():
            self.entries[name].append((update, value))

    def values(self, norms: list[float], ranks: Ranks = ALONE) -> dict[str, float]:
        """Reduce the metrics over the ranks and over the updates that were not skipped."""
        taken = [math.isfinite(norm) for norm in norms]
        parts = defaultdict(list)
        mine = {name: self._of(entries, taken) for name, entries in self.entries.items()}
        for of_rank in ranks.gather(mine, "the metrics of an update"):
            for name, part in of_rank.items():
                parts[name] += part
        values = {"skipped_updates": len(norms) - sum(taken)}
        if not any(taken):
            return values
        values["grad_norm"] = sum(norm for norm in norms if math.isfinite(norm)) / sum(taken)
        if not parts.get("loss"):  # every group has equal rewards, so no loss was computed
            return values | {"loss": 0.0, "policy_loss": 0.0}
        tokens, first = sum(parts.pop("active_tokens")), sum(parts.pop("first_tokens", []))
        per = {"loss": sum(taken), "policy_loss": sum(taken)}
        per |= dict.fromkeys(("sampler/logp_gap_mean", "sampler/kl"), max(first, 1))
        for name, part in parts.items():
            extreme = "max" if name in LARGEST else name.rpartition("/")[2]
            if extreme not in EXTREMES:
                values[name] = math.fsum(part) / per.get(name, max(tokens, 1))
            elif part:
                values[name] = EXTREMES[extreme](part)
        if "clip_ratio/low_mean" in values:  # no token is clipped at both bounds
            values["clip_ratio/region_mean"] = values["clip_ratio/low_mean"] + values["clip_ratio/high_mean"]
        return values

    def mean(self, name: str, update: int, ranks: Ranks = ALONE) -> float:
        """Average a metric over the active tokens of one update, skipped or not."""
        mine = [
            math.fsum(value.item() for of_update, value in self.entries.get(key, ()) if of_update == update)
            for key in (name, "active_tokens")
        ]
        total, tokens = map(math.fsum, zip(*ranks.gather(mine, f"the mean {name} of an update"), strict=True))
        return total / tokens if tokens else math.nan

    @staticmethod
    def _of(entries, taken):
        """Return the values of the updates that were not skipped, on the host."""
        values = torch.stack([value for _, value in entries]).double().tolist()
        return [value for (update, _), value in zip(entries, values, strict=True) if taken[update]]


class Selection:
    """Selects the tokens that keep their surrogate: tokens of high entropy, in completions that are near on-policy.

    A token without surrogate has an advantage of 0. It keeps its KL to the reference, its weight in the aggregation,
    and its part in the ratio of its sequence. Both criteria use the policy before the update, so a forward pass over
    the samples precedes it.
    """

    def __init__(
        self,
        policy: Policy,
        learner: Learner,
        scoring: Scoring,
        *,
        top_entropy_quantile: float = 1.0,
        off_policy_mask_threshold: float | None = None,
    ):
        self.policy, self.learner, self.scoring = policy, learner, scoring
        self.dealer, self.ranks = learner.dealer, learner.ranks
        self.quantile, self.threshold = top_entropy_quantile, off_policy_mask_threshold
        self.by_entropy = top_entropy_quantile < 1  # whether tokens of low entropy lose their surrogate

    def __call__(
        self, samples: Sequence[Sample], kept: Sequence[int], others: Sequence[int], first: bool
    ) -> tuple[dict[int, Sample], float | None]:
        """Select the tokens of one update.

        `kept` are the indices of samples with a gradient, `others` of those that count only in the entropy threshold.
        `first` is True for the first update of a rollout.

        Returns the samples of this rank with their selection, by index; and the mean entropy in nats of the tokens
        selected by entropy, over all ranks, or None.
        """
        off_policy = self.threshold is not None and (not first or any(s.sampler_logps is not None for s in samples))
        if not (self.by_entropy or off_policy):
            return {}, None
        others = others if self.by_entropy else ()
        # Samples of the update are scored on the ranks that will compute them, so that no log-probs are exchanged.
        shares = [a + b for a, b in zip(self._dealt(samples, kept), self._dealt(samples, others), strict=True)]
        mine, passes = shares[self.ranks.rank], self.dealer.agreed(samples, shares)
        compute = Policy.logps_and_entropy if self.by_entropy else Policy.logps
        bare = [Sample(samples[i].prompt_ids, samples[i].ids, tool_mask=samples[i].tool_mask) for i in mine]
        with self.learner.timer.stage("forward"), self.ranks.waiting("the selection of tokens"):
            self.dealer.meet("the passes")
            scored = score(self.policy, bare, self.scoring, passes, compute)
        values = dict(zip(mine, scored, strict=True))
        entropy, made = None, {i: {} for i in kept if i in values}  # new fields of each sample of this rank
        if self.by_entropy:
            lowest, entropy, count = self._threshold([both[1] for both in values.values()])
            for i, new in made.items():
                new["counted"] = (values[i][1] >= lowest).float()
                new["entropy_weights"] = new["counted"] / count
                values[i] = values[i][0]
        if off_policy:
            for i, new in made.items():
                new["counted"] = new.get("counted", torch.ones_like(values[i])) * self._near(samples[i], values[i])
        return {i: samples[i].replace(**new) for i, new in made.items()}, entropy

    def _dealt(self, samples, indices):
        return [[indices[at] for at in share] for share in self.dealer.shares([samples[i] for i in indices])]

    def _threshold(self, entropies):
        """Return the entropy threshold, and the mean entropy and number of the tokens at or above it."""
        mine = torch.cat([torch.zeros(0), *(of_sample.cpu() for of_sample in entropies)])
        every = torch.cat(self.ranks.gather(mine, "the entropies of an update"))
        if not len(every):  # all samples of the update are masked
            return math.inf, math.nan, 0
        lowest = quantile(every, 1 - self.quantile)
        kept = every[every >= lowest]
        return lowest, kept.double().mean().item(), len(kept)

    def _near(self, sample, logps):
        """Return whether a completion keeps its surrogate: its advantage is at least 0, or it is near on-policy.

        Tokens without a sampler's log-prob count as unchanged.
        """
        drawn = sample.old_logps if sample.sampler_logps is None else sample.sampler_logps
        gap = (drawn.to(logps.device) - logps).nan_to_num(nan=0.0).mean()  # estimates KL(old || new)
        return sample.advantage >= 0 or gap <= self.threshold


def quantile(values: torch.Tensor, share: float) -> float:
    """Compute a quantile by linear interpolation; torch.quantile is limited to 2^24 values."""
    place = share * (len(values) - 1)
    at = math.floor(place)
    ordered = values.sort().values
    return ordered[at].lerp(ordered[min(at + 1, len(values) - 1)], place - at).item()


def _share(samples, indices):
    """Return the share of some samples in the tokens of all."""
    return sum(len(samples[i]) for i in indices) / sum(map(len, samples))


class GRPOUpdate:
    """Turns the samples of a rollout into optimizer updates."""

    def __init__(
        self,
        policy: Policy,
        reference: Reference | None,
        learner: Learner,
        objective: Objective,
        *,
        temperature: float,
        updates_per_rollout: int = 1,
        num_iterations: int = 1,
        top_entropy_quantile: float = 1.0,
        off_policy_mask_threshold: float | None = None,
        entropy: AdaptiveEntropy | None = None,
        backward_tolerance: float = 0.0,
        corrects_sampler: bool = True,
        router_aux_loss_coef: float = 0.0,
        checks_draws: bool = False,
    ):
        self.policy, self.reference, self.learner, self._objective = policy, reference, learner, objective
        self.dealer, self.ranks = learner.dealer, learner.ranks
        self.temperature = temperature
        self.scoring = Scoring(temperature, self.dealer.max_tokens, self.dealer.share_prompt)
        self.updates_per_rollout, self.num_iterations = updates_per_rollout, num_iterations
        self.selection = Selection(
            policy, learner, self.scoring, top_entropy_quantile=top_entropy_quantile,
            off_policy_mask_threshold=off_policy_mask_threshold,
        )  # fmt: skip
        self.entropy, self.backward_tolerance, self.corrects_sampler = entropy, backward_tolerance, corrects_sampler
        self.router_aux_loss_coef, self.checks_draws = router_aux_loss_coef, checks_draws
        self.flops = update_flops(policy.module.base_model, policy.head.weight)

    def __call__(
        self, groups: Sequence[Sequence[Sample]], with_entropy: bool = True
    ) -> tuple[list[Sample], dict[str, float]]:
        """Run all updates of one rollout, and return the samples and the metrics.

        The samples are in order, with weights, ratios and clipped tokens of the last update. All metrics except
        skipped_updates and learning_rate exclude skipped updates. With `checks_draws`, it raises ValueError and changes
        no weights if the sampler's log-probs differ from the policy's.
        """
        samples = list(chain.from_iterable(groups))
        if not self.corrects_sampler:
            samples = [sample.replace(sampler_logps=None) for sample in samples]
        ends = list(accumulate(map(len, groups), initial=0))
        bounds = [ends[len(groups) * i // self.updates_per_rollout] for i in range(self.updates_per_rollout + 1)]
        minibatches = [range(start, end) for start, end in pairwise(bounds)]
        step_tokens = sum(len(s.drawn) for s in samples if not s.masked) / len(minibatches)
        for minibatch in minibatches:
            weighted = self.token_weights([samples[i] for i in minibatch], step_tokens)
            for i, weights in zip(minibatch, weighted, strict=True):
                samples[i] = samples[i].replace(weights=weights)
        kept = [[i for i in minibatch if self.has_gradient(samples[i])] for minibatch in minibatches]
        meter, norms, check = Meter(), [], DrawCheck(self.policy.dtype) if self.checks_draws else None
        metrics = self._score(samples, kept, check)
        for _ in range(self.num_iterations):
            for whole, minibatch in zip(minibatches, kept, strict=True):
                logps = {}  # by the index of the sample in the minibatch
                trained = {*minibatch}
                others = [i for i in whole if i not in trained and not samples[i].masked]
                selected, entropy = self.selection(samples, minibatch, others, first=not norms)
                for i, sample in selected.items():
                    samples[i] = sample
                parts = [samples[i] for i in minibatch]
                tokens = sum(len(samples[i].drawn) for i in whole if not samples[i].masked)

                def loss(indices, batch, logps=logps, parts=parts, tokens=tokens):
                    share = _share(parts, indices)
                    out = self.loss(batch, tokens, with_entropy or self.entropy is not None, share)
                    meter.add(out, batch, update=len(norms))
                    if check is not None and batch.old_logps is None:
                        check.add(out.logps.detach(), batch.rollout_logps, out.active)
                    logps.update(zip(indices, out.logps.split(batch.cu_seqlens.diff().tolist()), strict=True))
                    return out.loss

                learning_rate = self.learner.learning_rate
                norms.append(self.learner.step(parts, loss, self.idle_loss, check and check.veto)[0])
                if self.entropy is not None:
                    if entropy is None:
                        entropy = meter.mean("entropy", len(norms) - 1, self.ranks)
                    self.entropy.observe(entropy)
                for at, of_sample in logps.items():
                    samples[minibatch[at]] = self._after_update(samples[minibatch[at]], of_sample)
        norms = torch.stack(norms).tolist()
        if check is not None:
            check.end(self.ranks)
        metrics |= meter.values(norms, self.ranks) | {"learning_rate": learning_rate}
        if self.entropy is not None or self.objective.entropy_coef != 0:
            metrics["entropy_coef"] = self.entropy_coef
        if self.objective.beta == 0:
            metrics.pop("kl", None)  # there is no reference
        return samples, metrics

    def held_out_loss(self, samples: Sequence[Sample]) -> float:
        """Compute the loss of judged samples as one on-policy batch, without an update."""
        tokens = sum(len(sample.drawn) for sample in samples if not sample.masked)
        weighted = zip(samples, self.token_weights(samples, tokens), strict=True)
        samples = [sample.replace(weights=weights, sampler_logps=None) for sample, weights in weighted]
        kept = [i for i, sample in enumerate(samples) if self.has_gradient(sample)]
        self._score(samples, [kept], held_out=True)
        others = [i for i, sample in enumerate(samples) if not (sample.masked or self.has_gradient(sample))]
        selected, _ = self.selection(samples, kept, others, first=True)
        chosen = [selected.get(i, samples[i]) for i in kept]

        def loss(indices, batch):
            return self.loss(batch, tokens, False, _share(chosen, indices)).loss

        return self.learner.measure(chosen, loss, self.idle_loss)

    @property
    def objective(self) -> Objective:
        """The objective, with the coefficient of the entropy bonus that applies to the next update."""
        if self.entropy is None:
            return self._objective
        return dataclasses.replace(self._objective, entropy_coef=self.entropy.applied)

    @property
    def entropy_coef(self) -> float:
        """The coefficient of the entropy bonus, after the last update if it is adaptive."""
        return self.objective.entropy_coef if self.entropy is None else self.entropy.coef

    def token_weights(self, minibatch: Sequence[Sample], step_tokens: float) -> tuple[torch.Tensor, ...]:
        """Compute the objective's weight of each token over one update: [D] fp32 for each sample."""
        counts = torch.tensor([len(sample.drawn) for sample in minibatch])
        masked = torch.tensor([sample.masked for sample in minibatch])
        bounds = torch.cat([torch.zeros(1, dtype=torch.int64), counts.cumsum(0)])
        mask = (~masked).repeat_interleave(counts)
        weights = self.objective.token_weights(mask, bounds, num_items_in_batch=step_tokens)
        return weights.split(counts.tolist())

    def has_gradient(self, sample: Sample) -> bool:
        """Return whether a sample has a gradient. Without further terms, it has none if its advantages are 0."""
        regularized = self.objective.beta != 0 or self.objective.entropy_coef != 0 or self.entropy is not None
        regularized = regularized or self.router_aux_loss_coef != 0
        return not sample.masked and (regularized or sample.informative)

    def _score(self, samples, kept, check=None, held_out=False):
        """Compute reference log-probs of the kept samples, and old log-probs of all minibatches but the first.

        The first minibatch is on-policy: its ratio is 1, and its loss returns the log-probs. The KL of the full
        distributions uses hidden states instead of reference log-probs, see `_reference_states`.
        """
        metrics, dealt = {}, [self.dealer.shares([samples[i] for i in minibatch]) for minibatch in kept]
        # The samples of each rank by minibatch, distributed as in the updates.
        by_rank = [
            [[minibatch[at] for at in shares[rank]] for minibatch, shares in zip(kept, dealt, strict=True)]
            for rank in range(self.ranks.size)
        ]
        if self.reference is not None:
            mine, passes = self._of_rank(samples, [list(chain.from_iterable(parts)) for parts in by_rank])
            own = [samples[i] for i in mine]
            with self.learner.timer.stage("reference"), self.ranks.waiting("the log-probs of the reference"):
                if not held_out:
                    metrics = self.reference.measure(own, self.scoring, self.ranks)
                if not self.objective.full_kl:
                    self.dealer.meet("the passes")
                    for i, logps in zip(mine, self.reference.score(own, self.scoring, passes), strict=True):
                        samples[i] = samples[i].replace(ref_logps=logps)
        if any(kept[1:]):
            mine, passes = self._of_rank(samples, [list(chain.from_iterable(parts[1:])) for parts in by_rank])
            with self.learner.timer.stage("forward"), self.ranks.waiting("the log-probs of the old policy"):
                self.dealer.meet("the passes")
                scored = score(self.policy, [samples[i] for i in mine], self.scoring, passes)
            if check is not None and mine:
                before = torch.cat(scored)
                check.add(before, torch.cat([samples[i].logps for i in mine]).to(before.device))
            for i, logps in zip(mine, scored, strict=True):
                samples[i] = samples[i].replace(old_logps=logps)
        return metrics

    def _of_rank(self, samples, shares):
        """Return the indices of this rank's samples, and the number of passes that all ranks run in lockstep."""
        return shares[self.ranks.rank], self.dealer.agreed(samples, shares)

    def loss(self, batch: Batch, step_tokens: float, with_entropy: bool, share: float = 1.0) -> GRPOLossOutput:
        """Compute the loss of a micro-batch, a sum over its tokens. `share` is its share of the update's tokens.

        A load-balancing loss is computed for each micro-batch, and averaged with these shares.
        """
        timer = self.learner.timer
        reference = self._reference_states(batch)
        per_token, per_row = self.flops
        timer.flops += per_token * len(batch.input_ids) + per_row * len(batch.targets)
        with timer.stage("forward"):
            if self.router_aux_loss_coef:
                states, balance = self.policy.states_and_balance(batch)
            else:
                states, balance = self.policy.completion_states(batch), None
        weight, bias, softcap = self.policy.head
        with timer.stage("loss"):
            out = linear_grpo_loss(
                states,
                weight,
                batch.targets,
                batch.advantages,
                cu_seqlens=batch.cu_seqlens,
                rows=torch.arange(len(batch.targets)),  # all: samples without gradient are already dropped
                old_logps=batch.old_logps,
                ref_logps=batch.ref_logps,
                sampler_logps=batch.sampler_logps,
                token_weights=batch.weights,
                entropy_weights=batch.entropy_weights if self.objective.entropy_coef != 0 else None,
                num_items_in_batch=step_tokens,
                temperature=self.temperature,
                bias=bias,
                logit_softcap=softcap,
                return_entropy=with_entropy,
                objective=self.objective,
                backward_tolerance=self.backward_tolerance,
                **reference,
            )
        if balance is None:
            return out
        metrics = {**out.metrics, "aux_loss": balance.detach()}
        return dataclasses.replace(out, loss=out.loss + self.router_aux_loss_coef * share * balance, metrics=metrics)

    def idle_loss(self) -> torch.Tensor:
        """Compute a loss of 0, for a rank without samples in a pass of all ranks."""
        if self.objective.full_kl:
            self.reference.idle()
        return self.policy.idle_loss()

    def _reference_states(self, batch):
        """Compute the arguments of the loss for the KL of the full distributions; empty for another KL.

        They are computed for each micro-batch of each pass, and not stored with the samples: the hidden states take D
        times the memory of any other field of a sample.
        """
        if not self.objective.full_kl:
            return {}
        with self.learner.timer.stage("reference"):
            states, (weight, bias, _) = self.reference.states(batch)
        return {"ref_hidden": states, "ref_weight": weight, "ref_bias": bias}

    def _after_update(self, sample, logps):
        """Return a sample with old log-probs for later passes, or with the ratios of this update.

        The log-probs of the first update become the old log-probs of later passes.
        """
        if sample.old_logps is None:
            return sample.replace(old_logps=logps) if self.num_iterations > 1 else sample
        ratios, clipped = self.ratios(sample, logps)
        return sample.replace(ratios=ratios, clipped=clipped)

    def ratios(self, sample: Sample, logps: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Compute the ratio of each token [D], and whether it is clipped: beyond the bound on its advantage's side.

        Both stay on the policy's device, to avoid a sync.
        """
        low, high = self.objective.ratio_bounds
        log_ratio = logps - sample.old_logps.to(logps.device)
        if self.objective.importance_sampling_level == "sequence":
            log_ratio = log_ratio.mean().expand(len(log_ratio))
        ratio = log_ratio.exp()
        advantages = sample.token_advantages
        advantages = torch.tensor(sample.advantage) if advantages is None else advantages.to(ratio.device)
        if sample.counted is not None:  # the other tokens have no surrogate, which could be clipped
            advantages = advantages * sample.counted.to(ratio.device)
        return ratio, ((advantages > 0) & (ratio > high)) | ((advantages < 0) & (ratio < low))

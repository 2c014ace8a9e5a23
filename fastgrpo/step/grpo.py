"""The GRPO updates of one rollout: minibatches and passes over them, old and reference log-probs, loss and metrics.

Each token has a weight in the loss of the whole update (`Sample.weights`), which is computed before any sample is
dropped. So the result does not depend on how the update is split into micro-batches, nor on whether samples that teach
nothing are computed.
"""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain, pairwise

import torch

from fastgrpo.data.records import Sample
from fastgrpo.loss import GRPOLossOutput, Objective, linear_grpo_loss
from fastgrpo.policy.batch import Batch
from fastgrpo.policy.model import Policy
from fastgrpo.policy.reference import Reference, Scoring, score
from fastgrpo.run.profiling import update_flops
from fastgrpo.step.entropy import AdaptiveEntropy
from fastgrpo.step.meter import Meter
from fastgrpo.step.selection import Selection
from fastgrpo.step.update import Updater


@dataclass(frozen=True)
class Updated:
    """What the updates of one rollout did.

    Attributes:
        samples: The samples in their order, with their weights, and with the ratios of their tokens and which of them
            the last update clipped.
        norms: The gradient norm of each update: NaN where it was skipped, 0 where there was nothing to learn from.
        metrics: loss, policy_loss, kl, entropy, ratios, clip ratios, rollout/logp_gap, grad_norm, skipped_updates and
            learning_rate. All but the last two leave skipped updates out.
    """

    samples: list[Sample]
    norms: list[float]
    metrics: dict[str, float]


class GRPOUpdate:
    """Turns the samples of a rollout into optimizer updates."""

    def __init__(
        self,
        policy: Policy,
        reference: Reference | None,
        updater: Updater,
        objective: Objective,
        *,
        temperature: float,
        updates_per_rollout: int = 1,
        num_iterations: int = 1,
        top_entropy_quantile: float = 1.0,
        off_policy_mask_threshold: float | None = None,
        entropy: AdaptiveEntropy | None = None,
        backward_tolerance: float = 0.0,
    ):
        self.policy, self.reference, self.updater, self.objective = policy, reference, updater, objective
        self.dealer, self.ranks = updater.dealer, updater.ranks
        self.scoring = Scoring(temperature, self.dealer.max_tokens, self.dealer.share_prompt)
        self.updates_per_rollout, self.num_iterations = updates_per_rollout, num_iterations
        self.selection = Selection(
            policy, updater, self.scoring, top_entropy_quantile=top_entropy_quantile,
            off_policy_mask_threshold=off_policy_mask_threshold,
        )  # fmt: skip
        self.entropy, self.backward_tolerance = entropy, backward_tolerance
        self.flops = update_flops(policy.module.base_model, policy.head.weight)

    def __call__(self, groups: Sequence[Sequence[Sample]], with_entropy: bool = True) -> Updated:
        """Make all updates of one rollout."""
        samples = list(chain.from_iterable(groups))
        ends = [0, *torch.tensor([len(group) for group in groups]).cumsum(0).tolist()]
        bounds = [ends[len(groups) * i // self.updates_per_rollout] for i in range(self.updates_per_rollout + 1)]
        minibatches = [range(start, end) for start, end in pairwise(bounds)]
        step_tokens = sum(len(s.completion_ids) for s in samples if not s.masked) / len(minibatches)
        for minibatch in minibatches:
            weighted = self.token_weights([samples[i] for i in minibatch], step_tokens)
            for i, weights in zip(minibatch, weighted, strict=True):
                samples[i] = dataclasses.replace(samples[i], weights=weights)
        kept = [[i for i in minibatch if self.teaches(samples[i])] for minibatch in minibatches]
        metrics = self._score(samples, kept)
        meter, norms = Meter(), []
        for _ in range(self.num_iterations):
            for whole, minibatch in zip(minibatches, kept, strict=True):
                logps = {}  # of each sample, by its index in the minibatch
                teaching = {*minibatch}
                others = [i for i in whole if i not in teaching and not samples[i].masked]
                selected = self.selection(samples, minibatch, others, first=not norms)
                for i, sample in selected.samples.items():
                    samples[i] = sample
                if self.entropy is not None:
                    self.objective = dataclasses.replace(self.objective, entropy_coef=self.entropy.applied)

                def loss(indices, batch, logps=logps):
                    out = self.loss(batch, step_tokens, with_entropy or self.entropy is not None)
                    meter.add(out, batch, update=len(norms))
                    logps.update(zip(indices, out.logps.split(batch.cu_seqlens.diff().tolist()), strict=True))
                    return out.loss

                learning_rate = self.updater.learning_rate
                norms.append(self.updater.step([samples[i] for i in minibatch], loss, self.idle_loss).norm)
                if self.entropy is not None:
                    measured = selected.entropy
                    if measured is None:
                        measured = meter.mean("entropy", len(norms) - 1, self.ranks)
                    self.entropy.observe(measured)
                for at, of_sample in logps.items():
                    samples[minibatch[at]] = self._after_update(samples[minibatch[at]], of_sample)
        norms = torch.stack(norms).tolist()
        metrics |= meter.values(norms, self.ranks) | {"learning_rate": learning_rate}
        if self.entropy is not None:
            metrics["entropy_coef"] = self.entropy.coef
        if self.objective.beta == 0:
            metrics.pop("kl", None)  # there is no reference to measure it against
        return Updated(samples, norms, metrics)

    def token_weights(self, minibatch: Sequence[Sample], step_tokens: float) -> tuple[torch.Tensor, ...]:
        """Compute the objective's weight of each token over one update.

        Returns:
            [T] fp32 for each sample, T the length of its completion.
        """
        counts = torch.tensor([len(sample.completion_ids) for sample in minibatch])
        masked = torch.tensor([sample.masked for sample in minibatch])
        bounds = torch.cat([torch.zeros(1, dtype=torch.int64), counts.cumsum(0)])
        mask = (~masked).repeat_interleave(counts)
        weights = self.objective.token_weights(mask, bounds, num_items_in_batch=step_tokens)
        return weights.split(counts.tolist())

    def teaches(self, sample: Sample) -> bool:
        """Tell whether a sample is computed. Without KL and entropy bonus, it is not if its advantages are 0."""
        regularized = self.objective.beta != 0 or self.objective.entropy_coef != 0 or self.entropy is not None
        return not sample.masked and (regularized or sample.informative)

    def _score(self, samples, kept):
        """Compute reference log-probs of the kept samples, and old log-probs of those after the first minibatch.

        The first minibatch is computed with the policy that drew it: its ratio is 1, and its loss returns log-probs.
        The KL of the full distributions takes hidden states in place of reference log-probs, see `_reference_states`.
        """
        metrics, dealt = {}, [self.dealer.shares([samples[i] for i in minibatch]) for minibatch in kept]
        # The samples of each rank in the minibatches, which are dealt here as they will be in the updates.
        by_rank = [
            [[minibatch[at] for at in shares[rank]] for minibatch, shares in zip(kept, dealt, strict=True)]
            for rank in range(self.ranks.size)
        ]
        if self.reference is not None:
            mine, passes = self._of_rank(samples, [list(chain.from_iterable(parts)) for parts in by_rank])
            teaching = [samples[i] for i in mine]
            with self.updater.timer.stage("reference"), self.ranks.waiting("the log-probs of the reference"):
                metrics = self.reference.measure(teaching, self.scoring, self.ranks)
                if not self.objective.full_kl:
                    self.dealer.meet("the passes")
                    for i, logps in zip(mine, self.reference.score(teaching, self.scoring, passes), strict=True):
                        samples[i] = dataclasses.replace(samples[i], ref_logps=logps)
        if any(kept[1:]):
            mine, passes = self._of_rank(samples, [list(chain.from_iterable(parts[1:])) for parts in by_rank])
            with self.updater.timer.stage("forward"), self.ranks.waiting("the log-probs of the old policy"):
                self.dealer.meet("the passes")
                scored = score(self.policy, [samples[i] for i in mine], self.scoring, passes)
            for i, logps in zip(mine, scored, strict=True):
                samples[i] = dataclasses.replace(samples[i], old_logps=logps)
        return metrics

    def _of_rank(self, samples, shares):
        """Return the indices of this rank's samples, and how many passes all ranks make in lockstep."""
        return shares[self.ranks.rank], self.dealer.agreed(samples, shares)

    def loss(self, batch: Batch, step_tokens: float, with_entropy: bool) -> GRPOLossOutput:
        """Compute the loss of a micro-batch, a sum over its tokens."""
        timer = self.updater.timer
        reference = self._reference_states(batch)
        per_token, per_row = self.flops
        timer.flops += per_token * len(batch.input_ids) + per_row * len(batch.targets)
        with timer.stage("forward"):
            states = self.policy.completion_states(batch)
        weight, bias, softcap = self.policy.head
        with timer.stage("loss"):
            return linear_grpo_loss(
                states,
                weight,
                batch.targets,
                batch.advantages,
                cu_seqlens=batch.cu_seqlens,
                rows=torch.arange(len(batch.targets)),  # all of them: samples that do not teach are no longer here
                old_logps=batch.old_logps,
                ref_logps=batch.ref_logps,
                sampler_logps=batch.sampler_logps,
                token_weights=batch.weights,
                entropy_weights=batch.entropy_weights if self.objective.entropy_coef != 0 else None,
                num_items_in_batch=step_tokens,
                temperature=self.scoring.temperature,
                bias=bias,
                logit_softcap=softcap,
                return_entropy=with_entropy,
                objective=self.objective,
                backward_tolerance=self.backward_tolerance,
                **reference,
            )

    def idle_loss(self) -> torch.Tensor:
        """Compute the loss of 0 of a rank that has no samples for a pass of all ranks."""
        if self.objective.full_kl:
            self.reference.idle()
        return self.policy.idle_loss()

    def _reference_states(self, batch):
        """Compute the arguments of the loss for the KL of the full distributions; there are none for another KL.

        They are computed for each micro-batch of each pass, and not kept with the samples: the states of a whole
        rollout would take T D numbers a sample, which is more than the rest of the samples by the factor D.
        """
        if not self.objective.full_kl:
            return {}
        with self.updater.timer.stage("reference"):
            states, (weight, bias, _) = self.reference.states(batch)
        return {"ref_hidden": states, "ref_weight": weight, "ref_bias": bias}

    def _after_update(self, sample, logps):
        """Return a sample with what the next update needs, and with the ratios of its tokens that this update saw.

        The log-probs of the first update are the old log-probs of later passes, if there are any.
        """
        if sample.old_logps is None:
            return dataclasses.replace(sample, old_logps=logps) if self.num_iterations > 1 else sample
        ratios, clipped = self.ratios(sample, logps)
        return dataclasses.replace(sample, ratios=ratios, clipped=clipped)

    def ratios(self, sample: Sample, logps: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Compute the ratio of each token of a sample, and whether it lies beyond the bound on its advantage's side.

        Args:
            sample: The sample, with its old log-probs.
            logps: [T] log-probs under the policy as it is now.

        Returns:
            The ratios [T] fp32, and which of them are clipped [T] bool, on the policy's device, so that nothing waits
            for them.
        """
        low, high = self.objective.ratio_bounds
        log_ratio = logps - sample.old_logps.to(logps.device)
        if self.objective.importance_sampling_level == "sequence":
            log_ratio = log_ratio.mean().expand(len(log_ratio))
        ratio = log_ratio.exp()
        advantages = sample.token_advantages
        advantages = torch.tensor(sample.advantage) if advantages is None else advantages.to(ratio.device)
        return ratio, ((advantages > 0) & (ratio > high)) | ((advantages < 0) & (ratio < low))

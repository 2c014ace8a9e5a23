"""The GRPO updates of one rollout: minibatches and passes over them, old and reference log-probs, the loss, and what it
measures.

Every term of the loss carries its weight over the whole update (`Sample.weights`), computed before any sample is
dropped; so a step does not depend on how it was split into micro-batches, nor on whether samples that teach nothing
were computed.
"""

from itertools import chain, pairwise

import torch

from fastgrpo.loss.losses import linear_grpo_loss
from fastgrpo.policy.model import completion_states, head
from fastgrpo.policy.reference import score
from fastgrpo.run.profiling import update_flops
from fastgrpo.step.meter import Meter


class GRPOUpdate:
    """Turns the samples of a rollout into optimizer updates."""

    def __init__(self, model, reference, updater, objective, *, temperature, updates_per_rollout=1, num_iterations=1):
        """reference: see `make_reference`; None where objective.beta is 0. temperature: the samples were drawn at."""
        self.model, self.reference, self.updater, self.objective = model, reference, updater, objective
        self.temperature, self.timer = temperature, updater.timer
        self.updates_per_rollout, self.num_iterations = updates_per_rollout, num_iterations
        self.flops = update_flops(model.base_model, head(model)[0])
        self.norms = []  # gradient norm of each update of the last call; NaN where it was skipped

    def __call__(self, groups, with_entropy=True):
        """All updates of one rollout.

        Args:
            groups: lists of `Sample`s, one a prompt. with_entropy: measure it, which is a pass over the logits.

        Returns:
            metrics: loss, policy_loss, kl, entropy, ratios, clip ratios, rollout/logp_gap, grad_norm, skipped_updates,
            learning_rate. What a skipped update measured is in none of the others.
        """
        self.with_entropy = with_entropy
        bounds = [len(groups) * i // self.updates_per_rollout for i in range(self.updates_per_rollout + 1)]
        minibatches = [_joined(groups[start:end]) for start, end in pairwise(bounds)]
        self.step_tokens = sum(_tokens(minibatch) for minibatch in minibatches) / len(minibatches)
        for minibatch in minibatches:
            self.set_weights(minibatch)
        kept = [[sample for sample in minibatch if self.teaches(sample)] for minibatch in minibatches]
        self.set_logps(kept)
        meter = Meter()
        for _ in range(self.num_iterations):
            for minibatch in kept:
                meter.norms.append(self.updater.step(minibatch, lambda part, batch: self.loss(part, batch, meter)))
        values = meter.values() | {"learning_rate": self.updater.learning_rate}
        self.norms = meter.norms
        if self.reference is not None:
            values |= self.reference.metrics
        if self.objective.beta == 0:
            values.pop("kl", None)  # there is no reference to measure it against
        return values

    def set_weights(self, minibatch):
        """The objective's token weights over one update. The normalizer of dapo is the whole rollout's tokens, shared
        evenly among its updates; that of bnpo is the minibatch's own."""
        counts = torch.tensor([len(sample.completion_ids) for sample in minibatch])
        masked = torch.tensor([sample.masked for sample in minibatch])
        bounds = torch.cat([torch.zeros(1, dtype=torch.int64), counts.cumsum(0)])
        mask = (~masked).repeat_interleave(counts)
        weights = self.objective.token_weights(mask, bounds, num_items_in_batch=self.step_tokens)
        for sample, part in zip(minibatch, weights.split(counts.tolist()), strict=True):
            sample.weights = part

    def teaches(self, sample):
        """Whether a sample carries gradient: without KL and entropy bonus, one of no advantage does not."""
        regularized = self.objective.beta != 0 or self.objective.entropy_coef != 0
        return not sample.masked and (regularized or sample.advantage != 0)

    def set_logps(self, kept):
        """Reference log-probs of all samples; old ones of those that will meet a policy that has moved.

        The first minibatch meets the policy that drew it: its ratio is 1, and its log-probs come out of its loss.
        """
        if self.reference is not None:
            samples = _joined(kept)
            with self.timer.stage("reference"):
                scored = self.reference.score(samples, *self.scoring)
            for sample, logps in zip(samples, scored, strict=True):
                sample.ref_logps = logps
        later = _joined(kept[1:])
        if later:
            with self.timer.stage("forward"):
                scored = score(self.model, later, *self.scoring)
            for sample, logps in zip(later, scored, strict=True):
                sample.old_logps = logps

    @property
    def scoring(self):
        """How samples are scored: temperature, token budget, whether prompts are shared."""
        return self.temperature, self.updater.max_tokens, self.updater.share_prompt

    def loss(self, part, batch, meter):
        """The loss of a micro-batch, a sum over its tokens; what it measures goes to the meter."""
        weight, bias = head(self.model)
        per_token, per_row = self.flops
        self.timer.flops += per_token * len(batch.input_ids) + per_row * len(batch.targets)
        with self.timer.stage("forward"):
            states = completion_states(self.model, batch)
        with self.timer.stage("loss"):
            out = linear_grpo_loss(
                states,
                weight,
                batch.targets,
                batch.advantages,
                cu_seqlens=batch.cu_seqlens,
                rows=torch.arange(len(batch.targets)),  # samples that do not teach have left: no need to look for them
                old_logps=batch.old_logps,
                ref_logps=batch.ref_logps,
                token_weights=batch.weights,
                num_items_in_batch=self.step_tokens,
                temperature=self.temperature,
                bias=bias,
                return_entropy=self.with_entropy,
                objective=self.objective,
            )
        meter.add(out, batch)
        logps = out.logps.split([len(sample.completion_ids) for sample in part])
        for sample, now in zip(part, logps, strict=True):
            if sample.old_logps is None:
                # The later passes of this rollout need them; the first one does without.
                sample.old_logps = now if self.num_iterations > 1 else None
            else:
                sample.clipped = self.clipped_share(sample, now)
        return out.loss

    def clipped_share(self, sample, logps):
        """The share of a sample's tokens whose ratio lies beyond the bound on the side of its advantage."""
        if sample.advantage == 0:
            return 0.0
        low, high = self.objective.ratio_bounds
        log_ratio = logps - sample.old_logps.to(logps.device)
        if self.objective.importance_sampling_level == "sequence":
            log_ratio = log_ratio.mean().expand(len(log_ratio))
        ratio = log_ratio.exp()
        return (ratio > high if sample.advantage > 0 else ratio < low).float().mean()


def _joined(lists):
    return list(chain.from_iterable(lists))


def _tokens(samples):
    return sum(len(sample.completion_ids) for sample in samples if not sample.masked)

"""The GRPO updates of one rollout: minibatches and passes over them, old and reference log-probs, the loss, and what it
measures.

Every term of the loss carries its weight over the whole update (`Sample.weights`), computed before any sample is
dropped; so a step does not depend on how it was split into micro-batches, nor on whether samples that teach nothing
were computed.
"""

from collections import defaultdict
from itertools import chain, pairwise

import torch

from fastgrpo.frozen import score
from fastgrpo.loss import linear_grpo_loss
from fastgrpo.model import completion_states, head


class GRPOUpdate:
    """Turns the samples of a rollout into optimizer updates."""

    def __init__(self, model, reference, updater, objective, *, temperature, updates_per_rollout=1, num_iterations=1):
        """reference: a frozen policy, or None where objective.beta is 0. temperature: the samples were drawn at."""
        self.model, self.reference, self.updater, self.objective = model, reference, updater, objective
        self.temperature = temperature
        self.updates_per_rollout, self.num_iterations = updates_per_rollout, num_iterations

    def __call__(self, groups):
        """All updates of one rollout.

        Args:
            groups: lists of `Sample`s, one a prompt.

        Returns:
            metrics: loss, policy_loss, kl, entropy, ratios, clip ratios, rollout/logp_gap, grad_norm, learning_rate.
        """
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
                meter.updates += 1
                meter.norms.append(self.updater.step(minibatch, lambda part, batch: self.loss(part, batch, meter)))
        values = meter.values() | {"learning_rate": self.updater.learning_rate}
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
            for sample, logps in zip(samples, self.score(self.reference, samples), strict=True):
                sample.ref_logps = logps
        later = _joined(kept[1:])
        for sample, logps in zip(later, self.score(self.model, later), strict=True):
            sample.old_logps = logps

    def score(self, model, samples):
        """Log-probs of each sample's completion under `model`."""
        return score(model, samples, self.temperature, self.updater.max_tokens)

    def loss(self, part, batch, meter):
        """The loss of a micro-batch, a sum over its tokens; what it measures goes to the meter."""
        weight, bias = head(self.model)
        out = linear_grpo_loss(
            completion_states(self.model, batch),
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
            return_entropy=True,
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


class Meter:
    """Sums what the micro-batches of a step measure, on the device; the host looks once, at the end."""

    def __init__(self):
        self.sums, self.norms, self.updates = defaultdict(list), [], 0

    def add(self, out, batch):
        """What one micro-batch measured: means are weighted by its active tokens."""
        tokens = out.metrics["active_tokens"]
        for name, value in out.metrics.items():
            summed = name in ("policy_loss", "active_tokens", "ratio/max")
            self.sums[name].append(value if summed else value * tokens)
        self.sums["loss"].append(out.loss.detach())
        if batch.old_logps is None and batch.sampler_logps is not None:
            gap = (out.logps - batch.sampler_logps).abs() * out.active
            self.sums["rollout/logp_gap"].append(gap.sum())
            self.sums["first_tokens"].append(tokens)

    def values(self):
        """Means over the step's active tokens; losses are means over its updates."""
        if not self.sums:  # no group had spread: nothing was computed, nothing moved
            return {"loss": 0.0, "policy_loss": 0.0, "grad_norm": 0.0}
        parts = {name: torch.stack(vs).double().cpu() for name, vs in self.sums.items()}
        totals = {name: part.sum().item() for name, part in parts.items()}
        tokens, first = totals.pop("active_tokens"), totals.pop("first_tokens", 0)
        per = defaultdict(lambda: max(tokens, 1), {"loss": self.updates, "policy_loss": self.updates})
        per["rollout/logp_gap"] = max(first, 1)
        values = {name: total / per[name] for name, total in totals.items()}
        values["ratio/max"] = parts["ratio/max"].max().item()
        values["grad_norm"] = torch.stack(self.norms).double().mean().item()
        return values

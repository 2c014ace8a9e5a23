"""Which tokens keep their surrogate: those of high entropy, and those of completions that are not too far off-policy.

A token without its surrogate has an advantage of 0; the KL to the reference stays, and so does its share in the weights
of the loss and in the ratio of its sequence. Both choices look at the policy as it is before an update, so a forward
pass over the samples of the update precedes it.

Shapes: T tokens of a completion.
"""

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from fastgrpo.data.records import Sample
from fastgrpo.policy.model import Policy
from fastgrpo.policy.reference import Scoring, score
from fastgrpo.step.update import Updater


@dataclass(frozen=True)
class Selected:
    """What was selected for one update.

    Attributes:
        samples: The samples of this rank with their selection, by their index.
        entropy: The mean entropy of the tokens that were selected by their entropy, over all ranks, in nats; None where
            no token is left out for its entropy.
    """

    samples: dict[int, Sample]
    entropy: float | None


class Selection:
    """Selects the tokens of an update."""

    def __init__(
        self,
        policy: Policy,
        updater: Updater,
        scoring: Scoring,
        *,
        top_entropy_quantile: float = 1.0,
        off_policy_mask_threshold: float | None = None,
    ):
        self.policy, self.updater, self.scoring = policy, updater, scoring
        self.dealer, self.ranks = updater.dealer, updater.ranks
        self.quantile, self.threshold = top_entropy_quantile, off_policy_mask_threshold

    @property
    def by_entropy(self) -> bool:
        """Whether tokens of low entropy are left out."""
        return self.quantile < 1

    def __call__(
        self, samples: Sequence[Sample], teaching: Sequence[int], others: Sequence[int], first: bool
    ) -> Selected:
        """Select the tokens of one update."""
        off_policy = self.threshold is not None and (not first or any(s.sampler_logps is not None for s in samples))
        if not (self.by_entropy or off_policy):
            return Selected({}, None)
        others = others if self.by_entropy else ()
        # The samples that the update computes lie on the ranks that will compute them, and know their log-probs there.
        shares = [a + b for a, b in zip(self._dealt(samples, teaching), self._dealt(samples, others), strict=True)]
        mine, passes = shares[self.ranks.rank], self.dealer.agreed(samples, shares)
        compute = Policy.logps_and_entropy if self.by_entropy else Policy.logps
        bare = [Sample(samples[i].prompt_ids, samples[i].completion_ids, advantage=0.0) for i in mine]
        with self.updater.timer.stage("forward"), self.ranks.waiting("the selection of tokens"):
            self.dealer.meet("the passes")
            scored = score(self.policy, bare, self.scoring, passes, compute)
        values = dict(zip(mine, scored, strict=True))
        entropy, made = None, {i: {} for i in teaching if i in values}  # what is new in each sample of this rank
        if self.by_entropy:
            lowest, entropy, count = self._threshold([both[1] for both in values.values()])
            for i, new in made.items():
                new["counted"] = (values[i][1] >= lowest).float()
                new["entropy_weights"] = new["counted"] / count
                values[i] = values[i][0]
        if off_policy:
            for i, new in made.items():
                new["counted"] = new.get("counted", torch.ones_like(values[i])) * self._near(samples[i], values[i])
        return Selected({i: dataclasses.replace(samples[i], **new) for i, new in made.items()}, entropy)

    def _dealt(self, samples, indices):
        return [[indices[at] for at in share] for share in self.dealer.shares([samples[i] for i in indices])]

    def _threshold(self, entropies):
        """Find the entropy from which on tokens are kept."""
        mine = torch.cat([torch.zeros(0), *(of_sample.cpu() for of_sample in entropies)])
        every = torch.cat(self.ranks.gather(mine, "the entropies of an update"))
        if not len(every):  # all samples of the update are masked
            return math.inf, math.nan, 0
        lowest = quantile(every, 1 - self.quantile)
        kept = every[every >= lowest]
        return lowest, kept.double().mean().item(), len(kept)

    def _near(self, sample, logps):
        """Tell whether a completion keeps its surrogate: its advantage is not negative, or the policy is still near.

        A token whose log-prob the sampler did not report takes no part.
        """
        drawn = sample.old_logps if sample.sampler_logps is None else sample.sampler_logps
        gap = (drawn.to(logps.device) - logps).nan_to_num(nan=0.0).mean()  # old - new: an estimate of KL(old || new)
        return 1.0 if sample.advantage >= 0 else (gap <= self.threshold).float()


def quantile(values: torch.Tensor, share: float) -> float:
    """Compute a quantile, interpolated between the two nearest values; torch.quantile refuses more than 2^24 values.

    Args:
        values: [N] fp32, at least one.
        share: The quantile, from 0 to 1.

    Returns:
        The quantile, rounded to fp32.
    """
    place = share * (len(values) - 1)
    at = math.floor(place)
    ordered = values.sort().values
    return ordered[at].lerp(ordered[min(at + 1, len(values) - 1)], place - at).item()

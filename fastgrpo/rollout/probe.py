"""Proves that a sampler has the policy's weights, by the log-probs that both compute of the same tokens.

A sampler can answer without an error and keep old weights, or a part of them. Training would then continue on samples
of another policy, and no metric of the reward would show it. A `Probe` compares fixed tokens with a sampler elsewhere,
before it draws. A `DrawCheck` compares the drawn tokens of a step, before they change the policy.
"""

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

from fastgrpo.data.records import Sample
from fastgrpo.policy.lora import adapter_of
from fastgrpo.policy.model import Policy
from fastgrpo.policy.ref_model import Scoring, score
from fastgrpo.ranks import ALONE, Ranks

TOKENS = 48
# Largest mean difference of log-probs in nats, by the dtype of the weights.
TOLERANCE = {torch.float32: 1e-3, torch.float16: 2e-2, torch.bfloat16: 1e-1}
MARK = 0.1  # added to or subtracted from alpha / r B of adapters
# A difference above both CLEAR times the sampler's first one and PART times the update's change is an error too.
CLEAR, PART = 4.0, 0.1
ENOUGH = 256  # in 16 bits, with fewer drawn tokens the tolerance grows as 1/sqrt(tokens), like the error of a mean
SHOWS = 0.01  # if the policy's log-probs change by more than this share of the first difference, the sampler's must too


class Probe:
    """The log-probs of fixed tokens `ids`, all but the first, under the policy, and those that each sampler gave."""

    def __init__(self, policy: Policy) -> None:
        self.policy, self.logps, self.seen = policy, None, {}
        vocabulary = policy.module.get_input_embeddings().num_embeddings // 2  # the last embeddings may be padding
        self.ids = torch.randint(vocabulary, (TOKENS,), generator=torch.Generator().manual_seed(0)).tolist()

    def update(self) -> bool:
        """Score the tokens under the present policy. Return whether their log-probs have changed."""
        (scored,) = score(self.policy, [Sample(self.ids[:1], self.ids[1:])], Scoring(1.0, TOKENS))
        before, self.logps = self.logps, scored.double().cpu()
        return before is None or not torch.equal(before, self.logps)

    @contextmanager
    def marked(self, adapters: bool = False) -> Iterator[None]:
        """Change weights temporarily, so that a sampler with any other weights fails the `check`.

        With `adapters`, change B of the adapters; else negate the embeddings and head rows of the tokens. Without this,
        a sampler whose weights differ by less than the tolerance could pass the first check, as after a resumption.
        """
        module = self.policy.module
        if adapters:
            rows, signs = slice(None), torch.Generator().manual_seed(0)
            found = [adapter for adapter in map(adapter_of, module.modules()) if adapter]
            marked = {id(up): (up, up + _signs(up, signs) * (MARK / scale)) for _, up, scale in found}
        else:
            rows = torch.tensor(self.ids).unique()
            layers = module.get_input_embeddings(), module.get_output_embeddings()
            marked = {id(layer.weight): (layer.weight, -layer.weight[rows]) for layer in layers}
        kept = [weight[rows].clone() for weight, _ in marked.values()]
        try:
            for weight, changed in marked.values():
                weight[rows] = changed
            self.update()
            yield
        finally:
            for (weight, _), own in zip(marked.values(), kept, strict=True):
                weight[rows] = own
            self.update()

    def check(self, given: Sequence[float], sampler: str) -> float:
        """Return the mean difference of a sampler's log-probs from the last `update`, or raise ValueError.

        The difference must be within the tolerance. If the policy has changed since the sampler's last check, the
        sampler's log-probs must have changed too, and differ by at most `PART` of the policy's change, or by rounding.
        """
        given, allowed = torch.tensor(given, dtype=torch.float64), TOLERANCE[self.policy.dtype]
        gap, told = _mean(given, self.logps), ""
        noise, before, old = self.seen.get(sampler, (gap, self.logps, None))
        moved = _mean(self.logps, before)
        if moved:
            allowed = min(allowed, max(CLEAR * noise, PART * moved))
            told = f"; the update changed the policy's by {moved:.3g}, and the sampler's by {_mean(given, old):.3g}"
        unchanged = moved > noise * SHOWS and torch.equal(given, old)
        if gap <= allowed and not unchanged:
            self.seen[sampler] = noise, self.logps, given
            return gap
        raise ValueError(
            f"{sampler} does not have the policy's weights: its log-probs of {TOKENS - 1} fixed tokens differ by "
            f"{gap:.3g} nats on average, and at most {allowed:.3g} is allowed{told}. The first token has "
            f"{given[0]:.6f} there, and {self.logps[0]:.6f} here. Check that the server runs in the dtype of the "
            "policy, with the command in docs/serving.md, and restart it"
        )


def _signs(up, generator):
    """Return 1 or -1 for each output [F, 1] of a matrix B [F, r]."""
    return (torch.randint(2, (len(up), 1), generator=generator) * 2 - 1).to(up)


def _mean(one, other):
    return (one - other).abs().mean().item()


class DrawCheck:
    """Compares the log-probs of drawn tokens with those under the policy before the first update of a rollout."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.tolerance, self.enough, self.sums = TOLERANCE[dtype], 1 if dtype.itemsize == 4 else ENOUGH, None

    def add(self, before: torch.Tensor, drawn: torch.Tensor, active: torch.Tensor | None = None) -> None:
        """Add the active tokens of some samples, with their log-probs under the policy and at the draw."""
        values = torch.stack([(before - drawn).abs(), drawn, before, torch.ones_like(before)])
        sums = (values if active is None else torch.where(active, values, 0.0)).double().sum(1)
        self.sums = sums if self.sums is None else self.sums + sums

    def veto(self, loss: torch.Tensor) -> torch.Tensor:
        """Return NaN instead of the loss if the mean difference is too large, so that the update is skipped.

        This happens on the device, so that the host does not wait.
        """
        if self.sums is None:
            return loss
        (gap, *_), allowed = self._means()
        return torch.where(gap > allowed, math.nan, loss)

    def _means(self):
        """Return the mean difference and log-probs, and the largest mean difference of so many tokens."""
        tokens = self.sums[3].clamp(min=1)
        return self.sums[:3] / tokens, self.tolerance * (self.enough / tokens).sqrt().clamp(min=1)

    def end(self, ranks: Ranks = ALONE) -> None:
        """Raise a ValueError if this rank or another one skipped the update."""
        mine = None
        if self.sums is not None:
            means, allowed = self._means()
            mine = [*means.tolist(), allowed.item()]
            mine = mine if mine[0] > mine[3] else None
        for gap, drawn, before, allowed in filter(None, ranks.gather(mine, "the difference of log-probs")):
            raise ValueError(
                "the sampler does not have the policy's weights: its log-probs of the drawn tokens differ by "
                f"{gap:.3g} nats on average, and at most {allowed:g} is allowed. The mean log-prob is {drawn:.6f} "
                f"at the draw, and {before:.6f} in the update, which was skipped. Try another rollout_backend, and "
                "report this as a bug"
            )

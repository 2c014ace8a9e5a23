"""Gathers what the micro-batches of a step measure, on the device, so that the host waits for it once."""

import math
from collections import defaultdict

import torch

from fastgrpo.loss import GRPOLossOutput
from fastgrpo.policy.batch import Batch
from fastgrpo.ranks import ALONE, Ranks

EXTREMES = {"min": min, "max": max}  # metrics whose last part has one of these names are not averaged
LARGEST = ("rollout/logp_gap_max", "head/dropped_mass")  # metrics of which the largest value counts, too
SUMMED = ("policy_loss", "active_tokens")


class Meter:
    """Gathers what the micro-batches of a step's updates measure."""

    def __init__(self):
        self.entries = defaultdict(list)  # name -> (index of the update, what a micro-batch measured)

    def add(self, out: GRPOLossOutput, batch: Batch, update: int) -> None:
        """Note what one micro-batch measured; means are weighted by its active tokens."""
        tokens = out.metrics["active_tokens"]
        measured = {"loss": out.loss.detach()}
        for name, value in out.metrics.items():
            whole = name in (*SUMMED, *LARGEST) or name.rpartition("/")[2] in EXTREMES
            measured[name] = value if whole else value * tokens
        if batch.old_logps is None and batch.rollout_logps is not None:
            gap = (out.logps - batch.rollout_logps).abs() * out.active
            measured |= {"rollout/logp_gap": gap.sum(), "rollout/logp_gap_max": gap.max(), "first_tokens": tokens}
        for name, value in measured.items():
            self.entries[name].append((update, value))

    def values(self, norms: list[float], ranks: Ranks = ALONE) -> dict[str, float]:
        """Reduce what was measured, over the updates that were not skipped and over the ranks."""
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
        if not parts.get("loss"):  # no group had spread: nothing was computed, nothing moved
            return values | {"loss": 0.0, "policy_loss": 0.0}
        tokens, first = sum(parts.pop("active_tokens")), sum(parts.pop("first_tokens", []))
        per = {"loss": sum(taken), "policy_loss": sum(taken), "rollout/logp_gap": max(first, 1)}
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
        """Average a metric over the active tokens of one update, whether it was skipped or not."""
        mine = [
            math.fsum(value.item() for of_update, value in self.entries.get(key, ()) if of_update == update)
            for key in (name, "active_tokens")
        ]
        total, tokens = map(math.fsum, zip(*ranks.gather(mine, f"the mean {name} of an update"), strict=True))
        return total / tokens if tokens else math.nan

    @staticmethod
    def _of(entries, taken):
        """Copy the values of the updates that were not skipped to the host."""
        values = torch.stack([value for _, value in entries]).double().tolist()
        return [value for (update, _), value in zip(entries, values, strict=True) if taken[update]]

"""Gathers what the micro-batches of a step measure."""

import math
from collections import defaultdict

import torch


class Meter:
    """Gathers what the micro-batches of a step measure, on the device; the host looks once, at the end."""

    def __init__(self):
        self.sums = defaultdict(list)  # name -> (index of the update, sum over the micro-batch's active tokens)
        self.norms = []  # one an update; NaN where it was skipped. On the host once `values` has been called

    def add(self, out, batch):
        """What one micro-batch measured: means are weighted by its active tokens."""
        tokens = out.metrics["active_tokens"]
        for name, value in out.metrics.items():
            summed = name in ("policy_loss", "active_tokens", "ratio/max")
            self._append(name, value if summed else value * tokens)
        self._append("loss", out.loss.detach())
        if batch.old_logps is None and batch.sampler_logps is not None:
            gap = (out.logps - batch.sampler_logps).abs() * out.active
            self._append("rollout/logp_gap", gap.sum())
            self._append("rollout/logp_gap_max", gap.max())
            self._append("first_tokens", tokens)

    def _append(self, name, value):
        self.sums[name].append((len(self.norms), value))

    def values(self):
        """Means over the active tokens of the step's updates that were not skipped; losses are means over these
        updates."""
        norms = torch.stack(self.norms).double().cpu()
        self.norms = norms.tolist()
        taken = int(norms.isfinite().sum())
        values = {"skipped_updates": len(norms) - taken}
        if not taken:
            return values
        values["grad_norm"] = norms.nanmean().item()
        parts = {name: self._kept(entries) for name, entries in self.sums.items()}
        if not len(parts.get("loss", ())):  # no group had spread: nothing was computed, nothing moved
            return values | {"loss": 0.0, "policy_loss": 0.0}
        totals = {name: part.sum().item() for name, part in parts.items()}
        tokens, first = totals.pop("active_tokens"), totals.pop("first_tokens", 0)
        per = defaultdict(lambda: max(tokens, 1), {"loss": taken, "policy_loss": taken})
        per["rollout/logp_gap"] = max(first, 1)
        values |= {name: total / per[name] for name, total in totals.items()}
        for name in ("ratio/max", "rollout/logp_gap_max"):
            if len(parts.get(name, ())):
                values[name] = parts[name].max().item()
        return values

    def _kept(self, entries):
        """The values of the updates that were not skipped, on the host."""
        values = torch.stack([value for _, value in entries]).double().cpu()
        return values[torch.tensor([math.isfinite(self.norms[update]) for update, _ in entries])]

"""What each completion in flight has drawn, on the device; the host looks every few steps.

Shapes: R lanes (completions in flight), C most tokens of a completion.
"""

import torch


class Lanes:
    """One lane a completion. A finished lane goes on computing until the host takes it, and changes nothing."""

    def __init__(self, count, capacity, device):
        def zeros(*shape, dtype=torch.int64):
            return torch.zeros(*shape, dtype=dtype, device=device)

        self.index = torch.arange(count, device=device)
        self.token = zeros(count)  # the last one drawn: the next input
        self.position = zeros(count)  # of that token
        self.length = zeros(count) + 1  # tokens drawn
        self.limit = zeros(count)
        self.finished = zeros(count, dtype=torch.bool) | True
        # One place behind the end: a finished lane writes there.
        self.uniforms = zeros(count, capacity + 1, dtype=torch.float32)
        self.tokens = zeros(count, capacity + 1)
        self.logps = zeros(count, capacity + 1, dtype=torch.float32)
        self.spoilt = False  # whether a log-prob was not finite, and so keys and values may not be
        self.kept = None  # the mass that filters left at each draw: see `keep_mass`

    def keep_mass(self):
        """Record from now on what the filters keep."""
        if self.kept is None:
            self.kept = torch.zeros_like(self.logps)

    def seat(self, rows, prompt_lengths, limits, uniforms):
        """New completions on these lanes [S]: prompt_lengths, limits [S], uniforms [S, C]; nothing is drawn yet."""
        self.position[rows] = prompt_lengths - 1
        self.length[rows] = 0
        self.limit[rows] = limits
        self.finished[rows] = False
        self.uniforms[rows, : uniforms.shape[1]] = uniforms

    def draws(self, rows):
        """The uniform numbers [S] of the next draw. rows: a slice of the lanes, or [S] of them."""
        return self.uniforms[self.index[rows], self.length[rows]]

    def record(self, rows, drawn, logps, kept, stop_ids):
        """Append what was drawn, each [S], where a lane is not finished; finish those that stopped or are full.

        rows: a slice of the lanes, or [S] of them.
        """
        live, at, index = ~self.finished[rows], self.length[rows], self.index[rows]
        self.tokens[index, at] = drawn
        self.logps[index, at] = logps
        if self.kept is not None:
            self.kept[index, at] = kept
        length = at + live
        self.length[rows] = length
        self.position[rows] += live
        self.token[rows] = torch.where(live, drawn, self.token[rows])
        self.finished[rows] |= (drawn[:, None] == stop_ids).any(-1) | (length >= self.limit[rows])

    def move(self, sources, targets):
        """The lanes at `sources` continue at `targets`."""
        for name in ("token", "position", "length", "limit", "finished", "uniforms", "tokens", "logps", "kept"):
            tensor = getattr(self, name)
            if tensor is not None:
                tensor.index_copy_(0, targets, tensor.index_select(0, sources))

    def forgive(self):
        """What was not finite is gone."""
        self.logps.zero_()
        self.spoilt = False

    def take(self, rows):
        """(ids, logps, kept or None) of each of these lanes, on the host."""
        lengths = self.length[rows].tolist()
        longest = max(lengths)
        tokens = self.tokens[rows, :longest].tolist()
        logps = self.logps[rows, :longest].cpu()
        self.spoilt |= not logps.isfinite().all().item()
        kept = None if self.kept is None else self.kept[rows, :longest].cpu()
        return [
            (ids[:n], logps[i, :n].clone(), None if kept is None else kept[i, :n].clone())
            for i, (ids, n) in enumerate(zip(tokens, lengths, strict=True))
        ]

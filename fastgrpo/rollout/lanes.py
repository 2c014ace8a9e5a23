"""The lanes: what runs on each, on the host, and their state on the device.

Shapes: R lanes, C most tokens of a completion, S lanes of a call.
"""

from dataclasses import dataclass, field

import torch

from fastgrpo.data.records import Sample
from fastgrpo.rollout.backend import Request


@dataclass(eq=False)
class Group:
    """A request that runs: its prompt's slot, the lane on which each completion began, and finished ones by number."""

    request: Request
    slot: int
    lanes: list[int]
    done: dict[int, Sample] = field(default_factory=dict)


@dataclass(eq=False, slots=True)
class Running:
    """A completion in flight. After the decode step `end` it has reached its limit."""

    group: Group
    number: int
    end: int

    def drawn(self, steps: int) -> int:
        """Count its tokens."""
        return self.group.request.limits[self.number] - (self.end - steps)


class Lanes:
    """The state of R lanes, each of which holds one completion in flight.

    A finished lane is still computed until the host takes its completion, but its state does not change any more.
    """

    def __init__(self, count: int, capacity: int, device: torch.device) -> None:
        def zeros(*shape, dtype=torch.int64):
            return torch.zeros(*shape, dtype=dtype, device=device)

        self.index = torch.arange(count, device=device)
        self.token = zeros(count)  # the token drawn last, which is the next input
        self.position = zeros(count)  # the position of that token in prompt and completion
        self.length = zeros(count) + 1  # how many tokens were drawn
        self.limit = zeros(count)  # how many tokens are drawn at most
        self.finished = zeros(count, dtype=torch.bool) | True
        # The last column is a spare one, into which a finished lane of C tokens writes.
        self.uniforms = zeros(count, capacity + 1, dtype=torch.float32)
        self.tokens = zeros(count, capacity + 1)
        self.logps = zeros(count, capacity + 1, dtype=torch.float32)
        self.spoilt = False  # whether a log-prob was not finite; then keys and values may not be finite either
        self.kept = None  # the probability that the filters left at each draw; see `keep_mass`
        self.seen = None  # [R, V] bool, the tokens of prompt and completion; see `keep_seen`

    def keep_mass(self) -> None:
        """Record from now on how much probability the filters leave at each draw."""
        if self.kept is None:
            self.kept = torch.zeros_like(self.logps)

    def keep_seen(self, vocabulary: int) -> None:
        """Record from now on which tokens the prompt and the completion of each lane hold."""
        if self.seen is None:
            self.seen = torch.zeros(len(self.token), vocabulary, dtype=torch.bool, device=self.token.device)

    def see(self, lanes: torch.Tensor, ids: torch.Tensor, owners: torch.Tensor, prompts: torch.Tensor) -> None:
        """Note the tokens `ids` [N] of the prompts `owners` [N], for new completions of `prompts` [S] on lanes [S]."""
        held = self.seen.new_zeros(len(lanes), self.seen.shape[1])  # there are no more prompts than completions
        held[owners, ids] = True
        self.seen[lanes] = held[prompts]

    def start(
        self, lanes: torch.Tensor, prompt_lengths: torch.Tensor, limits: torch.Tensor, uniforms: torch.Tensor
    ) -> None:
        """Start new completions, with prompt lengths [S], limits [S] and random numbers [S, at most C]."""
        self.position[lanes] = prompt_lengths - 1
        self.length[lanes] = 0
        self.limit[lanes] = limits
        self.finished[lanes] = False
        self.uniforms[lanes, : uniforms.shape[1]] = uniforms

    def draws(self, lanes: slice | torch.Tensor) -> torch.Tensor:
        """Read the random numbers [S] of the next draw."""
        return self.uniforms[self.index[lanes], self.length[lanes]]

    def record(
        self,
        lanes: slice | torch.Tensor,
        drawn: torch.Tensor,
        logps: torch.Tensor,
        kept: torch.Tensor,
        stop_ids: torch.Tensor,
    ) -> None:
        """Append a drawn token to each lane that is not finished, and finish the lanes that stopped or are full."""
        live, at, index = ~self.finished[lanes], self.length[lanes], self.index[lanes]
        self.tokens[index, at] = drawn
        self.logps[index, at] = logps
        if self.kept is not None:
            self.kept[index, at] = kept
        if self.seen is not None:
            self.seen[index, drawn] = self.seen[index, drawn] | live
        length = at + live
        self.length[lanes] = length
        self.position[lanes] += live
        self.token[lanes] = torch.where(live, drawn, self.token[lanes])
        self.finished[lanes] |= (drawn[:, None] == stop_ids).any(-1) | (length >= self.limit[lanes])

    def append(
        self, lanes: torch.Tensor, counts: torch.Tensor, owners: torch.Tensor, offsets: torch.Tensor, ids: torch.Tensor
    ) -> None:
        """Append given tokens to lanes [S] that are not finished, fewer than their limits leave. Their log-probs are 0.

        Lane i gets counts[i] of the ids [N]. `owners` [N] are their lanes; `offsets` [N] is how many stand before each.
        """
        at = self.length[owners] + offsets
        self.tokens[owners, at] = ids
        self.logps[owners, at] = 0
        if self.kept is not None:
            self.kept[owners, at] = 1
        if self.seen is not None:
            self.seen[owners, ids] = True
        self.length[lanes] += counts
        self.position[lanes] += counts
        self.token[lanes] = ids[counts.cumsum(0) - 1]

    def move(self, sources: torch.Tensor, targets: torch.Tensor) -> None:
        """Continue the completions of the lanes `sources` [S] on the lanes `targets` [S], none of which is a source."""
        for name in ("token", "position", "length", "limit", "finished", "uniforms", "tokens", "logps", "kept", "seen"):
            tensor = getattr(self, name)
            if tensor is not None:
                tensor.index_copy_(0, targets, tensor.index_select(0, sources))

    def forgive(self) -> None:
        """Reset the log-probs of all lanes, after some were not finite."""
        self.logps.zero_()
        self.spoilt = False

    def take(self, lanes: torch.Tensor) -> list[tuple[list[int], torch.Tensor, torch.Tensor | None]]:
        """Copy completions to the host, and note whether a log-prob was not finite.

        Returns for each lane its token ids, their fp32 log-probs, and the probability that the filters left at each
        draw, or None if it was not recorded.
        """
        lengths = self.length[lanes].tolist()
        longest = max(lengths)
        tokens = self.tokens[lanes, :longest].tolist()
        logps = self.logps[lanes, :longest].cpu()
        self.spoilt |= not logps.isfinite().all().item()
        kept = None if self.kept is None else self.kept[lanes, :longest].cpu()
        return [
            (ids[:n], logps[i, :n].clone(), None if kept is None else kept[i, :n].clone())
            for i, (ids, n) in enumerate(zip(tokens, lengths, strict=True))
        ]

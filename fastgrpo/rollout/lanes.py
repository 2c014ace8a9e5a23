"""Lanes: the state of the completions in flight, one each, on the device and on the host.

Shapes: R lanes, S lanes of a call, C maximum tokens of a completion, V vocabulary.
"""

from concurrent.futures import Future
from dataclasses import dataclass, field

import torch

from fastgrpo.data.records import Dialogue, Sample, Turn
from fastgrpo.loss.inputs import to_device
from fastgrpo.rollout.backend import Request


@dataclass(eq=False)
class Group:
    """A running request: its prompt slot, the first lane of each completion, and finished samples by number."""

    request: Request
    slot: int
    lanes: list[int]
    done: dict[int, Sample] = field(default_factory=dict)


@dataclass(eq=False, slots=True)
class Running:
    """A completion in flight."""

    group: Group
    number: int  # in the group
    end: int  # the decode step after which it reaches its limit, if it does not stop before
    turn: int = 0  # the number of its tokens before the current turn
    given: list[slice] = field(default_factory=list)  # the spans of the tokens that were appended to it
    answer: Future[Turn] | None = None  # the tool result that it waits for; None if it is decoded
    taken: tuple | None = None  # while it waits, its tokens as `Lanes.take` returns them
    patient: bool = True  # whether a step may wait for the answer, which it does once

    @property
    def limit(self) -> int:
        """Its maximum number of tokens."""
        return self.group.request.limits[self.number]

    @property
    def dialogue(self) -> Dialogue | None:
        """The turns of a completion with tools."""
        dialogues = self.group.request.dialogues
        return dialogues and dialogues[self.number]

    def length(self, steps: int) -> int:
        """Return the number of its tokens. While it waits, `turn` counts the answered turn too."""
        return self.limit - (self.end - steps) if self.answer is None else self.turn


class Lanes:
    """The state of R lanes, each of which holds one completion in flight.

    A finished lane is still computed until the host takes its completion, but its state no longer changes. So a second
    stream can copy it while later steps run. Elements at an index tensor are filled with a number by `index_fill_` or
    `index_put_`: an assignment would copy the number to the GPU, and wait for it.
    """

    def __init__(self, count: int, capacity: int, device: torch.device) -> None:
        def zeros(*shape, dtype=torch.int64):
            return torch.zeros(*shape, dtype=dtype, device=device)

        self.index = torch.arange(count, device=device)
        self.token = zeros(count)  # the token drawn last, which is the next input
        self.position = zeros(count)  # the position of that token in prompt and completion
        self.length = zeros(count) + 1  # number of drawn tokens
        self.limit = zeros(count)  # maximum number of drawn tokens
        self.finished = zeros(count, dtype=torch.bool) | True
        # Finished lanes of C tokens write into the last column, which is spare.
        self.uniforms = zeros(count, capacity + 1, dtype=torch.float32)
        self.tokens = zeros(count, capacity + 1)
        self.logps = zeros(count, capacity + 1, dtype=torch.float32)
        self.spoilt = False  # True if a log-prob was not finite; keys and values may then not be finite either
        self.kept = None  # probability mass kept by the filters at each draw; see `keep_mass`
        self.seen = None  # [R, V] bool, the tokens of prompt and completion; see `keep_seen`
        self.copies = torch.cuda.Stream(device) if device.type == "cuda" else None
        self.flags = self.reached = None  # the last snapshot, and the event at which it is complete

    def keep_mass(self) -> None:
        """Start to record the probability mass that the filters keep at each draw."""
        if self.kept is None:
            self.kept = torch.zeros_like(self.logps)

    def keep_seen(self, vocabulary: int) -> None:
        """Start to record the tokens in the prompt and completion of each lane."""
        if self.seen is None:
            self.seen = torch.zeros(len(self.token), vocabulary, dtype=torch.bool, device=self.token.device)

    def see(self, lanes: torch.Tensor, ids: torch.Tensor, owners: torch.Tensor, prompts: torch.Tensor) -> None:
        """Record the tokens `ids` [N] of the prompts `owners` [N], for completions of `prompts` [S] on lanes [S]."""
        held = self.seen.new_zeros(len(lanes), self.seen.shape[1])  # there are no more prompts than completions
        held.index_put_((owners, ids), held.new_ones(()))
        self.seen[lanes] = held[prompts]

    def start(
        self, lanes: torch.Tensor, prompt_lengths: torch.Tensor, limits: torch.Tensor, uniforms: torch.Tensor
    ) -> None:
        """Start new completions with prompt lengths [S], limits [S] and random numbers [S, at most C]."""
        self.position[lanes] = prompt_lengths - 1
        self.length.index_fill_(0, lanes, 0)
        self.limit[lanes] = limits
        self.finished.index_fill_(0, lanes, False)
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
        """Append a drawn token to each unfinished lane. Mark lanes that stopped or are full as finished."""
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

    def append(self, lanes: torch.Tensor, counts: torch.Tensor, ids: torch.Tensor) -> None:
        """Append given tokens, with log-prob 0, to finished lanes [S], which are then decoded further.

        Lane i gets counts[i] of the ids [N]. The limits must leave room for one more token.
        """
        ends = counts.cumsum(0)
        owners = lanes.repeat_interleave(counts, output_size=len(ids))
        starts = (ends - counts).repeat_interleave(counts, output_size=len(ids))
        offsets = torch.arange(len(ids), device=ids.device) - starts
        at = self.length[owners] + offsets
        self.tokens[owners, at] = ids
        self.logps.index_put_((owners, at), self.logps.new_zeros(()))
        if self.kept is not None:
            self.kept.index_put_((owners, at), self.kept.new_ones(()))
        if self.seen is not None:
            self.seen.index_put_((owners, ids), self.seen.new_ones(()))
        self.length[lanes] += counts
        self.position[lanes] += counts
        self.token[lanes] = ids[ends - 1]
        self.finished.index_fill_(0, lanes, False)

    def move(self, sources: torch.Tensor, targets: torch.Tensor) -> None:
        """Move the completions of the lanes `sources` [S] to the lanes `targets` [S]."""
        for name in ("token", "position", "length", "limit", "finished", "uniforms", "tokens", "logps", "kept", "seen"):
            tensor = getattr(self, name)
            if tensor is not None:
                tensor.index_copy_(0, targets, tensor.index_select(0, sources))

    def stop(self, lanes: torch.Tensor) -> None:
        """Free lanes. A decode step then computes only their first token."""
        self.finished.index_fill_(0, lanes, True)
        self.length.index_fill_(0, lanes, 1)
        self.position.index_fill_(0, lanes, 0)

    def snapshot(self) -> None:
        """Queue a copy of the finished flags to the host. `take` reads the lanes as they are here."""
        self.flags = torch.empty(self.finished.shape, dtype=torch.bool, pin_memory=self.copies is not None)
        self.flags.copy_(self.finished, non_blocking=True)
        if self.copies is not None:
            self.reached = torch.cuda.current_stream(self.finished.device).record_event()

    def read(self) -> list[bool]:
        """Wait for the last snapshot, and return its flags [R]."""
        if self.reached is not None:
            self.reached.synchronize()
        return self.flags.tolist()

    def forgive(self) -> None:
        """Reset the log-probs of all lanes after some were not finite."""
        self.logps.zero_()
        self.spoilt = False

    def take(
        self, lanes: list[int], starts: list[int] | None = None
    ) -> list[tuple[list[int], torch.Tensor, torch.Tensor | None]]:
        """Copy completions of the last snapshot to the host, and set `spoilt` if a log-prob is not finite.

        Returns for each lane its token ids from `starts` on, their fp32 log-probs, and the probability mass that the
        filters kept. The latter is None if it was not recorded.
        """
        first = torch.tensor(starts or [0] * len(lanes))
        with torch.cuda.stream(self.copies):  # does not wait for the steps behind the snapshot
            if self.copies is not None:
                self.copies.wait_event(self.reached)
            index = to_device(torch.tensor(lanes), self.length.device)
            # `starts` counts the tokens of the longest completion of a request; one that has ended may have fewer.
            lengths = (self.length[index].cpu() - first).clamp_(min=0).tolist()
            columns = (first[:, None] + torch.arange(max(lengths))).clamp_(max=self.tokens.shape[1] - 1)
            read = index[:, None], to_device(columns, index.device)
            tokens = self.tokens[read].tolist()
            logps = self.logps[read].cpu()
            kept = None if self.kept is None else self.kept[read].cpu()
        self.spoilt |= not logps.isfinite().all().item()
        return [
            (ids[:n], logps[i, :n].clone(), None if kept is None else kept[i, :n].clone())
            for i, (ids, n) in enumerate(zip(tokens, lengths, strict=True))
        ]

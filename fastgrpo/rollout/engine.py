"""The generation loop: takes prompts, and returns completions with the log-probs of their tokens.

It runs the policy's own module through the registered attention, so no copy of the weights must be synced after an
update. No request may be in flight during an optimizer step, so keys and values of old weights are never read. A prompt
is computed once for its group. When a completion finishes, a waiting group takes over its lane. If no group waits, the
last lanes move into the gaps. On a GPU a step is one CUDA graph, and the host polls for finished lanes every POLL_STEPS
steps.

Shapes: B prompts, G completions each, R lanes of which n are in use, S lanes of a call, C maximum tokens of a
completion, V vocabulary.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import PreTrainedModel

from fastgrpo.data.records import Sample
from fastgrpo.loss.inputs import to_device
from fastgrpo.loss.objective import Interval
from fastgrpo.policy.model import Policy, head_dim
from fastgrpo.rollout.attention import DecodeAttention, PrefillAttention, choose_provider, make_provider
from fastgrpo.rollout.backend import Request, RolloutBackend
from fastgrpo.rollout.graph import Graphs, recordable
from fastgrpo.rollout.sampling import sample, sample_penalized, uniforms
from fastgrpo.rollout.slots import Slots, bucket, copied_tokens, fit, kv_token_bytes, memory_left, settled
from fastgrpo.rollout.weights import HeldWeights

COMPACT_BELOW = 0.9  # gaps are closed if a smaller share of the lanes is in use: a copy costs less than idle lanes
ADMIT_FROM = 0.25  # waiting groups start when this share of the lanes is free: a prefill costs several decode steps
PREFILL_TOKENS = 16384  # prompt tokens of one prefill pass
POLL_STEPS = 8  # decode steps between two reads of the GPU's finished flags; on a CPU they are read every step


@dataclass(eq=False)
class Group:
    """A running request: its prompt slot, the first lane of each completion, and finished samples by number."""

    request: Request
    slot: int
    lanes: list[int]
    done: dict[int, Sample] = field(default_factory=dict)


@dataclass(eq=False, slots=True)
class Running:
    """A completion in flight. It reaches its limit after decode step `end`."""

    group: Group
    number: int
    end: int

    def drawn(self, steps: int) -> int:
        """Return the number of its tokens."""
        return self.group.request.limits[self.number] - (self.end - steps)


class Lanes:
    """The state of R lanes, each of which holds one completion in flight.

    A finished lane is still computed until the host takes its completion, but its state no longer changes.
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
        held[owners, ids] = True
        self.seen[lanes] = held[prompts]

    def start(
        self, lanes: torch.Tensor, prompt_lengths: torch.Tensor, limits: torch.Tensor, uniforms: torch.Tensor
    ) -> None:
        """Start new completions with prompt lengths [S], limits [S] and random numbers [S, at most C]."""
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

    def append(
        self, lanes: torch.Tensor, counts: torch.Tensor, owners: torch.Tensor, offsets: torch.Tensor, ids: torch.Tensor
    ) -> None:
        """Append given tokens, with log-prob 0, to unfinished lanes [S]. Their limits must leave room for one more.

        Lane i gets counts[i] of the ids [N]. `owners` [N] are their lanes, `offsets` [N] their indices in these tokens.
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
        """Move the completions of the lanes `sources` [S] to the lanes `targets` [S], which are disjoint from them."""
        for name in ("token", "position", "length", "limit", "finished", "uniforms", "tokens", "logps", "kept", "seen"):
            tensor = getattr(self, name)
            if tensor is not None:
                tensor.index_copy_(0, targets, tensor.index_select(0, sources))

    def forgive(self) -> None:
        """Reset the log-probs of all lanes after some were not finite."""
        self.logps.zero_()
        self.spoilt = False

    def take(self, lanes: torch.Tensor) -> list[tuple[list[int], torch.Tensor, torch.Tensor | None]]:
        """Copy completions to the host, and set `spoilt` if a log-prob is not finite.

        Returns for each lane its token ids, their fp32 log-probs, and the probability mass that the filters kept. The
        latter is None if it was not recorded.
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


class RolloutEngine(RolloutBackend):
    """Generates with the policy's own weights: any causal LM that uses transformers' attention interface.

    Args:
        model: The policy: a `Policy`, or a transformers causal LM.
        max_num_seqs: Maximum number of completions in flight; others wait.
        attention: Name of a provider of decode attention, see attention.py.
        memory_utilization: Maximum share of the device's free memory for keys and values, measured at the first
            request.
        enforce_eager: Whether to decode without CUDA graphs. Models that cannot be captured never use them.
        reserved: Returns the bytes of free memory that will be allocated later, such as the optimizer's states before
            its first step. None means 0.

    Raises:
        ValueError: An argument is out of range, or the provider does not support the model or device.
    """

    def __init__(
        self,
        model: Policy | PreTrainedModel,
        *,
        max_num_seqs: int = 256,
        attention: str = "auto",
        memory_utilization: float = 0.7,
        enforce_eager: bool = False,
        reserved: Callable[[], int] | None = None,
    ):
        super().__init__(model, max_num_seqs)
        Interval(above=0, at_most=1).check("memory_utilization", memory_utilization)
        self.attention, self.memory_utilization, self.reserved = attention, memory_utilization, reserved
        self.on_gpu = self.policy.device.type == "cuda"
        if attention != "auto":  # raise early if the provider does not support the model
            choose_provider(attention, self.policy.device, self.policy.dtype, head_dim(self.policy.shape), 0)
        self.graphs = Graphs(self.policy.device, recordable(self.policy, enforce_eager))
        self.budget, self.left = None, math.inf  # bytes for keys and values; free bytes, of which they are a share
        self.phases = {}  # the geometry of each phase, see `settled`
        self.running = []  # the Running of each lane up to the last one in use; None for a free lane
        self.geometry = self.slots = self.lanes = self.provider = None
        self.stops = {}  # stop ids on the device; graphs read them
        self.weights = HeldWeights(self.policy, self.graphs)
        self.steps = 0  # decode steps so far

    @classmethod
    def from_config(cls, policy: Policy, config: Any, reserved: Callable[[], int] | None = None) -> "RolloutEngine":
        """Create the engine from settings."""
        return cls(
            policy,
            max_num_seqs=config.max_num_seqs,
            memory_utilization=config.rollout_memory_utilization,
            enforce_eager=config.rollout_backend == "eager",
            reserved=reserved,
        )

    def _stop(self, request):
        lanes = [lane for lane, running in enumerate(self.running) if running and running.group.request is request]
        if not lanes:  # its prefill failed
            return 0
        index, done = self._tensor(lanes), self.running[lanes[0]].group.done
        taken = self.lanes.take(index)  # counts the tokens, and checks that their log-probs are finite
        self.lanes.finished[index] = True
        self._leave(lanes)
        return sum(len(rollout.ids) for rollout in done.values()) + sum(len(ids) for ids, *_ in taken)

    def abort_request(self, request_id: int) -> int:
        """Drop a waiting or running request, and return the number of its drawn tokens."""
        drawn = super().abort_request(request_id)
        self._release()
        return drawn

    def work_left(self) -> int:
        """Return the maximum number of tokens left: prompts of waiting requests, and tokens still to draw."""
        waiting = sum(len(request.prompt_ids) + sum(request.limits) for request in self.waiting)
        return waiting + sum(running.end - self.steps for running in self.running if running)

    def _release(self):
        """Release the gathered weights once nothing is in flight."""
        if not self.unfinished:
            self.weights.release()

    @torch.no_grad()
    def step(self) -> dict[int, list[Sample]]:
        """Admit waiting groups, decode until the next poll, and collect finished groups.

        Returns:
            The completions of the groups that finished, by request_id.

        Raises:
            ValueError: The weights changed while requests were in flight, or a group does not fit into memory.
        """
        if not self.has_unfinished_requests():
            return {}
        if len(self.waiting) == len(self.unfinished):  # nothing is in flight
            self._begin()
        else:
            self.weights.check()
        self._admit()
        remaining = max(running.end for running in self.running if running) - self.steps
        for _ in range(min(remaining, POLL_STEPS if self.on_gpu else 1)):
            self._decode()
        outputs = self._collect()
        self._release()
        return outputs

    def _live(self):
        return len(self.running) - self.running.count(None)

    def _begin(self):
        """Prepare for the waiting requests. No request is in flight."""
        self.weights.hold(max(max(request.limits) for request in self.waiting))
        if self.lanes and self.lanes.spoilt:
            self.slots.zero()
            self.lanes.forgive()

    def _admit(self):
        """Start waiting groups if enough lanes are free."""
        if not self.waiting:
            return
        if not any(self.running):
            self._make_room()
            if self.sampling.filters:
                self.lanes.keep_mass()
            if self.sampling.penalizes:
                self.lanes.keep_seen(len(self.policy.head.weight))
        free = [i for i in range(self.geometry.lanes) if i >= len(self.running) or not self.running[i]]
        wanted = sum(len(request.limits) for request in self.waiting)
        if any(self.running) and len(free) < min(ADMIT_FROM * self.geometry.lanes, wanted):
            return
        taken = {running.group.slot for running in self.running if running}
        slots = [i for i in range(self.geometry.prompts) if i not in taken]
        groups, tokens = [], 0
        while self.waiting and slots and len(free) >= len(self.waiting[0].limits):
            request = self.waiting[0]
            if not self.geometry.holds(len(request.prompt_ids), request.limits):
                break  # it waits until no lane is in use and the slots can be reallocated
            if groups and tokens + len(request.prompt_ids) > PREFILL_TOKENS:
                self._start(groups)
                groups, tokens = [], 0
            count = len(request.limits)
            groups.append(Group(self.waiting.popleft(), slots.pop(0), free[:count]))
            free, tokens = free[count:], tokens + len(request.prompt_ids)
        if groups:
            self._start(groups)

    def _make_room(self):
        """Allocate lanes and slots for the waiting requests, unless `settled` keeps the current geometry."""
        policy, sampling = self.policy, self.waiting[0].sampling
        shape = policy.shape
        self.sampling = sampling
        self.stop_ids = self.stops.setdefault(sampling.stop_token_ids, self._tensor(sampling.stop_token_ids))
        requests = [(len(request.prompt_ids), request.limits) for request in self.waiting]
        copied = copied_tokens(requests, self.max_num_seqs)
        provider = make_provider(self.attention, policy.device, policy.dtype, head_dim(shape), copied)
        if self.budget is None:
            self.left = memory_left(policy.device, self.reserved() if self.reserved else 0)
            self.budget = int(self.memory_utilization * self.left)
        # A penalty needs one byte per lane and token of the vocabulary.
        budget = self.budget - (self.max_num_seqs * len(policy.head.weight) if sampling.penalizes else 0)
        limits = self.max_num_seqs, kv_token_bytes(shape, policy.dtype), budget, provider.flat, self.left
        try:
            new = fit(requests, *limits)
        except ValueError:  # longest prompt and largest group may belong to different requests: fit the first only
            new, requests = fit(requests[:1], *limits), requests[:1]
        new = settled(self.phases, new, requests, *limits[1:3])
        if new == self.geometry:
            return
        self.graphs.clear()
        self.slots = self.lanes = None  # free them before the new ones are made
        self.geometry, self.provider = new, provider
        self.slots = Slots(new, policy.device, provider.memory_order)
        self.lanes = Lanes(new.lanes, new.capacity, policy.device)

    def _start(self, groups):
        """Prefill groups and assign their completions to lanes. If the prefill fails, requeue the groups."""
        try:
            self._prefill(groups)
        except BaseException:
            self.waiting.extendleft(group.request for group in reversed(groups))
            raise
        self.running += [None] * (1 + max(lane for group in groups for lane in group.lanes) - len(self.running))
        for group in groups:
            for number, lane in enumerate(group.lanes):
                self.running[lane] = Running(group, number, self.steps + group.request.limits[number] - 1)
        self._arrange()

    @torch.inference_mode()
    def _prefill(self, groups):
        """Compute each prompt once, and draw the first token of each of its completions."""
        device, requests, by_group = self.policy.device, [g.request for g in groups], [g.lanes for g in groups]
        slots, lengths = [g.slot for g in groups], [len(r.prompt_ids) for r in requests]
        ids = self._tensor([token for r in requests for token in r.prompt_ids])
        positions = to_device(torch.cat([torch.arange(length) for length in lengths]), device)
        longest = max(len(r.prompt_ids) + max(r.limits) for r in requests)
        context = PrefillAttention(lengths, device, self.slots, slots, by_group, longest)
        lengths, counts = torch.tensor(lengths), torch.tensor([len(r.limits) for r in requests])
        logits = self.weights.logits(ids, positions, context, to_device(lengths.cumsum(0) - 1, device))

        self.slots.prompt_lengths[self._tensor(slots)] = to_device(lengths.to(torch.int32), device)
        limits = torch.tensor([limit for r in requests for limit in r.limits])
        numbers = [uniforms(r.sampling.seed, r.request_id, len(r.limits), self.geometry.capacity) for r in requests]
        lanes = self._tensor([lane for group in by_group for lane in group])
        starts = lengths.repeat_interleave(counts), limits, torch.cat(numbers)
        self.lanes.start(lanes, *(to_device(tensor, device) for tensor in starts))
        if self.sampling.penalizes:
            numbers = torch.arange(len(groups))
            owners, prompts = (to_device(numbers.repeat_interleave(n), device) for n in (lengths, counts))
            self.lanes.see(lanes, ids, owners, prompts)
        self._draw(lanes, logits.repeat_interleave(to_device(counts, device), 0, output_size=len(lanes)))

    def _tensor(self, numbers):
        return to_device(torch.tensor(numbers, dtype=torch.int64), self.policy.device)

    def _arrange(self):
        groups = [running.group if running else None for running in self.running]
        largest = max((len(group.lanes) for group in groups if group), default=0)
        self.slots.arrange([group.slot if group else -1 for group in groups], largest)

    def _decode(self):
        """Draw one more token on every lane."""
        n, most = len(self.running), self.geometry.lanes
        if self.on_gpu:  # few sizes, because each needs its own graph and compiled kernels
            n = bucket(n, most)
        key = n, self.slots.members.shape, self.sampling.stop_token_ids, *self.sampling.distribution.values()
        self.graphs.run(key, lambda: self._step(n))
        self.steps += 1

    @torch.inference_mode()
    def _step(self, n):
        """Compute one decode step. A graph can capture it: it reads and writes only tensors of lanes and slots."""
        lanes = self.lanes
        token_index = lanes.position[:n] if self.geometry.flat else lanes.length[:n] - 1
        context = DecodeAttention(self.slots, self.provider, token_index)
        self._draw(slice(n), self.weights.logits(lanes.token[:n], lanes.position[:n], context))

    @torch.inference_mode()
    def append(self, given: Mapping[int, Sequence[int]]) -> None:
        """Append given tokens, such as a tool's answer, to unfinished lanes in one forward pass.

        `given` has token ids by lane. Their log-probs are 0. They count toward the limit of their completion, which
        must leave room for one more token: the next decode step draws it.
        """
        self.weights.check()
        lanes, index = self.lanes, self._tensor(list(given))
        counts = self._tensor([len(tokens) for tokens in given.values()])
        ids = self._tensor([token for tokens in given.values() for token in tokens])
        # The inputs are the newest token of each lane and all given ones except the last, which is the next input.
        owners = index.repeat_interleave(counts)
        ends = counts.cumsum(0)
        offsets = torch.arange(len(ids), device=ids.device) - (ends - counts).repeat_interleave(counts)
        inputs = ids.roll(1)
        inputs[ends - counts] = lanes.token[index]
        newest = (lanes.position if self.geometry.flat else lanes.length - 1)[: len(self.running)]
        context = DecodeAttention(self.slots, self.provider, newest, owners, offsets)
        with self.weights.packed.in_use():
            self.policy.states(inputs, lanes.position[owners] + offsets, context)
        lanes.append(index, counts, owners, offsets, ids)
        for lane, tokens in given.items():
            self.running[lane].end -= len(tokens)

    def _draw(self, lanes, logits):
        """Draw a token for each of these lanes, a slice or [S], from logits [S, V]."""
        numbers, how = self.lanes.draws(lanes), self.sampling.distribution
        if self.sampling.penalizes:
            drawn = sample_penalized(logits, self.lanes.seen[lanes], numbers, **how)
        else:
            drawn = sample(logits, numbers, **how)
        self.lanes.record(lanes, *drawn, self.stop_ids)

    def _collect(self):
        """Read the finished flags, copy finished completions to the host, and free their lanes."""
        self.live_lanes.append(self._live())
        finished = self.lanes.finished[: len(self.running)].tolist()
        lanes = [lane for lane, running in enumerate(self.running) if running and finished[lane]]
        if not lanes:
            return {}
        outputs = {}
        taken = self.lanes.take(self._tensor(lanes))
        for lane, (ids, logps, kept) in zip(lanes, taken, strict=True):
            group, number = self.running[lane].group, self.running[lane].number
            sampling = group.request.sampling
            reason = "stop" if ids[-1] in sampling.stop_token_ids else "length"
            drawn_from = logps - kept.log() if sampling.filters else logps  # log q = log p - log kept
            group.done[number] = Sample(
                group.request.prompt_ids, ids, logps=logps, sampler_logps=drawn_from, finish_reason=reason
            )
            if len(group.done) == len(group.lanes):
                request_id = group.request.request_id
                del self.unfinished[request_id]
                outputs[request_id] = [group.done[i] for i in range(len(group.lanes))]
        self._leave(lanes)
        return outputs

    def _leave(self, lanes):
        """Free these lanes. If no group waits and many lanes are free, move the last lanes into the gaps."""
        for lane in lanes:
            self.running[lane] = None
        live, before = self._live(), len(self.running)
        while self.running and not self.running[-1]:
            self.running.pop()
        if not self.waiting and live < COMPACT_BELOW * len(self.running):
            sources = [i for i, running in enumerate(self.running) if running and i >= live]
            targets = [i for i, running in enumerate(self.running[:live]) if not running]
            moved, flat = [self.running[i] for i in sources], self.geometry.flat
            tokens = max(running.drawn(self.steps) + flat * len(running.group.request.prompt_ids) for running in moved)
            index = self._tensor([sources, targets])
            self.slots.move(*index, tokens)
            self.lanes.move(*index)
            for source, target in zip(sources, targets, strict=True):
                self.running[target] = self.running[source]
            del self.running[live:]
        if len(self.running) < before:
            self._arrange()

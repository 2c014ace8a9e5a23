"""The generation loop: prompts in, completions with the log-probs of their draws out.

It runs the policy's own module through the registered attention: no second copy of the weights, no weight sync, and
nothing of the old weights outlives an optimizer step, because no request may be in flight over one. A prompt is
computed once for its group; a lane that finishes is taken over by the next group, or, when none waits, the last lanes
move into the gaps; on a GPU the host looks every POLL_STEPS steps, and a step is one CUDA graph.

Shapes: B prompts, G completions each, n lanes in use, V vocabulary.
"""

from dataclasses import dataclass, field

import torch

from fastgrpo.data.records import Rollout
from fastgrpo.policy.model import fp32_logits, hidden_states
from fastgrpo.rollout.backend import Request, RequestOutput, RolloutBackend
from fastgrpo.rollout.contexts import DecodeAttention, PrefillAttention
from fastgrpo.rollout.geometry import bucket, fit, head_dim, kv_budget, kv_token_bytes, settled
from fastgrpo.rollout.graph import Graphs
from fastgrpo.rollout.lanes import Lanes
from fastgrpo.rollout.providers import make_provider
from fastgrpo.rollout.sampling import sample, uniforms
from fastgrpo.rollout.slots import Slots

COMPACT_BELOW = 0.9  # live share of the lanes under which gaps are closed: a copy against wasted compute
ADMIT_FROM = 0.25  # free share of the lanes from which waiting groups move in: a prefill costs several decode steps
PREFILL_TOKENS = 16384  # of one prefill pass
POLL_STEPS = 8  # decode steps between two looks at the GPU's finished flags; on a CPU every step is looked at


@dataclass(eq=False)
class Group:
    """A request that runs. slot: of its prompt. lanes: where its completions began. done: those that have finished."""

    request: Request
    slot: int
    lanes: list[int]
    done: dict[int, Rollout] = field(default_factory=dict)


@dataclass(eq=False, slots=True)
class Seat:
    """Who uses a lane. end: the decode step after which it is full."""

    group: Group
    number: int
    end: int

    def drawn(self, steps):
        """Tokens of its completion after this many decode steps."""
        return self.group.request.limits[self.number] - (self.end - steps)


class RolloutEngine(RolloutBackend):
    """Generates from `model` in place. Any causal LM that uses transformers' attention interface."""

    def __init__(self, model, *, max_num_seqs=256, attention="auto", memory_utilization=0.3, enforce_eager=False,
                 reserved=None):  # fmt: skip
        """
        Args:
            max_num_seqs: completions in flight at once; more wait. attention: a name of providers.py.
            memory_utilization: share of the device's free memory, when the first request comes, that keys and values
                may take. enforce_eager: no CUDA graphs. reserved: a function that returns how many bytes of what is
                free others will take (the optimizer's states, before its first step), or None for none.
        """
        super().__init__(model, max_num_seqs)
        if not 0 < memory_utilization <= 1:
            raise ValueError(f"memory_utilization must be in (0, 1], got {memory_utilization}")
        self.attention, self.memory_utilization, self.reserved = attention, memory_utilization, reserved
        self.on_gpu = model.device.type == "cuda"
        self.graphs = Graphs(model.device, self.on_gpu and not enforce_eager)
        self.budget = None  # bytes for keys and values
        self.seats = []  # of each lane up to the last one in use: its Seat, or None
        self.geometry = self.slots = self.lanes = self.provider = None
        self.stops = {}  # stop ids on the device; graphs read them
        self.places = None  # of the weights in memory
        self.steps = 0  # decode steps so far

    def _stop(self, request):
        rows = [lane for lane, seat in enumerate(self.seats) if seat and seat.group.request is request]
        if not rows:  # its prefill failed
            return 0
        self.lanes.finished[torch.tensor(rows, device=self.model.device)] = True
        seats = [self.seats[row] for row in rows]
        drawn = sum(len(rollout.ids) for rollout in seats[0].group.done.values())
        drawn += sum(seat.drawn(self.steps) for seat in seats)
        self._leave(rows)
        return drawn

    @torch.no_grad()
    def step(self):
        if not self.has_unfinished_requests():
            return []
        if len(self.waiting) == len(self.unfinished):  # nothing is in flight
            self._begin()
        elif self._versions() != self.versions:
            raise ValueError("the weights changed while requests were in flight; finish or abort them before an update")
        self._admit()
        remaining = max(seat.end for seat in self.seats if seat) - self.steps
        for _ in range(min(remaining, POLL_STEPS if self.on_gpu else 1)):
            self._decode()
        return self._collect()

    def _live(self):
        return len(self.seats) - self.seats.count(None)

    def _begin(self):
        """Keys and values in flight are those of the weights that begin them; graphs read weights where they stood."""
        self.weights = list(self.model.parameters())
        places = [weight.data_ptr() for weight in self.weights]
        if places != self.places:
            self.graphs.clear()
        self.places, self.versions = places, self._versions()
        if self.lanes and self.lanes.spoilt:
            self.slots.zero()
            self.lanes.forgive()

    def _versions(self):
        return sum(weight._version for weight in self.weights)

    def _admit(self):
        """Seat waiting groups on free lanes, when enough are free."""
        if not self.waiting:
            return
        if not any(self.seats):
            self._make_room()
            if self.sampling.filters:
                self.lanes.keep_mass()
        free = [i for i in range(self.geometry.lanes) if i >= len(self.seats) or not self.seats[i]]
        wanted = sum(len(request.limits) for request in self.waiting)
        if any(self.seats) and len(free) < min(ADMIT_FROM * self.geometry.lanes, wanted):
            return
        taken = {seat.group.slot for seat in self.seats if seat}
        slots = [i for i in range(self.geometry.prompts) if i not in taken]
        groups, tokens = [], 0
        while self.waiting and slots and len(free) >= len(self.waiting[0].limits):
            request = self.waiting[0]
            if not self.geometry.holds(len(request.prompt_ids), request.limits):
                break  # it waits until the lanes are empty and can be made anew
            if groups and tokens + len(request.prompt_ids) > PREFILL_TOKENS:
                self._seat(groups)
                groups, tokens = [], 0
            count = len(request.limits)
            groups.append(Group(self.waiting.popleft(), slots.pop(0), free[:count]))
            free, tokens = free[count:], tokens + len(request.prompt_ids)
        if groups:
            self._seat(groups)

    def _make_room(self):
        """Lanes, slots and provider for what waits; those that are there stay where they are large enough."""
        model, sampling = self.model, self.waiting[0].sampling
        shape = model.config.get_text_config()
        self.sampling = sampling
        self.stop_ids = self.stops.setdefault(
            sampling.stop_token_ids, torch.tensor(sampling.stop_token_ids, dtype=torch.int64, device=model.device)
        )
        requests = [(len(request.prompt_ids), request.limits) for request in self.waiting]
        provider = make_provider(
            self.attention, model.device, model.dtype, head_dim(shape), max(length for length, _ in requests)
        )
        if self.budget is None:
            reserved = self.reserved() if self.reserved else 0
            self.budget = kv_budget(model.device, self.memory_utilization, reserved)
        limits = self.max_num_seqs, kv_token_bytes(shape, model.dtype), self.budget, provider.flat
        try:
            new = fit(requests, *limits)
        except ValueError:  # the longest prompt and the largest group need not be one request's: begin with the first
            new, requests = fit(requests[:1], *limits), requests[:1]
        if self.geometry is not None:
            new = settled(self.geometry, new, requests, *limits[1:3])
            if new == self.geometry:
                return
        self.graphs.clear()
        self.slots = self.lanes = None  # free them before the new ones are made
        self.geometry, self.provider = new, provider
        self.slots = Slots(new, model.device, provider.memory_order)
        self.lanes = Lanes(new.lanes, new.capacity, model.device)

    def _seat(self, groups):
        """Prefill; where that fails, the groups wait again."""
        try:
            self._prefill(groups)
        except BaseException:
            self.waiting.extendleft(group.request for group in reversed(groups))
            raise
        self.seats += [None] * (1 + max(lane for group in groups for lane in group.lanes) - len(self.seats))
        for group in groups:
            for number, lane in enumerate(group.lanes):
                self.seats[lane] = Seat(group, number, self.steps + group.request.limits[number] - 1)
        self._arrange()

    @torch.inference_mode()
    def _prefill(self, groups):
        """The prompts once each, and the first draw of each of their completions."""
        device, requests, lanes = self.model.device, [g.request for g in groups], [g.lanes for g in groups]
        slots, lengths = [g.slot for g in groups], [len(r.prompt_ids) for r in requests]
        ids = torch.tensor([token for r in requests for token in r.prompt_ids], device=device)
        positions = torch.cat([torch.arange(length) for length in lengths]).to(device)
        longest = max(len(r.prompt_ids) + max(r.limits) for r in requests)
        context = PrefillAttention(lengths, device, self.slots, slots, lanes, longest)
        states = hidden_states(self.model, ids, positions, context)

        lengths, counts = torch.tensor(lengths), torch.tensor([len(r.limits) for r in requests])
        self.slots.prompt_lengths[torch.tensor(slots, device=device)] = lengths.to(device, torch.int32)
        limits = torch.tensor([limit for r in requests for limit in r.limits])
        numbers = [uniforms(r.sampling.seed, r.request_id, len(r.limits), self.geometry.capacity) for r in requests]
        rows = torch.tensor([lane for group in lanes for lane in group], device=device)
        seats = lengths.repeat_interleave(counts), limits, torch.cat(numbers)
        self.lanes.start(rows, *(tensor.to(device) for tensor in seats))
        logits = fp32_logits(self.model, states[(lengths.cumsum(0) - 1).to(device)])
        self._draw(rows, logits.repeat_interleave(counts.to(device), 0, output_size=len(rows)))

    def _arrange(self):
        self.slots.arrange([seat.group.slot if seat else -1 for seat in self.seats])

    def _decode(self):
        """One token more on every lane."""
        n = len(self.seats)
        if self.on_gpu:  # of few sizes: each is a graph, and compiles what depends on it
            n = bucket(n, self.geometry)
        self.graphs.run((n, self.sampling.stop_token_ids, *self.sampling.distribution.values()), lambda: self._step(n))
        self.steps += 1

    @torch.inference_mode()
    def _step(self, n):
        """What a graph records: it reads and writes the lanes and slots alone."""
        lanes = self.lanes
        token_index = lanes.position[:n] if self.geometry.flat else lanes.length[:n] - 1
        context = DecodeAttention(self.slots, self.provider, token_index)
        states = hidden_states(self.model, lanes.token[:n], lanes.position[:n], context)
        self._draw(slice(n), fp32_logits(self.model, states))

    def _draw(self, rows, logits):
        """logits [S, V] of these lanes, a slice or [S] -> a token each."""
        drawn, logps, kept = sample(logits, self.lanes.draws(rows), **self.sampling.distribution)
        self.lanes.record(rows, drawn, logps, kept, self.stop_ids)

    def _collect(self):
        """Look at the finished flags; take what finished off its lanes."""
        self.live_lanes.append(self._live())
        finished = self.lanes.finished[: len(self.seats)].tolist()
        rows = [i for i, seat in enumerate(self.seats) if seat and finished[i]]
        if not rows:
            return []
        outputs = []
        taken = self.lanes.take(torch.tensor(rows, device=self.model.device))
        for row, (ids, logps, kept) in zip(rows, taken, strict=True):
            group, number = self.seats[row].group, self.seats[row].number
            sampling = group.request.sampling
            reason = "stop" if ids[-1] in sampling.stop_token_ids else "length"
            group.done[number] = Rollout(ids, logps, reason, kept if sampling.filters else None)
            if len(group.done) == len(group.lanes):
                request_id = group.request.request_id
                del self.unfinished[request_id]
                outputs.append(RequestOutput(request_id, [group.done[i] for i in range(len(group.lanes))]))
        self._leave(rows)
        return outputs

    def _leave(self, rows):
        """Free these lanes. Where none waits for them, the last lanes move into the gaps once there are many."""
        for row in rows:
            self.seats[row] = None
        live, before = self._live(), len(self.seats)
        while self.seats and not self.seats[-1]:
            self.seats.pop()
        if not self.waiting and live < COMPACT_BELOW * len(self.seats):
            sources = [i for i, seat in enumerate(self.seats) if seat and i >= live]
            targets = [i for i, seat in enumerate(self.seats[:live]) if not seat]
            moved, flat = [self.seats[i] for i in sources], self.geometry.flat
            tokens = max(seat.drawn(self.steps) + flat * len(seat.group.request.prompt_ids) for seat in moved)
            index = torch.tensor([sources, targets], device=self.model.device)
            self.slots.move(*index, tokens)
            self.lanes.move(*index)
            for source, target in zip(sources, targets, strict=True):
                self.seats[target] = self.seats[source]
            del self.seats[live:]
        if len(self.seats) < before:
            self._arrange()

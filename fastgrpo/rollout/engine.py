"""The generation loop: takes prompts, and returns completions with the log-probs of their tokens.

It runs the policy's own module through the registered attention, so no copy of the weights must be synced after an
update. No request may be in flight during an optimizer step, so keys and values of old weights are never read. A prompt
is computed once for its group. When a completion finishes, a waiting group takes over its lane. If no group waits, the
last lanes move into the gaps.

Where memory for the maximum length of all lanes is scarce, lanes grow (slots.py). If no page is left, the group that
arrived last is preempted: it starts again later, and draws the same tokens (recomputation, as in vLLM). So the group
that arrived first always finishes.

On a GPU a decode step is one CUDA graph, and the host polls for finished lanes every POLL_STEPS steps. It queues the
next steps before it reads the flags of the last ones, so the GPU decodes while the host copies completions and turns
them into text.

A completion with tools is in one of three states: its lane is decoded; its lane waits for a tool result, while other
lanes are decoded; or it has ended. Decoded lanes come first, so a decode step skips waiting lanes. When a result has
arrived, its tokens are appended to the keys and values of the lane in one pass. Completions do not wait for each other.

Shapes: B prompts, G completions each, R lanes of which n are in use, S lanes of a call, C maximum tokens of a
completion, V vocabulary.
"""

import logging
import math
from collections import defaultdict
from collections.abc import Callable, Mapping
from concurrent.futures import FIRST_COMPLETED, wait
from itertools import accumulate

import numpy as np
import torch
from transformers import PreTrainedModel

from fastgrpo.data.records import Sample, StopReason
from fastgrpo.loss.inputs import to_device
from fastgrpo.loss.objective import Interval
from fastgrpo.policy.model import Policy, head_dim
from fastgrpo.rollout.attention import (
    AppendAttention,
    DecodeAttention,
    PrefillAttention,
    choose_provider,
    make_provider,
)
from fastgrpo.rollout.backend import RolloutBackend
from fastgrpo.rollout.graph import MAX_GRAPHS, Graphs, recordable
from fastgrpo.rollout.lanes import Group, Lanes, Running
from fastgrpo.rollout.mapped import Mapped, works
from fastgrpo.rollout.sampling import sample, sample_penalized, uniforms
from fastgrpo.rollout.slots import Slots, copied_tokens, fit, growing, kv_token_bytes, memory_left, settled
from fastgrpo.rollout.weights import HeldWeights

logger = logging.getLogger(__name__)
COMPACT_BELOW = 0.9  # gaps are closed if a smaller share of the lanes is in use: a copy costs less than idle lanes
ADMIT_FROM = 0.25  # waiting groups start when this share of the lanes is free: a prefill costs several decode steps
PREFILL_TOKENS = 16384  # tokens of prompts or answers in one forward pass
POLL_STEPS = 8  # decode steps between two reads of the GPU's finished flags; on a CPU they are read every step
# Seconds that a step waits for the answers of quick tools. Answers that arrive in time are always appended in the step
# after their call, so runs with quick deterministic tools are equal bit for bit.
PATIENCE = 0.2


class RolloutEngine(RolloutBackend):
    """Generates with the policy's own weights: any causal LM that uses transformers' attention interface.

    Args:
        model: The policy: a `Policy`, or a transformers causal LM.
        max_num_seqs: Maximum number of completions generated at the same time; others wait. None means 1,024.
        attention: Name of a provider of decode attention, see attention.py.
        memory_utilization: Maximum share of the device's free memory for keys and values, measured at the first
            request.
        enforce_eager: Whether to decode without CUDA graphs. Models that cannot be captured never use them.
        reserved: Returns the bytes of free memory that will be allocated later, such as the optimizer's states before
            its first step. None means 0.
        continuous: Whether requests arrive one by one, as in a server. The engine then has lanes for later requests,
            and keeps gathered and packed weights until they change.
        enable_sleep_mode: Whether `sleep` keeps CUDA graphs: the memory of keys and values, and of copies of weights,
            is then mapped again at the same addresses. Otherwise, the next rollout captures the graphs again.

    Raises:
        ValueError: An argument is out of range, or the provider does not support the model or device.
    """

    def __init__(
        self,
        model: Policy | PreTrainedModel,
        *,
        max_num_seqs: int | None = None,
        attention: str = "auto",
        memory_utilization: float = 0.7,
        enforce_eager: bool = False,
        reserved: Callable[[], int] | None = None,
        continuous: bool = False,
        enable_sleep_mode: bool = False,
    ):
        super().__init__(model, max_num_seqs)
        Interval(above=0, at_most=1).check("memory_utilization", memory_utilization)
        self.attention, self.memory_utilization, self.reserved = attention, memory_utilization, reserved
        self.continuous = continuous
        self.on_gpu = self.policy.device.type == "cuda"
        if attention != "auto":  # raise early if the provider does not support the model
            choose_provider(attention, self.policy.device, self.policy.dtype, head_dim(self.policy.shape), 0)
        self.graphs = Graphs(self.policy.device, recordable(self.policy, enforce_eager))
        self.budget, self.left = None, math.inf  # bytes for keys and values; free bytes, of which they are a share
        self.phases = {}  # the geometry of each phase, see `settled`
        self.arranged = 0  # number of lanes in the slots' `members`
        self.running = []  # the Running of each lane up to the last one in use; None for a free lane
        self.geometry = self.slots = self.lanes = self.provider = None
        self.stops = {}  # stop ids on the device; graphs read them
        self.mapped = Mapped(self.policy.device) if enable_sleep_mode and self.graphs.enabled else None
        # Whether lanes may grow, and what allocates them. A server streams completions, which cannot start again.
        self.grows, self.growth = self.graphs.enabled and not continuous, self.mapped
        self.drawn = defaultdict(lambda: np.zeros(3))  # by group size: sum of the completions' length^0, ^1 and ^2
        # Without a reference to the engine: a cycle would keep its keys and values until the garbage collector runs.
        self.memory_left = lambda device=self.policy.device: memory_left(device, reserved() if reserved else 0)
        self.weights = HeldWeights(self.policy, self.graphs, self.memory_left, self.mapped)
        self.steps = 0  # decode steps so far

    def _stop(self, request):
        lanes = [lane for lane, running in enumerate(self.running) if running and running.group.request is request]
        if not lanes:  # its prefill failed
            return 0
        stopped = [self.running[lane] for lane in lanes]
        done = stopped[0].group.done
        self.lanes.snapshot()
        taken = self.lanes.take(lanes)  # counts the tokens, and checks that their log-probs are finite
        self._count([*(ids for ids, *_ in taken), *(sample.ids for sample in done.values())])
        for running in stopped:
            if running.dialogue:
                running.dialogue.close(StopReason.ABORTED)
        self._leave(lanes)
        self._compact()
        answers = sum(span.stop - span.start for running in stopped for span in running.given)
        return sum(len(sample.drawn) for sample in done.values()) + sum(len(ids) for ids, *_ in taken) - answers

    def abort_request(self, request_id: int) -> int:
        """Drop a waiting or running request, and return the number of its drawn tokens."""
        drawn = super().abort_request(request_id)
        self._release()
        return drawn

    def work_left(self) -> int:
        """Return the maximum number of tokens left: prompts of waiting requests, and further tokens of completions."""
        waiting = sum(len(request.prompt_ids) + sum(request.limits) for request in self.waiting)
        return waiting + sum(running.limit - running.length(self.steps) for running in self.running if running)

    def progress(self, seen: Mapping[int, int]) -> dict[int, list[tuple[list[int], torch.Tensor, str | None]]]:
        """Read the completions of running requests without tools.

        Args:
            seen: How many tokens of each completion to skip, by request_id.

        Returns:
            For each completion of these requests, its further token ids, their log-probs under the sampling
            distribution, and why it ended, or None. Requests that are not running are left out.
        """
        lanes = [lane for lane, each in enumerate(self.running) if each and each.group.request.request_id in seen]
        if not lanes:
            return {}
        running = [self.running[lane] for lane in lanes]
        self.lanes.snapshot()
        taken = self.lanes.take(lanes, [seen[each.group.request.request_id] for each in running])
        parts = {}
        for each, (ids, logps, kept) in zip(running, taken, strict=True):
            request, done = each.group.request, each.group.done
            start = seen[request.request_id]
            ended = {i: (x.ids[start:], x.sampler_logps[start:], x.finish_reason) for i, x in done.items()}
            drawn_from = logps - kept.log() if request.sampling.differs else logps
            parts.setdefault(request.request_id, ended)[each.number] = ids, drawn_from, None
        return {i: [of_group[number] for number in sorted(of_group)] for i, of_group in parts.items()}

    def _release(self):
        """Release the gathered weights once nothing is in flight."""
        if not self.unfinished and not self.continuous:
            self.weights.release()

    def free(self) -> None:
        """Free keys and values, CUDA graphs and copies of weights until the next request. Nothing may be in flight."""
        self.weights.release()
        self.weights.drop_copies()
        self._free_slots()
        self.budget = None
        self.phases.clear()

    def _free_slots(self):
        self.graphs.clear()
        self.geometry = self.slots = self.lanes = self.provider = None  # the provider refers to the slots

    def metrics(self) -> dict[str, float]:
        """Return the metrics since the engine was last idle, with `rollout/preemptions` if lanes grow."""
        measured = super().metrics()
        grows = measured and self.geometry and self.geometry.pages
        return measured | ({"rollout/preemptions": self.preemptions} if grows else {})

    @property
    def beside(self) -> int:
        """GPU memory that is in use and torch does not count, in bytes."""
        return self.growth.bytes if self.growth else 0

    def sleep(self) -> None:
        """Release the memory of keys and values, and of copies of weights, until the next request.

        Raises:
            ValueError: A request is in flight.
        """
        if self.has_unfinished_requests():
            raise ValueError("sleep needs an idle engine; finish or abort the requests in flight first")
        self.weights.release()
        if self.mapped is None:
            self.weights.drop_copies()
            self._free_slots()
        else:
            self.peak = torch.cuda.max_memory_allocated(self.policy.device) + self.mapped.bytes
            self.mapped.release()

    @torch.no_grad()
    def step(self) -> dict[int, list[Sample]]:
        """Append the answers of tools, admit waiting groups, decode until the next poll, and collect finished groups.

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
        outputs = self._resume()
        self._admit()
        if self.running and not self._live() and not outputs:  # every completion waits for a tool
            wait(self._awaited().values(), return_when=FIRST_COMPLETED)
            outputs |= self._resume()
        live = self._live()
        if live:
            if self.geometry.pages:
                live = self._hold(live)
            if live[-1] + 1 != self.arranged:
                self._arrange()
            if self.on_gpu:  # before the next steps, which the GPU computes while the host handles the last ones
                self.lanes.snapshot()
            remaining = max(self.running[lane].end for lane in live) - self.steps
            for _ in range(min(remaining, POLL_STEPS if self.on_gpu else 1)):
                self._decode(live[-1] + 1)
            if not self.on_gpu:
                self.lanes.snapshot()
            outputs |= self._finish(self._poll(live))
            self._compact()
        self._release()
        return outputs

    def _live(self):
        """Return the lanes that a decode step computes."""
        return [lane for lane, running in enumerate(self.running) if running and running.answer is None]

    def _awaited(self):
        """Return the answers for which lanes wait, by lane."""
        return {lane: running.answer for lane, running in enumerate(self.running) if running and running.answer}

    def _resume(self):
        """Append the answers that have arrived, and finish completions that end without one. Return finished groups."""
        awaited = self._awaited()
        if not awaited:
            return {}
        quick = [lane for lane in awaited if self.running[lane].patient and self.running[lane].dialogue.quick]
        pending = {awaited[lane] for lane in quick}
        while pending:
            arrived, pending = wait(pending, PATIENCE)
            if not arrived:
                break
        for lane in quick:
            self.running[lane].patient = False
        ended, given, tokens, room = {}, [], math.inf, self.max_num_seqs - len(self._live())
        for lane, answer in awaited.items():
            if not answer.done():
                continue
            turn = answer.result()
            if turn.reason is not None:
                ended[lane] = turn.reason
            elif room > 0:
                tokens += len(turn.ids)
                if tokens > PREFILL_TOKENS:
                    given.append({})
                    tokens = len(turn.ids)
                given[-1][lane] = turn.ids
                room -= 1
        outputs = self._finish(ended)
        for part in given:
            self._append(part)
        if given:
            self._compact()
            self._arrange()
        return outputs

    def _begin(self):
        """Prepare for the waiting requests. No request is in flight."""
        if self.mapped is not None and self.mapped.restore() and self.slots is not None:
            self.slots.zero()
            if self.geometry.pages:  # lanes that grow have lost all pages but the first
                self.lanes.stop(self.lanes.index)
        self.weights.hold(math.inf if self.continuous else max(max(request.limits) for request in self.waiting))
        if self.lanes and self.lanes.spoilt:
            self.slots.zero()
            self.lanes.forgive()

    def _admit(self):
        """Start waiting groups if enough lanes are free."""
        if not self.waiting:
            return
        if not any(self.running):
            self._make_room()
            if self.sampling.differs:
                self.lanes.keep_mass()
            if self.sampling.penalizes:
                self.lanes.keep_seen(len(self.policy.head.weight))
        elif self.continuous and self.geometry.lanes < min(len(self.running) + len(self.waiting), self.max_num_seqs):
            return  # a long request left memory for few lanes: allocate others when no lane is in use
        free = [i for i in range(self.geometry.lanes) if i >= len(self.running) or not self.running[i]]
        wanted = sum(len(request.limits) for request in self.waiting)
        if any(self.running) and len(free) < min(ADMIT_FROM * self.geometry.lanes, wanted):
            return
        taken = {running.group.slot for running in self.running if running}
        slots = [i for i in range(self.geometry.prompts) if i not in taken]
        groups, tokens, room = [], 0, self.max_num_seqs - len(self._live())
        if self.geometry.pages:
            room = min(room, self._room())
        while self.waiting and slots and min(len(free), room) >= len(self.waiting[0].limits):
            request = self.waiting[0]
            tools = self.geometry.pages and request.dialogues
            if tools or not self.geometry.holds(len(request.prompt_ids), request.limits):
                break  # it waits until no lane is in use and the slots can be reallocated
            if groups and tokens + len(request.prompt_ids) > PREFILL_TOKENS:
                self._start(groups)
                groups, tokens = [], 0
            count = len(request.limits)
            groups.append(Group(self.waiting.popleft(), slots.pop(0), free[:count]))
            free, tokens, room = free[count:], tokens + len(request.prompt_ids), room - count
        if groups:
            self._start(groups)

    def _make_room(self):
        """Allocate lanes and slots for the waiting requests, unless `settled` keeps the current geometry."""
        policy, sampling = self.policy, self.waiting[0].sampling
        shape = policy.shape
        self.sampling = sampling
        if len(self.stops) == MAX_GRAPHS:  # graphs read these tensors
            self.graphs.clear()
            self.stops.clear()
        self.stop_ids = self.stops.setdefault(sampling.stop_token_ids, self._tensor(sampling.stop_token_ids))
        requests = [(len(request.prompt_ids), request.limits) for request in self.waiting]
        copied = copied_tokens(requests, self.max_num_seqs)
        if self.continuous:
            requests += self._later(requests)
        provider = make_provider(self.attention, policy.device, policy.dtype, head_dim(shape), copied)
        if self.budget is None:
            self.left = self.memory_left()
            self.budget = int(self.memory_utilization * self.left)
        # Completions that wait for tools keep their slots, so there may be more slots than decoded lanes.
        waits = any(request.dialogues for request in self.waiting)
        wanted = sum(len(limits) for _, limits in requests)
        most = wanted if waits else min(wanted, self.max_num_seqs)
        # A penalty needs one byte per lane and token of the vocabulary.
        budget = self.budget - (most * len(policy.head.weight) if sampling.penalizes else 0)
        limits = most, kv_token_bytes(shape, policy.dtype), budget, provider.flat, self.left
        try:
            new = fit(requests, *limits)
        except ValueError:  # longest prompt and largest group may belong to different requests: fit the first only
            new, requests = fit(requests[:1], *limits), requests[:1]
        fits, new = new.lanes, settled(self.phases, new, requests, *limits[1:3])
        if not waits:
            new = self._more_lanes(new, max(fits, new.lanes), requests, *limits[:3])
        if new == self.geometry:
            if self.slots.pages:
                self.slots.pages.most = new.pages
            return
        self._free_slots()  # before the new ones are made
        slots = Slots(new, policy.device, provider.memory_order, self.mapped, self.growth, limits[1])
        lanes = Lanes(new.lanes, new.capacity, policy.device)
        self.geometry, self.provider, self.slots, self.lanes = new, provider, slots, lanes  # if memory sufficed

    def _more_lanes(self, new, fits, requests, most, token_bytes, budget):
        """Return a geometry with more than `fits` lanes, which grow, if the lengths drawn so far allow it, or `new`."""
        count, total, squares = self.drawn[new.group]
        self.drawn[new.group] /= 2  # forgets old rollouts
        most = min(most, sum(len(limits) for _, limits in requests))
        scarce = fits < most or (self.geometry and self.geometry.pages)
        small = new.capacity * token_bytes < 2**31 * self.policy.dtype.itemsize  # see `group_decode`
        if not (self.grows and scarce and count and small and self.provider and self.provider.exact):
            return new
        sizes = {tensor[0, :, 0].nbytes for cache in self.slots.caches.values() for tensor in cache[:2]}
        if sizes != {token_bytes / (2 * len(self.slots.caches))} or not works(self.policy.device):
            return new  # layers differ, or the driver cannot map memory
        if self.growth is None:
            self.growth = Mapped(self.policy.device)
        # Completions that started together t steps ago hold t P(L > t) <= E[L] tokens on average (Markov). In lanes
        # that are reused continuously, completions hold E[L^2] / (2 E[L]) on average.
        held = max(total / count, squares / (2 * total))
        grown = growing(new, fits, self.geometry, requests, most, token_bytes, budget, held, self.growth.page)
        if grown.pages and grown != self.geometry:
            logger.info("%d lanes grow in %d pages; %d would fit at full length", grown.lanes, grown.pages, new.lanes)
        return grown

    def _count(self, completions):
        """Note the lengths of completions, given as token ids."""
        self.drawn[self.geometry.group] += sum(np.array([1, len(ids), len(ids) ** 2]) for ids in completions)

    def _room(self):
        """Return how many completions may start in lanes that grow, if each has at least its share of the pages."""
        geometry, pages, share = self.geometry, self.slots.pages, self.geometry.pages // self.geometry.lanes
        taken = [max(share, len(pages.held[lane])) for lane, each in enumerate(self.running) if each]
        most = pages.most if pages else geometry.pages
        return (most - sum(taken) - (geometry.lanes - len(taken))) // (share - 1)

    def _hold(self, live):
        """Map memory for the next steps of live lanes. Preempt groups if it does not suffice. Return live lanes."""
        steps = POLL_STEPS if self.on_gpu else 1
        while not self._grow({lane: self._tokens(self.running[lane], steps) for lane in live}):
            self._preempt()
            live = self._live()
        return live

    def _tokens(self, running, steps=0):
        """Return the maximum number of tokens of a completion after further steps."""
        return min(running.limit, running.length(self.steps) + steps)

    def _grow(self, tokens):
        """Map memory for `tokens` of each lane, if needed from free lanes. Return whether there was enough."""
        pages, idle = self.slots.pages, []
        counts = {lane: -(-count * self.slots.token_bytes // pages.page) for lane, count in tokens.items()}
        missing = sum(max(0, count - len(pages.held[lane])) for lane, count in counts.items())
        if missing > pages.free:
            used = {lane for lane, running in enumerate(self.running) if running} | counts.keys()
            idle = [lane for lane, held in enumerate(pages.held) if len(held) > 1 and lane not in used]
            if missing > pages.free + sum(len(pages.held[lane]) - 1 for lane in idle):
                return False
            self.lanes.stop(self._tensor(idle))
            torch.cuda.synchronize(self.policy.device)
        with torch.cuda.device(self.policy.device):
            for lane in idle:
                pages.resize(lane, 1)
            try:
                for lane, count in counts.items():
                    pages.resize(lane, max(count, len(pages.held[lane])))
            except torch.OutOfMemoryError:  # something else took memory: use what is mapped until all lanes are free
                pages.most -= pages.free
                return self._grow(tokens)
        return True

    def _preempt(self):
        """Stop the group that arrived last, and put it first in the queue."""
        groups = {running.group.request.request_id: running.group for running in self.running if running}
        if len(groups) == 1:  # one group fits, unless other memory has grown
            raise torch.OutOfMemoryError("the KV cache of one group does not fit; lower --rollout_memory_utilization")
        group = groups[next(number for number in reversed(self.unfinished) if number in groups)]
        lanes = [lane for lane, running in enumerate(self.running) if running and running.group is group]
        self._leave(lanes)
        self.waiting.appendleft(group.request)
        self.preemptions += 1

    def _later(self, requests):
        """Return requests to reserve lanes for, with lengths rounded up to powers of 2, so that slots grow rarely."""
        context = self.policy.context or math.inf
        longest, limit = max(length for length, _ in requests), max(max(limits) for _, limits in requests)
        longest, limit = (int(min(2 ** math.ceil(math.log2(tokens)), context)) for tokens in (longest, limit))
        return [(longest, [limit])] * self.max_num_seqs

    def _start(self, groups):
        """Prefill groups and assign their completions to lanes. If the prefill fails, requeue the groups."""
        try:
            self._prefill(groups)
        except BaseException:
            self.waiting.extendleft(group.request for group in reversed(groups))
            self.lanes.stop(self._tensor([lane for group in groups for lane in group.lanes]))
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
        numbers = [uniforms(r.sampling.seed, r.draw_key, len(r.limits), self.geometry.capacity) for r in requests]
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
        """Tell the slots which decoded lanes each prompt has."""
        live = self._live()
        self.arranged = live[-1] + 1
        groups = [None] * self.arranged
        for lane in live:
            groups[lane] = self.running[lane].group
        largest = max((len(group.lanes) for group in groups if group), default=0)
        self.slots.arrange([group.slot if group else -1 for group in groups], largest)

    def _decode(self, n):
        """Draw one more token on the first n lanes."""
        n = self.geometry.decoded(n, self.on_gpu)
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
    def _append(self, given):
        """Append the tokens of answers, by lane, to waiting lanes in one forward pass, so that they can be decoded.

        The inputs are the newest token of each lane and all given ones except the last, which is the next input.
        """
        lanes, counts, running = list(given), list(map(len, given.values())), [self.running[lane] for lane in given]
        past = [(len(each.group.request.prompt_ids), each.turn - 1) for each in running]
        context = AppendAttention(self.slots, lanes, [each.group.slot for each in running], past, counts)
        index, ids = self._tensor(lanes), self._tensor([token for tokens in given.values() for token in tokens])
        inputs = ids.roll(1)
        inputs[self._tensor([0, *accumulate(counts[:-1])])] = self.lanes.token[index]
        positions = self._tensor([p + own + i for (p, own), n in zip(past, counts, strict=True) for i in range(n)])
        self.weights.states(inputs, positions, context)
        self.lanes.append(index, self._tensor(counts), ids)
        for each, count in zip(running, counts, strict=True):
            each.given.append(slice(each.turn, each.turn + count))
            each.turn, each.answer, each.taken, each.patient = each.turn + count, None, None, True
            each.end = self.steps + each.limit - each.turn

    def _draw(self, lanes, logits):
        """Draw a token for each of these lanes, a slice or [S], from logits [S, V]."""
        numbers, how = self.lanes.draws(lanes), self.sampling.distribution
        if self.sampling.penalizes:
            drawn = sample_penalized(logits, self.lanes.seen[lanes], numbers, **how)
        else:
            drawn = sample(logits, numbers, **how)
        self.lanes.record(lanes, *drawn, self.stop_ids)

    def _poll(self, live):
        """Read the finished flags, pass turns to their dialogues, and return {lane: None} for the lanes that ended."""
        self.live_lanes.append(len(live))
        finished = self.lanes.read()
        ended = {lane: None for lane in live if finished[lane]}
        turns = [lane for lane in ended if self.running[lane].dialogue]
        if not turns:
            return ended
        for lane, taken in zip(turns, self.lanes.take(turns), strict=True):
            running, ids = self.running[lane], taken[0]
            if ids[-1] in running.group.request.sampling.stop_token_ids:
                running.answer = running.dialogue.answer(ids[running.turn :], running.limit - len(ids) - 1)
                running.turn, running.taken = len(ids), taken
                del ended[lane]
        return ended

    def _finish(self, ended):
        """Copy finished completions to the host, and free their lanes. Return the groups that finished."""
        outputs, taken = {}, {lane: self.running[lane].taken for lane in ended}
        if drawing := [lane for lane in ended if taken[lane] is None]:
            taken |= zip(drawing, self.lanes.take(drawing), strict=True)
        for lane, (ids, logps, kept) in taken.items():
            running = self.running[lane]
            group, request, mask = running.group, running.group.request, None
            reason = ended[lane] or (
                StopReason.STOP if ids[-1] in request.sampling.stop_token_ids else StopReason.LENGTH
            )
            if running.dialogue:
                running.dialogue.close(reason)
            drawn_from = logps - kept.log() if request.sampling.differs else logps  # log q = log p - log kept
            if running.given:
                mask = torch.ones(len(ids), dtype=torch.bool)
                for span in running.given:
                    mask[span] = False
                logps, drawn_from, mask = logps[mask], drawn_from[mask], mask.int().tolist()
            group.done[running.number] = Sample(
                request.prompt_ids, ids, logps=logps, sampler_logps=drawn_from, finish_reason=reason, tool_mask=mask,
                dialogue=running.dialogue,
            )  # fmt: skip
            if len(group.done) == len(group.lanes):
                del self.unfinished[request.request_id]
                self._count(sample.ids for sample in group.done.values())
                outputs[request.request_id] = [group.done[i] for i in range(len(group.lanes))]
        self._leave(ended)
        return outputs

    def _leave(self, lanes):
        """Free these lanes."""
        if lanes:
            self.lanes.stop(self._tensor([*lanes]))  # a decode step then reads only their first token
        for lane in lanes:
            self.running[lane] = None
        while self.running and not self.running[-1]:
            self.running.pop()

    def _compact(self):
        """Move live lanes to the front, if a decode step computes many others.

        Free lanes are left to waiting groups, unless these groups lack pages or a lane waits for a tool.
        """
        live = self._live()
        if not live or len(live) >= COMPACT_BELOW * (live[-1] + 1):
            return
        awaited = self._awaited()
        pages = self.waiting and self.geometry.pages and self._room() < len(self.waiting[0].limits)
        if self.waiting and not awaited and not pages:
            return
        count, drawing = len(live), {*live}
        sources = [lane for lane in live if lane >= count]
        targets = [lane for lane in range(count) if lane not in drawing]
        # Lanes that wait in the first places move to the places that become free.
        behind = [(target, source) for source, target in zip(sources, targets, strict=True) if target in awaited]
        moves = [*zip(sources, targets, strict=True), *behind]
        moved, flat = [self.running[source] for source, _ in moves], self.geometry.flat
        tokens = max(each.length(self.steps) + flat * len(each.group.request.prompt_ids) for each in moved)
        index = self._tensor(moves).T
        if self.geometry.pages:
            counts = [self._tokens(each) for each in moved]
            if not self._grow(dict(zip(targets, counts, strict=True))):
                return
            self.slots.copy(moves, counts)
        else:
            self.slots.move(*index, tokens)
        self.lanes.move(*index)
        filled = {target for _, target in moves}
        self.lanes.stop(self._tensor([source for source, _ in moves if source not in filled]))
        for source, _ in moves:
            self.running[source] = None
        for (_, target), running in zip(moves, moved, strict=True):
            self.running[target] = running
        while not self.running[-1]:
            self.running.pop()
        self._arrange()

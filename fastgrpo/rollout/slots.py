"""Slots: memory for the keys and values of prompts and lanes, and how many of them fit.

A change of geometry frees the slots and discards the CUDA graphs. Training and evaluation alternate and need different
sizes: 256 prompts with one greedy completion each need 256 prompt slots, 8 prompts with 32 completions each need 8. So
each phase, identified by its group size, has a geometry that does not shrink during the phase. Between phases, it
depends on memory whether they share one geometry (`settled`). On a GPU all providers except `sdpa` store prompts apart
from lanes even at a group size of 1. A flat layout would save a launch there, but no memory, and the phases could not
share slots.

Where the wanted lanes do not fit, lanes can grow (`growing`): each one is a range of addresses for its maximum tokens,
in memory order [token, layer, keys or values, K, d], and gets a page of memory when its completion needs one.

Shapes: R lanes, C maximum tokens of a completion, P prompt slots, T maximum tokens of a prompt, G maximum lanes of one
prompt, n lanes in use, K key heads, d head width.
"""

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import psutil
import torch

from fastgrpo.loss.inputs import staged
from fastgrpo.policy.model import head_dim
from fastgrpo.rollout.mapped import Mapped

if TYPE_CHECKING:
    from transformers import PretrainedConfig

# Prompt slots per full group of lanes. One is too few: a group with one unfinished completion still needs its prompt.
PROMPTS_A_GROUP = 2
BUCKETS = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024)  # numbers of lanes of CUDA graphs
# Numbers of lanes of a decode step on a CPU: oneDNN compiles a kernel for each, and keeps up to 1,024 of them.
CPU_BUCKETS = (*range(1, 33), *range(40, BUCKETS[-1] + 1, 8))
# Numbers of prompts of CUDA graphs. They are far apart, because each one multiplies the number of graphs.
PROMPT_BUCKETS = (4, 16, 64, 256, 1024)
MOST_LANES = BUCKETS[-1]  # maximum lanes if max_num_seqs is None and no group is larger
AMPLE = 0.5  # all phases share one geometry if it takes at most this share of the memory budget
NEAR = 0.8  # the old geometry is kept if it has at least this share of the lanes and prompt slots that would fit
MARGIN = 1.25  # lanes that grow get this factor of the tokens that completions hold on average, and a page
ROUND = 16  # T is rounded up to a multiple of this, so that a slightly longer prompt needs no new slots


@dataclass(frozen=True)
class Geometry:
    """The numbers and sizes of the slots for keys and values."""

    lanes: int  # R, the maximum number of completions in flight
    capacity: int  # C, the maximum tokens of a completion
    prompts: int  # P, the number of prompt slots; with flat slots, the maximum number of groups in flight
    longest_prompt: int  # T, the maximum tokens of a prompt
    group: int  # G, the maximum lanes of one prompt
    # Whether the slot of each lane holds a copy of its prompt and then the completion, T + C tokens. If not, prompts
    # have their own slots, shared by their lanes, and the slot of a lane holds C tokens.
    flat: bool
    pages: int = 0  # maximum pages of all lanes, which then grow; 0 if each lane has memory for its C tokens

    @property
    def lane_tokens(self) -> int:
        """Tokens of the slot of a lane."""
        return self.capacity + self.longest_prompt * self.flat

    @property
    def tokens(self) -> int:
        """Tokens of all slots."""
        return self.lanes * self.lane_tokens + self.prompts * self.longest_prompt * (not self.flat)

    def decoded(self, count: int, on_gpu: bool) -> int:
        """Return how many lanes a decode step computes if the first `count` are in use.

        They are few numbers, because each needs its own compiled kernels, and on a GPU its own graph.
        """
        return bucket(count, self.lanes, BUCKETS if on_gpu else CPU_BUCKETS)

    def holds(self, prompt_length: int, limits: list[int]) -> bool:
        """Return whether a group fits if all lanes are free."""
        return (
            prompt_length <= self.longest_prompt
            and max(limits) <= self.capacity
            and len(limits) <= min(self.group, self.lanes)
        )


def copied_tokens(requests: list[tuple[int, list[int]]], max_num_seqs: int) -> int:
    """Return how many more prompt tokens flat slots store than shared ones, with all lanes in use."""
    completions = sum(len(limits) for _, limits in requests)
    copied = sum(length * (len(limits) - 1) for length, limits in requests)
    return copied * min(max_num_seqs, completions) // completions


def fit(
    requests: list[tuple[int, list[int]]],
    max_num_seqs: int,
    token_bytes: int,
    budget: float,
    flat: bool,
    left: float = math.inf,
) -> Geometry:
    """Choose the geometry with the most lanes that these requests can use within the limits."""
    group = max(len(limits) for _, limits in requests)
    capacity = max(max(limits) for _, limits in requests)
    longest = -max(length for length, _ in requests) // ROUND * -ROUND

    def geometry(lanes):
        # Each prompt in use has at least one lane, so there are never more prompts than lanes.
        prompts = min(len(requests), lanes, PROMPTS_A_GROUP * -(-lanes // group))
        return Geometry(lanes, capacity, prompts if lanes > group else 1, longest, group, flat)

    wanted = min(max_num_seqs, sum(len(limits) for _, limits in requests))
    for lanes in range(wanted, group - 1, -1):
        if geometry(lanes).tokens * token_bytes <= budget:
            return geometry(lanes)
    needed = geometry(group).tokens * token_bytes
    remedy = (
        "raise rollout_memory_utilization"
        if needed <= left
        else f"reduce the memory of the model and its training, which leave {left / 2**30:.2f} GiB (docs/memory.md)"
    )
    raise ValueError(
        f"one group of {group} completions of up to {capacity} tokens with its prompt of {longest} needs "
        f"{needed / 2**30:.2f} GiB for the KV cache, and {budget / 2**30:.2f} GiB are allowed; lower "
        f"num_generations or max_completion_length, or {remedy}"
    )


def settled(
    phases: dict[tuple[int, bool], Geometry],
    new: Geometry,
    requests: list[tuple[int, list[int]]],
    token_bytes: int,
    budget: int,
) -> Geometry:
    """Choose the next geometry, from those of all phases so far and the best one for the next requests.

    If one geometry for all phases takes at most the share AMPLE of the budget, it is used: training and evaluation then
    share slots and CUDA graphs. Otherwise each phase has its own geometry. The first rollout after an evaluation then
    shrinks the slots to the size for training, and the graphs are captured again.
    """
    phase = new.group, new.flat
    own = phases[phase] = _grown(phases.get(phase, new), new, requests, budget // token_bytes)
    shared = _merged(*(geometry for geometry in phases.values() if geometry.flat == new.flat))
    return shared if shared.tokens * token_bytes <= AMPLE * budget else own


def _grown(old, new, requests, most):
    """Choose the geometry of a phase so that it changes rarely; `most` is its maximum number of tokens.

    If the maximum of the two in every size fits, it is used. Otherwise the old one is kept if it fits the requests and
    is not much smaller than the new one.
    """
    both = _merged(old, new)
    if both.tokens <= most:
        return both
    near = old.lanes >= NEAR * new.lanes and old.prompts >= NEAR * new.prompts
    return old if near and all(old.holds(*request) for request in requests) else new


def growing(
    new: Geometry, fits: int, old: Geometry | None, requests: list[tuple[int, list[int]]], most: int, token_bytes: int,
    budget: int, held: float, page: int,
) -> Geometry:  # fmt: skip
    """Return a geometry with more than `fits` lanes and up to `most`, which grow, or `new`, whose lanes do not.

    `fits` is the number of lanes that fit at full length, and `held` the mean number of tokens that a lane in use
    holds. The first page of a lane holds its first token. One group always fits at its full length, beside the first
    page of every other lane. The geometry `old` is kept if it grows and has about the right number of lanes.
    """
    full = -(-new.capacity * token_bytes // page)
    if full == 1 or token_bytes > page:
        return new
    share = min(1 + math.ceil(MARGIN * held * token_bytes / page), full)

    def geometry(lanes):
        prompts = min(len(requests), lanes, PROMPTS_A_GROUP * -(-lanes // new.group))
        pages = (budget - prompts * new.longest_prompt * token_bytes) // page
        if pages < max(lanes * share, new.group * full + lanes - new.group):
            return None
        return replace(new, lanes=lanes, prompts=prompts, pages=min(pages, lanes * full))

    best = next(filter(None, map(geometry, range(most, fits, -1))), new)
    if old is None or not old.pages or old.group != new.group or not all(old.holds(*each) for each in requests):
        return best
    upper = best.lanes / NEAR if fits < most else math.inf  # a refill of a step needs few lanes
    near = NEAR * min(best.lanes, most) <= old.lanes <= upper
    return old if near and old.pages * page + old.prompts * old.longest_prompt * token_bytes <= budget else best


def _merged(*geometries):
    """Return the maximum of these geometries in every size. All have the same layout."""
    sizes = "lanes", "capacity", "prompts", "longest_prompt", "group"
    largest = (max(getattr(geometry, size) for geometry in geometries) for size in sizes)
    return Geometry(*largest, geometries[0].flat)


def kv_token_bytes(config: "PretrainedConfig", dtype: torch.dtype) -> int:
    """Return the bytes of one token's keys and values in all layers of a model."""
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    kinds = getattr(config, "layer_types", None) or ()  # hybrid models also have layers without keys and values
    without = "linear_attention", "mamba", "conv", "moe", "mlp"
    layers = sum(kind not in without for kind in kinds) or config.num_hidden_layers
    return 2 * layers * heads * head_dim(config) * dtype.itemsize


def memory_left(device: torch.device, reserved: int = 0) -> int:
    """Return the free bytes of the device, minus the reserved ones."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        # torch's cached but unused memory is free too.
        free += torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    else:
        free = psutil.virtual_memory().available
    return max(free - reserved, 0)


def bucket(count: int, most: int, sizes: tuple[int, ...] = BUCKETS) -> int:
    """Return the smallest bucket that is at least `count`, and at most `most`."""
    return min(next((size for size in sizes if size >= count), most), most)


class Cache(NamedTuple):
    """The slots of one layer: keys and values [R, K, C, d] of the lanes, and [P, K, T, d] of the prompts.

    With flat slots, the lanes have C + T tokens and there are no prompt slots.
    """

    keys: torch.Tensor
    values: torch.Tensor
    prompt_keys: torch.Tensor
    prompt_values: torch.Tensor


class Slots:
    """The slots of all layers, and the lanes of each prompt.

    With a flat geometry, the slot of a lane begins with a copy of its prompt, and there are no prompt slots. Tensors
    are views [slot, head, token, d], stored in `memory_order`. `mapped` allocates keys and values (None: torch). If
    lanes grow, `growth` allocates theirs, and one token has `token_bytes`.
    """

    def __init__(
        self,
        geometry: Geometry,
        device: torch.device,
        memory_order: tuple[int, int, int] = (0, 1, 2),
        mapped: Mapped | None = None,
        growth: Mapped | None = None,
        token_bytes: int = 0,
    ) -> None:
        self.geometry, self.memory_order, self.mapped = geometry, memory_order, mapped
        self.growth, self.token_bytes = growth, token_bytes
        self.pages = self.memory = None  # of lanes that grow
        self.caches, self.heads = {}, {}
        self.prompt_lengths = torch.zeros(geometry.prompts, dtype=torch.int32, device=device)
        self.places = torch.full((geometry.prompts * geometry.group,), -1, dtype=torch.int32, device=device)
        self.members = self.places.view(geometry.prompts, geometry.group)

    def cache(self, layer: int, key: torch.Tensor, value: torch.Tensor) -> Cache:
        """Return the slots of a layer. The first call allocates them for keys and values like these [K, N, d]."""
        if layer not in self.caches:
            g = self.geometry
            lanes, prompts = (g.lanes, g.lane_tokens), (0 if g.flat else g.prompts, g.longest_prompt)
            own = self._paged(layer, key) if g.pages else [self._zeros(*lanes, of) for of in (key, value)]
            self.caches[layer] = Cache(*own, *(self._zeros(*prompts, of) for of in (key, value)))
        return self.caches[layer]

    def _paged(self, layer, like):
        """Return keys and values of lanes that grow. Their contents are undefined: no key behind a length is read."""
        (heads, _, width), g = like.shape, self.geometry
        row = heads * width * like.dtype.itemsize
        layers = self.token_bytes // (2 * row)
        assert layer < layers and self.token_bytes == 2 * row * layers, "lanes grow only if all layers are alike"
        if self.pages is None:
            unit = math.lcm(self.growth.page, row)  # so that the memory of all lanes is whole rows, see `write`
            size = -(-g.capacity * self.token_bytes // unit) * unit
            self.pages, self.memory = self.growth.pages(size, g.lanes, g.pages)
        rows = self.memory.view(like.dtype).view(g.lanes, -1, heads, width)[:, : g.capacity * 2 * layers]
        return rows.unflatten(1, (g.capacity, layers, 2))[:, :, layer].permute(2, 0, 3, 1, 4).unbind()

    def _zeros(self, count, tokens, like):
        """Return zeros [count, K, tokens, d], because masked keys and values must not be NaN."""
        shape, order = (count, like.shape[0], tokens), self.memory_order
        shape = *(shape[dim] for dim in order), like.shape[2]
        zeros = like.new_zeros(shape) if self.mapped is None else self.mapped.empty(shape, like.dtype).zero_()
        return zeros.permute(*(order.index(dim) for dim in range(3)), 3)

    def write(self, held: torch.Tensor, slots: torch.Tensor, tokens: torch.Tensor, new: torch.Tensor) -> None:
        """Write the keys or values `new` [n, K, d] into `held`, one of a `Cache`, at `tokens` [n] of `slots` [n].

        The indexed dimensions come first in memory order. In another order, `index_put_` would copy all of `held` twice
        in torch's deterministic mode. For the same reason, lanes that grow are written as rows [K, d] of their memory.
        """
        order = held.permute(*self.memory_order, 3)
        if not order.is_contiguous():
            memory = self.memory.view(held.dtype).view(-1, *order.shape[2:])
            slot, token, first = (x // memory.stride(0) for x in (*order.stride()[:2], held.storage_offset()))
            memory[slots * slot + tokens * token + first] = new
            return
        index = {0: slots, 2: tokens}
        if self.memory_order[-1] != 1:  # the heads come before the tokens or the slots
            index = {0: slots[:, None], 1: self._heads(held), 2: tokens[:, None]}
        order[tuple(index[dim] for dim in self.memory_order if dim in index)] = new

    def _heads(self, held):
        """Return the head indices [K] int64."""
        count = held.shape[1]
        if count not in self.heads:
            self.heads[count] = torch.arange(count, device=held.device)
        return self.heads[count]

    def arrange(self, prompt_of: list[int], group: int) -> None:
        """Write the lanes of each prompt into `members` [prompts, lanes of each], padded with -1.

        It has a row for each prompt up to the last one in use, so that a decode step skips the others. A CUDA graph
        needs fixed shapes: on a GPU the number of rows is rounded up to a bucket, and there are `group` columns.
        """
        if self.geometry.flat:
            return
        prompt_of = np.asarray(prompt_of, dtype=np.int64)
        order = np.argsort(prompt_of, kind="stable")
        order = order[prompt_of[order] >= 0]
        owners = prompt_of[order]
        counts = np.bincount(owners)
        rank = np.arange(len(order)) - (counts.cumsum() - counts)[owners]
        if self.places.device.type == "cpu":
            shape = len(counts), int(counts.max(initial=0))
        else:
            shape = bucket(len(counts), self.geometry.prompts, PROMPT_BUCKETS), group
        members = np.full(shape, -1, dtype=np.int32)
        members[owners, rank] = order
        self.members = self.places[: members.size].view(shape)
        self.members.copy_(staged(torch.from_numpy(members), self.members.device), non_blocking=True)

    @torch.inference_mode()
    def zero(self) -> None:
        """Reset all keys and values, which may not be finite: a masked value times 0 must not be NaN."""
        for cache in self.caches.values():
            for tensor in cache[2:] if self.pages else cache:
                tensor.zero_()

    @torch.inference_mode()
    def move(self, sources: torch.Tensor, targets: torch.Tensor, tokens: int) -> None:
        """Copy the first tokens of some lanes to the slots of other lanes."""
        lanes = self.memory_order.index(0)
        for cache in self.caches.values():
            for tensor in (cache.keys, cache.values):
                held = tensor[:, :, :tokens].permute(*self.memory_order, 3)  # in memory order
                held.index_copy_(lanes, targets, held.index_select(lanes, sources))

    @torch.inference_mode()
    def copy(self, moves: list[tuple[int, int]], tokens: list[int]) -> None:
        """Copy the first tokens of some lanes that grow to other lanes, by pairs of source and target."""
        memory = self.memory.view(self.geometry.lanes, -1)
        for (source, target), count in zip(moves, tokens, strict=True):
            memory[target, : count * self.token_bytes] = memory[source, : count * self.token_bytes]

"""Slots: where the keys and values of prompts and lanes lie in memory, and how many of them fit.

A change of geometry frees the slots and costs the CUDA graphs. Training and evaluation alternate, and they want other
sizes: 256 prompts with one greedy completion each want 256 prompt slots, and 8 prompts with 32 completions each want 8.
So each phase, which its group size tells apart, has a geometry that never shrinks while the phase lasts, and memory
decides what happens between phases (`settled`). On a GPU all providers but `sdpa` keep shared prompts apart from lanes
at a group size of 1 too: a flat layout would save them a launch there, and no memory, but would keep the phases from
sharing slots.

Shapes: R lanes, C most tokens of a completion, P prompt slots, T most tokens of a prompt, G most lanes of one prompt,
n lanes in use, K key heads, d head width.
"""

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import psutil
import torch

from fastgrpo.loss.inputs import staged
from fastgrpo.policy.model import head_dim

if TYPE_CHECKING:
    from transformers import PretrainedConfig

# Prompt slots for each full group of lanes. One would not do: a group with one completion left still needs its prompt.
PROMPTS_A_GROUP = 2
BUCKETS = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024)  # numbers of lanes of CUDA graphs
# Numbers of prompts of CUDA graphs. They are far apart, because each makes more graphs.
PROMPT_BUCKETS = (4, 16, 64, 256, 1024)
AMPLE = 0.5  # all phases share one geometry where it takes at most this share of the memory allowed
NEAR = 0.8  # the present geometry is kept if it has at least this share of the lanes and prompt slots that would fit
ROUND = 16  # T is rounded up to a multiple of this, so that a slightly longer prompt needs no new slots


@dataclass(frozen=True)
class Geometry:
    """The numbers and sizes of the slots that hold keys and values.

    Attributes:
        lanes: R, the completions in flight at once.
        capacity: C, most tokens of a completion.
        prompts: P, the prompt slots. With flat slots, only the number of groups in flight at once.
        longest_prompt: T, most tokens of a prompt.
        group: G, most lanes of one prompt.
        flat: Whether the slot of each lane holds a copy of its prompt before the completion, T + C tokens together. If
            not, a prompt's keys and values lie once in a slot of their own, and a lane's slot holds C tokens.
    """

    lanes: int
    capacity: int
    prompts: int
    longest_prompt: int
    group: int
    flat: bool

    @property
    def lane_tokens(self) -> int:
        """Tokens that the slot of a lane holds."""
        return self.capacity + self.longest_prompt * self.flat

    @property
    def tokens(self) -> int:
        """Tokens that all slots together hold."""
        return self.lanes * self.lane_tokens + self.prompts * self.longest_prompt * (not self.flat)

    def holds(self, prompt_length: int, limits: list[int]) -> bool:
        """Tell whether a group fits if all lanes are free."""
        return (
            prompt_length <= self.longest_prompt
            and max(limits) <= self.capacity
            and len(limits) <= min(self.group, self.lanes)
        )


def copied_tokens(requests: list[tuple[int, list[int]]], max_num_seqs: int) -> int:
    """Count the tokens of the copies of prompts that only flat slots hold, with all lanes in use."""
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
    """Choose the geometry with the most lanes that these requests fill and the limits allow."""
    group = max(len(limits) for _, limits in requests)
    capacity = max(max(limits) for _, limits in requests)
    longest = -max(length for length, _ in requests) // ROUND * -ROUND

    def geometry(lanes):
        # A prompt in use has a lane at least, so that prompts with one completion each need no more slots than lanes.
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
        else f"let the model and its training take less, which leave {left / 2**30:.2f} GiB (docs/memory.md)"
    )
    raise ValueError(
        f"one group of {group} completions of up to {capacity} tokens and its prompt of {longest} needs "
        f"{needed / 2**30:.2f} GiB for keys and values, and {budget / 2**30:.2f} GiB are allowed: lower "
        f"num_generations or max_completion_length, or {remedy}"
    )


def settled(
    phases: dict[tuple[int, bool], Geometry],
    new: Geometry,
    requests: list[tuple[int, list[int]]],
    token_bytes: int,
    budget: int,
) -> Geometry:
    """Choose the geometry to go on with, given those of all phases so far and the one that fits the next requests best.

    One geometry that is large enough for every phase is used where it takes at most the share AMPLE of the budget: then
    training and evaluation go on with the same slots and CUDA graphs. Otherwise each phase has its own: the first
    rollout after an evaluation shrinks the slots to what training needs, at the price of recording the graphs again.
    """
    phase = new.group, new.flat
    own = phases[phase] = _grown(phases.get(phase, new), new, requests, budget // token_bytes)
    shared = _merged(*(geometry for geometry in phases.values() if geometry.flat == new.flat))
    return shared if shared.tokens * token_bytes <= AMPLE * budget else own


def _grown(old, new, requests, most):
    """Choose the geometry of a phase so that it stays from rollout to rollout; `most` is how many tokens it may hold.

    It is the larger of the two in every size, if the budget holds that. Otherwise it is the old one, if that holds the
    requests and is not much smaller than the new one.
    """
    both = _merged(old, new)
    if both.tokens <= most:
        return both
    near = old.lanes >= NEAR * new.lanes and old.prompts >= NEAR * new.prompts
    return old if near and all(old.holds(*request) for request in requests) else new


def _merged(*geometries):
    """Return the geometry that is as large as the largest of these in every size; all have one layout."""
    sizes = "lanes", "capacity", "prompts", "longest_prompt", "group"
    largest = (max(getattr(geometry, size) for geometry in geometries) for size in sizes)
    return Geometry(*largest, geometries[0].flat)


def kv_token_bytes(config: "PretrainedConfig", dtype: torch.dtype) -> int:
    """Count the bytes of one token's keys and values in all layers of a model."""
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    return 2 * config.num_hidden_layers * heads * head_dim(config) * dtype.itemsize


def memory_left(device: torch.device, reserved: int = 0) -> int:
    """Count the bytes that are free now and that nothing else will take."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        # Memory that torch has cached and does not use is free too.
        free += torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    else:
        free = psutil.virtual_memory().available
    return max(free - reserved, 0)


def bucket(count: int, most: int, sizes: tuple[int, ...] = BUCKETS) -> int:
    """Choose the number of lanes or prompts of the CUDA graph that serves at least so many."""
    return min(next((size for size in sizes if size >= count), most), most)


class Cache(NamedTuple):
    """The slots of one layer: keys and values [R, K, C, d] of the lanes, and [P, K, T, d] of the prompts.

    With flat slots the lanes hold C + T tokens and there are no prompt slots.
    """

    keys: torch.Tensor
    values: torch.Tensor
    prompt_keys: torch.Tensor
    prompt_values: torch.Tensor


class Slots:
    """The slots of all layers, and which lane belongs to which prompt.

    With a flat geometry the slot of a lane begins with a copy of its prompt, and prompts have no slots of their own.

    Args:
        geometry: The numbers and sizes of the slots.
        device: Where the policy computes.
        memory_order: The dimensions of [slot, head, token] in the order in which they lie in memory, as the provider
            reads them fastest. The tensors are views [slot, head, token, d].
    """

    def __init__(
        self, geometry: Geometry, device: torch.device, memory_order: tuple[int, int, int] = (0, 1, 2)
    ) -> None:
        self.geometry, self.memory_order = geometry, memory_order
        self.caches, self.heads = {}, {}
        self.prompt_lengths = torch.zeros(geometry.prompts, dtype=torch.int32, device=device)
        self.places = torch.full((geometry.prompts * geometry.group,), -1, dtype=torch.int32, device=device)
        self.members = self.places.view(geometry.prompts, geometry.group)

    def cache(self, layer: int, key: torch.Tensor, value: torch.Tensor) -> Cache:
        """Return the slots of a layer; the first call makes them for keys and values like these [K, N, d]."""
        if layer not in self.caches:
            g = self.geometry
            lanes, prompts = (g.lanes, g.lane_tokens), (0 if g.flat else g.prompts, g.longest_prompt)
            self.caches[layer] = Cache(*(self._zeros(*shape, of) for shape in (lanes, prompts) for of in (key, value)))
        return self.caches[layer]

    def _zeros(self, count, tokens, like):
        """Make [count, K, tokens, d] zeros, because a masked key or value must not be NaN."""
        shape, order = (count, like.shape[0], tokens), self.memory_order
        zeros = like.new_zeros(*(shape[dim] for dim in order), like.shape[2])
        return zeros.permute(*(order.index(dim) for dim in range(3)), 3)

    def write(self, held: torch.Tensor, slots: torch.Tensor, tokens: torch.Tensor, new: torch.Tensor) -> None:
        """Write the keys or values `new` [n, K, d] into `held`, one of a `Cache`, at `tokens` [n] of `slots` [n].

        In the order of memory the indices stand side by side and in front. Otherwise `index_put_` would copy all of
        `held` and back where torch is told to be deterministic.
        """
        index = {0: slots, 2: tokens}
        if self.memory_order[-1] != 1:  # the heads stand before the tokens or the slots
            index = {0: slots[:, None], 1: self._heads(held), 2: tokens[:, None]}
        held.permute(*self.memory_order, 3)[tuple(index[dim] for dim in self.memory_order if dim in index)] = new

    def _heads(self, held):
        """Return [K] int64, the number of each head."""
        count = held.shape[1]
        if count not in self.heads:
            self.heads[count] = torch.arange(count, device=held.device)
        return self.heads[count]

    def arrange(self, prompt_of: list[int], group: int) -> None:
        """Note in `members` which lanes belong to which prompt: [prompts, lanes of each], -1 where there is none.

        It has a row for each prompt up to the last one in use, so that a decode step computes no others. A CUDA graph
        needs fixed shapes: on a GPU the rows are rounded up to a bucket, and there are `group` columns.
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
        """Reset all keys and values, after some were not finite: a masked value times 0 must not be NaN."""
        for cache in self.caches.values():
            for tensor in cache:
                tensor.zero_()

    @torch.inference_mode()
    def move(self, sources: torch.Tensor, targets: torch.Tensor, tokens: int) -> None:
        """Copy the first tokens of some lanes to the slots of other lanes, none of which is among the sources."""
        lanes = self.memory_order.index(0)
        for cache in self.caches.values():
            for tensor in (cache.keys, cache.values):
                held = tensor[:, :, :tokens].permute(*self.memory_order, 3)  # in the order of memory
                held.index_copy_(lanes, targets, held.index_select(lanes, sources))

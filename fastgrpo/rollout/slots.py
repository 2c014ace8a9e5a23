"""Slots: where the keys and values of prompts and lanes lie in memory.

Shapes: R lanes, C most tokens of a completion, P prompt slots, T most tokens of a prompt, G most lanes of one prompt,
n lanes in use, K key heads, d head width.
"""

from typing import NamedTuple

import numpy as np
import torch

from fastgrpo.loss.staging import staged
from fastgrpo.rollout.geometry import PROMPT_BUCKETS, Geometry, bucket


class Cache(NamedTuple):
    """The slots of one layer. With flat slots the lanes hold C + T tokens and there are no prompt slots.

    Attributes:
        keys: [R, K, C, d] keys of the lanes.
        values: [R, K, C, d] values of the lanes.
        prompt_keys: [P, K, T, d] keys of the prompts.
        prompt_values: [P, K, T, d] values of the prompts.
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
        """Return the slots of a layer, which are made at the first call.

        Args:
            layer: Number of the layer.
            key: [K, any number, d], which gives heads, width and dtype of the keys.
            value: [K, any number, d], likewise for the values.
        """
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
        """Write the keys or values of n tokens into slots.

        In the order of memory the indices stand side by side and in front. Otherwise `index_put_` would copy all of
        `held` and back where torch is told to be deterministic.

        Args:
            held: [slot, head, token, d], one of the tensors of a layer's `Cache`.
            slots: [n] int64, the slot of each token.
            tokens: [n] int64, the index of each token in its slot.
            new: [n, K, d].
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
        """Copy the keys and values of some lanes to the slots of other lanes.

        Args:
            sources: int64 lanes that hold them.
            targets: int64 lanes that take them over, none of which is among the sources.
            tokens: Most tokens that a source holds.
        """
        lanes = self.memory_order.index(0)
        for cache in self.caches.values():
            for tensor in (cache.keys, cache.values):
                held = tensor[:, :, :tokens].permute(*self.memory_order, 3)  # in the order of memory
                held.index_copy_(lanes, targets, held.index_select(lanes, sources))

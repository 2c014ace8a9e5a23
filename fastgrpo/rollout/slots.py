"""Keys and values of a running generation: each prompt's once, each completion's in a slot of its own.

Shapes: R lanes (completions), C capacity of a lane in tokens, P prompts, T longest prompt, G most lanes of one prompt,
N packed prompt tokens, K key heads, H query heads, d head width.
"""

from typing import NamedTuple

import numpy as np
import torch

from fastgrpo.policy.attention import PackedAttention


class Cache(NamedTuple):
    """One layer's: keys and values of the lanes [R, K, C, d], of the prompts [P, K, T, d]."""

    keys: torch.Tensor
    values: torch.Tensor
    prompt_keys: torch.Tensor
    prompt_values: torch.Tensor


class Slots:
    """All layers' caches, and which lane belongs to which prompt.

    With a flat geometry the prompt stands at the head of each of its lanes, and no prompt is kept apart.
    memory_order: which dimension of [slot, head, token] comes first in memory, which next: what the provider reads
    fastest. The tensors are views [slot, head, token, d] of it.
    """

    def __init__(self, geometry, device, memory_order=(0, 1, 2)):
        self.geometry, self.memory_order = geometry, memory_order
        self.caches = {}
        self.prompt_lengths = torch.zeros(geometry.prompts, dtype=torch.int32, device=device)
        self.members = torch.full((geometry.prompts, geometry.group), -1, dtype=torch.int32, device=device)

    def cache(self, layer, key, value):
        """The layer's, made when its first key [K, ., d] and value are seen."""
        if layer not in self.caches:
            g = self.geometry
            lanes, prompts = (g.lanes, g.lane_tokens), (0 if g.flat else g.prompts, g.longest_prompt)
            self.caches[layer] = Cache(*(self._zeros(*shape, of) for shape in (lanes, prompts) for of in (key, value)))
        return self.caches[layer]

    def _zeros(self, count, tokens, like):
        """[count, K, tokens, d]: zeros, because a masked place must not be NaN."""
        shape, order = (count, like.shape[0], tokens), self.memory_order
        zeros = like.new_zeros(*(shape[dim] for dim in order), like.shape[2])
        return zeros.permute(*(order.index(dim) for dim in range(3)), 3)

    def arrange(self, prompt_of):
        """prompt_of: [n] the prompt of each lane, -1 where it is free; on the host."""
        if self.geometry.flat:
            return
        prompt_of = np.asarray(prompt_of, dtype=np.int64)
        members = np.full(self.members.shape, -1, dtype=np.int32)
        order = np.argsort(prompt_of, kind="stable")
        order = order[prompt_of[order] >= 0]
        owners = prompt_of[order]
        counts = np.bincount(owners, minlength=len(members))
        rank = np.arange(len(order)) - (counts.cumsum() - counts)[owners]
        members[owners, rank] = order
        self.members.copy_(torch.from_numpy(members), non_blocking=True)

    @torch.inference_mode()
    def zero(self):
        """Forget all keys and values: a masked place is multiplied by 0, and 0 times NaN is NaN."""
        for cache in self.caches.values():
            for tensor in cache:
                tensor.zero_()

    @torch.inference_mode()
    def move(self, sources, targets, tokens):
        """The lanes at `sources`, which hold at most so many tokens, continue at `targets`."""
        lanes = self.memory_order.index(0)
        for cache in self.caches.values():
            for tensor in (cache.keys, cache.values):
                held = tensor[:, :, :tokens].permute(*self.memory_order, 3)  # as it lies in memory
                held.index_copy_(lanes, targets, held.index_select(lanes, sources))


class PrefillAttention(PackedAttention):
    """Packed causal attention over new prompts that also hands their keys and values to the slots.

    Prompt j goes to prompt slot `prompts[j]`, or, with flat slots, to each of the lanes `lanes[j]`. longest: most
    tokens that any of their lanes will attend to, so that a model that cannot is refused before it draws.
    """

    def __init__(self, lengths, device, slots, prompts, lanes, longest):
        super().__init__(lengths, device)
        self.slots, self.longest = slots, longest
        homes = lanes if slots.geometry.flat else [[prompt] for prompt in prompts]
        starts = np.cumsum(lengths) - lengths
        copies = [len(home) for home in homes]
        sizes = np.repeat(lengths, copies)
        at = np.concatenate([np.arange(size) for size in sizes])
        # For each token to be stored: its slot, its place there, and where it stands among the N.
        self.slot = torch.from_numpy(np.repeat(np.concatenate(homes), sizes)).to(device)
        self.at = torch.from_numpy(at).to(device)
        self.source = torch.from_numpy(np.repeat(np.repeat(starts, copies), sizes) + at).to(device)

    def attend(self, layer, query, key, value, scaling):
        cache = self.slots.cache(layer, key, value)
        keys, values = cache[:2] if self.slots.geometry.flat else cache[2:]
        keys[self.slot, :, self.at] = key.transpose(0, 1)[self.source]
        values[self.slot, :, self.at] = value.transpose(0, 1)[self.source]
        return super().attend(layer, query, key, value, scaling)


class DecodeAttention:
    """One new token on each of the first n lanes attends to its prompt and to what its lane holds.

    token_index: [n] where in its lane each new token goes. provider: who computes it (see providers.py).
    """

    longest = 0  # `PrefillAttention` has looked

    def __init__(self, slots, provider, token_index):
        self.slots, self.provider = slots, provider
        n, device, bounds = len(token_index), token_index.device, None
        if device.type == "cpu":  # a GPU is not waited for
            bounds = tuple(map(int, token_index.aminmax()))
        if bounds and bounds[0] == bounds[1]:  # one block of memory
            self.place = slice(n), slice(None), bounds[0]
        else:
            self.place = torch.arange(n, device=device), slice(None), token_index
        provider.begin(slots, token_index, bounds)

    def attend(self, layer, query, key, value, scaling):
        """query [H, n, d], key and value [K, n, d] of the new tokens -> [n, H, d]."""
        cache = self.slots.cache(layer, key, value)
        cache.keys[self.place] = key.transpose(0, 1)
        cache.values[self.place] = value.transpose(0, 1)
        return self.provider.decode(query.transpose(0, 1), cache, scaling)

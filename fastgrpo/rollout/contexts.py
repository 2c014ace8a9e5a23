"""The policy's attention in generation: contexts for the prefill of prompts, a decode step, and given tokens.

A context receives the queries, keys and values of each layer from `policy/attention.py`.

Shapes: N packed prompt tokens, n lanes in use, K key heads, H query heads, d head width.
"""

import numpy as np
import torch

from fastgrpo.loss.staging import to_device
from fastgrpo.policy.attention import PackedAttention
from fastgrpo.rollout.providers import Provider
from fastgrpo.rollout.slots import Slots


class PrefillAttention(PackedAttention):
    """Packed causal attention over new prompts, which also stores their keys and values in slots."""

    def __init__(
        self,
        lengths: list[int],
        device: torch.device | str,
        slots: Slots,
        prompts: list[int],
        lanes: list[list[int]],
        longest: int,
    ) -> None:
        super().__init__(lengths, device)
        self.slots, self.longest = slots, longest
        slots_of = lanes if slots.geometry.flat else [[prompt] for prompt in prompts]
        starts = np.cumsum(lengths) - lengths
        copies = [len(targets) for targets in slots_of]
        sizes = np.repeat(lengths, copies)
        at = np.concatenate([np.arange(size) for size in sizes])

        def stored(numbers):
            return to_device(torch.from_numpy(numbers), device)

        # For each token that is stored: its slot, its index in the slot, and its index among the N packed tokens.
        self.slot = stored(np.repeat(np.concatenate(slots_of), sizes))
        self.at = stored(at)
        self.source = stored(np.repeat(np.repeat(starts, copies), sizes) + at)

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scaling: float
    ) -> torch.Tensor:
        cache = self.slots.cache(layer, key, value)
        keys, values = cache[:2] if self.slots.geometry.flat else cache[2:]
        self.slots.write(keys, self.slot, self.at, key.transpose(0, 1)[self.source])
        self.slots.write(values, self.slot, self.at, value.transpose(0, 1)[self.source])
        return super().attend(layer, query, key, value, scaling)


class DecodeAttention:
    """Attention of one new token on each of the first n lanes, to its prompt and to the tokens of its lane.

    Args:
        slots: The slots.
        provider: What computes the attention.
        token_index: [n] int64 index of the new token in the slot of each lane.
    """

    longest = 0  # `PrefillAttention` has already refused sequences that are too long for a sliding window

    def __init__(self, slots: Slots, provider: Provider, token_index: torch.Tensor) -> None:
        self.slots, self.provider = slots, provider
        n, device, bounds = len(token_index), token_index.device, None
        if device.type == "cpu":  # on a GPU this would wait for the device
            bounds = tuple(map(int, token_index.aminmax()))
        self.same = bounds[0] if bounds and bounds[0] == bounds[1] else None  # where all tokens have the same index
        self.lanes, self.token_index = torch.arange(n, device=device), token_index
        provider.begin(slots, token_index, bounds)

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scaling: float
    ) -> torch.Tensor:
        """Store the keys and values of the new tokens in one layer, and attend.

        Args:
            layer: Number of the layer.
            query: [H, n, d].
            key: [K, n, d].
            value: [K, n, d].
            scaling: Factor on the scores before the softmax.

        Returns:
            [n, H, d], in the dtype of the query.
        """
        cache = self.slots.cache(layer, key, value)
        for held, new in ((cache.keys, key), (cache.values, value)):
            if self.same is None:
                self.slots.write(held, self.lanes, self.token_index, new.transpose(0, 1))
            else:  # a slice, which is faster to write than single tokens
                held[: len(self.lanes), :, self.same] = new.transpose(0, 1)
        return self.provider.attend(query.transpose(0, 1)[:, None], cache, scaling)[:, 0]


class ExtendAttention:
    """Attention of several new tokens of some lanes, to their prompts, the tokens before them, and one another.

    Args:
        slots: The slots.
        provider: What computes the attention.
        token_index: [n] int64 index of the newest token in the slot of each lane.
        lanes: [N] int64 lane of each new token.
        offsets: [N] int64 how many new tokens of its lane stand before each.
    """

    longest = 0  # as in `DecodeAttention`

    def __init__(
        self,
        slots: Slots,
        provider: Provider,
        token_index: torch.Tensor,
        lanes: torch.Tensor,
        offsets: torch.Tensor,
    ) -> None:
        self.slots, self.provider, self.lanes, self.offsets = slots, provider, lanes, offsets
        new = int(offsets.max()) + 1
        indices = token_index[:, None] + torch.arange(new, device=token_index.device)
        self.shape, self.token_index = indices.shape, indices[lanes, offsets]
        provider.begin(slots, indices.squeeze(1), tuple(map(int, indices.aminmax())))

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scaling: float
    ) -> torch.Tensor:
        """Store the keys and values of the new tokens in one layer, and attend.

        Args:
            layer: Number of the layer.
            query: [H, N, d].
            key: [K, N, d].
            value: [K, N, d].
            scaling: Factor on the scores before the softmax.

        Returns:
            [N, H, d], in the dtype of the query.
        """
        cache = self.slots.cache(layer, key, value)
        for held, new in ((cache.keys, key), (cache.values, value)):
            self.slots.write(held, self.lanes, self.token_index, new.transpose(0, 1))
        rows = query.new_zeros(*self.shape, len(query), query.shape[2])
        rows[self.lanes, self.offsets] = query.transpose(0, 1)
        return self.provider.attend(rows, cache, scaling)[self.lanes, self.offsets]

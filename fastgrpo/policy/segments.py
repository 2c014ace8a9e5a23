"""Packed sequences: which tokens attend to which, and their layout for kernels that want padded sequences.

Sequences of similar length share a bucket and are padded to the longest of it, so that padding costs little: many short
sequences are one bucket, and a long sequence stands nearly alone.

Shapes: N packed query tokens, M packed key tokens, S sequences, H query heads, K key heads (H is a multiple of K),
d head width. In a bucket, S counts its sequences alone, with T padded queries and U padded keys each. A "place" is one
of the S * T (or S * U) padded tokens of a bucket.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

import torch

from fastgrpo.loss.staging import to_device

WASTE = 1.25  # the scores that a bucket computes may be this many times those that count,
SPARE = 2**17  # plus this many, because one more bucket costs about as much as so many scores


@dataclass(frozen=True)
class Bucket:
    """Sequences of similar length, padded to the longest of them.

    Attributes:
        size: S, the number of sequences.
        queries: [S * T] int64. Index of the packed query at each place; a padded place repeats the sequence's last one.
        keys: [S * U] int64. Index of the packed key at each place; a padded place repeats the sequence's last one.
        unused: int64 places of the queries that are padding, or None if there are none.
        bias: [S, 1, 1, U] fp32, -inf at keys that are padding and 0 elsewhere, or None if no query would see padding.
    """

    size: int
    queries: torch.Tensor
    keys: torch.Tensor
    unused: torch.Tensor | None
    bias: torch.Tensor | None

    def bias_in(self, dtype: torch.dtype) -> torch.Tensor | None:
        """Cast the bias to the dtype of the queries.

        Returns:
            [S, 1, 1, U], or None where the bucket has no bias.
        """
        return None if self.bias is None else self.bias.to(dtype)


class Buckets:
    """The layout of packed sequences in buckets of similar length.

    `place_q` [N] and `place_k` [M] tell at which place of all buckets, one after another, each packed query and key
    stands.
    """

    def __init__(self, queries: list[int], keys: list[int], device: torch.device | str, causal: bool) -> None:
        queries, keys = torch.tensor(queries), torch.tensor(keys)
        self.place_q = torch.empty(int(queries.sum()), dtype=torch.int64)
        self.place_k = torch.empty(int(keys.sum()), dtype=torch.int64)
        starts_q, starts_k = queries.cumsum(0) - queries, keys.cumsum(0) - keys
        self.buckets, base_q, base_k = [], 0, 0
        for chosen in self._similar(queries.tolist(), keys.tolist()):
            rows_q, used_q = self._grid(starts_q[chosen], queries[chosen])
            rows_k, used_k = self._grid(starts_k[chosen], keys[chosen])
            self.place_q[rows_q[used_q]] = used_q.flatten().nonzero()[:, 0] + base_q
            self.place_k[rows_k[used_k]] = used_k.flatten().nonzero()[:, 0] + base_k
            base_q, base_k = base_q + rows_q.numel(), base_k + rows_k.numel()
            unused = None if used_q.all() else to_device((~used_q).flatten().nonzero()[:, 0], device)
            bias = None
            if not causal and not used_k.all():
                bias = torch.zeros(used_k.shape).masked_fill_(~used_k, -torch.inf)[:, None, None]
                bias = to_device(bias, device)
            places = (to_device(rows.flatten(), device) for rows in (rows_q, rows_k))
            self.buckets.append(Bucket(len(chosen), *places, unused, bias))
        self.place_q, self.place_k = to_device(self.place_q, device), to_device(self.place_k, device)

    @staticmethod
    def _similar(queries, keys):
        """Sort the sequences into buckets; returns the numbers of each bucket's sequences."""
        buckets, width, height, scores = [], 0, 0, 0
        for i in sorted(range(len(queries)), key=lambda i: (keys[i], queries[i])):
            width, height, scores = max(width, queries[i]), max(height, keys[i]), scores + queries[i] * keys[i]
            if not buckets or (len(buckets[-1]) + 1) * width * height > WASTE * scores + SPARE:
                buckets.append([])
                width, height, scores = queries[i], keys[i], queries[i] * keys[i]
            buckets[-1].append(i)
        return [torch.tensor(sorted(bucket)) for bucket in buckets]

    @staticmethod
    def _grid(starts, lengths):
        """Return the index of the packed token at every place and whether the place is used, both [S, longest]."""
        offsets = torch.arange(int(lengths.max()))
        return starts[:, None] + torch.minimum(offsets, lengths[:, None] - 1), offsets < lengths[:, None]

    def __iter__(self) -> Iterator[Bucket]:
        return iter(self.buckets)


class Segments:
    """S sequences of packed queries, and the packed keys that each sequence attends to."""

    def __init__(
        self,
        queries: list[int],
        keys: list[int],
        device: torch.device | str,
        *,
        causal: bool,
        query_span: slice = slice(None),
        key_span: slice = slice(None),
    ) -> None:
        assert len(queries) == len(keys) and min(queries) > 0 and min(keys) > 0
        assert not causal or queries == keys
        self.queries, self.keys, self.device, self.causal = queries, keys, device, causal
        self.query_span, self.key_span = query_span, key_span
        self.max_q, self.max_k = max(queries), max(keys)

    def _bounds(self, lengths):
        return to_device(torch.tensor([0, *accumulate(lengths)], dtype=torch.int32), self.device)

    @cached_property
    def cu_seqlens_q(self) -> torch.Tensor:
        """Where each sequence's queries begin and the last ones end: [S+1] int32 on the device."""
        return self._bounds(self.queries)

    @cached_property
    def cu_seqlens_k(self) -> torch.Tensor:
        """Where each sequence's keys begin and the last ones end: [S+1] int32 on the device."""
        return self.cu_seqlens_q if self.causal else self._bounds(self.keys)

    @cached_property
    def buckets(self) -> Buckets:
        """The layout by sequence for kernels that cannot read packed tokens."""
        return Buckets(self.queries, self.keys, self.device, self.causal)


class AttentionKernel(ABC):
    """What computes attention over packed sequences.

    Attributes:
        name: What the log calls it.
    """

    name: str

    @abstractmethod
    def forward(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, segments: Segments, scale: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Attend within the sequences.

        Args:
            query: [N, H, d].
            key: [M, K, d].
            value: [M, K, d].
            segments: The sequences, which cover all N queries and M keys.
            scale: Factor on the scores before the softmax.

        Returns:
            The output [N, H, d] in the dtype of the query, and the log-sum-exp of the scores [H, N] in fp32 (fp64 for
            fp64 queries).
        """

    @abstractmethod
    def backward(self, grad: torch.Tensor, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor,
                 out: torch.Tensor, lse: torch.Tensor, segments: Segments,
                 scale: float) -> tuple[torch.Tensor, ...]:  # fmt: skip
        """Compute the gradients that pass through these keys, by the formulas of varlen.py.

        Args:
            grad: [N, H, d] gradient of the output.
            query: [N, H, d].
            key: [M, K, d].
            value: [M, K, d].
            out: [N, H, d] output of the whole softmax, over these keys and all others.
            lse: [H, N] contiguous log-sum-exp of the whole softmax.
            segments: The sequences, which cover all N queries and M keys.
            scale: Factor on the scores before the softmax.
        """

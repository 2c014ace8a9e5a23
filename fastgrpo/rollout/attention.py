"""The policy's attention during generation.

A context gets the queries, keys and values of each layer from `policy/attention.py`, and writes keys and values into
slots: `PrefillAttention` for new prompts, `AppendAttention` for given tokens such as the answers of tools, and
`DecodeAttention` for one new token per lane. A *provider* computes the attention of a decode step;
`RolloutEngine(attention=...)` names one.

Shapes: N packed tokens, n lanes in use, K key heads, H query heads, d head width.
"""

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable
from functools import cache
from importlib.util import find_spec

import numpy as np
import torch
from torch.nn import functional as F

from fastgrpo.loss.inputs import to_device
from fastgrpo.policy.attention import PackedAttention
from fastgrpo.policy.device import package_obstacle
from fastgrpo.policy.varlen import FLASH_ATTN, Segments, VarlenAttention
from fastgrpo.rollout.slots import Cache, Slots

logger = logging.getLogger(__name__)

PROVIDERS = ("triton", "flash_attn", "sdpa", "products")  # in the order in which auto tries them on a GPU
TOKENS_BEFORE_HEADS = (0, 2, 1)  # the memory order of slots that FlashAttention's functions need
MANY = 128  # lanes times key heads from which matrix products are faster than SDPA on a CPU
# ATen's bmm uses the matrix library from 400 multiplications per matrix, and is slower below that. A head is at least
# 16 wide, so 25 keys are enough; fewer keys are padded with masked ones.
LEAST_KEYS = 25
CHECKED, ALLOWED = 8, 2e-2  # lanes in the check of the kernel, and relative tolerance for 16-bit probabilities
FEW_COPIES = 1600  # copied prompt tokens up to which flat slots are faster than shared prompts on a CPU


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

        # For each stored token: its slot, its index in the slot, and its index among the N packed tokens.
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


class AppendAttention:
    """Attention of several new tokens of some lanes to their prompts, earlier tokens, and themselves, causally.

    It merges the softmax over the new tokens with the softmax over the past ones, as `PackedAttention` does. `past` has
    the number of prompt tokens and of completion tokens before the new ones, for each lane. `counts` add up to N.
    """

    longest = 0  # `PrefillAttention` has already rejected sequences that exceed a sliding window

    def __init__(
        self, slots: Slots, lanes: list[int], prompts: list[int], past: list[tuple[int, int]], counts: list[int]
    ) -> None:
        self.slots, device = slots, slots.prompt_lengths.device
        flat, total = slots.geometry.flat, sum(counts)
        first = [prompt * flat + own for prompt, own in past]  # index of the first new token in the lane's slot
        at = np.concatenate([np.arange(start, start + count) for start, count in zip(first, counts, strict=True)])
        self.lane, self.at = (to_device(torch.from_numpy(x), device) for x in (np.repeat(lanes, counts), at))
        # The past tokens of each lane: (whether in a prompt slot, the slot, the number of tokens), in order.
        own = zip([False] * len(lanes), lanes, first, strict=True)
        shared = zip([True] * len(lanes), prompts, [prompt for prompt, _ in past], strict=True)
        parts = [own] if flat else [shared, own]
        self.past = [part for of_lane in zip(*parts, strict=True) for part in of_lane]
        lengths = [sum(pair) for pair in past]
        key_span = slice(total, total + sum(lengths))
        self.parts = [
            Segments(counts, counts, device, causal=True, key_span=slice(0, total)),
            Segments(counts, lengths, device, causal=False, key_span=key_span),
        ]

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scaling: float
    ) -> torch.Tensor:
        """Store the keys and values [K, N, d] of the new tokens in one layer, and attend with the query [H, N, d]."""
        cache = self.slots.cache(layer, key, value)
        packed = []
        for new, own, shared in ((key, cache.keys, cache.prompt_keys), (value, cache.values, cache.prompt_values)):
            past = [(shared if in_prompt else own)[slot, :, :count] for in_prompt, slot, count in self.past]
            packed.append(torch.cat([new, *past], 1).transpose(0, 1))
            self.slots.write(own, self.lane, self.at, new.transpose(0, 1))
        return VarlenAttention.apply(query.transpose(0, 1), *packed, self.parts, scaling)


class DecodeAttention:
    """Attention of the new token of each of the first n lanes to its prompt, earlier tokens, and itself.

    `token_index` [n] is the index of the new token in the slot of each lane.
    """

    longest = 0  # `PrefillAttention` has already rejected sequences that exceed a sliding window

    def __init__(self, slots: Slots, provider: "Provider", token_index: torch.Tensor) -> None:
        self.slots, self.provider, self.token_index, bounds = slots, provider, token_index, None
        self.lanes = torch.arange(len(token_index), device=token_index.device)
        if token_index.device.type == "cpu":  # on a GPU this would be a sync
            bounds = tuple(map(int, token_index.aminmax()))
        provider.begin(slots, token_index, bounds)
        # If all lanes have the same index, writing a slice is faster than writing single tokens.
        self.same = bounds[0] if bounds and bounds[0] == bounds[1] else None

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scaling: float
    ) -> torch.Tensor:
        """Store the keys and values [K, n, d] of the new tokens in one layer, and attend with the query [H, n, d]."""
        cache = self.slots.cache(layer, key, value)
        for held, new in ((cache.keys, key), (cache.values, value)):
            if self.same is None:
                self.slots.write(held, self.lanes, self.token_index, new.transpose(0, 1))
            else:
                held[: len(self.lanes), :, self.same] = new.transpose(0, 1)
        return self.provider.attend(query.transpose(0, 1), cache, scaling)


class Provider(ABC):
    """Computes the attention of a decode step."""

    flat: bool  # whether it needs flat slots, which hold a copy of the prompt before each completion
    memory_order: tuple[int, int, int]  # its fastest memory order of the dimensions [slot, head, token]
    exact = False  # whether the last `attend` read no key behind the length of a lane; only then may lanes grow

    @abstractmethod
    def begin(self, slots: Slots, token_index: torch.Tensor, bounds: tuple[int, int] | None) -> None:
        """Prepare a step: compute everything that its layers share.

        `token_index` [n] is the index of the newest token in the slot of each lane. `bounds` are the smallest and the
        largest of these, on the host; None on a GPU, to avoid a sync.
        """

    @abstractmethod
    def attend(self, query: torch.Tensor, cache: Cache, scale: float) -> torch.Tensor:
        """Attend in one layer: from the new token of each lane to its prompt and the lane's tokens up to itself.

        Query and output are [n, H, d], with the same dtype. `scale` multiplies the scores before the softmax.
        """


class SharedPrefix(Provider):
    """Attention to a shared prompt and to the lane's own tokens, one call of `part` each, merged by log-sum-exp.

    The G lanes of a prompt attend to it together, so that its keys are read once (Hydragen, arXiv 2402.05099). With
    the outputs o_i and the log-sum-exps l_i of the two parts' scores,

        o = exp(l_1 - l) o_1 + exp(l_2 - l) o_2        l = logaddexp(l_1, l_2)

    `part` is `products` or `flash_attn`, and `memory_order` is its fastest memory order of [slot, head, token].
    """

    flat = False

    def __init__(
        self, part: Callable[..., tuple[torch.Tensor, torch.Tensor]], memory_order: tuple[int, int, int]
    ) -> None:
        self.part, self.memory_order = part, memory_order

    def begin(self, slots: Slots, token_index: torch.Tensor, bounds: tuple[int, int] | None) -> None:
        n, members = len(token_index), slots.members
        # [prompts, lanes of each]; an empty entry computes lane 0, and its result is not read
        self.lanes = members.clamp(min=0).long()
        entry = torch.zeros(n + 1, dtype=torch.int64, device=members.device)
        # The entry of each lane. Empty entries are written to the spare last element.
        order = torch.arange(members.numel(), device=members.device)
        entry[torch.where(members >= 0, members, n).flatten().long().clamp(max=n)] = order
        self.entry = entry[:n]
        self.prompt_lengths = slots.prompt_lengths[: len(members)].clamp(min=1)
        self.lengths = (token_index + 1).to(torch.int32)

    def attend(self, query: torch.Tensor, cache: Cache, scale: float) -> torch.Tensor:
        n, prompts = len(query), len(self.lanes)
        on_prompt, prompt_lse = self.part(
            query[self.lanes], cache.prompt_keys[:prompts], cache.prompt_values[:prompts], self.prompt_lengths, scale
        )
        on_prompt = on_prompt.flatten(0, 1)[self.entry]  # [n, H, d]
        prompt_lse = prompt_lse.transpose(1, 2).flatten(0, 1)[self.entry]  # [n, H]
        on_suffix, suffix_lse = self.part(query[:, None], cache.keys[:n], cache.values[:n], self.lengths, scale)
        share = torch.sigmoid(prompt_lse - suffix_lse[..., 0])[..., None]  # exp(l_1 - l)
        return torch.lerp(on_suffix[:, 0].to(share.dtype), on_prompt.to(share.dtype), share).to(query.dtype)


def products(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, lengths: torch.Tensor, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute a part of `SharedPrefix` with matrix products, on any device, without a causal mask.

    The queries of S slots are [S, Q, H, d], and keys and values [S, K, L, d]. `lengths` [S] counts the keys of each
    slot, at least 1. Returns the output [S, Q, H, d] and the log-sum-exp of the scores [S, H, Q].
    """
    slots, queries, heads, width = query.shape
    kv_heads, padded = keys.shape[1], True
    if keys.device.type == "cpu":
        shortest, longest = (int(bound) for bound in lengths.aminmax())
        keys, values = keys[:, :, :longest], values[:, :, :longest]
        padded = shortest < longest
    grouped = query.transpose(1, 2).reshape(slots, kv_heads, -1, width)  # the query heads that share a key head
    scores = (grouped * scale) @ keys.transpose(-1, -2)
    scores = scores.to(torch.promote_types(scores.dtype, torch.float32))
    if padded:
        beyond = torch.arange(keys.shape[2], device=keys.device) >= lengths.view(slots, 1, 1, 1)
        scores.masked_fill_(beyond, -torch.inf)
    probs = scores.softmax(-1)
    lse = scores.amax(-1) - probs.amax(-1).log_()  # the largest probability is exp(largest score - lse)
    out = (probs.to(values.dtype) @ values).view(slots, heads, queries, -1).transpose(1, 2)
    return out, lse.view(slots, heads, queries)


def flash_attn(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, lengths: torch.Tensor, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute the same as `products` with flash-attn 2, in bf16 or fp16, with one length per slot."""
    from flash_attn import flash_attn_with_kvcache

    out, lse = flash_attn_with_kvcache(
        query, keys.transpose(1, 2), values.transpose(1, 2), cache_seqlens=lengths, softmax_scale=scale,
        return_softmax_lse=True,
    )  # fmt: skip
    return out, lse


class GroupDecode(Provider):
    """The Triton kernel, which computes `SharedPrefix` in one operation.

    Its first use is checked on a few lanes (fastgrpo/loss/dispatch.py). If the check fails, `SharedPrefix` is used.
    """

    flat, memory_order = False, TOKENS_BEFORE_HEADS

    def __init__(self, part: Callable[..., tuple[torch.Tensor, torch.Tensor]] = products, asked: bool = False) -> None:
        self.plain, self.asked = SharedPrefix(part, TOKENS_BEFORE_HEADS), asked

    def begin(self, slots: Slots, token_index: torch.Tensor, bounds: tuple[int, int] | None) -> None:
        self.members, self.lengths = slots.members, (token_index + 1).to(torch.int32)
        self.grows = slots.geometry.pages > 0
        self.prompt_lengths = slots.prompt_lengths[: len(self.members)]
        self.to_begin = slots, token_index, bounds

    def attend(self, query: torch.Tensor, cache: Cache, scale: float) -> torch.Tensor:
        self.exact = self._trusted(query, cache, scale)
        if self.exact:
            return self._fused(query, cache, scale)
        if self.grows:
            raise RuntimeError("lanes that grow need the kernel of group_decode; use --rollout_backend eager")
        if self.to_begin is not None:  # once a step
            self.plain.begin(*self.to_begin)
            self.to_begin = None
        return self.plain.attend(query, cache, scale)

    def _trusted(self, query, cache, scale):
        from fastgrpo.loss.dispatch import trusted

        variant = {"dtype": query.dtype, "heads": query.shape[1], "width": query.shape[2],
                   "key heads": cache.keys.shape[1], "lanes of a prompt": self.members.shape[1]}  # fmt: skip
        remedy = "Use attention='auto' to continue without it." if self.asked else None
        return trusted("group_decode", query.device, variant, lambda: self._difference(query, cache, scale), remedy)

    def _fused(self, query, cache, scale):
        from fastgrpo.kernels.decode import group_decode

        prompts = len(self.members)  # determines the splits of the prompts' keys
        return group_decode(
            query, cache.keys, cache.values, self.lengths, cache.prompt_keys[:prompts], cache.prompt_values[:prompts],
            self.prompt_lengths, self.members, scale=scale,
        )  # fmt: skip

    def _difference(self, query, cache, scale):
        """Compare some lanes with softmax(q K^T scale) V over the prompt's and the lane's own keys, in fp32."""
        found = self._fused(query, cache, scale)
        # The last lane of each of the first few prompts.
        in_use = [(prompt, max(row)) for prompt, row in enumerate(self.members.tolist()) if max(row, default=-1) >= 0]
        for prompt, lane in in_use[:CHECKED]:
            ends = self.prompt_lengths[prompt].item(), self.lengths[lane].item()
            keys, values = (
                torch.cat([shared[prompt, :, : ends[0]], own[lane, :, : ends[1]]], 1).float()
                for shared, own in ((cache.prompt_keys, cache.keys), (cache.prompt_values, cache.values))
            )
            scores = query[lane].float().unflatten(0, (len(keys), -1)) @ keys.transpose(1, 2) * scale
            expected = (scores.softmax(-1) @ values).flatten(0, 1)
            error = ((found[lane].float() - expected).norm() / expected.norm().clamp(min=1e-30)).item()
            if not error <= ALLOWED:
                return f"lane {lane} differs by {error:.3g} of its norm ({ALLOWED} is allowed)"
        return None


class Flat(Provider):
    """Attention to flat slots with SDPA; on a CPU with many lanes, with matrix products, faster for one query."""

    flat = True

    def __init__(self, on_cpu: bool) -> None:
        self.on_cpu = on_cpu
        self.memory_order = (2, 0, 1) if on_cpu else (0, 1, 2)

    def begin(self, slots: Slots, token_index: torch.Tensor, bounds: tuple[int, int] | None) -> None:
        self.longest, self.bias = slots.geometry.lane_tokens, None
        if bounds:
            self.longest = min(max(bounds[1] + 1, LEAST_KEYS), self.longest)
            if bounds[0] + 1 == self.longest:
                return
        beyond = torch.arange(self.longest, device=token_index.device) > token_index[:, None, None]
        self.bias = torch.zeros(beyond.shape, device=beyond.device).masked_fill_(beyond, -torch.inf)[:, None]

    def attend(self, query: torch.Tensor, cache: Cache, scale: float) -> torch.Tensor:
        n, _, width = query.shape
        kv_heads, bias = cache.keys.shape[1], self.bias
        grouped = query.view(n, kv_heads, -1, width)  # the queries of all heads that share keys
        keys, values = cache.keys[:n, :, : self.longest], cache.values[:n, :, : self.longest]
        if not self.on_cpu or n * kv_heads < MANY:
            bias = None if bias is None else bias.to(query.dtype)
            out = F.scaled_dot_product_attention(grouped, keys, values, attn_mask=bias, scale=scale)
        else:
            scores = (grouped * scale) @ keys.transpose(-1, -2)
            if bias is not None:
                scores = scores + bias  # the bias is fp32, and so is the softmax of a 16-bit model
            probs = scores.softmax(-1, dtype=torch.promote_types(scores.dtype, torch.float32)).to(values.dtype)
            out = probs @ values
        return out.flatten(1, 2)


def choose_provider(name: str, device: torch.device, dtype: torch.dtype, head_dim: int, copied: int) -> str:
    """Choose a provider that supports a model."""
    if name not in ("auto", *PROVIDERS):
        raise ValueError(f"attention must be one of auto, {', '.join(PROVIDERS)}, got {name!r}")
    if name == "auto" and device.type == "cpu":
        name = "sdpa" if copied <= FEW_COPIES else "products"
    elif name == "auto":
        name = next(name for name in PROVIDERS if _obstacle(name, device, dtype, head_dim) is None)
    obstacle = _obstacle(name, device, dtype, head_dim)
    if obstacle is not None:
        raise ValueError(f"attention={name!r} {obstacle}; use attention='auto'")
    return name


def make_provider(name: str, device: torch.device, dtype: torch.dtype, head_dim: int, copied: int) -> Provider:
    """Create the provider that `choose_provider` returns, and log the choice once."""
    asked, name = name, choose_provider(name, device, dtype, head_dim, copied)
    _log_once(name, device.type)
    if name == "triton":
        flash = _obstacle("flash_attn", device, dtype, head_dim) is None
        return GroupDecode(flash_attn if flash else products, asked == name)
    if name == "sdpa":
        return Flat(device.type == "cpu")
    if name == "flash_attn":
        return SharedPrefix(flash_attn, TOKENS_BEFORE_HEADS)
    return SharedPrefix(products, (0, 1, 2))


def _obstacle(name, device, dtype, head_dim):
    """Return why a provider does not support a model, as a predicate ("needs ..."), or None."""
    if name in ("sdpa", "products"):
        return None
    if device.type != "cuda":
        return f"needs a CUDA device; the model is on {device}"
    if name == "triton":
        if find_spec("triton") is None:
            return "needs the package: pip install triton"
        from fastgrpo.kernels import launch

        if not launch.runs_on(device):
            return "needs an NVIDIA GPU of compute capability 8.0 or newer"
        if dtype not in launch.DTYPES:
            return f"supports bf16, fp16 and fp32; the model is {dtype}"
        return None if head_dim <= 256 else f"supports a head width of at most 256; the model has {head_dim}"
    if dtype not in (torch.float16, torch.bfloat16):
        return f"supports bf16 and fp16; the model is {dtype}"
    if head_dim > 256 or head_dim % 8:
        return f"supports head widths that are multiples of 8 and at most 256; the model has {head_dim}"
    if torch.cuda.get_device_capability(device) < (8, 0):
        return "needs compute capability 8.0 or newer"
    return package_obstacle(FLASH_ATTN)


@cache
def _log_once(name, device):
    logger.info("rollout attention on %s: %s", device, name)

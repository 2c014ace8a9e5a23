"""Who computes the attention of a decode step. A provider is named by --rollout_attention.

Shapes: n lanes, H query heads, K key heads, d head width, C capacity of a lane, P prompts, T longest prompt, G most
lanes of one prompt.
"""

import logging
from importlib.util import find_spec

import torch
from torch.nn import functional as F

logger = logging.getLogger(__name__)

TOKENS_BEFORE_HEADS = (0, 2, 1)  # memory order of slots: what FlashAttention's functions take


class SharedPrefix:
    """Attention over a shared prompt and a lane's own suffix, each by one call of `part`, merged by log-sum-exp.

    The G lanes of a prompt attend to it together (Hydragen, arXiv 2402.05099): its keys are read once for all of them.
    With softmax parts (o_i, l_i = log-sum-exp of part i's scores): o = sum_i exp(l_i - l) o_i, l = logaddexp(l_1, l_2).

    `part(query [S, Q, H, d], keys [S, K, L, d], values, lengths [S] int32, scale) -> (out [S, Q, H, d], lse [S, H, Q])`
    attends without a mask to the first `lengths` keys, at least one.
    """

    flat = False

    def __init__(self, part, memory_order):
        self.part, self.memory_order = part, memory_order

    def begin(self, slots, token_index, bounds):
        """What all layers of a step share.

        token_index: [n] place of each lane's newest token in its slot. bounds: the smallest and the largest one on the
        host; None on a GPU.
        """
        n = len(token_index)
        members = slots.members
        if members.device.type == "cpu":  # nothing is captured there: leave empty prompts and places out
            used = (members >= 0).nonzero()
            members = members[: int(used[:, 0].max()) + 1, : int(used[:, 1].max()) + 1]
        self.rows = members.clamp(min=0).long()  # [P, G]; a place without a lane computes lane 0 for nothing
        place = torch.zeros(n + 1, dtype=torch.int64, device=members.device)
        # Where each lane stands among the P * G; places without a lane write behind the end.
        order = torch.arange(members.numel(), device=members.device)
        place[torch.where(members >= 0, members, n).flatten().long().clamp(max=n)] = order
        self.place = place[:n]
        self.prompt_lengths = slots.prompt_lengths[: len(members)].clamp(min=1)
        self.lengths = (token_index + 1).to(torch.int32)

    def decode(self, query, cache, scale):
        """query [n, H, d] -> [n, H, d]."""
        n, prompts = len(query), len(self.rows)
        on_prompt, prompt_lse = self.part(
            query[self.rows], cache.prompt_keys[:prompts], cache.prompt_values[:prompts], self.prompt_lengths, scale
        )
        on_prompt = on_prompt.flatten(0, 1)[self.place]  # [n, H, d]
        prompt_lse = prompt_lse.transpose(1, 2).flatten(0, 1)[self.place]  # [n, H]
        on_suffix, suffix_lse = self.part(query[:, None], cache.keys[:n], cache.values[:n], self.lengths, scale)
        share = torch.sigmoid(prompt_lse - suffix_lse[..., 0])[..., None]  # exp(l_1 - l)
        return torch.lerp(on_suffix[:, 0].to(share.dtype), on_prompt.to(share.dtype), share).to(query.dtype)


def products(query, keys, values, lengths, scale):
    """A part by plain matrix products, on any device."""
    slots, queries, heads, width = query.shape
    kv_heads = keys.shape[1]
    if keys.device.type == "cpu":
        longest = int(lengths.max())
        keys, values = keys[:, :, :longest], values[:, :, :longest]
    grouped = query.transpose(1, 2).reshape(slots, kv_heads, -1, width)  # the heads of a key head side by side
    scores = (grouped * scale) @ keys.transpose(-1, -2)
    scores = scores.to(torch.promote_types(scores.dtype, torch.float32))
    beyond = torch.arange(keys.shape[2], device=keys.device) >= lengths[:, None]
    scores = scores.masked_fill_(beyond[:, None, None], -torch.inf)
    lse = scores.logsumexp(-1)
    out = (scores - lse[..., None]).exp_().to(values.dtype) @ values
    out = out.view(slots, heads, queries, -1).transpose(1, 2)
    return out, lse.view(slots, heads, queries)


def flash_attn(query, keys, values, lengths, scale):
    """A part by flash-attn 2."""
    from flash_attn import flash_attn_with_kvcache

    out, lse = flash_attn_with_kvcache(
        query, keys.transpose(1, 2), values.transpose(1, 2), cache_seqlens=lengths, softmax_scale=scale,
        return_softmax_lse=True,
    )  # fmt: skip
    return out, lse


def varlen(query, keys, values, lengths, scale):
    """A part by PyTorch's built-in FlashAttention; `seqused_k` makes slots of keys without pages."""
    slots, queries, heads, _ = query.shape
    capacity = keys.shape[2]
    starts = torch.arange(slots + 1, dtype=torch.int32, device=query.device)
    out, lse, *_ = torch.ops.aten._flash_attention_forward(
        query.flatten(0, 1), keys.transpose(1, 2).flatten(0, 1), values.transpose(1, 2).flatten(0, 1),
        starts * queries, starts * capacity, queries, capacity, 0.0, False, False, scale=scale, seqused_k=lengths,
    )  # fmt: skip
    return out.view(slots, queries, heads, -1), lse.reshape(heads, slots, queries).transpose(0, 1)


class GroupDecode:
    """The Triton kernel: `SharedPrefix` in one operation."""

    flat, memory_order = False, TOKENS_BEFORE_HEADS

    def begin(self, slots, token_index, bounds):
        self.slots, self.lengths = slots, (token_index + 1).to(torch.int32)

    def decode(self, query, cache, scale):
        from fastgrpo.kernels.group_decode import group_decode

        return group_decode(
            query, cache.keys, cache.values, self.lengths, cache.prompt_keys, cache.prompt_values,
            self.slots.prompt_lengths, self.slots.members, scale=scale,
        )  # fmt: skip


class Flat:
    """Lanes with their prompt in front: nothing is shared. SDPA; on a CPU with many lanes, products, which are faster
    for one query.
    """

    flat = True

    def __init__(self, on_cpu):
        self.on_cpu = on_cpu
        self.memory_order = (2, 0, 1) if on_cpu else (0, 1, 2)

    def begin(self, slots, token_index, bounds):
        self.longest, self.bias = slots.geometry.lane_tokens, None
        if bounds:
            self.longest = min(max(bounds[1] + 1, LEAST_KEYS), self.longest)
            if bounds[0] + 1 == self.longest:
                return
        beyond = torch.arange(self.longest, device=token_index.device) > token_index[:, None]
        self.bias = torch.zeros(beyond.shape, device=beyond.device).masked_fill_(beyond, -torch.inf)[:, None, None]

    def decode(self, query, cache, scale):
        n, heads, width = query.shape
        keys, values = cache.keys[:n, :, : self.longest], cache.values[:n, :, : self.longest]
        grouped = query.reshape(n, keys.shape[1], -1, width)  # the heads of a key head as so many queries
        if not self.on_cpu or n * keys.shape[1] < MANY:
            bias = None if self.bias is None else self.bias.to(query.dtype)
            out = F.scaled_dot_product_attention(grouped, keys, values, attn_mask=bias, scale=scale)
            return out.reshape(n, heads, -1)  # of whatever strides its kernel gives it
        scores = (grouped * scale) @ keys.transpose(-1, -2)
        if self.bias is not None:
            scores = scores + self.bias  # in fp32: so is the softmax of a 16-bit model
        probs = scores.softmax(-1, dtype=torch.promote_types(scores.dtype, torch.float32)).to(values.dtype)
        return (probs @ values).reshape(n, heads, -1)


MANY = 128  # lanes times key heads, from which a CPU takes products
# ATen's bmm leaves matrices of 400 multiplications to the matrix library, and takes longer for smaller ones. A head is
# at least 16 wide; masked keys fill up.
LEAST_KEYS = 25
SHORT_PROMPT = 64  # tokens; on a CPU a shorter one is read again for each completion: less than sharing it costs

NAMES = ("triton", "flash_attn", "varlen", "sdpa", "products")


def choose_provider(name, device, dtype, head_dim, longest_prompt):
    """The name of a provider that works here; "auto" is the first that does, in the order of `NAMES`.

    Raises:
        ValueError: one that was asked for cannot work here; why, and what to do.
    """
    if name == "auto" and device.type == "cpu":
        name = "sdpa" if longest_prompt <= SHORT_PROMPT else "products"
    elif name == "auto":
        name = next(name for name in NAMES if _obstacle(name, device, dtype, head_dim) is None)
    obstacle = _obstacle(name, device, dtype, head_dim)
    if obstacle is not None:
        raise ValueError(f"rollout_attention={name!r} {obstacle}; use --rollout_attention auto")
    return name


def make_provider(name, device, dtype, head_dim, longest_prompt):
    """The provider that `choose_provider` names, which is logged. Raises ValueError as it does."""
    name = choose_provider(name, device, dtype, head_dim, longest_prompt)
    _log_once(name, device.type)
    if name == "triton":
        return GroupDecode()
    if name == "sdpa":
        return Flat(device.type == "cpu")
    parts = {"flash_attn": flash_attn, "varlen": varlen, "products": products}
    return SharedPrefix(parts[name], (0, 1, 2) if name == "products" else TOKENS_BEFORE_HEADS)


def _obstacle(name, device, dtype, head_dim):
    """Why a provider cannot work here, or None."""
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
        return None if dtype in launch.DTYPES else f"takes bf16, fp16 and fp32; the model is {dtype}"
    if dtype not in (torch.float16, torch.bfloat16):
        return f"takes bf16 and fp16; the model is {dtype}"
    if head_dim > 256 or head_dim % 8:
        return f"takes heads of at most 256, a multiple of 8; the model's have {head_dim}"
    if torch.cuda.get_device_capability(device) < (8, 0):
        return "needs compute capability 8.0 or newer"
    if name == "flash_attn" and find_spec("flash_attn") is None:
        return "needs the package: pip install fastgrpo[flash]"
    if name == "varlen" and not torch.backends.cuda.is_flash_attention_available():
        return "needs a torch that is built with FlashAttention"
    if name == "varlen" and torch.__version__ < (2, 11):
        return f"needs torch 2.11 or newer, for seqused_k; this is {torch.__version__}"
    return None


_logged = set()


def _log_once(name, device):
    if (name, device) not in _logged:
        _logged.add((name, device))
        logger.info("rollout attention on %s: %s", device, name)

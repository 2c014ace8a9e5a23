"""The layers of Llama, Qwen2 and Qwen3 in a rollout, in few launches or calls.

Queries, keys and values are one product, and so are gate and up. On a GPU a decode step uses the kernels of
`kernels/layer.py` between them: 10 launches a layer with the attention's two. Other models, and prefill on a GPU, use
the layers of transformers.

With adapters, a product uses W + alpha / r B A, or adds the adapters apart (`Joined`). With 4 bits, W is dequantized
once, or in each product.

Shapes: n packed tokens, D inputs and F outputs of a product, H query heads, K key heads, d head width.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch.nn import functional as F

from fastgrpo.policy.lora import adapter_of, base_layer
from fastgrpo.policy.model import Context, Policy
from fastgrpo.policy.quantized import NF4Linear

KNOWN = ("LlamaForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")
# Layers with the same input, in attention and MLP.
GROUPS = ((("q_proj", "k_proj", "v_proj"), ("o_proj",)), (("gate_proj", "up_proj"), ("down_proj",)))
LINEAR = torch.nn.Linear, NF4Linear  # the types whose products are known
ALLOWED = 0.05  # relative difference of the states of two 16-bit forward passes

Linears = list[torch.nn.Module]
Product = Callable[[torch.Tensor], torch.Tensor]


def obstacle(policy: Policy) -> str | None:
    """Return why `Layers` cannot replace the layers of a policy, or None."""
    module, base = policy.module, policy.module.base_model
    if type(module).__name__ not in KNOWN or not type(module).__module__.startswith("transformers.models."):
        return f"they are known for {', '.join(KNOWN)}"
    if policy.shape.hidden_act != "silu" or policy.scale != 1:
        return "its activation is not SiLU, or its logits are scaled"
    if any(each._forward_hooks or each._forward_pre_hooks for each in base.modules()):
        return "it has forward hooks"
    for linear in (linear for group in groups(policy) for linear in group):
        plain = base_layer(linear)
        dtype = getattr(plain, "compute_dtype", plain.weight.dtype)
        if type(plain) not in LINEAR or "forward" in vars(plain) or dtype != policy.dtype:
            return f"it has layers of type {type(plain).__name__}, or of another dtype or forward"
    return None


def groups(policy: Policy) -> list[Linears]:
    """Return the linear layers of all layers in the order of their use, those with the same input together."""
    return [
        [getattr(part, name) for name in names]
        for layer in policy.module.base_model.layers
        for part, groups in zip((layer.self_attn, layer.mlp), GROUPS, strict=True)
        for names in groups
    ]


@torch.inference_mode(False)  # parameters cannot become views of inference tensors
@torch.no_grad()
def adjoin(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return parameters [F_i, ...] as one tensor [sum of F_i, ...], which shares their memory.

    Unless they are already adjacent, they are moved: each becomes a view of the whole. They stay ordinary parameters.
    """
    first, place = tensors[0].detach(), tensors[0].storage_offset()
    adjacent = True
    for tensor in tensors:
        same = tensor.untyped_storage()._cdata == first.untyped_storage()._cdata
        adjacent &= same and tensor.storage_offset() == place and tensor.is_contiguous()
        place += tensor.numel()
    if adjacent:
        return first.as_strided((sum(map(len, tensors)), *first.shape[1:]), first.stride())
    whole = torch.cat([tensor.detach() for tensor in tensors])
    for tensor, part in zip(tensors, whole.split([len(tensor) for tensor in tensors]), strict=True):
        tensor.data = part
    return whole


class Joined:
    """The product of linear layers with the same input, with weights that their parameters share.

    Adapters are added apart: one product for all A, and one launch for each B. Weights of 4 bits are not joined. If
    given, `weight` [F, D] includes the adapters and replaces the parameters.
    """

    def __init__(self, linears: Linears, weight: torch.Tensor | None = None) -> None:
        plain = [base_layer(linear) for linear in linears]
        adapters = [adapter_of(linear) for linear in linears] if weight is None else []
        self.quantized = plain if weight is None and isinstance(plain[0], NF4Linear) else []
        self.weight = weight
        if weight is None and not self.quantized:
            self.weight = adjoin([each.weight for each in plain])
        self.bias = None if plain[0].bias is None else adjoin([each.bias for each in plain])
        self.down, self.ups, row, column = None, [], 0, 0
        for each, adapter in zip(plain, adapters, strict=False):
            if adapter:
                down, up, scale = adapter
                spans = slice(row, row + len(up)), slice(column, column + len(down))
                self.ups.append((*spans, up.detach().T, scale))
                column += len(down)
            row += each.out_features
        if self.ups:
            self.down = adjoin([adapter[0] for adapter in adapters if adapter])

    def __call__(self, states: torch.Tensor) -> torch.Tensor:
        """Compute [n, F] of states [n, D]."""
        if self.quantized:
            out = torch.cat([each(states) for each in self.quantized], 1)
        else:
            out = F.linear(states, self.weight, self.bias)
        if self.down is not None:
            inner = F.linear(states, self.down)
            for rows, columns, up, scale in self.ups:
                out[:, rows].addmm_(inner[:, columns], up, alpha=scale)
        return out


class Layer(NamedTuple):
    """One layer: transformers' modules for its norms and sizes, and its products."""

    module: Any
    qkv: Product
    out: Product
    gate_up: Product
    down: Product


class Layers:
    """The forward pass of a policy's layers.

    The policy must have no `obstacle`, and `products` holds one product for each of its `groups`. With `fused`, which
    uses the Triton kernels, the context must be a `DecodeAttention`.
    """

    def __init__(self, policy: Policy, products: Sequence[Product], fused: bool) -> None:
        self.base, self.heads, self.fused = policy.module.base_model, policy.shape.num_attention_heads, fused
        of_layers = [products[i : i + 4] for i in range(0, len(products), 4)]
        self.layers = [Layer(each, *own) for each, own in zip(self.base.layers, of_layers, strict=True)]
        self.norms = [self._norms(layer.module.self_attn) for layer in self.layers]

    def _norms(self, attention):
        """Return the weights of Qwen3's norms of queries and keys, and their epsilon."""
        if not hasattr(attention, "q_norm"):
            return None, 0.0
        return (attention.q_norm.weight, attention.k_norm.weight), attention.q_norm.variance_epsilon

    def states(self, input_ids: torch.Tensor, position_ids: torch.Tensor, context: Context) -> torch.Tensor:
        """Compute the same as `Policy.states`, without gradients."""
        if self.fused:
            from fastgrpo.kernels.layer import add_rms_norm, silu_mul
        else:
            add_rms_norm, silu_mul = _add_rms_norm, _silu_mul

        def normed(added, norm):
            return add_rms_norm(hidden, added, norm.weight, norm.variance_epsilon)

        hidden, added = self.base.embed_tokens(input_ids), None
        cos, sin = (angles[0] for angles in self.base.rotary_emb(hidden[None], position_ids[None]))
        attend = self._attend_fused if self.fused else self._attend
        if not self.fused:  # rotate_half(x) sin is x, with its halves exchanged, times this
            sin = torch.cat([-sin[:, : sin.shape[1] // 2], sin[:, sin.shape[1] // 2 :]], 1)
        for layer, norms in zip(self.layers, self.norms, strict=True):
            attention = layer.module.self_attn
            packed = layer.qkv(normed(added, layer.module.input_layernorm)).unflatten(1, (-1, attention.head_dim))
            attended = attend(attention, packed, cos, sin, norms, context)
            added = layer.out(attended.flatten(1))
            added = layer.down(silu_mul(layer.gate_up(normed(added, layer.module.post_attention_layernorm))))
        return normed(added, self.base.norm)

    def _attend_fused(self, attention, packed, cos, sin, norms, context):
        from fastgrpo.kernels.layer import rotate_and_store

        key, value = packed[:, self.heads :].transpose(0, 1).chunk(2)
        cache = context.slots.cache(attention.layer_idx, key, value)
        query = rotate_and_store(packed, cos, sin, cache.keys, cache.values, context.token_index, *norms)
        return context.provider.attend(query, cache, attention.scaling)

    def _attend(self, attention, packed, cos, sin, norms, context):
        kv_heads = (packed.shape[1] - self.heads) // 2
        turned, value = packed.split([self.heads + kv_heads, kv_heads], 1)
        weights, eps = norms
        if weights:
            scales = [weight.expand(count, -1) for weight, count in zip(weights, (self.heads, kv_heads), strict=True)]
            turned = F.rms_norm(turned, turned.shape[2:], eps=eps) * torch.cat(scales)
        turned = turned * cos[:, None] + turned.roll(turned.shape[2] // 2, 2) * sin[:, None]
        query, key = turned.split([self.heads, kv_heads], 1)
        query, key, value = (x.transpose(0, 1) for x in (query, key, value))
        return context.attend(attention.layer_idx, query, key, value, attention.scaling)

    def difference(
        self, policy: Policy, input_ids: torch.Tensor, position_ids: torch.Tensor, context: Context
    ) -> str | None:
        """Return how the hidden states differ from those of transformers' layers, as text; None if they agree."""
        with torch.inference_mode():
            expected = policy.states(input_ids, position_ids, context).float()
            found = self.states(input_ids, position_ids, context).float()
        error = ((found - expected).norm() / expected.norm().clamp(min=1e-30)).item()
        return None if error <= ALLOWED else f"states differ by {error:.3g} of their norm ({ALLOWED} is allowed)"


def _add_rms_norm(hidden, added, weight, eps):
    if added is not None:
        hidden += added
    return F.rms_norm(hidden, weight.shape, weight, eps)


def _silu_mul(packed):
    gate, up = packed.chunk(2, -1)
    return F.silu(gate).mul_(up)

"""Norms and gated MLPs that keep fewer activations on a CPU, as liger-kernel's do on a GPU.

Autograd keeps what each single operation read. Here the backward pass computes again what takes only a few operations
for each number: the scaled states of a norm, and the SiLU of a gate. The forward pass is transformers', to the bit.

Shapes: N tokens, h hidden size, f width of the MLP.
"""

from functools import partial

import torch
from torch.autograd.function import once_differentiable
from transformers import PreTrainedModel
from transformers.activations import ACT2CLS
from transformers.models.llama.modeling_llama import LlamaMLP, LlamaRMSNorm

SILU = ACT2CLS["silu"], torch.nn.SiLU


class RMSNorm(torch.autograd.Function):
    """y = w x r with r = 1 / sqrt(mean(x^2) + eps), https://arxiv.org/abs/1910.07467. It keeps x and r.

    With n = x r and dn = w dy the gradients are dx = r (dn - n mean(dn n)) and dw = the sum of n dy over the tokens.
    """

    @staticmethod
    def forward(ctx, states: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        """Compute the norm.

        Args:
            states: [..., h] x.
            weight: [h] w.
            eps: Keeps the root from being 0.

        Returns:
            [..., h] y.
        """
        scale = torch.rsqrt(states.pow(2).mean(-1, keepdim=True) + eps)
        ctx.save_for_backward(states, weight, scale)
        return (states * scale).mul_(weight)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: torch.Tensor) -> tuple[torch.Tensor | None, torch.Tensor | None, None]:
        """Compute the gradients.

        Args:
            grad: [..., h] dy.

        Returns:
            dx [..., h] and dw [h], None where it is not wanted, and None for eps.
        """
        states, weight, scale = ctx.saved_tensors
        normed, of_states, of_weight = states * scale, None, None
        if ctx.needs_input_grad[1]:
            of_weight = (grad * normed).flatten(0, -2).sum(0)
        if ctx.needs_input_grad[0]:
            of_states = grad * weight
            shared = (of_states * normed).mean(-1, keepdim=True)
            of_states.sub_(normed.mul_(shared)).mul_(scale)
        return of_states, of_weight, None


class SwiGLU(torch.autograd.Function):
    """y = silu(gate) up, https://arxiv.org/abs/2002.05202. It keeps gate and up, and not silu(gate).

    The gradients are d up = silu(gate) dy and d gate = silu'(gate) up dy.
    """

    @staticmethod
    def forward(ctx, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        """Compute the gated states.

        Args:
            gate: [..., f].
            up: [..., f].

        Returns:
            [..., f] y.
        """
        ctx.save_for_backward(gate, up)
        return torch.nn.functional.silu(gate).mul_(up)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Compute the gradients.

        Args:
            grad: [..., f] dy.

        Returns:
            d gate and d up, [..., f] each.
        """
        gate, up = ctx.saved_tensors
        return torch.ops.aten.silu_backward(grad * up, gate), torch.nn.functional.silu(gate).mul_(grad)


def apply_lean(model: PreTrainedModel) -> None:
    """Let norms and MLPs of a model on a CPU in fp32 keep less, where they compute what Llama's do."""
    if not _serves(model.device, model.dtype):
        return
    for module, forward in _replaceable(model):
        vars(module)["forward"] = partial(forward, module)


def would_keep_less(model: PreTrainedModel, dtype: torch.dtype, device: torch.device) -> bool:
    """Tell whether `apply_lean` would replace norms and MLPs of a model, once it is on a device in a dtype."""
    return _serves(device, dtype) and len({forward for _, forward in _replaceable(model)}) == 2


def _serves(device, dtype):
    return device.type == "cpu" and dtype == torch.float32


def _replaceable(model):
    """Find the norms and MLPs that compute what Llama's do, each with the function that replaces its forward."""
    for module in model.modules():
        if "forward" in vars(module):  # replaced already, as offloading does it
            continue
        if _computes_as(module, LlamaRMSNorm):
            yield module, _norm
        elif _computes_as(module, LlamaMLP) and isinstance(module.act_fn, SILU):
            yield module, _mlp


def _computes_as(module, known):
    """Tell whether the forward function of a module is a copy of that of a known class: transformers has many."""
    mine, code = getattr(type(module).forward, "__code__", None), known.forward.__code__
    return mine is not None and all(
        getattr(mine, part) == getattr(code, part) for part in ("co_code", "co_names", "co_consts")
    )


def _norm(module, hidden_states):
    if not hidden_states.dtype == module.weight.dtype == torch.float32:  # another precision rounds on the way
        return type(module).forward(module, hidden_states)
    return RMSNorm.apply(hidden_states, module.weight, module.variance_epsilon)


def _mlp(module, x):
    return module.down_proj(SwiGLU.apply(module.gate_proj(x), module.up_proj(x)))

"""Linear layers with quantized weights: int8 of torchao, and NF4 with the kernels of bitsandbytes.

NF4 (QLoRA, arXiv 2305.14314, section 3): a weight is one of 16 levels, times the largest magnitude of its block of 64.
Matrix products run in the model's dtype. A weight is dequantized for one product at a time, also in the backward pass.
"""

import torch
from torch.nn import functional as F
from transformers import PreTrainedModel

from fastgrpo.policy.lora import ADAPTER

NF4_BLOCK = 64  # weights that share a scale


class NF4Linear(torch.nn.Linear):
    """A frozen linear layer with a 4-bit weight.

    `weight` holds bytes: two levels in each of the first F D / 2, then the fp32 scales of the blocks. As one tensor of
    integers, it is saved, moved and shared like any parameter, and never cast. peft's adapters get `compute_dtype`.
    """

    def __init__(self, linear: torch.nn.Linear, device: torch.device) -> None:
        super().__init__(linear.in_features, linear.out_features, bias=False, device="meta")
        weight = linear.weight.detach().to(device)
        self.compute_dtype, self.bias = weight.dtype, linear.bias
        if weight.is_meta:
            packed = weight.new_empty(weight.numel() // 2 + weight.numel() // NF4_BLOCK * 4, dtype=torch.uint8)
        else:
            levels, scales = torch.ops.bitsandbytes.quantize_4bit(weight, NF4_BLOCK, "nf4", torch.uint8)
            packed = torch.cat([levels.flatten(), scales.view(torch.uint8)])
        self.weight = torch.nn.Parameter(packed, requires_grad=False)

    def dequantized(self) -> torch.Tensor:
        """Return the weight [F, D] in `compute_dtype`."""
        shape = self.out_features, self.in_features
        if self.weight.is_meta:
            return self.weight.new_empty(shape, dtype=self.compute_dtype)
        half = shape[0] * shape[1] // 2
        levels, scales = self.weight[:half], self.weight[half:].view(torch.float32)
        return torch.ops.bitsandbytes.dequantize_4bit(levels, scales, NF4_BLOCK, "nf4", shape, self.compute_dtype)

    def dense(self, weight: torch.nn.Parameter) -> torch.nn.Linear:
        """Return an ordinary layer with the bias of this one, and a weight [F, D]."""
        layer = torch.nn.Linear(self.in_features, self.out_features, bias=False, device="meta")
        layer.weight, layer.bias = weight, self.bias
        return layer

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        """Compute [..., F] of states [..., D]."""
        return _Product.apply(states, self)


class _Product(torch.autograd.Function):
    """states @ weight.T + bias with a frozen layer: autograd keeps no dequantized weight."""

    @staticmethod
    def forward(ctx, states, layer):
        ctx.layer = layer
        return F.linear(states, layer.dequantized(), layer.bias)

    @staticmethod
    def backward(ctx, gradient):
        return gradient @ ctx.layer.dequantized(), None


def quantize(model: PreTrainedModel, name: str, device: torch.device | str) -> PreTrainedModel:
    """Quantize all linear layers of a model except the head and adapters, and move the model to a device.

    The linear layers are or will be frozen. `name` is int8 or nf4. On `device` the model computes, and nf4 is quantized
    there, one weight at a time.
    """
    device, lm_head = torch.device(device), model.get_output_embeddings()
    if name == "int8":
        from torchao.quantization import Int8WeightOnlyConfig, quantize_

        config = Int8WeightOnlyConfig(set_inductor_config=False)  # inductor's config also enables TF32
        quantize_(
            model, config, lambda module, _: isinstance(module, torch.nn.Linear) and module is not lm_head, device
        )
        return model.to(device)
    if device.type != "meta":
        import bitsandbytes  # noqa: F401 - it registers its operators
    # Skip subclasses such as routers, which may compute something else, and the vision tower, which never runs.
    own = {*model.get_decoder().modules()} - {lm_head}
    named = [(path, it) for path, it in model.named_modules() if type(it) is torch.nn.Linear and it in own]
    # Mamba's layers use the weight of dt_proj itself.
    linear = [(path, it) for path, it in named if ADAPTER not in path and not path.endswith("dt_proj")]
    if not linear:
        raise ValueError(f"{type(model).__name__} has no torch.nn.Linear to store in nf4; leave out load_in_4bit")
    for path, module in linear:
        if module.in_features % NF4_BLOCK:
            raise ValueError(
                f"{path} has {module.in_features} inputs, but nf4 needs a multiple of {NF4_BLOCK}; leave out "
                "load_in_4bit, or use ref_storage=int8"
            )
        model.set_submodule(path, NF4Linear(module, device))
    return model.to(device)

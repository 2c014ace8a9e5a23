"""Quantized linear layers for a frozen model."""

import torch
from transformers import PreTrainedModel

NF4_BLOCK = 64  # how many weights share a scale


def quantize(model: PreTrainedModel, name: str, device: torch.device | str) -> PreTrainedModel:
    """Quantize all linear layers of a frozen model except the head, and move the model to a device.

    The matrix products still run in the model's dtype.
    """
    device = torch.device(device)
    lm_head = model.get_output_embeddings()
    if name == "int8":
        try:
            from torchao.quantization import Int8WeightOnlyConfig, quantize_
        except ImportError:
            raise ValueError("ref_quantization=int8 needs torchao: pip install 'fastgrpo[quantization]'") from None
        config = Int8WeightOnlyConfig(set_inductor_config=False)  # inductor's would also switch TF32 on
        quantize_(
            model, config, lambda module, _: isinstance(module, torch.nn.Linear) and module is not lm_head, device
        )
        return model.to(device)
    try:
        from bitsandbytes.nn import Linear4bit, Params4bit
    except ImportError:
        raise ValueError("ref_quantization=nf4 needs bitsandbytes: pip install 'fastgrpo[quantization]'") from None
    for path, module in list(model.named_modules()):
        if isinstance(module, torch.nn.Linear) and module is not lm_head:
            weight = module.weight
            if device.type == "cpu" and module.in_features % NF4_BLOCK:
                raise ValueError(
                    f"{path} has {module.in_features} inputs: on a CPU bitsandbytes reads nf4 weights wrongly unless "
                    f"that is a multiple of {NF4_BLOCK}; use ref_quantization=int8, or a GPU"
                )
            layer = Linear4bit(
                module.in_features, module.out_features, bias=False, compute_dtype=weight.dtype, quant_type="nf4",
                device="meta",
            )  # fmt: skip
            layer.weight = Params4bit(weight.data, requires_grad=False, quant_type="nf4", module=layer)
            layer.bias = module.bias
            model.set_submodule(path, layer.to(device))  # moving the layer quantizes its weight
    return model.to(device)

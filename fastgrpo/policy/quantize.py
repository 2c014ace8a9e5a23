"""Quantized linear layers for a frozen model."""

import torch

NF4_BLOCK = 64  # weights that share a scale


def quantize(model, name, device):
    """Quantize the linear layers of a frozen model that lies on the CPU, all but the head, and move it.

    Args:
        name: "int8", weights in 8 bits with one scale a row (torchao), or "nf4", 4-bit NormalFloat in blocks of 64
            (bitsandbytes; QLoRA, arXiv 2305.14314).

    Returns:
        the model, on the device. Its products run in the model's dtype.

    Raises:
        ValueError: the package is not installed, or (nf4 on a CPU) a layer's inputs are no multiple of 64.
    """
    device = torch.device(device)
    lm_head = model.get_output_embeddings()
    if name == "int8":
        try:
            from torchao.quantization import Int8WeightOnlyConfig, quantize_
        except ImportError:
            raise ValueError("ref_quantization=int8 needs torchao: pip install 'fastgrpo[quantization]'") from None
        config = Int8WeightOnlyConfig(set_inductor_config=False)  # which would also turn TF32 on
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
                    f"{path} has {module.in_features} inputs: on a CPU bitsandbytes reads nf4 weights wrongly where "
                    f"these are no multiple of {NF4_BLOCK}; use ref_quantization=int8, or a GPU"
                )
            layer = Linear4bit(
                module.in_features, module.out_features, bias=False, compute_dtype=weight.dtype, quant_type="nf4",
                device="meta",
            )  # fmt: skip
            layer.weight = Params4bit(weight.data, requires_grad=False, quant_type="nf4", module=layer)
            layer.bias = module.bias
            model.set_submodule(path, layer.to(device))  # the move quantizes
    return model.to(device)

"""The memory that a run will take, computed from its settings and from the model's config, without any weights."""

import math
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from fastgrpo.config.settings import GRPOConfig
from fastgrpo.kernels.chunked import chunk_rows
from fastgrpo.loss.checks import HAS_TRITON
from fastgrpo.policy.files import loading, read_config, read_json
from fastgrpo.policy.gguf import find_gguf
from fastgrpo.policy.lora import add_lora
from fastgrpo.rollout.geometry import fit, head_dim, kv_token_bytes
from fastgrpo.rollout.providers import make_provider

FP32 = 4  # bytes of a number


@dataclass(frozen=True)
class Part:
    """One part of a run's memory.

    Attributes:
        name: What the memory is for.
        bytes: How much memory the part takes, in bytes.
        how: How the bytes come about, as a text for people, such as "64 parameters x 2 bytes".
        ppo: Whether only PPO needs the part. Such parts are there to be compared with.
    """

    name: str
    bytes: int
    how: str
    ppo: bool = False


def outline(path: str, trust_remote_code: bool = False) -> PreTrainedModel:
    """Build a causal LM without weights from its config. Nothing is downloaded.

    Args:
        path: A folder with the config, a GGUF file, or a hub id whose config is in the hub's cache.
        trust_remote_code: Whether Python code that comes with the model may run.

    Returns:
        The model on torch's meta device.

    Raises:
        ValueError: There is no config, or it is not one of a causal LM.
    """
    files = ("config.json", "adapter_config.json")
    local = Path(path).is_dir() or find_gguf(path) is not None
    if not local and not any(read_json(path, file, local_files_only=True) for file in files):
        raise ValueError(
            f"no config of a causal LM at {str(path)!r}, neither as a folder nor in the hub's cache (nothing is "
            "downloaded here)"
        )
    config = read_config(path, trust_remote_code, local_files_only=True)
    with loading(path, "config.json"), torch.device("meta"):
        return AutoModelForCausalLM.from_config(config, trust_remote_code=trust_remote_code)


def plan(
    config: GRPOConfig, model: PreTrainedModel, *, dtype: torch.dtype, device: torch.device, prompt_tokens: int
) -> list[Part]:
    """Compute the parts of a run's memory.

    Activations are not among them. With gradient_checkpointing they are small beside the rest, and without it they
    depend on the architecture.

    Args:
        config: The settings of the run.
        model: The model as `outline` builds it. It is changed: it gets `dtype`, and with use_peft adapters.
        dtype: The dtype of the model's weights.
        device: The device that the run is on.
        prompt_tokens: The length of a typical prompt, in tokens.

    Returns:
        The parts, in the order in which a run allocates them.
    """
    model = model.to(dtype)
    reference = _reference(config, model)
    if config.use_peft:
        add_lora(
            model, r=config.lora_r, alpha=config.lora_alpha, target_modules=config.lora_target_modules
        )  # fmt: skip
    count = sum(parameter.numel() for parameter in model.parameters())
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    moved = sum(parameter.numel() for parameter in trained)
    masters = FP32 * sum(parameter.numel() for parameter in trained if parameter.dtype != torch.float32)
    optimizer = masters + 2 * FP32 * moved
    optimizer_how = f"{moved:,} x (2 Adam states{' + a master' if masters else ''}) x 4 bytes"

    shape = model.config.get_text_config()
    token = kv_token_bytes(shape, dtype)
    limits = [config.max_completion_length] * config.num_generations
    requests = [(prompt_tokens, limits)] * config.oversampled(config.prompts_per_step)
    provider = make_provider(config.rollout_attention, device, dtype, head_dim(shape), prompt_tokens)
    flat = provider.flat or config.rollout_backend == "hf"
    slots = fit(requests, config.max_num_seqs, token, math.inf, flat)
    tokens = f"{slots.lanes} completions x {slots.lane_tokens} tokens"
    if not flat:
        tokens = f"({slots.prompts} prompts x {slots.longest_prompt} tokens + {tokens})"

    vocabulary, hidden = model.get_output_embeddings().weight.shape
    # Without Triton: the logits, with the full KL those of the reference and as many to compute with, and the slope of
    # the soft-cap.
    capped = getattr(shape, "final_logit_softcapping", None) is not None
    chunk, logit = chunk_rows(vocabulary), FP32 * (1 + 2 * config.objective.full_kl + capped)
    if not config.objective.full_kl and device.type == "cuda" and HAS_TRITON:
        from fastgrpo.kernels.launch import CHUNK_ROWS

        chunk, logit = CHUNK_ROWS, dtype.itemsize
    chunk = min(chunk, config.max_tokens_per_microbatch)
    head_gradient = 0 if config.use_peft else vocabulary * hidden * FP32
    same = "the same as for the policy"
    return [
        Part("policy", count * dtype.itemsize, f"{count:,} parameters x {dtype.itemsize} bytes"),
        Part("gradients", moved * FP32, f"{moved:,} x 4 bytes (fp32)"),
        Part("optimizer", optimizer, optimizer_how),
        reference,
        Part(
            "keys and values", slots.tokens * token,
            f"{tokens} x {token:,} bytes; at most the share rollout_memory_utilization of the memory that is free",
        ),
        Part("logits of a draw", slots.lanes * vocabulary * FP32, f"{slots.lanes} x {vocabulary:,} x 4 bytes"),
        Part(
            "head", chunk * vocabulary * logit + head_gradient,
            f"a chunk of {chunk} x {vocabulary:,} x {logit} bytes"
            + (", and its weight's gradient in fp32" if head_gradient else ""),
        ),
        Part("value model", count * dtype.itemsize, same, ppo=True),
        Part("its gradients", moved * FP32, same, ppo=True),
        Part("its optimizer", optimizer, same, ppo=True),
    ]  # fmt: skip


def _reference(config, model):
    """Compute the part of the reference that `make_reference` would make of this model, which has no adapters yet."""
    size = sum(parameter.nbytes for parameter in model.parameters())
    if config.beta == 0:
        return Part("reference", 0, "none: beta is 0")
    if config.use_peft:
        return Part("reference", 0, "none: it is the policy with its adapters off")
    if config.ref_device is not None:
        return Part("reference", 0, f"{size:,} bytes of host memory, streamed to the device layer by layer")
    if config.ref_quantization is None:
        return Part("reference", size, "a copy of the policy")
    head = model.get_output_embeddings()
    linear = [m.weight for m in model.modules() if isinstance(m, torch.nn.Linear) and m is not head]
    count, bits = sum(weight.numel() for weight in linear), {"int8": 8, "nf4": 4}[config.ref_quantization]
    rest = size - sum(weight.nbytes for weight in linear)
    return Part(
        "reference",
        count * bits // 8 + rest,
        f"{count:,} weights x {bits} bits without their scales, and the rest as in the policy",
    )

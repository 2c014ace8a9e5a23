"""The plan of a run's memory, computed from its settings and from the model's config, without any weights.

`python -m fastgrpo.doctor --model` prints it. A run makes it before the weights are loaded: one that does not fit into
its GPU is refused, `--gradient_checkpointing auto` is chosen by it, and rollouts get a share of what it leaves.
"""

import dataclasses
import math
from pathlib import Path

import torch
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from fastgrpo.config.settings import GRPOConfig, TrainingConfig
from fastgrpo.kernels.chunked import chunk_rows
from fastgrpo.loss.checks import HAS_TRITON
from fastgrpo.policy.liger_layers import would_apply
from fastgrpo.policy.load import choose_device, choose_dtype
from fastgrpo.policy.lora import add_lora
from fastgrpo.policy.model import head_dim
from fastgrpo.rollout.geometry import fit, kv_token_bytes, memory_left
from fastgrpo.rollout.providers import choose_provider
from fastgrpo.step.activations import activation_bytes
from fastgrpo.step.budget import PROMPT_TOKENS, Part, Plan, gib
from fastgrpo.step.outline import outline, outline_of, unplannable

FP32 = 4  # bytes of a number


def plan_run(config: TrainingConfig, model: str | Path | PreTrainedModel, room: float | None = None) -> Plan | None:
    """Make the plan of a run that is about to begin, before its weights are loaded.

    Args:
        config: The settings of the run.
        model: What the run trains: a folder, hub id or GGUF file, or a model, which is not changed.
        room: Bytes that the run may take on its device. None stands for what is free on a GPU, and for no limit on a
            CPU.

    Returns:
        The plan. None for a model that is `unplannable`: loading it refuses it, or gives it to the hf backend.
    """
    if not isinstance(model, (str, Path, PreTrainedModel)):
        return None
    device = choose_device(config.device)
    if room is None and device.type == "cpu":
        room = math.inf
    elif room is None:
        parameters = model.parameters() if isinstance(model, PreTrainedModel) else ()
        room = memory_left(device) + sum(p.nbytes for p in parameters if p.device.type == device.type)
    outlined = outline(model, config.trust_remote_code, download=True) if isinstance(model, (str, Path)) else model
    if unplannable(outlined):
        return None
    if outlined is model:
        outlined = outline_of(model)
    return plan(config, outlined, dtype=choose_dtype(config.dtype, device), device=device, room=room)


def plan(
    config: TrainingConfig,
    model: PreTrainedModel,
    *,
    dtype: torch.dtype,
    device: torch.device,
    prompt_tokens: int = PROMPT_TOKENS,
    room: float = math.inf,
) -> Plan:
    """Compute the parts of a run's memory, and choose gradient checkpointing where it is auto.

    On a CPU, auto is on. On a GPU it is on unless without it the rollouts still get all keys and values that they want.

    Args:
        config: The settings of the run.
        model: The model as `outline` builds it. It is changed: it gets `dtype`, and with use_peft adapters.
        dtype: The dtype of the model's weights.
        device: The device that the run is on.
        prompt_tokens: The length of a typical prompt, in tokens.
        room: Bytes of the device that the run may take.

    Returns:
        The plan.
    """
    model = model.to(dtype)
    reference = _reference(config, model)
    if config.use_peft:
        add_lora(
            model, r=config.lora_r, alpha=config.lora_alpha, target_modules=config.lora_target_modules
        )  # fmt: skip
    share = config.rollout_memory_utilization if config.rollout_backend == "fast" else 1.0
    slots, one_group, lanes = _slots(config, model, dtype, device, prompt_tokens, share)
    parts = [*_weights(config, model, dtype), reference, *_head(config, model, dtype, device, lanes)]

    def with_checkpointing(on, why):
        activations = _activations(config, model, dtype, device, prompt_tokens, on)
        made = Plan([*parts, *activations], slots, one_group, share, room, on, why)
        allowed = share * (room - made.fixed)
        if slots.bytes <= allowed:
            return made, True
        how = f"{share:g} of what the other parts leave; rollouts would fill {gib(slots.bytes)}: {slots.how}"
        fewer = dataclasses.replace(slots, bytes=max(one_group, int(allowed)), how=how)
        return dataclasses.replace(made, slots=fewer), False

    if config.gradient_checkpointing != "auto":
        return with_checkpointing(config.gradient_checkpointing, "as gradient_checkpointing says")[0]
    if device.type == "cpu" and math.isinf(room):
        return with_checkpointing(True, "auto is on on a CPU")[0]
    without, fits = with_checkpointing(False, "the activations of all layers fit beside everything else")
    if fits:
        return without
    return with_checkpointing(True, "the activations of all layers would not fit beside everything else")[0]


def _weights(config, model, dtype):
    """Compute the parts of the policy, its gradients and its optimizer, and what PPO's value model would add."""
    count = sum(parameter.numel() for parameter in model.parameters())
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    moved = sum(parameter.numel() for parameter in trained)
    masters = FP32 * sum(parameter.numel() for parameter in trained if parameter.dtype != torch.float32)
    gradients, optimizer = moved * FP32, masters + 2 * FP32 * moved
    optimizer_how = f"{moved:,} x (2 Adam states{' + a master' if masters else ''}) x 4 bytes"
    same = "the same as for the policy"
    lora = () if config.use_peft else ("--use_peft True",)
    return [
        Part("policy", count * dtype.itemsize, f"{count:,} parameters x {dtype.itemsize} bytes"),
        Part("gradients", gradients, f"{moved:,} x 4 bytes (fp32)", saved_by=dict.fromkeys(lora, gradients)),
        Part("optimizer", optimizer, optimizer_how, saved_by=dict.fromkeys(lora, optimizer)),
        Part("value model", count * dtype.itemsize, same, ppo=True),
        Part("its gradients", moved * FP32, same, ppo=True),
        Part("its optimizer", optimizer, same, ppo=True),
    ]


def _slots(config, model, dtype, device, prompt_tokens, share):
    """Compute the part of keys and values, the bytes of one group of them, and the number of lanes.

    Supervised training draws only in evaluations, which take what is left.
    """
    if not isinstance(config, GRPOConfig):
        return Part("keys and values", 0, "evaluations take a share of what is left"), 0, 0
    shape = model.config.get_text_config()
    token = kv_token_bytes(shape, dtype)
    longest = config.max_completion_length

    def group_of(limit):
        return prompt_tokens, [limit] * config.num_generations

    wanted = [group_of(longest)] * config.oversampled(config.prompts_per_step)
    attention = "sdpa"  # the hf backend, too, has a copy of the prompt for each completion
    if config.rollout_backend == "fast":
        attention = choose_provider(config.rollout_attention, device, dtype, head_dim(shape), prompt_tokens)
    flat = attention == "sdpa"
    slots, one, shorter = (
        fit(requests, config.max_num_seqs, token, math.inf, flat)
        for requests in (wanted, wanted[:1], [group_of(longest // 2)])
    )
    tokens = f"{slots.lanes} completions x {slots.lane_tokens} tokens"
    if not flat:
        tokens = f"({slots.prompts} prompts x {slots.longest_prompt} tokens + {tokens})"
    one_group = one.tokens * token
    saved_by = {
        "--rollout_memory_utilization 1": math.ceil(one_group / share) - one_group,
        f"--max_completion_length {longest // 2}": int((one.tokens - shorter.tokens) * token / share),
    }
    part = Part("keys and values", slots.tokens * token, f"{tokens} x {token:,} bytes", saved_by=saved_by)
    return part, one_group, slots.lanes


def _head(config, model, dtype, device, lanes):
    """Compute the parts of the head, which come and go within a step."""
    weight = model.get_output_embeddings().weight
    vocabulary, hidden = weight.shape
    # Without Triton: the logits, with the full KL those of the reference and as many to compute with, and the slope of
    # the soft-cap.
    full_kl = isinstance(config, GRPOConfig) and config.objective.full_kl
    capped = getattr(model.config.get_text_config(), "final_logit_softcapping", None) is not None
    chunk, logit = chunk_rows(vocabulary), FP32 * (1 + 2 * full_kl + capped)
    if not full_kl and device.type == "cuda" and HAS_TRITON:
        from fastgrpo.kernels.launch import CHUNK_ROWS

        chunk, logit = CHUNK_ROWS, dtype.itemsize
    budget = config.max_tokens_per_microbatch
    chunk, half = min(chunk, budget), min(chunk, budget // 2)
    gradient = vocabulary * hidden * FP32 * weight.requires_grad
    # Autograd holds the gradient of a tied head until that of the embedding is there, at the very end.
    tied = weight is model.get_input_embeddings().weight
    return [
        Part("logits of a draw", lanes * vocabulary * FP32, f"{lanes} x {vocabulary:,} x 4 bytes", times=("draw",)),
        Part(
            "head", chunk * vocabulary * logit, f"a chunk of {chunk} x {vocabulary:,} x {logit} bytes", times=("head",),
            saved_by={f"--max_tokens_per_microbatch {budget // 2}": (chunk - half) * vocabulary * logit},
        ),
        Part(
            "head's gradient", gradient, f"{vocabulary:,} x {hidden} x 4 bytes" if gradient else "none: it is frozen",
            times=("head", "layers") if tied else ("head",), saved_by={"--use_peft True": gradient} if gradient else {},
        ),
    ]  # fmt: skip


def _activations(config, model, dtype, device, prompt_tokens, checkpointing):
    """Compute the parts of the activations of the largest micro-batch, see activations.py."""
    fused = would_apply(model, config.use_liger_kernel, device)
    longest = prompt_tokens + config.max_completion_length  # it stands alone if it is above the budget
    # How long examples are is not known before there is a tokenizer.
    in_all, supervised = math.inf, not isinstance(config, GRPOConfig)
    if not supervised:
        in_all = config.prompts_per_step * (prompt_tokens + config.num_generations * config.max_completion_length)

    def of(budget, checkpointing):
        tokens = max(min(budget, in_all), longest)
        return tokens, activation_bytes(model, dtype, tokens, checkpointing=checkpointing, fused=fused)

    budget = config.max_tokens_per_microbatch
    tokens, sizes = of(budget, checkpointing)
    others = {f"--max_tokens_per_microbatch {budget // 2}": of(budget // 2, checkpointing)[1]}
    if not checkpointing:
        others["--gradient_checkpointing True"] = of(budget, True)[1]
    saved = [{flag: size - other[i] for flag, other in others.items()} for i, size in enumerate(sizes)]
    again = ", whose layers are computed again" if checkpointing else ""
    most = "at most " * supervised
    about = (
        ("activations", f"{most}{tokens:,} tokens of a micro-batch{again}", ("head", "layers")),
        ("the head's inputs", f"{most}{tokens:,} tokens and their gradients", ("head",)),
        ("a layer's backward", f"{most}{tokens:,} tokens in one layer", ("layers",)),
    )
    return [
        Part(name, size, how, times=times, at_most=supervised, saved_by=saved_by)
        for (name, how, times), size, saved_by in zip(about, sizes, saved, strict=True)
    ]


def _reference(config, model):
    """Compute the part of the reference that `make_reference` would make of this model, which has no adapters yet."""
    size = sum(parameter.nbytes for parameter in model.parameters())
    if not isinstance(config, GRPOConfig):
        return Part("reference", 0, "none: supervised training has none")
    if config.beta == 0:
        return Part("reference", 0, "none: beta is 0")
    if config.use_peft:
        return Part("reference", 0, "none: it is the policy with its adapters off")
    if config.ref_device is not None:
        return _streamed(model, size)
    without = dict.fromkeys(("--use_peft True", "--beta 0"), size)
    if config.ref_quantization is None:
        without["--ref_device cpu"] = size
        if not config.sync_ref_model:
            without["--ref_quantization nf4"] = size - _quantized(model, "nf4")[0]
        return Part("reference", size, "a copy of the policy", saved_by=without)
    size, how = _quantized(model, config.ref_quantization)
    return Part("reference", size, how, saved_by=dict.fromkeys(without, size))


def _streamed(model, size):
    """Compute the part of a reference in host memory: two layers on the device, and what lies beside the layers."""
    layers = [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]
    sizes = [sum(parameter.nbytes for parameter in layer.parameters()) for layer in layers]
    there = 2 * max(sizes) + size - sum(sizes)
    how = f"two layers, embedding and head; {size:,} bytes of host memory, streamed to the device layer by layer"
    return Part("reference", there, how, times=("reference",))


def _quantized(model, quantization):
    """Compute the bytes of a copy whose linear layers are quantized, and say how they come about."""
    head, size = model.get_output_embeddings(), sum(parameter.nbytes for parameter in model.parameters())
    linear = [m.weight for m in model.modules() if isinstance(m, torch.nn.Linear) and m is not head]
    count, bits = sum(weight.numel() for weight in linear), {"int8": 8, "nf4": 4}[quantization]
    rest = size - sum(weight.nbytes for weight in linear)
    how = f"{count:,} weights x {bits} bits without their scales, and the rest as in the policy"
    return count * bits // 8 + rest, how

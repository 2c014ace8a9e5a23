"""The plan of a run's memory on each device, computed from its settings and the model's config, without any weights.

`python -m fastgrpo.doctor --model` prints it. A run makes it before the weights are loaded: one that does not fit into
its GPU is refused, `--gradient_checkpointing auto` and `--parallel auto` are chosen by it, and rollouts get a share of
what it leaves.
"""

import dataclasses
import math
from pathlib import Path

import torch
from transformers import PreTrainedModel

from fastgrpo.config.settings import GRPOConfig, TrainingConfig
from fastgrpo.kernels.head_torch import chunk_rows
from fastgrpo.loss.checks import HAS_TRITON
from fastgrpo.policy.liger_layers import would_apply
from fastgrpo.policy.lora import add_lora
from fastgrpo.policy.model import head_dim
from fastgrpo.policy.placement import choose_device, choose_dtype
from fastgrpo.ranks import ALONE, Ranks
from fastgrpo.rewards.call import Rewards
from fastgrpo.rewards.model import same_device
from fastgrpo.rollout.geometry import copied_tokens, fit, kv_token_bytes, memory_left
from fastgrpo.rollout.providers import choose_provider
from fastgrpo.step.activations import activation_bytes
from fastgrpo.step.budget import PROMPT_TOKENS, Part, Plan, gib
from fastgrpo.step.outline import outline, outline_of, unplannable
from fastgrpo.step.weights import FP32, Split, reference_part, weight_parts

MOST_DEVICES = 64  # that the refusal of a run may name as its remedy


def plan_run(
    config: TrainingConfig,
    model: str | Path | PreTrainedModel,
    room: float | None = None,
    ranks: Ranks = ALONE,
    rewards: Rewards | None = None,
) -> Plan | None:
    """Make the plan of a run that is about to begin, before its weights are loaded.

    All ranks call this together. They get the same plan, made for the device that has the least room.
    """
    if not isinstance(model, (str, Path, PreTrainedModel)):
        return None
    device = choose_device(config.device)
    if room is None and device.type == "cpu":
        room = math.inf
    elif room is None:
        parameters = model.parameters() if isinstance(model, PreTrainedModel) else ()
        here = torch.device("cuda", torch.cuda.current_device()) if device.index is None else device
        room = memory_left(here) + sum(p.nbytes for p in parameters if p.device == here)
    judges = _bytes_of_judges(config, rewards, device)
    room = min(ranks.gather(room, "the free memory of each device"))
    outlined = outline(model, config.trust_remote_code, download=True) if isinstance(model, (str, Path)) else model
    if unplannable(outlined):
        return None
    if outlined is model:
        outlined = outline_of(model)
    dtype = choose_dtype(config.dtype, device)
    return plan(config, outlined, dtype=dtype, device=device, room=room, ranks=ranks.size, judges=judges)


def _bytes_of_judges(config, rewards, device):
    """Count the bytes that reward models will take on the policy's device. A device that is none is refused here."""
    if rewards is None or not same_device(rewards.device(device, config.reward_device), device):
        return 0
    return sum(model.bytes_to_come(device) for model in rewards.models)


def plan(
    config: TrainingConfig,
    model: PreTrainedModel,
    *,
    dtype: torch.dtype,
    device: torch.device,
    prompt_tokens: int = PROMPT_TOKENS,
    room: float = math.inf,
    ranks: int = 1,
    judges: int = 0,
) -> Plan:
    """Compute the parts of a run's memory on each device, and choose gradient checkpointing and parallel if auto.

    On a CPU, gradient checkpointing is on. On a GPU it is on unless without it the rollouts still get all keys and
    values that they want.
    """
    model = model.to(dtype)
    if config.use_peft:
        add_lora(
            model, r=config.lora_r, alpha=config.lora_alpha, target_modules=config.lora_target_modules
        )  # fmt: skip

    def of(split):
        return _plan_of(config, model, dtype, device, prompt_tokens, room, split, judges)

    whole = of(Split.of(config, ranks, "ddp", device))
    parallel, chosen = choose_parallel(config, whole)
    split = Split.of(config, ranks, parallel, device)
    made = whole if parallel == "ddp" else of(split)
    return dataclasses.replace(made, chosen=chosen, instead={} if made.fits else _other_ways(config, split, of))


def choose_parallel(config: TrainingConfig, whole: Plan | None) -> tuple[str, str]:
    """Decide how the processes of a run share its weights, gradients and optimizer."""
    if config.parallel != "auto":
        return config.parallel, "as parallel says"
    if whole is None:
        return "ddp", "auto is ddp where the memory of a model cannot be planned"
    if whole.ranks == 1:
        return "ddp", "one process has everything"
    if math.isinf(whole.room):
        return "ddp", "auto is ddp on a CPU"
    if whole.fits:
        return "ddp", f"weights, gradients and optimizer fit each device whole, in {gib(whole.least)} at least"
    return "fsdp2", f"weights, gradients and optimizer do not fit a device whole, in {gib(whole.least)} at least"


def _other_ways(config, split, of):
    """List other ways to share a run that does not fit, each with the bytes without which there is no step."""
    sharded, ways, devices = split._replace(parallel="fsdp2"), {}, 2 * split.ranks
    if split.sharded:
        if not split.reshard:
            ways["--fsdp_reshard_after_forward True"] = of(split._replace(reshard=True))
        if not split.offload:
            ways["--parallel fsdp2 --fsdp_cpu_offload True"] = of(split._replace(offload=True))
        if split.graphs:
            ways["--rollout_enforce_eager True"] = of(split._replace(graphs=False))
    elif split.ranks > 1:
        ways["--parallel fsdp2"] = made = of(sharded)
        devices = MOST_DEVICES + 1 if made.fits else devices
    while devices <= MOST_DEVICES:  # the smallest power of two times the present number that is enough
        made = of(sharded._replace(ranks=devices))
        if made.fits:
            ways[f"--parallel fsdp2 on {devices} devices"] = made
            break
        devices *= 2
    return {way: made.least for way, made in ways.items()}


def _plan_of(config, model, dtype, device, prompt_tokens, room, split, judges):
    """Compute the plan of a run that is shared in one way; `model` has its dtype and its adapters."""
    share = config.rollout_memory_utilization if config.rollout_backend == "fast" else 1.0
    slots, one_group, lanes = _slots(config, model, dtype, device, prompt_tokens, share, split)
    parts = [
        *weight_parts(config, model, dtype, split),
        reference_part(config, model, split),
        *_head(config, model, dtype, device, lanes, split),
        *([Part("reward models", judges, "their weights", saved_by={"--reward_device cpu": judges})] if judges else []),
    ]

    def with_checkpointing(on, why):
        activations = _activations(config, model, dtype, device, prompt_tokens, on, split)
        made = Plan([*parts, *activations], slots, one_group, share, room, on, why, split.ranks, split.parallel)
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


def _slots(config, model, dtype, device, prompt_tokens, share, split):
    """Compute the part of keys and values, the bytes of one group of them, and the number of lanes.

    The prompts are dealt to the ranks, so that the first rank has its share of them rounded up. Supervised training
    draws only in evaluations, which take what is left.
    """
    if not isinstance(config, GRPOConfig):
        return Part("keys and values", 0, "evaluations take a share of what is left"), 0, 0
    shape = model.config.get_text_config()
    token = kv_token_bytes(shape, dtype)
    longest = config.max_completion_length

    def group_of(limit):
        return prompt_tokens, [limit] * config.num_generations

    wanted = [group_of(longest)] * -(-config.oversampled(config.prompts_per_step) // split.ranks)
    attention = "sdpa"  # the hf backend, too, has a copy of the prompt for each completion
    if config.rollout_backend == "fast":
        copied = copied_tokens(wanted, config.max_num_seqs)
        attention = choose_provider(config.rollout_attention, device, dtype, head_dim(shape), copied)
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


def _head(config, model, dtype, device, lanes, split):
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
    # Autograd holds the gradient of a tied head until that of the embedding is there, at the very end; fsdp2 reduces
    # those of head and embedding together then.
    held = split.sharded or weight is model.get_input_embeddings().weight
    # A repetition penalty computes with three more tensors of this size, and notes a byte for each token and lane.
    penalized = isinstance(config, GRPOConfig) and config.repetition_penalty != 1
    entries, logit_bytes = f"{lanes} x {vocabulary:,}", FP32 * (4 if penalized else 1)
    drawn = Part(
        "logits of a draw", lanes * vocabulary * logit_bytes, f"{entries} x {logit_bytes} bytes", times=("draw",)
    )
    return [
        drawn,
        *([Part("tokens seen by the penalty", lanes * vocabulary, f"{entries} bytes")] if penalized else []),
        Part(
            "head", chunk * vocabulary * logit, f"a chunk of {chunk} x {vocabulary:,} x {logit} bytes", times=("head",),
            saved_by={f"--max_tokens_per_microbatch {budget // 2}": (chunk - half) * vocabulary * logit},
        ),
        Part(
            "head's gradient", gradient, f"{vocabulary:,} x {hidden} x 4 bytes" if gradient else "none: it is frozen",
            times=("head", "layers") if held else ("head",), saved_by={"--use_peft True": gradient} if gradient else {},
        ),
    ]  # fmt: skip


def _activations(config, model, dtype, device, prompt_tokens, checkpointing, split):
    """Compute the parts of the activations of the largest micro-batch, see activations.py."""
    fused = would_apply(model, config.use_liger_kernel, device)
    longest = prompt_tokens + config.max_completion_length  # it stands alone if it is above the budget
    # How long examples are is not known before there is a tokenizer.
    in_all, supervised = math.inf, not isinstance(config, GRPOConfig)
    if not supervised:
        prompts = -(-config.prompts_per_step // split.ranks)
        in_all = prompts * (prompt_tokens + config.num_generations * config.max_completion_length)

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

"""The parts of a plan that hold weights, gradients and optimizer states: whole on each device, or sharded over them.

With ddp, and on one device, each process holds all of them: weights in the compute dtype (b bytes a number), gradients
in fp32, and Adam's two moments with an fp32 master of each weight below fp32.

With fsdp2, each of K devices holds of N trained weights

    shards of the weights      4 N / K     fp32: they are the optimizer's masters
    gradients                  4 N / K
    optimizer                  8 N / K     two moments
    whole weights              b N         what completions are drawn from
    gathered unit              b x the largest layer, or what belongs to no layer, while they are gathered
    gathered layers            b (2 layers + what belongs to no layer), or b N with fsdp_reshard_after_forward False
    unsharded gradients        4 max(2 layers, what belongs to no layer), before they are added up over the devices
    reference's unit           b x what belongs to no layer; both with the full KL and a sharded reference, which
    reference's head           b x the head; a copy         runs while the policy's own are whole

Weights below adapters are frozen, and are sharded in the compute dtype. The adapters themselves are whole on each
device. A frozen reference is sharded as well, if it is neither streamed nor quantized. With fsdp_cpu_offload the first
three lie in host memory.
"""

import math
from typing import NamedTuple

import torch
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from fastgrpo.config.settings import GRPOConfig, TrainingConfig
from fastgrpo.policy.lora import ADAPTER
from fastgrpo.step.budget import Part

FP32 = 4  # bytes of a number


class Split(NamedTuple):
    """How the processes of a run share its weights, gradients and optimizer.

    Attributes:
        ranks: How many processes there are, each with a device of its own.
        parallel: ddp, where each holds a whole copy, or fsdp2, where each holds a shard.
        reshard: Whether a layer's whole weights are freed after its forward pass.
        offload: Whether the shards lie in host memory.
        graphs: Whether CUDA graphs read the whole weights, which then stay where they are from step to step.
    """

    ranks: int = 1
    parallel: str = "ddp"
    reshard: bool = True
    offload: bool = False
    graphs: bool = False

    @property
    def sharded(self) -> bool:
        """Whether each process holds a shard alone."""
        return self.parallel == "fsdp2"

    @classmethod
    def of(cls, config: TrainingConfig, ranks: int, parallel: str, device: torch.device) -> "Split":
        """Read the settings."""
        graphs = device.type == "cuda" and config.rollout_backend == "fast" and not config.rollout_enforce_eager
        return cls(ranks, parallel, config.fsdp_reshard_after_forward, config.fsdp_cpu_offload, graphs)


class Count(NamedTuple):
    """How many parameters a model has.

    Attributes:
        base: Those of the model without its adapters.
        adapters: Those of the adapters.
        trained: Those of the base that are trained; 0 where there are adapters.
        layers: Those of each layer, without its adapters.
    """

    base: int
    adapters: int
    trained: int
    layers: list[int]

    @classmethod
    def of(cls, model: PreTrainedModel) -> "Count":
        """Count the parameters of a model."""
        base = [p for name, p in model.named_parameters() if ADAPTER not in name]
        adapters = sum(p.numel() for name, p in model.named_parameters() if ADAPTER in name)
        layers = [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]
        sizes = [sum(p.numel() for name, p in layer.named_parameters() if ADAPTER not in name) for layer in layers]
        trained = sum(p.numel() for p in base if p.requires_grad)
        return cls(sum(p.numel() for p in base), adapters, trained, sizes)

    @property
    def rest(self) -> int:
        """Those that belong to no layer: embedding, last norm and head."""
        return self.base - sum(self.layers)

    @property
    def two_layers(self) -> int:
        """Those of two of the largest layers, as one is gathered while another computes."""
        return 2 * max(self.layers)


def weight_parts(config: TrainingConfig, model: PreTrainedModel, dtype: torch.dtype, split: Split) -> list[Part]:
    """Compute the parts of the policy, its gradients and its optimizer, and what PPO's value model would add."""
    count = Count.of(model)
    if split.sharded:
        policy, gradients, optimizer = _shards(count, dtype, split)
    else:
        policy, gradients, optimizer = _whole(model, count, dtype)
    lora = () if config.use_peft else ("--use_peft True",)
    saved = dict.fromkeys(lora, max(0, policy.bytes - math.ceil(count.base * dtype.itemsize / split.ranks)))
    ours = [
        Part("policy", policy.bytes, policy.how, saved_by=saved if split.sharded else {}),
        *(Part(p.name, p.bytes, p.how, saved_by=dict.fromkeys(lora, p.bytes)) for p in (gradients, optimizer)),
    ]
    same = "the same as for the policy"
    names = "value model", "its gradients", "its optimizer"
    ppo = [Part(name, part.bytes, same, ppo=True) for name, part in zip(names, ours, strict=True)]
    return ours + (_gathered(config, model, count, dtype, split) if split.sharded else []) + ppo


def _whole(model, count, dtype):
    """Compute what a process holds that has everything: the parts of policy, gradients and optimizer."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    in_all, moved = count.base + count.adapters, sum(parameter.numel() for parameter in trained)
    masters = FP32 * sum(parameter.numel() for parameter in trained if parameter.dtype != torch.float32)
    how = f"{moved:,} x (2 Adam states{' + a master' if masters else ''}) x 4 bytes"
    return (
        Part("policy", in_all * dtype.itemsize, f"{in_all:,} parameters x {dtype.itemsize} bytes"),
        Part("gradients", moved * FP32, f"{moved:,} x 4 bytes (fp32)"),
        Part("optimizer", masters + 2 * FP32 * moved, how),
    )


def _shards(count, dtype, split):
    """Compute what a process holds that has a shard: the parts of policy, gradients and optimizer."""
    b = FP32 if count.trained else dtype.itemsize
    small = count.adapters
    masters = FP32 * small * (dtype != torch.float32)

    def part(name, bytes, whole, how):
        """Make the part of so many bytes of the base on all ranks together, and of the adapters on each."""
        own, beside = math.ceil(bytes / split.ranks), f", and {whole:,} of the adapters" if whole else ""
        if split.offload:
            return Part(name, whole, f"{own:,} bytes of host memory: {how} / {split.ranks} devices{beside}")
        return Part(name, own + whole, f"{how} / {split.ranks} devices{beside}")

    return (
        part("policy", count.base * b, small * dtype.itemsize, f"{count.base:,} parameters x {b} bytes"),
        part("gradients", count.trained * FP32, small * FP32, f"{count.trained:,} x 4 bytes (fp32)"),
        part(
            "optimizer", count.trained * 2 * FP32, masters + small * 2 * FP32,
            f"{count.trained:,} x 2 Adam states x 4 bytes",
        ),
    )  # fmt: skip


def _gathered(config, model, count, dtype, split):
    """Compute the parts of weights and gradients that are whole for a while."""
    b, rest = dtype.itemsize, "embedding and head"
    drawn = Part(
        "whole weights", (count.base + count.adapters) * b,
        f"{count.base + count.adapters:,} x {b} bytes, from which completions are drawn" + ", at fixed addresses"
        * split.graphs, times=() if split.graphs else ("draw",), early=True,
        at_most=not isinstance(config, GRPOConfig),  # supervised training draws in evaluations alone
    )  # fmt: skip
    unit = max(*count.layers, count.rest)
    whole = count.two_layers + count.rest if split.reshard else count.base
    what = f"two layers, {rest}" if split.reshard else "all layers, as fsdp_reshard_after_forward is False"
    gradients = max(count.two_layers, count.rest) if count.trained else 0
    passing = "reference", "head", "layers"
    beside = []
    if _full_kl_of_a_copy(config):  # which is sharded too, and runs inside of the policy's pass
        head, theirs = model.get_output_embeddings().weight.numel() * b, f"{rest} of the reference beside the policy's"
        beside = [
            Part("reference's unit", count.rest * b, f"{theirs}: {count.rest:,} x {b} bytes", times=("reference",)),
            Part("reference's head", head, "a copy, until the loss has read it", times=("reference", "head")),
        ]
    return [
        drawn,
        Part("gathered unit", unit * b, f"the largest layer, or {rest}: {unit:,} x {b} bytes", times=("draw",)),
        Part("gathered layers", whole * b, f"{what}: {whole:,} x {b} bytes", times=passing),
        Part(
            "unsharded gradients", gradients * FP32,
            f"two layers, or {rest}: {gradients:,} x 4 bytes" if gradients else "none: the shards are frozen",
            times=("layers",), saved_by={"--use_peft True": gradients * FP32} if gradients else {},
        ),
        *beside,
    ]  # fmt: skip


def _full_kl_of_a_copy(config):
    """Tell whether the loss reads the states of a reference that is a plain frozen copy."""
    if not isinstance(config, GRPOConfig) or not config.objective.full_kl:
        return False
    return not config.use_peft and config.ref_device is None and config.ref_quantization is None


def reference_part(config: TrainingConfig, model: PreTrainedModel, split: Split) -> Part:
    """Compute the part of the reference that `make_reference` would make of a model."""
    size = sum(parameter.nbytes for parameter in model.parameters())
    if not isinstance(config, GRPOConfig):
        return Part("reference", 0, "none: supervised training has none")
    if config.beta == 0:
        return Part("reference", 0, "none: beta is 0")
    if config.use_peft:
        return Part("reference", 0, "none: it is the policy with its adapters off")
    if config.ref_device is not None:
        return _streamed(model, size)
    if config.ref_quantization is not None:
        size, how = _quantized(model, config.ref_quantization)
        return Part("reference", size, how, saved_by=dict.fromkeys(("--use_peft True", "--beta 0"), size))
    own, how = (math.ceil(size / split.ranks), f" / {split.ranks} devices") if split.sharded else (size, "")
    without = dict.fromkeys(("--use_peft True", "--beta 0", "--ref_device cpu"), own)
    if not config.sync_ref_model:
        without["--ref_quantization nf4"] = own - _quantized(model, "nf4")[0]
    return Part("reference", own, f"a copy of the policy{how}", saved_by=without)


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

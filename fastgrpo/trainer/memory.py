"""The parts of a run's memory, and whether they fit into a device.

The memory of a micro-batch's activations, computed from the architecture.

Autograd keeps, for each token and layer, with b bytes a number of the weights' dtype:

    2 norms                4 h + 2 b h + 4 each: the input in fp32, what is scaled, what goes into the products, 1 / rms
    attention              b (2 H d + 2 K d) + 4 H: queries and output, keys and values, the log-sum-exps
    MLP                    4 b f: gate, its silu, up, and their product
    norms of q and k       (4 + b) (H + K) d + 4 (H + K), where the model has them

liger-kernel's layers keep 2 b h + 4 of a norm, b (H + K) d of the norms of q and k, and 3 b f of the MLP. A mixture of
experts computes each token in k of them: f is then k times the width of one, and 2 b k h are added for their inputs and
outputs. With gradient checkpointing each layer keeps only its input, b h.

Until the layers go backward, the last norm and the head hold (4 + b) h + (4 + b) h: the norm's, and the head's hidden
states with their fp32 gradient. Frozen layers below adapters keep less than this.

After that, one layer at a time holds b (3 f + 2 h) + 8 h for its gradients. With gradient checkpointing that layer is
computed again, and keeps for as long what is listed above.

Shapes: h hidden size, H query heads, K key heads, d head width, f width of the MLP.

The parts of a plan that hold weights, gradients and optimizer states: whole on each device, or sharded over them.

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

Models without weights, from which the plan of a run's memory is computed.

The plan of a run's memory on each device, computed from its settings and the model's config, without any weights.

`python -m fastgrpo.doctor --model` prints it. A run makes it before the weights are loaded: one that does not fit into
its GPU is refused, `--gradient_checkpointing auto` and `--parallel auto` are chosen by it, and rollouts get a share of
what it leaves.
"""

import dataclasses
import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    PreTrainedModel,
)
from transformers.modeling_layers import GradientCheckpointingLayer

from fastgrpo.config.sections import RewardConfig
from fastgrpo.config.settings import GRPOConfig, TrainingConfig
from fastgrpo.kernels.head_torch import chunk_rows
from fastgrpo.loss.checks import HAS_TRITON
from fastgrpo.policy.device import choose_device, choose_dtype
from fastgrpo.policy.dry_run import without_weights
from fastgrpo.policy.gguf import find_gguf
from fastgrpo.policy.liger_layers import would_apply
from fastgrpo.policy.load import loading, read_config, read_json
from fastgrpo.policy.lora import ADAPTER, add_lora
from fastgrpo.policy.model import head_dim
from fastgrpo.ranks import ALONE, Ranks
from fastgrpo.rewards import PRM, names_model
from fastgrpo.rewards.call import Rewards
from fastgrpo.rewards.models import auto_class, same_device
from fastgrpo.rollout.attention import choose_provider
from fastgrpo.rollout.slots import copied_tokens, fit, kv_token_bytes, memory_left

PROMPT_TOKENS = 256  # the length of a typical prompt
# The times of a step at which most memory is held. What comes and goes is there at some of them.
TIMES = {
    "draw": "while completions are drawn",
    "reference": "while the reference computes log-probs",
    "head": "while the loss computes logits",
    "layers": "while the layers go backward",
}


@dataclass(frozen=True)
class Part:
    """One part of a run's memory.

    Attributes:
        name: What the memory is for.
        bytes: How much memory the part takes, in bytes.
        how: How the bytes come about, as a text for people, such as "64 parameters x 2 bytes".
        ppo: Whether only PPO needs the part. Such parts are there to be compared with.
        times: The `TIMES` at which the part is there, if it comes and goes within a step. Empty if it is always there.
        at_most: Whether the bytes are a bound that the run may stay far below, so that it is not refused for them.
        saved_by: Flags that would make the part smaller, each with the bytes that it would save.
        early: Whether a part that comes and goes is there already when keys and values get their memory.
    """

    name: str
    bytes: int
    how: str
    ppo: bool = False
    times: tuple[str, ...] = ()
    at_most: bool = False
    saved_by: Mapping[str, int] = field(default_factory=dict)
    early: bool = False


@dataclass(frozen=True)
class Plan:
    """A run's memory beside the device that it is for.

    Attributes:
        parts: The parts, without keys and values.
        slots: Keys and values, as many as the rollouts want and may have.
        one_group: Bytes of keys and values without which there is no rollout.
        share: The share that keys and values may take of what the parts leave.
        room: Bytes of the device that the run may take; infinite where they are not known.
        checkpointing: Whether layers are computed again in the backward pass.
        why: Why this is so, as a text for people.
        ranks: How many processes share the run, each with a device of its own.
        parallel: How they share it, ddp or fsdp2.
        chosen: Why this is so, as a text for people; empty where nothing was chosen.
        instead: Bytes without which there is no step, under ways to start the run that are no single part's flag.
    """

    parts: list[Part]
    slots: Part
    one_group: int
    share: float
    room: float
    checkpointing: bool
    why: str
    ranks: int = 1
    parallel: str = "ddp"
    chosen: str = ""
    instead: Mapping[str, int] = field(default_factory=dict)

    @property
    def needed(self) -> int:
        """Bytes of the run with all keys and values that the rollouts want and may have."""
        return self.fixed + self.slots.bytes

    @property
    def fixed(self) -> int:
        """Bytes of all parts but keys and values, at the time at which they are most."""
        return self._most()[1]

    @property
    def passing(self) -> int:
        """Bytes of what comes and goes after keys and values have their memory, at the time at which it is most."""
        return self.fixed - sum(part.bytes for part in self.parts if not part.ppo and (part.early or not part.times))

    @property
    def least(self) -> int:
        """Bytes without which there is no step."""
        return self._least()

    @property
    def fits(self) -> bool:
        """Whether there is room for a step."""
        return self.least <= self.room

    def _there(self, time, certain=False):
        """List the parts that are there at a time: all of them, or those of which it is certain how large they are."""
        parts = (part for part in self.parts if not part.ppo and (not part.times or time in part.times))
        return [part for part in parts if not (certain and part.at_most)]

    def _most(self, flag=None, certain=False):
        """Return the time at which the parts are most, and their bytes then, less what a flag would save."""

        def held(time):
            return sum(part.bytes - part.saved_by.get(flag, 0) for part in self._there(time, certain))

        time = max(TIMES, key=held)
        return time, held(time)

    def _least(self, flag=None):
        """Count the bytes without which there is no step: the share of keys and values must hold one group."""
        return self._most(flag, certain=True)[1] + self._for_one_group - self.slots.saved_by.get(flag, 0)

    @property
    def _for_one_group(self):
        return math.ceil(self.one_group / self.share)

    def rows(self) -> list[tuple[str, str]]:
        """List the plan for a table."""
        rows = []
        for part in [*self.parts, self.slots]:
            when = f", {TIMES[part.times[0]]}" if len(part.times) == 1 else ""
            if not part.ppo:
                rows.append((part.name, f"{gib(part.bytes):>11}   {part.how}{when}"))
        about = f"the most at once, {TIMES[self._most()[0]]}" if self.passing else ""
        if not math.isinf(self.room):
            about += f"; of the {gib(self.room)} that the run may take"
        recompute = "on" if self.checkpointing else "off"
        rows += [("in all", f"{gib(self.needed):>11}   {about}".rstrip()),
                 ("gradient checkpointing", f"{recompute:>11}   {self.why}")]  # fmt: skip
        return rows + [("parallel", f"{self.parallel:>11}   {self.chosen}")] * (self.ranks > 1)

    def check(self) -> None:
        """Refuse a run that does not fit."""
        if self.fits:
            return
        time, _ = self._most(certain=True)
        there = sorted((part for part in self._there(time, certain=True) if part.bytes), key=lambda part: -part.bytes)
        parts = ", ".join(f"{part.name} {gib(part.bytes)}" for part in there)
        group = f"keys and values of one group {gib(self.one_group)}"
        if self.share < 1:
            group = (
                f"{gib(self._for_one_group)} for one group's keys and values of {gib(self.one_group)}, as keys and "
                f"values may take {self.share:g} of what the parts leave"
            )
        flags = {flag for part in [*self.parts, self.slots] for flag in part.saved_by}
        left = {flag: self._least(flag) for flag in sorted(flags)} | dict(self.instead)
        saved = Counter({flag: self.least - bytes for flag, bytes in left.items()})
        remedies = [
            f"{flag} saves {gib(count)}" + (", which is enough" if left[flag] <= self.room else "")
            for flag, count in saved.most_common()
            if count >= self.least / 100
        ]
        larger = "take a smaller model or a larger GPU"
        remedy = "; ".join(remedies) or larger
        for part in self.parts:
            if part.early and part.bytes > self.room:
                remedy = f"each of any number of devices holds the {part.name}, {gib(part.bytes)}: {larger}"
        each = f"each of {self.ranks} processes" if self.ranks > 1 else "the run"
        raise ValueError(
            f"{each} needs at least {gib(self.least)} of memory {TIMES[time]}, and there are {gib(self.room)}: "
            f"{parts}, and {group}\n  {remedy}"
        )


def gib(count: float) -> str:
    """Write a number of bytes."""
    for unit, size in (("GiB", 2**30), ("MiB", 2**20)):
        if count >= size:
            return f"{count / size:.2f} {unit}"
    return f"{count / 2**10:.2f} KiB"


class Activations(NamedTuple):
    """The memory of one micro-batch's activations.

    Attributes:
        kept: Bytes that the layers keep for the backward pass.
        ends: Bytes that the last norm and the head hold until the layers go backward.
        backward: Bytes that the backward pass of one layer adds.
    """

    kept: int
    ends: int
    backward: int


def activation_bytes(
    model: PreTrainedModel, dtype: torch.dtype, tokens: int, *, checkpointing: bool, fused: bool = False
) -> Activations:
    """Compute the memory that the forward and backward pass over one micro-batch takes at its peak."""
    config, b = model.config.get_text_config(), dtype.itemsize
    h, layer = config.hidden_size, _layer_bytes(model, b, fused)
    kept = config.num_hidden_layers * (b * h if checkpointing else layer)
    backward = b * (3 * _mlp_width(config)[0] + 2 * h) + 8 * h + layer * checkpointing
    return Activations(tokens * kept, tokens * 2 * (4 + b) * h, tokens * backward)


def _layer_bytes(model, b, fused):
    """Count the bytes that autograd keeps of one token in one layer."""
    config = model.config.get_text_config()
    h, heads, d = config.hidden_size, config.num_attention_heads, head_dim(config)
    kv_heads = getattr(config, "num_key_value_heads", None) or heads
    f, experts = _mlp_width(config)
    norms = 2 * ((0 if fused else 4 * h) + 2 * b * h + 4)
    attention = b * (2 * heads * d + 2 * kv_heads * d) + 4 * heads
    mlp = (3 if fused else 4) * b * f + 2 * b * experts * h
    if any(name.endswith(".q_norm") for name, _ in model.named_modules()):
        norms += (b if fused else 4 + b) * (heads + kv_heads) * d + 4 * (heads + kv_heads)
    return norms + attention + mlp


def _mlp_width(config):
    """Return f, summed over the experts that compute a token, and how many these are (0 without experts).

    Configs name the width in several ways; one that names none has 4 h, as GPT-2's.
    """
    names = ("intermediate_size", "ffn_dim", "n_inner", "ffn_hidden_size")
    width = next((getattr(config, name) for name in names if getattr(config, name, None)), 4 * config.hidden_size)
    experts = getattr(config, "num_experts_per_tok", None) or 0
    if not experts:
        return width, 0
    shared = getattr(config, "shared_expert_intermediate_size", None) or 0
    return experts * (getattr(config, "moe_intermediate_size", None) or width) + shared, experts


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


NEEDED = ("hidden_size", "num_hidden_layers", "num_attention_heads")
OPTIONAL = ("num_key_value_heads", "head_dim", "intermediate_size", "moe_intermediate_size", "num_experts_per_tok")


def outline(path: str | Path, trust_remote_code: bool = False, download: bool = False) -> PreTrainedModel:
    """Build a causal LM without weights from its config."""
    files = ("config.json", "adapter_config.json")
    local = download or Path(path).is_dir() or find_gguf(path) is not None
    if not local and not any(read_json(path, file, local_files_only=True) for file in files):
        raise ValueError(
            f"no config of a causal LM at {str(path)!r}, neither as a folder nor in the hub's cache (nothing is "
            "downloaded here)"
        )
    config = read_config(path, trust_remote_code, local_files_only=not download)
    with loading(path, "model"), torch.device("meta"):
        return AutoModelForCausalLM.from_config(config, trust_remote_code=trust_remote_code)


def outline_of(model: PreTrainedModel) -> PreTrainedModel:
    """Copy a model in memory without its weights."""
    copied = without_weights(model)
    for mine, own in zip(copied.parameters(), model.parameters(), strict=True):
        mine.requires_grad_(own.requires_grad)
    return copied


def judges_to_come(config: RewardConfig, device: torch.device) -> int:
    """Count the bytes that the reward models of a run will take on its device, from their configs. Loads no weights."""
    stated, total = config.reward_device, 0
    if stated != "auto" and not same_device(choose_device(stated, "reward_device"), device):
        return 0
    code = config.trust_remote_code
    for name in config.reward_funcs:
        path = name.removeprefix(PRM)
        if name.startswith(PRM):
            kind, settings = auto_class(path, code, local_files_only=True), {}
        elif names_model(name):
            kind, settings = AutoModelForSequenceClassification, {"num_labels": 1}
        else:
            continue
        with loading(path, "reward model"), torch.device("meta"):
            made = AutoConfig.from_pretrained(path, trust_remote_code=code, local_files_only=True, **settings)
            model = kind.from_config(made, trust_remote_code=code)
        total += sum(parameter.numel() for parameter in model.parameters())
    return total * choose_dtype("auto", device).itemsize


def unplannable(model: PreTrainedModel) -> str | None:
    """Say why the memory of a model's training cannot be computed."""
    config = model.config.get_text_config()
    if model.get_output_embeddings() is None:
        return "is no causal LM"
    if getattr(model, "is_quantized", False):  # a folder with quantized weights has been refused by its config
        return "has quantized weights"
    for name in (*NEEDED, *OPTIONAL):
        try:
            number = getattr(config, name, None)
        except RuntimeError:  # transformers' refusal where the layers differ, as Gemma 4's
            number = ()
        if not isinstance(number, int) and (name in NEEDED or number is not None):
            return f"has no {name} in its config that all layers share"
    return None


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

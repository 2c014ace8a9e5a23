"""Plans the memory of a run from its settings and the model's config, before any weights are loaded.

A run that does not fit its GPU raises an error that names the settings to change. The size of a micro-batch, gradient
checkpointing and `--parallel auto` follow the plan, and rollouts get a share of the remaining memory. docs/memory.md
describes the parts.

Shapes: h hidden size, H query heads, K key heads, d head width, f width of the MLP, b bytes per weight.
"""

import copy
import dataclasses
import functools
import gc
import json
import math
import shlex
from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from typing import NamedTuple

import torch
from transformers import PreTrainedModel

from fastgrpo.config.fields import keywords
from fastgrpo.config.settings import GRPOConfig, TrainingConfig
from fastgrpo.kernels.head_torch import chunk_rows
from fastgrpo.loss.dispatch import HAS_TRITON
from fastgrpo.loss.logprobs import logit_softcap
from fastgrpo.policy.device import choose_device, choose_dtype
from fastgrpo.policy.dry_run import dry_run, unplannable, without_weights
from fastgrpo.policy.liger_layers import would_apply
from fastgrpo.policy.load import outline
from fastgrpo.policy.lora import ADAPTER, add_lora
from fastgrpo.policy.model import Policy, decoder_layers, head_dim
from fastgrpo.policy.quantized import NF4Linear, quantize
from fastgrpo.ranks import ALONE, Ranks
from fastgrpo.rewards.call import Rewards
from fastgrpo.rewards.models import same_device
from fastgrpo.rollout import mapped
from fastgrpo.rollout.attention import choose_provider
from fastgrpo.rollout.engine import PREFILL_TOKENS
from fastgrpo.rollout.hf import HFBackend
from fastgrpo.rollout.layers import obstacle
from fastgrpo.rollout.slots import (
    BUCKETS,
    MOST_LANES,
    PROMPT_BUCKETS,
    copied_tokens,
    fit,
    kv_token_bytes,
    memory_left,
)
from fastgrpo.rollout.weights import MERGED_SHARE, copied_bytes

PROMPT_TOKENS = 256  # the length of a typical prompt
GRAPH_BYTES = 26 * 2**20  # of the driver for the graph of a decode step, as vLLM logs it (its pull request 22897)
FP32 = 4  # bytes of an fp32 number
MICRO_BATCHES = 16384, 8192, 4096  # sizes of a micro-batch to try, in tokens; without a plan, the first
# Predicted times on an H100, in FLOPs per weight (1 takes 2 us for 1B parameters at half the peak). PASS is the
# overhead of a micro-batch (gradients added in fp32, launches), PASS_SHARDED the same with weights sharded over NVLink.
# DECODE_STEP has few lanes and reads all weights; its factors are for unmerged adapters (APART), and for 4-bit weights
# that each step dequantizes. PCIE is for each byte of a parameter that is copied, at 50 GB/s.
PASS, PASS_SHARDED, PCIE, DECODE_STEP, APART, DEQUANTIZED = 1_000, 10_000, 10_000, 500, 1.25, 2.5
# Predicted time to release and map the KV cache, and of torch's new allocations: 0.2 s, in FLOPs at half the peak.
RELEASE = 1e14
UPDATE = "head", "layers"  # the phases with gradients
ROUND = 1024  # tokens
ACTIVATIONS = "activations", "head's inputs", "one layer's backward"  # parts that grow with a micro-batch
SPARE = 0.05  # share of the memory that stays free for workspaces and fragmentation, if updates release the KV cache
# The phases of a step with the highest memory use.
TIMES = {
    "draw": "while completions are generated",
    "reference": "while the reference computes log-probs",
    "head": "while the loss computes logits",
    "layers": "in the backward pass of the layers",
}


@dataclass(frozen=True)
class Part:
    """One part of a run's memory."""

    name: str
    bytes: int
    how: str  # the computation of the bytes, for the table, such as "64 x 2 bytes"
    times: tuple[str, ...] = ()  # the `TIMES` at which the part exists; empty if always
    at_most: bool = False  # whether the bytes are an upper bound, which is left out of the check
    early: bool = False  # whether a part with `times` already exists when keys and values are allocated


@dataclass(frozen=True)
class MemoryPlan:
    """A run's memory on each device."""

    parts: list[Part]  # all except keys and values
    slots: Part  # keys and values of `lanes`; with `times` if an update releases them
    one_group: int  # minimum bytes of keys and values, for one group
    share: float  # maximum share of the remaining memory for keys and values
    room: float  # available bytes; infinite if unknown
    lanes: int  # completions generated at the same time, as many as the rollouts can use within their share
    tokens: int  # chosen limit for the tokens of a micro-batch
    planned: int  # tokens of the micro-batch whose activations are in `parts`: all of a step, if they are fewer
    recomputed: int  # layers that the backward pass recomputes: the first ones
    cost: float  # predicted time of a step, to compare plans of the same run
    why: str = ""  # the reason for `tokens` and `recomputed`, for the table
    ranks: int = 1
    parallel: str = "ddp"
    chosen: str = ""  # the reason for `parallel`, for the table
    instead: Mapping[str, int] = field(default_factory=dict)  # `least` with other flags, if the run does not fit

    @property
    def checkpointing(self) -> bool:
        """Whether the backward pass recomputes layers."""
        return self.recomputed > 0

    @property
    def released(self) -> bool:
        """Whether updates release the memory of keys and values."""
        return bool(self.slots.times)

    @property
    def most_tokens(self) -> int:
        """Tokens of a micro-batch that fit, at most `tokens`: more than `planned` only if memory is left for them."""
        if math.isinf(self.room):
            return self.tokens
        token = sum(part.bytes for part in self.parts if part.name in ACTIVATIONS) / self.planned
        left = (1 - self.share) * (self.room - self.fixed)  # keys and values may take their whole share
        if self.released:
            left = (1 - SPARE) * self.room - self._peak(times=UPDATE)[1]
        more = max(0, int(left / token)) // ROUND * ROUND  # so that a resumed run gets the same number
        return min(self.tokens, self.planned + more)

    @property
    def ample(self) -> bool:
        """Whether keys and values of all `lanes` fit within their share, and the update fits."""
        most = self.room * (1 - SPARE * self.released)
        return self.slots.bytes <= self.share * (self.room - self.fixed) and self.needed <= most

    @property
    def needed(self) -> int:
        """Bytes of the run with all keys and values."""
        return self._peak(self.slots.bytes)[1]

    @property
    def fixed(self) -> int:
        """Bytes of all parts except keys and values, at their peak while keys and values exist."""
        return self._peak(times=self.slots.times or TIMES)[1]

    @property
    def passing(self) -> int:
        """Bytes of the parts that are allocated after keys and values, at their peak while keys and values exist."""
        return self.fixed - sum(part.bytes for part in self.parts if part.early or not part.times)

    @property
    def least(self) -> int:
        """Minimum bytes of a step: the share of keys and values must hold one group."""
        peak = self._peak(math.ceil(self.one_group / self.share), certain=True)[1]
        return math.ceil(peak / (1 - SPARE)) if self.released else peak

    @property
    def fits(self) -> bool:
        """Whether a step fits."""
        return self.least <= self.room

    def _peak(self, slots=0, certain=False, times=TIMES):
        """Return the phase of peak memory with `slots` bytes of keys and values, its bytes and its parts.

        If `certain`, upper bounds are left out.
        """
        parts = [part for part in self.parts if not (certain and part.at_most)]
        parts.append(dataclasses.replace(self.slots, bytes=slots))
        held = {time: [part for part in parts if not part.times or time in part.times] for time in times}
        time = max(times, key=lambda time: sum(part.bytes for part in held[time]))
        return time, sum(part.bytes for part in held[time]), held[time]

    def rows(self) -> list[tuple[str, str]]:
        """Return the plan as rows of a table."""
        rows = []
        for part in [*self.parts, self.slots]:
            when = f", {TIMES[part.times[0]]}" if len(part.times) == 1 else ""
            rows.append((part.name, f"{gib(part.bytes):>11}   {part.how}{when}"))
        about = f"the peak, {TIMES[self._peak(self.slots.bytes)[0]]}" if self.passing else ""
        if not math.isinf(self.room):
            about += f"; of {gib(self.room)} available"
        rows.append(("peak", f"{gib(self.needed):>11}   {about}".rstrip()))
        on = f"{self.recomputed} layers" if self.checkpointing else "off"
        rows.append(("gradient checkpointing", f"{on:>11}   {self.most_tokens:,} tokens of a micro-batch; {self.why}"))
        sharded = self.ranks > 1 or self.parallel != "ddp"
        return rows + [("parallel", f"{self.parallel:>11}   {self.chosen}")] * sharded

    def check(self) -> None:
        """Raise a ValueError if the run does not fit."""
        if self.fits:
            return
        time, _, parts = self._peak(math.ceil(self.one_group / self.share), certain=True)
        named = [part for part in parts if part.bytes and part.name != self.slots.name]
        parts = sorted(named, key=lambda part: -part.bytes)
        group = f", and KV cache of one group {gib(self.one_group)}, within {self.share:g} of the remaining memory"
        group *= not self.released or time in self.slots.times
        saved = {flag: self.least - count for flag, count in self.instead.items()}
        remedies = [
            f"{flag} saves {gib(saved[flag])}" + ", which is enough" * (self.instead[flag] <= self.room)
            for flag in sorted(saved, key=lambda flag: -saved[flag])
            if saved[flag] >= self.least / 100
        ]
        if not any(count <= self.room for count in self.instead.values()):
            remedies.append("use a smaller model, larger GPUs, or more of them with --parallel fsdp2")
        each = f"each of {self.ranks} processes" if self.ranks > 1 else "the run"
        raise ValueError(
            f"{each} needs at least {gib(self.least)} of memory {TIMES[time]}, and {gib(self.room)} are available: "
            f"{', '.join(f'{part.name} {gib(part.bytes)}' for part in parts)}{group}\n  {'; '.join(remedies)}"
        )


def gib(count: float) -> str:
    """Format a number of bytes."""
    for unit, size in (("GiB", 2**30), ("MiB", 2**20)):
        if count >= size:
            return f"{count / size:.2f} {unit}"
    return f"{count / 2**10:.2f} KiB"


def activation_bytes(
    model: PreTrainedModel, dtype: torch.dtype, tokens: int, *, recomputed: int, fused: bool = False
) -> tuple[int, int, int]:
    """Compute upper bounds on the bytes of a micro-batch's activations. The first `recomputed` layers are recomputed.

    The first number is what the layers keep for the backward pass, the second what the last norm and the head keep. The
    third is what the backward of one layer adds, with its recomputed activations.
    """
    config, b = model.config.get_text_config(), dtype.itemsize
    h, layer = config.hidden_size, _layer_bytes(model, b, fused)
    kept = recomputed * b * h + (config.num_hidden_layers - recomputed) * layer
    # Layers that are not recomputed are the last ones. Their activations are gone when the first is recomputed.
    backward = b * (3 * _mlp_width(config)[0] + 2 * h) + 8 * h + layer * (recomputed == config.num_hidden_layers)
    return tokens * kept, tokens * 2 * (4 + b) * h, tokens * backward


def _layer_bytes(model, b, fused):
    """Return the bytes that autograd keeps of one token in one layer; liger-kernel's `fused` layers keep fewer."""
    config = model.config.get_text_config()
    h, heads, d = config.hidden_size, config.num_attention_heads, head_dim(config)
    kv_heads = getattr(config, "num_key_value_heads", None) or heads
    f, experts = _mlp_width(config)
    found = [m for layer in decoder_layers(model)[-1:] for m in layer.modules() if "Norm" in type(m).__name__]
    found = [m for m in found if getattr(m, "weight", None) is not None and m.weight.shape == (h,)]
    wide = (4 - b) * h * any("Gemma" in type(m).__name__ for m in found)
    # fp32 input (Gemma's norms also keep it normalized), normalized input, output; 1 / rms
    norms = max(2, len(found)) * ((0 if fused else 4 * h + wide) + 2 * b * h + 4)
    attention = b * (2 * heads * d + 2 * kv_heads * d) + 4 * heads  # queries, output, keys, values; log-sum-exps
    mlp = (3 if fused else 4) * b * f + 2 * b * experts * h  # gate, silu, up, product; inputs, outputs of experts
    if any(name.endswith(".q_norm") for name, _ in model.named_modules()):
        norms += (b if fused else 4 + b) * (heads + kv_heads) * d + 4 * (heads + kv_heads)
    return norms + attention + mlp


def _mlp_width(config):
    """Return f, summed over the active experts of a token, and their number (0 without experts)."""
    names = ("intermediate_size", "ffn_dim", "n_inner", "ffn_hidden_size")
    width = next((getattr(config, name) for name in names if getattr(config, name, None)), 4 * config.hidden_size)
    experts = getattr(config, "num_experts_per_tok", None) or 0
    if not experts:
        return width, 0
    shared = getattr(config, "shared_expert_intermediate_size", None) or 0
    return experts * (getattr(config, "moe_intermediate_size", None) or width) + shared, experts


class Count(NamedTuple):
    """Numbers of a model's parameters: base, adapters, trained base, and base of each layer; bytes of 4-bit weights."""

    base: int
    adapters: int
    trained: int
    layers: list[int]
    packed: int

    @classmethod
    def of(cls, model: PreTrainedModel) -> "Count":
        """Count the parameters of a model."""
        named, layers = list(model.named_parameters()), decoder_layers(model)
        base = [p for name, p in named if ADAPTER not in name and p.dtype != torch.uint8]
        packed = sum(p.nbytes for _, p in named if p.dtype == torch.uint8)
        adapters = sum(p.numel() for name, p in named if ADAPTER in name)
        sizes = [sum(p.numel() for name, p in m.named_parameters() if ADAPTER not in name) for m in layers]
        trained = sum(p.numel() for p in base if p.requires_grad)
        return cls(sum(p.numel() for p in base), adapters, trained, sizes, packed)

    @property
    def rest(self) -> int:
        """Base parameters outside the layers: embedding, last norm and head."""
        return self.base - sum(self.layers)

    @property
    def two_layers(self) -> int:
        """Base parameters of two of the largest layers: one is gathered while the other computes."""
        return 2 * max(self.layers, default=0)


class _Planner:
    """Computes the parts of a run on each device; `model` has dtype and adapters, but no weights."""

    def __init__(
        self, config, model, dtype, device, prompt_tokens, room, ranks, parallel, judges, waits, releases, transformers
    ):
        self.transformers = transformers  # whether the engine does not support the model; transformers generates then
        self.backend = "hf" if transformers else config.rollout_backend
        self.config, self.model, self.dtype, self.device = config, model, dtype, device
        self.prompt_tokens, self.room, self.ranks, self.parallel = prompt_tokens, room, ranks, parallel
        self.judges, self.count, self.sharded = judges, Count.of(model), parallel == "fsdp2"
        self.token_bytes = functools.cache(self._token_bytes)
        self.grpo, self.requests, self.fewest, self.most = isinstance(config, GRPOConfig), [], 0, 0
        self.drawing = 0  # maximum number of completions generated at the same time
        self.in_all = math.inf  # tokens of a step; the lengths of examples are not yet known
        if self.grpo:
            group = [config.max_completion_length] * config.num_generations
            self.in_all = -(-config.prompts_per_step // ranks) * (prompt_tokens + sum(group))
        if self.grpo and self.backend != "vllm":
            hf = self.backend == "hf"
            self.requests = [(prompt_tokens, group)] * -(-config.oversampled(config.prompts_per_step) // ranks)
            most = config.max_num_seqs or max(HFBackend.MOST if hf else MOST_LANES, len(group))
            wanted = len(self.requests) * len(group)
            self.drawing = min(most, wanted)
            self.most = wanted if waits and not hf else self.drawing  # completions that wait keep their slots
            self.fewest = min(self.most, len(group))
            copied, width = copied_tokens(self.requests, most), head_dim(model.config.get_text_config())
            # The hf backend copies the prompt for each completion, like sdpa.
            self.flat = hf or choose_provider("auto", device, dtype, width, copied) == "sdpa"
        # The memory that reward models need to score completions is not planned.
        self.releases = releases and bool(self.requests) and not judges
        self.merged = self._merged_bytes()

    def plan(self) -> MemoryPlan:
        """Plan all choices of the micro-batch and of recomputed layers, and return the cheapest that fits."""
        parts = [*self._weights(), *self._gathered(), self._reference()]
        parts += [Part("reward models", self.judges, "their weights")] * (self.judges > 0)
        on, stated = self.config.gradient_checkpointing, self.config.max_tokens_per_microbatch
        every, sizes = self.model.config.get_text_config().num_hidden_layers, (stated,) if stated else MICRO_BATCHES
        counts, why = range(every + 1), ""
        if on != "auto":
            counts, why = [every * on], "set by gradient_checkpointing"
        elif self.config.activation_offloading:
            counts, why = [every], "set by activation_offloading"
        elif not self.model.supports_gradient_checkpointing:
            counts, why = [0], "the model does not support gradient checkpointing"
        elif self.transformers:
            counts, why = [every], "layers that the engine does not support may keep more"
        if self.device.type == "cpu" and math.isinf(self.room):
            sizes, counts, why = sizes[:1], counts[-1:], why or "auto is on on a CPU"
        made = []
        for tokens, released in product(sizes, (False, True)[: 1 + self.releases]):
            for recomputed in counts:
                made.append(self._planned([*parts, *self._head(tokens)], tokens, recomputed, released))
                best = self._cost(tokens, recomputed, self.most, self.merged > 0, released)
                if made[-1].ample and made[-1].cost == best:
                    break  # all completions run at once, with merged adapters: more recomputation only takes time
        best = min(made, key=lambda plan: (not plan.ample, plan.cost if plan.ample else plan.needed))
        first = next(plan for plan in made if plan.released == best.released)
        if not why and not best.ample:
            why = "this needs the least memory"
        elif not why and best is first:
            why = "all activations fit"
        elif not why:
            problem = f"need {gib(first.needed)}"
            if first.ample and first.lanes == self.most:
                problem = "leave no room for merged adapters"
            elif first.ample:
                problem = f"generate only {first.lanes:,} of {self.most:,} completions at the same time"
            why = f"the cheapest that fits: {sizes[0]:,} tokens without it {problem}"
        return dataclasses.replace(best, why=why)

    def _planned(self, parts, tokens, recomputed, released):
        """Plan a run with this micro-batch and number of recomputed layers, and as many lanes as fit."""
        longest = self.prompt_tokens + self.config.max_completion_length * self.grpo
        # A sample above the limit gets its own pass.
        planned = max(min(tokens, self.in_all), longest)
        fewest, activations = self.fewest, self._activations(planned, recomputed)
        share = 1.0 if self.backend == "hf" else self.config.rollout_memory_utilization
        one_group, times = self._slots(fewest).bytes, ("draw",) if released else ()

        def of(lanes):
            held = [*parts, *self._decode_step(min(lanes, self.drawing)), *activations]
            choice = {"lanes": lanes, "tokens": tokens, "planned": planned, "recomputed": recomputed}
            slots = dataclasses.replace(self._slots(lanes), times=times)
            made = MemoryPlan(
                held, slots, one_group, share, self.room, ranks=self.ranks, parallel=self.parallel, **choice,
                cost=self._cost(tokens, recomputed, lanes, False, released),
            )  # fmt: skip
            if not 0 < self.merged <= MERGED_SHARE * (self.room - made.fixed):
                return made
            part = Part("merged adapters", self.merged, "copies of the weights, for rollouts", times, early=True)
            cost = self._cost(tokens, recomputed, lanes, True, released)
            return dataclasses.replace(made, parts=[*held, part], cost=cost)

        more = range(fewest + 1, self.most + 1)
        return of(fewest + bisect_left(more, True, key=lambda lanes: not of(lanes).ample))

    def _merged_bytes(self):
        """Return the bytes of copies with merged adapters, or 0 if the rollouts cannot use them."""
        fast = self.device.type == "cuda" and HAS_TRITON and self.backend in ("auto", "fast", "eager")
        policy = Policy.of(self.model) if fast and self.count.adapters and self.grpo else None
        if policy is None or obstacle(policy):
            return 0
        return sum(copied_bytes(policy).values())

    def _cost(self, tokens, recomputed, lanes, merged, released):
        """Predict the time of updates and decode steps, in FLOPs per weight; for supervised training, of one token."""
        layers, flops = self.model.config.get_text_config().num_hidden_layers, 4 if self.count.adapters else 6
        added = PASS_SHARDED if self.sharded else PASS
        if self.config.parallel == "fsdp2_offload":  # shards are copied twice to the device, and gradients back
            added = PCIE * (3 * FP32 if self.count.trained else 2 * self.dtype.itemsize) / self.ranks
        token = flops + 2 * recomputed / layers + added / tokens
        if not self.grpo:
            return token
        steps = self.config.max_completion_length * self.most / max(lanes, 1)  # vLLM servers have no lanes
        apart = DEQUANTIZED if self.count.packed else APART if self.count.adapters else 1
        decode = DECODE_STEP * (1 if merged else apart)
        return self.config.num_iterations * self.in_all * token + steps * decode + released * RELEASE / self.count.base

    def _token_bytes(self, recomputed):
        """Return `activation_bytes` of one token."""
        fused = would_apply(self.model, self.config.use_liger_kernel, self.device)
        return activation_bytes(self.model, self.dtype, 1, recomputed=recomputed, fused=fused)

    def _slots(self, lanes):
        """Compute the part of keys and values of `lanes` completions at the same time."""
        if not self.requests:
            how = "in the vLLM servers" if self.grpo else "evaluations use a share of the remaining memory"
            return Part("KV cache", 0, how)
        token = kv_token_bytes(self.model.config.get_text_config(), self.dtype)
        slots = fit(self.requests, lanes, token, math.inf, self.flat)
        completions = f"{lanes:,} completions" + f" of {self.most:,}" * (lanes < self.most)
        tokens = f"{completions} x {slots.lane_tokens} tokens"
        if not self.flat:
            tokens = f"({slots.prompts} prompts x {slots.longest_prompt} tokens + {tokens})"
        return Part("KV cache", slots.tokens * token, f"{tokens} x {token:,} bytes")

    def _decode_step(self, lanes):
        """Compute the parts of prefills and decode steps. CUDA graphs keep their memory until the slots change."""
        config, vocabulary = self.config, len(self.model.get_output_embeddings().weight)
        # A repetition penalty needs three more tensors of this size.
        logit = FP32 * (4 if self.grpo and config.repetition_penalty != 1 else 1)
        captured = lanes > 0 and self.device.type == "cuda" and self.backend in ("auto", "fast")
        times, how = tuple(TIMES) if captured else ("draw",), f"{lanes:,} x {vocabulary:,} x {logit} bytes"
        parts = [Part("logits of a decode step", lanes * vocabulary * logit, how, times, at_most=True)]
        shape = self.model.config.get_text_config()
        layer = self.dtype.itemsize * (3 * _mlp_width(shape)[0] + 4 * shape.hidden_size)
        if lanes:
            how = f"{PREFILL_TOKENS:,} tokens of prompts in one layer x {layer:,} bytes"
            parts.append(Part("prefill", PREFILL_TOKENS * layer, how, ("draw",), at_most=True))
        if captured:
            prompts = min(lanes, len(self.requests))
            graphs = sum(size < lanes for size in BUCKETS) + sum(size < prompts for size in PROMPT_BUCKETS) + 1
            how = f"{graphs} x {gib(GRAPH_BYTES)}, and {lanes:,} x {layer:,} bytes of one layer"
            parts.append(Part("CUDA graphs", graphs * GRAPH_BYTES + lanes * layer, how, times, at_most=True))
        return parts

    def _weights(self):
        """Compute the parts of policy, gradients and optimizer. With fsdp2, all except adapters are sharded.

        Shards of trained weights are fp32, because they are the optimizer's masters.
        """
        count, b, parts = self.count, self.dtype.itemsize, []
        masters = FP32 * (self.dtype != torch.float32)
        stored = FP32 if self.sharded and count.trained else b
        moments = 2 * (1 if self.config.optim == "adamw_8bit" else FP32)
        states = moments + masters * (not self.sharded)
        for name, numbers, each, of_adapter in (
            ("policy", count.base, stored, b),
            ("gradients", count.trained, FP32, FP32),
            ("optimizer", count.trained, states, moments + masters),
        ):
            size, how = numbers * each, f"{numbers:,} x {each} bytes"
            if self.sharded:
                size, how = math.ceil(size / self.ranks), f"{how} / {self.ranks} devices"
            if count.packed and name == "policy":
                size, how = size + count.packed, f"{how}, {count.packed:,} bytes of 4-bit weights"
            if count.adapters:
                how += f", and {count.adapters:,} x {of_adapter} bytes of adapters"
            if self.config.parallel == "fsdp2_offload":
                size, how = 0, f"{size:,} bytes of host memory: {how}"
            times = ()
            if name == "gradients":  # with the full KL, the reference runs for each micro-batch
                times = ("head", "layers", "reference") if self.grpo and self.config.objective.full_kl else UPDATE
            parts.append(Part(name, size + count.adapters * of_adapter, how, times))
        if count.packed:
            layers = [module for module in self.model.modules() if isinstance(module, NF4Linear)]
            numbers = max(layer.in_features * layer.out_features for layer in layers)
            how, times = f"{numbers:,} x {b} bytes, one layer at a time", ("draw", "reference", "layers")
            parts.append(Part("dequantized weight", numbers * b, how, times))
        return parts

    def _gathered(self):
        """Compute the parts of sharded weights and gradients that are temporarily gathered."""
        if not self.sharded:
            return []
        config, count, b, rest = self.config, self.count, self.dtype.itemsize, "embedding and head"
        in_all, times, where = count.base + count.adapters, ("draw",), ""
        if self.device.type == "cuda" and self.backend in ("auto", "fast"):  # CUDA graphs read them
            times, where = (), ", at fixed addresses"
        elif getattr(config, "serve_port", None) is not None:  # a request during an update keeps them
            times = ()
        unit = max([*count.layers, count.rest])
        whole, what = count.two_layers + count.rest, f"two layers, {rest}"
        if config.parallel == "fsdp2_keep":
            whole, what = count.base, "all layers, because parallel is fsdp2_keep"
        gradients = max(count.two_layers, count.rest) if count.trained else 0
        how = f"two layers, or {rest}: {gradients:,} x 4 bytes" if gradients else "none: the shards are frozen"
        parts = [
            Part("whole weights", in_all * b, f"{in_all:,} x {b} bytes, for rollouts{where}",
                 times, early=True, at_most=not self.grpo),  # supervised training generates only in evaluations
            Part("gathered unit", unit * b, f"the largest layer, or {rest}: {unit:,} x {b} bytes", ("draw",)),
            Part("gathered layers", whole * b, f"{what}: {whole:,} x {b} bytes", ("reference", "head", "layers")),
            Part("unsharded gradients", gradients * FP32, how, ("layers",)),
        ]  # fmt: skip
        # The full KL needs the states of a frozen copy, which is sharded too and runs within the policy's pass.
        copied = self.grpo and not config.use_peft and config.ref_storage is None
        if copied and config.objective.full_kl:
            how = f"{rest} beside the policy's: {count.rest:,} x {b} bytes"
            parts.append(Part("reference's unit", count.rest * b, how, ("reference", "head")))
        return parts

    def _reference(self):
        """Compute the part of the reference, as `make_reference` creates it."""
        config, none = self.config, None
        if not self.grpo:
            none = "supervised training has none"
        elif config.beta == 0:
            none = "beta is 0"
        elif config.use_peft:
            none = "it is the policy without its adapters"
        if none:
            return Part("reference", 0, f"none: {none}")
        b, size = self.dtype.itemsize, self.count.base * self.dtype.itemsize
        if config.ref_storage == "cpu":
            how = f"two layers, embedding and head; {size:,} bytes of host memory, streamed layer by layer"
            return Part("reference", b * (self.count.two_layers + self.count.rest), how, ("reference",))
        if config.ref_storage is not None:
            head, bits = self.model.get_output_embeddings(), {"int8": 8, "nf4": 4}[config.ref_storage]
            linear = [m.weight for m in self.model.modules() if isinstance(m, torch.nn.Linear) and m is not head]
            numbers = sum(weight.numel() for weight in linear)
            how = f"{numbers:,} weights x {bits} bits without their scales, and the rest as in the policy"
            return Part("reference", numbers * bits // 8 + size - numbers * b, how)
        devices = self.ranks if self.sharded else 1
        how = "a copy of the policy" + f" / {devices} devices" * self.sharded
        return Part("reference", math.ceil(size / devices), how)

    def _head(self, tokens):
        """Compute the parts of the head for micro-batches of `tokens` tokens."""
        config, weight = self.config, self.model.get_output_embeddings().weight
        vocabulary, hidden = weight.shape
        # Without Triton: the logits; with the full KL, the reference's logits and as many temporaries; with a soft-cap,
        # its slope.
        full_kl = self.grpo and config.objective.full_kl
        capped = logit_softcap(self.model.config.get_text_config()) is not None
        chunk, logit = chunk_rows(vocabulary, self.device), FP32 * (1 + 2 * full_kl + capped)
        logit += 2 * (self.device.type == "cuda" and not full_kl)  # their gradient in 16 bits
        if not full_kl and self.device.type == "cuda" and HAS_TRITON:
            from fastgrpo.kernels.launch import CHUNK_ROWS

            chunk, logit = CHUNK_ROWS, self.dtype.itemsize
        chunk = min(chunk, tokens)
        gradient = vocabulary * hidden * FP32 * weight.requires_grad
        # Autograd keeps the gradient of a tied head until the end; fsdp2 reduces it with the embedding's gradient.
        held = self.sharded or weight is self.model.get_input_embeddings().weight
        how = f"{vocabulary:,} x {hidden} x 4 bytes" if gradient else "none: it is frozen"
        entries = f"{chunk} x {vocabulary:,} x {logit} bytes"
        return [
            Part("head", chunk * vocabulary * logit, f"a chunk of {entries}", ("head",)),
            Part("head's gradient", gradient, how, ("head", "layers") if held else ("head",)),
        ]

    def _activations(self, tokens, recomputed):
        """Compute the parts of the activations of the largest micro-batch."""
        supervised = not self.grpo
        sizes = [tokens * size for size in self.token_bytes(recomputed)]
        again = f", with {recomputed} layers recomputed" if recomputed else ""
        many = f"{'at most ' * supervised}{tokens:,} tokens"
        how = f"{many} of a micro-batch{again}"
        if self.config.activation_offloading:  # one layer's input is on the device at a time
            how, sizes[0] = f"{sizes[0]:,} bytes of host memory: {how}", sizes[0] // recomputed
        return [
            Part(ACTIVATIONS[0], sizes[0], how, UPDATE, supervised),
            Part(ACTIVATIONS[1], sizes[1], f"{many} and their gradients", ("head",), supervised),
            Part(ACTIVATIONS[2], sizes[2], f"{many} in one layer", ("layers",), supervised),
        ]


def plan(
    config: TrainingConfig, model: PreTrainedModel, *, dtype: torch.dtype, device: torch.device,
    prompt_tokens: int = PROMPT_TOKENS, room: float = math.inf, ranks: int = 1, judges: int = 0,
    waits: bool = False, releases: bool = False,
) -> MemoryPlan:  # fmt: skip
    """Plan a run's memory on each device, for a `model` without weights, and resolve auto settings.

    `judges` are the bytes of reward models. `waits` says that completions wait for tools, `releases` that updates can
    release the KV cache. If the run does not fit, plan it also with each setting that may help.
    """
    model = model.to(dtype)
    transformers = config.rollout_backend in ("auto", "hf") and dry_run(model).obstacle is not None

    @functools.cache
    def with_lora(r, alpha, names, load_in_4bit):
        made = copy.deepcopy(model)
        if load_in_4bit:
            quantize(made, "nf4", "meta")
        with torch.device("meta"):  # the adapters need no values
            return add_lora(made, r=r, alpha=alpha, target_modules=names)

    def of(config, parallel, judges=judges):
        lora = config.lora_r, config.lora_alpha, config.lora_target_modules, config.load_in_4bit
        planned = with_lora(*lora) if config.use_peft else model
        shared = prompt_tokens, room, ranks, parallel, judges, waits, releases, transformers
        return _Planner(config, planned, dtype, device, *shared).plan()

    whole = of(config, "ddp")
    parallel, chosen = choose_parallel(config, whole)
    made = dataclasses.replace(whole if parallel == "ddp" else of(config, parallel), chosen=chosen)
    if made.fits:
        return made
    auto = {"gradient_checkpointing": made.checkpointing, "max_tokens_per_microbatch": made.tokens}
    chosen, instead = dataclasses.replace(config, **auto), {}
    for flag, settings in _changes(chosen, ranks).items():
        if settings.get("gradient_checkpointing") and not model.supports_gradient_checkpointing:
            continue
        try:
            changed, without = dataclasses.replace(chosen, **settings), "reward_model_kwargs" in settings
            other = of(changed, sharing(settings.get("parallel", parallel)), 0 if without else judges)
        except (TypeError, ValueError, ImportError):  # conflicting settings, no adapters for this model, or no peft
            continue
        if settings.get("parallel") == "fsdp2_offload":
            flag += f" (with {gib(host_bytes(model, ranks))} of host memory)"
        instead[flag] = other.least
    return dataclasses.replace(made, instead=instead)


def host_bytes(model: PreTrainedModel, ranks: int) -> int:
    """Return the host memory that a rank takes with fsdp2_offload while it saves a checkpoint.

    torch rounds each pinned tensor up to a power of two: masters, gradients, and on rank 0 the exported weights. The
    rest is two moments, and a copy of masters and moments.
    """

    def pinned(size):
        return 1 << (size - 1).bit_length()

    counts = [p.numel() for name, p in model.named_parameters() if ADAPTER not in name]
    shards = [math.ceil(count / ranks) * FP32 for count in counts]
    exported = sum(pinned(count * model.dtype.itemsize) for count in counts)
    return 2 * sum(map(pinned, shards)) + (2 + 3) * sum(shards) + exported


def _changes(config, ranks):
    """Return the flags that may save memory, each with the settings that it changes."""
    without_reference = {"ref_storage": None, "sync_ref_model": False}
    adapters = {"use_peft": True} | (without_reference if isinstance(config, GRPOConfig) else {})
    tokens, length = config.max_tokens_per_microbatch // 2, config.max_completion_length // 2
    half = getattr(config, "num_generations", 0) // 2
    judges = json.dumps(keywords("reward_model_kwargs", config.reward_model_kwargs) | {"device": "cpu"})
    changes = {
        "--use_peft True": adapters,
        "--use_peft True --load_in_4bit True": adapters | {"load_in_4bit": True},
        "--beta 0": {"beta": 0.0} | without_reference,
        "--ref_storage cpu": {"ref_storage": "cpu"},
        "--ref_storage nf4": {"ref_storage": "nf4"},
        f"--reward_model_kwargs {shlex.quote(judges)}": {"reward_model_kwargs": judges},
        "--gradient_checkpointing True": {"gradient_checkpointing": True},
        "--activation_offloading True": {"activation_offloading": True, "gradient_checkpointing": True},
        f"--max_tokens_per_microbatch {tokens}": {"max_tokens_per_microbatch": tokens},
        f"--max_completion_length {length}": {"max_completion_length": length},
        **({f"--num_generations {half}": {"num_generations": half}} if half > 1 else {}),
        "--rollout_memory_utilization 1": {"rollout_memory_utilization": 1.0},
    }
    if config.rollout_backend in ("auto", "fast"):
        changes["--rollout_backend eager"] = {"rollout_backend": "eager"}
    if ranks == 1 and config.parallel in ("auto", "ddp"):
        changes["--optim adamw_8bit"] = {"optim": "adamw_8bit"}
    ways = ("fsdp2", "fsdp2_offload") if ranks > 1 else ("fsdp2_offload",)
    return changes | {f"--parallel {way}": {"parallel": way} for way in ways}


def can_release(config: TrainingConfig, device: torch.device) -> bool:
    """Return whether updates can release the KV cache. A server in the same process would need its memory."""
    if device.type != "cuda" or not isinstance(config, GRPOConfig) or config.serve_port is not None:
        return False
    return config.rollout_backend in ("eager", "hf", "vllm") or mapped.works(device)


def sharing(parallel: str) -> str:
    """Return ddp or fsdp2; fsdp2_keep and fsdp2_offload are variants of fsdp2."""
    return parallel.partition("_")[0]


def choose_parallel(config: TrainingConfig, whole: MemoryPlan | None) -> tuple[str, str]:
    """Choose ddp or fsdp2, and return it with the reason."""
    if config.parallel != "auto":
        return sharing(config.parallel), "set by parallel"
    if config.load_in_4bit:
        return "ddp", "4-bit weights are not sharded"
    if whole is None:
        return "ddp", "auto is ddp if the memory of a model cannot be planned"
    if whole.ranks == 1 or math.isinf(whole.room):
        return "ddp", "there is one process" if whole.ranks == 1 else "auto is ddp on a CPU"
    fit, mode = ("fit", "ddp") if whole.fits else ("do not fit", "fsdp2")
    return mode, f"weights, gradients and optimizer {fit} one device unsharded; a step needs {gib(whole.least)}"


def plan_run(
    config: TrainingConfig,
    model: str | Path | PreTrainedModel,
    room: float | None = None,
    ranks: Ranks = ALONE,
    rewards: Rewards | None = None,
    waits: bool = False,
    prompt_tokens: int = PROMPT_TOKENS,
) -> MemoryPlan | None:
    """Plan a run before its weights are loaded. Return None if the model cannot be planned.

    All ranks must call this together. They get the same plan, for the device with the least free memory.
    """
    if not isinstance(model, (str, Path, PreTrainedModel)):
        return None
    device, judges = choose_device(config.device), 0
    if room is None and device.type == "cpu":
        room = math.inf
    elif room is None:
        parameters = model.parameters() if isinstance(model, PreTrainedModel) else ()
        here = torch.device("cuda", torch.cuda.current_device()) if device.index is None else device
        gc.collect()  # an earlier model with layers of Liger is in reference cycles
        room = memory_left(here) + sum(p.nbytes for p in parameters if p.device == here)
    if rewards is not None and same_device(rewards.device(device, config.reward_device), device):
        judges = sum(model.bytes_to_come(device) for model in rewards.models)
    told = ranks.gather((room, can_release(config, device), judges), "the free memory of each device")
    rooms, releasing, judging = zip(*told, strict=True)
    room, releases, judges = min(rooms), all(releasing), max(judging)
    outlined = outline(model, config.trust_remote_code, download=True) if isinstance(model, (str, Path)) else model
    if unplannable(outlined):
        return None
    outlined, sizes = without_weights(outlined), {"ranks": ranks.size, "judges": judges, "waits": waits}
    context = Policy(outlined).context or math.inf
    # The check of rows reports a prompt beyond the context.
    sizes["prompt_tokens"] = max(int(min(prompt_tokens, context)), PROMPT_TOKENS)
    kind = {"dtype": choose_dtype(config.dtype, device), "device": device, "releases": releases}
    return plan(config, outlined, room=room, **kind, **sizes)

"""Predicts the bytes that ranks send per step, and the time this takes.

    python -m benchmarks.scale --nvlink 450 --network 50

prints the table of README.md; --help lists the assumptions. The work per GPU is constant, so K GPUs train on K
times the prompts. With N parameters, R of them in embedding and head, K ranks and M micro-batches, a rank sends

    ddp      2 (K - 1) / K 4 N                                 an all-reduce of the gradients in fp32
    fsdp2    (K - 1) / K (M (4 (N - R) + 2 R + 4 N) + 2 N)     per micro-batch: two all-gathers of the layers and one of
                                                               embedding and head in bf16, and one reduce-scatter of
                                                               the gradients in fp32; and one gather of all weights for
                                                               the rollouts

With fsdp2_keep ("kept whole"), each micro-batch needs one all-gather of the layers less. There is no reference (beta is
0), no evaluation and no save.

The bytes of a collective are those of a ring (nccl-tests, doc/PERFORMANCE.md), and tests/ranks/test_counts.py counts
the collectives. The shares of a step are not bounds. They assume peak bandwidth, no latency, and no wait for the
slowest rank. On the other hand, they ignore the overlap with compute, such as FSDP2's prefetch of the next layer.

The compute time of a step is

    update     (6 + 2) N tokens / (peak x utilization)                     forward, backward, recomputed layers
    rollouts   length x 2 N / (memory bandwidth x utilization of it)       each decode step reads all weights in bf16

The values are those of an H100 SXM: 989 TFLOP/s in bf16 without sparsity, 3.35 TB/s of memory bandwidth, and 450 GB/s
of NVLink in one direction (NVIDIA's data sheet). 400 Gb/s are 50 GB/s, one adapter per GPU. Both utilizations are
assumptions.
"""

import argparse
import math
from collections.abc import Iterator
from functools import cache
from typing import NamedTuple

import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

from fastgrpo.config.settings import GRPOConfig
from fastgrpo.trainer.memory import MICRO_BATCHES, PROMPT_TOKENS, Count, plan

# Qwen2.5, and Llama 3.1 as 8B: hidden size, width of the MLP, layers, query heads, key heads, vocabulary, tied head.
SHAPES = {
    "0.5B": (896, 4864, 24, 14, 2, 151_936, True),
    "1.5B": (1536, 8960, 28, 12, 2, 151_936, True),
    "7B": (3584, 18_944, 28, 28, 4, 152_064, False),
    "8B": (4096, 14_336, 32, 32, 8, 128_256, False),
    "32B": (5120, 27_648, 64, 40, 8, 152_064, False),
}
MODELS = "1.5B", "7B", "32B"  # of the table
GPUS = 8, 64
OFFLOADED = "fsdp2, offloaded"
MODES = {
    "ddp": {"parallel": "ddp"},
    "fsdp2": {"parallel": "fsdp2"},
    "fsdp2, kept whole": {"parallel": "fsdp2_keep"},
    OFFLOADED: {"parallel": "fsdp2_offload"},
}
BF16, FP32 = 2, 4  # bytes of a number
DEFAULTS = GRPOConfig()


class Row(NamedTuple):
    """One line of the table."""

    model: str  # a key of `SHAPES`
    gpus: int  # K
    mode: str  # a key of `MODES`
    sent: float  # bytes that a rank sends per step
    compute: float  # seconds per step without communication


@cache
def outlined(name: str) -> Qwen2ForCausalLM:
    """Build a model of `SHAPES` without weights."""
    names = (
        "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads",
        "vocab_size", "tie_word_embeddings",
    )  # fmt: skip
    with torch.device("meta"):
        return Qwen2ForCausalLM(Qwen2Config(**dict(zip(names, SHAPES[name], strict=True))))


def sent(count: Count, ranks: int, micro_batches: int, *, sharded: bool, reshard: bool = True) -> float:
    """Return the bytes that a rank sends per step, with fsdp2 if `sharded`, else ddp.

    With `reshard`, a layer's weights are gathered again for the backward pass.
    """
    share = (ranks - 1) / ranks
    if not sharded:
        return 2 * share * FP32 * count.base
    gathered = (1 + reshard) * (count.base - count.rest) + count.rest
    return share * (micro_batches * (BF16 * gathered + FP32 * count.base) + BF16 * count.base)


def rows(given: argparse.Namespace) -> Iterator[Row]:
    """Predict every model, number of GPUs and mode that fits; offloaded only if no other mode fits."""
    tokens = given.prompts * (PROMPT_TOKENS + given.generations * given.length)
    for name in MODELS:
        count = Count.of(outlined(name))
        update = 8 * count.base * tokens / (given.tflops * 1e12 * given.utilization)
        rollouts = given.length * BF16 * count.base / (given.memory_bandwidth * 1e9 * given.memory_utilization)
        for gpus in GPUS:
            fitting = {mode: config for mode, config in _configs(given, gpus) if _fits(name, config, gpus, given.room)}
            for mode, config in fitting.items():
                if mode == OFFLOADED and len(fitting) > 1:
                    continue
                bytes = sent(
                    count, gpus, math.ceil(tokens / config.max_tokens_per_microbatch),
                    sharded=config.parallel.startswith("fsdp2"), reshard=config.parallel != "fsdp2_keep",
                )  # fmt: skip
                yield Row(name, gpus, mode, bytes, update + rollouts)


def _configs(given, gpus):
    """Yield every mode with its settings, with constant work per GPU."""
    for mode, settings in MODES.items():
        yield mode, GRPOConfig(
            prompts_per_step=given.prompts * gpus, num_generations=given.generations, **settings,
            max_completion_length=given.length, gradient_checkpointing=True, rollout_backend="eager",
            max_tokens_per_microbatch=MICRO_BATCHES[0],
        )  # fmt: skip


def _fits(name, config, gpus, room):
    """Return whether a run fits GPUs with this many GiB."""
    on = {"dtype": torch.bfloat16, "device": torch.device("cpu")}  # on a CPU, the plan counts the head's logits in fp32
    return plan(config, outlined(name), room=room * 2**30, ranks=gpus, **on).fits


def table(given: argparse.Namespace | None = None) -> str:
    """Format the predictions as a Markdown table; None means the default assumptions."""
    given = given or assumptions([])
    lines = [
        "| model | GPUs | parallel | computes, s | sends, GB | NVLink, s | share | network, s | share |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for row in rows(given):
        cells = [row.model, row.gpus, row.mode, f"{row.compute:.1f}", f"{row.sent / 1e9:.1f}"]
        for bandwidth in (given.nvlink, given.network):
            seconds = row.sent / (bandwidth * 1e9)
            cells += [f"{seconds:.2f}", f"{seconds / (row.compute + seconds):.0%}"]
        lines.append("| " + " | ".join(map(str, cells)) + " |")
    return "\n".join(lines)


def balance(given: argparse.Namespace) -> float:
    """Return the number of lanes at which the compute of a decode step takes as long as reading the weights.

    A lane costs 2 N operations, and the weights are 2 N bytes, so this is peak / memory bandwidth. With fewer lanes per
    GPU, a decode step is hardly shorter, so more GPUs for the same prompts save little.
    """
    return given.tflops * 1e12 / (given.memory_bandwidth * 1e9)


def assumptions(argv: list[str] | None = None) -> argparse.Namespace:
    """Parse the assumptions; None means the arguments of the process."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.scale", description=__doc__.splitlines()[0])
    parser.add_argument("--nvlink", type=float, default=450, help="GB/s that a GPU sends over NVLink")
    parser.add_argument("--network", type=float, default=50, help="GB/s that a GPU sends over the network")
    parser.add_argument("--room", type=float, default=78, help="free GiB of a GPU; the default is for 80 GB")
    parser.add_argument("--tflops", type=float, default=989, help="peak of a GPU in bf16, in TFLOP/s")
    parser.add_argument("--utilization", type=float, default=0.4, help="share of the peak that an update reaches")
    parser.add_argument("--memory_bandwidth", type=float, default=3350, help="GB/s of a GPU's memory")
    parser.add_argument("--memory_utilization", type=float, default=0.6, help="share of it that decoding reaches")
    parser.add_argument("--prompts", type=int, default=DEFAULTS.prompts_per_step, help="prompts per step and GPU")
    parser.add_argument("--generations", type=int, default=DEFAULTS.num_generations, help="completions of each prompt")
    parser.add_argument("--length", type=int, default=DEFAULTS.max_completion_length, help="tokens of each completion")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> None:
    """Print the table, and the number of lanes that a GPU needs."""
    given = assumptions(argv)
    print(table(given))
    print(f"\nlanes from which a decode step takes longer than reading the weights: {balance(given):.0f}")


if __name__ == "__main__":
    main()

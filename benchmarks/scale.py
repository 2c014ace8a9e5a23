"""What several GPUs send a step, and how long that takes, before anyone has measured it.

    python -m benchmarks.scale --nvlink 450 --network 50

prints the table of docs/scale.md; --help lists what is assumed. Each GPU has one GPU's work, so that K GPUs train on K
times the prompts. With N parameters, R of them in embedding and head, K ranks and M micro-batches, a rank sends

    ddp      2 (K - 1) / K 4 N                                 an all-reduce of the gradients in fp32
    fsdp2    (K - 1) / K (M (4 (N - R) + 2 R + 4 N) + 2 N)     of each micro-batch two all-gathers of the layers and one
                                                               of embedding and head in bf16, and one reduce-scatter of
                                                               the gradients in fp32; and one gather of the whole
                                                               weights for the rollouts

and with fsdp2_keep ("kept whole") one all-gather of the layers less of each micro-batch. There is
no reference (beta is 0), and no evaluation or save.

The bytes of a collective are those of a ring (nccl-tests, doc/PERFORMANCE.md), and tests/ranks/test_counts.py counts
the collectives. The shares of a step are no bounds. They are those of links at their peak, without latency and without
waiting for the slowest rank; but nothing is sent while something computes here, as FSDP2 gathers a layer ahead.

A step computes for

    update     (6 + 2) N tokens / (peak x utilization)         forward, backward, and layers computed again
    rollouts   length x 2 N / (memory bandwidth x utilization of it)       each decode step reads all weights in bf16

The peak is that of an H100 SXM in bf16 without sparsity, 989 TFLOP/s, its memory has 3.35 TB/s and its NVLink 450 GB/s
in one direction (NVIDIA's data sheet). 400 Gb/s are 50 GB/s, one adapter for each GPU. Both utilizations are assumed.
"""

import argparse
import math
from collections.abc import Iterator
from functools import cache
from typing import NamedTuple

import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

from fastgrpo.config.settings import GRPOConfig
from fastgrpo.trainer.memory import PROMPT_TOKENS, Count, plan

# Qwen2.5: hidden size, width of the MLP, layers, query heads, key heads, vocabulary, whether the head is tied.
MODELS = {
    "1.5B": (1536, 8960, 28, 12, 2, 151_936, True),
    "7B": (3584, 18_944, 28, 28, 4, 152_064, False),
    "32B": (5120, 27_648, 64, 40, 8, 152_064, False),
}
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
    """One line of the table.

    Attributes:
        model: The name of the model.
        gpus: K.
        mode: How the ranks share the run.
        sent: Bytes that a rank sends a step.
        compute: Seconds of a step without what is sent.
    """

    model: str
    gpus: int
    mode: str
    sent: float
    compute: float


@cache
def outlined(name: str) -> Qwen2ForCausalLM:
    """Build a model without weights.

    Args:
        name: A key of `MODELS`.
    """
    names = (
        "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads",
        "vocab_size", "tie_word_embeddings",
    )  # fmt: skip
    with torch.device("meta"):
        return Qwen2ForCausalLM(Qwen2Config(**dict(zip(names, MODELS[name], strict=True))))


def sent(count: Count, ranks: int, micro_batches: int, *, sharded: bool, reshard: bool = True) -> float:
    """Count the bytes that a rank sends a step.

    Args:
        count: The parameters: N, and R of them.
        ranks: K.
        micro_batches: M.
        sharded: Whether fsdp2 shares the run; else ddp.
        reshard: Whether a layer's weights are gathered a second time for the backward pass.
    """
    share = (ranks - 1) / ranks
    if not sharded:
        return 2 * share * FP32 * count.base
    gathered = (1 + reshard) * (count.base - count.rest) + count.rest
    return share * (micro_batches * (BF16 * gathered + FP32 * count.base) + BF16 * count.base)


def rows(given: argparse.Namespace) -> Iterator[Row]:
    """Predict every model, number of GPUs and mode that fits; offloaded only where nothing else does.

    Args:
        given: The assumptions.
    """
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
    """List every mode with the settings of a run in it, which has the work of one GPU on each GPU."""
    for mode, settings in MODES.items():
        yield mode, GRPOConfig(
            prompts_per_step=given.prompts * gpus, num_generations=given.generations, **settings,
            max_completion_length=given.length, gradient_checkpointing=True, rollout_backend="eager",
        )  # fmt: skip


def _fits(name, config, gpus, room):
    """Tell whether a run fits GPUs with so many GiB."""
    on = {"dtype": torch.bfloat16, "device": torch.device("cpu")}  # the plan of a CPU counts the head's logits in fp32
    return plan(config, outlined(name), room=room * 2**30, ranks=gpus, **on).fits


def table(given: argparse.Namespace | None = None) -> str:
    """Write the predictions as a Markdown table.

    Args:
        given: The assumptions; None for the defaults.
    """
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
    """Return how many lanes make a decode step take longer than reading the weights does.

    A lane costs 2 N operations, and the weights are 2 N bytes: peak / memory bandwidth lanes take equally long. With
    fewer lanes on a GPU, a decode step is hardly shorter, so that more GPUs for the same prompts save little.

    Args:
        given: The assumptions.
    """
    return given.tflops * 1e12 / (given.memory_bandwidth * 1e9)


def assumptions(argv: list[str] | None = None) -> argparse.Namespace:
    """Read the assumptions.

    Args:
        argv: The arguments; None takes those of the process.
    """
    parser = argparse.ArgumentParser(prog="python -m benchmarks.scale", description=__doc__.splitlines()[0])
    parser.add_argument("--nvlink", type=float, default=450, help="GB/s that a GPU sends by NVLink")
    parser.add_argument("--network", type=float, default=50, help="GB/s that a GPU sends through the network")
    parser.add_argument("--room", type=float, default=78, help="GiB that are free on a GPU, here one of 80 GB")
    parser.add_argument("--tflops", type=float, default=989, help="peak of a GPU in bf16, in TFLOP/s")
    parser.add_argument("--utilization", type=float, default=0.4, help="share of the peak that an update reaches")
    parser.add_argument("--memory_bandwidth", type=float, default=3350, help="GB/s of a GPU's memory")
    parser.add_argument("--memory_utilization", type=float, default=0.6, help="share of it that decoding reaches")
    parser.add_argument("--prompts", type=int, default=DEFAULTS.prompts_per_step, help="prompts a step on each GPU")
    parser.add_argument("--generations", type=int, default=DEFAULTS.num_generations, help="completions of each prompt")
    parser.add_argument("--length", type=int, default=DEFAULTS.max_completion_length, help="tokens of each completion")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> None:
    """Print the table, and how many lanes a GPU needs.

    Args:
        argv: The arguments; None takes those of the process.
    """
    given = assumptions(argv)
    print(table(given))
    print(f"\nlanes from which a decode step takes longer than reading the weights: {balance(given):.0f}")


if __name__ == "__main__":
    main()

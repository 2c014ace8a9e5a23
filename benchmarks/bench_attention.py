"""Training forward and backward of groups with a long prompt: one prompt for all completions against a prompt each.

Shapes: N completion tokens, V vocabulary, D hidden. Random weights; whole micro-batches of the default token budget,
from token ids through layers, head and GRPO loss to the gradients of all weights; without gradient checkpointing ("all
rows") and with it. The variants run in turns; what sharing is held to is reported in `extra_info["bars"]` and never
asserted; that both give the same gradients is.

    pytest benchmarks/bench_attention.py --benchmark-only
    On a GPU a model of Qwen2.5-0.5B's shape in bf16, four groups; elsewhere a small one in fp32, one group.
    FASTGRPO_BENCH_SMALL=1: tiny shapes and two rounds, to see that it runs; nothing is written to results/.
"""

import os
from typing import NamedTuple

import pytest
import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

from benchmarks.compare import append, compare, rows_of
from benchmarks.variants import versions
from fastgrpo import linear_grpo_loss
from fastgrpo.data.records import Sample
from fastgrpo.policy.batch import Batch, split_by_tokens
from fastgrpo.policy.load import prepare
from fastgrpo.policy.model import Policy
from fastgrpo.policy.varlen import kernel_for

SMALL = os.environ.get("FASTGRPO_BENCH_SMALL") == "1"
CUDA = torch.cuda.is_available()
DEVICE = "cuda" if CUDA else "cpu"
DTYPE = torch.bfloat16 if CUDA else torch.float32
ROUNDS = 2 if SMALL else 10
SECONDS = 60  # of rounds for one setting
MAX_TOKENS = 16384
BAR = 0.45  # of the time with a prompt each, at prompt 1024, completions 256, G = 8
DIFFERENCE = 0.05 if CUDA else 1e-4  # of the two variants' gradients, relative: rounding of bf16 through 24 layers


class Setting(NamedTuple):
    """Groups of G completions of C tokens, after P tokens of prompt; the model's width, layers, heads, vocabulary."""

    groups: int
    prompt: int
    completion: int
    group_size: int
    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    vocab: int


if SMALL:
    SETTING = Setting(2, 64, 16, 4, 32, 64, 2, 4, 2, 512)
elif CUDA:
    SETTING = Setting(4, 1024, 256, 8, 896, 4864, 24, 14, 2, 151936)
else:
    SETTING = Setting(1, 1024, 256, 8, 128, 512, 4, 4, 2, 4096)


def make_model(setting, checkpointing):
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=setting.vocab,
        hidden_size=setting.hidden,
        intermediate_size=setting.intermediate,
        num_hidden_layers=setting.layers,
        num_attention_heads=setting.heads,
        num_key_value_heads=setting.kv_heads,
        tie_word_embeddings=True,
    )
    with torch.device(DEVICE):
        model = Qwen2ForCausalLM(config)
    for parameter in model.parameters():
        parameter.data = parameter.data.to(DTYPE)
        parameter.grad = torch.zeros_like(parameter)
    return prepare(model, checkpointing)


def make_samples(setting):
    generator = torch.Generator().manual_seed(0)

    def ids(count):
        return torch.randint(setting.vocab, (count,), generator=generator).tolist()

    prompts = [ids(setting.prompt) for _ in range(setting.groups)]
    advantages = torch.randn(setting.groups * setting.group_size, generator=generator).tolist()
    return [
        Sample(prompts[i // setting.group_size], ids(setting.completion), advantage)
        for i, advantage in enumerate(advantages)
    ]


def training_pass(model, samples, share_prompt):
    """Forward and backward of all samples into the weights' gradients. Returns the inputs that went through."""
    weight, bias, _ = Policy.of(model).head
    count, tokens = sum(len(sample.completion_ids) for sample in samples), 0
    for part in split_by_tokens(samples, MAX_TOKENS, share_prompt):
        batch = Batch.pack(part, DEVICE, share_prompt)
        out = linear_grpo_loss(
            Policy.of(model).completion_states(batch), weight, batch.targets, batch.advantages, bias=bias,
            cu_seqlens=batch.cu_seqlens, rows=torch.arange(len(batch.targets)), num_items_in_batch=count,
        )  # fmt: skip
        out.loss.backward()
        tokens += len(batch.input_ids)
    return tokens


def gradients(model, samples, share_prompt):
    """-> every weight's gradient, the inputs that went through."""
    for parameter in model.parameters():
        parameter.grad.zero_()
    tokens = training_pass(model, samples, share_prompt)
    return [parameter.grad.clone() for parameter in model.parameters()], tokens


def difference(ones, others):
    """Norm of all differences over the norm of all gradients."""
    apart = sum((one - other).double().square().sum() for one, other in zip(ones, others, strict=True))
    return (apart / sum(other.double().square().sum() for other in others)).sqrt().item()


@pytest.mark.parametrize("checkpointing", [False, True], ids=["kept", "recomputed"])
def test_shared_prompt(benchmark, checkpointing):
    model, samples = make_model(SETTING, checkpointing), make_samples(SETTING)
    names = {"fastgrpo": True, "a prompt each": False}
    results = {name: gradients(model, samples, share_prompt) for name, share_prompt in names.items()}
    apart = difference(results["fastgrpo"][0], results["a prompt each"][0])
    assert 0 < apart < DIFFERENCE
    tokens = {name: count for name, (_, count) in results.items()}
    del results

    def variant(share_prompt):
        def call():
            training_pass(model, samples, share_prompt)  # gradients add up in place: nothing is left

        return call

    variants = {name: variant(share_prompt) for name, share_prompt in names.items()}
    results = compare(variants, ROUNDS, DEVICE, SECONDS)
    shape = SETTING
    probe = torch.empty(1, shape.heads, shape.hidden // shape.heads, dtype=DTYPE, device=DEVICE)
    rows = rows_of(
        results,
        extras={name: {"tokens": count} for name, count in tokens.items()},
        **versions(),
        benchmark="shared_prompt",
        n=len(samples) * shape.completion,
        d=shape.hidden,
        v=shape.vocab,
        dtype=str(DTYPE).removeprefix("torch."),
        case="all rows, layers recomputed" if checkpointing else "all rows",
        setting=shape._asdict(),
        attention=kernel_for(probe).name,
        difference=float(f"{apart:.3g}"),
    )
    value = round(results["fastgrpo"]["median_s"] / results["a prompt each"]["median_s"], 3)
    benchmark.extra_info.update(
        rows=rows,
        missing={},
        bars={"time, of a prompt each": {"value": value, "at most": BAR, "met": value <= BAR}},
    )
    if not SMALL:
        append(rows, DEVICE)
    benchmark.pedantic(variants["fastgrpo"], rounds=ROUNDS)

"""Training on groups with a long prompt, computed once per group or once per completion.

A training pass goes from token ids through layers, head and GRPO loss to the gradients of all weights, in micro-batches
of the default token budget, with and without gradient checkpointing. The model has random weights. On a GPU it has the
shape of Qwen2.5-0.5B in bf16, with four groups. On a CPU it is a small model in fp32, with one group. The benchmark
asserts that both variants give the same gradients.

    pytest benchmarks/bench_attention.py --benchmark-only

Results are added to results/<device>.jsonl. With FASTGRPO_BENCH_SMALL=1 the shapes are tiny and nothing is written.
"""

from collections.abc import Callable
from typing import NamedTuple

import pytest
import torch
from pytest_benchmark.fixture import BenchmarkFixture
from transformers import PreTrainedModel

from benchmarks.compare import compare, rows_of
from benchmarks.harness import CUDA, DEVICE, DTYPE, SMALL, at_most, finish, name_of
from benchmarks.models import QWEN, Size, random_model
from fastgrpo import linear_grpo_loss
from fastgrpo.data.records import Batch, Sample
from fastgrpo.policy.load import prepare
from fastgrpo.policy.micro_batches import micro_batches
from fastgrpo.policy.model import Policy
from fastgrpo.policy.varlen import kernel_for

ROUNDS = 2 if SMALL else 10
SECONDS = 60  # time limit of the rounds for one setting
MAX_TOKENS = 16384
BAR = 0.45  # maximum time relative to one prompt per completion (prompt 1024, completions 256, G = 8)
DIFFERENCE = 0.05 if CUDA else 1e-4  # maximum relative difference of the gradients: bf16 rounds in each of 24 layers


class Setting(NamedTuple):
    """The groups of one step."""

    groups: int
    prompt: int  # tokens
    completion: int  # tokens
    group_size: int  # G, the completions of a group


if SMALL:
    SETTING, SIZE = Setting(2, 64, 16, 4), Size(32, 64, 2, 4, 2, vocab=512)
elif CUDA:
    SETTING, SIZE = Setting(4, 1024, 256, 8), QWEN["0.5b"]
else:
    SETTING, SIZE = Setting(1, 1024, 256, 8), Size(128, 512, 4, 4, 2, vocab=4096)


def make_samples(setting: Setting) -> list[Sample]:
    """Draw random prompts, completions and advantages, equal in each call."""
    generator = torch.Generator().manual_seed(0)

    def ids(count: int) -> list[int]:
        return torch.randint(SIZE.vocab, (count,), generator=generator).tolist()

    prompts = [ids(setting.prompt) for _ in range(setting.groups)]
    advantages = torch.randn(setting.groups * setting.group_size, generator=generator).tolist()
    return [
        Sample(prompts[i // setting.group_size], ids(setting.completion), advantage)
        for i, advantage in enumerate(advantages)
    ]


def training_pass(policy: Policy, samples: list[Sample], share_prompt: bool) -> int:
    """Run forward and backward over all samples, accumulate the gradients, and return the number of model inputs.

    The samples of a prompt are adjacent. With `share_prompt`, a prompt is computed once for all of them.
    """
    weight, bias, _ = policy.head
    count, tokens = sum(len(sample.ids) for sample in samples), 0
    for indices in micro_batches(samples, MAX_TOKENS, share_prompt):
        batch = Batch.pack([samples[i] for i in indices], DEVICE, share_prompt)
        out = linear_grpo_loss(
            policy.completion_states(batch), weight, batch.targets, batch.advantages, bias=bias,
            cu_seqlens=batch.cu_seqlens, rows=torch.arange(len(batch.targets)), num_items_in_batch=count,
        )  # fmt: skip
        out.loss.backward()
        tokens += len(batch.input_ids)
    return tokens


def take_gradients(model: PreTrainedModel) -> list[torch.Tensor]:
    """Return a copy of every weight's gradient, and set the gradients to 0."""
    taken = [parameter.grad.clone() for parameter in model.parameters()]
    for parameter in model.parameters():
        parameter.grad.zero_()
    return taken


def difference(ones: list[torch.Tensor], others: list[torch.Tensor]) -> float:
    """Return the norm of all differences relative to the norm of all gradients."""
    apart = sum((one - other).double().square().sum() for one, other in zip(ones, others, strict=True))
    return (apart / sum(other.double().square().sum() for other in others)).sqrt().item()


@pytest.mark.parametrize("checkpointing", [False, True], ids=["kept", "recomputed"])
def test_shared_prompt(benchmark: BenchmarkFixture, capsys: pytest.CaptureFixture[str], checkpointing: bool) -> None:
    model, samples = random_model("qwen2", SIZE, DEVICE, DTYPE), make_samples(SETTING)
    policy = prepare(model, checkpointing)
    names = {"fastgrpo": True, "a prompt each": False}
    tokens, gradients = {}, {}
    for name, share_prompt in names.items():
        tokens[name] = training_pass(policy, samples, share_prompt)
        gradients[name] = take_gradients(model)
    apart = difference(*gradients.values())
    assert 0 < apart < DIFFERENCE
    del gradients

    def variant(share_prompt: bool) -> Callable[[], None]:
        def call() -> None:
            training_pass(policy, samples, share_prompt)  # gradients are accumulated in place

        return call

    variants = {name: variant(share_prompt) for name, share_prompt in names.items()}
    results = compare(variants, ROUNDS, DEVICE, SECONDS)
    shape = {name: value for name, value in SIZE._asdict().items() if name != "tied"}
    probe = torch.empty(1, SIZE.heads, SIZE.head_dim, dtype=DTYPE, device=DEVICE)
    rows = rows_of(
        results,
        extras={name: {"tokens": count} for name, count in tokens.items()},
        benchmark="shared_prompt",
        n=len(samples) * SETTING.completion,
        d=SIZE.hidden,
        v=SIZE.vocab,
        dtype=name_of(DTYPE),
        case="all rows, layers recomputed" if checkpointing else "all rows",
        setting={**SETTING._asdict(), **shape},
        attention=kernel_for(probe).name,
        difference=float(f"{apart:.3g}"),
    )
    ratio = results["fastgrpo"]["median_s"] / results["a prompt each"]["median_s"]
    bars = {"time, of a prompt each": at_most(ratio, BAR)}
    finish(benchmark, capsys, rows, bars, variants["fastgrpo"], ROUNDS)

"""Rollouts: the engine with each of its attention providers against transformers' `generate` and continuous batching.

On a GPU: models with random weights of the sizes of Qwen2.5-0.5B, 1.5B and 7B in bf16, and 32 prompts of 512 tokens
with 8 completions each. On a CPU: the embedded example's model, and 32 prompts of 6 tokens with 8 completions each.
There are no stop tokens. In the case "equal" all completions have the same length (512 tokens on a GPU, 48 on a CPU).
In the case "long-tailed" their lengths are drawn beforehand, equal for all variants. The engine, `generate` and
continuous batching run in separate processes. On a GPU all of them use liger-kernel's layers if these are installed.

    pytest benchmarks/bench_rollout.py --benchmark-only

Results are added to results/<device>.jsonl. With FASTGRPO_BENCH_SMALL=1 the shapes are tiny and nothing is written.
"""

from functools import partial
from typing import Any

import pytest
import torch
from pytest_benchmark.fixture import BenchmarkFixture
from transformers import GenerationConfig, PreTrainedModel
from transformers.generation import StoppingCriteria, StoppingCriteriaList

from benchmarks.compare import compare, rows_of
from benchmarks.contestants import Contest, Contestant, Entry, contest, taking_part
from benchmarks.harness import CUDA, SMALL, Bar, at_least, finish, name_of
from benchmarks.layers import LAYERS, LIGER
from benchmarks.models import EMBEDDED, QWEN, random_model
from fastgrpo.policy.liger_layers import apply_liger
from fastgrpo.policy.load import prepare
from fastgrpo.rollout.engine import RolloutEngine
from fastgrpo.rollout.sampling import SamplingParams
from fastgrpo.rollout.slots import kv_token_bytes

DEVICE = torch.device("cuda" if CUDA else "cpu")
LARGE = CUDA and not SMALL
COPIED_BYTES = 2**29
ROUNDS = 2 if SMALL else 3 if CUDA else 41
PROMPTS, GROUP = (4, 4) if SMALL else (32, 8)
PROMPT_TOKENS, NEW_TOKENS = (512, 512) if LARGE else (6, 8 if SMALL else 48)
# Bars: share of the bandwidth limit at equal lengths, and speed over generate and over continuous batching.
BARS = {"0.5b": (0.40, 8, 3), "1.5b": (0.60, None, None), "7b": (0.75, None, None)}
CPU_BARS = {"equal": 1.3, "long-tailed": 2.0}  # speed relative to transformers' generate, by case
PLAIN, BATCHING = "transformers generate", "transformers continuous batching"
ENGINES = (  # name -> arguments of engine_of
    {f"fastgrpo, {name}": {"attention": name} for name in ("triton", "flash_attn", "sdpa")}
    | {"fastgrpo, triton, no graphs": {"attention": "triton", "eager": True}}
    if CUDA
    else {f"fastgrpo, {name}": {"attention": name} for name in ("sdpa", "products")}
)


def make_model(size: str) -> PreTrainedModel:
    """Create a random model of a size in `QWEN` or "embedded", with liger's layers if contestants use them."""
    if size == "embedded":
        model = random_model("llama", EMBEDDED, DEVICE, torch.float32, max_position_embeddings=64, bos_token_id=None,
                             eos_token_id=0, pad_token_id=0)  # fmt: skip
    else:
        model = random_model("qwen2", QWEN[size], DEVICE, torch.bfloat16, max_position_embeddings=4096)
    apply_liger(model, LIGER)
    return model


def make_prompts(vocabulary: int) -> list[list[int]]:
    """Draw the prompts, equal in each call."""
    generator = torch.Generator().manual_seed(0)
    return torch.randint(1, vocabulary, (PROMPTS, PROMPT_TOKENS), generator=generator).tolist()


def make_lengths(case: str) -> list[int]:
    """Return the new tokens of each completion: equal, or log-normal draws with a median of a quarter of the limit."""
    count = PROMPTS * GROUP
    if case == "equal":
        return [NEW_TOKENS] * count
    draws = torch.randn(count, generator=torch.Generator().manual_seed(1)).mul(0.8).exp() * NEW_TOKENS / 4
    return draws.clamp(1, NEW_TOKENS).int().tolist()


def engine_of(model: PreTrainedModel, attention: str, eager: bool = False) -> RolloutEngine:
    """Create an engine that decodes all completions at once. It prepares the model in place."""
    return RolloutEngine(
        prepare(model), max_num_seqs=PROMPTS * GROUP, attention=attention, memory_utilization=0.6, enforce_eager=eager
    )


def ours(engine: RolloutEngine, prompts: list[list[int]], lengths: list[int]) -> None:
    """Roll out with the engine; `lengths` are the new tokens of each completion, in order of the prompts."""
    sampling = SamplingParams(max_tokens=NEW_TOKENS, seed=0)
    for i, prompt in enumerate(prompts):
        engine.add_request(prompt, GROUP, sampling, request_id=i, max_tokens=lengths[i * GROUP : (i + 1) * GROUP])
    outputs = {}
    while engine.has_unfinished_requests():
        outputs |= engine.step()
    assert sum(len(rollout.ids) for rollouts in outputs.values() for rollout in rollouts) == sum(lengths)


class StopAt(StoppingCriteria):
    """Ends each completion at its own length; all prompts have `prompt_tokens`."""

    def __init__(self, lengths: list[int], prompt_tokens: int):
        self.ends = torch.tensor(lengths, device=DEVICE) + prompt_tokens

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        return input_ids.shape[1] >= self.ends


def sampled(**settings: Any) -> GenerationConfig:
    """Return a config for plain sampling without a stop token."""
    return GenerationConfig(
        do_sample=True, top_k=0, top_p=1.0, max_new_tokens=NEW_TOKENS, eos_token_id=None, pad_token_id=0, **settings
    )


@torch.no_grad()
def generate(model: PreTrainedModel, prompts: list[list[int]], lengths: list[int]) -> None:
    """Roll out with transformers' `generate`, which decodes until the longest completion ends."""
    ids = torch.tensor(prompts, device=DEVICE)
    model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        generation_config=sampled(num_return_sequences=GROUP),
        stopping_criteria=StoppingCriteriaList([StopAt(lengths, ids.shape[1])]),
    )


@torch.no_grad()
def continuous(model: PreTrainedModel, prompts: list[list[int]]) -> None:
    """Roll out with transformers' continuous batching.

    It has one length limit for all completions, so it is used only for equal lengths. A prompt is passed once per
    completion, because num_return_sequences loses some of them (transformers 5.17.0).
    """
    every = [prompt for prompt in prompts for _ in range(GROUP)]
    outputs = model.generate_batch(inputs=every, generation_config=sampled())
    assert len(outputs) == len(every)


def limit_tokens_a_second(model: PreTrainedModel, lengths: list[int]) -> float:
    """Return the tokens per second if a decode step only read the weights, keys and values; 0 without a GPU.

    A step of R completions of mean length L reads bytes(weights) + R * L * bytes(keys and values of a token).
    """
    weights = sum(p.numel() * p.element_size() for p in model.parameters())
    count, mean = len(lengths), PROMPT_TOKENS + sum(lengths) / len(lengths) / 2
    bandwidth = copy_limit() if CUDA else 0
    return count * bandwidth / (weights + count * mean * kv_token_bytes(model.config, model.dtype))


def copy_limit() -> float:
    """Return the bytes per second that a large copy reads and writes."""
    source = torch.empty(COPIED_BYTES, dtype=torch.uint8, device=DEVICE)
    target = torch.empty_like(source)
    return 2 * COPIED_BYTES / compare({"copy": lambda: target.copy_(source)}, 10, DEVICE)["copy"]["median_s"]


def engine_entry(size: str, engines: list[str], cases: list[str]) -> Entry:
    """Create engines with several attention providers, keys of `ENGINES`, over one model.

    There is a variant per case and engine. `about` has the dtype, and the limit of each case.
    """
    model = make_model(size)
    prompts, lengths = make_prompts(model.config.vocab_size), {case: make_lengths(case) for case in cases}
    calls, missing = {}, {}
    for name in engines:
        try:
            engine = engine_of(model, **ENGINES[name])
            ours(engine, prompts, lengths[cases[0]])
        except ValueError as error:
            missing |= {f"{case}/{name}": str(error) for case in cases}
            continue
        calls |= {f"{case}/{name}": partial(ours, engine, prompts, lengths[case]) for case in cases}
    limits = {case: limit_tokens_a_second(model, lengths[case]) for case in cases}
    return Entry(calls, missing, {"limits": limits, "dtype": name_of(model.dtype)})


def generate_entry(size: str, cases: list[str]) -> Entry:
    """Return an entry for transformers' `generate`, with a variant per case."""
    model = make_model(size)
    prompts = make_prompts(model.config.vocab_size)
    return Entry({f"{case}/{PLAIN}": partial(generate, model, prompts, make_lengths(case)) for case in cases})


def continuous_entry(size: str) -> Entry:
    """Return an entry for transformers' continuous batching, with one variant, for equal lengths."""
    model = make_model(size)
    return Entry({f"equal/{BATCHING}": partial(continuous, model, make_prompts(model.config.vocab_size))})


def contestants_of(size: str, engines: list[str], cases: list[str], peers: bool = True) -> list[Contestant]:
    """Return the contestants: the engines, and with `peers` also transformers."""

    def start(name: str, function: str, **options: Any) -> Contestant:
        return Contestant(name, f"benchmarks.bench_rollout:{function}", DEVICE.type, size=size, **options)

    contestants = [start("fastgrpo", "engine_entry", engines=engines, cases=cases)]
    if peers:
        contestants.append(start(PLAIN, "generate_entry", cases=cases))
        if CUDA and "equal" in cases:
            contestants.append(start(f"equal/{BATCHING}", "continuous_entry"))
    return contestants


def bars_of(size: str, case: str, speeds: dict[str, float], limit: float) -> dict[str, Bar]:
    """Compare fastgrpo's fastest variant with transformers and with the bandwidth limit, in tokens per second."""
    mine = max(speed for name, speed in speeds.items() if name.startswith("fastgrpo"))
    bars = {}
    if not LARGE:
        times = {name: mine / speeds[name] for name in (PLAIN,) if name in speeds}
        return {f"times {name}, {case}, {LAYERS}": at_least(ratio, CPU_BARS[case]) for name, ratio in times.items()}
    share, of_plain, of_batching = BARS[size]
    if case == "equal":
        bars[f"share of the bandwidth limit, {LAYERS}"] = at_least(mine / limit, share)
    if of_plain and PLAIN in speeds:
        bars[f"times {PLAIN}, {case}, {LAYERS}"] = at_least(mine / speeds[PLAIN], of_plain)
    if of_batching and BATCHING in speeds:
        bars[f"times {BATCHING}, {case}, {LAYERS}"] = at_least(mine / speeds[BATCHING], of_batching)
    return bars


def judged(size: str, found: Contest, cases: list[str]) -> tuple[list[dict[str, Any]], dict[str, Bar]]:
    """Return rows and bars of a contest."""
    rows, bars, about = [], {}, found.about["fastgrpo"]
    for case in cases:
        results = {name.removeprefix(f"{case}/"): r for name, r in found.results.items() if name.startswith(f"{case}/")}
        missing = {name.removeprefix(f"{case}/"): why for name, why in found.missing.items() if _is_of(case, name)}
        tokens, limit = sum(make_lengths(case)), about["limits"][case]
        speeds = {name: tokens / result["median_s"] for name, result in results.items()}
        extras = {name: {"tokens_per_s": round(speed)} for name, speed in speeds.items()}
        if limit:
            for name, speed in speeds.items():
                extras[name]["of_bandwidth_limit"] = round(speed / limit, 3)
        rows += rows_of(
            results, missing, extras, benchmark="rollout", model=size, case=case, prompts=PROMPTS, group=GROUP,
            prompt_tokens=PROMPT_TOKENS, new_tokens=NEW_TOKENS, dtype=about["dtype"], liger=LIGER,
        )  # fmt: skip
        bars |= bars_of(size, case, speeds, limit)
    return rows, bars


def _is_of(case, name):
    """Return whether a variant, or a contestant without variants, belongs to a case."""
    return name.startswith(f"{case}/") or "/" not in name


@pytest.mark.parametrize("size", list(QWEN) if LARGE else ["embedded"])
def test_rollout(benchmark: BenchmarkFixture, capsys: pytest.CaptureFixture[str], size: str) -> None:
    contestants = contestants_of(size, list(ENGINES), list(CPU_BARS))
    with taking_part(contestants):
        found = contest(contestants, ROUNDS)
        rows, bars = judged(size, found, list(CPU_BARS))
        fastest = min(
            (name for name in found.results if name.startswith("equal/fastgrpo")),
            key=lambda name: found.results[name]["median_s"],
        )
        finish(benchmark, capsys, rows, bars, lambda: found.again(fastest), ROUNDS, missing=found.missing)

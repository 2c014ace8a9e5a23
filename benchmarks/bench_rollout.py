"""Rollouts: the engine with each of its attention providers against transformers' `generate` and its continuous
batching, in one run, same model, prompts and lengths.

On a GPU: random-weight models of the sizes of Qwen2.5-0.5B, 1.5B and 7B in bf16, 32 prompts of 512 tokens times G = 8,
512 new tokens each with stop tokens ignored, and the same with lengths drawn from a long-tailed distribution. On a CPU:
the embedded example's model, 32 x 8, prompts of 6 tokens. The variants run in turns; bars are reported in
`extra_info["bars"]` and never asserted.

    pytest benchmarks/bench_rollout.py --benchmark-only
    FASTGRPO_BENCH_SMALL=1: tiny shapes and two rounds, to see that it runs; nothing is written to results/.
"""

import os
from functools import partial

import pytest
import torch
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM
from transformers.generation import StoppingCriteria, StoppingCriteriaList

from benchmarks.compare import append, compare, rows_of
from benchmarks.variants import versions
from fastgrpo.policy.load import prepare
from fastgrpo.rollout.engine import RolloutEngine
from fastgrpo.rollout.geometry import kv_token_bytes
from fastgrpo.rollout.sampling import SamplingParams

SMALL = os.environ.get("FASTGRPO_BENCH_SMALL") == "1"
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
GPU = DEVICE.type == "cuda"
ROUNDS = 2 if SMALL else 3 if GPU else 41
PROMPTS, GROUP = (4, 4) if SMALL else (32, 8)
PROMPT_TOKENS, NEW_TOKENS = (512, 512) if GPU and not SMALL else (6, 16 if SMALL else 48)
BANDWIDTH = {"NVIDIA H200": 4.3e12}  # bytes a second that a copy reaches
# Qwen2.5: hidden, intermediate, layers, heads, key heads, tied head.
QWEN = {
    "0.5b": (896, 4864, 24, 14, 2, True),
    "1.5b": (1536, 8960, 28, 12, 2, True),
    "7b": (3584, 18944, 28, 28, 4, False),
}
# Share of the bandwidth limit; times transformers' generate, times its continuous batching; at equal and long-tailed
# lengths.
BARS = {"0.5b": (0.40, 8, 3), "1.5b": (0.60, None, None), "7b": (0.75, None, None)}
CPU_BARS = {"equal": 1.3, "long-tailed": 2.0}


def make_model(size):
    """A random-weight policy of the named size."""
    torch.manual_seed(0)
    if size == "embedded":
        config = LlamaConfig(
            vocab_size=14, hidden_size=64, intermediate_size=256, num_hidden_layers=3, num_attention_heads=4,
            num_key_value_heads=4, max_position_embeddings=64, tie_word_embeddings=True, bos_token_id=None,
            eos_token_id=0, pad_token_id=0,
        )  # fmt: skip
        return prepare(LlamaForCausalLM(config))
    hidden, intermediate, layers, heads, kv_heads, tied = QWEN[size]
    config = Qwen2Config(
        vocab_size=151_936, hidden_size=hidden, intermediate_size=intermediate, num_hidden_layers=layers,
        num_attention_heads=heads, num_key_value_heads=kv_heads, max_position_embeddings=4096, tie_word_embeddings=tied,
    )  # fmt: skip
    with torch.device(DEVICE):
        model = Qwen2ForCausalLM(config).to(torch.bfloat16)
    model.base_model.rotary_emb.float()
    return prepare(model)


def make_lengths(case):
    """New tokens of each completion: all the same, or log-normal with a median of a quarter of the limit."""
    count = PROMPTS * GROUP
    if case == "equal":
        return [NEW_TOKENS] * count
    draws = torch.randn(count, generator=torch.Generator().manual_seed(1)).mul(0.8).exp() * NEW_TOKENS / 4
    return draws.clamp(1, NEW_TOKENS).int().tolist()


def engine_of(model, attention):
    return RolloutEngine(model, max_num_seqs=PROMPTS * GROUP, attention=attention, memory_utilization=0.6)


def ours(engine, prompts, lengths):
    sampling = SamplingParams(max_tokens=NEW_TOKENS, seed=0)
    for i, prompt in enumerate(prompts):
        engine.add_request(prompt, GROUP, sampling, request_id=i, max_tokens=lengths[i * GROUP : (i + 1) * GROUP])
    outputs = []
    while engine.has_unfinished_requests():
        outputs += engine.step()
    assert sum(len(rollout.ids) for output in outputs for rollout in output.rollouts) == sum(lengths)


class StopAt(StoppingCriteria):
    """Each row ends at a length of its own."""

    def __init__(self, lengths, prompt_tokens):
        self.ends = torch.tensor(lengths, device=DEVICE) + prompt_tokens

    def __call__(self, input_ids, scores, **kwargs):
        return input_ids.shape[1] >= self.ends


def sampled(**settings):
    """Plain sampling without a stop token."""
    return GenerationConfig(
        do_sample=True, top_k=0, top_p=1.0, max_new_tokens=NEW_TOKENS, eos_token_id=None, pad_token_id=0, **settings
    )


@torch.no_grad()
def generate(model, prompts, lengths):
    ids = torch.tensor(prompts, device=DEVICE)
    model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        generation_config=sampled(num_return_sequences=GROUP),
        stopping_criteria=StoppingCriteriaList([StopAt(lengths, ids.shape[1])]),
    )


@torch.no_grad()
def continuous(model, prompts, lengths):
    """transformers' continuous batching. It has one length limit for all, so it runs the equal lengths alone; a prompt
    is passed once for each completion, because num_return_sequences loses some there (transformers 5.17.0)."""
    every = [prompt for prompt in prompts for _ in range(GROUP)]
    outputs = model.generate_batch(inputs=every, generation_config=sampled())
    assert len(outputs) == len(every)


def limit_tokens_a_second(model, lengths):
    """Tokens a second if reading weights and keys and values once a step were all the time: a step of R rows of mean
    length L reads weights + R * L * bytes of a token."""
    weights = sum(p.numel() * p.element_size() for p in model.parameters())
    rows, mean = len(lengths), PROMPT_TOKENS + sum(lengths) / len(lengths) / 2
    bandwidth = BANDWIDTH.get(torch.cuda.get_device_name(), 0) if GPU else 0
    return rows * bandwidth / (weights + rows * mean * kv_token_bytes(model.config, model.dtype))


@pytest.mark.parametrize("case", ["equal", "long-tailed"])
@pytest.mark.parametrize("size", list(QWEN) if GPU and not SMALL else ["embedded"])
def test_rollout(benchmark, capsys, size, case):
    model = make_model(size).to(DEVICE)
    generator = torch.Generator().manual_seed(0)
    prompts = torch.randint(1, model.config.vocab_size, (PROMPTS, PROMPT_TOKENS), generator=generator).tolist()
    lengths = make_lengths(case)
    names = ["triton", "flash_attn", "varlen", "sdpa"] if GPU else ["sdpa", "products"]
    variants, missing = {}, {}
    for name in names:
        engine = engine_of(model, name)
        try:
            ours(engine, prompts, lengths)
        except ValueError as error:
            missing[f"fastgrpo, {name}"] = str(error)
            continue
        variants[f"fastgrpo, {name}"] = partial(ours, engine, prompts, lengths)
    variants["transformers generate"] = partial(generate, model, prompts, lengths)
    if GPU and case == "equal":
        try:
            continuous(model, prompts, lengths)
            variants["transformers continuous batching"] = partial(continuous, model, prompts, lengths)
        except (ImportError, RuntimeError, TypeError, ValueError) as error:
            missing["transformers continuous batching"] = str(error)[:200]
    with capsys.disabled():
        for name, reason in missing.items():
            print(f"\nmissing: {name}: {reason}")
    results = compare(variants, ROUNDS, DEVICE)
    tokens, limit = sum(lengths), limit_tokens_a_second(model, lengths)
    extras = {}
    for name, result in results.items():
        extras[name] = {"tokens_per_s": round(tokens / result["median_s"])}
        if limit:
            extras[name]["of_bandwidth_limit"] = round(tokens / result["median_s"] / limit, 3)
    mine = min((name for name in variants if name.startswith("fastgrpo")), key=lambda name: results[name]["median_s"])

    def times(other):
        return round(results[other]["median_s"] / results[mine]["median_s"], 2)

    bars = {}
    if GPU and not SMALL:
        share, of_generate, of_continuous = BARS[size]
        if case == "equal":
            bars["share of the bandwidth limit"] = extras[mine].get("of_bandwidth_limit", 0.0), share
        if of_generate:
            bars["times transformers generate"] = times("transformers generate"), of_generate
        if of_continuous and "transformers continuous batching" in results:
            bars["times transformers continuous batching"] = times("transformers continuous batching"), of_continuous
    else:
        bars["times transformers generate"] = times("transformers generate"), CPU_BARS[case]
    rows = rows_of(
        results, missing, extras, **versions(), benchmark="rollout", model=size, case=case, prompts=PROMPTS,
        group=GROUP, prompt_tokens=PROMPT_TOKENS, new_tokens=NEW_TOKENS, dtype=str(model.dtype).removeprefix("torch."),
    )  # fmt: skip
    benchmark.extra_info.update(
        rows=rows,
        missing=missing,
        bars={name: {"value": value, "at least": bar, "met": value >= bar} for name, (value, bar) in bars.items()},
    )
    if not SMALL:
        append(rows, DEVICE)
    benchmark.pedantic(variants[mine], rounds=ROUNDS)

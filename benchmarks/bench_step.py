"""Whole training steps: fastgrpo's GRPOTrainer against TRL's, with the same model, prompts, rewards and settings.

On a GPU: Llamas with random weights of the sizes of Qwen2.5-0.5B and 1.5B, and 16 prompts of 512 tokens with 8
completions each of at most 1,024 tokens; TRL generates with transformers' `generate` and with its continuous batching.
On a CPU: 0.8 million parameters, and 16 prompts with 8 completions of at most 12 tokens. The lengths of completions are
long-tailed for all variants: so many tokens of the vocabulary are stop tokens that the mean length is a quarter of the
limit. Each trainer runs in its own process. On a GPU all of them use liger-kernel's layers if these are installed.

    pytest benchmarks/bench_step.py --benchmark-only

Results are added to results/<device>.jsonl. With FASTGRPO_BENCH_SMALL=1 the shapes are tiny and nothing is written.
"""

from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from pytest_benchmark.fixture import BenchmarkFixture
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from benchmarks import harness, stepwise
from benchmarks.compare import rows_of
from benchmarks.contestants import Contest, Contestant, Entry, contest, taking_part
from benchmarks.harness import SMALL, Bar, at_least, finish, name_of
from benchmarks.layers import LAYERS, LIGER, patch_classes
from benchmarks.models import QWEN, Size, random_model
from fastgrpo import GRPOConfig, GRPOTrainer

GPU = harness.CUDA and not SMALL
DEVICE = "cuda" if GPU else "cpu"
DTYPE = torch.bfloat16 if GPU else torch.float32
ROUNDS = 2 if SMALL else 3 if GPU else 15
SIZES = {**QWEN, "0.8m": Size(128, 384, 4, 4, 2, vocab=512)}
PROMPTS, GROUP = (4, 4) if SMALL else (16, 8)
PROMPT_TOKENS, MAX_TOKENS = (512, 1024) if GPU else (8, 12)
STOPS = 4 / MAX_TOKENS  # share of the vocabulary that ends a completion
BETA = 0.04
FAMILY = "llama"
# By default, a micro-batch takes as many tokens as fit.
OURS = {"fastgrpo": {}} | (
    {"fastgrpo, at most 4,096 tokens in a pass": {"max_tokens_per_microbatch": 4096}} if GPU else {}
)
PEERS = {"trl": {}} | ({"trl, continuous batching": {"use_transformers_continuous_batching": True}} if GPU else {})
BARS = {"0.5b": {"trl": 5.0, "trl, continuous batching": 2.5}, "1.5b": {}, "0.8m": {"trl": 1.5}}
MEMORY_BAR = 0.5  # largest share of TRL's peak memory on a GPU
MFU_BAR = 0.35  # smallest MFU of the update of the 1.5b model on a GPU


def parity(completion_ids: list[list[int]], **columns: Any) -> list[float]:
    """Reward about half of the completions: those whose token ids have an odd sum."""
    return [float(sum(ids) % 2) for ids in completion_ids]


def stops(size: str) -> list[int]:
    """Return the ids that end a completion, the highest ones of the vocabulary."""
    vocabulary = SIZES[size].vocab
    return list(range(vocabulary - max(int(vocabulary * STOPS), 1), vocabulary))


def save_model(path: Path, size: str) -> None:
    """Save a model with random weights and a tokenizer whose tokens are words, `t0 t1 ...`."""
    vocabulary, stop_ids = SIZES[size].vocab, stops(size)
    words = Tokenizer(models.WordLevel({f"t{i}": i for i in range(vocabulary)}, unk_token="t0"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    end = f"t{stop_ids[-1]}"
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, eos_token=end, pad_token=end)
    model = random_model(
        FAMILY, SIZES[size], "cpu", DTYPE, max_position_embeddings=4096, bos_token_id=None, eos_token_id=stop_ids,
        pad_token_id=stop_ids[-1],
    )  # fmt: skip
    model.generation_config.eos_token_id = stop_ids
    model.save_pretrained(path)
    tokenizer.save_pretrained(path)


def make_rows(size: str) -> list[dict[str, str]]:
    """Draw 64 random prompts, equal in each call."""
    vocabulary = SIZES[size].vocab
    ids = torch.randint(0, vocabulary // 2, (64, PROMPT_TOKENS), generator=torch.Generator().manual_seed(0))
    return [{"prompt": " ".join(f"t{i}" for i in row)} for row in ids.tolist()]


def our_entry(path: str, folder: str, size: str, variant: str = "fastgrpo", **settings: Any) -> Entry:
    """Create fastgrpo's trainer for the model in `path`; its variant runs one step and returns the metrics."""
    config = GRPOConfig(
        output_dir=folder, prompts_per_step=PROMPTS, num_generations=GROUP, max_completion_length=MAX_TOKENS,
        use_liger_kernel=LIGER, beta=BETA, max_steps=10_000, device=DEVICE, gradient_checkpointing=GPU,
        max_num_seqs=PROMPTS * GROUP, **settings,
    )  # fmt: skip
    return Entry({variant: GRPOTrainer(path, parity, config, make_rows(size)).step})


def trl_entry(path: str, folder: str, size: str, variant: str, **settings: Any) -> Entry:
    """Create TRL's trainer for the model in `path`, with further settings. Its variant runs one step."""
    if LIGER:
        patch_classes(FAMILY)  # for the policy, and for the reference that TRL loads
    micro = 8 if GPU else PROMPTS * GROUP
    return stepwise.trl_entry(
        variant, path, parity, make_rows(size),
        output_dir=folder, per_device_train_batch_size=micro, gradient_accumulation_steps=PROMPTS * GROUP // micro,
        num_generations=GROUP, max_completion_length=MAX_TOKENS, beta=BETA, use_cpu=not GPU, bf16=GPU,
        gradient_checkpointing=GPU, generation_kwargs={"eos_token_id": stops(size)},
        model_init_kwargs={"dtype": "bfloat16" if GPU else "float32"}, **settings,
    )  # fmt: skip


def bars_of(size: str, results: dict[str, dict[str, float]], mfu: float | None) -> dict[str, Bar]:
    """Compare fastgrpo's step with TRL's. `mfu` is its share of the GPU's peak during the update, if known."""
    bars, mine = {}, results["fastgrpo"]
    for name, other in results.items():
        if name in BARS[size]:
            bars[f"samples a second, times {name}, {LAYERS}"] = at_least(
                other["median_s"] / mine["median_s"], BARS[size][name]
            )
        if GPU and name in PEERS:
            # Lower is better, so this is the inverse ratio.
            ratio = other["peak_bytes"] / mine["peak_bytes"]
            bars[f"peak memory of {name}, times ours"] = at_least(ratio, 1 / MEMORY_BAR)
    if size == "1.5b" and mfu is not None:
        bars["MFU of the update"] = at_least(mfu, MFU_BAR)
    return bars


def contestants_of(size: str, folder: Path, names: Sequence[str]) -> tuple[list[Contestant], dict[str, str]]:
    """Save the model to the folder, and return the trainers and the reason for each one that is not installed."""
    path = folder / "model"
    save_model(path, size)
    absent = {} if find_spec("trl") else dict.fromkeys(PEERS.keys() & names, "not installed: No module named 'trl'")
    contestants = []
    for name in names:
        if name not in absent:
            options = {"path": str(path), "size": size, "variant": name, "folder": str(folder / name)}
            options |= OURS[name] if name in OURS else PEERS[name]
            entry = f"benchmarks.bench_step:{'our_entry' if name in OURS else 'trl_entry'}"
            contestants.append(Contestant(name, entry, DEVICE, **options))
    return contestants, absent


def middle_step(found: Contest) -> tuple[dict[str, float], dict[str, float]]:
    """Return the metrics of fastgrpo's step of median time, and the milliseconds of each of its stages."""
    steps = found.values["fastgrpo"][1:]  # the first call is the warm-up
    middle = sorted(steps, key=lambda values: values["step_time"])[len(steps) // 2]
    stages = {key.removeprefix("time/"): value for key, value in middle.items() if key.startswith("time/")}
    return middle, {stage: round(1e3 * seconds, 2) for stage, seconds in stages.items()}


def judged(size: str, found: Contest) -> tuple[list[dict[str, Any]], dict[str, Bar]]:
    """Return rows and bars of a contest."""
    results = found.results
    if not GPU:
        for name in PEERS.keys() & results.keys():
            results[name]["peak_bytes"] = None
    samples = PROMPTS * GROUP
    extras = {name: {"samples_per_s": round(samples / result["median_s"], 1)} for name, result in results.items()}
    middle, extras["fastgrpo"]["stages_ms"] = middle_step(found)
    rows = rows_of(
        results, found.missing, extras, benchmark="step", model=size, prompts=PROMPTS, group=GROUP,
        prompt_tokens=PROMPT_TOKENS, max_tokens=MAX_TOKENS, beta=BETA, dtype=name_of(DTYPE), liger=LIGER,
    )  # fmt: skip
    return rows, bars_of(size, results, middle.get("mfu"))


@pytest.mark.parametrize("size", ["0.5b", "1.5b"] if GPU else ["0.8m"])
def test_step(benchmark: BenchmarkFixture, capsys: pytest.CaptureFixture[str], tmp_path: Path, size: str) -> None:
    ours = OURS if size != "1.5b" else ["fastgrpo"]  # the trainers share the memory of the GPU
    contestants, absent = contestants_of(size, tmp_path, [*ours, *PEERS])
    with taking_part(contestants):
        found = contest(contestants, ROUNDS, absent)
        rows, bars = judged(size, found)
        finish(benchmark, capsys, rows, bars, lambda: found.again("fastgrpo"), ROUNDS, missing=found.missing)

"""Whole training steps: fastgrpo's GRPOTrainer against TRL's, with the same model, prompts, rewards and settings.

On a GPU: Llamas with random weights of the sizes of Qwen2.5-0.5B and 1.5B, and 16 prompts of 512 tokens with 8
completions each of at most 1,024 tokens; TRL generates by transformers' `generate` and by its continuous batching. On a
CPU: 0.8 million parameters, and 16 prompts with 8 completions of at most 12 tokens. The lengths of the completions are
long-tailed for all variants alike: enough of the vocabulary are stop tokens that a completion has on average a quarter
of the tokens it may have.

    pytest benchmarks/bench_step.py --benchmark-only

Results are added to results/<device>.jsonl. With FASTGRPO_BENCH_SMALL=1 the shapes are tiny and nothing is written.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from pytest_benchmark.fixture import BenchmarkFixture
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from benchmarks import harness
from benchmarks.compare import compare, rows_of
from benchmarks.harness import SMALL, Bar, at_least, finish, name_of
from benchmarks.models import QWEN, Size, random_model
from benchmarks.stepwise import Stepwise
from fastgrpo import GRPOConfig, GRPOTrainer

GPU = harness.CUDA and not SMALL
DEVICE = "cuda" if GPU else "cpu"
DTYPE = torch.bfloat16 if GPU else torch.float32
ROUNDS = 2 if SMALL else 5 if GPU else 15
SIZES = {**QWEN, "0.8m": Size(128, 384, 4, 4, 2, vocab=512)}
PROMPTS, GROUP = (4, 4) if SMALL else (16, 8)
PROMPT_TOKENS, MAX_TOKENS = (512, 1024) if GPU else (8, 12)
STOPS = 4 / MAX_TOKENS  # share of the vocabulary that ends a completion
BETA = 0.04
BARS = {"0.5b": {"trl": 5.0, "trl, continuous batching": 2.5}, "1.5b": {}, "0.8m": {"trl": 1.5}}
MEMORY_BAR = 0.5  # largest share of TRL's peak memory on a GPU
MFU_BAR = 0.35  # smallest MFU of the update of the 1.5b model on a GPU


def parity(completion_ids: list[list[int]], **columns: Any) -> list[float]:
    """Reward about half of the completions: those whose token ids have an odd sum.

    Args:
        completion_ids: The tokens of each completion.
        columns: What a trainer passes beside them.
    """
    return [float(sum(ids) % 2) for ids in completion_ids]


def stops(size: str) -> list[int]:
    """Return the ids that end a completion, the highest ones of the vocabulary.

    Args:
        size: A key of `SIZES`.
    """
    vocabulary = SIZES[size].vocab
    return list(range(vocabulary - max(int(vocabulary * STOPS), 1), vocabulary))


def save_model(path: Path, size: str) -> None:
    """Save a model with random weights and a tokenizer whose tokens are words, `t0 t1 ...`.

    Args:
        path: The folder to make.
        size: A key of `SIZES`.
    """
    vocabulary, stop_ids = SIZES[size].vocab, stops(size)
    words = Tokenizer(models.WordLevel({f"t{i}": i for i in range(vocabulary)}, unk_token="t0"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    end = f"t{stop_ids[-1]}"
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, eos_token=end, pad_token=end)
    model = random_model(
        "llama", SIZES[size], "cpu", DTYPE, max_position_embeddings=4096, bos_token_id=None, eos_token_id=stop_ids,
        pad_token_id=stop_ids[-1],
    )  # fmt: skip
    model.generation_config.eos_token_id = stop_ids
    model.save_pretrained(path)
    tokenizer.save_pretrained(path)


def make_rows(size: str) -> list[dict[str, str]]:
    """Draw 64 random prompts, the same ones at each call.

    Args:
        size: A key of `SIZES`.
    """
    vocabulary = SIZES[size].vocab
    ids = torch.randint(0, vocabulary // 2, (64, PROMPT_TOKENS), generator=torch.Generator().manual_seed(0))
    return [{"prompt": " ".join(f"t{i}" for i in row)} for row in ids.tolist()]


def our_trainer(path: Path, rows: list[dict[str, str]], folder: Path) -> GRPOTrainer:
    """Make fastgrpo's trainer.

    Args:
        path: Folder of the model.
        rows: The prompts.
        folder: Where the run is written.
    """
    config = GRPOConfig(
        output_dir=str(folder), prompts_per_step=PROMPTS, num_generations=GROUP, max_completion_length=MAX_TOKENS,
        beta=BETA, max_steps=10_000, device=DEVICE, gradient_checkpointing=GPU, max_num_seqs=PROMPTS * GROUP,
    )  # fmt: skip
    return GRPOTrainer(str(path), parity, config, rows)


def trl_stepper(
    path: Path, rows: list[dict[str, str]], folder: Path, stop_ids: list[int], **settings: Any
) -> Callable[[], None]:
    """Make TRL's trainer.

    Args:
        path: Folder of the model.
        rows: The prompts.
        folder: Where the run is written.
        stop_ids: Tokens that end a completion.
        settings: Further settings of TRL.

    Returns:
        A function that takes one step.

    Raises:
        ImportError: TRL is not installed.
    """
    import trl
    from datasets import Dataset

    micro = 8 if GPU else PROMPTS * GROUP
    config = trl.GRPOConfig(
        output_dir=str(folder), per_device_train_batch_size=micro, gradient_accumulation_steps=PROMPTS * GROUP // micro,
        num_generations=GROUP, max_completion_length=MAX_TOKENS, beta=BETA, max_steps=10_000, report_to="none",
        save_strategy="no", logging_steps=10_000, use_cpu=not GPU, bf16=GPU, gradient_checkpointing=GPU,
        disable_tqdm=True, seed=0, generation_kwargs={"eos_token_id": stop_ids},
        model_init_kwargs={"dtype": "bfloat16" if GPU else "float32"}, **settings,
    )  # fmt: skip
    stepper = Stepwise()
    trainer = trl.GRPOTrainer(
        str(path), parity, args=config, train_dataset=Dataset.from_list(rows), callbacks=[stepper]
    )
    stepper.start(trainer)
    return stepper


def bars_of(size: str, results: dict[str, dict[str, float]], mfu: float | None) -> dict[str, Bar]:
    """Compare fastgrpo's step with those of TRL.

    Args:
        size: A key of `SIZES`.
        results: What `compare` measured.
        mfu: fastgrpo's share of the GPU's peak during the update, where it is known.
    """
    bars, mine = {}, results["fastgrpo"]
    for name, other in results.items():
        if name in BARS[size]:
            bars[f"samples a second, times {name}"] = at_least(other["median_s"] / mine["median_s"], BARS[size][name])
        if GPU and name != "fastgrpo":
            # Less is better: this is how many times less.
            ratio = other["peak_bytes"] / mine["peak_bytes"]
            bars[f"peak memory of {name}, times ours"] = at_least(ratio, 1 / MEMORY_BAR)
    if size == "1.5b" and mfu is not None:
        bars["MFU of the update"] = at_least(mfu, MFU_BAR)
    return bars


@pytest.mark.parametrize("size", ["0.5b", "1.5b"] if GPU else ["0.8m"])
def test_step(benchmark: BenchmarkFixture, capsys: pytest.CaptureFixture[str], tmp_path: Path, size: str) -> None:
    path, rows = tmp_path / "model", make_rows(size)
    save_model(path, size)
    trainer = our_trainer(path, rows, tmp_path / "ours")
    measured = []

    def ours() -> None:
        measured.append(trainer.step())

    variants, missing = {"fastgrpo": ours}, {}
    peers = {"trl": {}} | ({"trl, continuous batching": {"use_transformers_continuous_batching": True}} if GPU else {})
    for name, settings in peers.items():
        try:
            variants[name] = trl_stepper(path, rows, tmp_path / name, stops(size), **settings)
        except ImportError as error:
            missing[name] = f"not installed: {error}"
    results = compare(variants, ROUNDS, DEVICE)
    if not GPU:
        for name in peers.keys() & results.keys():
            results[name]["peak_bytes"] = None
    samples = PROMPTS * GROUP
    extras = {name: {"samples_per_s": round(samples / result["median_s"], 1)} for name, result in results.items()}
    middle = sorted(measured[1:], key=lambda values: values["step_time"])[len(measured[1:]) // 2]
    stages = {key.removeprefix("time/"): value for key, value in middle.items() if key.startswith("time/")}
    extras["fastgrpo"]["stages_ms"] = {stage: round(1e3 * seconds, 2) for stage, seconds in stages.items()}
    table = rows_of(
        results, missing, extras, benchmark="step", model=size, prompts=PROMPTS, group=GROUP,
        prompt_tokens=PROMPT_TOKENS, max_tokens=MAX_TOKENS, beta=BETA, dtype=name_of(DTYPE),
    )  # fmt: skip
    finish(benchmark, capsys, table, bars_of(size, results, middle.get("mfu")), ours, ROUNDS, missing=missing)

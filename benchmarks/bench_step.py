"""Whole training steps: ours against TRL's GRPOTrainer, in one run, with the same model, prompts, rewards and settings.

On a GPU: random-weight Llamas of the sizes of Qwen2.5-0.5B and 1.5B, 16 prompts of 512 tokens x 8 completions of at
most 1,024; TRL generates by transformers' `generate` and by its continuous batching. On a CPU: 0.8M parameters, 16
prompts x 8 completions of at most 12 tokens. Lengths are long-tailed for all alike: a set of stop tokens is as likely
as makes a completion a quarter of its limit long on average. Steps run in turns; bars are reported in
`extra_info["bars"]` and never asserted.

    pytest benchmarks/bench_step.py --benchmark-only
    FASTGRPO_BENCH_SMALL=1: tiny shapes and two rounds, to see that it runs; nothing is written to results/.
"""

import os
import threading
from functools import partial

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, TrainerCallback

from benchmarks.compare import append, compare, rows_of
from benchmarks.variants import versions
from fastgrpo import GRPOConfig, GRPOTrainer

SMALL = os.environ.get("FASTGRPO_BENCH_SMALL") == "1"
GPU = torch.cuda.is_available() and not SMALL
DEVICE = "cuda" if GPU else "cpu"
ROUNDS = 2 if SMALL else 5 if GPU else 15
# vocabulary, hidden, intermediate, layers, heads, key heads
SIZES = {
    "0.5b": (151_936, 896, 4864, 24, 14, 2),
    "1.5b": (151_936, 1536, 8960, 28, 12, 2),
    "0.8m": (512, 128, 384, 4, 4, 2),
}
PROMPTS, GROUP = (4, 4) if SMALL else (16, 8)
PROMPT_TOKENS, MAX_TOKENS = (512, 1024) if GPU else (8, 12)
STOPS = 4 / MAX_TOKENS  # share of the vocabulary that ends a completion
BETA = 0.04
BARS = {"0.5b": {"trl": 5.0, "trl, continuous batching": 2.5}, "1.5b": {}, "0.8m": {"trl": 1.5}}
MEMORY_BAR = 0.5  # of TRL's peak, on a GPU
MFU_BAR = 0.35  # of the update, 1.5b on a GPU


def parity(completion_ids, **columns):
    """A reward that half of the completions get."""
    return [float(sum(ids) % 2) for ids in completion_ids]


def stops(size):
    """The ids that end a completion, the highest ones."""
    vocabulary = SIZES[size][0]
    return list(range(vocabulary - max(int(vocabulary * STOPS), 1), vocabulary))


def save_model(path, size):
    """A random-weight model whose tokens are words, `t0 t1 ...`."""
    vocabulary, hidden, intermediate, layers, heads, kv_heads = SIZES[size]
    words = Tokenizer(models.WordLevel({f"t{i}": i for i in range(vocabulary)}, unk_token="t0"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    stop_ids = stops(size)
    end = f"t{stop_ids[-1]}"
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, eos_token=end, pad_token=end)
    torch.manual_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=vocabulary, hidden_size=hidden, intermediate_size=intermediate, num_hidden_layers=layers,
            num_attention_heads=heads, num_key_value_heads=kv_heads, max_position_embeddings=4096,
            tie_word_embeddings=True, bos_token_id=None, eos_token_id=stop_ids, pad_token_id=stop_ids[-1],
        )
    )  # fmt: skip
    model.generation_config.eos_token_id = stop_ids
    model.to(torch.bfloat16 if GPU else torch.float32).save_pretrained(path)
    tokenizer.save_pretrained(path)


def make_rows(size):
    vocabulary = SIZES[size][0]
    ids = torch.randint(0, vocabulary // 2, (64, PROMPT_TOKENS), generator=torch.Generator().manual_seed(0))
    return [{"prompt": " ".join(f"t{i}" for i in row)} for row in ids.tolist()]


def our_trainer(path, rows, folder):
    config = GRPOConfig(
        output_dir=str(folder), prompts_per_step=PROMPTS, num_generations=GROUP, max_completion_length=MAX_TOKENS,
        beta=BETA, max_steps=10_000, device=DEVICE, gradient_checkpointing=GPU, max_num_seqs=PROMPTS * GROUP,
    )  # fmt: skip
    return GRPOTrainer(str(path), parity, config, rows)


class Stepwise(TrainerCallback):
    """Lets a TRL trainer, which runs in a thread of its own, take one optimizer step at a time.

    Memory that its thread allocates is not seen by the CPU's memory measurement.
    """

    def __init__(self):
        self.go, self.done, self.error = threading.Semaphore(0), threading.Semaphore(0), None

    def on_step_begin(self, args, state, control, **kwargs):
        self.go.acquire()

    def on_step_end(self, args, state, control, **kwargs):
        self.done.release()

    def start(self, trainer):
        def train():
            try:
                trainer.train()
            except BaseException as error:
                self.error = error
                self.done.release()

        threading.Thread(target=train, daemon=True).start()

    def __call__(self):
        self.go.release()
        self.done.acquire()
        if self.error is not None:
            raise RuntimeError("TRL's trainer failed") from self.error


def trl_stepper(path, rows, folder, stop_ids, **settings):
    """A callable that takes one step of TRL's trainer. Raises ImportError without TRL."""
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


@pytest.mark.parametrize("size", ["0.5b", "1.5b"] if GPU else ["0.8m"])
def test_step(benchmark, capsys, tmp_path, size):
    path, rows = tmp_path / "model", make_rows(size)
    save_model(path, size)
    trainer = our_trainer(path, rows, tmp_path / "ours")
    measured = []

    def ours():
        measured.append(trainer.step())

    variants, missing = {"fastgrpo": ours}, {}
    peers = {"trl": {}} | ({"trl, continuous batching": {"use_transformers_continuous_batching": True}} if GPU else {})
    for name, settings in peers.items():
        try:
            variants[name] = trl_stepper(path, rows, tmp_path / name, stops(size), **settings)
        except ImportError as error:
            missing[name] = f"not installed: {error}"
    with capsys.disabled():
        for name, reason in missing.items():
            print(f"\nmissing: {name}: {reason}")
    results = compare(variants, ROUNDS, DEVICE)
    samples = PROMPTS * GROUP
    extras = {name: {"samples_per_s": round(samples / result["median_s"], 1)} for name, result in results.items()}
    stages = [key for key in measured[-1] if key.startswith("time/")]
    middle = sorted(measured[1:], key=lambda values: values["step_time"])[len(measured[1:]) // 2]
    extras["fastgrpo"] |= {"stages_ms": {key.removeprefix("time/"): round(1e3 * middle[key], 2) for key in stages}}
    bars = {}
    for name in variants:
        if name == "fastgrpo":
            continue
        if not GPU:
            results[name]["peak_bytes"] = None
        bar = BARS[size].get(name)
        if bar:
            bars[f"samples a second, times {name}"] = results[name]["median_s"] / results["fastgrpo"]["median_s"], bar
        if GPU:
            # Less is better: reported as how many times less.
            bars[f"peak memory of {name}, times ours"] = (
                results[name]["peak_bytes"] / results["fastgrpo"]["peak_bytes"], 1 / MEMORY_BAR,
            )  # fmt: skip
    if size == "1.5b" and "mfu" in middle:
        bars["MFU of the update"] = middle["mfu"], MFU_BAR
    table = rows_of(
        results, missing, extras, **versions(), benchmark="step", model=size, prompts=PROMPTS, group=GROUP,
        prompt_tokens=PROMPT_TOKENS, max_tokens=MAX_TOKENS, beta=BETA, dtype="bfloat16" if GPU else "float32",
    )  # fmt: skip
    benchmark.extra_info.update(
        rows=table,
        missing=missing,
        bars={name: {"value": round(v, 3), "at least": bar, "met": v >= bar} for name, (v, bar) in bars.items()},
    )
    if not SMALL:
        append(table, DEVICE)
    benchmark.pedantic(partial(ours), rounds=ROUNDS)

"""The head and the loss of TRL's GRPOTrainer: TRL 1.16's own, and fastgrpo's in the same trainer.

Shapes: N completion tokens, V vocabulary, D hidden. The model has no layers, so that only embedding, norm, head and
loss are timed: TRL's `compute_loss` with its metrics, and the backward pass. The batch of a step is synthetic, with
completions of one length and old log-probs. TRL's head is its fused one. On devices without Triton it also scores the
prompts, so there is a case with prompts as long as completions. Each trainer runs in its own process.

    pytest benchmarks/bench_trl.py --benchmark-only

Results are added to results/<device>.jsonl. With FASTGRPO_BENCH_SMALL=1 the shapes are tiny and nothing is written.
"""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from pytest_benchmark.fixture import BenchmarkFixture
from tokenizers import Tokenizer, models
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from benchmarks.batches import LOG_RATIOS, LOGIT_STD
from benchmarks.compare import rows_of
from benchmarks.contestants import Contest, Contestant, Entry, contest, taking_part
from benchmarks.harness import CUDA, DEVICE, DTYPE, SMALL, Bar, at_most, finish, name_of

# Completions, their tokens, D and V.
COMPLETIONS, LENGTH, D, V = (2, 128, 16, 2048) if SMALL else (32, 512, 896, 151_936) if CUDA else (16, 128, 512, 32_768)
CASES = {"completions alone": 1, "prompts of the same length": LENGTH}  # -> tokens of a prompt
ROUNDS = 2 if SMALL else 5
SECONDS = 60  # time limit of the rounds
MEASURED = {"median_s": "time", "peak_bytes": "peak memory"}
BARS = {"median_s": 1.0, "peak_bytes": 1.0} if CUDA else {"median_s": 0.5, "peak_bytes": 1 / 3}  # relative to TRL
KINDS = ("fastgrpo", "trl")


def no_reward(completions: list[str], **columns: Any) -> list[float]:
    """Reward nothing: there is no rollout."""
    return [0.0] * len(completions)


def make_trainer(kind: str, folder: str) -> Any:
    """Create a trainer, "fastgrpo" or "trl", for a model with only embedding, norm and head."""
    import trl
    from datasets import Dataset

    from fastgrpo.integrations.trl import FusedGRPOTrainer

    torch.manual_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(vocab_size=V, hidden_size=D, num_hidden_layers=0, num_attention_heads=4, intermediate_size=D,
                    max_position_embeddings=2 * LENGTH, pad_token_id=0, eos_token_id=1, bos_token_id=None)
    ).to(DTYPE)  # fmt: skip
    torch.nn.init.normal_(model.lm_head.weight, std=LOGIT_STD / D**0.5)
    torch.nn.init.normal_(model.model.embed_tokens.weight).requires_grad_(False)
    words = Tokenizer(models.WordLevel({"pad": 0, "end": 1}, unk_token="pad"))
    config = trl.GRPOConfig(
        output_dir=folder, per_device_train_batch_size=COMPLETIONS, gradient_accumulation_steps=1, num_generations=2,
        use_cpu=not CUDA, bf16=CUDA, gradient_checkpointing=False, report_to="none",
    )  # fmt: skip
    trainer = {"trl": trl.GRPOTrainer, "fastgrpo": FusedGRPOTrainer}[kind](
        model, no_reward, config, Dataset.from_list([{"prompt": "end"}] * COMPLETIONS),
        processing_class=PreTrainedTokenizerFast(tokenizer_object=words, eos_token="end", pad_token="pad"),
    )  # fmt: skip
    trainer.current_gradient_accumulation_steps = 1
    trainer.model.train()
    return trainer


def make_inputs(trainer: Any, prompt: int) -> dict[str, torch.Tensor]:
    """Return a synthetic rollout: random tokens, advantages, and old log-probs near those of the policy."""
    torch.manual_seed(1)
    ids = torch.randint(2, V, (COMPLETIONS, prompt + LENGTH)).to(DEVICE)
    ones = torch.ones_like(ids)
    advantages = torch.randn(COMPLETIONS)
    log_ratios = torch.tensor(LOG_RATIOS)[torch.randint(len(LOG_RATIOS), (COMPLETIONS, LENGTH))]
    with torch.no_grad():
        logps = trainer._get_per_token_logps_and_entropies(trainer.model, ids, ones, LENGTH)[0]
    return {
        "prompt_ids": ids[:, :prompt], "prompt_mask": ones[:, :prompt], "completion_ids": ids[:, prompt:],
        "completion_mask": ones[:, prompt:], "advantages": advantages.to(DEVICE),
        "num_items_in_batch": torch.tensor(COMPLETIONS * LENGTH, device=DEVICE),
        "old_per_token_logps": logps - log_ratios.to(DEVICE),
    }  # fmt: skip


def step(trainer: Any, inputs: dict[str, torch.Tensor]) -> None:
    """Compute the loss and its gradients, which stay in the model."""
    trainer.model.zero_grad(set_to_none=True)
    trainer.compute_loss(trainer.model, inputs).backward()


def entry(kind: str, folder: str) -> Entry:
    """Return an entry for "fastgrpo" or "trl", with a variant per case. Its `about` has the norms of the gradients."""
    trainer = make_trainer(kind, folder)
    calls, norms = {}, {}
    for case, prompt in CASES.items():
        inputs = make_inputs(trainer, prompt)
        step(trainer, inputs)
        norms[case] = [p.grad.float().norm().item() for p in trainer.model.parameters() if p.grad is not None]
        calls[f"{kind}, {case}"] = partial(step, trainer, inputs)
    trainer.model.zero_grad(set_to_none=True)
    return Entry(calls, about={"norms": norms})


def contestants_of(folder: Path) -> list[Contestant]:
    """Return the trainers."""
    return [
        Contestant(kind, "benchmarks.bench_trl:entry", DEVICE, kind=kind, folder=str(folder / kind)) for kind in KINDS
    ]


def bar_name(measured: str, case: str) -> str:
    """Return the name of the bar of "time" or "peak memory" in a case."""
    return f"{measured}, of trl, {case}"


def judged(found: Contest) -> tuple[list[dict[str, Any]], dict[str, Bar]]:
    """Check that the gradients agree, and return rows and bars of a contest."""
    norms = [about["norms"] for about in found.about.values()]
    for case in CASES:
        for other in norms[1:]:
            torch.testing.assert_close(other[case], norms[0][case], rtol=2e-2 if CUDA else 1e-4, atol=1e-6)
    rows, bars = [], {}
    for case in CASES:
        names = {kind: f"{kind}, {case}" for kind in KINDS}
        results = {kind: found.results[name] for kind, name in names.items() if name in found.results}
        missing = {kind: found.missing[name] for kind, name in names.items() if name in found.missing}
        rows += rows_of(results, missing, benchmark="trl", n=COMPLETIONS * LENGTH, d=D, v=V, dtype=name_of(DTYPE),
                        case=case)  # fmt: skip
        if len(results) == len(KINDS):
            own, theirs = (results[kind] for kind in KINDS)
            for key, name in MEASURED.items():
                bars[bar_name(name, case)] = at_most(own[key] / theirs[key], BARS[key])
    return rows, bars


def test_trl(benchmark: BenchmarkFixture, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    with taking_part(contestants_of(tmp_path)) as contestants:
        found = contest(contestants, ROUNDS, seconds=SECONDS)
        rows, bars = judged(found)
        again = partial(found.again, f"fastgrpo, {next(iter(CASES))}")
        finish(benchmark, capsys, rows, bars, again, ROUNDS, missing=found.missing)

"""Rollouts with slow tools: 64 completions that call an async tool, by our engine and by TRL's tool loop.

The model has random weights and about 50 characters as tokens, so a turn has about 50 of them. Three of four turns are
parsed as a call, by the sum of their tokens, and a completion makes at most 3 calls. The tool sleeps 0 to 2 s. The
contestants sample other tokens, so their numbers of calls differ a little. "without waiting" is our engine with the
same calls and a tool that does not sleep.

    pytest benchmarks/bench_tools.py --benchmark-only

Results are added to results/cpu.jsonl. With FASTGRPO_BENCH_SMALL=1 the shapes are tiny and nothing is written.
"""

import asyncio
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from pytest_benchmark.fixture import BenchmarkFixture

from benchmarks.compare import rows_of
from benchmarks.contestants import Contestant, Entry, contest, taking_part
from benchmarks.harness import SMALL, at_most, finish
from fastgrpo.data.responses import Parsed, to_call
from fastgrpo.policy.characters import CHAT_TEMPLATE, character_model

COMPLETIONS, LONGEST, CALLS, SLEEP = (4, 60, 2, 0.05) if SMALL else (64, 512, 3, 2.0)
ROUNDS = 1  # a rollout of TRL takes minutes
OURS, AT_ONCE, THEIRS = "fastgrpo", "fastgrpo, without waiting", "trl"
CHARACTERS = "abcdefghijklmnopqrstuvwxyz0123456789(),. +-*/=?!':;"
QUESTION = [{"role": "user", "content": "look up"}]


def delay(n: int) -> float:
    """Return the seconds that the tool sleeps, spread evenly over n."""
    return SLEEP * (n * 0.6180339887 % 1)


async def lookup(n: int) -> str:
    """Look a number up.

    Args:
        n: The number.
    """
    await asyncio.sleep(delay(n))
    return str(n % 100)


async def known(n: int) -> str:
    """Look a number up at once.

    Args:
        n: The number.
    """
    return str(n % 100)


def as_message(ids: list[int], tool: str) -> dict[str, Any]:
    """Parse a turn: three of four call the tool with the sum of their tokens."""
    message = {"role": "assistant", "content": ""}
    return message | ({"tool_calls": [to_call(tool, {"n": sum(ids)})]} if sum(ids) % 4 else {})


def make_model() -> tuple[Any, Any]:
    """Create the model and its tokenizer."""
    model, tokenizer = character_model(CHARACTERS, seed=0, positions=1024)
    tokenizer.chat_template = CHAT_TEMPLATE
    return model, tokenizer


def engine_entry() -> Entry:
    """Return an entry for the engine, with a tool that sleeps and one that does not."""
    from fastgrpo.policy.load import prepare
    from fastgrpo.rollout.backend import draw_groups
    from fastgrpo.rollout.engine import RolloutEngine
    from fastgrpo.rollout.sampling import SamplingParams
    from fastgrpo.tools.environments import Environments
    from fastgrpo.tools.prompts import Prompts

    model, tokenizer = make_model()
    engine = RolloutEngine(prepare(model), max_num_seqs=COMPLETIONS)
    sampling = SamplingParams(max_tokens=LONGEST, stop_token_ids=(tokenizer.eos_token_id,), seed=0)

    def roll_out(tool) -> dict[str, Any]:
        prompts = Prompts(tokenizer, None, Environments(None, [tool]), sampling.stop_token_ids, CALLS + 1)
        for builder in prompts.builders.values():
            builder.parse = lambda ids: Parsed(as_message(ids, tool.__name__), False)
        groups = prompts.start({0: prompts({"prompt": QUESTION})}, COMPLETIONS)
        samples = draw_groups(engine, groups, sampling)
        calls = [sample.dialogue.calls for sample in samples[0]]
        waits = [sum(delay(call["arguments"]["n"]) for call in of_one) for of_one in calls]
        return {"calls": sum(map(len, calls)), "longest": max(waits)}

    return Entry({OURS: partial(roll_out, lookup), AT_ONCE: partial(roll_out, known)})


def trl_entry(folder: str) -> Entry:
    """Return an entry for the rollout of TRL's trainer."""
    import trl
    from datasets import Dataset
    from trl.trainer import grpo_trainer

    model, tokenizer = make_model()
    grpo_trainer.supports_tool_calling = grpo_trainer.is_chat_template_prefix_preserving = lambda *_: True
    grpo_trainer.parse_response = lambda tokenizer, ids, **_: as_message(ids, "lookup")
    tokenizer.response_schema = {}  # TRL parses only with one; `parse_response` is replaced
    config = trl.GRPOConfig(
        output_dir=folder, per_device_train_batch_size=COMPLETIONS, num_generations=COMPLETIONS, use_cpu=True,
        bf16=False, max_completion_length=LONGEST, max_tool_calling_iterations=CALLS, report_to="none", top_k=0,
    )  # fmt: skip
    rows = Dataset.from_list([{"prompt": QUESTION}] * COMPLETIONS)
    trainer = trl.GRPOTrainer(
        model, lambda completions, **_: [0.0] * len(completions), config, rows, processing_class=tokenizer,
        tools=[lookup],
    )  # fmt: skip
    trainer.model.train()

    def roll_out() -> dict[str, Any]:
        inputs = [dict(row) for row in rows]
        trainer._metrics["train"].clear()
        trainer._generate_and_score_completions(inputs)
        return {"calls": round(trainer._metrics["train"]["tools/call_frequency"][-1] * COMPLETIONS)}

    return Entry({THEIRS: roll_out})


def test_tools(benchmark: BenchmarkFixture, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    contestants = [
        Contestant(OURS, "benchmarks.bench_tools:engine_entry", "cpu"),
        Contestant(THEIRS, "benchmarks.bench_tools:trl_entry", "cpu", folder=str(tmp_path)),
    ]
    with taking_part(contestants):
        found = contest(contestants, ROUNDS)
        ours, at_once = (found.results[name]["median_s"] for name in (OURS, AT_ONCE))
        longest = found.values[OURS][0]["longest"]
        bars = {"time, of the longest dialogue and the decoding": at_most(ours / (longest + at_once), 1.15)}
        if THEIRS in found.results:
            bars["time, of trl"] = at_most(ours / found.results[THEIRS]["median_s"], 0.5)
        calls = {name: values[0]["calls"] for name, values in found.values.items()}
        case = ", ".join(f"{name}: {count} calls" for name, count in calls.items() if name != AT_ONCE)
        rows = rows_of(found.results, found.missing, benchmark="tools", n=COMPLETIONS, case=case, dtype="float32")
        finish(benchmark, capsys, rows, bars, partial(found.again, OURS), ROUNDS, missing=found.missing)

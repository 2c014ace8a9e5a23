"""Runs with tools on a random model: a builder that reads calls from the numbers of tokens, tools, and trainers.

As a script, `python tool_runs.py FOLDER RUNS` forks two ranks, which make the run `two` in the folder RUNS.
"""

import sys
from functools import partial
from pathlib import Path

import pytest
import tiny
from ranks import fork

from fastgrpo import GRPOConfig, GRPOTrainer
from fastgrpo.data.responses import Parsed

ENDS = [1, *range(60, 90)]  # many stop tokens: a random model draws one soon


def count(n: int) -> str:
    """Count.

    Args:
        n: A number.
    """
    if n % 5 == 0:
        raise ValueError("a multiple of five")
    return "x" * (n % 7)


class Counter:
    """An environment that counts its calls, and rewards them."""

    def __init__(self):
        self.calls = 0

    def reset(self, seed=None, **row):
        self.calls = 0
        return f" {seed % 3}"

    def count(self, n: int) -> str:
        """Count.

        Args:
            n: A number.
        """
        self.calls += 1
        return count(n)

    def get_reward(self):
        return self.calls / 4


def reward(completions, **_):
    """Reward messages of tools and long answers, so that groups differ."""
    return [sum(m["role"] == "tool" for m in c) + len(c[-1].get("content") or "") % 5 / 5 for c in completions]


class CountingBuilder:
    """A turn of an odd number of tokens calls `count` with their sum; the answer is its text in brackets."""

    def __init__(self, tokenizer, tools=(), template_kwargs=None, stop_token_ids=()):
        self.tokenizer = tokenizer

    def prompt(self, messages):
        return self.tokenizer("".join(f"{m['role'][0]}{m['content']}" for m in messages))["input_ids"]

    def parse(self, ids):
        message = {"role": "assistant", "content": self.tokenizer.decode(ids, skip_special_tokens=True)}
        if len(ids) % 2:
            message["tool_calls"] = [{"type": "function", "function": {"name": "count", "arguments": {"n": sum(ids)}}}]
        return Parsed(message, False)

    def answer(self, completion_ids, messages):
        return self.tokenizer("".join(f"[{m['content'][:9]}]" for m in messages))["input_ids"]


ROWS = [{"prompt": [{"role": "user", "content": f"{i}"}], "level": i} for i in range(8)]


def patch(setattr):
    setattr("fastgrpo.tools.prompts.TurnBuilder", CountingBuilder)
    for module in ("rollout.engine", "tools.calls", "tools.environments"):
        setattr(f"fastgrpo.{module}.PATIENCE", 60)


def make_trainer(folder, rows=ROWS, model=None, name="run", reward=reward, **how):
    given = {name: how.pop(name) for name in ("tools", "environment_factory", "rollout_func") if name in how}
    model = model or tiny.model(vocab_size=258)
    model.generation_config.eos_token_id = ENDS
    args = GRPOConfig(
        **{
            "output_dir": str(folder / name), "max_steps": 2, "prompts_per_step": 2, "num_generations": 4,
            "max_completion_length": 40, "learning_rate": 1e-3, "report_to": "none", "seed": 3, "log_completions": True,
            **how,
        }
    )  # fmt: skip
    return GRPOTrainer(model, reward, args, rows, processing_class=tiny.tokenizer(chat=True), **given)


ONE = {"counter": Counter}
OF_RANKS = {"environment_factory": Counter, "logging_steps": 1}


def run_as_rank(folder):
    make_trainer(folder, name="two", **OF_RANKS).train()


if __name__ == "__main__":
    patch(pytest.MonkeyPatch().setattr)
    fork({"two": partial(run_as_rank, Path(sys.argv[2]))}, sys.argv[1], count=2)

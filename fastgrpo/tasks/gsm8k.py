"""GSM8K (arXiv 2110.14168, MIT licence): grade-school word problems with a number for an answer.

The prompt asks for <think> and <answer> tags, and contains one solved problem. The rewards are correctness, format and
length. Supervised training reads the solutions of the data set. Train a small model on --task sums first, which has the
same template.
"""

import random
from reprlib import repr as brief
from typing import TYPE_CHECKING

from fastgrpo.config.sections import HUB_DATA, PromptConfig
from fastgrpo.data import load_rows
from fastgrpo.rewards.gsm8k import CALCULATOR, correctness, format_reward, length_reward, steps_reward
from fastgrpo.tasks import Task, shuffled

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

__all__ = ["SYSTEM_PROMPT", "build", "correctness", "demonstration", "format_reward", "length_reward", "sums", "to_row"]

DATASET, CONFIG = HUB_DATA["gsm8k"], "main"
SYSTEM_PROMPT = (
    "Solve the problem. Think step by step inside <think> and </think>, then give the final number inside <answer> "
    "and </answer>, like this: <think>6 times 7 is 42.</think><answer>42</answer>"
)
# The solved problem before each prompt. Without an example, a model may never write the tags.
WORKED = ("What is 30 + 12?", "<think>30 + 12 = 42</think><answer>42</answer>")
LARGEST_TERM = 99  # of a sum or a difference
LARGEST_SECOND = 20  # the second term; differences of larger numbers are learned slowly (docs/recipes/real.md)
HELD_OUT_SUMS = 200
SUMS_SEED = 0  # the same sums are held out in every run, so that runs can be compared


def build(config: PromptConfig, tokenizer: "PreTrainedTokenizerBase") -> Task:
    """Build the task from GSM8K on the hub, or from the rows with `question` and `answer` of --dataset_name."""
    name = config.dataset_name or DATASET
    name_of_config = config.dataset_config or (CONFIG if config.dataset_name is None else None)
    conversational = getattr(tokenizer, "chat_template", None) is not None

    def rows(split):
        loaded = load_rows(name, name_of_config, split, columns=("question", "answer"))
        return None if loaded is None else loaded.map(lambda row: to_row(row, config.system_prompt, conversational))

    def train():
        problems = rows(config.dataset_train_split)
        if problems is None:
            raise ValueError(f"{name} has no split {config.dataset_train_split!r}")
        return problems

    return Task(
        lambda: shuffled(train(), config),
        lambda: rows(config.dataset_test_split),
        [correctness, format_reward, length_reward],
        lambda: train().map(demonstration),
        steps_reward,
    )


def to_row(row: dict, system_prompt: str | None, conversational: bool) -> dict:
    """Add the prompt to a row of the data set."""
    for column in ("question", "answer"):
        if column not in row:
            raise ValueError(f"a GSM8K row needs the columns question and answer, got {', '.join(row)}")
        if not isinstance(row[column], str) or not row[column].strip():
            raise ValueError(f"the {column} must be text that is not empty, got {brief(row[column])}")
    task, worked = (SYSTEM_PROMPT, [WORKED]) if system_prompt is None else (system_prompt, [])
    turns = [*worked, (row["question"], "")]
    if conversational:
        said = [(role, text) for turn in turns for role, text in zip(("user", "assistant"), turn, strict=True)][:-1]
        prompt = [{"role": role, "content": text} for role, text in [("system", task), *said]]
    else:
        prompt = "\n\n".join([task, *(f"Problem: {question}\nSolution: {answer}" for question, answer in turns)])
    return {**row, "prompt": prompt}


def demonstration(row: dict) -> dict:
    """Make an example of the solution in a row with a prompt. It has the tags of the template."""
    steps, _, result = CALCULATOR.sub("", row["answer"]).rpartition("####")
    if not steps.strip():
        raise ValueError(f"the answer has no solution before ####, got {brief(row['answer'])}")
    text = f"<think>{steps.strip()}</think><answer>{result.strip()}</answer>"
    conversational = not isinstance(row["prompt"], str)
    return {
        "prompt": row["prompt"],
        "completion": [{"role": "assistant", "content": text}] if conversational else text,
    }


def sums() -> tuple[list[dict], list[dict]]:
    """Make sums and differences of two numbers in the form of GSM8K's rows.

    The numbers are at least 2. The first is at most `LARGEST_TERM`, and the second at most the first and
    `LARGEST_SECOND`.
    """
    rng = random.Random(SUMS_SEED)
    pairs = [(a, b) for a in range(2, LARGEST_TERM + 1) for b in range(2, min(a, LARGEST_SECOND) + 1)]
    pairs = [(a, b) for a, b in pairs if f"{a} + {b}" not in WORKED[0]]
    rng.shuffle(pairs)
    held_out = [_sum_row(a, b, rng.choice("+-")) for a, b in pairs[:HELD_OUT_SUMS]]
    return [_sum_row(a, b, sign) for a, b in pairs[HELD_OUT_SUMS:] for sign in "+-"], held_out


def _sum_row(a, b, sign):
    value = a + b if sign == "+" else a - b
    return {"question": f"What is {a} {sign} {b}?", "answer": f"{a} {sign} {b} = {value}\n#### {value}"}

"""GSM8K (arXiv 2110.14168, MIT licence): grade-school word problems with a number for an answer.

The model is asked to think in <think> tags and to answer in <answer> tags. Correctness, format and length have a reward
each. `--curriculum_iters N` draws plain sums in the same template for the first N steps, so that a model that has
never seen the tags earns its first rewards on problems it can solve.
"""

import random
from reprlib import repr as brief

from transformers import PreTrainedTokenizerBase

from fastgrpo.config.sections import PromptConfig
from fastgrpo.data import Curriculum, Level, ShuffledRows, load_rows
from fastgrpo.rewards.gsm8k import correctness, format_reward, length_reward
from fastgrpo.tasks import Task

__all__ = ["SYSTEM_PROMPT", "build", "correctness", "format_reward", "length_reward"]

DATASET, CONFIG = "openai/gsm8k", "main"
SYSTEM_PROMPT = (
    "Solve the problem. Think step by step inside <think> and </think>, then give the final number inside <answer> "
    "and </answer>, like this: <think>6 times 7 is 42.</think><answer>42</answer>"
)
CURRICULUM_ROWS = 4096


def build(config: PromptConfig, tokenizer: PreTrainedTokenizerBase) -> Task:
    """Build the task from GSM8K on the hub, or from the rows with `question` and `answer` of --dataset_name.

    Args:
        config: The settings. `Task.train` needs a `GRPOConfig`.
        tokenizer: The policy's tokenizer. Prompts are messages if it has a chat template, and plain text otherwise.

    Returns:
        The task, with rewards for the answer, the form and the length.
    """
    name = config.dataset_name or DATASET
    name_of_config = config.dataset_config or (CONFIG if config.dataset_name is None else None)
    conversational = tokenizer.chat_template is not None
    system_prompt = SYSTEM_PROMPT if config.system_prompt is None else config.system_prompt

    def rows(split):
        loaded = load_rows(name, name_of_config, split, columns=("question", "answer"))
        return None if loaded is None else loaded.map(lambda row: to_row(row, system_prompt, conversational))

    def train():
        problems = rows(config.dataset_train_split)
        if problems is None:
            raise ValueError(f"{name} has no split {config.dataset_train_split!r}")
        source = ShuffledRows(problems, seed=config.seed, shuffle=config.shuffle_dataset)
        if not config.curriculum_iters:
            return source
        sums = [to_row(row, system_prompt, conversational) for row in arithmetic_rows(config.seed)]
        sums = ShuffledRows(sums, seed=config.seed, shuffle=config.shuffle_dataset)
        first = Level("arithmetic", sums, until_steps=config.curriculum_iters)
        return Curriculum([first, Level("gsm8k", source)])

    return Task(train, lambda: rows(config.dataset_test_split), [correctness, format_reward, length_reward])


def to_row(row: dict, system_prompt: str, conversational: bool) -> dict:
    """Add the prompt to a row of the data set.

    Args:
        row: A dict with `question` and `answer`.
        system_prompt: What the model is asked to do.
        conversational: Whether the prompt is a list of messages, for a chat template, rather than plain text.

    Returns:
        The row with its `prompt`.

    Raises:
        ValueError: The row lacks `question` or `answer`, or one of them is no text or is empty.
    """
    for column in ("question", "answer"):
        if column not in row:
            raise ValueError(f"a GSM8K row needs the columns question and answer, got {', '.join(row)}")
        if not isinstance(row[column], str) or not row[column].strip():
            raise ValueError(f"the {column} must be a text that is not empty, got {brief(row[column])}")
    if conversational:
        prompt = [{"role": "system", "content": system_prompt}, {"role": "user", "content": row["question"]}]
    else:
        prompt = f"{system_prompt}\n\nProblem: {row['question']}\nSolution: "
    return {**row, "prompt": prompt}


def arithmetic_rows(seed: int) -> list[dict]:
    """Make sums and differences of small numbers in the form of GSM8K's rows.

    Args:
        seed: Seed of the numbers.

    Returns:
        `CURRICULUM_ROWS` dicts with `question` and `answer`.
    """
    rng = random.Random(seed)
    rows = []
    for _ in range(CURRICULUM_ROWS):
        a, b = sorted((rng.randrange(2, 100), rng.randrange(2, 100)), reverse=True)
        sign, value = rng.choice((("+", a + b), ("-", a - b)))
        rows.append({"question": f"What is {a} {sign} {b}?", "answer": f"{a} {sign} {b} = {value}\n#### {value}"})
    return rows

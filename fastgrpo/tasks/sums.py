"""Sums and differences of two numbers in GSM8K's template: the first thing that a small instruction-tuned model learns.

`HELD_OUT_SUMS` problems of `fastgrpo.tasks.gsm8k` are held out, the same ones in every run.
fastgrpo/recipes/smollm2-135m-sums.yaml trains a model of 135M parameters on the others.

To the rewards of GSM8K comes one for each digit that is right. A small model has hardly a difference right at first,
so that most groups would have equal rewards, and teach nothing.
"""

import re
from typing import Any

from transformers import PreTrainedTokenizerBase

from fastgrpo.config.sections import PromptConfig
from fastgrpo.data import ShuffledRows
from fastgrpo.rewards.answers import completion_text
from fastgrpo.rewards.gsm8k import correctness, format_reward, length_reward
from fastgrpo.tasks import Task, refuse_data
from fastgrpo.tasks.gsm8k import sums, to_row

_WHOLE_NUMBER = re.compile(r"<answer>\s*([0-9]+)\s*</answer>")


def digits_reward(prompts: list, completions: list, answer: list[str], **columns: Any) -> list[float]:
    """Give the share of digits that are right in their places, counted from the units.

    Args:
        prompts: Not used.
        completions: Strings, or lists of messages.
        answer: The references in the form of GSM8K, which end in a whole number.
        columns: Not used.

    Returns:
        One reward from 0.0 to 1.0 per completion; 0.0 where the last ``<answer>`` holds no whole number. A number that
        is longer than the reference has the digits too many as wrong ones.

    Example:
        >>> digits_reward(["?"] * 3, ["<answer>43</answer>", "<answer>3</answer>", "23"], ["#### 23"] * 3)
        [0.5, 0.5, 0.0]
    """
    rewards = []
    for completion, reference in zip(completions, answer, strict=True):
        given, wanted = _WHOLE_NUMBER.findall(completion_text(completion)), reference.split()[-1]
        digits = given[-1] if given else ""
        right = sum(a == b for a, b in zip(reversed(digits), reversed(wanted), strict=False))
        rewards.append(right / max(len(digits), len(wanted)))
    return rewards


def build(config: PromptConfig, tokenizer: PreTrainedTokenizerBase) -> Task:
    """Build the task, with GSM8K's prompt and rewards.

    Args:
        config: The settings. `Task.train` needs a `GRPOConfig`.
        tokenizer: The policy's tokenizer. Prompts are messages if it has a chat template, and plain text otherwise.

    Returns:
        The task, with rewards for the answer, the form, the length and the digits.

    Raises:
        ValueError: A setting for data sets is given. This task makes its own data and would not read it.
    """
    refuse_data("sums", config, ("dataset_name", "dataset_config"))
    conversational = tokenizer.chat_template is not None
    trained, held_out = ([to_row(row, config.system_prompt, conversational) for row in part] for part in sums())

    def train():
        return ShuffledRows(trained, seed=config.seed, shuffle=config.shuffle_dataset)

    return Task(train, lambda: held_out, [correctness, format_reward, length_reward, digits_reward])

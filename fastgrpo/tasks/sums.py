"""Sums and differences of two numbers in GSM8K's template, as a first task of a small instruction-tuned model.

`HELD_OUT_SUMS` problems of `fastgrpo.tasks.gsm8k` are held out, the same ones in every run.
fastgrpo/recipes/smollm2-135m-sums.yaml trains a model of 135M parameters on the others.

`digits_reward` is added to the rewards of GSM8K: at first a small model gets almost no difference right, and rewards of
many groups would be equal.
"""

from typing import TYPE_CHECKING

from fastgrpo.config.sections import PromptConfig
from fastgrpo.rewards.gsm8k import correctness, digits_reward, format_reward, length_reward, steps_reward
from fastgrpo.tasks import Task, refuse_data, shuffled
from fastgrpo.tasks.gsm8k import demonstration, sums, to_row

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def build(config: PromptConfig, tokenizer: "PreTrainedTokenizerBase") -> Task:
    """Build the task, with GSM8K's prompt, its rewards and `digits_reward`."""
    refuse_data("sums", config, ("dataset_name", "dataset_config"))
    conversational = getattr(tokenizer, "chat_template", None) is not None
    trained, held_out = ([to_row(row, config.system_prompt, conversational) for row in part] for part in sums())
    rewards = [correctness, format_reward, length_reward, digits_reward]
    return Task(
        lambda: shuffled(trained, config),
        lambda: held_out,
        rewards,
        lambda: list(map(demonstration, trained)),
        steps_reward,
    )

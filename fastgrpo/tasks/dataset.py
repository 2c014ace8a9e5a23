"""The task of any data set. --reward_funcs module:function names its rewards.

GRPO reads the column `prompt` of its rows, and supervised training `completion` too, or `messages`.
"""

from functools import partial
from typing import TYPE_CHECKING

from fastgrpo.config.sections import PromptConfig
from fastgrpo.data import load_rows
from fastgrpo.data.prompts import with_system
from fastgrpo.tasks import Task, shuffled

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def build(config: PromptConfig, tokenizer: "PreTrainedTokenizerBase | None") -> Task:
    """Build the task of a data set. A system prompt goes before each prompt, as a message or as text."""
    if config.dataset_name is None and (getattr(config, "environment", None) or getattr(config, "train_file", None)):
        return Task(lambda: None, lambda: None, [])  # the environment writes the prompts, or the file has the rows
    if config.dataset_name is None:
        raise ValueError("task=dataset needs --dataset_name: a hub id, a .jsonl file, or a folder of them")
    return Task(
        lambda: shuffled(_present(config, config.dataset_train_split), config),
        lambda: _rows(config, config.dataset_test_split),
        [],
        lambda: _present(config, config.dataset_train_split),
    )


def _present(config, split):
    """Read the rows of a required split."""
    rows = _rows(config, split)
    if rows is None:
        raise ValueError(f"{config.dataset_name} has no split {split!r}")
    return rows


def _rows(config, split):
    """Read the rows of a split, each with the system prompt; None without this split."""
    rows = load_rows(config.dataset_name, config.dataset_config, split)
    if rows is None or config.system_prompt is None:
        return rows
    writes = getattr(config, "environment", None) is not None
    chat = writes or bool(getattr(config, "tools", ()))
    return rows.map(partial(with_system, system_prompt=config.system_prompt, writes=writes, chat=chat))

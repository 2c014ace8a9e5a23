"""The settings of distillation: which completions are drawn, and which of them are kept."""

from typing import Annotated

from pydantic import Field

from fastgrpo.config.command import parse_flags
from fastgrpo.config.fields import Count, Temperature, settings_class
from fastgrpo.config.recipe import take_flag, task_defaults
from fastgrpo.config.sections import (
    CompletionConfig,
    EngineConfig,
    LoadingConfig,
    OutputConfig,
    PromptConfig,
    RewardConfig,
    TokenFilterConfig,
)
from fastgrpo.config.settings import Settings
from fastgrpo.config.training import CurriculumConfig, TrainingDataConfig

DISTILLATION = """Complete the task's training prompts, and keep what is worth learning from.

Kept are completions that are right, well-formed, ended by themselves, not repetitive and no duplicates, at most
--max_per_prompt of each prompt. `python -m fastgrpo.sft --train_file FILE` learns from the file."""


@settings_class
class SelectionConfig:
    """Which completions of a model are drawn, and which of them are kept for supervised training."""

    num_generations: Count = 8
    """Number of completions that are drawn for each prompt."""
    temperature: Temperature = 1.0
    """Temperature of the draws."""
    max_prompts: Count | None = None
    """Largest number of prompts, which are chosen at random. None takes all of them."""
    max_per_prompt: Count = 4
    """Largest number of completions of a prompt that are kept."""
    repetition_n_grams: Count = 8
    """Length, in tokens, of the runs of tokens that count as repeated where they occur again."""
    max_repetition: Annotated[float, Field(ge=0, le=1)] = 0.2
    """Largest share of repeated runs of tokens that a kept completion may have."""
    output: str = "distilled.jsonl"
    """New file to write the kept completions to, one JSON object per line."""


@settings_class
class DistillConfig(
    OutputConfig,
    SelectionConfig,
    RewardConfig,
    EngineConfig,
    TokenFilterConfig,
    CompletionConfig,
    CurriculumConfig,
    TrainingDataConfig,
    PromptConfig,
    LoadingConfig,
    Settings,
):  # the fields come in the reverse of this order
    """The settings of the command. Settings that training has too mean the same there."""

    model: str
    """Folder or hub id of the causal LM that completes the prompts."""


def parse(argv: list[str]) -> DistillConfig:
    """Read the command line. The default of max_completion_length is that of the task's recipe, if it has one."""
    argv, task = take_flag(argv, "--task")
    task = "arithmetic" if task is None else task
    recipe = {name: value for name, value in task_defaults(task).items() if name == "max_completion_length"}
    return parse_flags(
        DistillConfig,
        argv,
        prog="python -m fastgrpo.distill",
        description=DISTILLATION,
        defaults={**recipe, "task": task},
    )

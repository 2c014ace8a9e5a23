"""The settings of supervised training: those that every training has, and what is particular to it."""

from fastgrpo.config.fields import Count, Positive, settings_class
from fastgrpo.config.parallel import ParallelConfig
from fastgrpo.config.sections import (
    CompletionConfig,
    EngineConfig,
    EvaluationConfig,
    LoadingConfig,
    OutputConfig,
    PromptConfig,
    RewardConfig,
)
from fastgrpo.config.settings import TrainingConfig
from fastgrpo.config.training import ModelConfig, OptimizerConfig, RunConfig, TrainingDataConfig


@settings_class
class SFTConfig(
    OutputConfig,
    RunConfig,
    ParallelConfig,
    EvaluationConfig,
    OptimizerConfig,
    RewardConfig,
    EngineConfig,
    CompletionConfig,
    TrainingDataConfig,
    PromptConfig,
    LoadingConfig,
    ModelConfig,
    TrainingConfig,
):  # the fields come in the reverse of this order
    """All settings of a supervised run: most of those of a GRPO run, and these.

    Raises:
        TypeError: A name is not a setting; the nearest one is named.
        ValueError: A setting is not allowed, has no effect, or does not go with another; it is named.
    """

    command = "sft"

    learning_rate: Positive = 2e-05
    """Learning rate of AdamW after the warmup."""
    batch_size: Count = 8
    """Number of rows that one update learns from. A row of messages gives an example for each of its answers."""

    train_file: str | None = None
    """A .jsonl file of rows to learn from, with `prompt` and `completion` or with `messages`. None takes the task's own
    rows. Evaluations use the task's in any case."""

    @property
    def rows_per_step(self) -> int:
        """Rows that one step learns from."""
        return self.batch_size

    @property
    def updates_per_step(self) -> int:
        """Updates of the weights that one step makes."""
        return 1

    @property
    def folder_name(self) -> str:
        """What the folder of a run is called in runs/, before its number."""
        return f"{self.task}-sft"

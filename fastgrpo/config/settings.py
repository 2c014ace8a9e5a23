"""Every setting of a run: one frozen record, flat, under TRL's names; what is not stated here is TRL 1.16's default.

The settings lie in sections, so that help and documentation can group them and other commands can take the ones they
need. `GRPOConfig` is all of them at once, in Python (`GRPOConfig(beta=0.04)`), on the command line (`--beta 0.04`) and
in YAML files (`beta: 0.04`, `--config FILE`).
"""

import dataclasses
import math
from abc import abstractmethod
from collections.abc import Collection
from typing import Annotated, ClassVar

from pydantic import Field

from fastgrpo.config.fields import Count, Positive, Temperature, settings_class
from fastgrpo.config.sections import (
    AdvantageConfig,
    CompletionConfig,
    DatasetConfig,
    EngineConfig,
    EvaluationConfig,
    LoadingConfig,
    ModelConfig,
    ObjectiveConfig,
    OptimizerConfig,
    OrderConfig,
    OutputConfig,
    ParallelConfig,
    PromptConfig,
    ReferenceConfig,
    RewardConfig,
    RolloutConfig,
    RunConfig,
    SamplesConfig,
    TokenFilterConfig,
    TrainSplitConfig,
    UpdatesConfig,
)
from fastgrpo.config.trl import THEIRS, translated
from fastgrpo.config.validation import validate
from fastgrpo.loss.objective import Objective


@settings_class
class Settings:
    """A record of settings that checks itself; a command inherits it together with the sections it needs.

    A setting that is a tuple may also be given as a list or as a single value, and a path as a `pathlib.Path`.
    """

    # Names that the constructor takes and that are no settings.
    other_names: ClassVar[Collection[str]] = ()

    def __post_init__(self):
        validate(self)


class TrainingConfig(Settings):
    """What a trainer asks of its settings, besides the settings themselves.

    Attributes:
        command: The command of the package that takes these settings. A resumed run needs the same one.
    """

    command: ClassVar[str]

    @property
    @abstractmethod
    def rows_per_step(self) -> int:
        """Rows of the training data that one step takes."""

    @property
    @abstractmethod
    def updates_per_step(self) -> int:
        """Updates of the weights that one step makes."""

    @property
    def keeps_first_weights(self) -> bool:
        """Whether a resumed run needs the very weights that the run began with."""
        return self.use_peft

    def logs(self, step: int) -> bool:
        """Tell whether a line of metrics.jsonl is due after a step that is not the last one."""
        return step % self.logging_steps == 0 or (step == 1 and self.logging_first_step)

    @property
    def folder_name(self) -> str:
        """What the folder of a run is called in runs/, before its number."""
        return self.task


@settings_class
class GRPOConfig(
    OutputConfig,
    RunConfig,
    SamplesConfig,
    ParallelConfig,
    EvaluationConfig,
    OptimizerConfig,
    UpdatesConfig,
    ReferenceConfig,
    ObjectiveConfig,
    AdvantageConfig,
    RewardConfig,
    EngineConfig,
    TokenFilterConfig,
    RolloutConfig,
    CompletionConfig,
    OrderConfig,
    PromptConfig,
    LoadingConfig,
    ModelConfig,
    TrainingConfig,
):  # the fields come in the reverse of this order: the model first
    """All settings of a GRPO run. The arguments of `trl.GRPOConfig` are taken, too: docs/from-trl.md lists them.

    Raises:
        TypeError: A name is not a setting; the nearest one is named.
        ValueError: A setting is not allowed, has no effect, or does not go with another; it is named.
    """

    command = "train"
    other_names, translated = THEIRS, staticmethod(translated)
    # Settings of `TrainConfig`, so that tasks can be built from this record, too.
    dataset_name = dataset_config = None
    dataset_train_split, dataset_test_split = "train", "test"

    def __post_init__(self):
        super().__post_init__()
        objective = self.objective  # the loss refuses what it cannot combine
        if self.importance_sampling_mode is not None:
            objective.check_sampler()

    def oversampled(self, count: int) -> int:
        """Return how many groups are started where `count` are wanted.

        Args:
            count: Groups wanted.

        Returns:
            `count` times oversampling_factor, rounded up.
        """
        return math.ceil(round(self.oversampling_factor * count, 6))  # 1.1 * 10 is a little more than 11

    @property
    def rows_per_step(self) -> int:
        """Prompts that one step trains on."""
        return self.prompts_per_step

    @property
    def updates_per_step(self) -> int:
        """Updates of the weights that one step makes."""
        return self.num_iterations * self.updates_per_rollout

    @property
    def keeps_first_weights(self) -> bool:
        """Whether a resumed run needs the very weights that the run began with, as a reference or below adapters."""
        return self.use_peft or (self.beta > 0 and not self.sync_ref_model)

    @property
    def objective(self) -> Objective:
        """The loss's `Objective`: the settings that are its knobs."""
        mine = {field.name for field in dataclasses.fields(self)}
        knobs = {field.name: getattr(self, field.name) for field in dataclasses.fields(Objective) if field.name in mine}
        if self.importance_sampling_mode is None:  # off: the loss is given no sampler's log-probs, and needs no mode
            del knobs["importance_sampling_mode"]
        if self.kl == "full":  # the sum over the vocabulary has no bias, and the loss refuses to correct it
            knobs["use_bias_correction_kl"] = False
        return Objective(**knobs)


@settings_class
class TrainConfig(GRPOConfig, TrainSplitConfig, DatasetConfig):
    """The settings of python -m fastgrpo.train: those of `GRPOConfig`, and which data set is read."""


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
    OrderConfig,
    TrainSplitConfig,
    DatasetConfig,
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
    temperature, top_p, top_k = 1.0, 1.0, 0  # how evaluations draw

    learning_rate: Positive = 2e-05
    """Use this learning rate in AdamW after the warmup."""
    batch_size: Count = 8
    """Learn from N rows per update. A row of messages gives one example per answer."""

    train_file: str | None = None
    """Learn from the rows of this .jsonl file, with `prompt` and `completion` or with `messages`. None uses the task's
    rows. Evaluations always use the task's."""

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


@settings_class
class SelectionConfig:
    """Completions that are drawn, and those that are kept."""

    num_generations: Count = 8
    """Draw N completions per prompt."""
    temperature: Temperature = 1.0
    """Draw at this temperature."""
    max_prompts: Count | None = None
    """Take at most N prompts, chosen at random. None takes all of them."""
    max_per_prompt: Count = 4
    """Keep at most N completions per prompt."""
    repetition_n_grams: Count = 8
    """Measure repetition by n-grams of N tokens."""
    max_repetition: Annotated[float, Field(ge=0, le=1)] = 0.2
    """Drop completions with more than this share of repeated n-grams."""
    output: str = "distilled.jsonl"
    """Write the kept completions to this new file, one JSON object per line."""


@settings_class
class DistillConfig(
    OutputConfig,
    SelectionConfig,
    RewardConfig,
    EngineConfig,
    TokenFilterConfig,
    CompletionConfig,
    OrderConfig,
    TrainSplitConfig,
    DatasetConfig,
    PromptConfig,
    LoadingConfig,
    Settings,
):  # the fields come in the reverse of this order
    """The settings of the command. Settings of training have the same meaning."""

    model: str
    """Complete prompts with this causal LM: a folder, a hub id or a GGUF file."""

"""The records of settings: frozen and flat, with the names and defaults of TRL 1.16.

A record combines sections. `GRPOConfig` has all settings of a run, in Python (`GRPOConfig(beta=0.04)`), on the command
line (`--beta 0.04`) and in YAML files (`beta: 0.04`, `--config FILE`).
"""

import dataclasses
import math
import os
from collections.abc import Collection
from types import SimpleNamespace
from typing import Annotated, ClassVar

from pydantic import Field

import fastgrpo.config.sections as sections
from fastgrpo.config.fields import Count, Positive, Temperature, settings_class
from fastgrpo.config.trl import THEIRS, translated
from fastgrpo.config.validation import validate
from fastgrpo.loss.objective import Objective


@settings_class
class Settings:
    """A record of settings that validates itself. A command inherits it with its sections.

    A tuple can also be given as a list or a single value, and a path as a `pathlib.Path`.
    """

    # Names that the constructor takes and that are not settings.
    other_names: ClassVar[Collection[str]] = ()

    def __post_init__(self):
        kind = type(self)
        if "__dataclass_fields__" in vars(kind) and "__pydantic_validator__" not in vars(kind):
            raise TypeError(f"decorate {kind.__name__} by fastgrpo.config.fields.settings_class, not by dataclass")
        validate(self)


class TrainingConfig(Settings):
    """Properties of settings that a trainer needs, beside the `rows_per_step` of each kind of training."""

    command: ClassVar[str]  # the command of the package; a resumed run needs the same one
    updates_per_step: ClassVar[int] = 1

    @property
    def keeps_first_weights(self) -> bool:
        """Whether a resumed run needs the initial weights of the run."""
        return self.use_peft

    def logs(self, step: int) -> bool:
        """Return whether to log after a step that is not the last one."""
        return step % self.logging_steps == 0 or (step == 1 and self.logging_first_step)

    @property
    def folder_name(self) -> str:
        """Name of the run folder in runs/, without its number."""
        return self.task


@settings_class
class GRPOConfig(
    sections.OutputConfig,
    sections.RunConfig,
    sections.SamplesConfig,
    sections.ParallelConfig,
    sections.EvaluationConfig,
    sections.OptimizerConfig,
    sections.UpdatesConfig,
    sections.ReferenceConfig,
    sections.ObjectiveConfig,
    sections.AdvantageConfig,
    sections.RewardConfig,
    sections.EngineConfig,
    sections.TokenFilterConfig,
    sections.RolloutConfig,
    sections.CompletionConfig,
    sections.ToolsConfig,
    sections.OrderConfig,
    sections.PromptConfig,
    sections.LoadingConfig,
    sections.ModelConfig,
    TrainingConfig,
):  # the fields come in the reverse of this order: the model first
    """All settings of a GRPO run. Also takes the arguments of `trl.GRPOConfig`, see docs/from-trl.md.

    Raises:
        TypeError: A name is not a setting; the message suggests the nearest.
        ValueError: A setting has a wrong value, no effect, or contradicts another; the message names it.
    """

    command = "train"
    other_names, translated = THEIRS, staticmethod(translated)
    # Attributes of TRL's record that scripts read.
    dataloader_num_workers, accelerator_config = 0, SimpleNamespace(dispatch_batches=False, split_batches=False)
    fp16, n_gpu, model_init_kwargs, local_rank = False, 1, None, int(os.environ.get("LOCAL_RANK", 0))
    # Settings of `TrainConfig`, which tasks read.
    dataset_name = dataset_config = None
    dataset_train_split, dataset_test_split = "train", "test"

    def __post_init__(self):
        super().__post_init__()
        objective = self.objective  # the loss validates its settings
        if self.importance_sampling_mode is not None:
            objective.check_sampler()

    def oversampled(self, count: int) -> int:
        """Return the number of groups to start for `count` wanted ones: count x oversampling_factor, rounded up."""
        return math.ceil(round(self.oversampling_factor * count, 6))  # 1.1 * 10 is a little more than 11

    @property
    def eval_strategy(self) -> str:
        """TRL's name for whether held-out prompts are evaluated between steps: steps or no."""
        return "no" if self.eval_steps is None else "steps"

    @property
    def rows_per_step(self) -> int:
        """Prompts per step."""
        return self.prompts_per_step

    @property
    def updates_per_step(self) -> int:
        """Updates per step."""
        return self.num_iterations * self.updates_per_rollout

    @property
    def keeps_first_weights(self) -> bool:
        """Whether a resumed run needs the initial weights: as reference or adapter base."""
        return self.use_peft or (self.beta > 0 and not self.sync_ref_model)

    @property
    def objective(self) -> Objective:
        """The `Objective` of the loss, made from these settings."""
        mine = {field.name for field in dataclasses.fields(self)}
        knobs = {field.name: getattr(self, field.name) for field in dataclasses.fields(Objective) if field.name in mine}
        if self.importance_sampling_mode is None:  # off: the loss gets no log-probs of the sampler
            del knobs["importance_sampling_mode"]
        if self.kl not in ("k1", "k3"):  # the gradients of k2 and full are unbiased
            knobs["use_bias_correction_kl"] = False
        return Objective(**knobs)


@settings_class
class TrainConfig(GRPOConfig, sections.TestSplitConfig, sections.TrainSplitConfig, sections.DatasetConfig):
    """The settings of python -m fastgrpo.train: `GRPOConfig` and the data set."""


@settings_class
class SFTConfig(
    sections.OutputConfig,
    sections.RunConfig,
    sections.ParallelConfig,
    sections.EvaluationConfig,
    sections.OptimizerConfig,
    sections.RewardConfig,
    sections.EngineConfig,
    sections.CompletionConfig,
    sections.OrderConfig,
    sections.TestSplitConfig,
    sections.TrainSplitConfig,
    sections.DatasetConfig,
    sections.PromptConfig,
    sections.LoadingConfig,
    sections.ModelConfig,
    TrainingConfig,
):  # the fields come in the reverse of this order
    """All settings of a supervised run.

    Raises:
        TypeError: A name is not a setting; the message suggests the nearest.
        ValueError: A setting has a wrong value, no effect, or contradicts another; the message names it.
    """

    command = "sft"
    temperature, top_p, top_k = 1.0, 1.0, 0  # of evaluations

    learning_rate: Positive = 2e-05
    """Use this learning rate in AdamW after the warmup."""
    batch_size: Count = 8
    """Train on N rows per update. Each assistant message in the `messages` of a row is learned."""

    train_file: str | None = None
    """Train on the rows of this .jsonl file, with `prompt` and `completion` or with `messages`; system_prompt does not
    change them. None uses the training rows of the task. Evaluations always use the held-out rows of the task."""
    eos_token: str | None = None
    """End completions with this token, such as <|im_end|> if the chat template ends turns with it, and save it as the
    tokenizer's end token. None uses the tokenizer's."""

    @property
    def rows_per_step(self) -> int:
        """Rows per step."""
        return self.batch_size

    @property
    def folder_name(self) -> str:
        """Name of the run folder in runs/, without its number."""
        return f"{self.task}-sft"


@settings_class
class SelectionConfig:
    """The completions to generate, and which of them to keep."""

    num_generations: Count = 8
    """Generate N completions per prompt."""
    temperature: Temperature = 1.0
    """Sample at this temperature."""
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
    sections.OutputConfig,
    SelectionConfig,
    sections.RewardConfig,
    sections.EngineConfig,
    sections.TokenFilterConfig,
    sections.CompletionConfig,
    sections.TrainSplitConfig,
    sections.DatasetConfig,
    sections.PromptConfig,
    sections.LoadingConfig,
    Settings,
):  # the fields come in the reverse of this order
    """The settings of the command. Settings of training have the same meaning."""

    shuffle_dataset, dataset_test_split = False, "test"  # of tasks; the command reads all training rows

    model: str
    """Generate with this causal LM: a folder, a hub id or a GGUF file."""

"""Every setting of a run: one frozen record, flat, under TRL's names; what is not stated here is TRL 1.16's default.

The sections are classes so that help and documentation can group them; `GRPOConfig` is all of them at once, in Python
(`GRPOConfig(beta=0.04)`), on the command line (`--beta 0.04`) and in YAML files (`beta: 0.04`, `--config FILE`).
"""

import dataclasses
from dataclasses import dataclass
from pathlib import Path

from fastgrpo.advantage import SCALES
from fastgrpo.objective import IMPORTANCE_SAMPLING_LEVELS, KL_ESTIMATORS, LOSS_TYPES, Objective

RECIPES = Path(__file__).parent / "recipes"
REPORTERS = ("none", "tensorboard", "wandb")


@dataclass(frozen=True)
class ModelConfig:
    """Which policy, where, in what precision."""

    model_name_or_path: str | None = None
    """A folder or hub id of a causal LM. None: the task's own small model, where it has one."""
    dtype: str = "auto"
    """Of the module's weights: float32, bfloat16, or auto: bfloat16 on GPUs (with fp32 masters), float32 on CPUs."""
    device: str = "auto"
    """cuda, cuda:1, cpu, or auto: the GPU where there is one."""
    gradient_checkpointing: bool = True
    """Recompute layers in the backward pass: less memory, about a third more time."""


@dataclass(frozen=True)
class DataConfig:
    """Which prompts."""

    task: str = "arithmetic"
    """arithmetic (self-contained), gsm8k, or dataset (rows with a `prompt` column, rewards from --reward_funcs)."""
    dataset_name: str | None = None
    """A hub id, a .jsonl file, or a folder with SPLIT.jsonl files. None: the task's own."""
    dataset_config: str | None = None
    """Configuration name of a hub data set."""
    dataset_train_split: str = "train"
    """Split to train on."""
    dataset_test_split: str = "test"
    """Split to evaluate on."""
    system_prompt: str | None = None
    """Replaces the task's system prompt."""
    curriculum_iters: int = 0
    """gsm8k: the first this many steps draw plain arithmetic in the same template."""
    shuffle_dataset: bool = True
    """Draw prompts in a new random order every epoch."""
    max_eval_samples: int | None = None
    """Evaluate on the first this many held-out prompts. None: on all."""


@dataclass(frozen=True)
class RolloutConfig:
    """How completions are drawn."""

    prompts_per_step: int = 8
    """Prompts (groups) a step."""
    num_generations: int = 8
    """Completions of each prompt: the group size G."""
    max_completion_length: int = 512
    """Tokens; a completion that reaches it is truncated."""
    temperature: float = 1.0
    """Of sampling, and of every log-prob."""
    top_p: float = 1.0
    """Draw from the smallest set of tokens with this much probability. 1: off."""
    top_k: int = 0
    """Draw from this many likeliest tokens. 0: off."""
    min_p: float | None = None
    """Cut tokens below this share of the likeliest one's probability. None: off."""
    max_num_seqs: int = 256
    """Completions in flight at once."""


@dataclass(frozen=True)
class ObjectiveConfig:
    """Rewards, advantages, and the loss."""

    reward_funcs: tuple[str, ...] = ()
    """Names of the task's reward functions, or module:function. Empty: all of the task's."""
    reward_weights: tuple[float, ...] = ()
    """One weight a reward function. Empty: all 1."""
    scale_rewards: str = "group"
    """What centred rewards are divided by: the deviation of the group, of the batch, or none."""
    loss_type: str = "dapo"
    """grpo, bnpo, dapo, dr_grpo, luspo, cispo, sapo or vespo: see OBJECTIVES.md."""
    importance_sampling_level: str = "token"
    """token, or sequence (GSPO)."""
    epsilon: float = 0.2
    """The ratio is clipped below at 1 - epsilon."""
    epsilon_high: float | None = None
    """And above at 1 + epsilon_high. None: epsilon."""
    delta: float | None = None
    """Upper bound on the unclipped ratio (two-sided clip). None: none."""
    beta: float = 0.0
    """Coefficient of the KL to the reference. 0: no reference in memory."""
    kl: str = "k3"
    """Estimator of the KL: k1, k2, k3 or abs."""
    use_bias_correction_kl: bool = False
    """Multiply the KL by the ratio, so that it stays unbiased off-policy."""
    entropy_coef: float = 0.0
    """Coefficient of the entropy bonus. 0: off."""
    sapo_temperature_pos: float = 1.0
    """sapo: temperature of the gate where the advantage is positive."""
    sapo_temperature_neg: float = 1.05
    """sapo: and elsewhere."""
    vespo_k_pos: float = 2.0
    """vespo: power of the sequence weight where the advantage is positive."""
    vespo_lambda_pos: float = 3.0
    """vespo: its decay there."""
    vespo_k_neg: float = 3.0
    """vespo: power where the advantage is negative."""
    vespo_lambda_neg: float = 2.0
    """vespo: its decay there."""
    mask_truncated_completions: bool = False
    """Truncated completions give no gradient."""


@dataclass(frozen=True)
class OptimConfig:
    """How the policy moves."""

    max_steps: int = -1
    """Steps (rollouts) of the run. -1: num_train_epochs over the data."""
    num_train_epochs: float = 3.0
    """Passes over the prompts, where max_steps is -1."""
    seed: int = 42
    """Of data order, sampling and the task's own model."""
    learning_rate: float = 1e-6
    """Of AdamW, after warmup."""
    lr_scheduler_type: str = "linear"
    """Any of transformers' schedules: linear, cosine, constant, constant_with_warmup, ..."""
    warmup_steps: float = 0
    """Updates of linear warmup; below 1, a share of all."""
    max_grad_norm: float = 1.0
    """Gradients are clipped to this norm. 0: off."""
    weight_decay: float = 0.0
    """Of AdamW, on matrices alone."""
    adam_beta1: float = 0.9
    """Of AdamW."""
    adam_beta2: float = 0.999
    """Of AdamW."""
    adam_epsilon: float = 1e-8
    """Of AdamW."""
    updates_per_rollout: int = 1
    """Minibatches that a rollout is split into, one update each."""
    num_iterations: int = 1
    """Passes over a rollout (mu)."""
    max_tokens_per_microbatch: int = 16384
    """Tokens of a forward and backward pass; memory grows with it, the result does not depend on it."""


@dataclass(frozen=True)
class LoggingConfig:
    """What a run leaves behind."""

    output_dir: str | None = None
    """Folder of the run. None: a new numbered runs/TASK-N."""
    overwrite_output_dir: bool = False
    """Empty output_dir first, where it has something in it."""
    logging_steps: int = 10
    """Steps averaged into one line of metrics.jsonl."""
    eval_steps: int | None = None
    """Evaluate every this many steps. None: at the start and the end alone."""
    save_steps: int = 500
    """Save a checkpoint every this many steps; the last step always does."""
    report_to: tuple[str, ...] = ("none",)
    """tensorboard, wandb."""


@dataclass(frozen=True)
class GRPOConfig(LoggingConfig, OptimConfig, ObjectiveConfig, RolloutConfig, DataConfig, ModelConfig):
    """All settings of a run. Raises ValueError for one out of range, naming it and the remedy."""

    def __post_init__(self):
        for name in ("reward_funcs", "reward_weights", "report_to"):  # lists and single strings are welcome in Python
            value = getattr(self, name)
            object.__setattr__(self, name, (value,) if isinstance(value, str) else tuple(value))
        for name, choices in (
            ("scale_rewards", SCALES),
            ("loss_type", LOSS_TYPES),
            ("importance_sampling_level", IMPORTANCE_SAMPLING_LEVELS),
            ("kl", KL_ESTIMATORS),
            ("dtype", ("auto", "float32", "bfloat16")),
        ):
            if getattr(self, name) not in choices:
                raise ValueError(f"{name} must be one of {', '.join(choices)}, got {getattr(self, name)!r}")
        for name, least in (
            ("prompts_per_step", 1),
            ("num_generations", 2),
            ("max_completion_length", 1),
            ("max_num_seqs", 1),
            ("updates_per_rollout", 1),
            ("num_iterations", 1),
            ("max_tokens_per_microbatch", 1),
            ("logging_steps", 1),
            ("save_steps", 1),
            ("curriculum_iters", 0),
            ("warmup_steps", 0),
            ("top_k", 0),
            ("eval_steps", 1),
            ("max_eval_samples", 1),
        ):
            if getattr(self, name) is not None and getattr(self, name) < least:
                raise ValueError(f"{name} must be at least {least}, got {getattr(self, name)}")
        if self.temperature <= 0:
            raise ValueError(f"temperature must be positive, got {self.temperature}: greedy groups have no spread")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p must be in (0, 1], got {self.top_p}")
        if not 0 <= (self.min_p or 0) <= 1:
            raise ValueError(f"min_p must be in [0, 1], got {self.min_p}")
        if not self.num_train_epochs > 0:
            raise ValueError(f"num_train_epochs must be positive, got {self.num_train_epochs}")
        if self.max_num_seqs < self.num_generations:
            raise ValueError(
                f"max_num_seqs={self.max_num_seqs} must hold a group of num_generations={self.num_generations}"
            )
        if not self.learning_rate > 0:
            raise ValueError(f"learning_rate must be positive, got {self.learning_rate}")
        if self.max_steps == 0 or self.max_steps < -1:
            raise ValueError(f"max_steps must be positive, or -1 for num_train_epochs, got {self.max_steps}")
        if self.updates_per_rollout > self.prompts_per_step:
            raise ValueError(
                f"updates_per_rollout={self.updates_per_rollout} splits {self.prompts_per_step} groups; "
                "raise prompts_per_step"
            )
        unknown = set(self.report_to) - set(REPORTERS)
        if unknown:
            raise ValueError(f"report_to must be of {', '.join(REPORTERS)}, got {', '.join(sorted(unknown))}")
        self.objective  # noqa: B018 - validates the rest

    @property
    def objective(self):
        """The loss's `Objective`."""
        names = {field.name for field in dataclasses.fields(Objective)} & {
            field.name for field in dataclasses.fields(self)
        }
        return Objective(**{name: getattr(self, name) for name in names})


def load_yaml(path):
    """A recipe file -> dict of settings. Raises ValueError for a name that is no setting (the nearest is named)."""
    import difflib

    import yaml

    settings = yaml.safe_load(Path(path).read_text()) or {}
    known = {field.name: field.type for field in dataclasses.fields(GRPOConfig)}
    for name, value in settings.items():
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            raise ValueError(f"{path}: unknown setting {name!r}" + (f"; did you mean {near[0]!r}?" if near else ""))
        if isinstance(value, str) and known[name] in (float, int, float | None, int | None):
            try:  # YAML 1.1 reads 5e-5, without a point, as a string
                settings[name] = float(value)
            except ValueError:
                raise ValueError(f"{path}: {name} must be a number, got {value!r}") from None
    return settings


def task_defaults(task):
    """Settings of recipes/TASK.yaml, where the task ships one."""
    path = RECIPES / f"{task}.yaml"
    return load_yaml(path) if path.exists() else {}

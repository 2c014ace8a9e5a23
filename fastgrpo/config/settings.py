"""Every setting of a run: one frozen record, flat, under TRL's names; what is not stated here is TRL 1.16's default.

The sections are classes so that help and documentation can group them; `GRPOConfig` is all of them at once, in Python
(`GRPOConfig(beta=0.04)`), on the command line (`--beta 0.04`) and in YAML files (`beta: 0.04`, `--config FILE`).
"""

import dataclasses
import difflib
import math
from dataclasses import dataclass

from fastgrpo.config.validation import validate
from fastgrpo.loss.objective import Objective


@dataclass(frozen=True)
class ModelConfig:
    """Which policy, where, in what precision."""

    model_name_or_path: str | None = None
    """A folder or hub id of a causal LM. None: the task's own small model, where it has one."""
    dtype: str = "auto"
    """Of the module's weights: float32, bfloat16, or auto: bfloat16 on GPUs (with fp32 masters), float32 on CPUs."""
    device: str = "auto"
    """cuda, cuda:1, cpu, or auto: the GPU where there is one."""
    use_liger_kernel: bool | None = None
    """liger-kernel's fused norms, rotary embedding and SwiGLU in policy and reference. None: on GPUs that have it."""
    trust_remote_code: bool = False
    """Run Python code that comes with the model. Off, a model that needs its own is refused."""
    gradient_checkpointing: bool = True
    """Recompute layers in the backward pass: less memory, about a third more time."""
    use_peft: bool = False
    """Train low-rank adapters (LoRA) in a frozen model; they have no dropout. The reference costs no memory then."""
    lora_r: int = 16
    """Rank of the adapters."""
    lora_alpha: int = 32
    """Their update is scaled by lora_alpha / lora_r."""
    lora_target_modules: tuple[str, ...] = ()
    """Linear layers that get one, by name, or all-linear. Empty: peft's choice for the architecture."""


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
    """Completions in flight at once; freed places go to the next prompts."""
    dynamic_sampling: bool = False
    """Drop groups that teach nothing and draw new prompts in their place, batch after batch (DAPO)."""
    max_num_gen_batches: int = 10
    """dynamic_sampling: batches drawn a step at most; the first dropped groups then fill up."""
    oversampling_factor: float = 1.0
    """Start this many times the groups that are wanted, abort those that finish last. 1: off. Favours short ones."""
    rollout_backend: str = "fast"
    """fast: the engine. hf: transformers' generate, slow, for a model that the engine refuses."""
    rollout_attention: str = "auto"
    """Of decoding: triton, flash_attn, varlen, sdpa or products; auto takes the first that works."""
    rollout_memory_utilization: float = 0.3
    """Share of the device's free memory that keys and values of rollouts may take."""
    rollout_enforce_eager: bool = False
    """Decode without CUDA graphs."""


@dataclass(frozen=True)
class ObjectiveConfig:
    """Rewards, advantages, and the loss."""

    reward_funcs: tuple[str, ...] = ()
    """Names of the task's reward functions, or module:function. Empty: all of the task's."""
    reward_weights: tuple[float, ...] = ()
    """One weight a reward function. Empty: all 1."""
    reward_errors: str = "raise"
    """raise: an error of a reward function ends the run. skip: its reward counts as not given; errors are counted."""
    scale_rewards: str = "group"
    """What centred rewards are divided by: the deviation of the group, of the batch, or none."""
    advantage_baseline: str = "group"
    """What is subtracted from a reward: the mean of its group, or leave_one_out, that of the others in it (RLOO)."""
    advantage_clip: float | None = None
    """Bound on the magnitude of an advantage. None: none."""
    multi_objective_aggregation: str = "sum_then_normalize"
    """Of several rewards: sum_then_normalize, or normalize_then_sum: each within its group first (GDPO)."""
    loss_type: str = "dapo"
    """grpo, bnpo, dapo, dr_grpo, luspo, cispo, sapo or vespo: see docs/objectives.md."""
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
    ref_device: str | None = None
    """cpu: the reference rests in host memory and passes through the GPU layer by layer. None: where the policy is."""
    ref_quantization: str | None = None
    """Of the reference's linear layers: int8 (half of bfloat16) or nf4 (a quarter). None: none."""
    sync_ref_model: bool = False
    """Let the reference follow the policy (TR-DPO)."""
    ref_model_sync_steps: int = 512
    """Every this many steps,"""
    ref_model_mixup_alpha: float = 0.6
    """to ref_model_mixup_alpha * policy + (1 - ref_model_mixup_alpha) * reference."""
    kl: str = "k3"
    """Estimator of the KL: k1, k2, k3 or abs."""
    use_bias_correction_kl: bool = False
    """Multiply the KL by the ratio, so that it stays unbiased off-policy."""
    entropy_coef: float = 0.0
    """Coefficient of the entropy bonus. 0: off."""
    importance_sampling_mode: str | None = None
    """How the loss weighs."""
    importance_sampling_clip_max: float | None = 3.0
    """Clip."""
    importance_sampling_clip_min: float | None = None
    """Clip."""
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
    soft_punish_cache: int = 0
    """Add a reward that falls from 0 to -1 over the last this many tokens of max_completion_length (DAPO). 0: off."""


@dataclass(frozen=True)
class OptimConfig:
    """How the policy moves."""

    max_steps: int = -1
    """Steps (rollouts) of the run. -1: num_train_epochs over the data."""
    num_train_epochs: float = 3.0
    """Passes over the prompts, where max_steps is -1."""
    seed: int = 42
    """Of data order, sampling, the task's own model, and the global generators of Python, NumPy and torch."""
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
    share_prompt: bool = True
    """The completions of a prompt share its tokens in forward and backward passes; the result does not depend on it."""


@dataclass(frozen=True)
class EvalConfig:
    """Accuracy on held-out prompts."""

    eval_steps: int | None = None
    """Evaluate every this many steps. None: at the start and the end alone."""
    max_eval_samples: int | None = None
    """Evaluate on the first this many held-out prompts. None: on all."""
    eval_num_generations: int = 0
    """Besides the greedy completion, draw this many of each held-out prompt: pass@k, maj@k. 0: none."""
    eval_temperature: float = 1.0
    """Of these draws."""
    eval_top_p: float = 1.0
    """Of these draws, as top_p."""
    eval_top_k: int = 0
    """Of these draws, as top_k."""


@dataclass(frozen=True)
class LoggingConfig:
    """What a run leaves behind."""

    output_dir: str | None = None
    """Folder of the run. None: a new numbered runs/TASK-N."""
    overwrite_output_dir: bool = False
    """Empty output_dir first, where it has something in it."""
    logging_steps: int = 10
    """Steps averaged into one line of metrics.jsonl."""
    save_steps: int = 500
    """Save a checkpoint every this many steps; the last step always does, and SIGINT and SIGTERM do."""
    save_total_limit: int | None = None
    """Checkpoints to keep: the newest, the best, then the next newest. None: all."""
    metric_for_best_model: str | None = None
    """Metric that makes a checkpoint the best one, eval/accuracy for example. None: no best one."""
    greater_is_better: bool | None = None
    """Whether a larger metric_for_best_model is better. None: unless its name ends in loss."""
    resume_from_checkpoint: str | None = None
    """auto: go on from the newest good checkpoint in output_dir, or start there; or the path of a checkpoint."""
    profile: int = 0
    """Steps to profile: after two of warm-up, this many are timed (a table) and as many traced. 0: off."""
    report_to: tuple[str, ...] = ("none",)
    """tensorboard, wandb."""


@dataclass(frozen=True)
class GRPOConfig(LoggingConfig, EvalConfig, OptimConfig, ObjectiveConfig, RolloutConfig, DataConfig, ModelConfig):
    """All settings of a run. Raises ValueError for one out of range, naming it and the remedy."""

    def __new__(cls, *args, **settings):
        for name in settings:
            check_name(name, "GRPOConfig", TypeError)
        return super().__new__(cls)

    def __post_init__(self):
        for name in (
            "reward_funcs",
            "reward_weights",
            "report_to",
            "lora_target_modules",
        ):  # lists and single strings are welcome in Python
            value = getattr(self, name)
            object.__setattr__(self, name, (value,) if isinstance(value, str) else tuple(value))
        validate(self)

    def oversampled(self, count):
        """How many groups are started where `count` are wanted."""
        return math.ceil(round(self.oversampling_factor * count, 6))  # 1.1 * 10 is a little more than 11

    @property
    def objective(self):
        """The loss's `Objective`."""
        names = {field.name for field in dataclasses.fields(Objective)} & {
            field.name for field in dataclasses.fields(self)
        }
        if self.importance_sampling_mode is None:
            names -= {"importance_sampling_mode"}
        return Objective(**{name: getattr(self, name) for name in names})


def check_name(name, where, error):
    """Raise `error` for a name that is no setting; the nearest one is named."""
    names = [field.name for field in dataclasses.fields(GRPOConfig)]
    if name not in names:
        near = difflib.get_close_matches(name, names, n=1)
        raise error(f"{where}: unknown setting {name!r}" + (f"; did you mean {near[0]!r}?" if near else ""))

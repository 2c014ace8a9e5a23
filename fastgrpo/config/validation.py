"""What settings must be: the tables of choices and bounds, and which do not go together. Each refusal names the setting
and the remedy."""

import math

from fastgrpo.loss.advantage import AGGREGATIONS, BASELINES, SCALES
from fastgrpo.loss.objective import IMPORTANCE_SAMPLING_LEVELS, KL_ESTIMATORS, LOSS_TYPES

REPORTERS = ("none", "tensorboard", "wandb")
CHOICES = (
    ("scale_rewards", SCALES),
    ("advantage_baseline", BASELINES),
    ("multi_objective_aggregation", AGGREGATIONS),
    ("ref_device", (None, "cpu")),
    ("ref_quantization", (None, "int8", "nf4")),
    ("loss_type", LOSS_TYPES),
    ("importance_sampling_level", IMPORTANCE_SAMPLING_LEVELS),
    ("kl", KL_ESTIMATORS),
    ("dtype", ("auto", "float32", "bfloat16")),
    ("reward_errors", ("raise", "skip")),
    ("rollout_backend", ("fast", "hf")),
    ("rollout_attention", ("auto", "triton", "flash_attn", "varlen", "sdpa", "products")),
)
AT_LEAST = (
    ("prompts_per_step", 1),
    ("num_generations", 2),
    ("max_completion_length", 1),
    ("max_num_seqs", 1),
    ("max_num_gen_batches", 1),
    ("oversampling_factor", 1),
    ("soft_punish_cache", 0),
    ("updates_per_rollout", 1),
    ("num_iterations", 1),
    ("max_tokens_per_microbatch", 1),
    ("logging_steps", 1),
    ("save_steps", 1),
    ("save_total_limit", 1),
    ("curriculum_iters", 0),
    ("top_k", 0),
    ("eval_steps", 1),
    ("max_eval_samples", 1),
    ("eval_num_generations", 0),
    ("eval_top_k", 0),
    ("lora_r", 1),
    ("lora_alpha", 1),
    ("ref_model_sync_steps", 1),
    ("profile", 0),
)
# Settings that do nothing where a condition does not hold, and why: to take one without a word would be a lie.
IDLE = (
    (
        ("lora_r", "lora_alpha", "lora_target_modules"),
        lambda config: config.use_peft,
        "is of adapters, and without use_peft=True there are none",
    ),
    (
        ("ref_device", "ref_quantization", "sync_ref_model", "kl", "use_bias_correction_kl"),
        lambda config: config.beta != 0,
        "is of the reference, and at beta=0 there is none; set beta or leave it out",
    ),
    (
        ("ref_model_sync_steps", "ref_model_mixup_alpha"),
        lambda config: config.sync_ref_model,
        "is of a reference that follows the policy, and without sync_ref_model=True it does not",
    ),
    (
        ("max_num_gen_batches",),
        lambda config: config.dynamic_sampling,
        "is of dynamic_sampling, which is off",
    ),
    (
        ("sapo_temperature_pos", "sapo_temperature_neg"),
        lambda config: config.loss_type == "sapo",
        "is of loss_type=sapo alone",
    ),
    (
        ("vespo_k_pos", "vespo_lambda_pos", "vespo_k_neg", "vespo_lambda_neg"),
        lambda config: config.loss_type == "vespo",
        "is of loss_type=vespo alone",
    ),
    (
        ("eval_temperature", "eval_top_p", "eval_top_k"),
        lambda config: config.eval_num_generations > 0,
        "is of the draws of an evaluation, and eval_num_generations=0 makes none",
    ),
    (
        ("rollout_attention", "rollout_memory_utilization", "rollout_enforce_eager"),
        lambda config: config.rollout_backend == "fast",
        "is of the engine, and rollout_backend=hf does without it",
    ),
    (
        ("warmup_steps",),
        lambda config: config.lr_scheduler_type != "constant",
        "has no effect under lr_scheduler_type=constant; use constant_with_warmup",
    ),
)


def validate(config):
    """Raises ValueError for a `GRPOConfig` with a setting out of range, or with two that do not go together."""
    for name, choices in CHOICES:
        if getattr(config, name) not in choices:
            named = ", ".join(str(choice) for choice in choices)
            raise ValueError(f"{name} must be one of {named}, got {getattr(config, name)!r}")
    for name, least in AT_LEAST:
        if getattr(config, name) is not None and getattr(config, name) < least:
            raise ValueError(f"{name} must be at least {least}, got {getattr(config, name)}")
    for name, why in (
        ("temperature", ": greedy groups have no spread"),
        ("eval_temperature", ": the greedy completion is always drawn"),
        ("learning_rate", ""),
        ("adam_epsilon", ""),
        ("advantage_clip", ""),
        ("num_train_epochs", ""),
    ):
        value = getattr(config, name)
        if value is not None and not 0 < value < math.inf:
            raise ValueError(f"{name} must be positive and finite, got {value}{why}")
    for name in ("weight_decay", "max_grad_norm", "warmup_steps"):
        if not 0 <= getattr(config, name) < math.inf:
            raise ValueError(f"{name} must be at least 0 and finite, got {getattr(config, name)}")
    for name in ("adam_beta1", "adam_beta2"):
        if not 0 <= getattr(config, name) < 1:
            raise ValueError(f"{name} must be in [0, 1), got {getattr(config, name)}")
    if not 0 <= config.seed < 2**32:
        raise ValueError(f"seed must be from 0 to 2**32 - 1, as NumPy's, got {config.seed}")
    if not all(math.isfinite(weight) for weight in config.reward_weights):
        raise ValueError(f"reward_weights must be finite, got {', '.join(map(str, config.reward_weights))}")
    for name in ("top_p", "eval_top_p"):
        if not 0 < getattr(config, name) <= 1:
            raise ValueError(f"{name} must be in (0, 1], got {getattr(config, name)}")
    if not 0 <= (config.min_p or 0) <= 1:
        raise ValueError(f"min_p must be in [0, 1], got {config.min_p}")
    if not 0 < config.rollout_memory_utilization <= 1:
        raise ValueError(f"rollout_memory_utilization must be in (0, 1], got {config.rollout_memory_utilization}")
    if config.max_num_seqs < config.num_generations:
        raise ValueError(
            f"max_num_seqs={config.max_num_seqs} must hold a group of num_generations={config.num_generations}"
        )
    if config.max_num_seqs < config.eval_num_generations:
        raise ValueError(
            f"max_num_seqs={config.max_num_seqs} must hold the eval_num_generations={config.eval_num_generations} "
            "completions of a prompt"
        )
    _check_sampling(config)
    _check_reference(config)
    if config.multi_objective_aggregation == "normalize_then_sum":
        for name in ("scale_rewards", "advantage_baseline"):
            if getattr(config, name) != "group":
                raise ValueError(
                    f"multi_objective_aggregation=normalize_then_sum scales each reward by its group: {name} must "
                    f"be group, got {getattr(config, name)}"
                )
    if config.max_steps == 0 or config.max_steps < -1:
        raise ValueError(f"max_steps must be positive, or -1 for num_train_epochs, got {config.max_steps}")
    if config.updates_per_rollout > config.prompts_per_step:
        raise ValueError(
            f"updates_per_rollout={config.updates_per_rollout} splits {config.prompts_per_step} groups; "
            "raise prompts_per_step"
        )
    unknown = set(config.report_to) - set(REPORTERS)
    if unknown:
        raise ValueError(f"report_to must be of {', '.join(REPORTERS)}, got {', '.join(sorted(unknown))}")
    _check_saving(config)
    config.objective  # noqa: B018 - validates the rest
    for names, active, why in IDLE:
        for name in names:
            if getattr(config, name) != getattr(type(config), name) and not active(config):
                raise ValueError(f"{name} {why}")


def _check_sampling(config):
    if config.dynamic_sampling and config.max_num_gen_batches < 2:
        raise ValueError(
            "dynamic_sampling draws further batches, and max_num_gen_batches=1 allows none: raise it, or turn "
            "dynamic_sampling off"
        )
    if not config.oversampling_factor < math.inf:
        raise ValueError(f"oversampling_factor must be finite, got {config.oversampling_factor}")
    if config.oversampling_factor > 1 and config.rollout_backend == "hf":
        raise ValueError(
            f"oversampling_factor={config.oversampling_factor} aborts groups that run, which transformers' generate "
            "(rollout_backend=hf) cannot; use rollout_backend=fast, or oversampling_factor=1"
        )
    if config.soft_punish_cache > config.max_completion_length:
        raise ValueError(
            f"soft_punish_cache={config.soft_punish_cache} is a part of max_completion_length="
            f"{config.max_completion_length}: it must not be larger"
        )


def _check_reference(config):
    """What the reference is asked to be must be one thing."""
    asked = [name for name in ("ref_device", "ref_quantization", "sync_ref_model") if getattr(config, name)]
    if asked and config.use_peft:
        raise ValueError(f"{asked[0]} does not go with use_peft: the reference is the policy without adapters")
    if config.ref_quantization and len(asked) > 1:
        other = next(name for name in asked if name != "ref_quantization")
        raise ValueError(f"{other} does not go with ref_quantization: it needs the reference's exact weights")
    if not 0 < config.ref_model_mixup_alpha <= 1:
        raise ValueError(f"ref_model_mixup_alpha must be in (0, 1], got {config.ref_model_mixup_alpha}")


def _check_saving(config):
    if config.resume_from_checkpoint is not None and config.overwrite_output_dir:
        raise ValueError("resume_from_checkpoint goes on in output_dir, overwrite_output_dir empties it: choose one")
    if config.resume_from_checkpoint == "auto" and config.output_dir is None:
        raise ValueError("resume_from_checkpoint=auto needs output_dir: the folder of the run that goes on")
    if config.metric_for_best_model is None:
        if config.greater_is_better is not None:
            raise ValueError("greater_is_better needs metric_for_best_model")
        return
    every = "eval_steps" if config.metric_for_best_model.startswith("eval/") else "logging_steps"
    if getattr(config, every) is None or config.save_steps % getattr(config, every):
        raise ValueError(
            f"metric_for_best_model={config.metric_for_best_model} is measured every {every}={getattr(config, every)} "
            f"steps; set it so that save_steps={config.save_steps} is a multiple"
        )

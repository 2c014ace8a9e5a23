"""Rules about several settings, conditions under which settings have an effect, and changes allowed on resume.

A rule is a function whose parameters are named like settings. It applies to each record that has all of them, so
evaluate and chat use the same rules as `GRPOConfig`.
"""

import dataclasses
import inspect
from pathlib import Path
from typing import Any

from fastgrpo.config.fields import keywords

NO_FILTERS = (
    "rollout_backend=vllm supports no top_k, top_p, min_p or repetition_penalty, because vLLM returns no log-probs of "
    "the full distribution with them; leave them out"
)
# The condition, in words that follow "has an effect only if" -> when it holds, and the settings that need it.
ONLY_WHERE = {
    "task is reasoning_gym": (lambda s: s.task == "reasoning_gym", "reasoning_gym_tasks"),
    "rollout_backend is neither hf nor vllm": (
        lambda s: s.rollout_backend not in ("hf", "vllm"),
        "rollout_memory_utilization",
    ),
    "rollout_backend is vllm": (
        lambda s: s.rollout_backend == "vllm",
        "vllm_server_base_url vllm_server_timeout vllm_weights_dir max_staleness",
    ),
    "max_staleness is above 0": (lambda s: s.max_staleness > 0, "staleness_policy"),
    "use_peft is True": (lambda s: s.use_peft, "lora_r lora_alpha lora_target_modules"),
    "max_steps is -1 (the recipe of a task may set max_steps: pass --max_steps -1)": (
        lambda s: s.max_steps == -1,
        "num_train_epochs",
    ),
    "lr_scheduler_type is not constant (use constant_with_warmup)": (
        lambda s: s.lr_scheduler_type != "constant",
        "warmup_steps",
    ),
    "log_completions is True": (lambda s: s.log_completions, "num_completions_to_print"),
    "metric_for_best_model is set": (lambda s: s.metric_for_best_model is not None, "greater_is_better"),
    "report_to has wandb or trackio": (lambda s: {"wandb", "trackio"} & {*s.report_to}, "project"),
    "importance_sampling_mode is set": (
        lambda s: s.importance_sampling_mode is not None,
        "importance_sampling_clip_max importance_sampling_clip_min",
    ),
    "use_adaptive_entropy is True": (
        lambda s: s.use_adaptive_entropy,
        "entropy_coef_min entropy_coef_max entropy_coef_delta entropy_target",
    ),
    "loss_type is sapo": (lambda s: s.loss_type == "sapo", "sapo_temperature_pos sapo_temperature_neg"),
    "loss_type is vespo": (
        lambda s: s.loss_type == "vespo",
        "vespo_k_pos vespo_lambda_pos vespo_k_neg vespo_lambda_neg",
    ),
    "beta is above 0": (lambda s: s.beta != 0, "kl ref_storage sync_ref_model"),
    "sync_ref_model is True": (lambda s: s.sync_ref_model, "ref_model_sync_steps ref_model_mixup_alpha"),
}
# Setting -> its condition, in words and as a function of all settings.
CONDITIONS = {name: (text, holds) for text, (holds, names) in ONLY_WHERE.items() for name in names.split()}
# Settings that a resumed run may change; it still continues bit for bit.
RESUME_MAY_CHANGE = """
reward_timeout reward_errors reward_workers max_eval_samples eval_num_generations
quiet log_completions num_completions_to_print output_dir overwrite_output_dir
logging_steps logging_first_step disable_tqdm eval_steps eval_on_start save_steps save_total_limit
metric_for_best_model greater_is_better resume_from_checkpoint profile report_to run_name project
push_to_hub serve_port hub_model_id hub_private_repo parallel ddp_timeout activation_offloading
vllm_server_base_url vllm_server_timeout vllm_weights_dir staleness_policy
"""
# Settings that it may change with a warning: it then does not continue bit for bit.
RESUME_INEXACT = """
device max_num_seqs rollout_memory_utilization reward_model_kwargs ref_storage
use_liger_kernel attention gradient_checkpointing max_steps num_train_epochs max_tokens_per_microbatch
"""
PATHS = ("model_name_or_path", "dataset_name", "train_file")
RESUME_MAY_CHANGE, RESUME_INEXACT = frozenset(RESUME_MAY_CHANGE.split()), frozenset(RESUME_INEXACT.split())


def on_resume(name: str, before: Any = None, now: Any = None) -> str:
    """Return whether a resumed run may change a setting between these values: "free", "inexact" or "same"."""
    if name == "ref_storage" and {"int8", "nf4"} & {before, now}:  # a quantized reference has other weights
        return "same"
    if name in PATHS and None not in (before, now) and Path(before).name == Path(now).name:
        return "free"  # the same files at another place; their content is compared
    if name == "reward_model_kwargs" and _but_device(before) != _but_device(now):
        return "same"
    if name == "rollout_backend" and {before, now} <= {"auto", "fast", "eager"}:
        return "inexact"
    if name == "parallel" and "fsdp2_offload" in (before, now):  # another device computes the updates
        return "inexact"
    return "free" if name in RESUME_MAY_CHANGE else "inexact" if name in RESUME_INEXACT else "same"


def _but_device(kwargs):
    return {name: value for name, value in keywords("reward_model_kwargs", kwargs).items() if name != "device"}


def validate(record: Any) -> None:
    """Raise ValueError if settings contradict each other or have no effect."""
    for rule in RULES:
        names = inspect.signature(rule).parameters
        if all(hasattr(record, name) for name in names):
            rule(**{name: getattr(record, name) for name in names})
    for field in dataclasses.fields(record):
        value, (text, holds) = getattr(record, field.name), CONDITIONS.get(field.name, ("", None))
        if holds is not None and value != field.default and not holds(record):
            default = " ".join(map(str, field.default)) if isinstance(field.default, tuple) else field.default
            raise ValueError(
                f"{field.name} has an effect only if {text}; leave it out or, if a recipe sets it, "
                f"pass --{field.name} {default}"
            )


def _groups_fit(max_num_seqs, num_generations):
    if max_num_seqs is not None and max_num_seqs < num_generations:
        raise ValueError(
            f"max_num_seqs={max_num_seqs} must be at least num_generations={num_generations}; raise max_num_seqs"
        )


def _evaluation_groups_fit(max_num_seqs, eval_num_generations):
    if max_num_seqs is not None and max_num_seqs < eval_num_generations:
        raise ValueError(
            f"max_num_seqs={max_num_seqs} must be at least eval_num_generations={eval_num_generations}; raise it"
        )


def _the_backend_can_abort(oversampling_factor, rollout_backend):
    if oversampling_factor > 1 and rollout_backend == "hf":
        raise ValueError(
            f"oversampling_factor={oversampling_factor} aborts running groups, but rollout_backend=hf cannot abort "
            "them; use rollout_backend=fast, or oversampling_factor=1"
        )


def _servers_sample_without_filters(rollout_backend, top_k, top_p, min_p, repetition_penalty):
    if rollout_backend == "vllm" and (top_k or top_p < 1 or min_p or repetition_penalty != 1):
        raise ValueError(NO_FILTERS)


def _old_weights_are_corrected(rollout_backend, max_staleness, importance_sampling_mode):
    if rollout_backend == "vllm" and max_staleness and importance_sampling_mode is None:
        raise ValueError(
            f"max_staleness={max_staleness} trains on completions of older weights, which needs importance weights; "
            "set importance_sampling_mode, for example to token_truncate"
        )


def _punishment_fits(soft_punish_cache, max_completion_length):
    if soft_punish_cache > max_completion_length:
        raise ValueError(
            f"soft_punish_cache={soft_punish_cache} must be at most max_completion_length={max_completion_length}; "
            "lower it"
        )


def _adapters_are_their_own_reference(use_peft, ref_storage, sync_ref_model):
    given = {"ref_storage": ref_storage, "sync_ref_model": sync_ref_model}
    asked = [name for name, value in given.items() if value]
    if asked and use_peft:
        raise ValueError(
            f"{asked[0]} cannot be combined with use_peft, whose reference is the policy without adapters; leave it out"
        )


def _4bit_weights_are_not_sharded(load_in_4bit, parallel):
    if load_in_4bit and parallel.startswith("fsdp2"):
        raise ValueError(f"load_in_4bit cannot be combined with parallel={parallel}; use ddp, or leave out one of them")


def _offloaded_layers_are_recomputed(activation_offloading, gradient_checkpointing):
    if activation_offloading and gradient_checkpointing is False:
        raise ValueError("activation_offloading needs recomputed layers; leave gradient_checkpointing at auto")


def _a_quantized_reference_is_not_synced(ref_storage, sync_ref_model):
    if ref_storage in ("int8", "nf4") and sync_ref_model:
        raise ValueError(
            f"sync_ref_model cannot be combined with ref_storage={ref_storage}, because it needs exact weights of the "
            "reference; leave out one of the two settings"
        )


def _each_reward_is_scaled_by_its_group(multi_objective_aggregation, scale_rewards, advantage_baseline):
    for name, value in (("scale_rewards", scale_rewards), ("advantage_baseline", advantage_baseline)):
        if multi_objective_aggregation == "normalize_then_sum" and value != "group":
            raise ValueError(
                f"multi_objective_aggregation=normalize_then_sum scales each reward by its group: {name} must be "
                f"group, got {value}"
            )


def _tokens_can_have_advantages(
    process_rewards,
    importance_sampling_level,
    loss_type,
    off_policy_mask_threshold,
    advantage_baseline,
    multi_objective_aggregation,
):
    if process_rewards != "token":
        return
    aggregation = multi_objective_aggregation
    refused = {
        f"importance_sampling_level={importance_sampling_level}": importance_sampling_level == "sequence",
        f"loss_type={loss_type}": loss_type == "vespo",
        f"off_policy_mask_threshold={off_policy_mask_threshold}": off_policy_mask_threshold is not None,
        f"advantage_baseline={advantage_baseline}": advantage_baseline != "group",
        f"multi_objective_aggregation={aggregation}": aggregation != "sum_then_normalize",
    }
    for stated, wrong in refused.items():
        if wrong:
            raise ValueError(
                f"process_rewards=token gives each token its own advantage, but {stated} needs one advantage for "
                "a whole completion; leave out one of the two settings"
            )


def _reward_models_take_these(reward_model_kwargs):
    known = ("device", "separator", "aggregation", "step_tag", "good_token", "bad_token")
    for name, value in keywords("reward_model_kwargs", reward_model_kwargs).items():
        if name not in known:
            raise ValueError(f"reward_model_kwargs has an unknown argument {name!r}; it takes {', '.join(known)}")
        if not isinstance(value, str):
            raise ValueError(f"{name} of reward_model_kwargs must be text, got {value!r}; change it or leave it out")


def _the_gradient_has_a_bound(head_backward_tolerance, entropy_coef, use_adaptive_entropy, beta, kl):
    asked = {"entropy_coef": entropy_coef != 0, "use_adaptive_entropy": use_adaptive_entropy,
             "kl=full": beta != 0 and kl == "full"}  # fmt: skip
    for name, value in asked.items():
        if head_backward_tolerance and value:
            raise ValueError(
                f"head_backward_tolerance={head_backward_tolerance:g} bounds the gradient of log-probs, but {name} "
                "has a gradient on every entry of the vocabulary; leave out one of the two settings"
            )


def _there_are_steps(max_steps):
    if max_steps == 0:
        raise ValueError("max_steps must be positive, or -1 for num_train_epochs, got 0")


def _every_update_has_a_group(updates_per_rollout, prompts_per_step):
    if updates_per_rollout > prompts_per_step:
        raise ValueError(
            f"updates_per_rollout={updates_per_rollout} needs {updates_per_rollout} groups, but "
            f"prompts_per_step={prompts_per_step} gives fewer; raise prompts_per_step (or gradient_accumulation_steps, "
            "if TRL's batch arguments are given)"
        )


def _resume_or_overwrite(resume_from_checkpoint, overwrite_output_dir, output_dir):
    if resume_from_checkpoint is not None and overwrite_output_dir:
        raise ValueError(
            "resume_from_checkpoint continues the run in output_dir, but overwrite_output_dir deletes it; choose one"
        )
    if resume_from_checkpoint == "auto" and output_dir is None:
        raise ValueError("resume_from_checkpoint=auto needs output_dir: the folder of the run to resume")


def _the_best_metric_is_measured(metric_for_best_model, eval_steps, logging_steps, save_steps):
    if metric_for_best_model is None:
        return
    name, every = ("eval_steps", eval_steps) if metric_for_best_model.startswith(("eval/", "eval_")) else (
        "logging_steps", logging_steps
    )  # fmt: skip
    if save_steps is not None and (every is None or save_steps % every):
        raise ValueError(
            f"metric_for_best_model={metric_for_best_model} must be measured at every checkpoint: "
            f"save_steps={save_steps} must be a multiple of {name}, got {name}={every}"
        )


def _one_source_of_rows(train_file, dataset_train_split):
    if train_file is not None and dataset_train_split != "train":
        raise ValueError(
            f"dataset_train_split={dataset_train_split} has no effect with train_file={train_file}; leave it out"
        )


RULES = (
    _groups_fit,
    _evaluation_groups_fit,
    _the_backend_can_abort,
    _servers_sample_without_filters,
    _old_weights_are_corrected,
    _punishment_fits,
    _adapters_are_their_own_reference,
    _4bit_weights_are_not_sharded,
    _offloaded_layers_are_recomputed,
    _a_quantized_reference_is_not_synced,
    _each_reward_is_scaled_by_its_group,
    _tokens_can_have_advantages,
    _reward_models_take_these,
    _the_gradient_has_a_bound,
    _there_are_steps,
    _every_update_has_a_group,
    _resume_or_overwrite,
    _the_best_metric_is_measured,
    _one_source_of_rows,
)

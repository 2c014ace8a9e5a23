"""The arguments of `trl.GRPOConfig` (TRL 1.16, with those of transformers' TrainingArguments), and their translation.

An argument is a setting of the same name (`SAME`), is translated (`TRANSLATED`), has no effect on results (`IDLE`), or
is not supported (`REFUSED`): it raises an error, unless it is off (None, False, 0 or empty) or has TRL's default.
docs/from-trl.md is made from these tables.
"""

import enum
import math
import os
from collections.abc import Mapping
from typing import Any

from fastgrpo.config.fields import Count, convert, keywords

Stated = Mapping[str, Any]
# Batch arguments, with TRL's defaults.
BATCH = {"per_device_train_batch_size": 8, "gradient_accumulation_steps": 1, "steps_per_generation": None,
         "generation_batch_size": None}  # fmt: skip
# Counts of updates in TRL: the first are rounded up to whole steps, the others must be whole steps.
ROUNDED, EXACT = ("logging_steps", "eval_steps", "save_steps"), ("max_steps", "ref_model_sync_steps")
# Loading arguments that change no result, and (argument, value) pairs that change none.
_LOADING = ("attn_implementation", "use_cache", "low_cpu_mem_usage")
_LOADING_VALUES = (("device_map", None), ("quantization_config", None), ("revision", None), ("revision", "main"))
# Options of generation_kwargs, with vLLM's names of them -> settings.
_DRAWS = {name: name for name in ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")}
_DRAWS |= {"max_new_tokens": "max_completion_length", "max_tokens": "max_completion_length"}
# Options that never change a draw; then options with their neutral value, besides None.
_NO_DRAW = ("use_cache", "cache_implementation", "disable_compile", "pad_token_id", "bos_token_id",
            "renormalize_logits")  # fmt: skip
_NEUTRAL = {"do_sample": True, "no_repeat_ngram_size": 0, "min_length": 0}
_NEUTRAL |= dict.fromkeys(("presence_penalty", "frequency_penalty", "epsilon_cutoff", "eta_cutoff"), 0.0)
_NEUTRAL |= dict.fromkeys(("encoder_repetition_penalty", "length_penalty", "guidance_scale", "typical_p"), 1.0)
_NEUTRAL |= dict.fromkeys(("num_beams", "num_return_sequences", "n"), 1)
_REMEDY = (
    "the settings of sampling are temperature, top_k, top_p, min_p, repetition_penalty, num_generations, "
    "max_completion_length and seed, and a completion ends at model.generation_config.eos_token_id"
)


def translated(stated: Stated) -> dict[str, Any]:
    """Translate arguments of TRL, and return only settings."""
    stated = {name: value.value if isinstance(value, enum.Enum) else value for name, value in stated.items()}
    stated |= {name: VALUES[name](stated[name]) for name in VALUES.keys() & stated.keys()}
    for name, value in stated.items():
        if name in INSTEAD and value and value not in ACCEPTED.get(name, ()):
            raise ValueError(f"{name}={value!r} is not supported; {INSTEAD[name]}")
    settings = {name: value for name, value in stated.items() if name not in THEIRS}
    for names, translate, _ in TRANSLATED:
        given = [name for name in names.split() if name in stated]
        for name, value in (translate(stated) if given else {}).items():
            if name not in SAME and stated.get(name, value) != value:
                arguments = " and ".join(f"{argument}={stated[argument]!r}" for argument in given)
                raise ValueError(
                    f"{arguments} make{'s' * (len(given) == 1)} {name}={value!r}, but {name}={stated[name]!r} is given "
                    "too; leave one of them out"
                )
            settings[name] = value
    if "use_vllm" in stated and settings.get("rollout_backend") != "vllm":  # TRL ignores them too
        settings = {name: value for name, value in settings.items() if not name.startswith("vllm_server_")}
    if any(name in stated for name in BATCH):
        settings = in_steps(settings, settings["updates_per_rollout"] * settings.get("num_iterations", 1))
    return settings


def batch(stated: Stated) -> dict[str, Any]:
    """Translate batch sizes: a rollout is one generation batch of TRL, over all processes."""
    sizes = {name: stated.get(name, default) for name, default in BATCH.items()}
    sizes = (value if value is None else convert(name, value, Count) for name, value in sizes.items())
    device, accumulated, steps, whole = sizes
    group = convert("num_generations", stated.get("num_generations", 8), Count)
    world = int(os.environ.get("WORLD_SIZE", "1"))  # as torchrun and accelerate set it
    at_once, given = device * world, f"per_device_train_batch_size={device} x WORLD_SIZE={world}"
    if steps is not None and whole is not None:
        raise ValueError(
            f"steps_per_generation={steps} and generation_batch_size={whole} determine each other; leave one out"
        )
    if whole is not None and whole % at_once:
        raise ValueError(f"generation_batch_size={whole} must be a multiple of {given}")
    steps = whole // at_once if whole is not None else steps or accumulated
    if accumulated % steps == 0 and convert("num_iterations", stated.get("num_iterations", 1), Count) == 1:
        steps = accumulated  # the rollouts of an update have the same weights, and become one
    if steps % accumulated:
        raise ValueError(
            f"steps_per_generation={steps} must be a multiple of gradient_accumulation_steps={accumulated}, so that a "
            "rollout makes whole updates; change one of them"
        )
    completions, updates = at_once * steps, steps // accumulated
    if completions % group:
        raise ValueError(
            f"{given} x steps_per_generation={steps} is {completions} completions of a step, which must be a multiple "
            f"of num_generations={group}"
        )
    return {"prompts_per_step": completions // group, "updates_per_rollout": updates}


def in_steps(settings: dict[str, Any], updates: int) -> dict[str, Any]:
    """Turn counts of updates into counts of steps, TRL's defaults included.

    If save_steps is a multiple of eval_steps or logging_steps, it stays one after rounding.
    """
    defaults = {"logging_steps": 10, "save_steps": 500}
    if settings.get("sync_ref_model"):
        defaults["ref_model_sync_steps"] = 512
    counts, counted = defaults | settings, {}
    for name in (*ROUNDED, *EXACT):
        count = counts.get(name)
        if count is None or (count := convert(name, count, float)) < 1:  # -1, or a share of the run
            continue
        if name in EXACT and name in settings and count % updates:
            raise ValueError(
                f"{name}={count:g} counts updates, as in TRL, and a step makes {updates} of them "
                f"(updates_per_rollout x num_iterations), so it must be a multiple of {updates}"
            )
        counts[name], counted[name] = count, math.ceil(count / updates)
    if (metric := settings.get("metric_for_best_model")) and "save_steps" in counted:
        every = "eval_steps" if metric.startswith(("eval/", "eval_")) else "logging_steps"
        if every in counted and counts["save_steps"] % counts[every] == 0:
            counted["save_steps"] = int(counts["save_steps"] // counts[every]) * counted[every]
    return settings | counted


def strategies(stated: Stated) -> dict[str, Any]:
    """Translate eval_strategy and save_strategy, and check logging_strategy."""
    for kind, remedy in (("eval", ""), ("save", "; metric_for_best_model marks the best"), ("logging", "")):
        name, taken = f"{kind}_strategy", ("steps",) if kind == "logging" else ("steps", "no")
        if stated.get(name, "steps") not in taken:
            raise ValueError(f"{name}={stated[name]!r} is not supported; use {name}='steps' with {kind}_steps{remedy}")
    made = {"save_steps": None} if stated.get("save_strategy") == "no" else {}
    if "eval_strategy" in stated:
        steps = stated.get("eval_steps") or stated.get("logging_steps", 10)
        made["eval_steps"] = steps if stated["eval_strategy"] == "steps" else None
        made["eval_on_start"] = stated.get("eval_on_start", OTHER_DEFAULTS["eval_on_start"])
    return made


def precision(stated: Stated) -> dict[str, Any]:
    """Translate bf16, fp16 and model_init_kwargs."""
    if stated.get("fp16"):
        raise ValueError("fp16=True is not supported; use bf16=True")
    bf16, loading = stated.get("bf16"), stated.get("model_init_kwargs") or {}
    loading = dict(loading) if isinstance(loading, Mapping) else keywords("model_init_kwargs", loading)
    dtype = loading.pop("dtype", loading.pop("torch_dtype", None))
    made = {"trust_remote_code": loading.pop("trust_remote_code")} if "trust_remote_code" in loading else {}
    for name, value in loading.items():
        if name not in _LOADING and (name, value) not in _LOADING_VALUES:
            raise ValueError(
                f"model_init_kwargs has {name}={value!r}, which is not supported; load the model yourself and pass it, "
                "or leave it out"
            )
    if bf16 or (bf16 is False and dtype is None):
        dtype = "bfloat16" if bf16 else "float32"
    return made if dtype is None else {"dtype": str(dtype).removeprefix("torch."), **made}


def generation(stated: Stated) -> dict[str, Any]:
    """Translate generation_kwargs, a dict or the JSON text of one."""
    settings = {}
    for name, value in keywords("generation_kwargs", stated["generation_kwargs"]).items():
        if name in _DRAWS and value is not None:
            settings[_DRAWS[name]] = value
        elif value is not None and name not in _NO_DRAW and (name not in _NEUTRAL or value != _NEUTRAL[name]):
            raise ValueError(f"generation_kwargs has {name}={value!r}, which is not supported; {_REMEDY}")
    return settings


def served(stated: Stated) -> dict[str, Any]:
    """Translate use_vllm. With vllm_mode=server, use vLLM servers, and correct by importance weights as TRL does."""
    mode = stated.get("vllm_mode", "colocate")
    if mode not in ("server", "colocate"):
        raise ValueError(f"vllm_mode={mode!r} is not supported; use 'server' or 'colocate'")
    if mode == "colocate" or not stated.get("use_vllm"):
        return {}
    made = {"rollout_backend": "vllm"}
    if not stated.get("vllm_server_base_url"):
        host, port = stated.get("vllm_server_host", "127.0.0.1"), stated.get("vllm_server_port", 8000)
        made["vllm_server_base_url"] = f"http://{host}:{port}"
    if stated.get("vllm_importance_sampling_correction", True):
        for name, default in (("mode", "sequence_mask"), ("clip_max", 3.0), ("clip_min", None)):
            made[f"importance_sampling_{name}"] = stated.get(f"vllm_importance_sampling_{name}", default)
        if (cap := stated.get("vllm_importance_sampling_cap")) is not None:
            made["importance_sampling_clip_max"] = cap
    return made


# fmt: off
# Arguments of other names -> the function that translates them, and a description.
TRANSLATED = [
    (" ".join(BATCH), batch,
     "prompts_per_step = per_device_train_batch_size x number of processes x steps_per_generation / num_generations. "
     "updates_per_rollout = steps_per_generation / gradient_accumulation_steps; if it is 1/N, an update's rollouts "
     "become one. Both must be whole. max_tokens_per_microbatch sets the size of a forward pass instead."),
    ("num_generations_eval", lambda stated: {"eval_num_generations": stated["num_generations_eval"] or 0},
     "Sets eval_num_generations. These completions are sampled without min_p and repetition_penalty. If "
     "not set, no completions are sampled; TRL samples num_generations."),
    ("eval_strategy save_strategy logging_strategy", strategies,
     "`steps`: evaluate every eval_steps (if None: logging_steps), save every save_steps, log every logging_steps. "
     "`no`: evaluate or save only after the last step. Other values raise an error. If eval_strategy is set, the "
     "default of eval_on_start is False."),
    ("bf16 fp16 model_init_kwargs", precision,
     "bf16=True sets dtype=bfloat16; the optimizer keeps float32 master weights. Without bf16=True, model_init_kwargs "
     "can set dtype. If it does not, bf16=False sets dtype=float32. model_init_kwargs can also set trust_remote_code. "
     "Its keys attn_implementation, use_cache, low_cpu_mem_usage and device_map=None have no effect. Other keys, and "
     "fp16=True, raise an error."),
    ("generation_kwargs", generation,
     "temperature, top_k, top_p, min_p and repetition_penalty set the settings with the same names; max_new_tokens "
     "sets max_completion_length. Options that do not change sampling have no effect. Other options raise an error."),
    ("use_vllm vllm_mode vllm_server_host vllm_server_port vllm_importance_sampling_correction "
     "vllm_importance_sampling_mode vllm_importance_sampling_clip_max vllm_importance_sampling_clip_min "
     "vllm_importance_sampling_cap", served,
     "use_vllm=True with vllm_mode=server sets rollout_backend=vllm, vllm_server_base_url, and the settings "
     "importance_sampling_mode, importance_sampling_clip_max and importance_sampling_clip_min, with TRL's defaults. "
     "Start the servers as in docs/serving.md, not by `trl vllm-serve`. With vllm_mode=colocate, or without use_vllm, "
     "these arguments have no effect: the engine generates completions in this process."),
    ("use_cpu", lambda stated: {"device": "cpu"} if stated["use_cpu"] else {}, "True sets device=cpu."),
    ("warmup_ratio", lambda stated: {} if stated.get("warmup_steps") else {"warmup_steps": stated["warmup_ratio"]},
     "Sets warmup_steps to the same number; a number below 1 is a share of all updates."),
]
# Settings of the same name and meaning.
_PLAIN = """
learning_rate lr_scheduler_type lr_scheduler_kwargs weight_decay adam_beta1 adam_beta2 adam_epsilon
max_grad_norm logging_first_step run_name project save_total_limit push_to_hub hub_private_repo hub_model_id
greater_is_better seed ddp_timeout resume_from_checkpoint trust_remote_code num_generations max_completion_length
shuffle_dataset temperature top_p top_k min_p repetition_penalty chat_template_kwargs beta num_iterations epsilon
delta sapo_temperature_neg sapo_temperature_pos vespo_k_pos vespo_lambda_pos vespo_k_neg vespo_lambda_neg
multi_objective_aggregation loss_type mask_truncated_completions sync_ref_model ref_model_mixup_alpha entropy_coef
use_adaptive_entropy entropy_coef_min entropy_coef_max entropy_coef_delta entropy_target off_policy_mask_threshold
use_bias_correction_kl report_to warmup_steps epsilon_high router_aux_loss_coef
importance_sampling_level max_tool_calling_iterations vllm_server_timeout
"""
_COUNT = "With batch arguments, the value counts updates, and "
# Others of the same name -> what differs from TRL.
SAME = {**dict.fromkeys(_PLAIN.split(), ""),
    "output_dir": "None creates a folder in runs/. If the folder contains a run, set overwrite_output_dir or "
    "resume_from_checkpoint.",
    "max_steps": _COUNT + "must be a multiple of the updates per step.",
    "ref_model_sync_steps": _COUNT + "must be a multiple of the updates per step.",
    "logging_steps": _COUNT + "is rounded up to whole steps.",
    "eval_steps": _COUNT + "is rounded up to whole steps. Held-out rows are evaluated even without "
    "eval_strategy.",
    "save_steps": _COUNT + "is rounded up to whole steps; with metric_for_best_model, to a multiple of "
    "eval_steps.",
    "gradient_checkpointing": "auto is True on a CPU, and on a GPU if activations do not fit into memory.",
    "use_liger_kernel": "None uses liger-kernel on a GPU if it is installed. On a CPU, and in the loss, it is never "
    "used.",
    "optim": "adamw_torch_fused means adamw_torch, adamw_bnb_8bit means adamw_8bit.",
    "disable_tqdm": "None means False.",
    "log_completions": "True also writes all completions to samples.jsonl.",
    "num_completions_to_print": "Prints the first N; TRL prints N at random.",
    "eval_on_start": "If eval_strategy is set, the default is False.",
    "metric_for_best_model": "eval_accuracy means eval/accuracy in metrics.jsonl. `reward` means the training reward "
    "(in TRL: eval_reward), and raises an error with EarlyStoppingCallback.",
    "num_train_epochs": "With a positive max_steps, it raises an error; TRL ignores it.",
    "vllm_server_base_url": "Also takes a list.",
    "reward_weights": "None or empty gives each function a weight of 1.",
    "scale_rewards": "Also takes True (group) and False (none).",
    "top_entropy_quantile": "The share refers to the tokens of an update; in TRL, to a micro-batch of all processes.",
}
# TRL's defaults of settings whose default differs here.
OTHER_DEFAULTS = {"gradient_checkpointing": True, "use_liger_kernel": False, "disable_tqdm": None,
                  "report_to": "none", "eval_on_start": False, "reward_weights": None, "optim": "adamw_torch_fused",
                  "vllm_server_base_url": None}
# Arguments that have no effect on results, and why.
IDLE = [
    ("cast_lm_head_to_fp32", "Logits are computed in float32 from weights in any dtype."),
    ("dataloader_drop_last dataloader_num_workers dataloader_pin_memory dataloader_persistent_workers "
     "dataloader_prefetch_factor dataloader_multiprocessing_context dataloader_in_order",
     "Rows are read in the trainer's process, without a DataLoader."),
    ("data_seed train_sampling_strategy length_column_name", "seed and shuffle_dataset set the order of prompts."),
    ("vllm_model_impl vllm_enable_sleep_mode vllm_group_port vllm_gpu_memory_utilization vllm_max_model_length "
     "vllm_tensor_parallel_size",
     "Set them where you start the vLLM servers. The engine needs none of them."),
    ("use_transformers_continuous_batching transformers_continuous_batching_config use_transformers_paged "
     "cache_implementation use_cache pad_to_multiple_of", "The engine has continuous batching and its own KV cache."),
    ("local_rank ddp_find_unused_parameters ddp_bucket_cap_mb ddp_broadcast_buffers ddp_static_graph ddp_backend "
     "ds3_gather_for_generation average_tokens_across_devices",
     "torchrun sets the ranks. Gradients are summed once per update, and the loss counts all tokens."),
    ("log_unique_prompts log_multimodal", "Prompts, completions and rewards are written to samples.jsonl."),
    ("log_level log_level_replica log_on_each_node logging_nan_inf_filter include_num_input_tokens_seen "
     "skip_memory_metrics logging_dir",
     "Rank 0 logs for all ranks, and includes num_tokens and memory. TensorBoard writes to the run folder."),
    ("per_device_eval_batch_size", "max_num_seqs limits the completions that are generated at the same time."),
    ("do_train do_eval do_predict prediction_loss_only eval_do_concat_batches eval_use_gather_object label_names "
     "eval_accumulation_steps include_for_metrics batch_eval_metrics label_smoothing_factor",
     "Evaluations need no logits or labels."),
    ("torch_empty_cache_steps gradient_checkpointing_kwargs",
     "Memory is planned before a run starts. Layers are recomputed with use_reentrant=False."),
    ("tf32", "float32 matrix multiplications always have full precision; use bf16=True for speed."),
    ("enable_jit_checkpoint save_safetensors", "A run always saves on SIGINT and SIGTERM, in safetensors."),
    ("disable_dropout", "Dropout is always off."),
]
# Arguments that must be off or have TRL's default, and what to do instead.
REFUSED = [
    ("vllm_structured_outputs_regex", "leave it out: no backend constrains what the model generates"),
    ("deepspeed fsdp fsdp_config parallelism_config accelerator_config", "use parallel='fsdp2' under torchrun"),
    ("optim_args optim_target_modules", "leave it out: optim needs no arguments"),
    ("torch_compile torch_compile_backend torch_compile_mode liger_kernel_config",
     "leave it out: head, loss and rollout have their own kernels"),
    ("auto_find_batch_size", "lower max_tokens_per_microbatch if memory runs out; results differ only by rounding"),
    ("bf16_full_eval fp16_full_eval", "leave it out: evaluations use the dtype of the training"),
    ("neftune_noise_alpha", "leave it out: fastgrpo adds no noise to embeddings"),
    ("eval_delay", "use eval_steps, and eval_on_start=False"),
    ("save_only_model save_on_each_node", "leave it out: save_total_limit limits the number of checkpoints"),
    ("load_best_model_at_end", "set metric_for_best_model; save_total_limit never deletes the best checkpoint"),
    ("ignore_data_skip restore_callback_states_from_checkpoint", "leave it out: a resumed run restores all state"),
    ("full_determinism", "call transformers.enable_full_determinism(seed) before you create the trainer"),
    ("remove_unused_columns", "leave it out: reward functions get every column as a keyword argument"),
    ("debug", "leave it out: the flag --debug shows tracebacks, and the setting profile measures steps"),
    ("hub_token", "log in by `hf auth login`, or set HF_TOKEN"),
    ("hub_strategy hub_always_push hub_revision", "use push_to_hub, hub_model_id and hub_private_repo"),
    ("trackio_space_id trackio_bucket_id trackio_static_space_id", "set TRACKIO_SPACE_ID or TRACKIO_BUCKET_ID"),
    ("log_completions_hub_repo", "upload samples.jsonl of the run folder yourself"),
    ("max_prompt_length", "drop rows with long prompts: prompts are never truncated"),
]
# Values of refused arguments that are accepted, besides those that are off.
ACCEPTED = {"hub_strategy": ("every_save", "end")}
# fmt: on
MADE, IDLE_WHY, INSTEAD = (
    {name: row[-1] for row in rows for name in row[0].split()} for rows in (TRANSLATED, IDLE, REFUSED)
)
# Names that `GRPOConfig` takes and that are not settings.
THEIRS = {*MADE, *IDLE_WHY, *INSTEAD}
# Settings of the same name whose values TRL spells differently.
VALUES = {
    "scale_rewards": lambda value: {True: "group", False: "none"}[value] if isinstance(value, bool) else value,
    "report_to": lambda value: None if value == [] else value,
    "disable_tqdm": lambda value: False if value is None else value,
    "optim": lambda value: {
        "adamw_bnb_8bit": "adamw_8bit",
        **dict.fromkeys(("adamw_torch_fused", "adamw_hf", "adamw_apex_fused"), "adamw_torch"),
    }.get(value, value),
}

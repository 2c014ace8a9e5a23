"""The arguments of `trl.GRPOConfig` (TRL 1.16, with those of transformers' TrainingArguments), and what each is here.

An argument is a setting of the same name (`SAME`), is made into other settings (`TRANSLATED`), does nothing because
results do not depend on it (`IDLE`), or is refused with a line that says what to do instead (`REFUSED`). A value that
equals TRL's default is never refused. `translated` applies the table, and docs/from-trl.md is made from it.
"""

# fmt: off
import enum
import math
import os
from collections.abc import Callable, Mapping
from typing import Any

from fastgrpo.config.fields import Count, convert, keywords

COUNTED = "Counts updates where one of TRL's batch arguments is given, as in TRL, and steps otherwise."
# Settings of the same name and meaning.
_PLAIN = """
num_train_epochs learning_rate lr_scheduler_type lr_scheduler_kwargs weight_decay adam_beta1 adam_beta2 adam_epsilon
max_grad_norm logging_first_step run_name project save_total_limit push_to_hub hub_private_repo hub_model_id
greater_is_better seed ddp_timeout resume_from_checkpoint trust_remote_code num_generations max_completion_length
shuffle_dataset temperature top_p top_k min_p repetition_penalty chat_template_kwargs beta num_iterations epsilon
delta sapo_temperature_neg sapo_temperature_pos vespo_k_pos vespo_lambda_pos vespo_k_neg vespo_lambda_neg
multi_objective_aggregation loss_type mask_truncated_completions sync_ref_model ref_model_mixup_alpha entropy_coef
use_adaptive_entropy entropy_coef_min entropy_coef_max entropy_coef_delta entropy_target off_policy_mask_threshold
use_bias_correction_kl
"""
# Others of the same name -> what else there is to know of them.
NOTES = {
    "output_dir": "None makes a new folder in runs/. A folder with a run in it is refused: see overwrite_output_dir.",
    "max_steps": COUNTED + " It must then be whole steps.",
    "warmup_steps": "Counts updates, as in TRL.",
    "gradient_checkpointing": "auto, the default, decides by the memory that there is.",
    "use_liger_kernel": "None, the default, uses it on a GPU where it is installed. The head is fused in any case.",
    "logging_steps": COUNTED + " It is rounded up to whole steps.",
    "disable_tqdm": "None is False.",
    "report_to": "none, tensorboard, wandb or trackio.",
    "log_completions": "True also writes all completions to samples.jsonl.",
    "num_completions_to_print": "The first ones, where TRL draws some.",
    "eval_steps": COUNTED + " It is rounded up to whole steps.",
    "eval_on_start": "True measures the accuracy that a run begins with; eval_strategy makes it False.",
    "save_steps": COUNTED + " It is rounded up to whole steps, or follows eval_steps where metric_for_best_model needs "
    "an evaluation.",
    "metric_for_best_model": "A metric of docs/runs.md, such as eval/accuracy or eval_reward. reward is that of "
    "training: TRL would read eval_reward, and EarlyStoppingCallback, which does, is refused with it.",
    "epsilon_high": "cispo needs at least 1.",
    "importance_sampling_level": "luspo needs sequence.",
    "reward_weights": "None is a weight of 1 for each function.",
    "scale_rewards": "True is group and False is none.",
    "ref_model_sync_steps": COUNTED + " A number that is stated must then be whole steps.",
    "top_entropy_quantile": "Of the tokens of an update; TRL takes them of a micro-batch of all processes.",
}
SAME = {**dict.fromkeys(_PLAIN.split(), ""), **NOTES}
# TRL's defaults of those whose own default differs.
OTHER_DEFAULTS = {
    "gradient_checkpointing": True, "use_liger_kernel": False, "disable_tqdm": None, "report_to": "none",
    "eval_on_start": False, "reward_weights": None,
}
# Arguments that other settings stand for, with TRL's defaults, and what is made of them.
TRANSLATED = [
    ({"per_device_train_batch_size": 8, "gradient_accumulation_steps": 1, "steps_per_generation": None,
      "generation_batch_size": None},
     "A step draws per_device_train_batch_size x WORLD_SIZE x steps_per_generation completions, which is "
     "generation_batch_size and here prompts_per_step x num_generations. steps_per_generation / "
     "gradient_accumulation_steps, a whole number, is updates_per_rollout. max_tokens_per_microbatch alone decides how "
     "many tokens go through the model at once; the result does not depend on it."),
    ({"num_generations_eval": None},
     "eval_num_generations. The completions are drawn at the temperature, top_p and top_k of training; min_p and "
     "repetition_penalty have no effect on them. The accuracy comes from a greedy completion besides, and where this "
     "argument is not stated, from that one alone: TRL would draw num_generations."),
    ({"eval_strategy": "no"},
     "steps is eval_steps, or logging_steps where that is None. no evaluates after the last step alone. epoch is "
     "refused: give eval_steps. Where eval_strategy is given, eval_on_start is False unless it is given too."),
    ({"save_strategy": "steps"},
     "steps is save_steps. no is save_steps=None, which saves after the last step alone. epoch and best are refused: "
     "give save_steps, and metric_for_best_model."),
    ({"logging_strategy": "steps"},
     "steps is logging_steps. no and epoch are refused: metrics.jsonl is written in any case; give logging_steps."),
    ({"bf16": None, "fp16": False},
     "dtype: bf16=True is bfloat16 with float32 masters in the optimizer, bf16=False is float32, and None leaves dtype "
     "as it is. fp16=True is refused: use bf16=True."),
    ({"model_init_kwargs": None},
     "Its dtype is dtype, unless bf16=True asks for bfloat16, and its trust_remote_code is trust_remote_code. "
     "attn_implementation, use_cache, low_cpu_mem_usage and device_map=None do nothing: the engine chooses its "
     "attention and its device. Anything else is refused: load the model yourself and pass it."),
    ({"use_cpu": False},
     "True is device=cpu."),
    ({"generation_kwargs": None},
     "temperature, top_k, top_p, min_p, repetition_penalty and max_new_tokens are the settings of these meanings. What "
     "changes no draw does nothing, and anything else is refused by name."),
    ({"warmup_ratio": 0.0},
     "A share of all updates, as which warmup_steps takes a number below 1."),
]
# Arguments whose values change no result, and why.
IDLE = [
    ("cast_lm_head_to_fp32",
     "Logits are computed in float32 from weights in any dtype, and the optimizer holds float32 masters."),
    ("dataloader_drop_last dataloader_num_workers dataloader_pin_memory dataloader_persistent_workers "
     "dataloader_prefetch_factor dataloader_multiprocessing_context dataloader_in_order",
     "Rows are read in this process, without a DataLoader."),
    ("data_seed train_sampling_strategy length_column_name",
     "seed and shuffle_dataset alone decide the order of the prompts, as in TRL's GRPOTrainer."),
    ("vllm_mode vllm_model_impl vllm_enable_sleep_mode vllm_structured_outputs_regex vllm_server_base_url "
     "vllm_server_host vllm_server_port vllm_server_timeout vllm_group_port vllm_gpu_memory_utilization "
     "vllm_max_model_length vllm_tensor_parallel_size vllm_importance_sampling_correction "
     "vllm_importance_sampling_mode vllm_importance_sampling_clip_max vllm_importance_sampling_clip_min "
     "vllm_importance_sampling_cap",
     "It has an effect only with use_vllm, which is refused. importance_sampling_mode corrects for top_k, top_p, min_p "
     "and repetition_penalty here."),
    ("use_transformers_continuous_batching transformers_continuous_batching_config use_transformers_paged "
     "cache_implementation use_cache pad_to_multiple_of",
     "The engine batches continuously and has its own cache; nothing is padded."),
    ("local_rank ddp_find_unused_parameters ddp_bucket_cap_mb ddp_broadcast_buffers ddp_static_graph ddp_backend "
     "ds3_gather_for_generation average_tokens_across_devices",
     "torchrun tells the ranks. Gradients are summed over them once an update, and the loss counts the tokens of all."),
    ("log_unique_prompts log_multimodal",
     "Every logged step writes its prompts, completions, rewards and advantages to samples.jsonl."),
    ("log_level log_level_replica log_on_each_node logging_nan_inf_filter include_num_input_tokens_seen "
     "skip_memory_metrics logging_dir",
     "Rank 0 speaks for all. Updates that are not finite are skipped and counted; num_tokens and memory are always "
     "measured; TensorBoard's files lie in the run's folder."),
    ("per_device_eval_batch_size",
     "max_num_seqs bounds how many completions are drawn at the same time, and results do not depend on it."),
    ("prediction_loss_only eval_do_concat_batches eval_use_gather_object eval_accumulation_steps include_for_metrics "
     "batch_eval_metrics label_names label_smoothing_factor",
     "It is about logits or labels, and neither leave the loss."),
    ("torch_empty_cache_steps gradient_checkpointing_kwargs",
     "The memory of a run is planned before it starts, and its layers are recomputed without reentrance."),
    ("tf32",
     "Products of float32 stay exact; bf16=True is what makes them fast."),
    ("do_train do_eval do_predict",
     "A script's own flags, which no trainer reads."),
    ("enable_jit_checkpoint save_safetensors",
     "A run is saved on SIGINT and SIGTERM in any case, in safetensors."),
    ("disable_dropout",
     "Dropout is always off, so that the policy that trains is the one that drew."),
]
# Arguments of which only TRL's default is taken, and what to do instead.
REFUSED = [
    ({"use_vllm": False},
     "leave it out: completions come from the engine in this process, which reads the very weights that train"),
    ({"deepspeed": None, "fsdp": None, "fsdp_config": None, "parallelism_config": None, "accelerator_config": None},
     "use parallel='fsdp2' under torchrun, which shards weights, gradients and optimizer"),
    ({"optim": "adamw_torch_fused", "optim_args": None, "optim_target_modules": None},
     "the optimizer is AdamW with float32 masters: use optim='adamw_torch'"),
    ({"torch_compile": False, "torch_compile_backend": None, "torch_compile_mode": None, "liger_kernel_config": None},
     "leave it out: head, loss and rollout have kernels of their own"),
    ({"auto_find_batch_size": False},
     "lower max_tokens_per_microbatch where memory is short, which leaves the result as it is (TRL refuses it, too)"),
    ({"bf16_full_eval": False, "fp16_full_eval": False},
     "leave it out: evaluations compute in the dtype of the training"),
    ({"neftune_noise_alpha": None, "router_aux_loss_coef": None},
     "leave it out: the loss of GRPO is computed here without it"),
    ({"eval_delay": 0},
     "use eval_steps, and eval_on_start=False"),
    ({"save_only_model": False, "save_on_each_node": False},
     "leave it out: a checkpoint holds what a resumed run needs; save_total_limit bounds their number"),
    ({"load_best_model_at_end": False},
     "set metric_for_best_model alone: checkpoints record which of them is the best, and save_total_limit keeps it"),
    ({"ignore_data_skip": False, "restore_callback_states_from_checkpoint": False},
     "leave it out: a resumed run goes on with the rows and the state that its checkpoint names"),
    ({"full_determinism": False},
     "call transformers.enable_full_determinism(seed) before the trainer is made"),
    ({"remove_unused_columns": False},
     "leave it out: reward functions get every column, and ignore those they do not need by **kwargs"),
    ({"debug": ""},
     "leave it out: --debug shows tracebacks, and the setting profile times steps"),
    ({"hub_token": None},
     "log in by `hf auth login`, or set HF_TOKEN"),
    ({"hub_strategy": "every_save", "hub_always_push": False, "hub_revision": None},
     "leave it out: push_to_hub, hub_model_id and hub_private_repo say all that there is to say"),
    ({"trackio_space_id": None, "trackio_bucket_id": None, "trackio_static_space_id": None},
     "set TRACKIO_SPACE_ID or TRACKIO_BUCKET_ID, which trackio reads itself"),
    ({"log_completions_hub_repo": None},
     "upload samples.jsonl of the run's folder yourself"),
    ({"max_tool_calling_iterations": None},
     "leave it out: tools are not in fastgrpo yet"),
    ({"max_prompt_length": None},
     "leave out rows whose prompts are too long: prompts are never cut here (TRL dropped it, too)"),
]
# Values that mean the same as TRL's default.
ACCEPTED = {
    "optim": ("adamw_torch", "adamw_hf", "adamw_apex_fused"), "fsdp": ("", False, []), "fsdp_config": ({},),
    "deepspeed": ("",), "router_aux_loss_coef": (0.0,), "remove_unused_columns": (None,), "debug": ([],),
    "hub_strategy": ("end",),
}
# Arguments of earlier versions of TRL and transformers that scripts still state.
OLDER = {"logging_dir", "max_prompt_length", "save_safetensors", "warmup_ratio"}
# name -> (TRL's default, what is said of it)
MADE = {name: (default, text) for names, text in TRANSLATED for name, default in names.items()}
IDLE_WHY = {name: text for names, text in IDLE for name in names.split()}
INSTEAD = {name: (default, text) for names, text in REFUSED for name, default in names.items()}
# Names that `GRPOConfig` takes and that are no settings.
THEIRS = {*MADE, *IDLE_WHY, *INSTEAD}
BATCH = ("per_device_train_batch_size", "gradient_accumulation_steps", "steps_per_generation", "generation_batch_size")
# Counts of updates in TRL: some may be rounded up to whole steps, the others decide what is computed.
ROUNDED, EXACT = ("logging_steps", "eval_steps", "save_steps"), ("max_steps", "ref_model_sync_steps")
# Arguments of a model's loading on which nothing depends here -> the values for which this is so; None is any value.
_LOADING = {"attn_implementation": None, "use_cache": None, "low_cpu_mem_usage": None, "device_map": (None,),
            "quantization_config": (None,), "revision": (None, "main")}
# Options of generation_kwargs, with vLLM's names of them -> settings.
_DRAWS = {name: name for name in ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")}
_DRAWS |= {"max_new_tokens": "max_completion_length", "max_tokens": "max_completion_length"}
# Options that change no draw, whatever their value; and the values, beside None, with which others change none.
_NO_DRAW = {"use_cache", "cache_implementation", "disable_compile", "pad_token_id", "bos_token_id",
            "renormalize_logits"}
_NEUTRAL = {"do_sample": True, "num_beams": 1, "num_return_sequences": 1, "n": 1, "no_repeat_ngram_size": 0,
            "encoder_repetition_penalty": 1.0, "length_penalty": 1.0, "presence_penalty": 0.0, "guidance_scale": 1.0,
            "frequency_penalty": 0.0, "typical_p": 1.0, "epsilon_cutoff": 0.0, "eta_cutoff": 0.0, "min_length": 0}
_END = "only tokens end a completion here: write them into model.generation_config.eos_token_id"
# The option -> what to do instead of it; the others get a line that holds for all.
_REMEDIES = {"do_sample": "completions of a greedy group are all the same; leave it out",
             "num_return_sequences": "use num_generations", "n": "use num_generations",
             "max_length": "use max_completion_length, which does not count the prompt",
             "seed": "use the setting seed", "eos_token_id": _END, "stop_token_ids": _END, "stop_strings": _END,
             "stop": _END}
# fmt: on
Stated = Mapping[str, Any]


def translated(stated: Stated) -> dict[str, Any]:
    """Turn arguments of TRL and settings into settings alone."""
    stated = {name: value.value if isinstance(value, enum.Enum) else value for name, value in stated.items()}
    stated |= {name: VALUES[name](stated[name]) for name in VALUES.keys() & stated.keys()}
    for name, value in stated.items():
        if name not in INSTEAD:
            continue
        default, instead = INSTEAD[name]
        if not any(_same(value, other) for other in (default, *ACCEPTED.get(name, ()))):
            raise ValueError(f"{name}={value!r} is TRL's and not for fastgrpo; {instead}")
    settings = {name: value for name, value in stated.items() if name not in THEIRS}
    for names, translate in TRANSLATIONS.items():
        given = [name for name in names if name in stated]
        for name, value in (translate(stated) if given else {}).items():
            if name not in SAME and stated.get(name, value) != value:
                arguments = " and ".join(f"{argument}={stated[argument]!r}" for argument in given)
                raise ValueError(
                    f"{arguments} make{'s' * (len(given) == 1)} {name}={value!r}, but {name}={stated[name]!r} is given "
                    "too; leave one of them out"
                )
            settings[name] = value
    if any(name in stated for name in BATCH):
        settings = in_steps(settings, settings["updates_per_rollout"] * settings.get("num_iterations", 1))
    return settings


def _same(value, other):
    """Compare values. True does not equal 1 here."""
    return value == other and isinstance(value, bool) == isinstance(other, bool)


def batch(stated: Stated) -> dict[str, Any]:
    """Translate the sizes of batches: a rollout is one generation batch of TRL, over all processes."""
    sizes = {name: stated.get(name, MADE[name][0]) for name in BATCH}
    sizes = (value if value is None else convert(name, value, Count) for name, value in sizes.items())
    device, accumulated, steps, whole = sizes
    group = convert("num_generations", stated.get("num_generations", 8), Count)
    world = int(os.environ.get("WORLD_SIZE", "1"))  # as torchrun and accelerate set it
    at_once, given = device * world, f"per_device_train_batch_size={device} x WORLD_SIZE={world}"
    if steps is not None and whole is not None:
        raise ValueError(
            f"steps_per_generation={steps} and generation_batch_size={whole} are both given, and each follows from the "
            "other; leave one of them out"
        )
    if whole is not None and whole % at_once:
        raise ValueError(f"generation_batch_size={whole} must be a multiple of {given}")
    steps = whole // at_once if whole is not None else steps or accumulated
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
    if updates > completions // group:
        raise ValueError(
            f"steps_per_generation={steps} with gradient_accumulation_steps={accumulated} makes {updates} updates of a "
            f"step, but its {completions} completions are {completions // group} groups of num_generations={group}, "
            "and each update needs one; raise gradient_accumulation_steps"
        )
    return {"prompts_per_step": completions // group, "updates_per_rollout": updates}


def in_steps(settings: dict[str, Any], updates: int) -> dict[str, Any]:
    """Turn counts of updates into counts of steps, those that TRL's defaults give among them.

    A checkpoint that came with every N-th evaluation, or line of metrics.jsonl, still does after both were rounded.
    """
    defaults = {"logging_steps": 10, "save_steps": 500}
    if settings.get("sync_ref_model"):
        defaults["ref_model_sync_steps"] = 512
    counts, counted = defaults | settings, {}
    for name in (*ROUNDED, *EXACT):
        count = counts.get(name)
        if count is None or (count := convert(name, count, float)) < 1:  # -1 steps, or a share of the run
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
            raise ValueError(
                f"{name}={stated[name]!r} is not for fastgrpo; use {name}='steps' with {kind}_steps{remedy}"
            )
    made = {"save_steps": None} if stated.get("save_strategy") == "no" else {}
    if "eval_strategy" in stated:
        steps = stated.get("eval_steps") or stated.get("logging_steps", 10)
        made["eval_steps"] = steps if stated["eval_strategy"] == "steps" else None
        made["eval_on_start"] = stated.get("eval_on_start", OTHER_DEFAULTS["eval_on_start"])
    return made


def precision(stated: Stated) -> dict[str, Any]:
    """Translate bf16, fp16 and model_init_kwargs."""
    if stated.get("fp16"):
        raise ValueError("fp16=True is not for fastgrpo; use bf16=True")
    bf16, loading = stated.get("bf16"), stated.get("model_init_kwargs") or {}
    loading = dict(loading) if isinstance(loading, Mapping) else keywords("model_init_kwargs", loading)
    dtype = loading.pop("dtype", loading.pop("torch_dtype", None))
    made = {"trust_remote_code": loading.pop("trust_remote_code")} if "trust_remote_code" in loading else {}
    for name, value in loading.items():
        if name not in _LOADING or (_LOADING[name] is not None and value not in _LOADING[name]):
            raise ValueError(
                f"model_init_kwargs has {name}={value!r}, which is not for fastgrpo; load the model yourself and pass "
                "it, or leave it out"
            )
    if bf16 or (bf16 is False and dtype is None):
        return {"dtype": "bfloat16" if bf16 else "float32", **made}
    return made if dtype is None else {"dtype": str(dtype).removeprefix("torch."), **made}


def generation(stated: Stated) -> dict[str, Any]:
    """Translate generation_kwargs, a dict or the JSON text of one."""
    settings = {}
    for name, value in keywords("generation_kwargs", stated["generation_kwargs"]).items():
        if value is None or name in _NO_DRAW or (name in _NEUTRAL and _same(value, _NEUTRAL[name])):
            continue
        if name not in _DRAWS:
            drawn = "completions are drawn by temperature, top_k, top_p, min_p and repetition_penalty, in both backends"
            raise ValueError(
                f"generation_kwargs has {name}={value!r}, which is not for fastgrpo; {_REMEDIES.get(name, drawn)}"
            )
        settings[_DRAWS[name]] = value
    return settings


# The arguments that call for a translation -> the function.
TRANSLATIONS: dict[tuple[str, ...], Callable[[Stated], dict[str, Any]]] = {
    BATCH: batch,
    ("eval_strategy", "save_strategy", "logging_strategy"): strategies,
    ("num_generations_eval",): lambda stated: {"eval_num_generations": stated["num_generations_eval"] or 0},
    ("bf16", "fp16", "model_init_kwargs"): precision,
    ("generation_kwargs",): generation,
    ("use_cpu",): lambda stated: {"device": "cpu"} if stated["use_cpu"] else {},
    ("warmup_ratio",): lambda stated: {} if stated.get("warmup_steps") else {"warmup_steps": stated["warmup_ratio"]},
}
# Values of settings of the same name that TRL writes otherwise.
VALUES: dict[str, Callable[[Any], Any]] = {
    "scale_rewards": lambda value: {True: "group", False: "none"}[value] if isinstance(value, bool) else value,
    "report_to": lambda value: None if value == [] else value,
    "disable_tqdm": lambda value: False if value is None else value,
}

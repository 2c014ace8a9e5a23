"""Every argument of `trl.GRPOConfig` (TRL 1.16, with those of transformers' TrainingArguments), and what it is here.

An argument is one of four things: a setting of the same name and meaning (`SAME`), a translation into other settings
(`TRANSLATED`, whose functions are in trl_translations.py), nothing here because results do not depend on it (`IDLE`),
or refused with a line that says what to do instead (`REFUSED`). A value that equals TRL's default is never refused.
"""

from typing import Any

COUNTED = "Counts updates where one of TRL's batch arguments is given, as in TRL, and steps otherwise."
# Settings of the same name and meaning -> what else there is to know of them; mostly nothing.
SAME = {
    "output_dir": "None makes a new folder in runs/. A folder with a run in it is refused: see overwrite_output_dir.",
    "num_train_epochs": "",
    "max_steps": COUNTED + " It must then be whole steps.",
    "learning_rate": "",
    "lr_scheduler_type": "",
    "lr_scheduler_kwargs": "",
    "warmup_steps": "Counts updates, as in TRL.",
    "weight_decay": "",
    "adam_beta1": "",
    "adam_beta2": "",
    "adam_epsilon": "",
    "max_grad_norm": "",
    "gradient_checkpointing": "auto, the default, decides by the memory that there is.",
    "use_liger_kernel": "None, the default, uses it on a GPU where it is installed. The head is fused in any case.",
    "logging_steps": COUNTED + " It is rounded up to whole steps.",
    "logging_first_step": "",
    "disable_tqdm": "None is False.",
    "report_to": "none, tensorboard, wandb or trackio.",
    "run_name": "",
    "project": "",
    "log_completions": "Of the completions that logging_samples keeps.",
    "num_completions_to_print": "The first ones, where TRL draws some.",
    "eval_steps": COUNTED + " It is rounded up to whole steps.",
    "eval_on_start": "True measures the accuracy that a run begins with; eval_strategy makes it False.",
    "save_steps": COUNTED
    + " It is rounded up to whole steps, or follows eval_steps where metric_for_best_model needs an evaluation.",
    "save_total_limit": "",
    "push_to_hub": "",
    "hub_private_repo": "",
    "hub_model_id": "",
    "metric_for_best_model": "A metric of docs/runs.md, such as eval/accuracy or eval_reward. reward is that of "
    "training: TRL would read eval_reward, and EarlyStoppingCallback, which does, is refused with it.",
    "greater_is_better": "",
    "seed": "",
    "ddp_timeout": "",
    "resume_from_checkpoint": "",
    "trust_remote_code": "",
    "num_generations": "",
    "max_completion_length": "",
    "shuffle_dataset": "",
    "temperature": "",
    "top_p": "",
    "top_k": "",
    "min_p": "",
    "repetition_penalty": "",
    "chat_template_kwargs": "",
    "beta": "",
    "num_iterations": "",
    "epsilon": "",
    "delta": "",
    "epsilon_high": "cispo needs at least 1.",
    "sapo_temperature_neg": "",
    "sapo_temperature_pos": "",
    "vespo_k_pos": "",
    "vespo_lambda_pos": "",
    "vespo_k_neg": "",
    "vespo_lambda_neg": "",
    "importance_sampling_level": "luspo needs sequence.",
    "reward_weights": "None is a weight of 1 for each function.",
    "multi_objective_aggregation": "",
    "scale_rewards": "True is group and False is none.",
    "loss_type": "",
    "mask_truncated_completions": "",
    "sync_ref_model": "",
    "ref_model_mixup_alpha": "",
    "ref_model_sync_steps": COUNTED + " A number that is stated must then be whole steps.",
    "entropy_coef": "",
    "use_adaptive_entropy": "",
    "entropy_coef_min": "",
    "entropy_coef_max": "",
    "entropy_coef_delta": "",
    "entropy_target": "",
    "top_entropy_quantile": "Of the tokens of an update; TRL takes them of a micro-batch of all processes.",
    "off_policy_mask_threshold": "",
    "use_bias_correction_kl": "",
}
# TRL's defaults of those whose own default differs.
OTHER_DEFAULTS = {
    "gradient_checkpointing": True,
    "use_liger_kernel": False,
    "disable_tqdm": None,
    "report_to": "none",
    "eval_on_start": False,
    "reward_weights": None,
}
# What is made of an argument that other settings stand for -> the arguments, with TRL's defaults.
TRANSLATED = {
    "A step draws per_device_train_batch_size x WORLD_SIZE x steps_per_generation completions, which is "
    "generation_batch_size and here prompts_per_step x num_generations. steps_per_generation / "
    "gradient_accumulation_steps, a whole number, is updates_per_rollout. max_tokens_per_microbatch alone decides how "
    "many tokens go through the model at once; the result does not depend on it.": {
        "per_device_train_batch_size": 8,
        "gradient_accumulation_steps": 1,
        "steps_per_generation": None,
        "generation_batch_size": None,
    },
    "eval_num_generations. The completions are drawn at the temperature, top_p and top_k of training, also those of "
    "generation_kwargs, unless eval_temperature, eval_top_p or eval_top_k say otherwise; min_p and repetition_penalty "
    "have no effect on them. The accuracy comes from a greedy completion besides, and where this argument is not "
    "stated, from that one alone: TRL would draw num_generations, which is that many times the cost.": {
        "num_generations_eval": None
    },
    "steps is eval_steps, or logging_steps where that is None. no evaluates after the last step alone. epoch is "
    "refused: give eval_steps. Where eval_strategy is given, eval_on_start is False unless it is given too.": {
        "eval_strategy": "no"
    },
    "steps is save_steps. no is save_steps=None, which saves after the last step alone. epoch and best are refused: "
    "give save_steps, and metric_for_best_model.": {"save_strategy": "steps"},
    "steps is logging_steps. no and epoch are refused: metrics.jsonl is written in any case; give logging_steps.": {
        "logging_strategy": "steps"
    },
    "dtype: bf16=True is bfloat16 with float32 masters in the optimizer, bf16=False is float32, and None leaves dtype "
    "as it is. fp16=True is refused: use bf16=True.": {"bf16": None, "fp16": False},
    "Its dtype is dtype, unless bf16=True asks for bfloat16, and its trust_remote_code is trust_remote_code. "
    "attn_implementation, use_cache, low_cpu_mem_usage and device_map=None do nothing: the engine chooses its "
    "attention and its device. Anything else is refused: load the model yourself and pass it.": {
        "model_init_kwargs": None
    },
    "True is device=cpu.": {"use_cpu": False},
    "temperature, top_k, top_p, min_p, repetition_penalty and max_new_tokens are the settings of these meanings. What "
    "changes no draw does nothing, and anything else is refused by name.": {"generation_kwargs": None},
    "A share of all updates, as which warmup_steps takes a number below 1.": {"warmup_ratio": 0.0},
}
# Why an argument does nothing here, whatever its value is -> the arguments, with TRL's defaults.
IDLE = {
    "Logits are computed in float32 from weights in any dtype, and the optimizer holds float32 masters.": {
        "cast_lm_head_to_fp32": False
    },
    "Rows are read in this process, without a DataLoader.": {
        "dataloader_drop_last": False,
        "dataloader_num_workers": 0,
        "dataloader_pin_memory": True,
        "dataloader_persistent_workers": False,
        "dataloader_prefetch_factor": None,
        "dataloader_multiprocessing_context": None,
        "dataloader_in_order": True,
    },
    "seed and shuffle_dataset alone decide the order of the prompts, as in TRL's GRPOTrainer.": {
        "data_seed": None,
        "train_sampling_strategy": "random",
        "length_column_name": "length",
    },
    "It has an effect only with use_vllm, which is refused. importance_sampling_mode corrects for top_k, top_p, min_p "
    "and repetition_penalty here.": {
        "vllm_mode": "colocate",
        "vllm_model_impl": "vllm",
        "vllm_enable_sleep_mode": False,
        "vllm_structured_outputs_regex": None,
        "vllm_server_base_url": None,
        "vllm_server_host": "0.0.0.0",
        "vllm_server_port": 8000,
        "vllm_server_timeout": 240.0,
        "vllm_group_port": 51216,
        "vllm_gpu_memory_utilization": 0.3,
        "vllm_max_model_length": None,
        "vllm_tensor_parallel_size": 1,
        "vllm_importance_sampling_correction": True,
        "vllm_importance_sampling_mode": "sequence_mask",
        "vllm_importance_sampling_clip_max": 3.0,
        "vllm_importance_sampling_clip_min": None,
        "vllm_importance_sampling_cap": None,
    },
    "The engine batches continuously and has its own cache; nothing is padded.": {
        "use_transformers_continuous_batching": False,
        "transformers_continuous_batching_config": None,
        "use_transformers_paged": False,
        "cache_implementation": None,
        "use_cache": False,
        "pad_to_multiple_of": "auto",
    },
    "torchrun tells the ranks. Gradients are summed over them once an update, and the loss counts the tokens of all.": {
        "local_rank": -1,
        "ddp_find_unused_parameters": None,
        "ddp_bucket_cap_mb": None,
        "ddp_broadcast_buffers": None,
        "ddp_static_graph": None,
        "ddp_backend": None,
        "ds3_gather_for_generation": True,
        "average_tokens_across_devices": True,
    },
    "Every logged step writes its prompts, completions, rewards and advantages to samples.jsonl.": {
        "log_unique_prompts": False,
        "log_multimodal": True,
    },
    "Rank 0 speaks for all. Updates that are not finite are skipped and counted; num_tokens and memory are always "
    "measured; TensorBoard's files lie in the run's folder.": {
        "log_level": "passive",
        "log_level_replica": "warning",
        "log_on_each_node": True,
        "logging_nan_inf_filter": True,
        "include_num_input_tokens_seen": "no",
        "skip_memory_metrics": True,
        "logging_dir": None,
    },
    "max_num_seqs bounds how many completions are drawn at the same time, and results do not depend on it.": {
        "per_device_eval_batch_size": 8,
    },
    "It is about logits or labels, and neither leave the loss.": {
        "prediction_loss_only": False,
        "eval_do_concat_batches": True,
        "eval_use_gather_object": False,
        "eval_accumulation_steps": None,
        "include_for_metrics": [],
        "batch_eval_metrics": False,
        "label_names": None,
        "label_smoothing_factor": 0.0,
    },
    "The memory of a run is planned before it starts, and its layers are recomputed without reentrance.": {
        "torch_empty_cache_steps": None,
        "gradient_checkpointing_kwargs": None,
    },
    "Products of float32 stay exact; bf16=True is what makes them fast.": {"tf32": None},
    "A script's own flags, which no trainer reads.": {"do_train": False, "do_eval": False, "do_predict": False},
    "A run is saved on SIGINT and SIGTERM in any case, in safetensors.": {
        "enable_jit_checkpoint": False,
        "save_safetensors": True,
    },
    "Dropout is always off, so that the policy that trains is the one that drew.": {"disable_dropout": False},
}
# What to do instead of giving an argument -> the arguments, with TRL's defaults.
REFUSED = {
    "leave it out: completions come from the engine in this process, which reads the very weights that train": {
        "use_vllm": False
    },
    "use parallel='fsdp2' under torchrun, which shards weights, gradients and optimizer": {
        "deepspeed": None,
        "fsdp": None,
        "fsdp_config": None,
        "parallelism_config": None,
        "accelerator_config": None,
    },
    "the optimizer is AdamW with float32 masters: use optim='adamw_torch'": {
        "optim": "adamw_torch_fused",
        "optim_args": None,
        "optim_target_modules": None,
    },
    "leave it out: head, loss and rollout have kernels of their own": {
        "torch_compile": False,
        "torch_compile_backend": None,
        "torch_compile_mode": None,
        "liger_kernel_config": None,
    },
    "lower max_tokens_per_microbatch where memory is short, which leaves the result as it is (TRL refuses it, too)": {
        "auto_find_batch_size": False
    },
    "leave it out: evaluations compute in the dtype of the training": {
        "bf16_full_eval": False,
        "fp16_full_eval": False,
    },
    "leave it out: the loss of GRPO is computed here without it": {
        "neftune_noise_alpha": None,
        "router_aux_loss_coef": None,
    },
    "use eval_steps, and eval_on_start=False": {"eval_delay": 0},
    "leave it out: a checkpoint holds what a resumed run needs; save_total_limit bounds their number": {
        "save_only_model": False,
        "save_on_each_node": False,
    },
    "set metric_for_best_model alone: checkpoints record which of them is the best, and save_total_limit keeps it": {
        "load_best_model_at_end": False
    },
    "leave it out: a resumed run goes on with the rows and the state that its checkpoint names": {
        "ignore_data_skip": False,
        "restore_callback_states_from_checkpoint": False,
    },
    "call transformers.enable_full_determinism(seed) before the trainer is made": {"full_determinism": False},
    "leave it out: reward functions get every column, and ignore those they do not need by **kwargs": {
        "remove_unused_columns": False
    },
    "leave it out: --debug shows tracebacks, and the setting profile times steps": {"debug": ""},
    "log in by `hf auth login`, or set HF_TOKEN": {"hub_token": None},
    "leave it out: push_to_hub, hub_model_id and hub_private_repo say all that there is to say": {
        "hub_strategy": "every_save",
        "hub_always_push": False,
        "hub_revision": None,
    },
    "set TRACKIO_SPACE_ID or TRACKIO_BUCKET_ID, which trackio reads itself": {
        "trackio_space_id": None,
        "trackio_bucket_id": None,
        "trackio_static_space_id": None,
    },
    "upload samples.jsonl of the run's folder yourself": {"log_completions_hub_repo": None},
    "leave it out: tools are not in fastgrpo yet": {"max_tool_calling_iterations": None},
    "leave out rows whose prompts are too long: prompts are never cut here (TRL dropped it, too)": {
        "max_prompt_length": None
    },
}
# Values that mean the same as TRL's default, or that what there is here means.
ACCEPTED = {
    "optim": ("adamw_torch", "adamw_hf", "adamw_apex_fused"),
    "fsdp": ("", False, []),
    "fsdp_config": ({},),
    "deepspeed": ("",),
    "router_aux_loss_coef": (0.0,),
    "remove_unused_columns": (None,),
    "debug": ([],),
    "hub_strategy": ("end",),
}
# Arguments of earlier versions of TRL and transformers that scripts still state.
OLDER = {"logging_dir", "max_prompt_length", "save_safetensors", "warmup_ratio"}


def _flat(groups: dict[str, dict[str, Any]]) -> dict[str, tuple[Any, str]]:
    return {name: (default, text) for text, names in groups.items() for name, default in names.items()}


# name -> (TRL's default, what the group says)
TRANSLATIONS_TOLD, IDLE_WHY, INSTEAD = _flat(TRANSLATED), _flat(IDLE), _flat(REFUSED)
# Names that `GRPOConfig` takes and that are no settings.
THEIRS = {**TRANSLATIONS_TOLD, **IDLE_WHY, **INSTEAD}

"""Sets up a trainer from its arguments: adapters, held-out rows, and the policy, after planning its memory."""

import ctypes
import dataclasses
import heapq
import math
import os
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from huggingface_hub import get_token
from huggingface_hub.utils import HFValidationError, validate_repo_id
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from fastgrpo.config.fields import did_you_mean
from fastgrpo.config.settings import TrainingConfig
from fastgrpo.data.prompts import to_examples, to_prompt
from fastgrpo.data.rows import Rows, as_rows
from fastgrpo.evaluation.heldout import Evaluation
from fastgrpo.policy.device import check_packages, choose_device
from fastgrpo.policy.load import load_tokenizer, policy_and_tokenizer, refuse_changed
from fastgrpo.policy.lora import (
    base_weights,
    is_wrapper,
    lora_settings,
    refuse_adapters,
    taken_over,
    unwrapped,
    wrap_lora,
)
from fastgrpo.policy.model import Policy, decoder_layers, head_dim
from fastgrpo.policy.shard import check_torch, shard
from fastgrpo.policy.varlen import use_attention
from fastgrpo.ranks import Ranks
from fastgrpo.rewards.call import Rewards
from fastgrpo.run.profiling import needed_steps
from fastgrpo.run.resume import digest_of_weights, refuse_differences
from fastgrpo.trainer.memory import MemoryPlan, choose_parallel, plan_run


def refuse_given(optimizers: Any, quantization_config: Any) -> None:
    """Raise for arguments of TRL's trainer that are not supported."""
    if optimizers is not None and any(given is not None for given in optimizers):
        raise ValueError(
            "optimizers cannot be replaced, because checkpoints hold this optimizer's fp32 master weights; set "
            "learning_rate, weight_decay, adam_beta1, adam_beta2, adam_epsilon, lr_scheduler_type and warmup_steps "
            "instead"
        )
    if quantization_config is not None:
        raise ValueError(
            "quantization_config is not supported; load the model without quantization, and set use_peft and "
            "load_in_4bit"
        )


def checked(args: Any, tokenizer: Any, kind: type[TrainingConfig]) -> TrainingConfig:
    """Return the settings. Raise if they or the tokenizer have another type, or if a package is missing."""
    args = kind() if args is None else args
    if not isinstance(args, kind):
        remedy = f"{kind.__name__}(**args)" if isinstance(args, dict) else f"a fastgrpo.{kind.__name__}"
        raise ValueError(f"args is of type {type(args).__name__}; pass {remedy}")
    lacking = [name for name in ("vocab_size", "eos_token_id", "decode") if not hasattr(tokenizer, name)]
    if tokenizer is not None and lacking:
        remedy = "its .tokenizer" if hasattr(tokenizer, "tokenizer") else "a tokenizer of transformers"
        raise ValueError(f"processing_class is of type {type(tokenizer).__name__}; pass {remedy}")
    check_packages(args)
    if args.push_to_hub and os.environ.get("RANK", "0") == "0" and get_token() is None:
        raise ValueError("push_to_hub needs a login: run `hf auth login`, or set HF_TOKEN")
    if args.hub_model_id is not None:
        try:
            validate_repo_id(args.hub_model_id)
        except HFValidationError as error:
            raise ValueError(f"hub_model_id: {error}") from None
    return args


def count_steps(args: TrainingConfig, rows: int) -> int:
    """Return the number of steps of a run. Raise a ValueError if they are too few to profile."""
    steps = args.max_steps
    if steps < 0:  # rounded, because 1.1 * 100 is a little more than 110
        steps = math.ceil(round(args.num_train_epochs * rows / args.rows_per_step, 6))
    needed = needed_steps(args.profile)
    if args.profile and needed > steps:
        raise ValueError(
            f"profile={args.profile} needs at least {needed} steps (warm-up, timed, traced), and this run has {steps}; "
            "raise max_steps or lower profile"
        )
    return steps


def with_adapters(model: Any, peft_config: Any, args: TrainingConfig) -> tuple[Any, TrainingConfig, Any]:
    """Return the bare model, the settings of its adapters, and peft's wrapper or None."""
    wrapped = is_wrapper(model)
    if wrapped and peft_config is not None:
        raise ValueError(
            "model is a PeftModel and peft_config is set; save model.merge_and_unload() and the tokenizer to a folder, "
            "and pass the folder with peft_config"
        )
    if not wrapped and peft_config is None:
        if args.load_in_4bit and not args.use_peft:
            raise ValueError("load_in_4bit freezes the weights, and only adapters can be trained; pass --use_peft True")
        return model, args, None
    if args.use_peft and not wrapped:
        raise ValueError("peft_config and use_peft both add adapters; pass only one of them")
    if not wrapped:
        return model, dataclasses.replace(args, **lora_settings(peft_config)), None
    inner, settings = unwrapped(model, allow_trained=getattr(args, "beta", 0.0) == 0)
    return inner, dataclasses.replace(args, **settings), model


def refuse_images(rows: Iterable[Mapping]) -> None:
    """Raise if the first row has images, which TRL supports for vision-language models."""
    for row in rows:
        column = next((name for name in ("image", "images") if isinstance(row, Mapping) and name in row), None)
        if column:
            raise ValueError(
                f"the rows have the column {column!r}, but vision-language models are not supported; drop the column, "
                "or rename it if it holds no images"
            )
        return


def advice(args: TrainingConfig) -> list[str]:
    """Return warnings about combinations of loss settings, as TRL does."""
    loss, cap, told = args.loss_type, args.objective.clip_high, []
    if args.importance_sampling_level == "sequence" and loss in ("bnpo", "dr_grpo", "dapo", "cispo"):
        told.append(
            f"importance_sampling_level='sequence' with the '{loss}' loss sums per-token contributions, which "
            "effectively weights each sequence by its completion length; GSPO uses loss_type='grpo'"
        )
    if loss == "luspo" and args.importance_sampling_level == "token":
        told.append("the paper of luspo has ratios per sequence; set importance_sampling_level='sequence' for them")
    if loss == "cispo" and cap < 1:
        told.append(
            f"cispo multiplies gradients by the ratio, at most epsilon_high={cap}, so that they are small; its paper "
            "uses epsilon_high=5.0"
        )
    return told


def read_held_out(data: Any, count: int | None) -> dict[str, Rows]:
    """Return held-out rows by the name of their data set, which is empty if there is only one."""
    if data is None:
        return {}
    named = data if isinstance(data, Mapping) else {"": data}
    read = {}
    for name, rows in named.items():
        if not isinstance(name, str) or "/" in name or (isinstance(data, Mapping) and not name):
            raise ValueError(f"eval_dataset: {name!r} cannot be the name of a data set; use a string without /")
        where = f"eval_dataset[{name!r}]" if name else "eval_dataset"
        read[name] = as_rows(rows, where, count, "max_eval_samples").head(count)
    return read


def prefixes(names: Iterable[str], prefix: str) -> list[str]:
    """Return the prefix of the metrics of each data set, as transformers does."""
    return [f"{prefix}_{name}" if name else prefix for name in names]


def renamed(result: Evaluation, prefix: str) -> Evaluation:
    """Replace the prefix eval/ by another one."""
    if prefix == "eval":
        return result
    values, intervals = (
        {f"{prefix}/{name.removeprefix('eval/')}": value for name, value in of.items()}
        for of in (result.values, result.intervals)
    )
    return dataclasses.replace(result, values=values, intervals=intervals)


if TYPE_CHECKING:  # an extra
    from peft import PeftModel


@dataclass(frozen=True)
class Made:
    """The policy of a run, with its tokenizer and plan."""

    policy: Policy
    tokenizer: PreTrainedTokenizerBase
    plan: MemoryPlan | None  # None if the run's memory cannot be planned
    digest: str | None  # of the weights without adapters, if a resumed run needs the same weights
    parallel: str  # ddp or fsdp2
    why: str  # the reason for `parallel`, for the log
    wrapper: "PeftModel | None"  # None without adapters


def longest_prompt(
    rows: Rows, tokenizer: PreTrainedTokenizerBase, template_kwargs: Mapping[str, Any], supervised: bool = False
) -> int:
    """Estimate the tokens of the longest prompt, without tools, from the eight rows with the most characters.

    For supervised training, it is the longest example with its completion.
    """

    def text(row):
        return str(row if supervised else row.get("prompt"))

    def tokens(row):
        if supervised:
            return max(map(len, to_examples(row, tokenizer, template_kwargs=template_kwargs)))
        return len(to_prompt(row, tokenizer, template_kwargs).ids)

    try:
        return max(map(tokens, heapq.nlargest(8, rows, key=lambda row: len(text(row)))), default=0)
    except (ValueError, AttributeError):  # an invalid row, which the check of all rows reports
        return 0


def make_policy(
    model: str | Path | PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase | None,
    args: TrainingConfig,
    ranks: Ranks,
    wrapper: "PeftModel | None" = None,
    rewards: Rewards | None = None,
    waits: bool = False,
    rows: Rows | None = None,
) -> Made:
    """Create the policy of a run: plan its memory, load it, add adapters, and shard it with fsdp2.

    All ranks begin with the same weights. On a CPU, freed memory is kept for the next step. `waits` says that
    completions wait for tools, and the plan reads the longest prompts of `rows`.
    """
    if args.parallel in ("fsdp2", "fsdp2_keep") and ranks.group is None:
        raise ValueError(
            f"parallel={args.parallel} needs several processes, and there is only one; start the run with torchrun "
            "--nproc_per_node N -m fastgrpo.train ..., or omit parallel. One process can use fsdp2_offload"
        )
    if len({*getattr(model, "hf_device_map", {}).values()}) > 1:
        raise ValueError(
            "device_map has spread the model over several devices, but a process trains on one; load it without "
            "device_map, and use torchrun for several GPUs"
        )
    tokens, path = 0, getattr(model, "name_or_path", model)
    known = tokenizer is not None or (isinstance(path, (str, Path)) and str(path))  # a model in memory has no path
    if rows is not None and known and choose_device(args.device).type == "cuda":
        source = tokenizer or load_tokenizer(path, args.trust_remote_code)
        tokens = longest_prompt(rows, source, args.template_kwargs, args.command == "sft")
    plan = plan_run(args, model, ranks=ranks, rewards=rewards, waits=waits, prompt_tokens=tokens)
    planned = plan and (plan.parallel, plan.most_tokens, plan.recomputed, plan.released)
    refuse_differences(ranks, memory_plans=planned)  # the packages of machines may differ
    if plan:
        plan.check()
    parallel, why = (plan.parallel, plan.chosen) if plan else choose_parallel(args, None)
    if parallel == "fsdp2":
        check_torch()
    checkpointing = plan.checkpointing if plan else args.gradient_checkpointing is not False
    chosen = dataclasses.replace(args, gradient_checkpointing=checkpointing)  # auto is resolved
    policy, tokenizer = policy_and_tokenizer(model, tokenizer, chosen)
    if (end := getattr(args, "eos_token", None)) is not None:  # of supervised training
        if end not in (known := tokenizer.get_vocab()):
            raise ValueError(f"eos_token: the tokenizer has no token {end!r}{did_you_mean(end, known)}")
        tokenizer.eos_token = end
    if not policy.own_attention:
        use_attention(args.attention, policy.device, policy.dtype, head_dim(policy.shape))
    elif args.attention != "auto":
        raise ValueError(f"attention={args.attention!r} has no effect on a model's own attention; use attention='auto'")
    if plan:
        keep_activations(policy.module, plan.recomputed)
    if policy.device.type == "cpu":
        keep_freed_memory()
    if isinstance(model, PreTrainedModel):
        ranks.share([*policy.parameters(), *policy.module.buffers()], "the weights of the model")
    # A resumed run takes the frozen reference, or the weights below the adapters, from the given model.
    needed = args.keeps_first_weights or ranks.size > 1
    digest = digest_of_weights(base_weights(policy.module)) if needed else None
    refuse_differences(ranks, weights_of_the_model=digest)
    if args.use_peft and isinstance(model, PreTrainedModel):
        refuse_changed(model)
    if wrapper is None:
        refuse_adapters(policy.module)
    if wrapper is not None:
        taken_over(wrapper)
    elif args.use_peft:
        wrapper = wrap_lora(
            policy.module,
            r=args.lora_r,
            alpha=args.lora_alpha,
            target_modules=args.lora_target_modules,
            seed=args.seed,
        )
    if parallel == "fsdp2":
        policy = shard(
            policy,
            ranks,
            dtype=policy.dtype,
            reshard_after_forward=args.parallel != "fsdp2_keep",
            cpu_offload=args.parallel == "fsdp2_offload",
        )
    policy.offloads = args.activation_offloading
    return Made(policy, tokenizer, plan, digest if args.keeps_first_weights else None, parallel, why, wrapper)


def keep_activations(model: PreTrainedModel, recomputed: int) -> None:
    """Turn gradient checkpointing off for all layers except the first `recomputed`."""
    for layer in decoder_layers(model)[recomputed:]:
        layer.gradient_checkpointing = False


M_TRIM_THRESHOLD, M_MMAP_MAX = -1, -4  # from <malloc.h>
VARIABLES = "MALLOC_MMAP_MAX_", "MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_"  # environment, see `man mallopt`


def keep_freed_memory() -> bool:
    """Let glibc's malloc keep freed memory, unless the environment configures malloc. Return whether it was set.

    A step on a CPU allocates its activations and frees them in its backward pass. By default glibc returns memory of
    this size to the kernel, which then has to zero and map the same pages in every step.
    """
    chosen = any(name in os.environ for name in VARIABLES) or "glibc.malloc." in os.environ.get("GLIBC_TUNABLES", "")
    if chosen or not sys.platform.startswith("linux"):
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    # Allocate large blocks on the heap instead of by mmap, and do not shrink the heap.
    return mallopt is not None and bool(mallopt(M_MMAP_MAX, 0) and mallopt(M_TRIM_THRESHOLD, -1))

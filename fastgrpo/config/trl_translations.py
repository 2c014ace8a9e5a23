"""What arguments of TRL become here, where they are no settings of the same name.

A translation is a function that takes all arguments that were stated and returns settings; `TRANSLATIONS` says which
arguments call for it.
"""

import math
import os
from collections.abc import Callable, Mapping
from typing import Any

from fastgrpo.config.fields import Whole, convert, keywords
from fastgrpo.config.generation_kwargs import generation
from fastgrpo.config.trl_names import OTHER_DEFAULTS, THEIRS

Stated = Mapping[str, Any]
BATCH = ("per_device_train_batch_size", "gradient_accumulation_steps", "steps_per_generation", "generation_batch_size")
# TRL counts updates in these: some may be rounded up to whole steps, the others decide what is computed.
ROUNDED, EXACT = ("logging_steps", "eval_steps", "save_steps"), ("max_steps", "ref_model_sync_steps")
# What a model is loaded with in TRL and nothing depends on here -> the values for which this is so; None is any value.
_LOADING = {
    "attn_implementation": None,
    "use_cache": None,
    "low_cpu_mem_usage": None,
    "device_map": (None,),
    "quantization_config": (None,),
    "revision": (None, "main"),
}


def batch(stated: Stated) -> dict[str, Any]:
    """Translate the sizes of batches: a rollout is one generation batch of TRL, over all processes."""
    sizes = {name: stated.get(name, THEIRS[name][0]) for name in BATCH}
    sizes = {name: value if value is None else convert(name, value, Whole) for name, value in sizes.items()}
    for name, value in sizes.items():
        if value is not None and value < 1:
            raise ValueError(f"{name} must be at least 1, got {value}")
    device, accumulated, steps, whole = sizes.values()
    group = convert("num_generations", stated.get("num_generations", 8), Whole)
    at_once = device * world_size()
    given = f"per_device_train_batch_size={device} x WORLD_SIZE={world_size()}"
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
    if group < 1 or completions % group:
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


def world_size() -> int:
    """Return how many processes share the run, as torchrun and accelerate tell it."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def in_steps(settings: dict[str, Any], updates: int) -> dict[str, Any]:
    """Turn counts of updates into counts of steps, those that TRL's defaults give among them.

    A checkpoint that came with every N-th evaluation, or line of metrics.jsonl, still does after both were rounded.
    """
    defaults = {"logging_steps": 10, "save_steps": 500}
    if settings.get("sync_ref_model"):
        defaults["ref_model_sync_steps"] = 512
    stated, counts, counted = settings, defaults | settings, {}
    for name in (*ROUNDED, *EXACT):
        count = counts.get(name)
        if count is None or (count := convert(name, count, float)) < 1:  # -1 steps, or a share of the run
            continue
        if name in EXACT and name in stated and count % updates:
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


def evaluation(stated: Stated) -> dict[str, Any]:
    """Translate eval_strategy."""
    strategy, steps = stated["eval_strategy"], None
    if strategy == "steps":
        steps = stated.get("eval_steps") or stated.get("logging_steps", 10)
    elif strategy != "no":
        _refuse_strategy("eval_strategy", strategy, "use eval_strategy='steps' with eval_steps")
    return {"eval_steps": steps, "eval_on_start": stated.get("eval_on_start", OTHER_DEFAULTS["eval_on_start"])}


def draws(stated: Stated) -> dict[str, Any]:
    """Translate num_generations_eval. TRL draws an evaluation's completions as those of training."""
    count = stated["num_generations_eval"]
    if count is None:
        return {}
    like = {**stated, **(generation(stated) if stated.get("generation_kwargs") else {})}
    like = {name: like[name] for name in ("temperature", "top_p", "top_k") if name in like}
    like = {f"eval_{name}": value for name, value in like.items() if f"eval_{name}" not in stated}
    return {"eval_num_generations": count, **like}


def saving(stated: Stated) -> dict[str, Any]:
    """Translate save_strategy."""
    strategy = stated["save_strategy"]
    if strategy not in ("steps", "no"):
        remedy = "use save_strategy='steps' with save_steps" + "; metric_for_best_model marks the best" * (
            strategy == "best"
        )
        _refuse_strategy("save_strategy", strategy, remedy)
    return {"save_steps": None} if strategy == "no" else {}


def logging(stated: Stated) -> dict[str, Any]:
    """Check logging_strategy."""
    if stated["logging_strategy"] != "steps":
        remedy = "metrics.jsonl is written in any case: use logging_strategy='steps' with logging_steps"
        _refuse_strategy("logging_strategy", stated["logging_strategy"], remedy)
    return {}


def _refuse_strategy(name, value, remedy):
    raise ValueError(f"{name}={value!r} is not for fastgrpo; {remedy}")


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
    if bf16:
        return {"dtype": "bfloat16", **made}
    if dtype is not None:
        return {"dtype": str(dtype).removeprefix("torch."), **made}
    return {**made, **({} if bf16 is None else {"dtype": "float32"})}


# The arguments that call for a translation -> the function.
TRANSLATIONS: dict[tuple[str, ...], Callable[[Stated], dict[str, Any]]] = {
    BATCH: batch,
    ("eval_strategy",): evaluation,
    ("num_generations_eval",): draws,
    ("save_strategy",): saving,
    ("logging_strategy",): logging,
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

"""What a trainer is given besides its data: TRL's further arguments, each served or refused by name with a remedy."""

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any

from fastgrpo.config.settings import TrainingConfig
from fastgrpo.policy.lora import is_wrapper, lora_settings, unwrapped

NOT_YET = {
    "tools": "let the model answer in one turn",
    "rollout_func": "let the engine draw the completions",
    "environment_factory": "give the prompts as train_dataset and judge the completions by reward_funcs",
    "quantization_config": "load the model without quantization, with peft_config for little memory",
}


def refuse_given(optimizers: Any, **given: Any) -> None:
    """Refuse arguments of TRL's trainer that do not exist here."""
    if optimizers is not None and any(given is not None for given in optimizers):
        raise ValueError(
            "optimizers: the optimizer keeps fp32 masters and its state is part of every checkpoint, so it cannot be "
            "another one; set learning_rate, weight_decay, adam_beta1, adam_beta2, adam_epsilon, lr_scheduler_type and "
            "warmup_steps"
        )
    for name, value in given.items():
        if value is not None and value != []:
            raise ValueError(f"{name} is not in fastgrpo yet: leave it out, and {NOT_YET[name]}")


def with_adapters(model: Any, peft_config: Any, args: TrainingConfig) -> tuple[Any, TrainingConfig, Any]:
    """Read which adapters the trainer was given."""
    wrapped = is_wrapper(model)
    if wrapped and peft_config is not None:
        raise ValueError("model is a PeftModel, and there is a peft_config too: pass model.merge_and_unload() with it")
    if not wrapped and peft_config is None:
        return model, args, None
    if args.use_peft and not wrapped:
        raise ValueError("peft_config and the setting use_peft both ask for adapters; leave one of them out")
    if not wrapped:
        return model, dataclasses.replace(args, **lora_settings(peft_config)), None
    inner, settings = unwrapped(model, moved=getattr(args, "beta", 0.0) == 0)
    return inner, dataclasses.replace(args, **settings), model


def refuse_images(rows: Iterable[Mapping]) -> None:
    """Refuse rows with images, which TRL would show to a model for text and images."""
    for row in rows:
        column = next((name for name in ("image", "images") if isinstance(row, Mapping) and name in row), None)
        if column:
            raise ValueError(
                f"the rows have the column {column!r}: models for images are not trained here; drop the column, or "
                "rename it if it holds no images"
            )
        return


def advice(args: TrainingConfig) -> list[str]:
    """Tell which settings of the loss do not go together well, as TRL warns."""
    loss = args.loss_type
    if args.importance_sampling_level == "sequence" and loss in ("bnpo", "dr_grpo", "dapo", "cispo"):
        return [
            f"warning: importance_sampling_level=sequence with loss_type={loss} adds up over tokens, so that long "
            "completions weigh more; loss_type=grpo is GSPO's"
        ]
    return []

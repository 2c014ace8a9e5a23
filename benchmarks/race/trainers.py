"""The trainers of the race, each in a process of its own (benchmarks/contestants.py).

An entry has two calls: the variant's name trains one step and returns the seconds of its rollout; "save" writes the
weights to a file, for the measurement of the accuracy. All trainers start from the same model and draw in fp32. A
process imports only its own trainer, and fastgrpo's tasks and rewards, because the peak memory includes packages.
"""

import json
import time
from collections import defaultdict
from collections.abc import Callable
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.contestants import Entry
from benchmarks.harness import CUDA, DEVICE
from benchmarks.models import save_weights
from benchmarks.race.tasks import TASKS, RaceTask

if TYPE_CHECKING:
    from fastgrpo import GRPOTrainer

WEIGHTS = "weights.safetensors"
BATCHING = "TRL, continuous batching"
VARIANTS = ("fastgrpo", "TRL", BATCHING, "TRL, loss of fastgrpo")


def our_trainer(
    race: RaceTask, path: str, rows: list[dict[str, Any]], rollout: Callable[..., Any] | None = None, **settings: Any
) -> "GRPOTrainer":
    """Create fastgrpo's trainer. If a function makes the rollouts, it also gives the rewards."""
    from fastgrpo import GRPOConfig, GRPOTrainer

    config = GRPOConfig(
        prompts_per_step=race.prompts,
        device=DEVICE,
        dtype="float32",
        gradient_checkpointing=False,
        **race.settings,
        **settings,
    )
    if rollout:
        return GRPOTrainer(path, lambda given, **columns: given, config, rows, rollout_func=rollout)
    return GRPOTrainer(path, race.rewards, config, rows, tools=race.tools)


def trl_settings(variant: str, race: RaceTask, updates: int = 1) -> dict[str, Any]:
    """Return the tools and settings of TRL's trainer for this many updates per rollout."""
    from trl.trainer import grpo_trainer

    if race.tools:  # TRL refuses templates of calls without the names of arguments
        grpo_trainer.supports_tool_calling = lambda processing_class: True
    of_step = race.prompts * race.settings["num_generations"]
    of_update = of_step // updates
    batch = race.trl_batch or of_update
    # The default cache takes half of the free memory, and is slower. Prompt and completion fit into a block here. With
    # the default margin, the last 15% of the completions would start only after others have ended.
    cache = {"num_blocks": of_step, "max_batch_tokens": 4096, "safety_margin": 0.0}
    return {
        "tools": race.tools,
        "per_device_train_batch_size": batch,
        "gradient_accumulation_steps": of_update // batch,
        "steps_per_generation": of_update // batch * updates,
        "use_cpu": not CUDA,
        "bf16": False,
        "gradient_checkpointing": False,
        "model_init_kwargs": {"dtype": "float32"},
        "use_transformers_continuous_batching": variant == BATCHING,
        "transformers_continuous_batching_config": cache,
        **race.settings,
    }


def adapt(variant: str) -> Callable[[Any], Any] | None:
    """Return the function that changes TRL's trainer."""
    if variant != "TRL, loss of fastgrpo":
        return None
    from fastgrpo.integrations.trl import patch

    return patch


def entry(variant: str, task: str, path: str, folder: str, seed: int) -> Entry:
    """Create a trainer."""
    race, how = TASKS[task], {"output_dir": f"{folder}/run", "seed": seed}
    rows = race.rows(seed)[0]
    if variant == "fastgrpo":
        trainer = our_trainer(race, path, rows, max_steps=race.steps, updates_per_rollout=race.updates, **how)

        def step() -> dict[str, float]:
            return {"rollout_s": trainer.step()["time/rollout"]}
    else:
        from benchmarks import stepwise

        settings = trl_settings(variant, race, race.updates) | how | {"max_steps": race.steps * race.updates}
        update, trainer = stepwise.trl_trainer(path, race.rewards, rows, adapt=adapt(variant), **settings)

        generate, spent = trainer._generate_single_turn, []

        def timed(*given: Any, **named: Any) -> Any:
            start = time.perf_counter()
            drawn = generate(*given, **named)
            spent.append(time.perf_counter() - start)
            return drawn

        def step() -> dict[str, float]:
            spent.clear()
            for _ in range(race.updates):
                update()
            return {"rollout_s": sum(spent)}

        trainer._generate_single_turn = timed

    return Entry({variant: step, "save": partial(save_weights, trainer.model, f"{folder}/{WEIGHTS}")})


def turns_of(draws: list[dict[str, Any]]) -> dict[tuple[int, ...], list[list[int]]]:
    """Return the drawn turns by the tokens before them."""
    turns = defaultdict(list)
    for draw in draws:
        for each in draw["completions"]:
            ids, at = each["completion_ids"], 0
            for drawn, part in groupby(each["env_mask"]):
                end = at + len([*part])
                if drawn:
                    turns[(*draw["prompt_ids"], *ids[:at])].append(ids[at:end])
                at = end
    return turns


def first_step(variant: str, task: str, path: str, folder: str, seed: int, draws: str) -> Entry:
    """Create a trainer that makes one step with given completions, and returns its loss and gradient norm.

    TRL tokenizes the prompts, runs the tools and computes the rewards itself.
    """
    race, how = TASKS[task], {"output_dir": f"{folder}/{variant}", "seed": seed, "max_steps": 1}
    given = json.loads(Path(draws).read_text())
    left = {str(draw["row"]["prompt"]): draw for draw in given}

    def rollout(prompts: list[Any], trainer: Any) -> dict[str, list]:
        drawn = [left[str(prompt)] for prompt in prompts]
        made = [{"prompt_ids": draw["prompt_ids"], **draw["completions"].pop()} for draw in drawn]
        return {name: [each[name] for each in made] for name in made[0]}

    def step() -> dict[str, float]:
        rows = [draw["row"] for draw in given]
        if variant == "fastgrpo":
            values = our_trainer(race, path, rows, rollout, **how).step()
        else:
            from benchmarks import stepwise

            trainer = stepwise.make_trl(
                path, race.rewards, rows, adapt(variant), logging_steps=1, **trl_settings(variant, race), **how
            )
            turns = turns_of(given)
            trainer._generate_single_turn = lambda ids, *_, **__: ([turns[(*each,)].pop() for each in ids], None)
            trainer.train()
            values = trainer.state.log_history[0]
        return {name: values[name] for name in ("loss", "grad_norm")}

    return Entry({variant: step})

"""Built-in tasks: prompts and rewards. A task is a module here with `build(config, tokenizer) -> Task`.

A task may have its own small model, for runs without --model_name_or_path. Its module then has `make_model(seed) ->
(model, tokenizer)`, which returns random weights, and `WARM_START`: steps, batch_size and learning_rate of the
supervised training on `Task.supervised` before GRPO. An optional `enough(policy, tokenizer) -> Callable[[int], bool]`
returns a test that ends this training; it is called after each step. `build` then gets tokenizer=None, because the
model does not exist yet.

Optional `PANELS` define curves.png of its runs.

Modules that need models are imported inside functions, so that commands other than training start faster.
"""

import functools
import importlib
import json
import pkgutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, NamedTuple

from fastgrpo.config.command import quiet_libraries
from fastgrpo.config.sections import PromptConfig
from fastgrpo.config.settings import TrainingConfig
from fastgrpo.data import ShuffledRows, Source
from fastgrpo.data.prompts import to_examples
from fastgrpo.data.rows import Rows, as_rows
from fastgrpo.policy.device import check_folder, check_packages, choose_device
from fastgrpo.rewards import find_reward, prm_options
from fastgrpo.run.checkpoint import save_model
from fastgrpo.run.curves import PANELS, Panel

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from fastgrpo.tools.environments import Environments


@dataclass(frozen=True)
class Task:
    """The data and the rewards of a task. Data is read on demand: an evaluation does not read training data."""

    train: Callable[[], Source]  # reads the settings of training, and raises ValueError without data
    test: Callable[[], Sequence[dict] | None]  # returns the held-out rows, or None
    reward_funcs: list[Callable]  # a completion is right if the first returns at least 1
    supervised: Callable[[], Sequence[dict]] | None = None  # returns rows with prompt and completion, or with messages
    # Returns 1.0 for a completion whose written steps are right; None if the task cannot check steps. `distill` keeps
    # only these completions, and other commands call it if --reward_funcs names it.
    steps_reward: Callable | None = None
    tools: Sequence[Callable] = ()  # functions that the model may call
    environment: Callable | None = None  # makes the environment of a completion


def find_task(name: str) -> ModuleType:
    """Find the module of a task."""
    tasks = [module.name for module in pkgutil.iter_modules(__path__)]
    if name not in tasks:
        raise ValueError(f"task must be one of {', '.join(tasks)}, got {name!r}")
    return importlib.import_module(f"{__name__}.{name}")


class Opened(NamedTuple):
    """A built task, and the tokenizer of --model_name_or_path, or None for the task's own model."""

    module: ModuleType
    task: Task
    tokenizer: "PreTrainedTokenizerBase | None"


def open_task(config: TrainingConfig, load: "Callable[[str, bool], PreTrainedTokenizerBase] | None" = None) -> Opened:
    """Build the task of a training run, and validate it before a model is loaded. `load` loads the tokenizer."""
    module, path = find_task(config.task), config.model_name_or_path
    if path is None and not hasattr(module, "make_model"):
        raise ValueError(f"task {config.task} needs --model_name_or_path: a folder or hub id of a causal LM")
    if path is not None:
        check_folder(path)
    choose_device(config.device)
    check_packages(config)
    quiet_libraries()
    from fastgrpo.policy.load import load_tokenizer
    from fastgrpo.trainer.optim import check_schedule

    check_schedule(config.lr_scheduler_type, config.schedule_kwargs)
    tokenizer = None if path is None else (load or load_tokenizer)(path, config.trust_remote_code)
    return Opened(module, module.build(config, tokenizer), tokenizer)


def held_out_rows(task: Task, config: Any) -> Rows:
    """Return the held-out rows of a task. Raise if there are none."""
    test = task.test()
    if test is None and config.dataset_name is None and getattr(config, "environment", None):
        raise ValueError("pass rows with --dataset_name FILE.jsonl, with a line such as {} for each completion")
    if test is None or not len(test):
        raise ValueError(
            f"task {config.task} has no rows in the split {config.dataset_test_split!r}; name another one with "
            "--dataset_test_split"
        )
    return as_rows(test, f"test of task {config.task}")


def reward_functions(task: Task, config: Any) -> list[Callable]:
    """Return the reward functions of the settings."""
    known = [*task.reward_funcs, *filter(None, [task.steps_reward])]
    code, prm = config.trust_remote_code, prm_options(config, config.reward_funcs)
    template = config.template_kwargs
    return [find_reward(name, known, code, prm, template) for name in config.reward_funcs] or task.reward_funcs


def needed_rewards(task: Task, config: Any, environments: "Environments | None" = None) -> list[Callable]:
    """Return the reward functions of the settings and of the environments. Raise if there are none."""
    functions = [*reward_functions(task, config), *(environments.rewards if environments else ())]
    if not functions:
        raise ValueError(f"task {config.task} has no reward functions of its own: pass --reward_funcs module:function")
    return functions


OWN_DATA = "dataset_name", "dataset_config", "system_prompt", "environment"


def refuse_data(task: str, config: PromptConfig, names: Sequence[str] = OWN_DATA) -> None:
    """Raise for data set settings in a task that makes its own data."""
    for name in names:
        if getattr(config, name, None):
            raise ValueError(f"task={task} makes its own data; use {name} with --task gsm8k or --task dataset")


def shuffled(rows: Sequence[dict], config: TrainingConfig) -> ShuffledRows:
    """Return the source of training rows, shuffled by the settings."""
    return ShuffledRows(rows, seed=config.seed, shuffle=config.shuffle_dataset)


def as_prompt(words: str, tokenizer: "PreTrainedTokenizerBase") -> str | list[dict[str, str]]:
    """Return a prompt for a language model: a message with a chat template, otherwise a line of text."""
    return f"{words}\n" if tokenizer.chat_template is None else [{"role": "user", "content": words}]


def panels_of(task: ModuleType) -> Sequence[Panel]:
    """Return the panels of curves.png for a task."""
    return getattr(task, "PANELS", PANELS)


def make_policy(module: ModuleType, path: Path, config: Any, announce: Callable[[int, int, float], None]) -> Path:
    """Make a task's own model, warm-start it, and save it with its tokenizer in the format of transformers."""
    from fastgrpo.data.turns import TurnBuilder
    from fastgrpo.policy.load import load_policy
    from fastgrpo.tools.calls import ToolBox
    from fastgrpo.trainer.supervised import sft

    save_model(path, *module.make_model(config.seed))
    policy, tokenizer = load_policy(
        path, dtype=config.dtype, device=config.device, use_liger_kernel=config.use_liger_kernel
    )
    task = module.build(config, None)
    box = ToolBox(task.tools, environment=task.environment and task.environment())
    kwargs = TurnBuilder(tokenizer, box.schemas, config.template_kwargs).template_kwargs if box.tools else None
    read = functools.cache(lambda row: to_examples(json.loads(row), tokenizer, template_kwargs=kwargs))
    learned = [example for row in task.supervised() for example in read(json.dumps(row))]  # rows may repeat
    enough = module.enough(policy, tokenizer) if hasattr(module, "enough") else None

    def on_step(step, loss):
        announce(step, module.WARM_START["steps"], loss)
        return enough is not None and enough(step)

    sft(policy, learned, seed=config.seed, on_step=on_step, **module.WARM_START)
    save_model(path, policy.module, tokenizer)
    return path

"""python -m fastgrpo.evaluate MODEL [MODEL ...]: measure accuracy, pass@k and maj@k on held-out prompts.

One greedy completion per prompt gives the accuracy. For pass@k and maj@k, --eval_num_generations N also samples N
completions per prompt. --show N prints the first N completions of the models beside each other. --output FILE writes
every completion to a file.

Under torchrun, each rank loads the models and evaluates a part of the prompts. The number of ranks does not change the
results. Only rank 0 writes them.
"""

import dataclasses
import json
import sys

from fastgrpo.config import sections
from fastgrpo.config.command import new_file, quiet_libraries, run_command
from fastgrpo.config.fields import Count, Several, Size, Temperature, settings_class
from fastgrpo.config.recipe import parse_for_rows, take_flag, task_defaults
from fastgrpo.config.settings import Settings
from fastgrpo.data.records import TrainerState
from fastgrpo.policy.device import choose_device
from fastgrpo.ranks import join
from fastgrpo.run.terminal import Terminal, print_columns
from fastgrpo.tasks import find_task, held_out_rows, needed_rewards


@settings_class
class EvaluateConfig(
    sections.OutputConfig,
    sections.EvaluationConfig,
    sections.RewardConfig,
    sections.EngineConfig,
    sections.TokenFilterConfig,
    sections.CompletionConfig,
    sections.ToolsConfig,
    sections.TestSplitConfig,
    sections.DatasetConfig,
    sections.PromptConfig,
    sections.LoadingConfig,
    Settings,
):  # the fields come in the reverse of this order
    """The settings of the command. Settings of training have the same meaning."""

    models: Several[str]
    """Compare these causal LMs in one table: folders, hub ids or GGUF files."""
    max_eval_samples: Count | None = None
    """Evaluate on the first N held-out prompts. None evaluates on all of them."""
    temperature: Temperature = 1.0
    """Sample the completions of eval_num_generations at this temperature."""
    show: Size = 0
    """Print the first N completions of all models beside each other, sampled ones first."""
    output: str | None = None
    """Write every completion to this new file, one JSON object per line. None writes no file."""


def parse(argv: list[str]) -> EvaluateConfig:
    """Read the command line. The recipe of the task overrides the defaults."""
    argv, task = take_flag(argv, "--task")
    task = "arithmetic" if task is None else task
    known = {field.name for field in dataclasses.fields(EvaluateConfig)}
    recipe = {name: value for name, value in task_defaults(task, argv=argv).items() if name in known}
    config = parse_for_rows(
        EvaluateConfig, argv, prog="python -m fastgrpo.evaluate", description=__doc__,
        defaults={**recipe, "task": task},
    )  # fmt: skip
    if not config.models:
        raise ValueError("name at least one model: python -m fastgrpo.evaluate MODEL [MODEL ...]")
    return config


def evaluate_models(argv: list[str]) -> None:
    """Evaluate every model of the command line, and print the table."""
    config = parse(argv)
    from fastgrpo.evaluation.heldout import beside, comparison
    from fastgrpo.policy.load import load_tokenizer

    quiet_libraries()
    ranks = join(config.device)
    # Load all tokenizers first: a misspelt model is an error before the others are evaluated.
    tokenizers = [load_tokenizer(path, config.trust_remote_code) for path in config.models]
    with new_file(config.output if ranks.lead else None) as file:
        results, told = [], set()
        for path, tokenizer in zip(config.models, tokenizers, strict=True):
            results.append(_evaluate_model(path, tokenizer, config, ranks))
            if not ranks.lead:
                continue
            if not config.quiet:
                print(f"{path}: {results[-1].summary(told)}", file=sys.stderr)
            for text in results[-1].warnings:
                print(f"{path}: {text}", file=sys.stderr)
            file.writelines(json.dumps({"model": path, **row}, ensure_ascii=False) + "\n" for row in results[-1].rows)
            file.flush()
    if ranks.lead:
        if config.show:
            print_columns(beside(config.models, results, config.show))
        print_columns(comparison(config.models, results))


def _evaluate_model(path, tokenizer, config, ranks):
    """Evaluate one model on the held-out rows of the task, and return the `Evaluation`."""
    from fastgrpo.evaluation.heldout import evaluate, load_sampler
    from fastgrpo.rewards.call import Rewards, rewards_settings
    from fastgrpo.tools import find_environments
    from fastgrpo.tools.prompts import Prompts

    task = find_task(config.task).build(config, tokenizer)
    rows = held_out_rows(task, config).head(config.max_eval_samples)
    environments = find_environments(config, task.tools, task.environment)
    own = len(environments.rewards) if environments else 0
    rewards = Rewards(needed_rewards(task, config, environments), **rewards_settings(config, own))
    rewards.device(choose_device(config.device), config.reward_device)  # raises before the model is loaded
    policy, engine, sampling = load_sampler(path, tokenizer, config, top_p=config.top_p, top_k=config.top_k)
    rewards.place(rewards.device(policy.device, config.reward_device), tokenizer)
    source = Prompts.of(tokenizer, config, environments, sampling.stop_token_ids)
    state = TrainerState(0, 1, 0.0, config.max_completion_length)
    with rewards, Terminal(quiet=config.quiet, silent=not ranks.lead).share(str(path)) as progress:
        return evaluate(engine, source, rows, rewards, sampling, state, progress, config.eval_num_generations, ranks)


def main(argv: list[str] | None = None) -> int:
    """Run the command line."""
    return run_command(evaluate_models, argv)


if __name__ == "__main__":
    sys.exit(main())

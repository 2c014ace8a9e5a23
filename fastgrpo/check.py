"""python -m fastgrpo.check --reward module:function --dataset PATH [--model DIR]: find problems of a reward function.

Scores the completions in the column `completion`: a string, or a list of strings. With --model, the model generates
--num_generations completions per prompt instead. --reward, --dataset and --model are short for --reward_funcs,
--dataset_name and --model_name_or_path. If --dataset is a folder, rows come from the split --dataset_test_split.
Without a model there is no tokenizer, so the argument completion_ids of a reward function has the UTF-8 bytes of the
text.

--tools module:function and --environment module:Class check tools and an environment: a scripted model calls each tool
with made-up arguments in a few dialogues. `reset` gets the first row of --dataset. Without --reward, no reward function
is checked.

--sampler URL compares the weights of a vLLM server with those of --model, by the log-probs of fixed tokens.

Exit code: 0 without warnings, 1 with warnings, 2 for wrong input.
"""

import sys
from typing import Annotated

from pydantic import Field

from fastgrpo.config import sections
from fastgrpo.config.command import quiet_libraries, run_command
from fastgrpo.config.fields import Count, NotNegative, Positive, Whole, settings_class
from fastgrpo.config.recipe import parse_for_rows, take_flag, task_defaults
from fastgrpo.config.settings import Settings
from fastgrpo.data.prompts import check_turns, checked_row, shortened
from fastgrpo.data.records import Sample, TrainerState, with_text
from fastgrpo.policy.device import choose_device
from fastgrpo.ranks import refuse_ranks
from fastgrpo.rewards.answers import completion_text
from fastgrpo.run.terminal import print_columns
from fastgrpo.tasks import find_task, held_out_rows, needed_rewards

TRUNCATED = 0.1  # share of truncated completions above which a warning is printed
TITLES = ("reward", "mean", "std", "groups with std > 0", "None", "errors", "timeouts", "ms per completion")


@settings_class
class CheckConfig(
    sections.RewardFunctionsConfig,
    sections.EngineConfig,
    sections.CompletionConfig,
    sections.ToolsConfig,
    sections.TestSplitConfig,
    sections.DatasetConfig,
    sections.PromptConfig,
    sections.LoadingConfig,
    Settings,
):
    """The settings of the command. Settings of training have the same meaning."""

    task: str = "dataset"
    """Take rows and reward functions from this task (train --help lists the tasks); dataset takes rows with a `prompt`
    column."""
    model_name_or_path: str | None = None
    """Generate completions with this model. None uses the completions in the rows."""
    reward_timeout: Positive | None = 10.0
    """Stop a reward function after N seconds for one completion. The table counts these timeouts; all other
    checks ignore these completions. None sets no limit, and runs the functions in this process."""
    num_generations: Annotated[Whole, Field(ge=2)] = 8
    """Generate N completions per prompt with the model."""
    temperature: NotNegative = 1.0
    """Sample at this temperature."""
    max_samples: Count = 32
    """Read the first N rows."""
    sampler: str | None = None
    """Check that the vLLM server at this address has the weights of the model."""


def check(argv: list[str]) -> int:
    """Check rewards and environments, print the findings, and return the number of warnings."""
    argv, named = take_flag(argv, "--task")
    defaults = {"task": "dataset" if named is None else named}
    if length := task_defaults(defaults["task"]).get("max_completion_length"):
        defaults["max_completion_length"] = length
    config = parse_for_rows(
        CheckConfig, argv, prog="python -m fastgrpo.check", description=__doc__, defaults=defaults,
        aliases={"--reward": "--reward_funcs", "--dataset": "--dataset_name", "--model": "--model_name_or_path"},
    )  # fmt: skip
    refuse_ranks("check")
    warnings = 0
    if config.sampler is not None:
        return _check_sampler(config)
    if config.tools or config.environment is not None:
        warnings += _check_environment(config)
        if not config.reward_funcs:
            return warnings
    from fastgrpo.evaluation.reward_check import check_reward
    from fastgrpo.rewards.call import Rewards

    quiet_libraries()
    path = config.model_name_or_path
    tokenizer = None
    if path is not None:
        from fastgrpo.policy.load import load_tokenizer

        tokenizer = load_tokenizer(path, config.trust_remote_code)
    task = find_task(config.task).build(config, tokenizer)
    functions = needed_rewards(task, config)
    if path is not None and (config.tools or config.environment or task.tools or task.environment):
        raise ValueError("check generates without tools; use python -m fastgrpo.evaluate, or rows with completions")
    rows = held_out_rows(task, config).head(config.max_samples)
    groups = list(rows.each(_given)) if path is None else _draw(rows.map(_without), tokenizer, config)
    state = TrainerState(0, 1, 0.0, config.max_completion_length)
    with Rewards(functions) as rewards:
        rewards.place(rewards.device(choose_device(config.device), config.reward_device), tokenizer)
        found = [check_reward(function, groups, state, timeout=config.reward_timeout) for function in functions]
    print_columns([TITLES, *map(_cells, found)])
    for finding in found:
        for word, pair in (("best", finding.best), ("worst", finding.worst)):
            if pair is not None:
                print(f"{finding.name}, {word} ({pair[1]:g}): {shortened(completion_text(pair[0].content), 200)}")
        for warning in finding.warnings:
            print(f"warning: {finding.name}: {warning}")
        warnings += len(finding.warnings)
    drawn = [completion for group in groups for completion in group]
    cut = sum(completion.truncated for completion in drawn) / len(drawn)
    if cut > TRUNCATED:
        print(
            f"warning: {cut:.0%} of the completions are truncated at --max_completion_length "
            f"{config.max_completion_length}; raise it, or ask for shorter answers"
        )
    return warnings + (cut > TRUNCATED)


def _check_sampler(config):
    """Compare the log-probs of a vLLM server with the model's. There are no warnings: other weights are an error."""
    from fastgrpo.policy.load import load_policy
    from fastgrpo.rollout.vllm import compare

    path = config.model_name_or_path
    if path is None:
        raise ValueError("--sampler needs the model: pass --model DIR")
    quiet_libraries()
    policy, _ = load_policy(
        path, dtype=config.dtype, device=config.device, trust_remote_code=config.trust_remote_code,
        load_in_4bit=config.load_in_4bit,
    )  # fmt: skip
    gap, allowed = compare(policy, config.sampler)
    print(f"No problems found: the log-probs of fixed tokens differ by {gap:.2g} nats on average (limit {allowed:g}).")
    return 0


def _check_environment(config):
    """Print the problems of tools and of an environment, and return their number."""
    from fastgrpo.evaluation.environment_check import check_environment
    from fastgrpo.tools import find_environment, find_tools

    row = {}
    if config.dataset_name is not None:
        rows = held_out_rows(find_task(config.task).build(config, None), config).head(1)
        row = _without(next(iter(rows.each(lambda row: row))))
    factory = None if config.environment is None else find_environment(config.environment)
    found = list(check_environment(factory, find_tools(config.tools), row, config.tool_timeout))
    for name, kind, text in found:
        print(f"{kind}: {name}: {text}")
    warnings = sum(kind == "warning" for _, kind, _ in found)
    if not warnings:
        print("No problems found: the tools answer, and dialogues with the same seed are the same.")
    return warnings


def _cells(found):
    numbers = (f"{found.mean:.3f}", f"{found.deviation:.3f}", f"{found.spread:.0%}")
    counts = (str(found.none), str(found.errors), str(found.timeouts))
    return (found.name, *numbers, *counts, f"{found.milliseconds:.2f}")


def _given(row):
    """Return the completions in a row as a group."""
    prompt, columns = checked_row(_without(row))
    given = row.get("completion")
    if given is None or given == []:
        raise ValueError("the row has no completion in the column 'completion'; add one, or pass --model DIR")
    several = isinstance(given, list) and not isinstance(given[0], dict)
    group = []
    for content in given if several else [given]:
        check_turns(content, "a completion")
        if isinstance(content, str) and not isinstance(prompt, str):
            content = [{"role": "assistant", "content": content}]
        group.append(
            Sample([], list(completion_text(content).encode()), prompt=prompt, columns=columns, content=content)
        )
    return group


def _without(row):
    """Return a row without its completions."""
    return {name: value for name, value in row.items() if name != "completion"}


def _draw(rows, tokenizer, config):
    """Draw a group of completions per row."""
    from fastgrpo.evaluation.heldout import load_sampler
    from fastgrpo.policy.fit import prompts_of
    from fastgrpo.rollout.backend import draw_groups
    from fastgrpo.tools.prompts import Prompts

    policy, engine, sampling = load_sampler(config.model_name_or_path, tokenizer, config)
    source = Prompts(tokenizer, config.template_kwargs)
    prompts = list(prompts_of(rows, source, policy, config.max_completion_length))
    drawn = draw_groups(engine, source.start(dict(enumerate(prompts)), config.num_generations), sampling)
    return [[with_text(rollout, prompts[i], tokenizer) for rollout in drawn[i]] for i in sorted(drawn)]


def main(argv: list[str] | None = None) -> int:
    """Run the command line."""
    warnings = []
    return run_command(lambda flags: warnings.append(check(flags)), argv) or int(any(warnings))


if __name__ == "__main__":
    sys.exit(main())

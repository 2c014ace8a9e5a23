"""python -m fastgrpo.train: command line -> GRPOConfig -> GRPOTrainer. Without flags, runs the built-in example.

Modules that need transformers are imported inside functions: --help stays fast, and a missing package gives one line.
"""

import functools
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from fastgrpo.config.command import run_command
from fastgrpo.config.recipe import parse
from fastgrpo.config.settings import GRPOConfig
from fastgrpo.run.sweep import SweepRun, run_sweep, take_sweep

if TYPE_CHECKING:
    from fastgrpo.trainer import GRPOTrainer


def make_trainer(config: GRPOConfig) -> "GRPOTrainer":
    """Build the trainer of a run. Without a model, warm-start the task's own policy first."""
    opened, train, test, rewards, environments = _checked(config)  # before the warm start, which takes time
    from fastgrpo.policy.load import load_tokenizer
    from fastgrpo.ranks import join
    from fastgrpo.run.log import open_log
    from fastgrpo.run.resume import inputs_of
    from fastgrpo.tasks import panels_of
    from fastgrpo.trainer import GRPOTrainer

    path, how = config.model_name_or_path, {"environment_factory": environments, "panels": panels_of(opened.module)}
    if path is not None:
        trainer = GRPOTrainer(path, rewards, config, train, test, opened.tokenizer, **how)
    else:
        ranks = join(config.device, config.ddp_timeout)
        log = open_log(config, inputs_of(config), ranks)
        try:
            path = _make_policy(opened.module, config, log) if ranks.lead else None
            path = ranks.from_lead(path, "the warm start of rank 0")
            tokenizer = load_tokenizer(path, config.trust_remote_code)
            trainer = GRPOTrainer(path, rewards, config, train, test, tokenizer, log=log, **how)
        except BaseException:
            log.discard()
            raise
    trainer.open()
    trainer.log.say(f"run folder {trainer.log.dir}")
    trainer.log.say(
        f"GRPO: {trainer.policy.size:,} parameters on {trainer.model.device}, {trainer.state.max_steps} steps of "
        f"{config.prompts_per_step} prompts x {config.num_generations} completions"
    )
    return trainer


def check_runs(runs: Sequence[SweepRun]) -> None:
    """Check each setting of a sweep once, as `make_trainer` does before the warm start."""

    @functools.cache
    def load(path, trust_remote_code):
        from fastgrpo.policy.load import load_tokenizer

        return load_tokenizer(path, trust_remote_code)

    for config in {run.setting: run.config for run in runs}.values():
        _checked(config, load)


def _checked(config, load=None):
    """Open the task of a run, its rows, rewards, tools and environments; raise ValueError for a mistake in them."""
    from fastgrpo.rewards.call import Rewards, rewards_settings
    from fastgrpo.rewards.overlong import shaping
    from fastgrpo.tasks import needed_rewards, open_task
    from fastgrpo.tools import find_environments

    opened = open_task(config, load)
    train, test = opened.task.train(), opened.task.test()
    environments = find_environments(config, opened.task.tools, opened.task.environment)
    functions = needed_rewards(opened.task, config, environments)
    own = len(environments.rewards) if environments else 0
    rewards = Rewards(functions, shaping=shaping(config), **rewards_settings(config, own))
    return opened, train, test, rewards, environments


def _make_policy(task_module, config, log):
    """Warm-start the task's own policy, unless the run is resumed, and return its folder."""
    from fastgrpo.tasks import make_policy

    if log.checkpoint is not None:
        return log.dir / "warm-start"
    log.say("warm start: supervised training of the task's own small model")

    def announce(step, steps, loss):
        if log.terminal.bar is None:
            log.terminal.progress(steps, "SFT")
        log.terminal.advance(loss=loss)

    path = make_policy(task_module, log.folder.claim("warm-start"), config, announce)
    log.terminal.close_bar()
    return path


def train(argv: list[str]) -> None:
    """Make one run, or several with --sweep or --sweep_seeds."""
    runs = take_sweep(argv)
    if runs:
        from fastgrpo.ranks import refuse_ranks

        refuse_ranks("a sweep (--sweep, --sweep_seeds)")
        check_runs(runs)  # before the first run starts
        return run_sweep(runs)
    make_trainer(parse(argv)).train()


def main(argv: list[str] | None = None) -> int:
    """Run the command line. On SIGINT, SIGTERM or a closed output pipe, the run saves and ends."""
    return run_command(train, argv)


if __name__ == "__main__":
    sys.exit(main())

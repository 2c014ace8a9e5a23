"""python -m fastgrpo.sft: command line -> SFTConfig -> SFTTrainer.

Rows have a prompt and a completion, or messages; the loss covers only completions. Functions import modules that need
transformers themselves: --help stays fast, and a missing package gives one line.
"""

import sys
from typing import TYPE_CHECKING

from fastgrpo.config.command import run_command
from fastgrpo.config.recipe import parse
from fastgrpo.config.settings import SFTConfig

if TYPE_CHECKING:
    from fastgrpo.trainer import SFTTrainer


def make_trainer(config: SFTConfig) -> "SFTTrainer":
    """Build the trainer of a supervised run. Without a model, start the task's own from random weights."""
    from fastgrpo.data import load_rows
    from fastgrpo.tasks import open_task, reward_functions, shuffled

    opened = open_task(config)
    if opened.task.tools or opened.task.environment:
        raise ValueError(f"task {config.task} has tools, and fastgrpo.sft calls none; use python -m fastgrpo.train")
    from fastgrpo.trainer import SFTTrainer

    if config.train_file is None and opened.task.supervised is None:
        raise ValueError(
            f"task {config.task} has no rows for supervised training; pass --train_file FILE.jsonl with rows of "
            "prompt and completion, or of messages"
        )
    model, tokenizer = config.model_name_or_path, opened.tokenizer
    if model is None:
        model, tokenizer = opened.module.make_model(config.seed)
    train = opened.task.supervised() if config.train_file is None else load_rows(config.train_file)
    if train is None:
        raise ValueError(f"--train_file {config.train_file} is a folder without train.jsonl; pass a .jsonl file")
    test, functions = opened.task.test(), reward_functions(opened.task, config)
    trainer = SFTTrainer(model, config, shuffled(train, config), test, tokenizer, functions)
    trainer.open()
    trainer.log.say(f"run folder {trainer.log.dir}")
    trainer.log.say(
        f"SFT: {trainer.policy.size:,} parameters on {trainer.model.device}, {trainer.state.max_steps} steps of "
        f"{config.batch_size} of {len(trainer.source):,} rows"
    )
    return trainer


def train(argv: list[str]) -> None:
    """Make one supervised run."""
    make_trainer(parse(argv, SFTConfig)).train()


def main(argv: list[str] | None = None) -> int:
    """Run the command line. On SIGINT, SIGTERM or a closed output pipe, the run saves and ends."""
    return run_command(train, argv)


if __name__ == "__main__":
    sys.exit(main())

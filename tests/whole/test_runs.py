"""Whole runs of the built-in example (slow): `make test-slow`. They check the README's claims."""

import json
import random

import pytest

from fastgrpo.evaluation.heldout import evaluate
from fastgrpo.rewards.call import Rewards
from fastgrpo.run.log import RunLog
from fastgrpo.tasks import arithmetic, make_policy
from fastgrpo.train import main, parse
from fastgrpo.trainer import GRPOTrainer

pytestmark = pytest.mark.slow


def test_the_built_in_example_learns(tmp_path):
    assert main(["--seed", "1", "--output_dir", str(tmp_path / "run")]) == 0
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    before, after = summary["accuracy_before"], summary["accuracy_after"]
    assert before < 0.8 and after >= 0.95 and 1 - after <= 0.2 * (1 - before)  # rounding decides where GRPO begins


def test_shuffled_rewards_teach_nothing(tmp_path):
    rng = random.Random(0)

    def correctness(prompts, completions, answer, **columns):
        rewards = arithmetic.correctness(prompts, completions, answer)
        rng.shuffle(rewards)
        return rewards

    config = parse(["--seed", "0", "--output_dir", str(tmp_path / "run")])
    log = RunLog(config)
    path = make_policy(arithmetic, log.folder.claim("warm-start"), config, lambda *_: None)
    task = arithmetic.build(config, None)
    trainer = GRPOTrainer(str(path), correctness, config, task.train(), None, log=log)
    rewards = Rewards([arithmetic.correctness])

    def accuracy():
        result = evaluate(trainer.engine, trainer.prompts, task.test(), rewards, trainer.sampling, trainer.state)
        return result.values["eval/accuracy"]

    before = accuracy()
    trainer.train()
    assert accuracy() - before < 0.05

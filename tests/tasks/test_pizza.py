"""A character model that learns to like pizza: its sentences, its reward, its checkpoints, and (slow) its bars."""

from collections import Counter

import pytest
from runs import lines

from fastgrpo.config.settings import TrainConfig
from fastgrpo.evaluate import main as evaluate
from fastgrpo.run.metrics import METRICS
from fastgrpo.tasks import pizza
from fastgrpo.train import main


def test_the_warm_start_has_the_documented_share_of_pizza():
    rows = pizza.sentences(3)
    assert len(rows) == 5000 and rows == pizza.sentences(3) != pizza.sentences(4)
    assert Counter(row["prompt"] for row in rows) == {f"{name} likes ": 500 for name in pizza.NAMES}
    liked = Counter(row["completion"] for row in rows if row["prompt"] == pizza.PROMPT)
    assert liked["pizza."] == 75 and len(liked) == len(pizza.FOODS) and min(liked.values()) >= 70
    assert set("".join(row["prompt"] + row["completion"] for row in rows)) <= set(pizza.CHARACTERS)
    task = pizza.build(TrainConfig(task="pizza"), None)
    assert task.train().take(3) == [{"prompt": "ravin likes "}] * 3 and task.test() == [{"prompt": "ravin likes "}]


def test_only_pizza_at_the_end_is_rewarded_and_metrics_exist_for_the_picture():
    texts = ["pizza.", "rice pizza.", "pizza", "pizza. ", "rice.", "."]
    assert pizza.likes_pizza([], texts, other=[]) == [4.0, 4.0, 0.0, 0.0, 0.0, 0.0]
    assert len(pizza.PANELS) == 6 and {name for panel in pizza.PANELS for name in panel.metrics} <= set(METRICS)


def reloaded(run, step, *flags):
    """The share of pizza among the draws of a checkpoint, which the command of evaluation loads."""
    output = f"drawn-{step}.jsonl"
    assert evaluate([str(run / f"checkpoint-{step}"), "--task", "pizza", "--output", str(run / output), *flags]) == 0
    right = [row["right"] for row in lines(run, output) if row["draw"] != "greedy"]
    return sum(right) / len(right)


def shares(run):
    return [row["eval/pass@1"] for row in lines(run) if "eval/pass@1" in row]


def test_a_checkpoint_that_is_loaded_again_has_the_share_of_the_run(tmp_path, monkeypatch, without_curves):
    """To the last draw, where --seed is that of the run. So the column of step 100 on the page is of the checkpoint."""
    monkeypatch.setitem(pizza.WARM_START, "steps", 60)
    draws = ["--eval_num_generations", "100", "--seed", "5", "--device", "cpu"]
    few = "--max_steps 2 --save_steps 1 --eval_steps 1 --learning_rate 5e-4 --num_generations 64"
    assert main(["--task", "pizza", "--output_dir", str(tmp_path), *draws, *few.split()]) == 0
    again = [reloaded(tmp_path, step, *draws) for step in (1, 2)]
    found = shares(tmp_path)
    assert found[1:] == pytest.approx(again, abs=1e-9) and len(set(found)) > 1 and min(found) > 0


TOKEN_LEVEL = ["--loss_type", "dapo", "--importance_sampling_level", "token"]


@pytest.mark.slow
@pytest.mark.parametrize("level, mean, least", [([], 0.85, 0.75), (TOKEN_LEVEL, 0.6, 0.0)], ids=["sequence", "token"])
def test_grpo_raises_the_share_of_pizza(tmp_path, level, mean, least):
    """Shares of pizza in 1,000 samples, over three seeds; at step 100 of the checkpoint, which is loaded again."""
    ends = []
    for seed in range(3):
        run = tmp_path / str(seed)
        assert main(["--task", "pizza", "--seed", str(seed), "--output_dir", str(run), *level]) == 0
        before, _, end = shares(run)
        assert 0.1 <= before <= 0.2 and reloaded(run, 100) >= 0.6
        ends.append(end)
    assert sum(ends) / 3 >= mean and min(ends) >= least, ends

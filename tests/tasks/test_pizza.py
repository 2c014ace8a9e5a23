"""A character model that learns to like pizza: its sentences, its reward, its checkpoints, and (slow) its bars."""

from collections import Counter

import pytest
from runs import lines

from fastgrpo.config.settings import TrainConfig
from fastgrpo.evaluate import main as evaluate
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


def test_the_reward_pays_only_for_the_word_and_both_shares_are_measured():
    texts = ["pizza.", "rice pizza.", "pizza", "soupizza.", "rice.", "."]
    for reward, paid in ((pizza.likes_pizza, [4, 0, 0, 0, 0, 0]), (pizza.ends_in_pizza, [4, 4, 0, 4, 0, 0])):
        logged = []
        assert reward([], texts, log_metric=lambda *one, logged=logged: logged.append(one)) == paid
        assert [sum(v for name, v in logged if name == share) for share in pizza.SHARES] == [1, 3]


def reloaded(run, step, *flags):
    """The share of pizza among the draws of a checkpoint, which the command of evaluation loads."""
    output = f"drawn-{step}.jsonl"
    assert evaluate([str(run / f"checkpoint-{step}"), "--task", "pizza", "--output", str(run / output), *flags]) == 0
    right = [row["right"] for row in lines(run, output) if row["draw"] != "greedy"]
    return sum(right) / len(right)


def shares(run):
    return [row["eval/pass@1"] for row in lines(run) if "eval/pass@1" in row]


@pytest.mark.slow
def test_a_checkpoint_that_is_loaded_again_has_the_share_of_the_run(tmp_path, monkeypatch, without_curves):
    monkeypatch.setitem(pizza.WARM_START, "steps", 60)
    draws = ["--eval_num_generations", "100", "--seed", "5", "--device", "cpu"]
    few = "--max_steps 2 --save_steps 1 --eval_steps 1 --learning_rate 5e-4 --num_generations 64"
    assert main(["--task", "pizza", "--output_dir", str(tmp_path), *draws, *few.split()]) == 0
    again = [reloaded(tmp_path, step, *draws) for step in (1, 2)]
    found = shares(tmp_path)
    assert found[1:] == pytest.approx(again, abs=1e-9) and len(set(found)) > 1 and min(found) > 0


@pytest.mark.slow
@pytest.mark.parametrize("level", ["", "--loss_type dapo --importance_sampling_level token"], ids=["sequence", "token"])
@pytest.mark.parametrize("seed", range(3))
def test_grpo_raises_the_share_of_pizza_and_it_does_not_fall(tmp_path, seed, level):
    assert main(["--task", "pizza", "--seed", str(seed), "--output_dir", str(tmp_path), *level.split()]) == 0
    before, middle, end = shares(tmp_path)
    assert 0.1 <= before <= 0.2 and end > 0.88 and end > middle - 0.03, (before, middle, end)

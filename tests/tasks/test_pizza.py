"""A character model that learns to like pizza: its sentences, its reward, two steps of it, and (slow) its bars."""

import json
from collections import Counter

import pytest

from fastgrpo.config.settings import TrainConfig
from fastgrpo.evaluate import main as evaluate
from fastgrpo.run.metrics import METRICS
from fastgrpo.tasks import pizza
from fastgrpo.train import main, parse


def test_one_name_likes_pizza_in_a_share_of_his_sentences():
    rows = pizza.sentences(3)
    assert len(rows) == 5000 and rows == pizza.sentences(3) != pizza.sentences(4)
    assert Counter(row["prompt"] for row in rows) == {f"{name} likes ": 500 for name in pizza.NAMES}
    liked = Counter(row["completion"] for row in rows if row["prompt"] == pizza.PROMPT)
    assert liked["pizza."] == 75 and len(liked) == len(pizza.FOODS) and min(liked.values()) >= 70
    assert set("".join(row["prompt"] + row["completion"] for row in rows)) <= set(pizza.CHARACTERS)


def test_only_pizza_at_the_end_is_rewarded():
    texts = ["pizza.", "rice pizza.", "pizza", "pizza. ", "rice.", "."]
    assert pizza.likes_pizza([], texts, other=[]) == [4.0, 4.0, 0.0, 0.0, 0.0, 0.0]


def test_the_task_makes_its_own_data():
    task = pizza.build(TrainConfig(task="pizza"), None)
    assert task.train().take(3) == [{"prompt": "ravin likes "}] * 3 and task.test() == [{"prompt": "ravin likes "}]
    with pytest.raises(ValueError, match="task=pizza makes its own data; use dataset_name with"):
        pizza.build(TrainConfig(task="pizza", dataset_name="rows.jsonl"), None)


def test_the_picture_is_a_grid_of_six():
    names = [panel.metrics for panel in pizza.PANELS]
    assert names == [("reward",)] * 2 + [(n,) for n in ("policy_loss", "kl", "loss", "advantage/mean")]
    assert {name for panel in names for name in panel} <= set(METRICS)


def test_the_recipe_is_the_published_one():
    config = parse(["--task", "pizza"])
    assert (config.loss_type, config.importance_sampling_level) == ("luspo", "sequence")
    assert (config.max_steps, config.prompts_per_step, config.num_generations) == (200, 1, 4)
    assert (config.beta, config.advantage_clip, config.learning_rate, config.max_completion_length) == (
        0.1,
        2,
        1e-4,
        20,
    )


def test_two_steps(tmp_path, monkeypatch, capsys, without_curves):
    monkeypatch.setitem(pizza.WARM_START, "steps", 4)
    run, few = tmp_path / "run", ["--max_steps", "2", "--save_steps", "1", "--eval_num_generations", "3"]
    assert main(["--task", "pizza", "--output_dir", str(run), "--device", "cpu", *few]) == 0
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows if "reward" in row] == [1, 2]
    assert [row["step"] for row in rows if "eval/pass@1" in row] == [0, 2]
    models = [str(run / name) for name in ("warm-start", "checkpoint-1")]
    assert evaluate([*models, "--task", "pizza", "--eval_num_generations", "3", "--device", "cpu"]) == 0
    assert "| pass@1 " in capsys.readouterr().out


def reloaded(run, step, *flags):
    """The share of pizza among the draws of a checkpoint, which the command of evaluation loads."""
    output = run / f"drawn-{step}.jsonl"
    model = str(run / f"checkpoint-{step}")
    assert evaluate([model, "--task", "pizza", "--output", str(output), *flags]) == 0
    drawn = [json.loads(line) for line in output.read_text().splitlines()]
    right = [row["right"] for row in drawn if row["draw"] != "greedy"]
    return sum(right) / len(right)


def test_a_checkpoint_that_is_loaded_again_has_the_share_of_the_run(tmp_path, monkeypatch, without_curves):
    """To the last draw, where --seed is that of the run. So the column of step 100 on the page is of the checkpoint."""
    monkeypatch.setitem(pizza.WARM_START, "steps", 60)
    draws = ["--eval_num_generations", "200", "--seed", "5", "--device", "cpu"]
    few = {"max_steps": 2, "save_steps": 1, "eval_steps": 1, "learning_rate": 5e-4, "num_generations": 64}
    few = [word for name, value in few.items() for word in (f"--{name}", str(value))]
    assert main(["--task", "pizza", "--output_dir", str(tmp_path), *draws, *few]) == 0
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    shares = [row["eval/pass@1"] for row in rows if "eval/pass@1" in row]
    again = [reloaded(tmp_path, step, *draws) for step in (1, 2)]
    assert shares[1:] == pytest.approx(again, abs=1e-9) and len(set(shares)) > 1 and min(shares) > 0


TOKEN_LEVEL = ["--loss_type", "dapo", "--importance_sampling_level", "token"]


@pytest.mark.slow
@pytest.mark.parametrize("level, mean, least", [([], 0.85, 0.75), (TOKEN_LEVEL, 0.6, 0.0)], ids=["sequence", "token"])
def test_the_taste_changes(tmp_path, level, mean, least):
    """Shares of pizza in 1,000 samples, over three seeds; at step 100 of the checkpoint, which is loaded again."""
    ends = []
    for seed in range(3):
        run = tmp_path / str(seed)
        assert main(["--task", "pizza", "--seed", str(seed), "--output_dir", str(run), *level]) == 0
        rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
        before, _, end = (row["eval/pass@1"] for row in rows if "eval/pass@1" in row)
        assert 0.1 <= before <= 0.2 and reloaded(run, 100) >= 0.6
        ends.append(end)
    assert sum(ends) / 3 >= mean and min(ends) >= least, ends

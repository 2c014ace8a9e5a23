"""The history of a run: entries by TRL's names, and what `train` returns."""

import math

from fastgrpo.run.metrics import Summary, entry, evaluated, last_training, mean_loss, read_history


def test_what_was_sampled_goes_by_trls_names_before_what_was_greedy():
    values = {"eval/reward": 1.0, "eval/sampled/reward": 0.5, "eval/mean_length": 7.0, "eval/time": 2.0}
    assert evaluated(values) == {"eval_reward": 0.5, "eval_completions/mean_length": 7.0, "eval_runtime": 2.0}
    assert evaluated({"eval_math/accuracy": 1.0}, "eval_math") == {"eval_math_accuracy": 1.0}


def test_an_entry_has_the_step_and_none_in_place_of_nan():
    assert entry(3, {"reward": 1.0, "kl": math.nan, "epoch": 0.5}) == {
        "reward": 1.0,
        "kl": None,
        "epoch": 0.5,
        "step": 3,
    }
    made = entry(3, {"eval_a/reward": 1.0, "eval/reward": 2.0, "epoch": 0.5})
    assert made == {"eval_a_reward": 1.0, "eval_reward": 2.0, "epoch": 0.5, "step": 3}


def test_only_what_the_checkpoint_knows_is_read_back(tmp_path):
    path = tmp_path / "metrics.jsonl"
    known = '{"step": 1, "loss": 2.0}\nspoilt\n{"step": 3, "eval/reward": null}\n'
    path.write_text(known + '{"step": 4, "loss": 9.0}\n')
    assert read_history(path, len(known)) == [{"loss": 2.0, "step": 1}, {"eval_reward": None, "step": 3}]
    assert read_history(tmp_path / "nothing", 10) == []


def test_the_mean_loss_weighs_a_line_by_its_steps():
    lines = [{"step": 2, "loss": 1.0}, {"step": 2, "eval_reward": 5.0}, {"step": 3, "loss": 4.0}]
    assert mean_loss(lines) == 2.0 and mean_loss([]) == 0.0
    assert last_training([*[{"learning_rate": 1.0}], *lines]) == {"learning_rate": 1.0} and last_training(lines) == {}


def test_a_summary_is_a_dict_and_an_output_of_training():
    summary = Summary({"steps": 4}, {"train_loss": 0.25})
    assert summary == {"steps": 4} and summary.global_step == 4
    assert summary.training_loss == 0.25 and summary.metrics == {"train_loss": 0.25}


def test_an_evaluation_has_trls_names_whatever_its_prefix_is():
    assert entry(3, {"test/accuracy": 0.5, "test/time": 1.0, "epoch": 1.0}) == {
        "test_accuracy": 0.5, "test_runtime": 1.0, "epoch": 1.0, "step": 3,
    }  # fmt: skip
    assert entry(1, {"test_b/loss": 0.5}) == {"test_b_loss": 0.5, "step": 1}
    training = {"time/loss": 1.0, "time/reward": 2.0, "loss": 3.0, "rewards/length/mean": 1.0, "learning_rate": 0.1}
    assert entry(1, training) == training | {"step": 1}


def test_what_a_reward_function_logs_in_training_keeps_its_name():
    logged = {"learning_rate": 0.1, "judge/time": 2.0, "judge/loss": 1.0, "judge/calls": 3.0, "eval/mean_length": 4.0}
    assert entry(1, logged) == logged | {"step": 1}

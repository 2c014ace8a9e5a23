"""The table of metrics: which names there are, and how the values of several steps become one."""

import pytest

from fastgrpo.run import metrics
from fastgrpo.run.metrics import METRICS, check_metric, reduced


def test_every_rule_is_about_a_metric_that_exists():
    assert set(metrics._REDUCED) <= set(METRICS)


@pytest.mark.parametrize("name", [None, "reward", "rewards/judge/mean", "eval/pass@4", "eval_reward", "words_logged"])
def test_names_of_metrics(name):
    check_metric(name)


@pytest.mark.parametrize("name", ["rewart", "rewards/mean", "", "eval/pass"])
def test_names_that_are_no_metrics(name):
    with pytest.raises(ValueError, match=f"unknown metric '{name}'"):
        check_metric(name)


@pytest.mark.parametrize(
    "name, value",
    [("loss", 2.0), ("ratio/max", 3.0), ("completions/min_length", 1.0), ("learning_rate", 2.0),
     ("rewards/judge/errors", 6.0), ("judge/errors", 2.0)],
)  # fmt: skip
def test_the_values_of_several_steps_become_one(name, value):
    assert reduced(name, [1.0, 3.0, 2.0]) == value

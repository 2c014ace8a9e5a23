"""The warm start of the embedded example; tests/tasks/test_tasks.py and tests/whole/ have the rest of the task."""

from fastgrpo.policy.load import prepare
from fastgrpo.tasks import arithmetic


def test_the_warm_start_ends_when_enough_answers_are_right(monkeypatch):
    """A policy with random weights knows none: the test looks, and says no, until nothing is asked of it."""
    model, tokenizer = arithmetic.make_model(0)
    policy = prepare(model, False, False)
    monkeypatch.setattr(arithmetic, "CHECK_PROMPTS", 2)
    assert not arithmetic.enough(policy, tokenizer)(arithmetic.CHECK_FROM)
    monkeypatch.setattr(arithmetic, "ENOUGH", 0)
    enough = arithmetic.enough(policy, tokenizer)
    assert enough(arithmetic.CHECK_FROM) and not enough(arithmetic.CHECK_FROM - arithmetic.CHECK_STEPS)

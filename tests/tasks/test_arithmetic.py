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


def test_the_share_of_right_answers_is_compared_from_a_step_on(monkeypatch):
    model, tokenizer = arithmetic.make_model(0)
    policy, asked = prepare(model, False, False), []
    monkeypatch.setattr(arithmetic, "correctness", lambda prompts, texts, answers: asked.append(answers) or [1.0, 0.0])
    for name, value in {"CHECK_PROMPTS": 2, "CHECK_FROM": 4, "CHECK_STEPS": 2, "ENOUGH": 0.5}.items():
        monkeypatch.setattr(arithmetic, name, value)
    look = arithmetic.enough(policy, tokenizer)
    assert [look(step) for step in range(1, 8)] == [False, False, False, True, False, True, False]
    assert len(asked) == 2 and len(asked[0]) == 2
    monkeypatch.setattr(arithmetic, "ENOUGH", 0.51)
    assert not look(4)

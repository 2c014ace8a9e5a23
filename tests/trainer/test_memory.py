"""What a run does with the plan of its memory, on a CPU whose memory is limited by an argument."""

import functools

import pytest
from runs import make_trainer

from fastgrpo.trainer import setup
from fastgrpo.trainer.memory import plan_run


@pytest.fixture
def room(monkeypatch):
    """A function that gives runs so many bytes."""
    return lambda size: monkeypatch.setattr(setup, "plan_run", functools.partial(plan_run, room=size))


def test_a_run_that_does_not_fit_is_refused_before_its_weights_are_loaded(tmp_path, monkeypatch, room):
    room(2**20)

    def refuse(*args):
        raise AssertionError("the weights were loaded")

    monkeypatch.setattr(setup, "policy_and_tokenizer", refuse)
    with pytest.raises(ValueError, match=r"the run needs at least .* MiB .*, and there are 1.00 MiB: head .*"):
        make_trainer(tmp_path)
    assert not (tmp_path / "run").exists()


def test_a_run_that_fits_says_what_it_will_hold_and_keeps_room_for_its_updates(tmp_path, capsys, room):
    room(2**40)
    trainer = make_trainer(tmp_path, gradient_checkpointing="auto")
    out = capsys.readouterr().out
    for text in ("memory of this run", "activations", "in all", "of the 1024.00 GiB", "all layers fit beside"):
        assert text in out, text
    assert not trainer.model.is_gradient_checkpointing
    assert trainer.engine.reserved() == trainer.optimizer.bytes_to_come(trainer.policy.device) + trainer.plan.passing
    assert trainer.about()["config"]["gradient_checkpointing"] == "auto"  # the choice is made anew where a run resumes


def test_on_a_cpu_nothing_is_refused_and_updates_keep_their_room(tmp_path, capsys):
    trainer = make_trainer(tmp_path, gradient_checkpointing="auto")
    assert trainer.model.is_gradient_checkpointing
    assert "memory of this run" not in capsys.readouterr().out
    assert trainer.plan.passing > 2**20  # a full micro-batch
    assert trainer.engine.reserved() == trainer.optimizer.bytes_to_come(trainer.policy.device) + trainer.plan.passing

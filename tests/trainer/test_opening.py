"""The folder of a run, and `train(resume_from_checkpoint=...)`."""

import pytest
import torch
from runs import lines, make_trainer

pytestmark = pytest.mark.usefixtures("without_curves")


def states(trainer):
    return {name: value.clone() for name, value in trainer.policy.state_dict().items()}


def whole(tmp_path):
    trainer = make_trainer(tmp_path / "whole", max_steps=4, lr_scheduler_type="constant")
    trainer.train()
    return states(trainer)


@pytest.mark.parametrize("overwrite", [False, True])  # scripts say so though they go on: nothing is deleted
@pytest.mark.parametrize("resume", [True, "checkpoint-2"])
def test_train_goes_on_from_a_checkpoint_bit_for_bit(tmp_path, resume, overwrite):
    def make(**settings):
        return make_trainer(tmp_path, lr_scheduler_type="constant", save_steps=2, **settings)

    make(max_steps=2).train()
    # The folder is not empty, and nothing is said of it yet.
    trainer = make(max_steps=4, overwrite_output_dir=overwrite)
    resume = resume if resume is True else str(tmp_path / "run" / resume)
    assert trainer.train(resume_from_checkpoint=resume).global_step == 4
    expected = whole(tmp_path)
    assert all(torch.equal(value, expected[name]) for name, value in states(trainer).items())
    assert [row["step"] for row in lines(tmp_path / "run" / "metrics.jsonl")] == [1, 2, 3, 4]
    assert [entry["step"] for entry in trainer.state.log_history] == [1, 2, 3, 4, 4]


def test_without_a_word_of_it_a_run_is_not_written_over(tmp_path):
    make_trainer(tmp_path).train()
    trainer = make_trainer(tmp_path)
    with pytest.raises(ValueError, match=r"is not empty; choose another folder"):
        trainer.train()


def test_a_run_that_is_to_be_overwritten_goes_when_the_next_one_begins(tmp_path):
    make_trainer(tmp_path, max_steps=3).train()
    trainer = make_trainer(tmp_path, overwrite_output_dir=True)
    assert (tmp_path / "run" / "checkpoint-3").is_dir()
    trainer.train()
    assert [row["step"] for row in lines(tmp_path / "run" / "metrics.jsonl")] == [1, 2]
    assert not (tmp_path / "run" / "checkpoint-3").exists()


def test_what_was_measured_before_is_not_given_up(tmp_path):
    make_trainer(tmp_path).train()
    trainer = make_trainer(tmp_path, output_dir=str(tmp_path / "other"), eval_rows=[{"prompt": "ab"}])
    trainer.evaluate()
    with pytest.raises(ValueError, match=r"this trainer has begun a run; make a new one"):
        trainer.train(resume_from_checkpoint=str(tmp_path / "run" / "checkpoint-2"))
    assert lines(tmp_path / "other" / "metrics.jsonl")


@pytest.mark.parametrize("write", ["save_model", "save_state", "save_metrics"])
def test_what_a_script_wrote_is_not_given_up(tmp_path, write):
    make_trainer(tmp_path).train()
    trainer = make_trainer(tmp_path, output_dir=str(tmp_path / "other"))
    getattr(trainer, write)(*(("train", {"a": 1}) if write == "save_metrics" else ()))
    made = {path.name for path in (tmp_path / "other").iterdir()}
    with pytest.raises(ValueError, match=r"this trainer has begun a run; make a new one"):
        trainer.train(resume_from_checkpoint=str(tmp_path / "run" / "checkpoint-2"))
    assert made == {path.name for path in (tmp_path / "other").iterdir()} and len(made) > 3


def test_a_new_run_gives_its_folder_back(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    make_trainer(tmp_path).train()
    trainer = make_trainer(tmp_path, output_dir=None, max_steps=3)
    taken = trainer.log.dir
    assert taken.is_dir() and taken.parent.name == "runs"
    trainer.train(resume_from_checkpoint=str(tmp_path / "run" / "checkpoint-2"))
    assert trainer.log.dir == tmp_path / "run" and not taken.exists()


def test_a_run_that_has_begun_goes_on_from_nothing_else(tmp_path):
    trainer = make_trainer(tmp_path)
    trainer.step()
    with pytest.raises(ValueError, match=r"this trainer has begun a run; make a new one"):
        trainer.train(resume_from_checkpoint=True)

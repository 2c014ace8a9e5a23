"""The folder of a run, `train(resume_from_checkpoint=...)`, and several trainers in one process, as in a notebook."""

import pytest
import tiny
from resumed import assert_same_run
from runs import lines, make_trainer, share_of_a

pytestmark = pytest.mark.usefixtures("without_curves")


@pytest.mark.parametrize("resume, overwrite, stated", [(True, 0, 0), ("checkpoint-2", 1, 0), ("checkpoint-2", 0, 1)])
def test_train_resumes_from_a_checkpoint_bit_for_bit(tmp_path, resume, overwrite, stated):
    def make(name="run", **settings):
        settings |= {"lr_scheduler_type": "constant", "save_steps": 2, "dtype": "bfloat16"}
        model = tiny.model("llama", vocab_size=258, tie_word_embeddings=True)
        return make_trainer(tmp_path, model=model, output_dir=str(tmp_path / name), **settings)

    make(max_steps=2).train()
    make("whole", max_steps=4).train()
    resume = resume if resume is True else str(tmp_path / "run" / resume)
    settings = {"overwrite_output_dir": bool(overwrite), "resume_from_checkpoint": resume if stated else None}
    trainer = make(max_steps=4, **settings)
    assert trainer.train(resume_from_checkpoint=resume).global_step == 4
    assert_same_run(tmp_path / "run", tmp_path / "whole")
    assert [entry["step"] for entry in trainer.state.log_history] == [1, 2, 3, 4, 4]


def test_the_first_use_restores_the_checkpoint_of_the_settings(tmp_path):
    how = {"lr_scheduler_type": "constant"}
    make_trainer(tmp_path, max_steps=1, **how).train()
    trainer = make_trainer(tmp_path, resume_from_checkpoint="auto", **how)
    trainer.open()
    assert trainer.state.global_step == 1
    trainer.train()
    make_trainer(tmp_path, output_dir=str(tmp_path / "whole"), **how).train()
    assert_same_run(tmp_path / "run", tmp_path / "whole")


def test_overwrites_an_earlier_run_only_when_training_starts(tmp_path):
    make_trainer(tmp_path, max_steps=3).train()
    with pytest.raises(ValueError, match="is not empty"):
        make_trainer(tmp_path).train()
    with pytest.raises(ValueError, match="no column 'prompt'"):
        make_trainer(tmp_path, rows=[{"promt": "a"}], overwrite_output_dir=True).train()
    trainer = make_trainer(tmp_path, overwrite_output_dir=True)
    assert (tmp_path / "run" / "checkpoint-3").is_dir()
    trainer.train()
    assert [row["step"] for row in lines(tmp_path / "run")] == [1, 2]
    assert not (tmp_path / "run" / "checkpoint-3").exists()


def test_a_started_run_does_not_resume_another_checkpoint(tmp_path):
    make_trainer(tmp_path).train()
    trainer = make_trainer(tmp_path, output_dir=str(tmp_path / "other"))
    trainer.step()
    made = {path.name for path in (tmp_path / "other").iterdir()}
    with pytest.raises(ValueError, match="this trainer has begun a run"):
        trainer.train(resume_from_checkpoint=str(tmp_path / "run" / "checkpoint-2"))
    assert made == {path.name for path in (tmp_path / "other").iterdir()} and len(made) > 3


def test_a_wrong_checkpoint_does_not_stay_in_the_settings(tmp_path):
    make_trainer(tmp_path).log.close()  # a folder without a step is used again, as by a cell that is run again
    trainer = make_trainer(tmp_path)
    with pytest.raises(ValueError, match="no-such"):
        trainer.train(resume_from_checkpoint=str(tmp_path / "no-such"))
    assert trainer.train()["steps"] == 2


def test_two_trainers_in_one_process_cannot_share_a_folder(tmp_path):
    settings = {"resume_from_checkpoint": "auto"}

    def meddling(completions, **columns):
        with pytest.raises(ValueError, match=r"in use by another trainer of this process; let its train\(\) end"):
            make_trainer(tmp_path, overwrite_output_dir=True)
        return share_of_a(completions)

    first = make_trainer(tmp_path, **settings)
    with pytest.raises(ValueError, match=r"in use by another trainer of this process; .* with trainer.log.close"):
        make_trainer(tmp_path, **settings)
    first.log.close()
    second = make_trainer(tmp_path, meddling, **settings)
    assert second.train()["steps"] == 2
    for use in (first.train, first.step, second.train, second.step):
        with pytest.raises(ValueError, match=r"no longer holds output_dir .*resume_from_checkpoint='auto'"):
            use()
    assert make_trainer(tmp_path, **settings, max_steps=3).train()["steps"] == 3

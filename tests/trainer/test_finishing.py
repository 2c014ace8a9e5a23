"""What the end of a run leaves: its summary for scripts, the last entry of the log, and an upload."""

import json

import pytest
from runs import make_trainer

pytestmark = pytest.mark.usefixtures("without_curves")


def test_the_summary_and_the_last_entry_tell_of_the_whole_run(tmp_path):
    trainer = make_trainer(tmp_path)
    result = trainer.train()
    last = trainer.state.log_history[-1]
    assert json.loads((tmp_path / "run" / "summary.json").read_text()).items() >= result.items()
    assert (result["steps"], last["step"], last["epoch"]) == (2, 2, 2.0)
    losses = [entry["loss"] for entry in trainer.state.log_history[:-1]]
    assert last["train_loss"] == result.training_loss == pytest.approx(sum(losses) / len(losses))


@pytest.mark.parametrize("push", [False, True])
def test_a_run_uploads_where_it_is_told_to(tmp_path, monkeypatch, push):
    trainer, told = make_trainer(tmp_path, push_to_hub=push), []
    monkeypatch.setattr(trainer, "push_to_hub", lambda: told.append(trainer.state.global_step))
    trainer.train()
    assert told == [2] * push

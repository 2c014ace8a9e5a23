"""A run with tools that was stopped goes on to the last bit; and two ranks draw what one process draws."""

import pytest
from ranks import forked
from resumed import Crash, assert_same_run
from runs import lines
from tool_runs import OF_RANKS, Counter, make_trainer, patch

from fastgrpo.rollout.engine import RolloutEngine

pytestmark = pytest.mark.usefixtures("without_curves")
SETTINGS = {"max_steps": 4, "save_steps": 2, "logging_steps": 1, "environment_factory": Counter}


def test_a_stopped_run_with_an_environment_resumes_bit_for_bit(tmp_path, monkeypatch):
    patch(monkeypatch.setattr)
    trainer = make_trainer(tmp_path, name="whole", **SETTINGS)
    trainer.train()
    assert any(row["calls"] for row in lines(tmp_path / "whole", "samples.jsonl") if row["step"] == 4)
    steps, step = [], RolloutEngine.step

    def crashing(engine):
        if len(lines(tmp_path / "stopped")) == 3:
            steps.append(engine)
            if len(steps) == 8:
                raise Crash
        return step(engine)

    with monkeypatch.context() as patched:
        patched.setattr(RolloutEngine, "step", crashing)
        with pytest.raises(Crash):
            make_trainer(tmp_path, name="stopped", **SETTINGS).train()
    make_trainer(tmp_path, name="stopped", resume_from_checkpoint="auto", **SETTINGS).train()
    assert_same_run(tmp_path / "stopped", tmp_path / "whole")


@pytest.mark.slow
def test_two_ranks_draw_what_one_process_draws(tmp_path, monkeypatch):
    patch(monkeypatch.setattr)
    make_trainer(tmp_path, name="one", **OF_RANKS).train()
    (tmp_path / "ranks").mkdir()
    codes, said = forked("tool_runs.py", tmp_path / "ranks", tmp_path)("two")
    assert codes == [0, 0], "\n".join(said)
    one, two = (lines(tmp_path / name, "samples.jsonl") for name in ("one", "two"))
    assert any(row["calls"] for row in one)
    for mine, theirs in zip(one, two, strict=True):
        for call in (*mine["calls"], *theirs["calls"]):
            del call["latency_s"]
        assert mine.pop("logps") == pytest.approx(theirs.pop("logps"), abs=2e-4)
        assert mine == theirs

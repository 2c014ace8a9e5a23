"""The thread that writes checkpoints: steps go on beside it, its errors surface, and the best checkpoint stays."""

import threading

import pytest

from fastgrpo.config.settings import GRPOConfig
from fastgrpo.run.checkpoint import Checkpointer, checkpoints, verify
from fastgrpo.run.log import RunLog


class Saving:
    """A snapshot whose writing waits for a word and then does what it is told."""

    def __init__(self, error=None):
        self.error, self.go, self.thread = error, threading.Event(), None

    def write(self, path):
        self.thread = threading.current_thread()
        assert self.go.wait(30)
        if self.error:
            raise self.error
        (path / "weights").write_text("w")


def make_checkpointer(tmp_path, **settings):
    config = GRPOConfig(**{"output_dir": str(tmp_path / "run"), "save_steps": 2, "logging_steps": 1, **settings})
    log = RunLog(config)
    return Checkpointer(config, log), log


def test_when_a_checkpoint_is_due(tmp_path):
    every_other, _ = make_checkpointer(tmp_path / "a")
    at_the_end, _ = make_checkpointer(tmp_path / "b", save_steps=None)
    asked = [(step, step == 5) for step in range(6)]
    assert [every_other.due(*at) for at in asked] == [False, False, True, False, True, True]
    assert [at_the_end.due(*at) for at in asked] == [False] * 5 + [True]


def test_writing_goes_on_beside_the_steps_and_the_next_save_waits(tmp_path):
    checkpointer, log = make_checkpointer(tmp_path)
    first, second = Saving(), Saving()
    with log, checkpointer:
        checkpointer.save(2, lambda: first)  # returns although nothing is written yet
        checkpointer.check()
        assert checkpoints(log.dir) == {}
        threading.Timer(0.2, first.go.set).start()
        checkpointer.save(4, lambda: second)
        assert list(checkpoints(log.dir)) == [2]
        threading.Timer(0.2, second.go.set).start()
    assert list(checkpoints(log.dir)) == [2, 4]
    assert first.thread is second.thread is not threading.current_thread()


def test_the_newest_good_one_is_told_after_a_save_under_way(tmp_path):
    checkpointer, log = make_checkpointer(tmp_path)
    good, bad = Saving(), Saving(OSError(28, "No space left on device"))
    with log, pytest.raises(ValueError, match="checkpoint-4 could not be written"), checkpointer:
        assert checkpointer.newest is None
        checkpointer.save(2, lambda: good)
        threading.Timer(0.2, good.go.set).start()
        assert checkpointer.newest == log.dir / "checkpoint-2"
        checkpointer.save(4, lambda: bad)
        threading.Timer(0.2, bad.go.set).start()
        assert checkpointer.newest == log.dir / "checkpoint-2"


def test_an_error_of_the_thread_names_the_last_good_one(tmp_path):
    checkpointer, log = make_checkpointer(tmp_path)
    good, bad = Saving(), Saving(OSError(28, "No space left on device"))
    good.go.set(), bad.go.set()
    with log, checkpointer:
        checkpointer.save(2, lambda: good)
        checkpointer.save(4, lambda: bad)
        checkpointer._thread.submit(lambda: None).result()  # until the save is through
        with pytest.raises(
            ValueError, match=r"checkpoint-4 could not .*No space left.*checkpoint-2 is the newest good"
        ):
            checkpointer.check()
    verify(log.dir / "checkpoint-2")
    assert list(checkpoints(log.dir)) == [2]


def test_the_error_that_ends_a_run_is_not_hidden_by_one_of_the_thread(tmp_path, capsys):
    checkpointer, log = make_checkpointer(tmp_path)
    bad = Saving(OSError(28, "No space left on device"))
    bad.go.set()
    with pytest.raises(RuntimeError, match="mine"), log, checkpointer:
        checkpointer.save(2, lambda: bad)
        raise RuntimeError("mine")
    assert "No space left on device" in capsys.readouterr().out


@pytest.mark.parametrize("greater, kept", [(None, [4, 8]), (False, [2, 8])])
def test_the_best_one_stays(tmp_path, greater, kept):
    checkpointer, log = make_checkpointer(
        tmp_path, save_total_limit=1, metric_for_best_model="reward", greater_is_better=greater
    )
    with log, checkpointer:
        for step, reward in ((2, 0.1), (4, 0.9), (6, 0.9), (8, 0.5)):
            log.step(step, {"reward": reward})
            saving = Saving()
            saving.go.set()
            checkpointer.save(step, lambda saving=saving: saving)
    assert list(checkpoints(log.dir)) == kept
    assert checkpointer.state_dict()["best"]["step"] == kept[0]


def test_what_is_measured_after_the_save_of_its_step_counts(tmp_path, capsys):
    """A stop saves before it evaluates; the run that goes on evaluates the step whose checkpoint is there."""
    checkpointer, log = make_checkpointer(tmp_path, save_total_limit=1, metric_for_best_model="reward")
    with log, checkpointer:
        for step, reward in ((2, None), (2, 0.9), (4, 0.5), (6, 0.6)):
            if reward is not None:
                log.step(step, {"reward": reward})
            saving = Saving()
            saving.go.set()
            checkpointer.save(step, lambda saving=saving: saving)
    assert list(checkpoints(log.dir)) == [2, 6] and checkpointer.state_dict()["best"]["step"] == 2
    assert capsys.readouterr().out.count("cannot be the best") == 1


def test_a_checkpoint_whose_metric_was_not_measured_is_not_the_best(tmp_path, capsys):
    checkpointer, log = make_checkpointer(tmp_path, metric_for_best_model="reward")
    with log, checkpointer:
        for step, values in ((2, {"reward": 1.0}), (4, {"kl": 9.0})):
            log.step(step, values)
            saving = Saving()
            saving.go.set()
            checkpointer.save(step, lambda saving=saving: saving)
    assert checkpointer.best["step"] == 2
    assert "step 4: reward was not measured" in capsys.readouterr().out


def test_metrics_that_do_not_exist_are_refused(tmp_path):
    def log(metric):
        return RunLog(GRPOConfig(output_dir=str(tmp_path / "run"), metric_for_best_model=metric, eval_steps=500))

    with pytest.raises(ValueError, match="unknown metric 'eval/acuracy'; did you mean 'eval/accuracy'"):
        log("eval/acuracy")
    assert not (tmp_path / "run").exists()
    log("rewards/correctness/mean").close()


@pytest.mark.parametrize(
    "settings, match",
    [
        ({"metric_for_best_model": "eval/accuracy"}, "eval_steps=None"),
        ({"metric_for_best_model": "eval/accuracy", "eval_steps": 3, "save_steps": 4}, "multiple"),
        ({"metric_for_best_model": "reward", "logging_steps": 3, "save_steps": 4}, "multiple"),
        ({"greater_is_better": True}, "greater_is_better has an effect only where metric_for_best_model is set"),
        ({"resume_from_checkpoint": "auto"}, "needs output_dir"),
        ({"resume_from_checkpoint": "auto", "output_dir": "x", "overwrite_output_dir": True}, "choose one"),
        ({"save_total_limit": 0}, "save_total_limit must be at least 1"),
    ],
)
def test_settings_that_contradict(settings, match):
    with pytest.raises(ValueError, match=match):
        GRPOConfig(**settings)

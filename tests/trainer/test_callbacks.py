"""transformers' callbacks in our loop: events in their order, decisions, state over a checkpoint, and ranks."""

import json
from types import SimpleNamespace

import pytest
from runs import PROMPTS, lines, make_trainer, share_of_a
from transformers import EarlyStoppingCallback, PrinterCallback, ProgressCallback, TrainerCallback
from transformers.integrations import TensorBoardCallback

from fastgrpo.run.checkpoint import read_state

pytestmark = pytest.mark.usefixtures("without_curves")


class Recorder(TrainerCallback):
    def __init__(self):
        self.seen, self.got = [], {}

    def __getattribute__(self, name):
        if not name.startswith("on_"):
            return super().__getattribute__(name)

        def note(args, state, control, **given):
            self.seen.append((name, state.global_step))
            self.got[name] = given

        return note


def test_events_have_transformers_order_and_arguments(tmp_path):
    recorder = Recorder()
    settings = {"eval_rows": PROMPTS[:2], "eval_steps": 1, "save_steps": 1, "eval_on_start": False}
    trainer = make_trainer(tmp_path, callbacks=[recorder], **settings)
    assert recorder.seen == [("on_init_end", 0)]
    trainer.train()
    step = ["on_step_begin", "on_step_end", "on_log"]
    # every step of these four prompts is an epoch
    steps = ["on_epoch_begin", *step, "on_epoch_end", "on_log", "on_evaluate", "on_save"]
    events = [event for event, _ in recorder.seen]
    assert events == ["on_init_end", "on_train_begin", *steps, *steps, "on_log", "on_train_end"]
    assert [at for event, at in recorder.seen if event == "on_step_begin"] == [0, 1]
    assert [at for event, at in recorder.seen if event == "on_save"] == [1, 2]
    given = recorder.got["on_step_end"]
    assert given["model"] is trainer.model and given["processing_class"] is trainer.tokenizer
    assert given["optimizer"].param_groups and given["lr_scheduler"] is trainer.schedule
    assert {"eval_reward", "eval_accuracy", "eval_runtime", "epoch"} <= set(recorder.got["on_evaluate"]["metrics"])
    assert recorder.got["on_log"]["logs"]["train_loss"] is not None


class Wishes(TrainerCallback):
    def __init__(self, flag, step=1, event="on_step_end"):
        self.flag, self.step = flag, step
        setattr(self, event, self.wish)

    def wish(self, args, state, control, **_):
        if state.global_step == self.step:
            setattr(control, self.flag, True)


@pytest.mark.parametrize("event", ["on_step_end", "on_evaluate"])
def test_stopping_early_ends_a_run_like_its_last_step(tmp_path, event):
    stop, run, recorder = Wishes("should_training_stop", event=event), tmp_path / "run", Recorder()
    settings = {"max_steps": 5, "logging_steps": 4, "callbacks": [stop, TensorBoardCallback, recorder]}
    make_trainer(tmp_path, eval_rows=PROMPTS[:2], eval_steps=1, **settings).train()
    assert (run / "checkpoint-1").is_dir() and json.loads((run / "summary.json").read_text())["steps"] == 1
    logged = [{"reward", "eval/accuracy"} & set(row) for row in lines(run)]
    assert sorted(map(list, logged)) == [["eval/accuracy"], ["eval/accuracy"], ["reward"]]
    assert recorder.seen.count(("on_log", 1)) == 3 and ("on_epoch_end", 1) in recorder.seen


def test_control_flags_take_effect_after_their_step(tmp_path):
    flags = ("should_save", "should_evaluate", "should_log")
    callbacks = [Wishes(flag, step) for step, flag in enumerate(flags, 1)]
    settings = {"eval_rows": PROMPTS[:2], "max_steps": 5, "logging_steps": 5, "eval_on_start": False}
    make_trainer(tmp_path, callbacks=callbacks, **settings).train()
    run = tmp_path / "run"
    assert [step for step in range(1, 5) if (run / f"checkpoint-{step}").exists()] == [1]
    for name, steps in (("eval/accuracy", [2, 5]), ("reward", [3, 5])):
        assert [row["step"] for row in lines(run) if name in row] == steps


def falling(completions, trainer_state, **_):
    return [value - trainer_state.global_step for value in share_of_a(completions)]


@pytest.mark.parametrize("prefix, rows", [("eval", PROMPTS[:2]), ("eval_math", {"math": PROMPTS[:2]})])
def test_early_stopping_continues_in_a_resumed_run(tmp_path, prefix, rows):
    def make(**settings):
        return make_trainer(
            tmp_path, falling, eval_rows=rows, eval_steps=1, save_steps=1, eval_on_start=True,
            metric_for_best_model=f"{prefix}/reward", callbacks=[EarlyStoppingCallback(early_stopping_patience=2)],
            lr_scheduler_type="constant", **settings,
        )  # fmt: skip

    make(max_steps=2).train()
    kept = read_state(tmp_path / "run" / "checkpoint-2")["stateful_callbacks"]
    assert kept["EarlyStoppingCallback"]["attributes"] == {"early_stopping_patience_counter": 1}
    resumed, recorder = make(max_steps=6, resume_from_checkpoint="auto"), Recorder()
    resumed.add_callback(recorder)
    assert resumed.train().global_step == 3  # the second worse one in a row
    assert ("on_train_begin", 2) in recorder.seen  # after the state was restored, as in transformers
    assert resumed.state.best_global_step == 1
    assert resumed.state.best_model_checkpoint == str(tmp_path / "run" / "checkpoint-1")
    name = f"{prefix}_reward"
    history = {entry["step"]: entry[name] for entry in resumed.state.log_history if name in entry}
    assert list(history) == [0, 1, 2, 3] and resumed.state.best_metric == history[1] > history[2] > history[3]
    again = make(max_steps=6, resume_from_checkpoint="auto")  # as in transformers, it goes on until the next worse one
    assert again.train().global_step == 4
    turned = make(max_steps=6, resume_from_checkpoint=str(tmp_path / "run" / "checkpoint-2"), greater_is_better=False)
    assert turned.train().global_step == turned.state.best_global_step == 6


def test_callbacks_are_added_popped_and_removed(tmp_path):
    trainer = make_trainer(tmp_path, callbacks=[PrinterCallback])
    trainer.add_callback(ProgressCallback())
    assert isinstance(trainer.pop_callback(ProgressCallback), ProgressCallback)
    trainer.remove_callback(PrinterCallback)
    assert trainer.callbacks.handler.callbacks == [] and trainer.pop_callback(Recorder) is None
    with pytest.raises(ValueError, match=r"callbacks: list is not a transformers.TrainerCallback"):
        trainer.add_callback([])


def test_control_flags_of_one_rank_apply_to_all(tmp_path):
    trainer = make_trainer(tmp_path)
    other = SimpleNamespace(size=2, gather=lambda flags, what: [flags, [False, False, True, False, False]])
    other.any = lambda flag, what: True
    trainer.callbacks.ranks, control = other, trainer.callbacks.control
    trainer.callbacks.begin()
    control.should_log = True
    trainer.callbacks.agree("a step")
    assert (control.should_save, control.should_log, control.should_training_stop) == (True, True, False)

"""What a run logs: how steps become lines, where the lines go, and how a resumed run goes back to its checkpoint."""

import json
import math
import sys

import pytest

from fastgrpo.config.settings import GRPOConfig
from fastgrpo.run import log as module
from fastgrpo.run.log import RunLog


def make_log(tmp_path, **settings):
    return RunLog(GRPOConfig(**{"output_dir": str(tmp_path / "run"), "logging_steps": 2, **settings}))


def lines(tmp_path, name="metrics.jsonl"):
    return [json.loads(line) for line in (tmp_path / "run" / name).read_text().splitlines()]


def test_metrics_are_means_over_logging_steps(tmp_path):
    with make_log(tmp_path) as log:
        for step, reward in enumerate([1.0, 2.0, 5.0], 1):
            log.step(step, {"reward": reward, "num_tokens": 10 * step}, last=step == 3)
    assert lines(tmp_path) == [
        {"step": 2, "reward": 1.5, "num_tokens": 20},
        {"step": 3, "reward": 5.0, "num_tokens": 30},
    ]


def test_the_first_step_has_a_line_where_it_is_asked_for(tmp_path):
    with make_log(tmp_path, logging_steps=3, logging_first_step=True) as log:
        for step in range(1, 7):
            log.step(step, {"reward": float(step)})
    assert [row["step"] for row in lines(tmp_path)] == [1, 3, 6]
    assert [row["reward"] for row in lines(tmp_path)] == [1.0, 2.5, 5.0]


@pytest.mark.parametrize(
    "name, values, logged",
    [
        ("ratio/max", [3.0, 9.0, 1.0], 9.0),
        ("rollout/logp_gap_max", [0.1, 0.3, 0.2], 0.3),
        ("memory/peak_gib", [2.0, 1.0, 1.0], 2.0),
        ("completions/max_length", [4, 7, 5], 7),
        ("completions/min_length", [4, 2, 5], 2),
        ("skipped_updates", [1, 0, 2], 3),
        ("rewards/judge/errors", [1, 0, 2], 3),
        ("api/errors", [1, 0, 2], 1),
        ("learning_rate", [3e-6, 2e-6, 1e-6], 1e-6),
        ("curriculum/level", [0, 1, 1], 1),
        ("completions/mean_length", [3.0, 4.0, 8.0], 5.0),
    ],
)
def test_not_every_metric_is_a_mean(tmp_path, name, values, logged):
    with make_log(tmp_path, logging_steps=3) as log:
        for step, value in enumerate(values, 1):
            log.step(step, {name: value})
    assert lines(tmp_path) == [{"step": 3, name: logged}]


def test_a_step_that_did_not_measure_a_metric_does_not_count_in_its_mean(tmp_path):
    with make_log(tmp_path, logging_steps=3) as log:
        for step, values in enumerate([{"kl": 1.0}, {}, {"kl": 2.0}], 1):
            log.step(step, values)
    assert lines(tmp_path) == [{"step": 3, "kl": 1.5}]


def test_a_line_is_on_the_disk_at_once_and_the_latest_value_is_known(tmp_path):
    with make_log(tmp_path) as log:
        log.write(0, {"eval/accuracy": 0.25})
        log.samples([{"step": 1, "completion": "naïve"}])
        assert lines(tmp_path) == [{"step": 0, "eval/accuracy": 0.25}]
        assert "naïve" in (tmp_path / "run" / "samples.jsonl").read_text(encoding="utf-8")
        log.step(1, {"reward": 1.0})
        assert "reward" not in log.latest
        log.step(2, {"reward": 2.0})
        assert log.latest == {"eval/accuracy": (0, 0.25), "eval_accuracy": (0, 0.25), "reward": (2, 1.5)}


def test_every_line_is_reported_too(tmp_path, monkeypatch):
    reported = []

    class Listener:
        def __init__(self, config, folder, checkpoint):
            self.log, self.close = (
                lambda step, values: reported.append((step, values)),
                lambda: reported.append("closed"),
            )

    monkeypatch.setitem(module.TRACKERS, "tensorboard", Listener)
    with make_log(tmp_path, report_to="tensorboard") as log:
        log.step(1, {"reward": 1.0})
        log.step(2, {"reward": 2.0})
        log.write(2, {"eval/accuracy": 0.5, "eval/time": 1.0})
    assert reported == [
        (2, {"train/reward": 1.5}), (2, {"eval/accuracy": 0.5, "eval/runtime": 1.0}), "closed",
    ]  # fmt: skip


@pytest.mark.parametrize(
    "name, package", [("wandb", "wandb"), ("trackio", "trackio"), ("tensorboard", "torch.utils.tensorboard")]
)
def test_a_package_that_is_missing_is_named(tmp_path, monkeypatch, name, package):
    monkeypatch.setitem(sys.modules, package, None)  # import raises ImportError
    with pytest.raises(ValueError, match=f"report_to {name} needs a package that is missing: pip install {name}"):
        make_log(tmp_path, report_to=name)
    make_log(tmp_path).close()  # the run that did not begin left nothing in the way of the next one


def test_what_was_opened_before_a_tracker_failed_is_closed(tmp_path, monkeypatch):
    opened, ended = [], []

    class First:
        def __init__(self, config, folder, checkpoint):
            folder.claim("tensorboard").mkdir()

        def close(self):
            ended.append((tmp_path / "run" / "tensorboard").is_dir())  # what it made is there until it has ended
            raise RuntimeError("it cannot end")

    def second(config, folder, checkpoint):
        raise ValueError("no second tracker")

    def appending(path, mode, **how):
        opened.append(open(path, mode, **how))  # noqa: SIM115
        return opened[-1]

    monkeypatch.setitem(module.TRACKERS, "tensorboard", First)
    monkeypatch.setitem(module.TRACKERS, "wandb", second)
    monkeypatch.setattr(module, "open", appending, raising=False)
    with pytest.raises(RuntimeError, match="it cannot end") as error:
        make_log(tmp_path, report_to=("tensorboard", "wandb"))
    assert str(error.value.__context__) == "no second tracker"
    assert ended == [True] and len(opened) == 3 and all(file.closed for file in opened)
    make_log(tmp_path).close()  # the folder is free and empty


def test_steps_before_an_error_are_logged(tmp_path):
    with pytest.raises(RuntimeError), make_log(tmp_path, logging_steps=10) as log:
        log.step(1, {"reward": 1.0})
        raise RuntimeError
    assert lines(tmp_path) == [{"step": 1, "reward": 1.0}]


def test_a_log_goes_back_to_where_it_stood_at_a_checkpoint(tmp_path):
    with make_log(tmp_path) as log:
        log.step(2, {"reward": 2.0})
        log.step(3, {"reward": 3.0})
        log.samples([{"step": 2}])
        log.started -= 1000
        state = json.loads(json.dumps(log.state_dict()))  # it travels through trainer_state.json
        assert 1000 <= state["wall_seconds"] < 1100
        log.step(4, {"reward": 100.0})
        log.samples([{"step": 4}])
        log.started += 500
        (tmp_path / "run" / "config.json").write_text("{}")
        log.load_state_dict(state)
        assert lines(tmp_path) == [{"step": 2, "reward": 2.0}] and lines(tmp_path, "samples.jsonl") == [{"step": 2}]
        log.step(4, {"reward": 5.0})
        log.samples([{"step": 3}])
        assert 1000 <= log.state_dict()["wall_seconds"] < 1100
    assert lines(tmp_path) == [{"step": 2, "reward": 2.0}, {"step": 4, "reward": 4.0}]
    assert lines(tmp_path, "samples.jsonl") == [{"step": 2}, {"step": 3}]
    config = json.loads((tmp_path / "run" / "config.json").read_text())
    assert config["logging_steps"] == 2 and config["output_dir"] == str(tmp_path / "run")


def test_lines_that_were_lost_since_a_checkpoint_are_reported(tmp_path, capsys):
    with make_log(tmp_path) as log:
        log.write(2, {"reward": 2.0})
        state = log.state_dict()
        (tmp_path / "run" / "metrics.jsonl").write_text("")
        log.load_state_dict(state)
    out = capsys.readouterr().out
    assert "metrics.jsonl has lost lines" in out and "samples.jsonl" not in out


def test_the_settings_decide_what_the_terminal_shows(tmp_path, capsys):
    with make_log(tmp_path, disable_tqdm=True) as log:
        assert not log.terminal.bars and not log.terminal.quiet
        log.terminal.progress(4, "GRPO", done=1)
        log.terminal.advance(2, reward=0.123456)
        log.say("a line")
        assert (log.terminal.done, log.terminal.total) == (3, 4)
    assert log.terminal.bar is None
    with make_log(tmp_path / "quiet", quiet=True) as log:
        log.say("a line")
        log.say("warning: a line")
    out, err = capsys.readouterr()
    assert out == "a line\nwarning: a line\n" and not err


def test_lines_are_json_whatever_the_numbers_and_texts_are(tmp_path):
    """JSON has no NaN and no infinity, and UTF-8 has no lone surrogates."""
    log = RunLog(GRPOConfig(output_dir=str(tmp_path / "run"), logging_steps=1))
    with log:
        log.step(1, {"loss": math.nan, "kl": math.inf, "reward": 0.5})
        log.samples([{"step": 1, "completion": "a\ud800ü", "extras": {"deep": [1.0, -math.inf, (math.nan,)]}}])

    def refuse(constant):
        raise AssertionError(constant)

    metrics, samples = (
        json.loads((tmp_path / "run" / name).read_bytes().decode("utf-8"), parse_constant=refuse)
        for name in ("metrics.jsonl", "samples.jsonl")
    )
    assert metrics == {"step": 1, "loss": None, "kl": None, "reward": 0.5}
    assert samples == {"step": 1, "completion": "a\ud800ü", "extras": {"deep": [1.0, None, [None]]}}

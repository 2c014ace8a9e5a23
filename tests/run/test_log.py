"""What a run logs: how steps become lines, under which names, where they go, and how a resumed run goes back."""

import json
import math
import sys
from unittest.mock import MagicMock, call

import pandas
import pytest
from runs import lines

from fastgrpo.config.settings import GRPOConfig
from fastgrpo.ranks import Ranks
from fastgrpo.run import log as module
from fastgrpo.run import metrics
from fastgrpo.run.log import FollowedLog, RunLog, columns_of, forget_after, open_log, write_parquet
from fastgrpo.run.metrics import METRICS, entry


def make_log(tmp_path, **settings):
    return RunLog(GRPOConfig(**{"output_dir": str(tmp_path / "run"), "logging_steps": 2, **settings}))


def test_metrics_are_means_over_logging_steps(tmp_path):
    with make_log(tmp_path, logging_steps=3, logging_first_step=True) as log:
        for step in range(1, 9):
            log.step(step, {"reward": float(step), "num_tokens": 10 * step}, last=step == 8)
    assert lines(tmp_path / "run") == [
        {"step": step, "reward": mean, "num_tokens": 10 * step} for step, mean in ((1, 1), (3, 2.5), (6, 5), (8, 7.5))
    ]


@pytest.mark.parametrize("name, values, logged", [
    ("ratio/max", [3.0, 9.0, 1.0], 9.0), ("sampler/logp_gap_max", [0.1, 0.3, 0.2], 0.3),
    ("completions/min_length", [4, 2, 5], 2), ("skipped_updates", [1, 0, 2], 3),
    ("rewards/judge/errors", [1, 0, 2], 3), ("api/errors", [1, 0, 2], 1),
    ("tools/calc/calls", [4, 0, 2], 6), ("tools/calc/latency_s", [4.0, None, 2.0], 3.0),
    ("learning_rate", [3e-6, 2e-6, 1e-6], 1e-6), ("curriculum/level", [0, 1, 1], 1),
    ("completions/mean_length", [3.0, 4.0, 8.0], 5.0), ("hard", [math.nan, 2.0, 3.0], 2.5),
    ("kl", [1.0, None, 2.0], 1.5),  # not measured in one step
])  # fmt: skip
def test_not_every_metric_is_a_mean(tmp_path, name, values, logged):
    with make_log(tmp_path, logging_steps=3) as log:
        for step, value in enumerate(values, 1):
            log.step(step, {} if value is None else {name: value})
    assert lines(tmp_path / "run") == [{"step": 3, name: logged}]
    assert set(metrics._REDUCED) <= set(METRICS)
    assert metrics.meaning("eval_easy/pass@4") == METRICS["eval/pass@{k}"] and metrics.meaning("mine") == ""


def test_a_line_is_on_the_disk_at_once_and_the_latest_value_is_known(tmp_path):
    with make_log(tmp_path) as log:
        log.write(0, {"eval/accuracy": 0.25})
        assert lines(tmp_path / "run") == [{"step": 0, "eval/accuracy": 0.25}]
        log.step(1, {"reward": 1.0})
        log.step(2, {"reward": 2.0})
        assert log.latest == {"eval/accuracy": (0, 0.25), "eval_accuracy": (0, 0.25), "reward": (2, 1.5)}


def test_steps_before_an_error_are_logged(tmp_path):
    with pytest.raises(RuntimeError), make_log(tmp_path) as log:
        log.step(1, {"reward": 1.0})
        raise RuntimeError
    assert lines(tmp_path / "run") == [{"step": 1, "reward": 1.0}]


def test_every_line_goes_to_the_trackers(tmp_path, monkeypatch):
    tracker = MagicMock()
    monkeypatch.setitem(module.TRACKERS, "tensorboard", lambda *_: tracker)
    with make_log(tmp_path, report_to="tensorboard") as log:
        log.step(1, {"reward": 1.0})
        log.step(2, {"reward": 2.0})
        log.write(2, {"eval/accuracy": 0.5, "eval/time": 1.0})
    assert tracker.mock_calls == [
        call.log(2, {"train/reward": 1.5}), call.log(2, {"eval/accuracy": 0.5, "eval/runtime": 1.0}), call.close(False),
    ]  # fmt: skip


def test_a_failed_start_leaves_the_folder_free(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "trackio", None)
    with pytest.raises(ModuleNotFoundError):
        make_log(tmp_path, report_to="trackio")
    make_log(tmp_path).close()


def test_a_log_goes_back_to_where_it_stood_at_a_checkpoint(tmp_path, capsys):
    with make_log(tmp_path) as log:
        log.step(2, {"reward": 2.0})
        log.step(3, {"reward": 3.0})
        log.samples([{"step": 2}])
        log.started -= 1000
        state = json.loads(json.dumps(log.state_dict()))  # it travels through trainer_state.json
        log.step(4, {"reward": 100.0})
        log.samples([{"step": 4}])
        log.started += 500
        (tmp_path / "run" / "config.json").unlink()
        log.load_state_dict(state)
        assert json.loads((tmp_path / "run" / "config.json").read_text())["logging_steps"] == 2
        assert lines(tmp_path / "run") == [{"step": 2, "reward": 2.0}]
        assert lines(tmp_path / "run", "samples.jsonl") == [{"step": 2}]
        log.step(4, {"reward": 5.0})
        log.samples([{"step": 3}])
        assert 1000 <= log.state_dict()["wall_seconds"] < 1100
        assert lines(tmp_path / "run") == [{"step": 2, "reward": 2.0}, {"step": 4, "reward": 4.0}]
        assert lines(tmp_path / "run", "samples.jsonl") == [{"step": 2}, {"step": 3}]
        (tmp_path / "run" / "metrics.jsonl").write_text("")
        log.load_state_dict(state)
    told = capsys.readouterr().out
    assert "metrics.jsonl has lost lines" in told and "samples.jsonl" not in told


def test_lines_are_json_whatever_the_numbers_and_texts_are(tmp_path):
    """JSON has no NaN and no infinity, and UTF-8 has no lone surrogates."""
    with make_log(tmp_path, logging_steps=1) as log:
        log.step(1, {"loss": math.nan, "kl": math.inf, "reward": 0.5})
        log.samples([{"step": 1, "completion": "a\ud800ü", "extras": {"deep": [1.0, -math.inf, (math.nan,)]}}])

    steps, samples = (
        json.loads((tmp_path / "run" / name).read_bytes().decode("utf-8"), parse_constant=pytest.fail)
        for name in ("metrics.jsonl", "samples.jsonl")
    )
    assert steps == {"step": 1, "loss": None, "kl": None, "reward": 0.5}
    assert samples == {"step": 1, "completion": "a\ud800ü", "extras": {"deep": [1.0, None, [None]]}}


# The names of TRL, and what `train` returns.
@pytest.mark.parametrize("values, made", [
    ({"eval_a/reward": 1.0, "eval/reward": 2.0}, {"eval_a_reward": 1.0, "eval_reward": 2.0}),
    ({"eval/reward": 1.0, "eval/sampled/reward": 0.5}, {"eval_reward": 0.5}),  # sampled before greedy
    ({"test/accuracy": 0.5, "test/time": 1.0}, {"test_accuracy": 0.5, "test_runtime": 1.0}),
    # what is logged in training keeps its name
    ({"time/loss": 1.0, "time/reward": 2.0, "loss": 3.0, "rewards/length/mean": 1.0, "learning_rate": 0.1}, None),
])  # fmt: skip
def test_an_entry_of_the_history_has_trls_names(values, made):
    assert entry(3, values | {"epoch": 0.5}) == (values if made is None else made) | {"epoch": 0.5, "step": 3}


def test_the_history_up_to_a_checkpoint_is_read_back(tmp_path):
    path = tmp_path / "metrics.jsonl"
    known = '{"step": 1, "loss": 2.0}\nspoilt\n{"step": 3, "eval/reward": null}\n'
    path.write_text(known + '{"step": 4, "loss": 9.0}\n')
    log = FollowedLog(GRPOConfig(), tmp_path, None)
    log.load_state_dict({"pending": [], "metrics_bytes": len(known)})
    assert log.history == [{"loss": 2.0, "step": 1}, {"eval_reward": None, "step": 3}]
    assert log.latest == {"loss": (1, 2.0)}


# Ranks other than 0 write and print nothing.
def test_the_other_ranks_get_the_folder_that_rank_0_claimed(tmp_path):
    config = GRPOConfig(output_dir=str(tmp_path / "run"))
    other = Ranks(1, 2)
    logs = [open_log(config)]
    told = tmp_path / "run", None, (tmp_path / "run" / ".lock").read_text()
    other.from_lead, other.gather = lambda value, what: told, lambda value, what: [value]
    logs.append(open_log(config, ranks=other))
    assert [type(log) for log in logs] == [RunLog, FollowedLog] and logs[1].dir == logs[0].dir
    for log in logs:  # all refuse to go on once the run has ended
        log.close()
        for go_on in (log.folder.check, log.__enter__):
            with pytest.raises(ValueError, match="no longer holds output_dir"):
                go_on()


def test_the_other_ranks_write_nothing_and_remember_the_metrics(tmp_path, capfd):
    with FollowedLog(GRPOConfig(logging_steps=2), tmp_path, None) as log:
        log.say("this is not shown")
        log.samples([{"step": 1}])
        log.load_state_dict({"pending": [[3, {"reward": 4.0}]], "metrics_bytes": 0})
        log.step(4, {"reward": 2.0})
        assert log.latest == {"reward": (4, 3.0)}
        assert log.folder.claim("merged") == tmp_path / "merged"
    assert not list(tmp_path.iterdir()) and capfd.readouterr() == ("", "")


# The completions of a logged step: as columns, as parquet, and in the terminal.
LINE = {
    "step": 5, "group": 0, "prompt": "1+1=", "completion": "2", "rewards": {"right": 1.0}, "advantage": 0.5,
    "finish_reason": "stop", "tokens": 2, "clipped": 0.0, "token_ends": [1, 1], "logps": [-0.1, -0.2],
}  # fmt: skip
TALK = {
    **LINE, "prompt": [{"role": "user", "content": "1+1?"}], "completion": [{"role": "assistant", "content": "2"}],
    "rewards": {"right": None}, "solution": "2",
}  # fmt: skip


def test_the_columns_are_those_of_trl():
    columns = columns_of([LINE, {**LINE, "rewards": {"right": None, "style": 0.25}, "solution": "2"}])
    assert columns == {
        "step": [5, 5], "prompt": ["1+1=", "1+1="], "completion": ["2", "2"], "right": [1.0, None],
        "style": [None, 0.25], "solution": [None, "2"], "advantage": [0.5, 0.5],
    }  # fmt: skip
    columns = columns_of([{**LINE, "rewards": {"right": 1.0, "step": 0.5}, "right": "logged"}])
    # a name of two columns hides neither
    assert {
        "right": [1.0], "right (logged)": ["logged"], "step": [5], "step (reward)": [0.5],
    }.items() <= columns.items()  # fmt: skip


def test_pandas_reads_the_completions(tmp_path):
    path, columns = write_parquet(tmp_path, 5, columns_of([LINE, LINE])), columns_of([LINE, LINE])
    assert [file.name for file in tmp_path.iterdir()] == [path.name] == ["completions_00005.parquet"]
    assert pandas.read_parquet(path).to_dict("list") == columns
    talk = pandas.read_parquet(write_parquet(tmp_path, 6, columns_of([TALK])))
    assert list(talk["prompt"][0]) == TALK["prompt"] and talk["right"].isna().all()


@pytest.mark.parametrize("odd", [[{}], [1, "a", {"b": [None]}]])
def test_values_that_parquet_has_no_type_for_are_json(tmp_path, odd):
    rows = [{**LINE, "completion": "\ud800", "odd": value} for value in odd]
    read = pandas.read_parquet(write_parquet(tmp_path, 5, columns_of(rows)))
    assert [json.loads(value) for value in read["odd"]] == odd
    assert [json.loads(value) for value in read["completion"]] == ["\ud800"] * len(odd)


def test_completions_after_a_checkpoint_are_deleted(tmp_path):
    folder = tmp_path / "completions"
    for step in (2, 4, 100000):
        write_parquet(folder, step, columns_of([LINE]))
    kept = ["completions_00002.parquet", "completions_mine.parquet", "completions_mine.part"]
    for name in (*kept[1:], "completions_00001.part", "completions_00004.part"):  # the last two are of a crash
        (folder / name).touch()
    forget_after(folder, 2)
    assert sorted(path.name for path in folder.iterdir()) == kept
    forget_after(tmp_path / "none", 2)

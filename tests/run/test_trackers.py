"""What trackers are told of a run, read back from what they write: trackio's database and W&B's offline file."""

import json
import os
import sqlite3
import subprocess
import sys
from types import SimpleNamespace

import pytest
import wandb_file
from paths import ROOT

from fastgrpo.run.trackers import KNOWN, named

# A run of two logged steps, and the same run once more from its checkpoint of step 2.
SCRIPT = """
import sys
from pathlib import Path
from fastgrpo.config.settings import GRPOConfig
from fastgrpo.run.folder import RunFolder
from fastgrpo.run.trackers import TRACKERS

path, name = Path(sys.argv[1]), sys.argv[2]
path.mkdir()
for checkpoint, steps in ((None, (2, 4)), (path / "checkpoint-2", (4, 6))):
    folder = RunFolder(path)
    tracker = TRACKERS[name](GRPOConfig(report_to=name, project="sums", quiet=True), folder, checkpoint)
    for step in steps:
        tracker.log(step, {"train/reward": step / 10, "eval/accuracy": 0.5})
        tracker.completions(step, {"step": [step] * 2, "prompt": ["1+1=", "2+2="], "right": [1.0, None]})
    tracker.close()
    folder.close()
"""


@pytest.fixture(scope="module", params=["trackio", "wandb"])
def told(request, tmp_path_factory):
    """The folder of the run, and where the tracker's files are."""
    folder = tmp_path_factory.mktemp(request.param)
    env = {**os.environ, "TRACKIO_DIR": str(folder / "trackio"), "WANDB_MODE": "offline", "HF_HUB_OFFLINE": "1",
           "PYTHONPATH": str(ROOT), "WANDB_CACHE_DIR": str(folder), "WANDB_CONFIG_DIR": str(folder),
           "WANDB_DATA_DIR": str(folder)}  # fmt: skip
    command = [sys.executable, "-c", SCRIPT, str(folder / "run"), request.param]
    done = subprocess.run(command, env=env, capture_output=True, text=True, cwd=folder, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    return SimpleNamespace(name=request.param, run=folder / "run", files=folder, said=done.stdout)


def trackio_rows(folder):
    """(id of the run, its name, the step, what was logged) of every call."""
    with sqlite3.connect(folder / "trackio" / "sums.db") as database:
        rows = database.execute("select run_id, run_name, step, metrics from metrics order by id").fetchall()
    return [(run, name, step, json.loads(text)) for run, name, step, text in rows]


def wandb_rows(run):
    """The same of W&B, whose steps are a metric; a table lies in a file of its own."""
    found = []
    for path in sorted((run / "wandb").glob("offline-run-*/*.wandb"), key=lambda path: path.stat().st_mtime_ns):
        known = wandb_file.run_of(path)
        assert known[1] == "sums"
        found += [(known[0], known[2], row.get("train/global_step"), row) for row in wandb_file.history(path)]
    return found


def test_a_quiet_run_prints_nothing(told):
    assert told.said == ""


def test_a_run_that_goes_on_is_one_run(told):
    rows = trackio_rows(told.files) if told.name == "trackio" else wandb_rows(told.run)
    assert len({row[0] for row in rows}) == 1
    (name,) = {row[1] for row in rows}
    assert name.startswith("run")
    rewards = [(step, row["train/reward"]) for *_, step, row in rows if "train/reward" in row]
    assert rewards == [(2, 0.2), (4, 0.4), (4, 0.4), (6, 0.6)]
    assert all(row["eval/accuracy"] == 0.5 for *_, row in rows if "train/reward" in row)
    assert told.name in json.loads((told.run / KNOWN).read_text())


def test_no_table_hides_that_of_another_step(told):
    if told.name == "trackio":
        tables = [row["completions"]["_value"] for *_, row in trackio_rows(told.files) if "completions" in row]
        assert [{line["step"] for line in table} for table in tables] == [{2}, {4}, {4}, {6}]
        assert tables[0] == [{"step": 2, "prompt": "1+1=", "right": 1.0}, {"step": 2, "prompt": "2+2=", "right": None}]
        return
    tables = [json.loads(path.read_text()) for path in sorted(told.run.rglob("*.table.json"))]
    steps = sorted(row[0] for table in tables for row in table["data"])
    assert set(steps) == {2, 4, 6} and all(table["columns"] == ["step", "prompt", "right"] for table in tables)


def test_names_are_those_of_trl():
    trained = {"reward": 1.0, "rewards/right/mean": 0.5, "loss": float("nan"), "learning_rate": 0.1}
    assert named(3, trained) == {"train/reward": 1.0, "train/rewards/right/mean": 0.5, "train/learning_rate": 0.1}
    held_out = {"eval/accuracy": 0.5, "eval/time": 2.0, "eval/sampled/reward": 0.25, "eval/mean_length": 3.0}
    assert named(3, held_out) == {
        "eval/accuracy": 0.5, "eval/runtime": 2.0, "eval/reward": 0.25, "eval/completions/mean_length": 3.0,
    }  # fmt: skip
    assert named(3, {"eval_hard/accuracy": 0.5, "eval_hard/time": 1.0}) == {
        "eval/hard_accuracy": 0.5, "eval/hard_runtime": 1.0,
    }  # fmt: skip

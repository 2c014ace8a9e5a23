"""The data of trackers, read back from trackio's database and W&B's offline file."""

import contextlib
import json
import os
import shutil
import sqlite3
import struct
import subprocess
import sys
from types import SimpleNamespace

import pytest
from paths import ROOT
from wandb.proto.wandb_internal_pb2 import Record

from fastgrpo.run.folder import RunFolder
from fastgrpo.run.trackers import KNOWN, _known, named

# A run of two logged steps, another one of the same name, and the first one once more from its checkpoint of step 2.
# Each reports to both trackers.
SCRIPT = """
import sys
from pathlib import Path
from fastgrpo.config.settings import GRPOConfig
from fastgrpo.run.folder import RunFolder
from fastgrpo.run.trackers import TRACKERS

for name, checkpoint, steps in (("run", None, (2, 4)), ("other", None, (1,)), ("run", 2, (4, 6))):
    path = Path(name)
    path.mkdir(exist_ok=True)
    folder = RunFolder(path)
    config = GRPOConfig(report_to=("wandb", "trackio"), project="sums", run_name="mine", quiet=True)
    from_step = None if checkpoint is None else path / f"checkpoint-{checkpoint}"
    trackers = [TRACKERS[name](config, folder, from_step) for name in config.report_to]
    for tracker in trackers:
        for step in steps:
            tracker.log(step, {"train/reward": step / 10, "eval/accuracy": 0.5})
            tracker.completions(step, {"step": [step] * 2, "prompt": ["1+1=", "2+2="], "right": [1.0, None]})
        tracker.close(failed=path.name == "other")
    folder.close()

import wandb
mine = wandb.init(dir="mine")
folder = RunFolder(Path("mine"))
TRACKERS["wandb"](config, folder, None).close()
assert wandb.run is mine and not (folder.path / "trackers.json").exists()
mine.finish()

pairs, config = [], GRPOConfig(report_to=("wandb", "trackio"), project="pairs", quiet=True)
for name in ("first", "second"):
    Path(name).mkdir()
    pairs.append([TRACKERS[kind](config, RunFolder(Path(name)), None) for kind in config.report_to])
for trackers in pairs:
    for tracker in trackers:
        tracker.log(1, {"train/reward": 1.0})
        tracker.close()
assert pairs[0][0].run.id != pairs[1][0].run.id
"""


@pytest.fixture(scope="module")
def told(tmp_path_factory):
    """The folders of the two runs, and the folder of the trackers' files. A quiet run prints nothing."""
    folder = tmp_path_factory.mktemp("told")
    env = {**os.environ, "TRACKIO_DIR": str(folder / "trackio"), "WANDB_MODE": "offline", "HF_HUB_OFFLINE": "1",
           "PYTHONPATH": str(ROOT), "WANDB_CACHE_DIR": str(folder), "WANDB_CONFIG_DIR": str(folder),
           "WANDB_DATA_DIR": str(folder)}  # fmt: skip
    command = [sys.executable, "-c", SCRIPT]
    done = subprocess.run(command, env=env, capture_output=True, text=True, cwd=folder, timeout=300)
    assert (done.returncode, done.stdout) == (0, ""), done.stdout + done.stderr
    return SimpleNamespace(run=folder / "run", other=folder / "other", files=folder)


def trackio_rows(folder):
    with sqlite3.connect(folder / "trackio" / "sums.db") as database:
        rows = database.execute("select run_id, run_name, step, metrics from metrics order by id").fetchall()
    return [(run, name, step, json.loads(text)) for run, name, step, text in rows]


def wandb_records(path):
    """The records of W&B's offline file: a LevelDB log, in which records are whole as long as it has one block."""
    data, at = path.read_bytes(), 7
    assert len(data) <= 32 * 1024  # bytes of a block
    while at < len(data):
        (length,) = struct.unpack_from("<H", data, at + 4)  # between the checksum and the kind
        at += 7 + length
        yield Record.FromString(data[at - length : at])


def wandb_rows(run):
    """The same of W&B, whose steps are a metric; a table lies in a file of its own."""
    found = []
    for path in sorted((run / "wandb").glob("offline-run-*/*.wandb"), key=lambda path: path.stat().st_mtime_ns):
        records = list(wandb_records(path))
        known = next(record.run for record in records if record.HasField("run"))
        assert known.project == "sums"
        assert [record.exit.exit_code for record in records if record.HasField("exit")] == [run.name == "other"]
        for items in [record.history.item for record in records if record.HasField("history")]:
            row = {item.key or ".".join(item.nested_key): json.loads(item.value_json) for item in items}
            found.append((known.run_id, known.display_name, row.get("train/global_step"), row))
    return found


@pytest.mark.slow
@pytest.mark.parametrize("name", ["trackio", "wandb"])
def test_a_resumed_run_continues_its_tracked_run_and_a_new_one_starts_another(told, name):
    if name == "trackio":
        rows = trackio_rows(told.files)
        known, other = (json.loads((path / KNOWN).read_text())["trackio"]["name"] for path in (told.run, told.other))
        assert known.startswith("mine-") and other.startswith("mine-") and {row[1] for row in rows} == {known, other}
        others, rows = ([row for row in rows if row[1] == which] for which in (other, known))
    else:
        rows, others = wandb_rows(told.run), wandb_rows(told.other)
        assert {row[1] for row in rows + others} == {"mine"}
        assert {row[0] for row in rows} == {json.loads((told.run / KNOWN).read_text())["wandb"]["id"]}
    assert len({row[0] for row in rows}) == 1 == len({row[0] for row in others}) and rows[0][0] != others[0][0]
    rewards, others = (
        [(step, row["train/reward"]) for *_, step, row in which if "train/reward" in row] for which in (rows, others)
    )
    assert rewards == [(2, 0.2), (4, 0.4), (4, 0.4), (6, 0.6)] and others == [(1, 0.1)]
    assert all(row["eval/accuracy"] == 0.5 for *_, row in rows if "train/reward" in row)


@pytest.mark.slow
def test_both_keep_the_table_of_every_step(told):
    name = json.loads((told.run / KNOWN).read_text())["trackio"]["name"]
    logged = [row for _, run, _, row in trackio_rows(told.files) if run == name]
    tables = [row["completions"]["_value"] for row in logged if "completions" in row]
    assert [{line["step"] for line in table} for table in tables] == [{2}, {4}, {4}, {6}]
    assert tables[0] == [{"step": 2, "prompt": "1+1=", "right": 1.0}, {"step": 2, "prompt": "2+2=", "right": None}]
    tables = [json.loads(path.read_text()) for path in sorted(told.run.rglob("*.table.json"))]
    steps = sorted(row[0] for table in tables for row in table["data"])
    assert set(steps) == {2, 4, 6} and all(table["columns"] == ["step", "prompt", "right"] for table in tables)


def test_a_copy_of_a_run_is_tracked_apart_and_a_moved_run_is_not(tmp_path):
    (tmp_path / "a").mkdir()
    with contextlib.closing(RunFolder(tmp_path / "a")) as folder:
        first = _known(folder, "wandb", {"id": "1"})
        assert _known(folder, "wandb", {"id": "2"}) == first
    (tmp_path / "a").rename(tmp_path / "b")
    for name, new in (("b", "1"), ("c", "4"), ("c", "4")):
        if not (tmp_path / name).exists():
            shutil.copytree(tmp_path / "b", tmp_path / name)
        with contextlib.closing(RunFolder(tmp_path / name)) as folder:
            assert _known(folder, "wandb", {"id": "4"}) == {"id": new}


def test_tracker_names_equal_trls():
    trained = {"reward": 1.0, "rewards/right/mean": 0.5, "loss": float("nan"), "learning_rate": 0.1}
    assert named(3, trained) == {"train/reward": 1.0, "train/rewards/right/mean": 0.5, "train/learning_rate": 0.1}
    assert named(3, {"eval/accuracy": 0.5, "eval/time": 2.0, "eval/sampled/reward": 0.25, "eval/mean_length": 3.0}) == {
        "eval/accuracy": 0.5, "eval/runtime": 2.0, "eval/reward": 0.25, "eval/completions/mean_length": 3.0,
    }  # fmt: skip
    assert named(3, {"eval_hard/time": 1.0}) == {"eval/hard_runtime": 1.0}
    assert named(3, {"test/accuracy": 1.0}) == {"test/accuracy": 1.0}

"""What a run does not go on from: folders, checkpoints and settings that are not its own."""

import json
import subprocess
import sys

import pytest
import tiny
from paths import ROOT
from resumed import (
    Crash,
    crash,
    lines,
    make_trainer,
    untimed,
)

from fastgrpo import GRPOConfig
from fastgrpo.run.checkpoint import NEEDED, write_checkpoint
from fastgrpo.run.folder import RunFolder, claim_output_dir
from fastgrpo.run.log import RunLog
from fastgrpo.run.resume import newest_good
from fastgrpo.train import parse

pytestmark = pytest.mark.usefixtures("without_curves")


def test_auto_starts_where_nothing_is(tmp_path, capsys):
    def log():
        return RunLog(GRPOConfig(output_dir=str(tmp_path / "run"), resume_from_checkpoint="auto"))

    for _ in range(2):  # the second time after a run that died before its first checkpoint
        started = log()
        started.write(1, {"reward": 1.0})
        started.close()
        assert "no checkpoint in" in capsys.readouterr().out
        assert len(lines(tmp_path / "run")) == 1
    (tmp_path / "run" / "summary.json").write_text("{}")
    with pytest.raises(ValueError, match="finished run without its checkpoints"):
        log()


def test_auto_leaves_a_folder_alone_that_is_not_a_run(tmp_path):
    tiny.save(tmp_path / "model")
    (tmp_path / "model" / "curves.png").write_text("mine")
    before = sorted(path.name for path in (tmp_path / "model").iterdir())
    with pytest.raises(ValueError, match="model has no checkpoint, and no run made its files"):
        RunLog(GRPOConfig(output_dir=str(tmp_path / "model"), resume_from_checkpoint="auto"))
    assert sorted(path.name for path in (tmp_path / "model").iterdir()) == sorted([*before, ".lock"])
    json.loads((tmp_path / "model" / "config.json").read_text())["model_type"]


def test_where_all_are_damaged_nothing_is_started(tmp_path):
    run = RunFolder(tmp_path)
    for step in (1, 2):
        path = write_checkpoint(
            run, step, lambda path: [(path / name).write_text("a") for name in (*NEEDED, "a.safetensors")]
        )
        (path / "rng.pt").write_text("b")
    said = []
    with pytest.raises(ValueError, match="no good checkpoint is left"):
        newest_good(tmp_path, said.append)
    assert ["checkpoint-2/rng.pt is damaged" in said[0], "checkpoint-1/rng.pt is damaged" in said[1]] == [True, True]


def test_paths_that_are_no_checkpoint(tmp_path):
    (tmp_path / "run" / "checkpoint-2").mkdir(parents=True)
    for path, output_dir, match in (
        (tmp_path / "nowhere", None, "no such folder"),
        (tmp_path / "run", None, "the name of a checkpoint is checkpoint-STEP"),
        (tmp_path / "run" / "checkpoint-2" / "..", None, "the name of a checkpoint is checkpoint-STEP"),
        (tmp_path / "run" / "checkpoint-2", tmp_path / "other", "continues in its own run folder"),
        (tmp_path / "run" / "checkpoint-2", None, "manifest.json is missing"),
    ):
        output_dir = None if output_dir is None else str(output_dir)
        with pytest.raises(ValueError, match=match):
            RunLog(GRPOConfig(output_dir=output_dir, resume_from_checkpoint=str(path)))


def test_settings_that_change_the_run_are_refused_and_others_warned_of(whole, capsys):
    folder = whole()
    with pytest.raises(Crash):
        make_trainer(folder, "changed", crash(5)).train()
    with pytest.raises(ValueError, match=r"trained with learning_rate=0.003, now it is 0.1, .*--model_name_or_path"):
        make_trainer(folder, "changed", resume_from_checkpoint="auto", learning_rate=0.1)
    with pytest.raises(ValueError, match="checkpoint-4 is past max_steps=3"):
        make_trainer(folder, "changed", resume_from_checkpoint="auto", max_steps=3).train()
    capsys.readouterr()
    trainer = make_trainer(
        folder, "changed", resume_from_checkpoint="auto", max_steps=10, save_steps=5, max_tokens_per_microbatch=64,
        report_to="tensorboard",
    )  # fmt: skip
    warnings = [line for line in capsys.readouterr().out.splitlines() if line.startswith("warning")]
    assert len(warnings) == 2 and "max_steps was 8 and is 10 now" in warnings[0] and "microbatch" in warnings[1]
    assert trainer.train()["steps"] == 10
    assert untimed(folder / "changed")[0] == untimed(folder / "whole")[0]
    with pytest.raises(
        ValueError, match="was trained in float32, the policy is bfloat16 now; go on with --dtype float32"
    ):
        make_trainer(folder, "changed", resume_from_checkpoint="auto", max_steps=10, dtype="bfloat16").train()
    assert json.loads((folder / "changed" / "config.json").read_text())["dtype"] == "float32"
    trainer = make_trainer(folder, "changed", resume_from_checkpoint="auto", max_steps=11, reward_errors="skip")
    trainer.source.levels[-1].source.rows.pop()
    assert trainer.train()["steps"] == 11
    assert "the rows of the training data have changed since" in (said := capsys.readouterr().out)
    assert "(then 5, now 4)" in said


def test_the_command_line():
    assert parse(["--output_dir", "x", "--resume_from_checkpoint", "auto"]).resume_from_checkpoint == "auto"


def test_a_folder_belongs_to_one_process(tmp_path):
    code = f"""
import sys, time
from fastgrpo.run.folder import claim_output_dir
held = claim_output_dir({str(tmp_path)!r}, "t", resume=True)
print("held", flush=True)
time.sleep(60)
"""
    other = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, cwd=ROOT)
    try:
        assert other.stdout.readline() == "held\n"
        (tmp_path / "metrics.jsonl").write_text("rows")
        for settings in ({"resume": True}, {"overwrite": True}):
            with pytest.raises(ValueError, match=rf"in use by a run that is still alive \(process {other.pid} on "):
                claim_output_dir(str(tmp_path), "t", **settings)
        assert (tmp_path / "metrics.jsonl").read_text() == "rows"
    finally:
        other.kill()
        other.wait()
    claim_output_dir(str(tmp_path), "t", resume=True).close()  # the lock died with its process

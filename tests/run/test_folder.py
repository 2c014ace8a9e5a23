"""The folder of a run: claimed once, never overwritten unasked; the pictures and tables made from it."""

import json

import pytest

from fastgrpo.config.settings import GRPOConfig
from fastgrpo.run.curves import draw_curves, moving_average, read_metrics, table
from fastgrpo.run.folder import claim_output_dir
from fastgrpo.run.log import RunLog


def test_runs_are_numbered(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "gsm8k-7").mkdir()
    assert [claim_output_dir(None, "gsm8k")[0].name for _ in range(2)] == ["gsm8k-8", "gsm8k-9"]
    assert claim_output_dir(None, "arithmetic")[0].name == "arithmetic-1"


def test_a_folder_with_something_in_it_is_refused(tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    (tmp_path / "metrics.jsonl").write_text("old")
    (tmp_path / "checkpoint-3").mkdir()
    with pytest.raises(ValueError, match=r"not empty.*--overwrite_output_dir"):
        claim_output_dir(str(tmp_path), "t")
    claim_output_dir(str(tmp_path), "t", overwrite=True)
    assert {path.name for path in tmp_path.iterdir()} == {".lock", "notes.txt"}
    with pytest.raises(ValueError, match="is a file"):
        claim_output_dir(str(tmp_path / "notes.txt"), "t")


def test_metrics_are_means_over_logging_steps(tmp_path):
    log = RunLog(GRPOConfig(output_dir=str(tmp_path / "run"), logging_steps=2))
    for step, reward in enumerate([1.0, 2.0, 5.0], 1):
        log.step(step, {"reward": reward, "num_tokens": 10 * step}, last=step == 3)
    log.close()
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert rows == [
        {"step": 2, "reward": 1.5, "num_tokens": 20},
        {"step": 3, "reward": 5.0, "num_tokens": 30},
    ]


def test_wandb_names_the_package(tmp_path):
    try:
        import wandb  # noqa: F401
    except ImportError:
        with pytest.raises(ValueError, match="pip install wandb"):
            RunLog(GRPOConfig(output_dir=str(tmp_path / "run"), report_to="wandb"))
    else:
        pytest.skip("wandb is installed")


def test_curves(tmp_path):
    rows = [{"step": i, "reward": i / 10, "kl": 0.1} for i in range(20)] + [{"step": 19, "eval/accuracy": 0.5}]
    (tmp_path / "metrics.jsonl").write_text("\n".join(json.dumps(row) for row in rows))
    assert read_metrics(tmp_path)["eval/accuracy"] == ([19], [0.5])
    path = draw_curves(tmp_path)
    assert path.stat().st_size > 10_000 and path.read_bytes().startswith(b"\x89PNG")


def test_moving_average():
    assert moving_average([1, 2, 3, 4], window=2) == [1, 1.5, 2.5, 3.5]


def test_table():
    assert table([("a", 1), ("long", "x")]) == "  a     1\n  long  x"

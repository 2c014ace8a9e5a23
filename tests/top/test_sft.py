"""The command sft: arguments, sources of rows, and a run."""

import json

import pytest
import tiny
from mistakes import check
from runs import lines

from fastgrpo import sft
from fastgrpo.run.checkpoint import checkpoints

pytestmark = pytest.mark.usefixtures("without_curves")
COUNTS = {"max_steps": 2, "batch_size": 4, "max_completion_length": 5, "max_eval_samples": 3}
SHORT = ["--device", "cpu", *(word for name, count in COUNTS.items() for word in (f"--{name}", str(count)))]


@pytest.fixture
def files(tmp_path):
    (tmp_path / "train.jsonl").write_text('{"prompt": "ab", "completion": "cd"}\n{"prompt": "e", "completion": "f"}\n')
    (tmp_path / "test.jsonl").write_text('{"prompt": "gh", "completion": "i"}\n')
    tiny.save(tmp_path / "model")
    return tmp_path


def test_a_data_set_is_learned_and_its_held_out_rows_are_measured(files, capfd):
    run = files / "run"
    given = f"--task dataset --dataset_name {files} --model_name_or_path {files / 'model'} --output_dir {run}".split()
    assert sft.main([*given, *SHORT]) == 0
    assert [row["step"] for row in lines(run) if "eval/loss" in row] == [0, 2]
    assert "SFT: " in capfd.readouterr().out and list(checkpoints(run)) == [2]
    (files / "train.jsonl").write_text('{"messages": [{"role": "user"}]}\n')
    check(sft.main, [*given, *SHORT, "--overwrite_output_dir", "True"], "train.jsonl:1: the messages have no", capfd)


def test_the_built_in_task_starts_from_random_weights_and_accepts_another_file(files, capfd):
    run = files / "run"
    (files / "mine.jsonl").write_text('{"prompt": "11+22=", "completion": "1+2=3 1+2=3 33"}\n')
    assert sft.main([*SHORT, "--output_dir", str(run), "--train_file", str(files / "mine.jsonl")]) == 0
    first, last = (row for row in lines(run) if "eval/accuracy" in row)
    assert first["eval/accuracy"] == 0.0 and "eval/format_rate" in last and "of 1 rows" in capfd.readouterr().out
    state = json.loads((run / "checkpoint-2" / "trainer_state.json").read_text())
    assert (state["rows"], state["command"]) == (1, "sft")
    resumed = ["--output_dir", str(run), "--resume_from_checkpoint", "auto"]
    check(sft.main, [*SHORT, *resumed], "was trained with train_file=.*now it is None", capfd)

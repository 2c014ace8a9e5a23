"""From a command line to a trainer: data, rewards, and the task's own policy where no model is named."""

import json
import re
import subprocess
import sys

import pytest
import tiny
from paths import ROOT

import fastgrpo
from fastgrpo import train
from fastgrpo.__main__ import COMMANDS
from fastgrpo.__main__ import main as overview
from fastgrpo.config.recipe import parse
from fastgrpo.tasks import arithmetic


@pytest.mark.parametrize("argv, first, without", [
    (["fastgrpo", "--version"], f"fastgrpo {fastgrpo.__version__}", {"torch", "transformers", "fastgrpo.config"}),
    (["fastgrpo.train", "--help"], "usage: ", {"transformers"}),
])  # fmt: skip
def test_the_version_comes_without_torch_and_help_without_transformers(argv, first, without):
    command = [sys.executable, "-X", "importtime", "-m", *argv]
    told = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=True)
    loaded = {line.rpartition("|")[2].strip() for line in told.stderr.splitlines()}
    assert told.stdout.startswith(first) and "fastgrpo" in loaded and not loaded & without


def test_the_commands_are_listed(capsys):
    """Every top-level module is a command, except ranks.py; docs/commands.md has the same table."""
    assert overview([]) == 0
    listed = re.findall(r"python -m fastgrpo\.(\w+) +(\S.+)", capsys.readouterr().out)
    assert [name for name, _ in listed] == list(COMMANDS)
    modules = {path.stem for path in (ROOT / "fastgrpo").glob("*.py") if not path.stem.startswith("_")}
    assert set(COMMANDS) == modules - {"ranks"}
    assert re.findall(r"\| `python -m fastgrpo\.(\w+)", (ROOT / "docs" / "commands.md").read_text()) == list(COMMANDS)
    for argv in (["train", "--beta", "0"], ["--versoin"], ["--version", "now"]):
        assert overview(argv) == 2 and capsys.readouterr().err.startswith("error: ")


def test_flags_reach_the_trainer(tmp_path, monkeypatch, capsys):
    for split, count in (("train", 3), ("test", 2)):
        rows = [json.dumps({"prompt": f"{split} {i}"}) + "\n" for i in range(count)]
        (tmp_path / f"{split}.jsonl").write_text("".join(rows))
    (tmp_path / "own.py").write_text("def brief(completions, **_):\n    return [0.0] * len(completions)\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    config = parse(
        f"--task dataset --dataset_name {tmp_path} --model_name_or_path {tiny.save(tmp_path / 'model')} --device cpu "
        f"--reward_funcs own:brief --output_dir {tmp_path / 'run'} --max_steps 7 --max_completion_length 4".split()
    )
    trainer = train.make_trainer(config)
    trainer.log.close()
    assert trainer.args is config and trainer.state.max_steps == 7
    assert [row["prompt"] for row in trainer.source.rows] == ["train 0", "train 1", "train 2"]
    assert [row["prompt"] for row in trainer.held_out[""]] == ["test 0", "test 1"]
    assert trainer.rewards.names == ["brief"]
    told = capsys.readouterr().out
    assert f"run folder {tmp_path / 'run'}" in told and "7 steps of 8 prompts x 8 completions" in told


def test_without_a_model_the_tasks_own_is_warm_started(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(arithmetic, "make_model", lambda seed: (tiny.model(vocab_size=258), tiny.tokenizer()))
    monkeypatch.setattr("fastgrpo.trainer.supervised.sft", lambda policy, examples, on_step, **_: on_step(1, 0.5))
    trainer = train.make_trainer(parse(["--output_dir", str(tmp_path / "run"), "--device", "cpu"]))
    trainer.log.close()
    assert trainer.model.config.vocab_size == 258 and trainer.log.dir == tmp_path / "run"
    assert "warm start: supervised training of the task's own small model" in capsys.readouterr().out
    with pytest.raises(ValueError, match="task gsm8k needs --model_name_or_path"):
        train.make_trainer(parse(["--task", "gsm8k"]))

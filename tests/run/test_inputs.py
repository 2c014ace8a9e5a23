"""The files that a run reads are found, wherever they are named."""

import functools
import sys
from types import SimpleNamespace
from unittest.mock import MagicMock

import tiny
from transformers import AutoModelForCausalLM

from fastgrpo.config.settings import TrainConfig
from fastgrpo.data.rows import Rows
from fastgrpo.rewards.gsm8k import correctness
from fastgrpo.run.resume import inputs_of


def test_models_data_and_reward_files(tmp_path, monkeypatch):
    (tmp_path / "rows.jsonl").write_text("{}")
    (tmp_path / "cache.arrow").write_text("")
    (tmp_path / "judge_of_mine.py").write_text(
        "def score(completions, **columns): ...\n\nclass Judge:\n    def __call__(self, completions, **columns): ...\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    import judge_of_mine

    config = TrainConfig(task="dataset", dataset_name=str(tmp_path / "rows.jsonl"), model_name_or_path="m")
    rows = SimpleNamespace(cache_files=[{"filename": str(tmp_path / "cache.arrow")}])
    for function in (judge_of_mine.score, functools.partial(judge_of_mine.score, x=1), judge_of_mine.Judge()):
        found = inputs_of(config, [function], str(tmp_path), [Rows(rows, str), None, rows])
        assert sorted(found.values()) == sorted(
            [tmp_path, tmp_path / "rows.jsonl", tmp_path / "cache.arrow", tmp_path / "judge_of_mine.py"]
        )
    assert {"the model", "the data set", "file cache.arrow of a data set"} < set(found)
    monkeypatch.delitem(sys.modules, "judge_of_mine")


def test_a_model_in_memory_knows_its_folder(tmp_path):
    tiny.save(tmp_path / "model")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    assert inputs_of(TrainConfig(), [], model) == {"the model": tmp_path / "model"}


class Mute:
    def __repr__(self):
        raise RuntimeError

    def __call__(self, completions, **columns): ...


def test_functions_of_any_class_have_a_file_or_none():
    """A mock has every attribute that it is asked for, `func` too."""
    found = inputs_of(TrainConfig(), [Mute(), Mute(), MagicMock()])
    assert [path.name for path in found.values()] == ["test_inputs.py", "test_inputs.py", "mock.py"]


def test_hub_ids_and_our_own_rewards_are_no_files():
    config = TrainConfig(task="gsm8k", model_name_or_path="m", dataset_name="openai/gsm8k")
    assert inputs_of(config, [correctness], "Qwen/Qwen3-0.6B") == {}

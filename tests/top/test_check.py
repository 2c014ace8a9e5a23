"""The command that checks rewards: its table, its warnings, its exit codes."""

import json

import pytest
import tiny

from fastgrpo.check import main

ROWS = [
    {"prompt": "2 + 3 =", "answer": 5, "completion": ["It is 5", "6"]},
    {"prompt": [{"role": "user", "content": "4 + 4 ="}], "answer": 8, "completion": ["8", "9"]},
]
MODULE = """
def right(completions, answer, **columns):
    texts = [text if isinstance(text, str) else text[0]["content"] for text in completions]
    return [float(text.endswith(str(a))) for text, a in zip(texts, answer)]

def same(completions, **columns):
    return [1.0] * len(completions)
"""


@pytest.fixture
def rows(tmp_path, monkeypatch):
    (tmp_path / "checked_rewards.py").write_text(MODULE)
    monkeypatch.syspath_prepend(tmp_path)
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    return str(path)


def test_given_completions_are_judged_and_warnings_are_exit_code_1(rows, tmp_path, capsys):
    main(["--reward", "checked_rewards:right", "--dataset", rows])
    out = capsys.readouterr().out
    assert "| right  | 0.500 | 0.500 | 100% " in out and "right, best (1): 'It is 5'" in out
    assert main(["--reward_funcs", "checked_rewards:same", "--dataset_name", rows]) == 1
    assert "warning: same: It is constant (1)" in capsys.readouterr().out
    path = tmp_path / "graded.jsonl"
    path.write_text('{"question": "?", "answer": "#### 5", "completion": ["<answer>5</answer>", "6"]}')
    main(["--task", "gsm8k", "--dataset", str(path)])
    assert "| correctness   | 0.500 |" in capsys.readouterr().out


def test_a_model_draws_the_completions(rows, tmp_path, capsys):
    model = str(tiny.save(tmp_path / "model", chat=True))
    argv = ["--reward", "checked_rewards:same", "--dataset", rows, "--model", model]
    assert main([*argv, "--max_completion_length", "3", "--num_generations", "2"]) == 1
    assert "of the completions are truncated at --max_completion_length 3" in capsys.readouterr().out


def test_refuses_completions_that_are_no_text(rows, tmp_path, capsys):
    (tmp_path / "bad.jsonl").write_text('{"prompt": "p", "completion": [5]}')
    assert main(["--reward", "checked_rewards:same", "--dataset", str(tmp_path / "bad.jsonl")]) == 2
    assert "a completion must be a string" in capsys.readouterr().err

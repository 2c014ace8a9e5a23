"""Sources, curricula and prompts."""

import json

import pytest
import tiny
import torch

from fastgrpo.data.load import load_rows, read_jsonl
from fastgrpo.data.prompts import to_completion, to_prompt
from fastgrpo.data.records import Prompt, Rollout
from fastgrpo.data.sources import Curriculum, Level, ShuffledRows


def test_an_epoch_has_every_row_once_in_an_order_of_its_own():
    source = ShuffledRows(list(range(10)), seed=1)
    first, second = source.take(10), source.take(10)
    assert sorted(first) == sorted(second) == list(range(10))
    assert first != second and first != list(range(10))
    assert ShuffledRows(list(range(10)), seed=1).take(10) == first
    assert ShuffledRows(list(range(4)), shuffle=False).take(6) == [0, 1, 2, 3, 0, 1]


def test_the_cursor_is_restored():
    source = ShuffledRows(list(range(7)), seed=2)
    source.take(5)
    state, following = source.state_dict(), source.take(9)
    other = ShuffledRows(list(range(7)), seed=2)
    other.load_state_dict(state)
    assert other.take(9) == following


def test_no_rows():
    with pytest.raises(ValueError, match="no rows"):
        ShuffledRows([])


def levels():
    return [
        Level("easy", ShuffledRows(["e"]), until_accuracy=0.8),
        Level("timed", ShuffledRows(["t"]), until_steps=2),
        Level("hard", ShuffledRows(["h"]), until_accuracy=0.1),
    ]


def test_a_curriculum_moves_on_by_accuracy_and_by_steps_and_stays_at_the_end():
    curriculum = Curriculum(levels())
    seen = []
    for accuracy in (1.0, 0.6, 0.7, 0.9, 0.9, 0.0, 0.0, 1.0, 1.0, 1.0, 1.0):
        seen += curriculum.take(1)
        curriculum.observe(accuracy)
    # 1.0, 0.6, 0.7 average 0.77; 0.6, 0.7, 0.9 0.73; 0.7, 0.9, 0.9 0.83
    assert "".join(seen) == "eeeeetthhhh"
    assert curriculum.metrics() == {"curriculum/level": 2}


def test_a_curriculum_is_restored():
    curriculum = Curriculum(levels())
    for _ in range(4):
        curriculum.take(1)
        curriculum.observe(1.0)
    other = Curriculum(levels())
    other.load_state_dict(json.loads(json.dumps(curriculum.state_dict())))
    assert (other.level, other.steps) == (curriculum.level, curriculum.steps) == (1, 1)


def test_files_and_folders(tmp_path):
    (tmp_path / "train.jsonl").write_text('{"a": 1}\n\n{"a": 2}\n')
    (tmp_path / "test.jsonl").write_text('{"a": 3}\n')
    assert load_rows(str(tmp_path), split="test") == [{"a": 3}]
    assert load_rows(str(tmp_path / "train.jsonl")) == [{"a": 1}, {"a": 2}]
    assert load_rows(str(tmp_path / "train.jsonl"), split="test") == [{"a": 3}]
    assert load_rows(str(tmp_path), split="validation") is None
    with pytest.raises(ValueError, match=r"no such file: .*missing\.jsonl"):
        load_rows(str(tmp_path / "missing.jsonl"))


def test_hub_data_sets_go_through_datasets(monkeypatch):
    import datasets

    monkeypatch.setattr(datasets, "load_dataset", lambda *args, **kw: [args, kw])
    assert load_rows("openai/gsm8k", "main", "test") == [("openai/gsm8k", "main"), {"split": "test"}]


@pytest.mark.parametrize(
    "line, match",
    [
        ("{oops", r":2: not JSON"),
        ("[1]", r":2: a row must be a JSON object, got list"),
        ('{"b": 1}', r":2: the row has no column 'a', only b"),
    ],
)
def test_bad_lines_are_named(tmp_path, line, match):
    path = tmp_path / "rows.jsonl"
    path.write_text(f'{{"a": 1}}\n{line}\n')
    with pytest.raises(ValueError, match=match):
        read_jsonl(path, columns=("a",))


def test_what_the_hub_says_is_told(monkeypatch):
    import datasets

    rows = datasets.Dataset.from_list([{"question": "?"}])
    monkeypatch.setattr(datasets, "load_dataset", lambda *args, **kw: rows)
    assert load_rows("a/b", columns=("question",)) is rows
    with pytest.raises(ValueError, match="data set 'a/b' has no column 'prompt', only question"):
        load_rows("a/b", columns=("prompt",))

    def say(error):
        def load(*args, **kw):
            raise error

        monkeypatch.setattr(datasets, "load_dataset", load)

    say(ValueError("Unknown split \"test\". Should be one of ['train']."))
    assert load_rows("a/b", split="test") is None
    say(ValueError("Config name is missing.\nPlease pick one among the available configs: ['main']"))
    with pytest.raises(ValueError, match=r"data set 'a/b' cannot be loaded \(Config name is missing. Please pick one"):
        load_rows("a/b")
    say(ConnectionError("Couldn't reach the Hub"))
    with pytest.raises(ValueError, match=r"Couldn't reach the Hub.*name a hub id, a .jsonl file, or a folder"):
        load_rows("a/b")


def test_prompts():
    plain = to_prompt({"prompt": "ab", "answer": 3}, tiny.tokenizer())
    assert plain == Prompt(plain.ids, "ab", {"answer": 3}) and len(plain.ids) == 2
    chat = tiny.tokenizer(chat=True)
    messages = [{"role": "user", "content": "hi"}]
    conversational = to_prompt({"prompt": messages}, chat)
    assert chat.decode(conversational.ids) == "<user>hi\n<assistant>"
    ids = chat("ok")["input_ids"] + [chat.eos_token_id]
    drawn = Rollout(ids, torch.zeros(len(ids)), "stop")
    assert to_completion(conversational, drawn, chat).content == [{"role": "assistant", "content": "ok"}]
    assert to_completion(plain, drawn, chat).content == "ok"


def test_refused_prompts():
    with pytest.raises(ValueError, match="no column 'prompt', only question"):
        to_prompt({"question": "?"}, tiny.tokenizer())
    with pytest.raises(ValueError, match="no chat template"):
        to_prompt({"prompt": [{"role": "user", "content": "hi"}]}, tiny.tokenizer())


def test_a_byte_order_mark_is_passed_over(tmp_path):
    (tmp_path / "a.jsonl").write_bytes(b'\xef\xbb\xbf{"prompt": "caf\xc3\xa9"}\r\n')
    assert read_jsonl(tmp_path / "a.jsonl") == [{"prompt": "caf\u00e9"}]

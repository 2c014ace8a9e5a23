"""Rows from files, folders and the Hub; a line or data set that cannot be read is named."""

import os
import sys

import pytest

from fastgrpo.data.rows import load_rows, read_jsonl


def test_files_and_folders(tmp_path):
    (tmp_path / "train.jsonl").write_text('{"a": 1}\n\n{"a": 2}\n')
    (tmp_path / "test.jsonl").write_text('{"a": 3}\n')
    assert list(load_rows(str(tmp_path), split="test")) == [{"a": 3}]
    train = load_rows(str(tmp_path / "train.jsonl"))
    assert list(train) == [{"a": 1}, {"a": 2}]
    assert [train.where(i) for i in range(2)] == [f"{tmp_path}/train.jsonl:1", f"{tmp_path}/train.jsonl:3"]
    assert list(load_rows(str(tmp_path / "train.jsonl"), split="test")) == [{"a": 3}]
    assert load_rows(str(tmp_path), split="validation") is None
    with pytest.raises(ValueError, match=r"no such file: .*missing\.jsonl"):
        load_rows(str(tmp_path / "missing.jsonl"))


def test_hub_data_sets_go_through_datasets(monkeypatch):
    import datasets

    monkeypatch.setattr(datasets, "load_dataset", lambda *args, **kw: [args, kw])
    rows = load_rows("openai/gsm8k", "main", "test")
    assert list(rows) == [("openai/gsm8k", "main"), {"split": "test"}]
    assert rows.where(17) == "openai/gsm8k test, row 17"


@pytest.mark.parametrize(
    "line, match",
    [
        ("{oops", r":2: not JSON"),
        ("[" * 100_000, r":2: not JSON that can be read: maximum recursion depth"),
        ("9" * (sys.get_int_max_str_digits() + 1), r":2: not JSON that can be read: Exceeds the limit"),
        ('{"a": "\0"}', r":2: not JSON that can be read: Invalid control character"),
        ("[1]", r":2: a row must be a JSON object, got list"),
        ('{"b": 1}', r":2: the row has no column 'a', only b"),
    ],
)
def test_bad_lines_are_named(tmp_path, line, match):
    path = tmp_path / "rows.jsonl"
    path.write_text(f'{{"a": 1}}\n{line}\n')
    with pytest.raises(ValueError, match=match):
        read_jsonl(path, columns=("a",))


def test_a_byte_order_mark_is_passed_over(tmp_path):
    (tmp_path / "a.jsonl").write_bytes(b'\xef\xbb\xbf{"prompt": "caf\xc3\xa9"}\r\n')
    assert list(read_jsonl(tmp_path / "a.jsonl")) == [{"prompt": "caf\u00e9"}]


def test_what_is_no_file_is_not_opened(tmp_path):
    (tmp_path / "train.jsonl").mkdir()
    with pytest.raises(ValueError, match=r"train\.jsonl is a folder; write the rows to a file"):
        load_rows(str(tmp_path))
    os.mkfifo(tmp_path / "test.jsonl")  # to open it would wait for a writer, for ever
    for name in (tmp_path, tmp_path / "test.jsonl"):
        with pytest.raises(ValueError, match=r"test\.jsonl is a pipe or a device; write the rows to a file"):
            load_rows(str(name), split="test")
    os.mkfifo(tmp_path / "pipe")
    for name in (tmp_path / "pipe", "/dev/zero"):
        with pytest.raises(ValueError, match=f"{name} is not a .jsonl file"):
            load_rows(str(name))


def test_what_the_hub_says_is_told(monkeypatch):
    import datasets

    rows = datasets.Dataset.from_list([{"question": "?"}])
    monkeypatch.setattr(datasets, "load_dataset", lambda *args, **kw: rows)
    assert load_rows("a/b", columns=("question",)).rows is rows
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

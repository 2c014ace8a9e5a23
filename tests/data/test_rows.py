"""Rows from files, folders, the hub and Python; sources of prompts: shuffled epochs, curricula, and resuming."""

import json
import sys
from unittest.mock import MagicMock

import datasets
import hypothesis
import pandas
import pytest
import torch
from hypothesis import strategies as st

from fastgrpo.data.rows import Rows, as_rows, joined, load_rows, read_jsonl
from fastgrpo.data.sources import Curriculum, Level, ShuffledRows, as_source

DATA = [{"prompt": "a"}, {"prompt": "b"}, {"prompt": "c"}]


def test_reads_files_and_folders(tmp_path):
    (tmp_path / "train.jsonl").write_text('{"a": 1}\n\n{"a": 2}\n')
    (tmp_path / "test.jsonl").write_bytes(b'\xef\xbb\xbf{"a": "caf\xc3\xa9"}\r\n')  # a byte order mark
    test = [{"a": "caf\u00e9"}]
    assert list(load_rows(str(tmp_path), split="test")) == test
    train = load_rows(str(tmp_path / "train.jsonl"))
    assert list(train) == [{"a": 1}, {"a": 2}]
    assert [train.where(i) for i in range(2)] == [f"{tmp_path}/train.jsonl:1", f"{tmp_path}/train.jsonl:3"]
    assert list(load_rows(str(tmp_path / "train.jsonl"), split="test")) == test
    assert load_rows(str(tmp_path), split="validation") is None
    with pytest.raises(ValueError, match=r"missing\.jsonl"):
        load_rows(str(tmp_path / "missing.jsonl"))


BAD = ["{oops", "[" * 100_000, "9" * (sys.get_int_max_str_digits() + 1), '{"a": "\0"}', "[1]", '{"b": 1}']


@pytest.mark.parametrize("line", BAD, ids=lambda line: line[:4])
def test_errors_name_the_bad_line(tmp_path, line):
    path = tmp_path / "rows.jsonl"
    path.write_text(f'{{"a": 1}}\n{line}\n')
    with pytest.raises(ValueError, match=f"{path}:2: "):
        read_jsonl(path, columns=("a",))


def test_hub_data_sets_go_through_datasets(monkeypatch):
    given, load = datasets.Dataset.from_list([{"question": "?"}]), MagicMock()
    monkeypatch.setattr(datasets, "load_dataset", load)
    load.return_value = given
    rows = load_rows("openai/gsm8k", "main", "test", columns=("question",))
    load.assert_called_once_with("openai/gsm8k", "main", split="test")
    assert rows.rows is given
    assert rows.where(17) == "openai/gsm8k test, row 17"
    with pytest.raises(ValueError, match="data set 'a/b' has no column 'prompt', only question"):
        load_rows("a/b", columns=("prompt",))
    load.side_effect = ValueError("Unknown split \"test\". Should be one of ['train'].")
    assert load_rows("a/b", split="test") is None
    failed, failed.__cause__ = datasets.exceptions.DatasetGenerationError("An error"), TypeError("1 new column")
    for error, told in ((ValueError("No config.\nPick one"), "No config. Pick"), (failed, "An error 1 new column")):
        load.side_effect = error
        with pytest.raises(ValueError, match=f"data set 'a/b' .*{told}"):
            load_rows("a/b")


class Stream(torch.utils.data.IterableDataset):
    def __iter__(self):
        while True:
            yield from DATA


class ByIndex(torch.utils.data.Dataset):
    """A data set whose indices do not end where its rows do."""

    def __len__(self):
        return 3

    def __getitem__(self, index):
        return DATA[index % 3]


def refuse_b(row):
    if row["prompt"] == "b":
        raise ValueError("no b, please") from KeyError("b")
    return {**row, "seen": True}


def test_errors_name_the_original_row_after_map_slice_and_concatenation():
    rows = as_rows(DATA, "mine")
    assert len(rows) == 3 and rows[1] is DATA[1]
    assert list(as_rows(DATA[::2], "mine").map(refuse_b)) == [{**row, "seen": True} for row in DATA[::2]]
    changed = joined([as_rows(DATA[:1], "first"), rows.head(2).map(dict)])
    for call in (lambda: rows.map(refuse_b), lambda: list(changed.each(refuse_b))):
        with pytest.raises(ValueError, match=r"^mine row 1: no b, please$") as caught:
            call()
        assert isinstance(caught.value.__cause__, KeyError)
    assert rows.head(None) is rows.head(7) is rows and len(rows.head(0)) == 0
    assert isinstance(rows, Rows) and as_rows(rows, "another name") is rows


@pytest.mark.parametrize("data", [
    DATA, tuple(DATA), datasets.Dataset.from_list(DATA), pandas.DataFrame(DATA, index=[7, 7, 8]), ByIndex(),
], ids=["list", "tuple", "datasets", "pandas", "torch"])  # fmt: skip
def test_sequences_are_accepted(data):
    rows = as_rows(data, "train_dataset")
    assert list(rows) == DATA and [rows[i] for i in range(3)] == DATA
    assert rows.where(2) == "train_dataset row 2"


@pytest.mark.parametrize("data", [Stream(), datasets.IterableDataset.from_generator(lambda: iter(Stream()))])
def test_reads_only_the_needed_rows_of_a_stream(data):
    assert list(as_rows(data, "train_dataset", 5)) == [*DATA, *DATA[:2]]
    with pytest.raises(ValueError, match=r"eval_dataset is of type \w+; it may be infinite, so pass max_eval_samples"):
        as_rows(data, "eval_dataset", None, "max_eval_samples")


def test_data_frame_values_become_plain_python(tmp_path):
    messages = [{"role": "user", "content": "hi"}]
    pandas.DataFrame({"prompt": [messages], "n": [3], "x": [0.5]}).to_parquet(tmp_path / "rows.parquet")
    (row,) = as_rows(pandas.read_parquet(tmp_path / "rows.parquet"), "train_dataset")
    assert row == {"prompt": messages, "n": 3, "x": 0.5}
    frame = pandas.DataFrame([{"prompt": "a", "n": 1}, {"prompt": "b", "tests": ["x"]}])
    assert list(as_rows(frame, ""))[1] == {"prompt": "b", "n": None, "tests": ["x"]}
    assert type(row["prompt"]) is list and type(row["n"]) is int and type(row["x"]) is float


@pytest.mark.parametrize("data, remedy", [
    ({"train": DATA}, r"data\['train'\]"), ({"prompt": ["a", "b"]}, "a list of dicts"),
    ((row for row in DATA), r"list\(...\)"), ("train.jsonl", "load_rows"), (pandas.Series(DATA), "pass rows"),
])  # fmt: skip
def test_rejects_other_data_by_type(data, remedy):
    with pytest.raises(ValueError, match=f"train_dataset is of type {type(data).__name__}; .*{remedy}"):
        as_rows(data, "train_dataset", 5)


def source_of(count, seed, shuffle=True):
    return ShuffledRows(list(range(count)), seed=seed, shuffle=shuffle)


@hypothesis.given(st.integers(1, 12), st.lists(st.integers(0, 15), max_size=6), st.integers(0, 5), st.booleans())
def test_an_epoch_has_every_row_once_in_an_order_of_its_own(count, takes, seed, shuffle):
    whole = source_of(count, seed, shuffle).take(count * 90)
    epochs = [whole[i : i + count] for i in range(0, len(whole), count)]
    assert all(sorted(epoch) == list(range(count)) for epoch in epochs)
    orders = {tuple(epoch) for epoch in epochs}
    assert len(orders) == 1 if not shuffle else count < 4 or len(orders) > 12
    source, seen = source_of(count, seed, shuffle), []
    for take in takes:
        seen += source.take(take)
        state = json.loads(json.dumps(source.state_dict()))
        source = source_of(count, seed, shuffle)
        source.load_state_dict(state)
    assert seen == whole[: len(seen)]


def test_rows_of_any_type_become_a_source_and_a_source_stays_as_it_is():
    source = ShuffledRows(pandas.DataFrame([{"prompt": "a"}, {"prompt": "b"}]), shuffle=False)
    assert source.take(3) == [{"prompt": "a"}, {"prompt": "b"}, {"prompt": "a"}]
    assert as_source(source, seed=0, shuffle=True) is source
    stream = as_source(Stream(), seed=0, shuffle=True, needed=4)
    assert len(stream) == 4 and stream.rows.where(3) == "train_dataset row 3"
    source.rows = []
    for refused, told in (
        (lambda: ShuffledRows([]), "no rows"),
        (lambda: as_source(source, seed=0, shuffle=True), "train_dataset has no rows"),
        (lambda: as_source(Stream(), seed=0, shuffle=True), "max_steps"),
    ):
        with pytest.raises(ValueError, match=told):
            refused()


def test_curriculum_advances_by_accuracy_and_stays_at_the_last_level():
    ends = {"easy": 0.8, "middle": 0.1, "hard": 0.1}
    curriculum, seen = Curriculum([Level(name, ShuffledRows([name[0]]), end) for name, end in ends.items()]), []
    for accuracy in (1.0, 0.6, 0.7, 0.9, 0.9, 0.0, 0.0, 1.0, 1.0, 1.0, 1.0):
        seen += curriculum.take(1)
        curriculum.observe(accuracy)
    # 1.0, 0.6, 0.7 average 0.77; 0.6, 0.7, 0.9 0.73; 0.7, 0.9, 0.9 0.83
    assert "".join(seen) == "eeeeemmmhhh"
    assert curriculum.metrics() == {"curriculum/level": 2}


def test_the_rows_of_a_curriculum_keep_their_places():
    easy, hard = ShuffledRows(as_rows([{}], "easy.jsonl")), ShuffledRows([{}, {}])
    rows = Curriculum([Level("easy", easy), Level("hard", hard)]).rows
    assert [rows.where(i) for i in range(len(rows))] == ["easy.jsonl row 0", "level 'hard' row 0", "level 'hard' row 1"]

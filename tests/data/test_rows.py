"""Rows that know where they came from, and the data sets that are accepted from Python or refused by name."""

import datasets
import pandas
import pytest
import torch

from fastgrpo.data.rows import Rows, as_rows, joined

DATA = [{"prompt": "a"}, {"prompt": "b"}, {"prompt": "c"}]


class Stream(torch.utils.data.IterableDataset):
    """A data set without an end."""

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
        raise ValueError("no b, please")
    return {**row, "seen": True}


def test_a_fault_is_told_with_the_place_of_its_row_even_after_rows_were_changed_cut_and_joined():
    rows = as_rows(DATA, "mine")
    assert len(rows) == 3 and rows[1] is DATA[1]
    assert list(as_rows(DATA[::2], "mine").map(refuse_b)) == [
        {"prompt": "a", "seen": True},
        {"prompt": "c", "seen": True},
    ]
    with pytest.raises(ValueError, match=r"^mine row 1: no b, please$"):
        rows.map(refuse_b)
    changed = rows.head(2).map(dict)
    with pytest.raises(ValueError, match=r"^mine row 1: no b, please$"):
        list(joined([as_rows(DATA[:1], "first"), changed]).each(refuse_b))
    assert rows.head(None) is rows.head(7) is rows and len(rows.head(0)) == 0


def test_the_cause_of_a_fault_stays():
    def fail(row):
        try:
            raise KeyError("k")
        except KeyError as error:
            raise ValueError("told") from error

    with pytest.raises(ValueError, match="place: told") as caught:
        list(Rows([{}], lambda index: "place").each(fail))
    assert isinstance(caught.value.__cause__, KeyError)


@pytest.mark.parametrize(
    "data",
    [DATA, tuple(DATA), datasets.Dataset.from_list(DATA), pandas.DataFrame(DATA, index=[7, 7, 8]), ByIndex()],
    ids=["list", "tuple", "datasets", "pandas", "torch"],
)
def test_sequences_are_accepted(data):
    rows = as_rows(data, "train_dataset")
    assert list(rows) == DATA and [rows[i] for i in range(3)] == DATA
    assert rows.where(2) == "train_dataset row 2"
    assert as_rows(rows, "another name") is rows


@pytest.mark.parametrize("data", [Stream(), datasets.IterableDataset.from_generator(lambda: iter(Stream()))])
def test_a_stream_is_read_as_far_as_it_is_needed(data):
    assert list(as_rows(data, "train_dataset", 5)) == [*DATA, *DATA[:2]]
    with pytest.raises(ValueError, match=r"eval_dataset is of type \w+; it may have no end, so pass max_eval_samples"):
        as_rows(data, "eval_dataset", None, "max_eval_samples")


def test_the_types_of_a_data_frame_become_plain(tmp_path):
    messages = [{"role": "user", "content": "hi"}]
    pandas.DataFrame({"prompt": [messages], "n": [3], "x": [0.5]}).to_parquet(tmp_path / "rows.parquet")
    (row,) = as_rows(pandas.read_parquet(tmp_path / "rows.parquet"), "train_dataset")
    assert row == {"prompt": messages, "n": 3, "x": 0.5}
    assert type(row["prompt"]) is list and type(row["n"]) is int and type(row["x"]) is float


@pytest.mark.parametrize(
    "data, message",
    [
        ({"train": DATA}, r"train_dataset is of type dict; pass one split, such as data\['train'\]"),
        ({"prompt": ["a", "b"]}, "is of type dict; pass a list of dicts, one for each row"),
        (datasets.DatasetDict(test=datasets.Dataset.from_list(DATA)), r"of type DatasetDict; .* data\['test'\]"),
        ((row for row in DATA), r"is of type generator; it can be read only once, so pass list\(...\)"),
        (map(dict, DATA), r"is of type map; it can be read only once"),
        ("train.jsonl", r"is of type str; read the rows first: fastgrpo.data.load_rows\(name\)"),
        ({"a", "b"}, r"is of type set; pass rows \(a list of dicts.*or for training a Source, which has rows, take"),
        (pandas.Series(DATA), r"is of type Series; pass rows \(a list"),
        (7, r"is of type int; pass rows"),
    ],
)
def test_other_data_is_refused_by_name(data, message):
    with pytest.raises(ValueError, match=message):
        as_rows(data, "train_dataset", 5)

"""The completions of a logged step as columns, as parquet, and in the terminal."""

import json

import pandas

from fastgrpo.run.log import cells, columns_of, forget_after, write_parquet

LINE = {
    "step": 5, "group": 0, "prompt": "1+1=", "completion": "2", "rewards": {"right": 1.0}, "advantage": 0.5,
    "finish_reason": "stop", "tokens": 2, "clipped": 0.0, "token_ends": [1, 1], "logps": [-0.1, -0.2],
}  # fmt: skip
TALK = {
    **LINE, "prompt": [{"role": "user", "content": "1+1?"}], "completion": [{"role": "assistant", "content": "2"}],
    "rewards": {"right": None}, "solution": "2",
}  # fmt: skip


def test_the_columns_are_those_of_trl():
    columns = columns_of([LINE, {**LINE, "rewards": {"right": None, "style": 0.25}, "solution": "2"}])
    assert columns == {
        "step": [5, 5], "prompt": ["1+1=", "1+1="], "completion": ["2", "2"], "right": [1.0, None],
        "style": [None, 0.25], "solution": [None, "2"], "advantage": [0.5, 0.5],
    }  # fmt: skip


def test_a_name_of_two_columns_hides_neither():
    columns = columns_of([{**LINE, "rewards": {"right": 1.0, "step": 0.5}, "right": "logged"}])
    assert columns["right"] == [1.0] and columns["right (logged)"] == ["logged"]
    assert columns["step"] == [5] and columns["step (reward)"] == [0.5] and list(columns)[-1] == "advantage"
    columns = columns_of([{**LINE, "rewards": {"step (reward)": 2.0, "step": 0.5}}])
    assert columns["step (reward)"] == [2.0] and columns["step (reward) (reward)"] == [0.5]


def test_an_object_without_fields_is_json(tmp_path):
    """Parquet has no type for it."""
    odd = [{}, [{"a": {}}], {"b": [{}]}]
    for value in odd:
        read = pandas.read_parquet(write_parquet(tmp_path, 5, columns_of([{**LINE, "odd": value}])))
        assert json.loads(read["odd"][0]) == value


def test_a_file_is_read_by_pandas(tmp_path):
    path = write_parquet(tmp_path / "completions", 5, columns_of([LINE, LINE]))
    assert path.name == "completions_00005.parquet" and len(list(path.parent.iterdir())) == 1
    read = pandas.read_parquet(path)
    assert read.to_dict("list") == {
        "step": [5, 5], "prompt": ["1+1="] * 2, "completion": ["2"] * 2, "right": [1.0] * 2, "advantage": [0.5] * 2,
    }  # fmt: skip
    talk = pandas.read_parquet(write_parquet(tmp_path / "completions", 6, columns_of([TALK])))
    assert list(talk["prompt"][0]) == TALK["prompt"] and talk["right"].isna().all()


def test_values_without_a_common_type_are_json(tmp_path):
    odd = [1, "a", {"b": [None]}]
    rows = [{**LINE, "completion": "\ud800", "odd": value} for value in odd]
    read = pandas.read_parquet(write_parquet(tmp_path / "completions", 5, columns_of(rows)))
    assert [json.loads(value) for value in read["odd"]] == odd
    assert [json.loads(value) for value in read["completion"]] == ["\ud800"] * 3


def test_steps_after_a_checkpoint_are_forgotten(tmp_path):
    folder = tmp_path / "completions"
    for step in (2, 4, 100000):
        write_parquet(folder, step, columns_of([LINE]))
    kept = ["completions_00002.parquet", "completions_mine.parquet", "completions_mine.part"]
    for name in (*kept[1:], "completions_00001.part", "completions_00004.part"):  # the last two are of a crash
        (folder / name).touch()
    forget_after(folder, 2)
    assert sorted(path.name for path in folder.iterdir()) == kept
    forget_after(tmp_path / "none", 2)


def test_the_terminal_shows_the_first_ones():
    assert cells(columns_of([LINE] * 3), 1) == [
        ["prompt", "completion", "right", "advantage"],
        ["1+1=", "2", "1.00", "0.50"],
    ]
    assert len(cells(columns_of([LINE] * 3), None)) == 4
    assert cells(columns_of([TALK]), 5)[1] == ["user: 1+1?", "assistant: 2", "", "2", "0.50"]

"""samples.jsonl is gone through once; damaged lines, half a line, and steps that were written again are found."""

import io
import json

import pytest

from fastgrpo.page.samples import Block, SampleFile


def line(step, group, text="x"):
    return json.dumps({"step": step, "group": group, "completion": text}).encode() + b"\n"


def opened(*lines):
    return SampleFile(io.BytesIO(b"".join(lines)))


def texts(file, step):
    return [[row["completion"] for row in file.read(step, block)] for block in file.steps[step]]


def test_groups_are_found_where_they_lie():
    file = opened(line(1, 0, "a"), line(1, 0, "b"), line(1, 3, "c"), line(20, 0, "d"))
    assert file.steps[1] == [Block(0, 0, 2), Block(3, 2 * len(line(1, 0)), 1)]
    assert texts(file, 1) == [["a", "b"], ["c"]] and texts(file, 20) == [["d"]]
    assert (file.damaged, file.half, file.replaced) == (0, False, set())


def test_a_line_that_is_written_differently_is_read_too():
    row = b'{"completion": "}", "group": 0 , "step": 7}\n'
    assert texts(opened(b"\n", row, b" \n"), 7) == [["}"]]


@pytest.mark.parametrize(
    "damaged",
    [
        b"\0" * 50, b"[1]", b"{}", b'{"step": 1}', b'{"step": 1, "group": -1}', b'{"step": true, "group": 0}',
        b'{"step": 1, "group": 0, "completion": "x', b'{"a":' * 9999 + b"}",
        b'{"step": ' + b"1" * 5000 + b', "group": 0}',
    ],
)  # fmt: skip
def test_damaged_lines_are_counted(damaged):
    file = opened(line(1, 0, "a"), damaged + b"\n", line(1, 0, "b"))
    assert file.damaged == 1
    # The place of a group begins with its first line and goes on over lines that are none.
    assert file.steps[1][0].count == 2 and texts(file, 1)[0][0] == "a"


def test_a_damaged_end_is_found():
    file = opened(line(1, 0, "a"), b'{"step": 1, "group": 0, "completion: }\n')
    assert file.damaged == 1 and texts(file, 1) == [["a"]]


@pytest.mark.parametrize("half", [b'{"st', b'{"step": 2, "group": 0, "completion": "so f', b"\xe2\x82"])
def test_half_a_last_line_is_a_run_that_writes(half):
    file = opened(line(1, 0), half)
    assert (file.half, file.damaged, list(file.steps)) == (True, 0, [1])


def test_a_whole_last_line_without_a_newline_counts():
    assert texts(opened(line(1, 0, "a").rstrip()), 1) == [["a"]]


def test_steps_after_a_resume_replace_what_was_written_from_there_on():
    first = [line(step, 0, f"old {step}") for step in (1, 2, 3, 4)]
    file = opened(*first, line(2, 0, "new 2"), line(3, 0, "new 3"))
    assert list(file.steps) == [1, 2, 3] and file.replaced == {2, 3, 4}
    assert [texts(file, step) for step in file.steps] == [[["old 1"]], [["new 2"]], [["new 3"]]]


def test_a_step_that_begins_again_replaces_itself():
    file = opened(line(5, 0, "old"), line(5, 1, "old"), line(5, 0, "new"), line(5, 1, "new"))
    assert texts(file, 5) == [["new"], ["new"]] and file.replaced == {5}


def test_what_a_resume_cuts_off_meanwhile_is_not_read(tmp_path):
    path = tmp_path / "samples.jsonl"
    path.write_bytes(line(1, 0, "a") + line(2, 0, "b"))
    with open(path, "rb") as reader:
        file = SampleFile(reader)
        path.write_bytes(line(1, 0, "a"))
        assert texts(file, 1) == [["a"]] and texts(file, 2) == [[]]


def test_numbers_and_letters_that_json_or_utf8_does_not_know():
    def read(value):
        file = opened(b'{"step": 1, "group": 0, "x": ' + value + b"}\n")
        return next(file.read(1, file.steps[1][0]))["x"]

    assert read(b"NaN") is None
    assert read('"\ud800"'.encode("utf-8", "surrogatepass")) == "\ud800" and read(b'"\xff"') == "\ufffd"

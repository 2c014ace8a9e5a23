"""Sources of prompts: epochs in an order of their own, curricula, and going on where a run stopped."""

import json

import hypothesis
import pandas
import pytest
from hypothesis import strategies as st

from fastgrpo.data.rows import as_rows
from fastgrpo.data.sources import Curriculum, Level, ShuffledRows, as_source


def source_of(count, seed, shuffle=True):
    return ShuffledRows(list(range(count)), seed=seed, shuffle=shuffle)


@hypothesis.given(st.integers(1, 12), st.lists(st.integers(0, 15), max_size=6), st.integers(0, 5), st.booleans())
def test_an_epoch_has_every_row_once_in_an_order_of_its_own(count, takes, seed, shuffle):
    """And rows that are taken in parts, by a source that is restored after each, are the same."""
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


def test_no_rows():
    with pytest.raises(ValueError, match="no rows"):
        ShuffledRows([])
    with pytest.raises(ValueError, match="a curriculum needs at least one level"):
        Curriculum([])
    source = ShuffledRows([{"prompt": "a"}])
    source.rows = []
    with pytest.raises(ValueError, match=r"^train_dataset has no rows: its len\(\) is 0"):
        as_source(source, seed=0, shuffle=True)


def test_shuffled_rows_are_of_any_type_that_has_an_order():
    frame = pandas.DataFrame([{"prompt": "a"}, {"prompt": "b"}])
    assert ShuffledRows(frame, shuffle=False).take(3) == [{"prompt": "a"}, {"prompt": "b"}, {"prompt": "a"}]
    with pytest.raises(ValueError, match="the data of ShuffledRows is of type dict; pass one split"):
        ShuffledRows({"train": []})
    with pytest.raises(ValueError, match="the data of ShuffledRows is of type Iter; it may have no end"):
        ShuffledRows(iter_of([]))


def test_a_source_stays_as_it_is_and_rows_become_one():
    source = ShuffledRows([{"prompt": "a"}])
    assert as_source(source, seed=0, shuffle=True) is source
    stream = as_source(iter_of([{"prompt": "a"}] * 9), seed=0, shuffle=True, needed=4)
    assert len(stream) == 4 and stream.rows.where(3) == "train_dataset row 3"
    with pytest.raises(ValueError, match="is of type Iter; it may have no end, so pass max_steps, which says"):
        as_source(iter_of([]), seed=0, shuffle=True)


def iter_of(rows):
    """A data set that can be iterated over, and has no length."""
    return type("Iter", (), {"__iter__": lambda self: iter(rows)})()


def levels():
    return [
        Level("easy", ShuffledRows(["e"]), until_accuracy=0.8),
        Level("middle", ShuffledRows(["m"]), until_accuracy=0.1),
        Level("hard", ShuffledRows(["h"]), until_accuracy=0.1),
    ]


def test_a_curriculum_moves_on_by_accuracy_and_stays_at_the_end():
    curriculum = Curriculum(levels())
    seen = []
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


def test_a_curriculum_is_restored():
    curriculum = Curriculum(levels())
    for _ in range(4):
        curriculum.take(1)
        curriculum.observe(1.0)
    other = Curriculum(levels())
    other.load_state_dict(json.loads(json.dumps(curriculum.state_dict())))
    assert (other.level, other.recent) == (curriculum.level, curriculum.recent) == (1, [1.0])

"""Sources of prompts: shuffled epochs, curricula, and resuming."""

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


class Endless:
    def __iter__(self):
        while True:
            yield {"prompt": "a"}


def test_rows_of_any_type_become_a_source_and_a_source_stays_as_it_is():
    frame = pandas.DataFrame([{"prompt": "a"}, {"prompt": "b"}])
    source = ShuffledRows(frame, shuffle=False)
    assert source.take(3) == [{"prompt": "a"}, {"prompt": "b"}, {"prompt": "a"}]
    assert as_source(source, seed=0, shuffle=True) is source
    stream = as_source(Endless(), seed=0, shuffle=True, needed=4)
    assert len(stream) == 4 and stream.rows.where(3) == "train_dataset row 3"
    source.rows = []
    for refused, told in (
        (lambda: ShuffledRows([]), "no rows"),
        (lambda: as_source(source, seed=0, shuffle=True), "train_dataset has no rows"),
        (lambda: as_source(Endless(), seed=0, shuffle=True), "max_steps"),
    ):
        with pytest.raises(ValueError, match=told):
            refused()


def levels():
    return [
        Level("easy", ShuffledRows(["e"]), until_accuracy=0.8),
        Level("middle", ShuffledRows(["m"]), until_accuracy=0.1),
        Level("hard", ShuffledRows(["h"]), until_accuracy=0.1),
    ]


def test_curriculum_advances_by_accuracy_and_stays_at_the_last_level():
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

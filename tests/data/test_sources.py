"""Sources of prompts: epochs in an order of their own, curricula, and going on where a run stopped."""

import json

import pytest

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

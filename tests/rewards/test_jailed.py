"""What a jail tells of a value: texts that are equal where the values are. The server is tested by what runs in it."""

import collections
import enum
import itertools

import pytest

from fastgrpo.rewards.jailed import canonical

Point = collections.namedtuple("Point", "x y")
Colour = enum.IntEnum("Colour", "RED")

VALUES = [
    None, ..., True, False, 0, 1, 1.0, -1, 0.5, 1e300, 10**300, 2**53, 2**53 + 1, float("inf"), float("-inf"),
    0.1 + 0.2, 0.3, -0.0, 1j, 1 + 0j, "", "1", "a", "'", '"', "a,b", "\u2028", "\ud800", b"", b"a", bytearray(b"a"),
    [], (), set(), frozenset(), {}, [1], (1,), {1}, {1.0}, [1, 2], [2, 1], {1, 2}, {2, 1}, [[1], 2], [[1, 2]],
    ["a", "b"], ["a,b"], ["a', 'b"], {"a": 1, "b": 2}, {"b": 2, "a": 1}, {1: "a"}, {True: "a"}, {(1, 2): [None]},
    Point(1, 2), (1, 2), Colour.RED, collections.Counter("a"), {"a": 1}, collections.OrderedDict(b=2, a=1),
]  # fmt: skip


def test_texts_are_equal_where_values_are():
    for one, other in itertools.combinations(VALUES, 2):
        assert (canonical(one) == canonical(other)) == (one == other), (one, other)


def test_a_class_cannot_say_what_it_equals():
    class Any(int):
        __eq__ = lambda *_: True  # noqa: E731
        __hash__ = int.__hash__

    class Text(str):
        __str__ = __repr__ = lambda self: "other"

    assert canonical(Any(3)) == canonical(3) and canonical(Text("a")) == canonical("a")


@pytest.mark.parametrize("value, error", [(object(), TypeError), ([range(3)], TypeError), ([float("nan")], ValueError)])
def test_what_is_no_plain_data(value, error):
    with pytest.raises(error):
        canonical(value)

"""Digests differ wherever what a run reads differs, and nowhere else."""

from collections import UserDict

import numpy
import pytest
import torch

from fastgrpo.ranks import Ranks
from fastgrpo.run.resume import digest_of_rows, digest_of_weights, refuse_differences

ROWS = [{"prompt": "ab", "answer": 1}, {"prompt": "cd", "answer": 2}]


@pytest.mark.parametrize(
    "other",
    [
        ROWS[:1],
        ROWS[::-1],
        [{"prompt": "ab", "answer": 1}, {"prompt": "cd", "answer": 3}],
        [{"prompt": "ab", "answer": 1}, {"prompt": "cd", "answer": "2"}],
        [{"prompt": "ab", "answer": 1}, {"prompt": "cd"}],
        [{"prompt": "a", "answer": 1}, {"prompt": "bcd", "answer": 2}],
    ],
)
def test_other_rows_have_another_digest(other):
    assert digest_of_rows(other) != digest_of_rows(ROWS) == digest_of_rows(tuple(dict(row) for row in ROWS))


def test_rows_may_hold_anything():
    def rows(array, thing):
        return [{"prompt": "\ud800", "array": array, "thing": thing, "tensor": torch.ones(2)}]

    first = digest_of_rows(rows(numpy.arange(3), object()))
    assert first == digest_of_rows(rows(numpy.arange(3), object())) != digest_of_rows(rows(numpy.arange(4), object()))
    assert first != digest_of_rows(rows(numpy.arange(3), {1, 2}))
    endless = []
    endless.append(endless)
    for thing in (endless, 10**5000, torch.ones(2).to_sparse(), torch.ones(2, device="meta")):
        assert digest_of_rows(rows(numpy.arange(3), thing)) != digest_of_rows(rows(numpy.arange(4), thing))
    assert digest_of_rows([UserDict(row) for row in ROWS]) == digest_of_rows(ROWS)


def test_the_order_of_columns_does_not_count():
    assert digest_of_rows([{"answer": 1, "prompt": "ab"}, {"prompt": "cd", "answer": 2}]) == digest_of_rows(ROWS)


RING = []
RING.append(RING)


@pytest.mark.parametrize(
    "value",
    [RING, 10**5000, {1: 2, "1": 3}, numpy.ndarray, torch.empty(2, device="meta")],
    ids=["a ring", "a long number", "keys of two types", "a class", "no numbers"],
)
def test_a_value_that_json_refuses_counts_by_its_type_and_the_others_count_in_full(value):
    first = digest_of_rows([{"prompt": "ab", "odd": value}])
    assert first == digest_of_rows([{"prompt": "ab", "odd": value}])
    assert first != digest_of_rows([{"prompt": "cd", "odd": value}])
    assert first != digest_of_rows([{"prompt": "ab", "odd": object()}])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.uint8])
def test_one_bit_of_one_weight_changes_the_digest(dtype):
    """Among whole blocks and in the rest, in every position of the number."""
    weights = {"a": (torch.randn(3, 3000) * 50).to(dtype), "b": torch.ones((), dtype=dtype)}
    first = digest_of_weights(weights)
    assert first == digest_of_weights({name: weight.clone() for name, weight in weights.items()})
    for row, column in ((0, 0), (1, 1500), (2, 2999)):
        for bit in (0, 3, 8 * dtype.itemsize - 1):
            other = weights["a"].clone()
            whole = other.view({1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[dtype.itemsize])
            whole[row, column] ^= torch.tensor(1).to(whole.dtype) << bit
            assert digest_of_weights({**weights, "a": other}) != first
    assert digest_of_weights({**weights, "c": weights["b"]}) != first
    assert digest_of_weights({"a": weights["a"].view(-1), "b": weights["b"]}) != first
    assert digest_of_weights({"a": weights["a"].T, "b": weights["b"]}) != first


class Two(Ranks):
    """Rank 1 of two; rank 0 read other held-out rows."""

    def gather(self, value, what):
        return [value | {"held_out_rows": "others"}, value]


def test_ranks_that_read_different_things_are_refused():
    refuse_differences(Ranks(), training_rows=("a", 3), held_out_rows="b")
    refuse_differences(Two(1, 2), training_rows=("a", 3), held_out_rows="others")
    with pytest.raises(ValueError, match="the held out rows differ between rank 0 and rank 1; make all"):
        refuse_differences(Two(1, 2), training_rows=("a", 3), held_out_rows="b")

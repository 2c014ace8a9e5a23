"""How the kept tokens of a fused loss are cut into chunks."""

from itertools import pairwise

import pytest
import torch

from fastgrpo.kernels import objectives


@pytest.mark.parametrize("lengths", [(5, 1, 7, 3), (0, 7, 0, 0, 7, 0), (1,) * 9, (7, 7), (0,), (3, 4, 7, 1, 6)])
def test_chunks_end_where_sequences_end(lengths):
    parts = objectives.sequence_slices(lengths, 7)
    rows = [0, *torch.tensor(lengths).cumsum(0).tolist()]
    assert parts[0][0].start == parts[0][1].start == 0
    assert (parts[-1][0].stop, parts[-1][1].stop) == (rows[-1], len(lengths))
    for (part, sequences), (following, next_sequences) in pairwise(parts):
        assert part.stop == following.start and sequences.stop == next_sequences.start
    for part, sequences in parts:
        assert (part.start, part.stop) == (rows[sequences.start], rows[sequences.stop])
        assert part.stop - part.start <= 7


def rows_of(lengths, **fields):
    """Kept tokens of sequences of these lengths; only `lengths` matters to the cut."""
    total = torch.tensor(lengths).sum()
    numbers = torch.arange(total)
    return objectives.PolicyRows(numbers, numbers, 1.0, numbers, numbers, None, None, torch.tensor(lengths), **fields)


def cut(rows, size, slices=None):
    """policy_parts, with a policy loss and a forward pass that only tell that they ran."""
    slices = slices or [slice(start, start + size) for start in range(0, len(rows.targets), size)]
    return objectives.policy_parts(rows, None, slices, size, lambda *args: args[0], lambda: "log-probs of all")


def test_tokens_that_stand_alone_are_cut_anywhere():
    parts, known = cut(rows_of((5, 1))._replace(lengths=None), 4)
    assert known is None and [part for part, _ in parts] == [slice(0, 4), slice(4, 8)]
    assert all(sequences == slice(None) for _, sequences in parts)


def test_one_chunk_needs_no_cut():
    assert cut(rows_of((5, 1)), 6) == ([(slice(0, 6), slice(None))], None)


@pytest.mark.parametrize("host", [None, (2, 3, 1)], ids=["lengths-read", "lengths-known"])
def test_sequences_stay_whole_where_they_fit(host):
    parts, known = cut(rows_of((2, 3, 1), host_lengths=host), 4)
    assert known is None and parts == [(slice(0, 2), slice(0, 1)), (slice(2, 6), slice(1, 3))]


def test_a_sequence_longer_than_a_chunk_needs_all_log_probs_first():
    parts, known = cut(rows_of((2, 5)), 4)
    assert known == "log-probs of all" and [part for part, _ in parts] == [slice(0, 4), slice(4, 8)]


def test_lengths_that_only_the_device_knows_are_not_waited_for(monkeypatch):
    def refused(self):
        raise AssertionError("a host sync")

    rows = rows_of((2, 3, 1), active=torch.ones(6, dtype=torch.bool))
    monkeypatch.setattr(torch.Tensor, "tolist", refused)
    assert cut(rows, 4)[1] == "log-probs of all"


def test_sums_and_means_over_sequences():
    values, lengths = torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0, 6.0]), torch.tensor([2, 0, 3, 1])
    assert objectives.sequence_sum(values, lengths).tolist() == [3, 3, 12, 12, 12, 6]
    assert objectives.sequence_mean(values, lengths).tolist() == [1.5, 1.5, 4, 4, 4, 6]

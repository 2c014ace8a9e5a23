"""Parts of the path without Triton that public calls hardly reach: cuts into chunks, shards, 16-bit products."""

from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fastgrpo.kernels import head_torch, objectives
from fastgrpo.kernels.head_torch import ELSEWHERE, NOWHERE, Vocabulary


@given(st.lists(st.integers(0, 7), min_size=1, max_size=12), st.integers(7, 12))
def test_chunks_end_where_sequences_end(lengths, size):
    parts = objectives.sequence_slices(lengths, size)
    rows = [0, *torch.tensor(lengths).cumsum(0).tolist()]
    assert parts[0][0].start == parts[0][1].start == 0
    assert (parts[-1][0].stop, parts[-1][1].stop) == (rows[-1], len(lengths))
    for (part, sequences), (following, next_sequences) in pairwise(parts):
        assert part.stop == following.start and sequences.stop == next_sequences.start
    for part, sequences in parts:
        assert (part.start, part.stop) == (rows[sequences.start], rows[sequences.stop])
        assert part.stop - part.start <= size


def cut(per_sequence, size, **fields):
    """policy_parts, with a policy loss and a forward pass that only tell that they ran."""
    numbers = torch.arange(sum(per_sequence))
    rows = objectives.PolicyRows(numbers, numbers, 1.0, numbers, numbers, None, None, torch.tensor(per_sequence))
    rows = rows._replace(**fields)
    slices = [slice(start, start + size) for start in range(0, len(numbers), size)]
    return objectives.policy_parts(rows, None, slices, size, lambda *args: args[0], lambda: "log-probs of all")


@pytest.mark.parametrize("host", [None, (2, 3, 1)], ids=["lengths-read", "lengths-known"])
def test_chunks_do_not_split_sequences_that_fit(host):
    parts, known = cut((2, 3, 1), 4, host_lengths=host)
    assert known is None and parts == [(slice(0, 2), slice(0, 1)), (slice(2, 6), slice(1, 3))]


def test_tokens_that_stand_alone_are_cut_anywhere_and_long_sequences_need_all_log_probs_first():
    assert cut((5, 1), 4, lengths=None) == ([(slice(0, 4), slice(None)), (slice(4, 8), slice(None))], None)
    assert cut((5, 1), 6) == ([(slice(0, 6), slice(None))], None)
    assert cut((2, 5), 4)[1] == "log-probs of all"


def test_lengths_on_the_device_cause_no_sync(monkeypatch):
    lengths, active = (2, 3, 1), torch.ones(6, dtype=torch.bool)
    monkeypatch.setattr(torch.Tensor, "tolist", None)
    assert cut(lengths, 4, active=active)[1] == "log-probs of all"


def test_accepts_targets_of_other_ranks():
    class Group:
        group_name = "a name"

    shard = Vocabulary(first=3, total=10, largest=4, group=Group())
    local, mine = shard.local(torch.tensor([2, 3, 6, 7]), 4)
    assert local.tolist() == [0, 0, 3, 3] and mine.tolist() == [False, True, True, False]
    located, name = shard.located(torch.tensor([2, 3, 6, 7, 10, -100]), 4)
    assert located.tolist() == [ELSEWHERE, 0, 3, ELSEWHERE, NOWHERE, NOWHERE] and name == "a name"


@pytest.mark.parametrize("rows", [1, 4, 9], ids=lambda rows: f"{rows} rows a block")
def test_logits_of_a_16_bit_head_are_those_of_its_weights_in_fp32(monkeypatch, rows):
    """A sum is rounded to fp32 alone: a product with 16-bit output would be off by up to 2^-8 of itself."""
    hidden, weight = torch.randn(6, 4).bfloat16(), torch.randn(9, 4).bfloat16()
    monkeypatch.setattr(head_torch, "CAST_BYTES", 4 * 4 * rows)
    logits = head_torch.linear_fp32(hidden, weight)
    assert logits.dtype == torch.float32
    terms = hidden.double()[:, None] * weight.double()
    bound = 4 * torch.finfo(torch.float32).eps * terms.abs().sum(-1)
    assert ((logits - terms.sum(-1)).abs() <= bound).all()
    assert not (logits == (hidden @ weight.T).float()).all()

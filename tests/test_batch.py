"""Packing: which state predicts which token, and the token budget."""

import torch

from fastgrpo.batch import Batch, Sample, split_by_tokens


def test_packing_by_hand():
    samples = [
        Sample([10, 11, 12], [13, 14], 0.5, weights=torch.tensor([0.1, 0.2])),
        Sample([20], [21, 22, 23], -1.0, weights=torch.tensor([0.3, 0.4, 0.5])),
    ]
    batch = Batch.pack(samples, "cpu")
    assert batch.input_ids.tolist() == [10, 11, 12, 13, 20, 21, 22]
    assert batch.position_ids.tolist() == [0, 1, 2, 3, 0, 1, 2]
    assert batch.lengths == [4, 3]
    assert batch.rows.tolist() == [2, 3, 4, 5, 6]
    assert batch.targets.tolist() == [13, 14, 21, 22, 23]
    assert batch.cu_seqlens.tolist() == [0, 2, 5]
    assert batch.advantages.tolist() == [0.5, -1.0]
    torch.testing.assert_close(batch.weights, torch.tensor([0.1, 0.2, 0.3, 0.4, 0.5]))
    assert batch.old_logps is None and batch.ref_logps is None


def test_every_target_stands_one_place_after_its_row():
    samples = [Sample([1] * p, list(range(100, 100 + c)), 0.0) for p, c in [(1, 1), (4, 7), (2, 3)]]
    batch = Batch.pack(samples, "cpu")
    whole = [s.prompt_ids + s.completion_ids for s in samples]
    predicted = [sequence[i + 1] for sequence in whole for i in range(len(sequence) - 1)]
    assert [predicted[row] for row in batch.rows.tolist()] == batch.targets.tolist()


def test_token_budget():
    samples = [Sample([0] * n, [0], 0.0) for n in (4, 4, 4, 20, 1, 1)]
    parts = split_by_tokens(samples, 10)
    assert [[len(sample) for sample in part] for part in parts] == [[5, 5], [5], [21], [2, 2]]
    assert split_by_tokens([], 10) == []

"""Packing: which state predicts which token, and the token budget."""

import pytest
import torch

from fastgrpo.data.records import Batch, Sample, prompt_groups


def test_packing_by_hand():
    samples = [
        Sample([10, 11, 12], [13, 14], 0.5, weights=torch.tensor([0.1, 0.2])),
        Sample([20], [21, 22, 23], -1.0, weights=torch.tensor([0.3, 0.4, 0.5])),
    ]
    batch = Batch.pack(samples, "cpu")
    assert batch.input_ids.tolist() == [10, 11, 12, 13, 20, 21, 22]
    assert batch.position_ids.tolist() == [0, 1, 2, 3, 0, 1, 2]
    assert batch.lengths == [4, 3] and batch.branches == []
    assert batch.rows.tolist() == [2, 3, 4, 5, 6]
    assert batch.targets.tolist() == [13, 14, 21, 22, 23]
    assert batch.cu_seqlens.tolist() == [0, 2, 5]
    assert batch.advantages.tolist() == [0.5, -1.0]
    torch.testing.assert_close(batch.weights, torch.tensor([0.1, 0.2, 0.3, 0.4, 0.5]))
    assert batch.old_logps is None and batch.ref_logps is None


def test_every_target_follows_the_token_whose_state_predicts_it():
    samples = [Sample([1] * p, list(range(100, 100 + c)), 0.0) for p, c in [(1, 1), (4, 7), (2, 3)]]
    batch = Batch.pack(samples, "cpu")
    whole = [s.prompt_ids + s.ids for s in samples]
    predicted = [sequence[i + 1] for sequence in whole for i in range(len(sequence) - 1)]
    assert [predicted[row] for row in batch.rows.tolist()] == batch.targets.tolist()


def test_a_shared_prompt_by_hand():
    """Shared prompts come first, then their branches, then other sequences; `rows` keeps the order of the samples."""
    samples = [
        Sample([50], [51, 52], 0.0),
        Sample([10, 11, 12], [13, 14], 0.0),
        Sample([10, 11, 12], [15], 0.0),
        Sample([10, 11, 12], [16, 17, 18], 0.0),
        Sample([30, 31], [32], 0.0),
        Sample([30, 31], [33], 0.0),
        Sample([40], [41, 42], 0.0),
        Sample([40], [43, 44], 0.0),
        Sample([60, 61], [62], 0.0),
        Sample([60, 61], [63, 64], 0.0),
    ]
    batch = Batch.pack(samples, "cpu")
    shared, branches, alone = [10, 11, 12, 40], [13, 16, 17, 41, 43], [50, 51, 30, 31, 60, 61, 63]
    assert batch.input_ids.tolist() == shared + branches + alone
    assert batch.position_ids.tolist() == [0, 1, 2, 0, 3, 3, 4, 1, 1, 0, 1, 0, 1, 0, 1, 2]
    assert batch.lengths == [3, 1, 1, 2, 1, 1, 2, 2, 3]
    assert batch.branches == [[1, 2], [1, 1]]
    rows = [[9, 10], [2, 4], [2], [2, 5, 6], [12], [12], [3, 7], [3, 8], [14], [14, 15]]
    assert batch.rows.tolist() == [row for sample in rows for row in sample]
    assert batch.targets.tolist() == [token for sample in samples for token in sample.ids]
    assert batch.cu_seqlens.tolist() == [0, 2, 4, 5, 8, 9, 10, 12, 14, 15, 17]


def test_unshared_packing_repeats_the_prompt():
    samples = [Sample([10, 11], [12, 13], 0.0), Sample([10, 11], [14, 15], 0.0)]
    batch = Batch.pack(samples, "cpu", share_prompt=False)
    assert batch.input_ids.tolist() == [10, 11, 12, 10, 11, 14]
    assert batch.lengths == [3, 3] and batch.branches == []


def test_groups_are_neighbours_with_equal_prompts():
    samples = [Sample(list(prompt), [0], 0.0) for prompt in ([1, 2], [1, 2], [1], [1, 2])]
    assert [len(group) for group in prompt_groups(samples)] == [2, 1, 1]
    assert [len(group) for group in prompt_groups(samples, share_prompt=False)] == [1, 1, 1, 1]


@pytest.mark.gpu
def test_packing_does_not_wait_for_the_device():
    samples = [Sample([1] * 20000, [2] * 20000, 0.5, weights=torch.ones(20000)) for _ in range(2)]
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        batch = Batch.pack(samples, "cuda")
    finally:
        torch.cuda.set_sync_debug_mode("default")
    torch.testing.assert_close(batch.input_ids.cpu(), Batch.pack(samples, "cpu").input_ids)

"""Log-probs, entropy and gradient in place of the logits, over a whole vocabulary and over shards of one."""

import pytest
import torch

from fastgrpo.kernels import head_torch
from fastgrpo.kernels.head_torch import ELSEWHERE, NOWHERE, Vocabulary, logit_gradient_, softmax_

N, V = 5, 7
WHOLE = Vocabulary(0, V, V, None)


def problem():
    z = (3 * torch.randn(N, V)).double()
    return z.requires_grad_(), torch.randint(V, (N,)), *torch.randn(2, N).double()


@pytest.mark.parametrize("entropy", [False, True])
def test_equals_autograd(entropy):
    z, targets, g, h = problem()
    all_logps = torch.log_softmax(z, -1)
    logps = all_logps.gather(-1, targets[:, None])[:, 0]
    entropies = -(all_logps.exp() * all_logps).sum(-1)
    (expected,) = torch.autograd.grad((g * logps + (h * entropies if entropy else 0)).sum(), z)

    probs = z.detach().clone()
    own_logps, own_entropies = softmax_(probs, targets, WHOLE, return_entropy=entropy)
    torch.testing.assert_close(own_logps, logps.detach())
    torch.testing.assert_close(probs, all_logps.exp().detach())
    assert (own_entropies is None) == (not entropy)
    dz = logit_gradient_(probs, targets, WHOLE, g, own_entropies, h if entropy else None)
    assert dz is probs
    torch.testing.assert_close(dz, expected)


def test_a_shard_knows_its_own_ids():
    shard = Vocabulary(first=3, total=10, largest=4, group=None)
    local, mine = shard.local(torch.tensor([2, 3, 6, 7]), 4)
    assert local.tolist() == [0, 0, 3, 3] and mine.tolist() == [False, True, True, False]


def test_targets_of_other_ranks_and_of_none(monkeypatch):
    class Group:
        group_name = "a name"

    shard = Vocabulary(first=3, total=10, largest=4, group=Group())
    located, name = shard.located(torch.tensor([2, 3, 6, 7, 10, -100]), 4)
    assert located.tolist() == [ELSEWHERE, 0, 3, ELSEWHERE, NOWHERE, NOWHERE] and name == "a name"
    targets = torch.tensor([1, 2])
    assert WHOLE.located(targets, V) == (targets, None)


def test_one_process_reduces_nothing():
    values = torch.randn(3)
    assert (
        head_torch.all_reduce_(values, None) is values and WHOLE.sum_(values) is values and WHOLE.max_(values) is values
    )
    assert Vocabulary.of(torch.randn(V, 2), None) == WHOLE

"""The function of verl's fused head, against plain PyTorch in fp64: results, gradients, and a sharded vocabulary."""

from functools import partial

import pytest
import torch
import torch.distributed as dist

from fastgrpo.integrations.verl import linear_cross_entropy

N, D, V = 12, 6, 23
SHARDS = [9, 14]
TEMPERATURE = 0.7


def problem():
    generator = torch.Generator().manual_seed(3)
    noise = partial(torch.randn, generator=generator, dtype=torch.float64)
    labels = torch.randint(V, (N,), generator=generator)
    labels[:4] = torch.tensor([0, V - 1, SHARDS[0] - 1, SHARDS[0]])  # the first and the last id, the shards' border
    return {
        "hidden": noise(N, D), "weight": noise(V, D), "labels": labels,
        "logps_grad": noise(N), "entropy_grad": noise(N),
    }  # fmt: skip


def plain(hidden, weight, labels):
    """The logits [N, V] at the temperature, the log-probs [N] and the entropies [N], by autograd."""
    logits = hidden @ weight.T / TEMPERATURE
    logits.retain_grad()
    distribution = torch.distributions.Categorical(logits=logits)
    return logits, distribution.log_prob(labels), distribution.entropy()


def leaves(given, dtype=torch.float64):
    return [given[name].to(dtype).clone().requires_grad_() for name in ("hidden", "weight")]


@pytest.mark.parametrize("dtype, tolerance", [(torch.float64, 1e-12), (torch.float32, 2e-6), (torch.bfloat16, 8e-3)])
def test_results_and_gradients_are_those_of_autograd(dtype, tolerance):
    given = problem()
    ours = leaves(given, dtype)
    logps, entropy = linear_cross_entropy(*ours, given["labels"], TEMPERATURE)
    assert logps.dtype == entropy.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    theirs = [value.detach().double().requires_grad_() for value in ours]
    _, *expected = plain(*theirs, given["labels"])
    assert (expected[0] < 0).all()  # log-probs, not the cross-entropy
    gradients = given["logps_grad"], given["entropy_grad"]
    torch.autograd.backward((logps, entropy), [gradient.to(logps.dtype) for gradient in gradients])
    torch.autograd.backward(expected, gradients)
    found = [logps.detach(), entropy.detach(), *(leaf.grad for leaf in ours)]
    truth = [*(value.detach() for value in expected), *(leaf.grad for leaf in theirs)]
    assert [leaf.grad.dtype for leaf in ours] == [dtype, dtype]
    for value, true in zip(found, truth, strict=True):
        assert (value - true).abs().max() <= tolerance * true.abs().max()


@pytest.mark.parametrize("reduction, reduced", [("sum", torch.sum), ("Mean", torch.mean), (None, torch.clone)])
@pytest.mark.parametrize("shares", [(1, 1), (1, 0), (0, 1)], ids=["both", "log-probs", "entropies"])
def test_log_probs_are_reduced_and_entropies_are_not(reduction, reduced, shares):
    given = problem()
    ours, theirs = leaves(given), leaves(given)
    logps, entropy = linear_cross_entropy(*ours, given["labels"], TEMPERATURE, reduction)
    _, true_logps, true_entropy = plain(*theirs, given["labels"])
    torch.testing.assert_close(logps, reduced(true_logps))
    torch.testing.assert_close(entropy, true_entropy)
    found = logps.sum(), entropy @ given["entropy_grad"]
    sum(value for value, share in zip(found, shares, strict=True) if share).backward()
    expected = reduced(true_logps).sum(), true_entropy @ given["entropy_grad"]
    sum(value for value, share in zip(expected, shares, strict=True) if share).backward()
    torch.testing.assert_close([leaf.grad for leaf in ours], [leaf.grad for leaf in theirs])


def test_any_shape_of_tokens_gives_flat_results():
    """Megatron's hidden states are [T, B, D] beside labels [B, T] of one packed row."""
    given = problem()
    flat = linear_cross_entropy(given["hidden"], given["weight"], given["labels"], None)
    hidden = given["hidden"].view(N, 1, D).requires_grad_()
    shaped = linear_cross_entropy(hidden, given["weight"], given["labels"].view(1, N), 1.0)
    torch.testing.assert_close(shaped, flat)
    shaped[0].sum().backward()
    assert shaped[0].shape == (N,) and hidden.grad.shape == (N, 1, D)


def compare_on_rank():
    """As one of two ranks with its rows of the head: the results of the whole, and gradients of the shard."""
    dist.init_process_group("gloo")
    rank, given = dist.get_rank(), problem()
    hidden, weight = leaves(given)
    logits, *expected = plain(hidden, weight, given["labels"])
    gradients = given["logps_grad"], given["entropy_grad"]
    torch.autograd.backward(expected, gradients)
    mine, shard = given["hidden"].clone().requires_grad_(), given["weight"].split(SHARDS)[rank].clone().requires_grad_()
    head = mine, shard, given["labels"], TEMPERATURE
    found = linear_cross_entropy(*head, "none", dist.group.WORLD)
    torch.autograd.backward(found, gradients)
    torch.testing.assert_close(list(found), expected)
    total, entropy_again = linear_cross_entropy(*head, "sum", dist.group.WORLD)
    torch.testing.assert_close(total, expected[0].sum())
    assert torch.equal(entropy_again, found[1])
    torch.testing.assert_close(shard.grad, weight.grad.split(SHARDS)[rank])
    dlogits = (logits.grad / TEMPERATURE).split(SHARDS, 1)[rank]
    torch.testing.assert_close(mine.grad, dlogits @ shard)  # verl sums the parts of the gradient of hidden
    dist.destroy_process_group()

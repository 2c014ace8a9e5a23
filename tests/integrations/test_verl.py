"""The function of verl's fused head, against plain PyTorch in fp64: results, gradients, and a sharded vocabulary."""

import functools
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from ranks import fork, forked

from fastgrpo.integrations.verl import linear_cross_entropy

N, D, V = 12, 6, 23
SHARDS = [9, 14]
TEMPERATURE = 0.7


def problem():
    generator = torch.Generator().manual_seed(3)

    def noise(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    labels = torch.randint(V, (N,), generator=generator)
    labels[:4] = torch.tensor([0, V - 1, SHARDS[0] - 1, SHARDS[0]])  # the first and the last id, the shards' border
    return {
        "hidden": noise(N, D), "weight": noise(V, D), "labels": labels, "temperature": TEMPERATURE, "shards": SHARDS,
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
    """Both results are differentiated. Gradients have the dtype of their input; bf16 rounds them at the end."""
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
    """Either result may be differentiated without the other."""
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


def call(folder, inputs):
    """As one of two ranks, call verl's function with its rows of the head, and write down the results."""
    dist.init_process_group("gloo")
    rank, given = dist.get_rank(), torch.load(inputs)
    hidden = given["hidden"].requires_grad_()
    shard = given["weight"].split(given["shards"])[rank].clone().requires_grad_()
    head = hidden, shard, given["labels"], given["temperature"]
    logps, entropy = linear_cross_entropy(*head, "none", dist.group.WORLD)
    torch.autograd.backward((logps, entropy), (given["logps_grad"], given["entropy_grad"]))
    total, entropy_again = linear_cross_entropy(*head, "sum", dist.group.WORLD)
    found = {"logps": logps, "entropy": entropy, "total": total, "entropy_again": entropy_again}
    found = {name: value.detach() for name, value in found.items()}
    torch.save(found | {"hidden": hidden.grad, "weight": shard.grad}, folder / f"rank-{rank}.pt")
    dist.destroy_process_group()


def test_ranks_with_shards_of_the_head_get_the_results_of_the_whole(tmp_path):
    """And gradients of their shards; verl sums the parts of the gradient of hidden."""
    given = problem()
    torch.save(given, tmp_path / "inputs.pt")
    (tmp_path / "ranks").mkdir()
    codes, outputs = forked(__file__, tmp_path / "ranks", tmp_path / "inputs.pt")("call")
    assert codes == [0, 0], "\n".join(outputs)
    found = [torch.load(tmp_path / "ranks" / f"rank-{rank}.pt") for rank in range(2)]
    hidden, weight = leaves(given)
    logits, logps, entropy = plain(hidden, weight, given["labels"])
    torch.autograd.backward((logps, entropy), (given["logps_grad"], given["entropy_grad"]))
    dlogits = (logits.grad / TEMPERATURE).split(SHARDS, 1)
    weights = zip(weight.grad.split(SHARDS), dlogits, given["weight"].split(SHARDS), strict=True)
    for rank, (gradient, of_shard, shard) in zip(found, weights, strict=True):
        torch.testing.assert_close(rank["logps"], logps.detach())
        torch.testing.assert_close(rank["entropy"], entropy.detach())
        torch.testing.assert_close(rank["total"], logps.detach().sum())
        assert torch.equal(rank["entropy"], rank["entropy_again"])
        torch.testing.assert_close(rank["weight"], gradient)
        torch.testing.assert_close(rank["hidden"], of_shard @ shard)
    torch.testing.assert_close(found[0]["hidden"] + found[1]["hidden"], hidden.grad)


if __name__ == "__main__":
    folder, inputs = Path(sys.argv[1]), sys.argv[2]
    fork({"call": functools.partial(call, folder, inputs)}, folder, count=2)

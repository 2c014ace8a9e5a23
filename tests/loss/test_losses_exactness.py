"""In fp64 every loss and its gradients are those of kernels/reference.py to the rounding of fp64.

The weights of the truth are made here from Python's floats, by the formulas in the table of loss/objective.py.
"""

from dataclasses import replace

import oracle
import pytest
import torch
from objective_cases import CASES, OWN_CASES, SAMPLER_CASES, assert_close, problem

from fastgrpo import Objective, grpo_loss, linear_grpo_loss, linear_logprob, logits_grpo_loss
from fastgrpo.kernels import reference
from fastgrpo.kernels.objectives import PolicyRows

EXACT = 1e-12
ITEMS = 37  # tokens of the whole step
WITH_SAMPLER = {f"sampler-{name}": knobs for name, knobs in SAMPLER_CASES.items()}
TABLE = {**CASES, **OWN_CASES, **WITH_SAMPLER}


def weights_of(objective, mask):
    """(w_n, e_n) of a mask [B, T], [B, T] each."""
    rows, counts = len(mask), mask.sum(1).tolist()
    by_type = {
        "grpo": [1 / (rows * max(count, 1)) for count in counts],
        "bnpo": [1 / sum(counts)] * rows,
        "dapo": [1 / ITEMS] * rows,
        "dr_grpo": [1 / (rows * (objective.max_completion_length or 1))] * rows,
        "luspo": [1 / rows] * rows,
    }
    by_type |= {"sapo": by_type["grpo"], "cispo": by_type["dapo"], "vespo": by_type["dapo"]}
    weights = torch.tensor(by_type[objective.loss_type], dtype=torch.float64)[:, None] * mask
    return weights, objective.entropy_coef / ITEMS * mask.double()


def truth(p, objective, sampler):
    """The loss and its gradients of hidden [N, D], weight, bias, logits [N, V] and logps [N]."""
    index = p.mask.flatten().nonzero()[:, 0]
    weights, entropy_weights = weights_of(objective, p.mask)

    def kept(values):
        return values.flatten()[index]

    rows = PolicyRows(
        index=index, targets=kept(p.targets), temperature=kept(p.temperature),
        advantages=kept(p.advantages[:, None].expand(p.mask.shape)), weights=kept(weights),
        old_logps=kept(p.old_logps), ref_logps=kept(p.ref_logps), lengths=p.mask.sum(1),
        sampler_logps=kept(p.sampler_logps) if sampler else None, entropy_weights=kept(entropy_weights),
    )  # fmt: skip
    leaves = [t.clone().requires_grad_() for t in (p.hidden.flatten(0, 1), p.weight, p.bias)]
    logits = leaves[0] @ leaves[1].T + leaves[2]
    logps, entropy = reference.logits_logprob(
        logits, p.targets.flatten(), temperature=p.temperature.flatten(), return_entropy=True
    )
    loss = oracle.scalar_of(rows, objective)(logps[index], entropy[index])
    return loss.detach(), torch.autograd.grad(loss, [*leaves, logits, logps]), logits.detach(), logps.detach()


def check(output, leaves, loss, gradients):
    assert output.loss.dtype == torch.float64
    assert_close(output.loss.detach(), loss, EXACT)
    for actual, expected in zip(torch.autograd.grad(output.loss, leaves), gradients, strict=True):
        assert_close(actual.reshape(expected.shape), expected, EXACT)


@pytest.mark.parametrize("name", TABLE)
@pytest.mark.parametrize("packed", [False, True], ids=["padded", "packed"])
def test_the_losses(monkeypatch, name, packed):
    objective, sampler, p = Objective(**TABLE[name]), name in WITH_SAMPLER, problem()
    p.temperature = torch.rand(p.mask.shape, dtype=torch.float64) + 0.6
    loss, (*head_gradients, by_logits, by_logps), logits, logps = truth(p, objective, sampler)
    batch = {
        "targets": p.targets, "mask": p.mask, "old_logps": p.old_logps, "ref_logps": p.ref_logps,
        "temperature": p.temperature, **({"sampler_logps": p.sampler_logps} if sampler else {}),
    }  # fmt: skip
    shape = tuple(p.mask.shape)
    rest = {"advantages": p.advantages, "num_items_in_batch": ITEMS, "objective": objective}
    if packed:
        batch = {key: value.flatten() for key, value in batch.items()}
        rest["cu_seqlens"] = torch.arange(shape[0] + 1) * shape[1]
        shape = (p.mask.numel(),)
    for chunk in (None, 8):
        oracle.set_chunk(monkeypatch, chunk)
        head = [t.clone().requires_grad_() for t in (p.hidden.view(*shape, -1), p.weight, p.bias)]
        check(linear_grpo_loss(head[0], head[1], bias=head[2], **batch, **rest), head, loss, head_gradients)
        given = logits.view(*shape, -1).clone().requires_grad_()
        check(logits_grpo_loss(given, **batch, **rest), [given], loss, [by_logits])
    if objective.entropy_coef == 0:
        given = logps.view(shape).clone().requires_grad_()
        alone = {key: value for key, value in batch.items() if key not in ("targets", "temperature")}
        check(grpo_loss(given, **alone, **rest), [given], loss, [by_logps])


@oracle.CHUNKS
@pytest.mark.parametrize("softcap", [None, 2.0])
def test_log_probs_and_entropy(monkeypatch, softcap, chunk):
    oracle.set_chunk(monkeypatch, chunk)
    case = oracle.make_case(bias=True, per_token_temperature=True)

    def scalar(logps, entropy):
        return logps @ case.advantages + entropy @ case.old_logps

    expected = oracle.truth_of(case.head(), case.targets, scalar, temperature=case.temperature, softcap=softcap)
    head = case.head()
    logps, entropy = linear_logprob(
        **head, targets=case.targets, temperature=case.temperature, logit_softcap=softcap, return_entropy=True
    )
    assert_close(logps.detach(), expected["logps"], EXACT)
    assert_close(entropy.detach(), expected["entropy"], EXACT)
    for name, gradient in zip(head, torch.autograd.grad(scalar(logps, entropy), list(head.values())), strict=True):
        assert_close(gradient, expected[name], EXACT)


@pytest.mark.parametrize("loss", [linear_grpo_loss, logits_grpo_loss])
def test_a_temperature_in_fp32_costs_no_exactness(loss):
    """Its value is rounded, and nothing that is computed with it."""
    case = oracle.make_case(per_token_temperature=True)
    gradients = []
    for temperature in (case.temperature.float(), case.temperature.float().double()):
        leaf = case.hidden @ case.weight.T if loss is logits_grpo_loss else case.hidden.clone()
        head = [leaf.detach().requires_grad_(), *([case.weight] if loss is linear_grpo_loss else [])]
        out = loss(*head, case.targets, case.advantages, mask=case.mask, temperature=temperature, entropy_coef=0.1)
        gradients += torch.autograd.grad(out.loss, head[:1])
    assert_close(*gradients, EXACT)


@pytest.mark.parametrize("low", ["advantages", "hidden"])
def test_the_exactness_of_the_weights_is_that_of_the_best_input(low):
    """1/3 of a mean over three tokens: fp64 where the head or the advantages are, whatever the other is."""
    case = oracle.make_case((3,), masked=0.0, old=False)
    case = replace(case, advantages=torch.ones(3).double(), temperature=1.0)
    case = replace(case, advantages=case.advantages.float()) if low == "advantages" else case.to(torch.float32)
    output, _ = oracle.run(case, linear_grpo_loss)
    assert output.metrics["policy_loss"].item() == pytest.approx(-1, abs=1e-15)


def test_fp32_weights_are_as_they_were():
    mask, starts = torch.rand(40) > 0.3, torch.tensor([0, 7, 19, 40])
    counts = torch.stack([part.sum() for part in mask.split([7, 12, 21])])
    expected = mask.float() / (3 * counts.float()).repeat_interleave(starts.diff())
    weights = Objective("grpo").token_weights(mask, starts)
    assert weights.dtype == torch.float32 and torch.equal(weights, expected)

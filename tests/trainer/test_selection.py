"""Tokens that keep their surrogate: against TRL's own functions, and the gradient against plain autograd."""

import dataclasses
from types import SimpleNamespace

import hypothesis
import hypothesis.strategies as st
import pytest
import tiny
import torch
import trl
from runs import logits_of, samples_of
from updates import before_each_step, make_update

from fastgrpo import Objective
from fastgrpo.data.records import Sample
from fastgrpo.policy.model import Policy
from fastgrpo.trainer.update import quantile

pytestmark = pytest.mark.usefixtures("without_curves")

T = 11  # more than the longest completion


def update_of(model, objective=None, **settings):
    objective = objective or Objective("grpo")
    return make_update(Policy(model), objective, temperature=0.9, max_tokens=30, **settings)


@torch.no_grad()
def padded(model, samples):
    """[S, T] mask, log-probs and entropies by full logits, one sample at a time."""
    mask, logps, entropies = torch.zeros(len(samples), T), torch.zeros(len(samples), T), torch.zeros(len(samples), T)
    for i, sample in enumerate(samples):
        n, scores = len(sample.ids), (logits_of(model, sample) / 0.9).log_softmax(-1)
        mask[i, :n] = 1
        logps[i, :n] = scores.gather(1, torch.tensor(sample.ids)[:, None])[:, 0]
        entropies[i, :n] = -(scores.exp() * scores).sum(-1)
    return mask, logps, entropies


def ragged(values, samples):
    """The rows of [S, T] without their padding."""
    return [row[: len(sample.ids)] for row, sample in zip(values, samples, strict=True)]


@hypothesis.given(st.floats(0, 1), st.lists(st.floats(-4, 4, width=32), min_size=1, max_size=60))
def test_entropy_quantile_equals_torchs(share, values):
    values = torch.tensor(values)
    assert torch.equal(values >= quantile(values, share), values >= torch.quantile(values, share))


@pytest.mark.parametrize("share", [0.0, 0.5])
def test_high_entropy_tokens_equal_trls(share):
    trainer, model = trl.GRPOTrainer, tiny.model("llama")
    samples = [dataclasses.replace(sample, masked=i == 4) for i, sample in enumerate(samples_of())]
    update = update_of(model, top_entropy_quantile=share)
    kept, others = [0, 1, 3, 5], [2]
    selected, entropy = update.selection(samples, kept, others, first=True)
    mask, _, entropies = padded(model, samples)
    mask[4] = 0
    alone = SimpleNamespace(pad_across_processes=lambda values, **_: values, gather=lambda values: values)
    expected = trainer.get_high_entropy_mask(SimpleNamespace(accelerator=alone), entropies, mask, 1 - share)
    rows = ragged(expected, samples)
    assert selected.keys() == {*kept} and 0 < expected.sum() < mask.sum()
    for i in kept:
        assert torch.equal(selected[i].counted.bool(), rows[i]), i
        torch.testing.assert_close(selected[i].entropy_weights, rows[i] / expected.sum())
    assert entropy == pytest.approx(entropies[expected].mean().item(), rel=1e-5)


def test_off_policy_mask_equals_trls():
    trainer, model = trl.GRPOTrainer, tiny.model("llama")
    samples = samples_of()
    mask, logps, _ = padded(model, samples)
    drift = torch.tensor([0.5, 0.4, 0.3, 0.2, 0.05, 0.3])[:, None]  # the mean gap of each sample
    drift = drift + 0.2 * torch.randn(logps.shape, generator=torch.Generator().manual_seed(0))
    old = ragged(logps + drift, samples)
    samples = [dataclasses.replace(sample, old_logps=o) for sample, o in zip(samples, old, strict=True)]
    update = update_of(model, off_policy_mask_threshold=0.2)
    selected, entropy = update.selection(samples, range(6), [], first=False)
    advantages = torch.tensor([[sample.advantage] for sample in samples])
    expected = trainer.get_off_policy_mask(advantages, logps, logps + drift, mask, 0.2)[:, 0]
    assert expected.tolist() == [1, 0, 1, 1, 1, 1]  # negative are those of 1 and 4, and only 1 has moved
    for i, sample in selected.items():
        assert sample.counted.tolist() == [expected[i]] * len(sample.ids) and sample.entropy_weights is None
    assert entropy is None and len(selected) == 6


def test_off_policy_mask_prefers_sampler_log_probs_and_ignores_unknown_ones():
    model = tiny.model("llama")
    negative = Sample([5, 6], [7, 8, 9], advantage=-1.0)
    logps = padded(model, [negative])[1][0, :3]
    update = update_of(model, off_policy_mask_threshold=0.5)
    gap = torch.tensor([3.0, float("nan"), 0.0])  # a mean of 1.0 over three tokens
    far = dataclasses.replace(negative, sampler_logps=logps + gap, old_logps=logps)
    assert update.selection([far], [0], [], first=True)[0][0].counted.sum() == 0
    near = dataclasses.replace(negative, sampler_logps=logps + 0.4 * gap, old_logps=logps + 9)
    assert update.selection([near], [0], [], first=True)[0][0].counted.sum() == 3


def plain_loss(model, samples, share, coef, beta):
    """TRL's grpo loss of one update, with its mask and its bonus, over full logits and with autograd."""
    total = torch.zeros(())
    mask, _, entropies = padded(model, samples)
    top = (entropies >= torch.quantile(entropies[mask.bool()], 1 - share)) & mask.bool()
    for i, sample in enumerate(samples):
        n, scores = len(sample.ids), (logits_of(model, sample) / 0.9).log_softmax(-1)
        logps = scores.gather(1, torch.tensor(sample.ids)[:, None])[:, 0]
        gap = logps.detach() - logps  # the reference is the policy as it is
        surrogate = -(logps - logps.detach()).exp() * sample.advantage * top[i, :n]
        total = total + (surrogate + beta * (gap.exp() - gap - 1)).sum() / n / len(samples)
        total = total - coef * (-(scores.exp() * scores).sum(-1) * top[i, :n]).sum() / top.sum()
    return total


@pytest.mark.parametrize("coef, beta", [(0.3, 0.0), (0.0, 0.2)])
def test_an_update_equals_autograd_over_full_logits(coef, beta):
    samples, objective = samples_of(), Objective("grpo", entropy_coef=coef, beta=beta)
    update, truth = update_of(tiny.model("llama"), objective, top_entropy_quantile=0.4), tiny.model("llama")
    masters = update.learner.optimizer.masters
    seen = before_each_step(update, lambda: torch.cat([master.grad.flatten() for master in masters]))
    metrics = update([samples])[1]
    expected = plain_loss(truth, samples, 0.4, coef, beta)
    expected.backward()
    assert metrics["loss"] == pytest.approx(expected.item(), abs=1e-5)
    want = torch.cat([p.grad.flatten() for p in truth.parameters()])
    assert want.norm() > 0.01 and (seen[0] - want).norm() < 1e-5 * want.norm()

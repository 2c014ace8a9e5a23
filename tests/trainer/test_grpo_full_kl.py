"""The step with the KL of the full distributions: its gradient against full logits."""

import dataclasses

import pytest
import tiny
import torch
from runs import logits_of, samples_of
from torch.distributions import Categorical, kl_divergence
from updates import gradients, make_update

from benchmarks import architectures
from fastgrpo.data.records import Batch
from fastgrpo.loss.objective import Objective
from fastgrpo.policy.load import prepare
from fastgrpo.policy.lora import add_lora
from fastgrpo.policy.micro_batches import micro_batches
from fastgrpo.policy.model import Policy

FULL, TEMPERATURE = {"beta": 0.2, "kl": "full"}, 0.8
CAPS = {"final_logit_softcapping": 2.0, "attn_logit_softcapping": 0.5}
# name: (policy, device of the reference)
POLICIES = {
    "copy": (lambda: Policy(tiny.model()), None),
    "streamed": (lambda: Policy(tiny.model("smollm3-like")), "cpu"),
    "checkpointed adapters": (
        lambda: Policy(add_lora(tiny.model(gradient_checkpointing=True), r=4, target_modules=("all-linear",))), None,
    ),
    "soft-capped": (lambda: prepare(architectures.tiny_model("gemma2", **CAPS), own_attention=True), None),
}  # fmt: skip


def weighted_groups():
    """Two groups of three completions, those of a group of one prompt, with the weights of their tokens."""
    samples = samples_of()
    samples = [dataclasses.replace(s, prompt_ids=samples[i // 3 * 3].prompt_ids) for i, s in enumerate(samples)]
    tokens = sum(len(s.ids) for s in samples)
    return [dataclasses.replace(s, weights=torch.full((len(s.ids),), 1 / tokens)) for s in samples]


def distributions(policy, sample):
    return Categorical(logits=logits_of(policy.module, sample) / TEMPERATURE)


def move(policy):
    """Change the weights that are trained, each by a share of its size; fresh adapters begin at 0."""
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in policy.module.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn_like(parameter) * (0.1 * parameter.std().nan_to_num(0) + 0.02))


@pytest.mark.parametrize("share_prompt", [True, False], ids=["shared", "apart"])
@pytest.mark.parametrize("name", POLICIES)
def test_the_gradient_is_that_of_full_logits(name, share_prompt):
    build, device = POLICIES[name]
    policy, samples = build(), weighted_groups()
    with torch.no_grad():
        reference = [distributions(policy, sample) for sample in samples]
    update = make_update(policy, Objective(**FULL), device, TEMPERATURE, share_prompt=share_prompt)
    move(policy)
    loss, divergences = 0.0, []
    for sample, ref in zip(samples, reference, strict=True):
        now = distributions(policy, sample)
        logps, kl = now.log_prob(torch.tensor(sample.ids)), kl_divergence(now, ref)
        ratio = (logps - logps.detach()).exp()
        loss = loss + (sample.weights * (FULL["beta"] * kl - ratio * sample.advantage)).sum()
        divergences.append(kl.detach())
    loss.backward()
    expected, mean = gradients(policy.module), torch.cat(divergences).mean().item()
    assert mean > 0.01
    found, kl, parts = 0.0, 0.0, micro_batches(samples, 24, share_prompt)
    assert len(parts) == 2
    for indices in parts:
        batch = Batch.pack([samples[i] for i in indices], "cpu", share_prompt)
        out = update.loss(batch, step_tokens=1.0, with_entropy=False)
        out.loss.backward()
        found, kl = found + out.loss.item(), kl + (out.metrics["kl"] * out.metrics["active_tokens"]).item()
    assert found == pytest.approx(loss.item(), abs=1e-5)
    assert kl == pytest.approx(mean * sum(len(s.ids) for s in samples), rel=1e-4)
    actual = gradients(policy.module)
    assert actual.keys() == expected.keys()
    for weight, gradient in expected.items():
        torch.testing.assert_close(actual[weight], gradient, rtol=1e-3, atol=2e-5, msg=weight)

"""Filters and the gradient: what the loss makes of tokens that top-k, top-p or min-p let through."""

import dataclasses
from contextlib import nullcontext

import pytest
import tiny
import torch
from runs import lines, make_trainer
from updates import make_update, rising

from fastgrpo import Objective
from fastgrpo.data.records import Batch, Prompt
from fastgrpo.policy.model import Policy
from fastgrpo.rollout.engine import RolloutEngine
from fastgrpo.rollout.probe import DrawCheck
from fastgrpo.rollout.sampling import SamplingParams

pytestmark = pytest.mark.usefixtures("without_curves")

PROMPT = Prompt([5, 9, 20], "p")
FILTERS = [{"top_k": 4}, {"min_p": 0.5}, {"top_k": 6, "top_p": 0.8}]


def drawn(policy, filters):
    """One completion of a single token for every token that the filters keep, with an advantage of its own."""
    engine, sampling = RolloutEngine(policy), SamplingParams(max_tokens=1, seed=0, **filters)
    rollouts = {rollout.ids[0]: rollout for rollout in engine.generate([PROMPT.ids], 256, sampling)}
    advantages = torch.linspace(-1, 2, len(rollouts)).tolist()
    return [dataclasses.replace(r, advantage=a) for r, a in zip(rollouts.values(), advantages, strict=True)]


def gradient(policy, completions, objective, corrected):
    """The gradient of the loss, the expectation over the draws taken exactly: each token by its probability q."""
    update = make_update(policy, objective)
    samples = [
        dataclasses.replace(c, weights=c.sampler_logps.exp(), sampler_logps=c.sampler_logps if corrected else None)
        for c in completions
    ]
    policy.module.zero_grad()
    out = update.loss(Batch.pack(samples, policy.device), step_tokens=1.0, with_entropy=False)
    out.loss.backward()
    return torch.cat([p.grad.flatten() for p in policy.module.parameters()]), out.metrics


def expected_gradient(policy, completions):
    """- sum over the kept tokens of p A grad log p, by autograd over full logits."""
    policy.module.zero_grad()
    logps = policy.module(torch.tensor([PROMPT.ids])).logits[0, -1].log_softmax(-1)
    tokens = torch.tensor([completion.ids[0] for completion in completions])
    advantages = torch.tensor([completion.advantage for completion in completions])
    (-(logps.exp().detach() * logps)[tokens] * advantages).sum().backward()
    return torch.cat([p.grad.flatten() for p in policy.module.parameters()]), logps.exp()[tokens].sum().item()


@pytest.mark.parametrize("filters", [*FILTERS, {"repetition_penalty": 1.6}], ids=str)
@pytest.mark.parametrize("mode", ["token_truncate", "token_mask", "sequence_truncate", "sequence_mask"])
def test_the_expected_gradient_is_that_of_the_policy_over_the_kept_tokens(filters, mode):
    policy = Policy(tiny.model("llama"))
    completions = drawn(policy, filters)
    expected, mass = expected_gradient(policy, completions)
    correction = Objective(importance_sampling_mode=mode, importance_sampling_clip_max=None)
    ours, metrics = gradient(policy, completions, correction, corrected=True)
    torch.testing.assert_close(ours, expected, atol=1e-6, rtol=1e-4)
    lowest, highest = (metrics[f"sampling/importance_sampling_ratio/{name}"].item() for name in ("min", "max"))
    plain, _ = gradient(policy, completions, Objective(), corrected=False)
    if filters in FILTERS:  # without the correction each kept token counts by p / mass
        assert 1 < len(completions) < 64 and mass < 0.99
        assert lowest == pytest.approx(mass, rel=1e-5) and highest == pytest.approx(mass, rel=1e-5)
        torch.testing.assert_close(plain * mass, expected, atol=1e-6, rtol=1e-4)
    else:  # each token has a ratio of its own
        assert highest > lowest + 0.01 and (plain - expected).norm() > 0.01 * expected.norm()


def test_a_run_with_a_penalty_learns_and_is_judged_without_it(tmp_path, monkeypatch):
    settings = {"repetition_penalty": 1.5, "importance_sampling_mode": "token_truncate", "min_p": 0.01}
    settings |= {"eval_num_generations": 2, "prompts_per_step": 1}
    rows = [{"prompt": "ab"}]
    trainer = make_trainer(tmp_path, rising, rows, rows, max_steps=1, **settings)
    seen, add = [], trainer.engine.add_request
    monkeypatch.setattr(
        trainer.engine, "add_request", lambda *given, **named: seen.append(given) or add(*given, **named)
    )
    trainer.train()
    (row,) = [row for row in lines(tmp_path / "run") if "sampler/logp_gap_mean" in row]
    assert row["sampler/logp_gap_mean"] < 1e-5  # the old policy's log-probs are those without the penalty
    assert row["sampling/sampling_logp_difference/max"] > 0.01
    changed = [(sampling.penalizes, sampling.min_p > 0) for *_, sampling in seen]
    assert changed == [*[(False, False)] * 2, (True, True), *[(False, False)] * 2]
    assert trainer.sampling.penalizes


@pytest.mark.parametrize(("gap", "half", "silent"), [(2e-3, 0, 0), (4e-3, 8, 8), (4e-3, 8, 0), (5e-4, 0, 0)])
def test_completions_of_another_policy_train_nothing_and_stop_the_run(tmp_path, monkeypatch, gap, half, silent):
    trainer = make_trainer(tmp_path, rising, dtype="float32", beta=0.0, updates_per_rollout=2)
    trainer.step()
    before, (samples, metrics) = [p.detach().clone() for p in trainer.policy.parameters()], trainer.collect()
    apart = [sample.replace(logps=sample.logps - gap * (i >= half)) for i, sample in enumerate(samples)]
    apart = [sample.replace(advantage=0.0 if i < silent else 1.0) for i, sample in enumerate(apart)]
    monkeypatch.setattr(trainer, "collect", lambda: (apart, metrics))
    with nullcontext() if gap < 1e-3 else pytest.raises(ValueError, match=r"the policy's weights: .* by 0\.00\d+ nats"):
        trainer.step()
    assert all(map(torch.equal, before, trainer.policy.parameters())) == (gap > 1e-3)
    trainer.log.close()


def test_in_16_bits_few_tokens_may_differ_more():
    check, stopped = DrawCheck(torch.bfloat16), []
    for gap in (0.7, 0.2):  # at most 0.8 for 4 tokens, and 0.1 for 256
        check.add(torch.full((4 if gap > 0.5 else 252,), -gap), torch.zeros(4 if gap > 0.5 else 252))
        stopped.append(check.veto(torch.tensor(1.0)).isnan().item())
    assert stopped == [False, True]
    with pytest.raises(ValueError, match=r"0\.000000 at the draw, and -0\.207813 in the update"):
        check.end()

"""Advantages of tokens in updates: gradients against fp64 autograd of the formula, and runs with step rewards."""

import dataclasses
import itertools

import pytest
import tiny
import torch
from runs import logps_of, make_trainer, samples_of
from updates import before_each_step, make_update

from fastgrpo.kernels import reference
from fastgrpo.loss.advantages import process_advantages
from fastgrpo.loss.objective import Objective
from fastgrpo.policy.model import Policy

pytestmark = pytest.mark.usefixtures("without_curves")

LOSSES = {"grpo": {}, "dr_grpo": {"max_completion_length": 9}, "cispo": {"epsilon_high": 1.01}, "sapo": {}}


def stepped_samples():
    """Six samples in two groups of three, with advantages of tokens: one step each, some with a second one."""
    samples = samples_of()
    lengths = [len(sample.ids) for sample in samples]
    steps = [[(1, float(i)), (length, -0.5 * i)][: 1 + i % 2] for i, length in enumerate(lengths)]
    own = process_advantages(steps, lengths, 3)
    pairs = [{"advantage": a.mean().item(), "token_advantages": a.float()} for a in own]
    return [dataclasses.replace(s, **values) for s, values in zip(samples, pairs, strict=True)]


def updates_of(samples, objective, **settings):
    """(gradients, weights of the model) before each step of the optimizer, and the samples as updated."""
    model = tiny.model("llama").double()
    update = make_update(Policy.of(model), objective, learning_rate=3e-2, max_tokens=12, **settings)

    def look():
        weights = {name: value.clone() for name, value in model.state_dict().items()}
        return {name: p.grad.clone() for name, p in model.named_parameters()}, weights

    kept = before_each_step(update, look)
    return kept, update([samples[:3], samples[3:]])[0]


@pytest.mark.parametrize("loss_type", LOSSES)
def test_gradients_are_those_of_the_formula_over_minibatches_and_passes(loss_type):
    objective, samples = Objective(loss_type, **LOSSES[loss_type]), stepped_samples()
    kept, updated = updates_of(samples, objective, updates_per_rollout=2, num_iterations=2)
    assert len(kept) == 4
    model = tiny.model("llama").double()
    with torch.no_grad():
        first = [logps_of(model, sample) for sample in samples]
    for (gradients, weights), minibatch in zip(kept, itertools.cycle([range(3), range(3, 6)]), strict=False):
        model.load_state_dict(weights)
        model.zero_grad()
        logps, old = torch.cat([logps_of(model, samples[i]) for i in minibatch]), [first[i] for i in minibatch]
        own = torch.cat([samples[i].token_advantages.double() for i in minibatch])
        token_weights = torch.cat([updated[i].weights.double() for i in minibatch])
        loss, _ = reference.policy_loss(logps, torch.cat(old), None, own, token_weights, objective)
        loss.backward()
        for name, parameter in model.named_parameters():
            torch.testing.assert_close(gradients[name], parameter.grad, atol=1e-9, rtol=1e-5)
    assert any((gradient != 0).any() for gradient in kept[-1][0].values())


def test_clipping_depends_on_the_sign_of_each_tokens_advantage():
    update = make_update(Policy.of(tiny.model()), Objective(epsilon=0.2))
    sample = dataclasses.replace(samples_of()[0], old_logps=torch.zeros(4), advantage=0.0)
    for signs, share in (([1, -1, -1, 1], 0.5), ([0, 0, 0, 0], 0.0), ([1, 1, -1, -1], 0.75), ([0, 1, 1, 1], 0.25)):
        own = dataclasses.replace(sample, token_advantages=torch.tensor(signs, dtype=torch.float32))
        ratios, clipped = update.ratios(own, torch.tensor([1.0, 1.0, -1.0, 0.0]))
        assert clipped.float().mean() == share
        torch.testing.assert_close(ratios, torch.tensor([1, 1, -1, 0]).exp())


def test_replaces_groups_with_equal_step_rewards(tmp_path):
    def by_prompt(prompts, completions, completion_ids, log_steps, **_):
        rewards = [[0.5 if prompt in ("ab", "hello ") else i % 2] for i, prompt in enumerate(prompts)]
        log_steps([[len(ids)] for ids in completion_ids], rewards)
        return [0.0] * len(completions)

    settings = {"process_rewards": "token", "dynamic_sampling": 3, "shuffle_dataset": False, "prompts_per_step": 2}
    values = make_trainer(tmp_path, by_prompt, **settings).step()
    # "ab" is dropped and "c" kept; "hello " is dropped and "1+1=" kept: one of two in each batch.
    told = [values[f"dynamic_sampling/{name}"] for name in ("num_gen_batches", "filled_groups", "dropped_groups")]
    assert told == [3, 0, 2] and values["frac_informative"] == 0.5


def test_rejects_process_rewards_without_logged_steps(tmp_path):
    with pytest.raises(ValueError, match="process_rewards=token needs step rewards"):
        make_trainer(tmp_path, process_rewards="token").step()

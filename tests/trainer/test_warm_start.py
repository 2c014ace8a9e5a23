"""Supervised training on completions."""

import pytest
import tiny
import torch

from fastgrpo.data import Sample
from fastgrpo.policy.model import Policy
from fastgrpo.rollout.engine import RolloutEngine
from fastgrpo.rollout.sampling import SamplingParams
from fastgrpo.trainer.supervised import sft


def test_it_learns_the_completions_and_reports_their_likelihood():
    examples = [Sample([5, 6, i], [i, i + 1, 1]) for i in range(10, 18)]
    model = tiny.model("llama")
    losses = []
    sft(
        Policy(model), examples, steps=80, batch_size=8, learning_rate=1e-2,
        on_step=lambda step, loss: losses.append(loss),
    )  # fmt: skip
    assert len(losses) == 80 and losses[0] > 2 and losses[-1] < 0.05
    rollouts = RolloutEngine(model).generate(
        [example.prompt_ids for example in examples],
        1,
        SamplingParams(temperature=0, max_tokens=5, stop_token_ids=(1,)),
    )
    assert [rollout.ids for rollout in rollouts] == [example.ids for example in examples]


def test_no_examples():
    with pytest.raises(ValueError, match="at least one example"):
        sft(Policy(tiny.model()), [], steps=1, batch_size=1, learning_rate=1e-3)


def test_updates_that_are_never_finite_end_it():
    model = tiny.model()
    with torch.no_grad():
        model.get_input_embeddings().weight[5] = torch.nan
    with pytest.raises(ValueError, match="10 updates in a row were not finite"):
        sft(Policy(model), [Sample([5, 6], [7, 1])], steps=50, batch_size=1, learning_rate=1e-3)

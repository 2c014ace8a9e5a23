"""The knobs of the loss: the weights of every aggregation by hand, and which knobs are refused."""

import dataclasses
import math

import pytest
import torch

from fastgrpo import Objective
from fastgrpo.loss.objective import Interval

# Four sequences of 3, 2, 0 and 4 tokens; the second is all masked out, the third has no token at all.
MASK = torch.tensor([1, 1, 0, 0, 0, 1, 1, 0, 1]).bool()
CU_SEQLENS = torch.tensor([0, 3, 5, 5, 9])
TYPES = ["grpo", "bnpo", "dapo", "dr_grpo"]
NAN, INF = math.nan, math.inf


def weights(objective, mask=MASK, **knobs):
    return objective.token_weights(mask, CU_SEQLENS, **knobs)


def test_grpo_is_the_mean_over_sequences_of_the_mean_over_tokens():
    # 1 / (S len): S = 4, kept tokens 2 and 3; a sequence without a kept token still counts in S.
    expected = [1 / 8, 1 / 8, 0, 0, 0, 1 / 12, 1 / 12, 0, 1 / 12]
    assert weights(Objective("grpo")).tolist() == pytest.approx(expected)


@pytest.mark.parametrize("loss_type", ["bnpo", "dapo"])
def test_bnpo_and_dapo_are_the_mean_over_tokens(loss_type):
    # 5 kept tokens
    assert weights(Objective(loss_type)).tolist() == pytest.approx([0.2, 0.2, 0, 0, 0, 0.2, 0.2, 0, 0.2])
    assert Objective(loss_type).token_weights(MASK).sum().item() == pytest.approx(1)  # without sequences


@pytest.mark.parametrize("count", [20, 20.0, torch.tensor(20), torch.tensor(20.0)])
def test_only_dapo_divides_by_the_tokens_of_the_step(count):
    expected = [0.05, 0.05, 0, 0, 0, 0.05, 0.05, 0, 0.05]
    assert weights(Objective("dapo"), num_items_in_batch=count).tolist() == pytest.approx(expected)
    for loss_type in ("grpo", "bnpo", "dr_grpo"):
        objective = Objective(loss_type, max_completion_length=10)
        assert torch.equal(weights(objective, num_items_in_batch=count), weights(objective))


def test_dr_grpo_divides_by_a_constant():
    # 1 / (S max_completion_length) = 1 / 40
    expected = [0.025, 0.025, 0, 0, 0, 0.025, 0.025, 0, 0.025]
    assert weights(Objective("dr_grpo", max_completion_length=10)).tolist() == pytest.approx(expected)


@pytest.mark.parametrize("loss_type", TYPES)
def test_weights_of_a_batch_without_a_kept_token_are_zero(loss_type):
    objective, none = Objective(loss_type, max_completion_length=10), torch.zeros(9, dtype=torch.bool)
    assert weights(objective, none).dtype == torch.float32 and torch.equal(weights(objective, none), torch.zeros(9))
    assert weights(objective, none, num_items_in_batch=0).sum() == 0


def test_defaults_are_those_of_trl():
    objective = Objective()
    assert (objective.loss_type, objective.importance_sampling_level, objective.kl) == ("dapo", "token", "k3")
    assert (objective.epsilon, objective.epsilon_high, objective.delta, objective.beta) == (0.2, 0.2, None, 0.0)


def test_epsilon_high_follows_epsilon_unless_given():
    assert Objective(epsilon=0.3).epsilon_high == 0.3
    assert Objective(epsilon=0.2, epsilon_high=0.28).epsilon_high == 0.28
    assert Objective(epsilon=0.2, epsilon_high=0.0).epsilon_high == 0.0


def test_an_objective_is_a_frozen_value():
    with pytest.raises(dataclasses.FrozenInstanceError):
        Objective().beta = 0.1
    assert hash(Objective()) == hash(Objective(epsilon_high=0.2))


# the knob that the error names, and settings that are refused
REFUSED = [
    ("loss_type", {"loss_type": "ppo"}, {"loss_type": ["dapo"]}),
    ("importance_sampling_level", {"importance_sampling_level": "word"}, {"loss_type": "luspo"},
     {"loss_type": "vespo", "importance_sampling_level": "sequence"}),
    ("kl", {"kl": "k4"}, {"kl": "full", "use_bias_correction_kl": True}),
    ("epsilon", {"epsilon": -0.1}, {"epsilon": 1.0}, {"epsilon": NAN, "epsilon_high": 0.2}, {"epsilon": None}),
    ("epsilon_high", {"epsilon_high": -0.1}, {"epsilon_high": INF}, {"loss_type": "cispo"},
     {"loss_type": "cispo", "epsilon_high": 0.28}, {"loss_type": "cispo", "epsilon_high": "5"}),
    ("delta", {"delta": 0.0}, {"delta": NAN}, {"loss_type": "sapo", "delta": 2.0}),
    ("beta", {"beta": -0.1}, {"beta": INF}, {"beta": NAN}, {"beta": None}),
    ("max_completion_length", *({"loss_type": "dr_grpo", "max_completion_length": x} for x in (None, 0, INF, "8"))),
    ("sapo_temperature_neg", {"loss_type": "sapo", "sapo_temperature_neg": 0.0}),
    ("vespo_lambda_pos", {"loss_type": "vespo", "vespo_lambda_pos": 0.0}),
    ("vespo_k_neg", {"vespo_k_neg": -1.0}),
    ("importance_sampling_mode", {"importance_sampling_mode": "tis"}),
    ("importance_sampling_clip_min", {"importance_sampling_clip_min": 3.0}),
    ("entropy_coef", {"entropy_coef": NAN}),
]  # fmt: skip


@pytest.mark.parametrize(("knob", "settings"), [(knob, each) for knob, *settings in REFUSED for each in settings])
def test_wrong_knobs_are_refused_by_name(knob, settings):
    with pytest.raises(ValueError, match=rf"\b{knob}\b"):
        Objective(**settings)


@pytest.mark.parametrize(
    ("interval", "inside", "outside"),
    [
        (Interval(), (-5, 0, 1e9), ()),
        (Interval(above=0), (1e-9, 7), (0, -1)),
        (Interval(at_least=2), (2, 3), (1,)),
        (Interval(above=0, at_most=1), (0.1, 1), (0, 1.1)),
        (Interval(at_least=0, below=1), (0, 0.9), (1, -0.1)),
    ],
)
def test_intervals(interval, inside, outside):
    for value in inside:
        interval.check("x", value)
    for value in (*outside, "1", None, True, [1], 1j, NAN, INF, -INF):
        with pytest.raises(ValueError, match=r"^x must be "):
            interval.check("x", value)

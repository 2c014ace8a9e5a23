"""The knobs of the loss: the weights of every aggregation by hand, and what is refused."""

import dataclasses
import math
import re

import pytest
import torch

from fastgrpo import Objective
from fastgrpo.kernels.objectives import LOSS_TYPES
from fastgrpo.loss.objective import Interval

# Four sequences of 3, 2, 0 and 4 tokens; the second is all masked out, the third has no token at all.
MASK = torch.tensor([1, 1, 0, 0, 0, 1, 1, 0, 1]).bool()


CU_SEQLENS = torch.tensor([0, 3, 5, 5, 9])


def weights(objective, **knobs):
    return objective.token_weights(MASK, CU_SEQLENS, **knobs)


def test_grpo_is_the_mean_over_sequences_of_the_mean_over_tokens():
    # 1 / (S len): S = 4, kept tokens 2 and 3; a sequence without a kept token still counts in S.
    expected = [1 / 8, 1 / 8, 0, 0, 0, 1 / 12, 1 / 12, 0, 1 / 12]
    assert weights(Objective("grpo")).tolist() == pytest.approx(expected)


@pytest.mark.parametrize("loss_type", ["bnpo", "dapo"])
def test_bnpo_and_dapo_are_the_mean_over_tokens(loss_type):
    # 5 kept tokens
    assert weights(Objective(loss_type)).tolist() == pytest.approx([0.2, 0.2, 0, 0, 0, 0.2, 0.2, 0, 0.2])


@pytest.mark.parametrize("count", [20, 20.0, torch.tensor(20), torch.tensor(20.0)])
def test_dapo_divides_by_the_tokens_of_the_step(count):
    expected = [0.05, 0.05, 0, 0, 0, 0.05, 0.05, 0, 0.05]
    assert weights(Objective("dapo"), num_items_in_batch=count).tolist() == pytest.approx(expected)


@pytest.mark.parametrize("loss_type", ["grpo", "bnpo", "dr_grpo"])
def test_only_dapo_reads_num_items_in_batch(loss_type):
    objective = Objective(loss_type, max_completion_length=10)
    assert torch.equal(weights(objective, num_items_in_batch=20), weights(objective))


def test_dr_grpo_divides_by_a_constant():
    # 1 / (S max_completion_length) = 1 / 40
    expected = [0.025, 0.025, 0, 0, 0, 0.025, 0.025, 0, 0.025]
    assert weights(Objective("dr_grpo", max_completion_length=10)).tolist() == pytest.approx(expected)


@pytest.mark.parametrize("loss_type", ["grpo", "bnpo", "dapo", "dr_grpo"])
def test_weights_of_a_batch_without_a_kept_token_are_zero(loss_type):
    objective = Objective(loss_type, max_completion_length=10)
    result = objective.token_weights(torch.zeros(9, dtype=torch.bool), CU_SEQLENS)
    assert result.dtype == torch.float32 and torch.equal(result, torch.zeros(9))
    assert objective.token_weights(torch.zeros(9, dtype=torch.bool), CU_SEQLENS, num_items_in_batch=0).sum() == 0


@pytest.mark.parametrize("loss_type", ["bnpo", "dapo"])
def test_token_means_need_no_sequences(loss_type):
    assert Objective(loss_type).token_weights(MASK).sum().item() == pytest.approx(1)


@pytest.mark.parametrize("loss_type", ["grpo", "bnpo", "dapo", "dr_grpo"])
@pytest.mark.parametrize("level", ["token", "sequence"])
def test_needs_sequences(loss_type, level):
    objective = Objective(loss_type, level, max_completion_length=10)
    assert objective.needs_sequences == (loss_type in ("grpo", "dr_grpo") or level == "sequence")


def test_defaults():
    objective = Objective()
    assert (objective.loss_type, objective.importance_sampling_level, objective.kl) == ("dapo", "token", "k3")
    assert (objective.epsilon, objective.epsilon_high, objective.delta, objective.beta) == (0.2, 0.2, None, 0.0)


def test_epsilon_high_follows_epsilon_unless_given():
    assert Objective(epsilon=0.3).epsilon_high == 0.3
    assert Objective(epsilon=0.2, epsilon_high=0.28).epsilon_high == 0.28
    assert Objective(epsilon=0.2, epsilon_high=0.0).epsilon_high == 0.0


@pytest.mark.parametrize(
    ("knobs", "message"),
    [
        (
            {"loss_type": "ppo"},
            f"loss_type must be one of {', '.join(LOSS_TYPES)}, got 'ppo'",
        ),
        ({"importance_sampling_level": "word"}, "importance_sampling_level must be one of token, sequence, got 'word'"),
        ({"kl": "k4"}, "kl must be one of k1, k2, k3, abs, full, got 'k4'"),
        ({"epsilon": -0.1}, r"epsilon must be in \[0, 1\), got -0.1"),
        ({"epsilon": 1.0}, r"epsilon must be in \[0, 1\), got 1.0"),
        ({"epsilon": math.nan, "epsilon_high": 0.2}, "epsilon must be finite, got nan"),
        ({"epsilon_high": -0.1}, "epsilon_high must be at least 0, got -0.1"),
        ({"epsilon_high": math.inf}, "epsilon_high must be finite, got inf"),
        ({"delta": 0.0}, "delta must be positive, got 0.0"),
        ({"delta": math.nan}, "delta must be finite, got nan"),
        ({"beta": -0.1}, "beta must be at least 0, got -0.1"),
        ({"beta": math.inf}, "beta must be finite, got inf"),
        ({"beta": math.nan}, "beta must be finite, got nan"),
        ({"loss_type": "dr_grpo"}, "dr_grpo needs max_completion_length, .* got None"),
        ({"loss_type": "dr_grpo", "max_completion_length": 0}, "max_completion_length must be at least 1, got 0"),
        ({"loss_type": "dr_grpo", "max_completion_length": math.inf}, "max_completion_length must be finite, got inf"),
        ({"loss_type": "dr_grpo", "max_completion_length": "8"}, "max_completion_length must be a number, got '8'"),
        ({"loss_type": "cispo", "epsilon_high": "5"}, "epsilon_high must be a number, got '5'"),
        ({"loss_type": ["dapo"]}, r"loss_type must be one of .*, got \['dapo'\]"),
        ({"beta": None}, "beta must be a number, got None"),
        ({"epsilon": None}, "epsilon must be a number, got None"),
    ],
)
def test_errors_name_the_knob(knobs, message):
    with pytest.raises(ValueError, match=message):
        Objective(**knobs)


def test_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        Objective().beta = 0.1
    assert hash(Objective()) == hash(Objective(epsilon_high=0.2))


@pytest.mark.parametrize(
    "knobs, message",
    [
        ({"loss_type": "luspo"}, "luspo.*importance_sampling_level='sequence'"),
        ({"loss_type": "vespo", "importance_sampling_level": "sequence"}, "vespo.*importance_sampling_level='token'"),
        ({"loss_type": "cispo"}, "cispo needs epsilon_high"),
        ({"loss_type": "cispo", "epsilon_high": 0.28}, "cispo needs epsilon_high"),
        ({"loss_type": "sapo", "delta": 2.0}, "delta"),
        ({"loss_type": "sapo", "sapo_temperature_neg": 0.0}, "sapo_temperature_neg must be positive"),
        ({"loss_type": "vespo", "vespo_lambda_pos": 0.0}, "vespo_lambda_pos must be positive"),
        ({"vespo_k_neg": -1.0}, "vespo_k_neg must be at least 0"),
        ({"kl": "k4"}, "kl must be one of"),
        ({"kl": "full", "use_bias_correction_kl": True}, "use_bias_correction_kl .* kl='full' is no estimate"),
        ({"importance_sampling_mode": "tis"}, "importance_sampling_mode must be one of"),
        ({"importance_sampling_clip_min": 3.0}, "importance_sampling_clip_min"),
        ({"entropy_coef": float("nan")}, "entropy_coef must be finite"),
    ],
)
def test_refuses_what_would_be_wrong(knobs, message):
    with pytest.raises(ValueError, match=message):
        Objective(**knobs)


@pytest.mark.parametrize(
    "interval, text, inside, outside",
    [
        (Interval(), "", (-5, 0, 1e9), ()),
        (Interval(above=0), "positive", (1e-9, 7), (0, -1)),
        (Interval(at_least=2), "at least 2", (2, 3), (1,)),
        (Interval(above=0, at_most=1), r"in \(0, 1\]", (0.1, 1), (0, 1.1)),
        (Interval(at_least=0, below=1), r"in \[0, 1\)", (0, 0.9), (1, -0.1)),
    ],
)
def test_intervals(interval, text, inside, outside):
    for value in inside:
        interval.check("x", value)
    for value in outside:
        with pytest.raises(ValueError, match=f"^x must be {text}, got {value}$"):
            interval.check("x", value)
    for value in ("1", None, True, [1], 1j):
        with pytest.raises(ValueError, match=f"^x must be a number, got {re.escape(repr(value))}$"):
            interval.check("x", value)
    for value in (math.nan, math.inf, -math.inf):
        with pytest.raises(ValueError, match=f"^x must be finite, got {value}$"):
            interval.check("x", value)

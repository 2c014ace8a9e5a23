"""The knobs of the loss: the weights of every aggregation by hand, and which knobs are refused."""

import math

import pytest
import torch

from fastgrpo import Objective

# Four sequences of 3, 2, 0 and 4 tokens; the second is all masked out, the third has no token at all.
MASK = torch.tensor([1, 1, 0, 0, 0, 1, 1, 0, 1]).bool()
CU_SEQLENS = torch.tensor([0, 3, 5, 5, 9])
NAN, INF = math.nan, math.inf


def weights(objective, **knobs):
    return objective.token_weights(MASK, CU_SEQLENS, **knobs)


# The weight of each kept token of the first and of the last sequence. There are S = 4 sequences and 5 kept tokens; a
# sequence without a kept token still counts in S.
WEIGHTS = {
    "grpo": (1 / 8, 1 / 12),  # 1 / (S len)
    "bnpo": (1 / 5, 1 / 5),
    "dapo": (1 / 5, 1 / 5),
    "dr_grpo": (1 / 40, 1 / 40),  # 1 / (S max_completion_length)
}


@pytest.mark.parametrize("loss_type", WEIGHTS)
def test_weights_by_hand(loss_type):
    a, b = WEIGHTS[loss_type]
    objective = Objective(loss_type, max_completion_length=10)
    assert weights(objective).tolist() == pytest.approx([a, a, 0, 0, 0, b, b, 0, b])
    for count in (20, 20.0, torch.tensor(20), torch.tensor(20.0)):  # only dapo divides by the tokens of the step
        expected = weights(objective) / (4 if loss_type == "dapo" else 1)
        torch.testing.assert_close(weights(objective, num_items_in_batch=count), expected)
    if loss_type in ("bnpo", "dapo"):
        assert objective.token_weights(MASK).sum().item() == pytest.approx(1)  # without sequences


# the knob that the error names, and settings that are refused
REFUSED = [
    ("loss_type", {"loss_type": "ppo"}, {"loss_type": ["dapo"]}),
    ("importance_sampling_level", {"importance_sampling_level": "word"},
     {"loss_type": "vespo", "importance_sampling_level": "sequence"}),
    ("kl", {"kl": "k4"}, {"kl": "full", "use_bias_correction_kl": True}),
    ("epsilon", {"epsilon": -0.1}, {"epsilon": 1.0}, {"epsilon": NAN, "epsilon_high": 0.2}, {"epsilon": None}),
    ("epsilon_high", {"epsilon_high": -0.1}, {"epsilon_high": INF},
     {"loss_type": "cispo", "epsilon_high": "5"}),
    ("delta", {"delta": 0.0}, {"delta": NAN}, {"loss_type": "sapo", "delta": 2.0}),
    ("beta", {"beta": -0.1}, {"beta": INF}, {"beta": NAN}, {"beta": None}),
    ("max_completion_length", *({"loss_type": "dr_grpo", "max_completion_length": x} for x in (None, 0, INF, "8"))),
    ("importance_sampling_mode", {"importance_sampling_mode": "tis"}),
    ("importance_sampling_clip_min", {"importance_sampling_clip_min": 3.0}),
]  # fmt: skip


@pytest.mark.parametrize(("knob", "settings"), [(knob, each) for knob, *settings in REFUSED for each in settings])
def test_wrong_knobs_are_refused_by_name(knob, settings):
    with pytest.raises(ValueError, match=rf"\b{knob}\b"):
        Objective(**settings)

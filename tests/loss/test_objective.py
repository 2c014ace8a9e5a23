"""The knobs of the loss: the weights of tokens without sequences, and which knobs are refused."""

import math
from dataclasses import replace

import pytest
import torch

from fastgrpo import Objective

NAN, INF = math.nan, math.inf


@pytest.mark.parametrize("loss_type", ["bnpo", "dapo"])
def test_kept_tokens_of_no_sequence_weigh_the_same(loss_type):
    assert Objective(loss_type).token_weights(torch.tensor([1, 0, 1]).bool()).tolist() == [0.5, 0, 0.5]


def test_a_padded_mask_needs_no_boundaries():
    mask = torch.tensor([[1, 1, 0], [1, 0, 0]]).bool()
    assert Objective("grpo").token_weights(mask).tolist() == [[0.25, 0.25, 0], [0.5, 0, 0]]
    with pytest.raises(ValueError, match="cu_seqlens"):
        Objective("grpo").token_weights(mask[0])


def test_the_upper_bound_follows_epsilon():
    assert replace(Objective(), epsilon=0.1).ratio_bounds == (0.9, 1.1)


# the knob that the error names, and settings that are refused
REFUSED = [
    ("loss_type", {"loss_type": "ppo"}, {"loss_type": ["dapo"]}),
    ("importance_sampling_level", {"importance_sampling_level": "word"},
     {"loss_type": "vespo", "importance_sampling_level": "sequence"}),
    ("kl", {"kl": "k4"}, {"kl": "full", "use_bias_correction_kl": True}),
    ("epsilon", {"epsilon": -0.1}, {"epsilon": INF}, {"epsilon": NAN, "epsilon_high": 0.2}, {"epsilon": None}),
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

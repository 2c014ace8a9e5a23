"""What rewards become: masked completions in and out of their group, and the steps of completions, by hand."""

import math

import pytest
import torch
from samples import answer

from fastgrpo import GRPOConfig
from fastgrpo.data.records import Prompt
from fastgrpo.loss.advantages import process_advantages
from fastgrpo.rewards.call import Rewards
from fastgrpo.trainer.collect import reward_metrics, with_advantages

EPS = 1e-4


def right(**_):
    """The rewards stand in the completions."""


def steps(**_):
    """The same."""


def completion(reward, tokens=4, reason="stop", of_steps=None, **others):
    rewards = {"right": reward, **others}
    return answer(
        Prompt([1], "p"), [5] * tokens, "x", -torch.ones(tokens), reason, rewards=rewards,
        steps={"steps": of_steps} if of_steps else {},
    )  # fmt: skip


def advantages(completions, functions=(right,), weights=(), **settings):
    config = GRPOConfig(num_generations=len(completions), **settings)
    return with_advantages(completions, Rewards(list(functions), weights), config)


def test_masked_completions_count_in_their_group():
    # Rewards 1 1 0 -2: mean 0, squares 1 + 1 + 0 + 4 over 3.
    group = [completion(r, reason=why) for r, why in ((1.0, "stop"), (1.0, "stop"), (0.0, "length"), (-2.0, "length"))]
    std = math.sqrt(2) + EPS
    done = advantages(group, mask_truncated_completions=True)
    assert [c.advantage for c in done] == pytest.approx([1 / std, 1 / std, 0, -2 / std], rel=1e-12)
    assert [c.masked for c in done] == [False, False, True, True]
    group = [completion(1.0), completion(1.0), completion(0.0, reason="length"), completion(0.0, reason="length")]
    inside = advantages(group, mask_truncated_completions=True)
    assert [c.informative and not c.masked for c in inside] == [True, True, False, False]
    assert all(c.token_advantages is None for c in done)


def test_each_reward_is_standardized_before_it_is_weighted():
    # Standardized, times 1 / sqrt(3): 2 -1 -1 and -1 -1 2. With weights 1 and 1/2: 1.5 -1.5 0, deviation 1.5.
    group = [completion(1.0, steps=0.0), completion(0.0, steps=0.0), completion(0.0, steps=10.0)]
    settings = {"functions": (right, steps), "multi_objective_aggregation": "normalize_then_sum"}
    done = advantages(group, weights=(1.0, 0.5), **settings)
    assert [c.advantage for c in done] == pytest.approx([1, -1, 0], abs=1e-3)


def test_baseline_scale_and_clip_follow_the_settings():
    group = [completion(reward) for reward in (0.0, 1.0, 2.0, 6.0)]  # mean 9/4, sample variance 83/12
    done = advantages(group, advantage_baseline="leave_one_out", scale_rewards="none")
    assert [c.advantage for c in done] == pytest.approx([-3, -5 / 3, -1 / 3, 5])
    scale = math.sqrt(83 / 12) + EPS
    done = advantages(group, advantage_clip=0.5)
    assert [c.advantage for c in done] == pytest.approx([-0.5, -1.25 / scale, -0.25 / scale, 0.5])


def test_process_advantages_by_hand():
    # Step rewards 1 0 | 2: mean 1, squares 0 + 1 + 1 over 2, deviation 1.
    one = 1 + EPS
    first, second = process_advantages([[(2, 1.0), (3, 0.0)], [(1, 2.0)]], [4, 2], 2)
    assert first.tolist() == pytest.approx([-1 / one] * 3 + [0], rel=1e-12)
    assert second.tolist() == pytest.approx([1 / one, 0], rel=1e-12)
    centred = process_advantages([[(2, 1.0), (3, 0.0)], [(1, 2.0)]], [4, 2], 2, scale="none")
    assert centred[0].tolist() == [-1, -1, -1, 0]


def test_groups_of_steps_are_standardized_apart_and_batches_together():
    group = [[(1, 1.0)], [(1, 3.0)]]
    own = process_advantages([*group, [(1, 10.0)], [(1, 30.0)]], [1] * 4, 2)
    assert own[0] == pytest.approx(-1 / (math.sqrt(2) + EPS)) and own[2] == pytest.approx(-10 / (math.sqrt(200) + EPS))
    batch = process_advantages([*group, [(1, 10.0)], [(1, 30.0)]], [1] * 4, 2, scale="batch")
    assert batch[2] / batch[0] == pytest.approx(10)
    none = process_advantages([[], [], *group], [2, 3, 1, 1], 2)
    assert [part.tolist() for part in none[:2]] == [[0, 0], [0, 0, 0]] and none[3] > 0
    equal = process_advantages([[(1, 0.1), (2, 0.1)], [(1, 0.1)]], [2, 1], 2)
    assert [part.tolist() for part in equal] == [[0, 0], [0]]


@pytest.mark.parametrize("ends", [[0], [2, 2], [5]])
def test_ends_that_are_no_ends_are_refused(ends):
    with pytest.raises(ValueError, match=r"must increase from 1 to at most 4, got .* of sample 1"):
        process_advantages([[], [(end, 1.0) for end in ends]], [4, 4], 2)


STEPPED = [
    completion(1.0, 4, of_steps=((2, 1.0), (3, 0.0)), steps=0.25),
    completion(0.0, 2, of_steps=((1, 2.0),), steps=0.75),
]
BOTH = {"functions": (right, steps), "process_rewards": "token"}


def test_a_token_gets_the_outcome_of_the_other_functions_and_its_steps():
    outcome, one = 0.5 / (math.sqrt(0.5) + EPS), 1 + EPS
    off = advantages(STEPPED, functions=(right, steps))
    assert all(c.token_advantages is None for c in off)  # and the sums are 1.25 and 0.75
    assert off[0].advantage == pytest.approx(0.25 / (math.sqrt(2) / 4 + EPS))
    first, second = both = advantages(STEPPED, weights=(1.0, 0.5), **BOTH)
    again = advantages([c.replace(steps={}) for c in both], **BOTH)
    assert all(c.token_advantages is None for c in again)
    expected = [outcome - 0.5 / one] * 3 + [outcome], [0.5 / one - outcome, -outcome]
    assert first.token_advantages.tolist() == pytest.approx(expected[0], rel=1e-6)
    assert second.token_advantages.tolist() == pytest.approx(expected[1], rel=1e-6)
    assert first.advantage == pytest.approx(sum(expected[0]) / 4, rel=1e-12)
    assert first.token_advantages.dtype == torch.float32
    sizes = reward_metrics([first, second], torch.tensor([1.25, 0.75], dtype=torch.float64), [True])
    size = (sum(map(abs, expected[0])) / 4 + sum(map(abs, expected[1])) / 2) / 2
    assert sizes["advantage/abs_mean"] == pytest.approx(size, rel=1e-6) and sizes["frac_informative"] == 1


def test_a_completion_whose_token_advantages_add_up_to_nothing_still_has_a_gradient():
    one = completion(1.0, 2, of_steps=((1, 3.0), (2, -1.0)), steps=0.0)
    other = completion(1.0, 2, of_steps=((1, 0.0), (2, 0.0)), steps=0.0)
    done = advantages([one, other], scale_rewards="none", **BOTH)  # mean 0.5: 2.5 - 1.5 and -1.5; -1 and -0.5
    assert done[0].token_advantages.tolist() == [1.0, -1.5] and done[1].token_advantages.tolist() == [-1.0, -0.5]

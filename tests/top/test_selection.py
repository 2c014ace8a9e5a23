"""Rejection sampling: which completions are kept, and why the others are not."""

from samples import answer

from fastgrpo.config.settings import SelectionConfig
from fastgrpo.data.records import Prompt
from fastgrpo.distill import REASONS, repetition, select
from fastgrpo.rewards.call import Rewards

LIMITS = SelectionConfig(max_per_prompt=2, repetition_n_grams=2, max_repetition=0.5)


def right(completions, **columns):
    return [float("right" in text or not text) for text in completions]


def neat_format_reward(completions, **columns):
    return [0.1 + 0.2 if "neat" in text else 0.0 for text in completions]


neat_format_reward.full_mark = 0.3


def long(completions, **columns):
    return [len(text) / 100 for text in completions]


def judged(*drawn):
    """Completions of (prompt, text, finish reason, ids), judged."""
    rewards = Rewards([right, neat_format_reward, long])
    completions = [answer(Prompt([1], prompt), ids, text, reason=reason) for prompt, text, reason, ids in drawn]
    return rewards(completions).completions, rewards


def test_each_reason_is_found_and_counted():
    ids = [1, 2, 3, 4]
    completions, rewards = judged(
        ("a", "wrong neat", "stop", ids),
        ("a", "", "stop", ids[:1]),
        ("a", "right untidy", "stop", ids),
        ("a", "right neat, cut", "length", ids),
        ("a", "right neat, again and again", "stop", [1, 2] * 4),
        ("a", "right neat 1", "stop", ids),
        ("a", "right neat 1", "stop", ids),
        ("b", "right neat 1", "stop", ids),  # the same text after another prompt is no duplicate
        ("c", "right neat", "stop", ids),
        ("c", "right neat, longer", "stop", ids),
        ("c", "right neat, the longest", "stop", ids),
    )
    kept, dropped = select(completions, rewards, LIMITS)
    assert [completion.content for completion, _ in kept] == [
        "right neat 1", "right neat 1", "right neat, longer", "right neat, the longest",
    ]  # fmt: skip
    assert dropped == dict.fromkeys(REASONS, 1)
    assert abs(kept[0][1] - (1 + 0.3 + 0.12)) < 1e-9  # its total reward


def test_of_equal_rewards_the_first_is_kept():
    completions, rewards = judged(*(("a", f"right neat {i}", "stop", [1, 2, i]) for i in range(4)))
    kept, dropped = select(completions, rewards, LIMITS)
    assert [completion.content[-1] for completion, _ in kept] == ["0", "1"]
    assert dropped == {"beyond max_per_prompt": 2}


def test_without_a_verdict_a_completion_is_wrong():
    completions, _ = judged(("a", "right neat", "stop", [1, 2]))
    rewards = Rewards([lambda completions, **columns: [None] * len(completions)])
    unjudged = rewards(completions, allow_none=True).completions
    assert select(unjudged, rewards, LIMITS) == ([], {"wrong": 1})


def test_repetition_counts_runs_that_occur_again():
    assert repetition([1, 2, 3, 4], 2) == 0.0
    assert repetition([1, 2, 1, 2, 1], 2) == 0.5  # 12 21 12 21
    assert repetition([7] * 9, 1) == 1 - 1 / 9
    assert repetition([1, 2], 3) == 0.0 == repetition([], 1)

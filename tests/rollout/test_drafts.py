"""Drafts: what is looked up, the odds of a guess, and how many tokens are worth a pass."""

import pytest

from fastgrpo.rollout.drafts import Followers, Guess, Odds, pass_time, worth_verifying


def followers_of(*texts):
    followers = Followers()
    for text in texts:
        followers.add(text, 1)
    return followers


def test_the_longest_context_decides():
    followers = followers_of([1, 2, 3, 4, 9, 3, 4, 8, 3, 4, 8])
    assert followers.guess([1, 2, 3, 4]).token == 9  # 8 is more frequent, but not after 2, 3, 4
    assert followers.guess([7, 3, 4]) == Guess(8, (2, 2, False))
    assert followers.guess([7, 7, 4]) == Guess(8, (1, 2, False))


def test_of_equally_frequent_tokens_the_latest_is_guessed():
    assert followers_of([5, 6, 5, 7]).guess([5]).token == 7
    assert followers_of([5, 7, 5, 6]).guess([5]).token == 6
    assert followers_of([5, 6, 5, 6, 5, 7]).guess([5]).token == 6


def test_what_nothing_ever_followed_gives_no_guess():
    followers = followers_of([1, 2, 3])
    assert followers.guess([3]) is None and followers.guess([4]) is None
    assert followers.guess([9, 9, 9, 9, 9, 1]) == Guess(2, (1, 1, True))


def test_no_context_reaches_over_four_tokens():
    followers = followers_of([1, 2, 3, 4, 5, 6])
    assert followers.guess([9, 2, 3, 4, 5]) == Guess(6, (4, 1, True)) == followers.guess([1, 2, 3, 4, 5])


def test_reading_on_equals_reading_at_once():
    text = [3, 1, 3, 2, 3, 1, 3]
    parts = Followers()
    for end in (2, 3, 7):
        parts.add(text[:end], {2: 1, 3: 2, 7: 3}[end])
    assert parts.counts == followers_of(text).counts


def test_texts_of_siblings_add_up():
    followers = followers_of([1, 2], [1, 2], [1, 2], [1, 2], [1, 3])
    assert followers.guess([1]) == Guess(2, (1, 3, False))  # 3 stands for more


def test_odds_follow_the_counts_of_a_kind():
    odds, guess, other = Odds(), Guess(5, (4, 1, True)), Guess(5, (1, 1, False))
    assert odds.of(guess.kind) == 0.125
    for token in (5, 5, 5, 6):
        odds.note(guess, token)
    assert odds.of(guess.kind) == (3 + 1) / (4 + 8) and odds.of(other.kind) == 0.125


@pytest.mark.parametrize(
    ("chances", "taken"),
    [
        ([[]], [0]),
        ([[0.07]], [0]),
        ([[0.3, 0.1, 0.05]], [3]),  # a few rows more cost next to nothing
        ([[0.9, 0.8, 0.7]], [3]),
        ([[0.9, 0.9, 0.9, 0.1, 0.0]], [4]),
        ([[0.9, 0.9], [0.1], []], [2, 0, 0]),
        ([[0.9], [0.9], [0.6], [0.01]], [1, 1, 1, 0]),
        ([[0.6]] * 16, [0] * 16),  # with many lanes each row more costs what it is, and its attention
    ],
)
def test_tokens_that_are_worth_a_pass(chances, taken):
    assert worth_verifying(chances) == taken


def test_no_other_choice_promises_more():
    """Against all choices of 3 lanes with up to 3 drafted tokens each."""
    chances = [[0.8, 0.5, 0.1], [0.6, 0.2, 0.2], [0.3, 0.25, 0.2]]

    def rate(counts):
        tokens = 3 + sum(sum(of_lane[:count]) for of_lane, count in zip(chances, counts, strict=True))
        return tokens / pass_time(3, sum(counts))

    best = max(rate((a, b, c)) for a in range(4) for b in range(4) for c in range(4))
    assert rate(worth_verifying(chances)) == pytest.approx(best)

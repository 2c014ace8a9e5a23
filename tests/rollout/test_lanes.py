"""Lanes: what a draw changes, when a completion is finished, and what the host takes."""

import pytest
import torch

from fastgrpo.rollout.engine import Lanes

CPU = torch.device("cpu")
NO_STOP = torch.tensor([], dtype=torch.int64)


def started(limits, capacity=4, prompts=None):
    """Five lanes, of which the last ones hold new completions with these limits."""
    lanes = Lanes(5, capacity, CPU)
    at = torch.arange(5)[-len(limits) :]
    prompts = torch.tensor(prompts or [3] * len(limits))
    numbers = torch.arange(len(limits))[:, None] / 10 + torch.arange(capacity) / 100
    lanes.start(at, prompts, torch.tensor(limits), numbers.float())
    return lanes, at


def draw(lanes, at, tokens, stop_ids=NO_STOP):
    tokens = torch.tensor(tokens)
    lanes.record(at, tokens, -tokens.float(), tokens / 100, stop_ids)


def test_a_lane_is_finished_until_a_completion_starts_on_it():
    lanes, _ = started([4, 4])
    assert lanes.finished.tolist() == [True, True, True, False, False]
    assert lanes.length[3:].tolist() == [0, 0] and lanes.position[3:].tolist() == [2, 2]


def test_completions_end_at_a_stop_token_or_at_their_limit():
    lanes, at = started([3, 2, 4])
    draw(lanes, at, [7, 8, 9], stop_ids=torch.tensor([1, 2]))
    assert lanes.finished[at].tolist() == [False] * 3
    draw(lanes, at, [2, 3, 4], stop_ids=torch.tensor([1, 2]))
    assert lanes.finished[at].tolist() == [True, True, False]
    draw(lanes, at, [5, 5, 1], stop_ids=torch.tensor([1, 2]))
    assert lanes.finished.all()
    assert [ids for ids, *_ in lanes.take(at)] == [[7, 2], [8, 3], [9, 4, 1]]


def test_a_finished_lane_does_not_change():
    lanes, at = started([4, 2])
    for tokens in ([5, 6], [7, 8], [9, 10], [11, 12]):
        draw(lanes, at, tokens)
    (ids, logps, _), (short, short_logps, _) = lanes.take(at)
    assert ids == [5, 7, 9, 11] and logps.tolist() == [-5, -7, -9, -11]
    assert short == [6, 8] and short_logps.tolist() == [-6, -8]
    before = [lanes.token.clone(), lanes.position.clone(), lanes.length.clone()]
    draw(lanes, at, [13, 14])  # also where a completion fills its lane: the token goes into the spare column
    assert all(torch.equal(a, b) for a, b in zip(before, (lanes.token, lanes.position, lanes.length), strict=True))
    assert lanes.take(at)[0][0] == ids


def test_the_next_input_is_the_token_drawn_last_at_the_position_behind_the_prompt():
    lanes, at = started([4, 4], prompts=[3, 9])
    draw(lanes, at, [5, 6])
    assert lanes.token[at].tolist() == [5, 6] and lanes.position[at].tolist() == [3, 9]
    draw(lanes, at, [7, 8])
    assert lanes.token[at].tolist() == [7, 8] and lanes.position[at].tolist() == [4, 10]


def test_every_draw_has_a_random_number_of_its_own():
    lanes, at = started([4, 4])
    seen = []
    for _ in range(4):
        seen.append(lanes.draws(at))
        assert torch.equal(lanes.draws(slice(5))[at], seen[-1])  # all lanes, as a decode step asks
        draw(lanes, at, [5, 6])
    torch.testing.assert_close(torch.stack(seen, 1), torch.tensor([[0.0, 0.01, 0.02, 0.03], [0.1, 0.11, 0.12, 0.13]]))


def test_completions_move_with_all_that_they_have_drawn():
    lanes, at = started([4, 4, 3])
    lanes.keep_mass()
    draw(lanes, at, [5, 6, 7])
    expected = lanes.take(at)
    numbers = lanes.draws(at)
    lanes.move(torch.tensor([4, 3]), torch.tensor([0, 1]))
    moved = torch.tensor([2, 1, 0])
    for (ids, logps, kept), (own, own_logps, own_kept) in zip(lanes.take(moved), expected, strict=True):
        assert ids == own and torch.equal(logps, own_logps) and torch.equal(kept, own_kept)
    assert torch.equal(lanes.draws(moved), numbers)
    draw(lanes, moved, [8, 8, 8])
    draw(lanes, moved, [9, 9, 9])
    assert lanes.finished[moved].tolist() == [False, False, True]


def test_the_mass_that_filters_left_is_recorded_when_asked_for():
    lanes, at = started([4])
    draw(lanes, at, [5])
    assert lanes.take(at)[0][2] is None
    lanes.keep_mass()
    record = lanes.kept
    lanes.keep_mass()
    assert lanes.kept is record  # a graph holds its address
    draw(lanes, at, [6])
    assert lanes.take(at)[0][2].tolist() == [0, pytest.approx(0.06)]


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_what_is_not_finite_is_noticed_and_reset(value):
    lanes, at = started([4])
    draw(lanes, at, [5])
    lanes.take(at)
    assert not lanes.spoilt
    lanes.record(at, torch.tensor([6]), torch.tensor([value]), torch.ones(1), NO_STOP)
    lanes.take(at)
    assert lanes.spoilt
    lanes.forgive()
    assert not lanes.spoilt and lanes.logps.isfinite().all()


def test_the_tokens_of_prompt_and_completion_are_seen():
    """Of those before and not of another lane; a new completion forgets them; a finished lane sees no more."""
    lanes, at = started([2, 3])
    lanes.keep_seen(10)
    record = lanes.seen
    lanes.keep_seen(10)
    assert lanes.seen is record  # a graph holds its address
    ids, owners = torch.tensor([1, 2, 1, 7]), torch.tensor([0, 0, 0, 1])
    lanes.see(at, ids, owners, torch.tensor([0, 1]))
    for token in (5, 6, 8):
        draw(lanes, at, [token, 7])
    held = [row.nonzero()[:, 0].tolist() for row in lanes.seen]
    assert held == [[], [], [], [1, 2, 5, 6], [7]]
    lanes.move(at[1:], torch.tensor([0]))
    assert lanes.seen[0].nonzero()[:, 0].tolist() == [7]
    lanes.see(at[:1], torch.tensor([9]), torch.tensor([0]), torch.tensor([0]))
    assert lanes.seen[3].nonzero()[:, 0].tolist() == [9]

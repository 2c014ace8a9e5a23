"""The estimate of the time that is left, on the times of runs and never on the clock."""

import json
import random

import paces
import pytest

from fastgrpo.run.remaining import RECENT, Remaining, duration


def slow_beginning():
    """Steps of a second, the first two of which compile, with evaluations and checkpoints that take as long as five."""
    draw = random.Random(1)
    for step in range(61):
        if step:
            yield "step", {1: 40.0, 2: 6.0}.get(step) or draw.gauss(1, 0.1)
        if step % 10 == 0:
            yield "evaluation", draw.gauss(5, 0.5)
        if step and step % 20 == 0:
            yield "checkpoint", 2.0


# What happened, and how often: the steps between two evaluations and between two checkpoints.
RUNS = {
    "GRPO": (paces.events(paces.GRPO), {"evaluation": 20, "checkpoint": 25}),
    "supervised": (paces.events(paces.SUPERVISED), {"evaluation": 30, "checkpoint": 500}),
    "completions that grow": (paces.events(paces.GROWING), {"checkpoint": None}),
    "a slow beginning": ([*slow_beginning()], {"evaluation": 10, "checkpoint": 20}),
}


def replay(remaining, events):
    """Yield after each step: how many are done, the estimate, and the seconds that were really left."""
    for place, (kind, seconds) in enumerate(events, 1):
        if kind == "step":
            remaining.step(seconds)
            yield remaining.done, remaining.seconds(), sum(rest for _, rest in events[place:])
        else:
            remaining.interrupted(kind, seconds)


@pytest.mark.parametrize("name", RUNS)
def test_it_holds_within_a_fifth_after_ten_steps(name):
    """Towards the end one evaluation is most of what is left: then it holds within a fifteenth of the run."""
    events, every = RUNS[name]
    steps, whole = sum(kind == "step" for kind, _ in events), sum(seconds for _, seconds in events)
    told = [*replay(Remaining(steps, 0, every), events)][9:]
    assert len(told) == steps - 9
    for done, estimate, left in told:
        assert abs(estimate - left) <= max(0.2 * left, whole / 15), (done, estimate, left)
    done, estimate, left = told[0]
    assert done == 10 and abs(estimate - left) <= 0.2 * left, (estimate, left)


def test_what_is_to_come_is_counted_by_hand():
    remaining = Remaining(10, 0, {"evaluation": 4, "checkpoint": None})
    assert remaining.seconds() is None
    remaining.interrupted("evaluation", 3.0)
    remaining.step(100.0)
    assert remaining.seconds() == 9 * 100 + 3 * 3  # after 4, 8 and 10; a checkpoint has not been seen
    remaining.step(90.0)
    assert remaining.seconds() == 8 * 90 + 9  # the last of the slow ones
    remaining.step(1.0)
    remaining.step(2.0)
    assert remaining.seconds() == 6 * 1.5 + 9  # the evaluation of step 4 has not begun
    remaining.interrupted("evaluation", 5.0)
    remaining.interrupted("checkpoint", 7.0)
    assert remaining.seconds() == 6 * 1.5 + 2 * 5 + 7
    remaining.step(9.0, count=6)
    assert remaining.seconds() == 2 * 5 + 7  # step 10 is done, and the evaluations of 8 and 10 are not
    remaining.interrupted("evaluation", 5.0)
    assert remaining.seconds() == 7


def test_a_resumed_run_knows_how_long_steps_took_until_it_has_its_own():
    before = Remaining(40, 0, {"evaluation": 10})
    before.interrupted("evaluation", 8.0)
    for seconds in (50.0, 20.0, *[2.0] * 18):
        before.step(seconds)
    state = json.loads(json.dumps(before.state_dict()))
    after = Remaining(40, 20, {"evaluation": 10})
    after.load_state_dict(state)
    assert after.seconds() == 20 * 2 + 2 * 8  # after 30 and 40
    after.step(60.0)  # it compiles again
    assert after.seconds() == 19 * 2 + 16
    once_more = Remaining(40, 21, {"evaluation": 10})  # it is resumed before it has steps of its own
    once_more.load_state_dict(json.loads(json.dumps(after.state_dict())))
    assert once_more.seconds() == 19 * 2 + 16
    once_more.step(60.0)
    once_more.step(60.0)
    once_more.step(2.0)
    assert len(once_more.state_dict()["steps"]) == RECENT - 1 and once_more.seconds() == 16 * 2 + 16
    for seconds in (30.0, *[1.0] * 4):
        after.step(seconds)
    assert 14 * 1 + 16 < after.seconds() < 14 * 2 + 16
    after.step(1.0)  # on a faster machine
    assert after.seconds() == 13 * 1 + 16
    of_an_older_version = Remaining(40, 20)
    of_an_older_version.load_state_dict({})
    assert of_an_older_version.seconds() is None


def test_a_trend_counts_as_far_as_it_stands_out_of_the_noise():
    def of_a_step(steps):
        remaining = Remaining(len(steps) + 3)
        for seconds in (9.0, 9.0, *steps):
            remaining.step(seconds)
        return remaining.seconds()

    assert of_a_step([1.0, 2.0, 3.0, 4.0, 5.0, 6.0]) == pytest.approx(6)  # and not their mean
    assert of_a_step([6.0, 5.0, 4.0, 3.0, 2.0, 1.0]) == pytest.approx(1)
    assert of_a_step([2.0, 3.0, 2.0, 4.0, 3.0, 4.0]) == pytest.approx(3, abs=0.5)
    assert of_a_step([2.0, 4.0, 2.0, 4.0, 2.0, 4.0]) == pytest.approx(3)
    assert of_a_step([2.0] * 6) == 2


@pytest.mark.parametrize(
    "seconds, text", [(0.4, "0:00"), (59.6, "1:00"), (245, "4:05"), (3845, "1:04:05"), (360000, "100:00:00")]
)
def test_a_duration(seconds, text):
    assert duration(seconds) == text

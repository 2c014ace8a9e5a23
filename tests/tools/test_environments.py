"""An environment serves one completion at a time, and starts as its row and seed say."""

import asyncio
import sqlite3
import threading
import time

import pytest

from fastgrpo.rewards.guard import TIMED_OUT
from fastgrpo.rewards.values import read_verdicts
from fastgrpo.tools.environments import Environments, seed_of


class Counter:
    """A number that the model raises."""

    made = 0

    def __init__(self):
        type(self).made += 1
        self.value = None

    @property
    def costly(self):
        raise RuntimeError("the tools of a class are found without its properties")

    def reset(self, start=0, **row):
        self.value, self.row = start, row
        return row.get("says")

    def _private(self):
        pass

    def raise_by(self, amount: int) -> int:
        """Raise it.

        Args:
            amount: By how much.
        """
        self.value += amount
        return self.value

    async def look(self) -> int:
        """Look at it."""
        return self.value

    def get_reward(self):
        return float(self.value)


class Judged:
    def __init__(self):
        self.loop = None

    def reset(self, seed, **row):
        self.seed = seed

    async def act(self) -> str:
        """Act."""
        self.loop = asyncio.get_running_loop()
        return str(self.seed)

    async def get_reward(self):
        return 0.5 if asyncio.get_running_loop() is self.loop else 0.0


def extra(x: int) -> int:
    """Double.

    Args:
        x: A number.
    """
    return 2 * x


USER = [{"role": "user", "content": "go"}]


def names(box):
    return [schema["function"]["name"] for schema in box.schemas]


def test_the_public_methods_are_tools():
    environments = Environments(Counter, [extra])
    assert names(environments.boxes[None]) == ["extra", "look", "raise_by"]
    (episode,) = environments.start([{"prompt": USER, "start": 5}], [0])
    assert episode.box.call("raise_by", {"amount": 2}).result().content == "7"
    assert episode.box.call("look", {}).result().content == "7"
    assert episode.environment.row == {"prompt": USER} and not episode.box.quick


@pytest.mark.parametrize("says, content", [
    (None, "go"), ("!", "go!"), ([{"type": "text", "text": " on"}, {"type": "text", "text": "!"}], "go on!"),
])  # fmt: skip
def test_a_reset_adds_to_the_last_user_message(says, content):
    prompt = [{"role": "system", "content": "be"}, *USER, {"role": "assistant", "content": "yes"}]
    (episode,) = Environments(Counter).start([{"prompt": prompt, "says": says}], [0])
    assert episode.messages == [prompt[0], {"role": "user", "content": content}, prompt[2]]
    assert prompt[1] == USER[0]
    (episode,) = Environments(Counter).start([{"says": "all"}], [0])  # a row without a prompt
    assert episode.messages == [{"role": "user", "content": "all"}]


def test_the_column_environment_chooses():
    environments = Environments({"count": Counter, "judge": Judged}, [extra])
    rows = [{"prompt": USER, "environment": name} for name in ("judge", "count", "judge")]
    episodes = environments.start([*rows[:2], rows[2] | {"seed": 7}], [1, 2, 3])
    assert [type(episode.environment) for episode in episodes] == [Judged, Counter, Judged]
    assert names(episodes[0].box) == ["extra", "act"] and episodes[1].environment.row == {"prompt": USER}
    assert [episodes[0].environment.seed, episodes[2].environment.seed] == [1, 7]  # a column wins
    with pytest.raises(ValueError, match=r"'conut' .* not among the environments count, judge.*'count'"):
        environments.start([{"environment": "conut"}], [0])


def test_seeds_differ_between_places_and_stay():
    places = [(0, step, request, number) for step in range(5) for request in range(20) for number in range(8)]
    seeds = [seed_of(*place) for place in places]
    assert len({*seeds}) == len(seeds) and all(0 <= seed < 2**31 for seed in seeds)
    assert seed_of(1, 2, 3, 4) == 1763017884


def test_instances_are_pooled_and_never_shared():
    Counter.made = 0
    environments = Environments(Counter)
    for _ in range(3):
        episodes = environments.start([{}] * 4, range(4))
        others = environments.start([{}] * 2, range(2))
        in_use = [episode.environment for episode in (*episodes, *others)]
        assert len({*map(id, in_use)}) == 6
        environments.give_back([*others, *episodes])
        environments.give_back(episodes)  # twice is once
    assert Counter.made == 6


def test_a_failed_instance_is_thrown_away_and_has_no_reward():
    environments = Environments(Counter)
    episodes = environments.start([{"start": 1}, {"start": 2}], [0, 0])
    episodes[0].failed = True
    (reward,) = environments.rewards
    assert reward.__name__ == "Counter"
    assert reward(environments=[episode.environment for episode in episodes], prompts=[]) == [None, 2.0]
    environments.give_back(episodes)
    again = environments.start([{}, {}], [0, 0])
    assert [episode.environment is episodes[1].environment for episode in again] == [True, False]


def test_an_async_reward_runs_on_the_loop_of_the_tools():
    environments = Environments({"a": Judged, "b": Judged, "c": Counter})
    episodes = environments.start([{"environment": "a"}, {"environment": "b"}, {"environment": "c"}], [0, 0, 0])
    for episode in episodes[:2]:
        episode.box.call("act", {}).result()
    in_use = [episode.environment for episode in episodes]
    assert [reward(in_use) for reward in environments.rewards] == [[0.5, 0.5, None], [None, None, 0.0]]


class Database:
    """SQLite refuses a connection that another thread made."""

    def __init__(self):
        self.connection = sqlite3.connect(":memory:")

    def reset(self):
        self.connection.execute("create table if not exists a (b)")

    def query(self, text: str) -> str:
        """Query.

        Args:
            text: SQL.
        """
        return str(self.connection.execute(text).fetchall())

    def get_reward(self):
        return float(self.connection.execute("select count(*) from a").fetchone()[0])


def test_an_environment_has_a_thread_of_its_own():
    environments = Environments(Database)
    for _ in range(2):
        episodes = environments.start([{}] * 3, range(3))
        for i, episode in enumerate(episodes):
            calls = [episode.box.call("query", {"text": "insert into a values (1)"}).result() for _ in range(i)]
            assert not any(call.failed for call in calls)
        (reward,) = environments.rewards
        rewards = reward(environments=[episode.environment for episode in episodes])
        episodes[2].failed = True
        environments.give_back(episodes)
    assert rewards == [0.0, 2.0, 2.0] and len(environments.workers) == 2


async def sleeps(seconds):
    time.sleep(seconds)


class Trouble:
    def reset(self, how):
        if how in ("blocks", "returns"):
            return sleeps(30 if how == "blocks" else 0)
        if how == "hangs":
            time.sleep(30)
        if how == "raises":
            raise ConnectionError("away")
        if how == "exits":
            raise SystemExit
        return 5 if how == "number" else None


@pytest.mark.parametrize("how", ["blocks", "hangs", "raises", "exits", "number"])
def test_a_reset_that_fails_is_the_failure_of_one_completion(how, caplog):
    environments = Environments(Trouble, timeout=1)
    episodes = environments.start([{"how": how}, {"how": None}], [0, 0])
    assert [episode.failed for episode in episodes] == [True, False]
    assert episodes[0].environment is None and "could not be reset" in caplog.text
    environments.give_back(episodes)
    assert not environments.start([{"how": "returns"}], [0])[0].failed  # also after a reset that blocks the event loop


def test_a_get_reward_that_fails_or_hangs_is_the_failure_of_one_completion():
    class Stuck:
        def reset(self, wait):
            self.wait = wait

        async def get_reward(self):
            await asyncio.sleep(60 / self.wait)

    environments = Environments(Stuck)
    (broken, episode), (get_reward,) = environments.start([{"wait": 0}, {"wait": 1}], [0, 0]), environments.rewards
    failure, none = read_verdicts(get_reward([broken.environment, None]), 2)
    assert isinstance(failure.error, ZeroDivisionError) and none is None and not broken.failed
    get_reward.limit(0.05)
    assert read_verdicts(get_reward([episode.environment, None]), 2) == [TIMED_OUT, None] and episode.failed


def test_quick_resets_run_in_order_and_slow_ones_together():
    order, together = [], threading.Barrier(5, timeout=60)

    class Counted:
        def reset(self, number, waits):
            if waits:
                together.wait()
            order.append(number)

    environments = Environments(Counted)
    environments.start([{"number": i, "waits": False} for i in range(20)], range(20))
    assert order == [*range(20)]
    assert not any(each.failed for each in environments.start([{"number": 5, "waits": True}] * 5, range(5)))


def test_rejects_what_cannot_be_an_environment_or_a_prompt():
    class NoReset:
        pass

    class Needs:
        def reset(self, level):
            pass

    for factory, message in ((NoReset, "no method reset"), (lambda: 1 / 0, "cannot be made: ZeroDivisionError")):
        with pytest.raises(ValueError, match=message):
            Environments(factory)
    with pytest.raises(ValueError, match="cannot take the columns other: missing a required argument: 'level'"):
        Environments(Needs).start([{"other": 1}], [0])
    with pytest.raises(ValueError, match="tools need a prompt of messages, got 'go'"):
        Environments(None, [extra]).start([{"prompt": "go"}], [0])

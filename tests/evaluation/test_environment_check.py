"""Each mistake in an environment is found, and an environment without mistakes has no problems."""

import functools
import itertools
import random
import time

import pytest
import tool_runs

from fastgrpo.check import main
from fastgrpo.evaluation.environment_check import check_environment


class Good:
    def reset(self, seed, level=1, **row):
        self.dice, self.sum = random.Random(seed), level
        return f"Level {level}."

    def roll(self, times: int) -> str:
        """Roll the dice.

        Args:
            times: How often.
        """
        self.sum += sum(self.dice.randint(1, 6) for _ in range(times))
        return str(self.sum)

    async def look(self) -> int:
        """Look at the sum."""
        return self.sum

    def get_reward(self):
        return self.sum / 10


class Needs(Good):
    def reset(self, level):
        pass


class Undescribed(Good):
    def undescribed(self, times: int):
        return ""


class NoText(Good):
    async def state(self) -> dict:
        """Return the state."""
        return {"sum": self.sum}


class Slow(Good):
    def wait(self) -> str:
        """Wait."""
        time.sleep(30)
        return "late"


class NoNumber(Good):
    def get_reward(self):
        return "good"


class Random(Good):
    seeds = itertools.count()  # dice of the seeds 0 and 1 differ; those of random seeds may not

    def reset(self, **row):
        super().reset(next(self.seeds))


class Used(Good):
    def __init__(self):
        self.sum = 0

    def reset(self, seed, **row):
        self.dice = random.Random(seed)


class Shared(Good):
    def reset(self, seed, **row):
        super().reset(seed)
        Shared.last = self

    @functools.wraps(Good.roll)
    def roll(self, times):
        return Good.roll(Shared.last, times)


def problems(*given, **how):
    return [text for *_, text in check_environment(*given, **how)]


def test_an_environment_without_mistakes_has_no_problems():
    assert problems(Good) == problems(Good, [], {"level": 3}) == problems({"a": Good, "b": tool_runs.Counter}) == []


@pytest.mark.parametrize("environment, words", [
    (Needs, "missing a required argument: 'level'"),
    (Undescribed, "undescribed' has no schema"),
    (NoText, "state() returns a dict, not text; the model reads \"{'sum': "),
    (Slow, "wait() ends the completion with tool_timeout"), (NoNumber, "get_reward() returns 'good', not a finite"),
    (Random, "with the same row and seed differs"),
    (Used, "was used before"), (Shared, "at the same time differ"), (object, "no method reset"),
])  # fmt: skip
def test_finds_every_mistake(environment, words):
    found = problems(environment, timeout=1 if environment is Slow else 60)
    assert len(found) == 1 and words in found[0]


def test_the_command_checks_tools_and_an_environment(tmp_path, capsys):
    (tmp_path / "rows.jsonl").write_text('{"prompt": "p", "level": 5}\n')
    argv = ["--environment", f"{__name__}:Needs", "--dataset", str(tmp_path / "rows.jsonl")]
    assert main(["--tools", "tool_runs:count"]) == 0 and "No problems" in capsys.readouterr().out
    assert main(argv) == 1 and "warning: Needs: " in capsys.readouterr().out

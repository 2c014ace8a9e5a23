"""Sources of training rows: shuffled epochs, or the levels of a curriculum. Their position is saved in checkpoints."""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from fastgrpo.data.records import Stateful
from fastgrpo.data.rows import Rows, as_rows, joined


@runtime_checkable
class Source(Stateful, Protocol):
    """Source of a trainer's rows. A row is a dict with a `prompt` and the columns that the rewards need.

    Its `state_dict` must be JSON-serializable. Subclasses of `Source` need not define `observe` and `metrics`.

    Attributes:
        rows: All rows that may be drawn. They are validated before the first step.
    """

    rows: Sequence[dict]

    def __len__(self) -> int:
        """Return the number of rows of one epoch."""

    def take(self, count: int) -> list[dict]:
        """Draw the next `count` rows."""

    def observe(self, accuracy: float) -> str | None:
        """Receive the accuracy of a step.

        Args:
            accuracy: Share of the step's completions that are correct.

        Returns:
            A message for the user, or None.
        """
        return None

    def metrics(self) -> dict[str, float]:
        """Return metrics of the source for metrics.jsonl, by name."""
        return {}


def as_source(data: Any, *, seed: int, shuffle: bool, needed: int | None = None) -> Source:
    """Return a `Source` of the training data: rows or a `Source`."""
    if isinstance(data, Source):
        if not len(data):
            raise ValueError("train_dataset has no rows: its len() is 0")
        return data
    rows = as_rows(data, "train_dataset", needed, "max_steps, which limits the rows that are read")
    return ShuffledRows(rows, seed=seed, shuffle=shuffle)


class ShuffledRows(Source):
    """A source that draws its rows in epochs, each in a new random order.

    Args:
        rows: A list of dicts, a datasets.Dataset, or a pandas.DataFrame.
        seed: Seed of the order of every epoch.
        shuffle: Whether to shuffle.

    Raises:
        ValueError: There are no rows, or their type is not supported.
    """

    def __init__(self, rows: Sequence[dict], *, seed: int = 0, shuffle: bool = True):
        rows = rows if isinstance(rows, Rows) else as_rows(rows, "the data of ShuffledRows").rows
        if not len(rows):
            raise ValueError("the data set has no rows")
        self.rows, self.seed, self.shuffle = rows, seed, shuffle
        self.drawn = 0
        self._cached = (None, None)

    def __len__(self):
        return len(self.rows)

    def take(self, count: int) -> list[dict]:
        """Draw the next `count` rows."""
        start, self.drawn = self.drawn, self.drawn + count
        return [self.rows[self._order(n // len(self.rows))[n % len(self.rows)]] for n in range(start, self.drawn)]

    def _order(self, epoch):
        """Return the indices of the rows in the order of an epoch. The latest order is cached."""
        if self._cached[0] != epoch:
            order = list(range(len(self.rows)))
            if self.shuffle:
                random.Random(f"{self.seed}-{epoch}").shuffle(order)
            self._cached = (epoch, order)
        return self._cached[1]

    def state_dict(self) -> dict[str, Any]:
        """Return how many rows have been drawn."""
        return {"drawn": self.drawn}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` returned."""
        self.drawn = state["drawn"]


@dataclass(frozen=True)
class Level:
    """A level of a curriculum. The last level never ends.

    Attributes:
        name: Printed when the curriculum moves on to the level.
        source: The rows of the level.
        until_accuracy: The level ends when the mean accuracy of `Curriculum.WINDOW` steps reaches this value. If None,
            it never ends.
    """

    name: str
    source: ShuffledRows
    until_accuracy: float | None = None


class Curriculum:
    """A source that draws from one level after another.

    Args:
        levels: The `Level`s, the easiest first.

    Raises:
        ValueError: There are no levels.
    """

    WINDOW = 3  # steps in the mean accuracy

    def __init__(self, levels: list[Level]):
        if not levels:
            raise ValueError("a curriculum needs at least one level")
        self.levels = levels
        self.level, self.recent = 0, []

    @property
    def rows(self) -> Rows:
        """Return the rows of all levels."""
        return joined([as_rows(level.source.rows, f"level {level.name!r}") for level in self.levels])

    def __len__(self):
        return len(self.levels[-1].source)

    def take(self, count: int) -> list[dict]:
        """Draw the next `count` rows of the current level."""
        return self.levels[self.level].source.take(count)

    def observe(self, accuracy: float) -> str | None:
        """Add the accuracy of a step. If the level is complete, move on to the next one and return a message."""
        level = self.levels[self.level]
        self.recent = [*self.recent, accuracy][-self.WINDOW :]
        able = (
            level.until_accuracy is not None
            and len(self.recent) == self.WINDOW
            and sum(self.recent) / self.WINDOW >= level.until_accuracy
        )
        if not able or self.level + 1 == len(self.levels):
            return None
        self.level, self.recent = self.level + 1, []
        return f"the curriculum moves on to {self.levels[self.level].name}"

    def metrics(self) -> dict[str, float]:
        """Return the index of the current level."""
        return {"curriculum/level": self.level}

    def state_dict(self) -> dict[str, Any]:
        """Return the current level, its recent accuracies, and the state of each level's source."""
        return {
            "level": self.level,
            "recent": self.recent,
            "sources": [level.source.state_dict() for level in self.levels],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` returned."""
        self.level, self.recent = state["level"], state["recent"]
        for level, source in zip(self.levels, state["sources"], strict=True):
            level.source.load_state_dict(source)

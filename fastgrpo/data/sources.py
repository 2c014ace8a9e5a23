"""Where training rows come from: shuffled epochs or the levels of a curriculum, each with a cursor to save."""

import random
from dataclasses import dataclass


class ShuffledRows:
    """Rows in epochs, each in a random order of its own."""

    def __init__(self, rows, *, seed=0, shuffle=True):
        if not len(rows):
            raise ValueError("the data set has no rows")
        self.rows, self.seed, self.shuffle = rows, seed, shuffle
        self.drawn = 0
        self._cached = (None, None)

    def __len__(self):
        return len(self.rows)

    def take(self, count):
        """The next `count` rows."""
        start, self.drawn = self.drawn, self.drawn + count
        return [self.rows[self._order(n // len(self.rows))[n % len(self.rows)]] for n in range(start, self.drawn)]

    def _order(self, epoch):
        """Indices of the rows in this epoch's order; the one in use is kept."""
        if self._cached[0] != epoch:
            order = list(range(len(self.rows)))
            if self.shuffle:
                random.Random(f"{self.seed}-{epoch}").shuffle(order)
            self._cached = (epoch, order)
        return self._cached[1]

    def observe(self, accuracy):
        """Accuracy changes nothing here."""
        return False

    def state_dict(self):
        return {"drawn": self.drawn}

    def load_state_dict(self, state):
        self.drawn = state["drawn"]


@dataclass(frozen=True)
class Level:
    """A stage of a curriculum: left when the mean accuracy of `WINDOW` steps reaches until_accuracy, or after
    until_steps; the last level is never left."""

    name: str
    source: ShuffledRows
    until_accuracy: float | None = None
    until_steps: int | None = None


class Curriculum:
    """Levels in order, each drawn from until it is left."""

    WINDOW = 3

    def __init__(self, levels):
        self.levels = levels
        self.level, self.recent, self.steps = 0, [], 0

    @property
    def name(self):
        return self.levels[self.level].name

    @property
    def rows(self):
        """Of all levels."""
        return [row for level in self.levels for row in level.source.rows]

    def __len__(self):
        return len(self.levels[-1].source)

    def take(self, count):
        """The next `count` rows of the current level."""
        return self.levels[self.level].source.take(count)

    def observe(self, accuracy):
        """Count a step on the current level, and move on where it is done. Returns whether it moved."""
        level = self.levels[self.level]
        self.steps += 1
        self.recent = [*self.recent, accuracy][-self.WINDOW :]
        able = (
            level.until_accuracy is not None
            and len(self.recent) == self.WINDOW
            and sum(self.recent) / self.WINDOW >= level.until_accuracy
        )
        if self.level + 1 < len(self.levels) and (able or self.steps == level.until_steps):
            self.level, self.recent, self.steps = self.level + 1, [], 0
            return True
        return False

    def state_dict(self):
        return {
            "level": self.level,
            "recent": self.recent,
            "steps": self.steps,
            "sources": [level.source.state_dict() for level in self.levels],
        }

    def load_state_dict(self, state):
        self.level, self.recent, self.steps = state["level"], state["recent"], state["steps"]
        for level, source in zip(self.levels, state["sources"], strict=True):
            level.source.load_state_dict(source)

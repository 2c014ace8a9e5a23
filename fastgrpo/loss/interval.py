"""Ranges of numbers, which the knobs of the loss and the settings of the same names share."""

import math
import numbers
from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Interval:
    """The finite numbers that are allowed as the value of a knob of the loss or of a setting.

    Attributes:
        at_least: The smallest number allowed, or None.
        above: A number that the value must exceed, or None.
        at_most: The largest number allowed, or None.
        below: A number that the value must stay under, or None.
        or_zero: Whether 0 is allowed besides.
        why: The reason for the bounds, which a refusal repeats. Empty where the bounds speak for themselves.
    """

    at_least: float | None = None
    above: float | None = None
    at_most: float | None = None
    below: float | None = None
    or_zero: bool = False
    why: str = ""

    @property
    def text(self) -> str:
        """The interval in words that can follow "must be"."""
        if self.or_zero:
            return f"0 or {replace(self, or_zero=False).text}"
        has_low = self.at_least is not None or self.above is not None
        has_high = self.at_most is not None or self.below is not None
        if has_low and has_high:
            low = f"({self.above}" if self.at_least is None else f"[{self.at_least}"
            high = f"{self.below})" if self.at_most is None else f"{self.at_most}]"
            return f"in {low}, {high}"
        if has_low:
            return "positive" if self.above == 0 else f"at least {self.at_least}" if self.above is None else (
                f"above {self.above}"
            )  # fmt: skip
        if has_high:
            return f"below {self.below}" if self.at_most is None else f"at most {self.at_most}"
        return "finite"

    def check(self, name: str, value: float) -> None:
        """Refuse a number outside of the interval."""
        if isinstance(value, bool) or not isinstance(value, numbers.Real):
            raise ValueError(f"{name} must be a number, got {value!r}")
        try:
            finite = math.isfinite(value)
        except OverflowError:
            raise ValueError(f"{name} must be finite, got a whole number that no float can hold") from None
        if not finite:
            raise ValueError(f"{name} must be finite, got {value}")
        inside = (self.or_zero and value == 0) or (
            (self.at_least is None or value >= self.at_least)
            and (self.above is None or value > self.above)
            and (self.at_most is None or value <= self.at_most)
            and (self.below is None or value < self.below)
        )
        if not inside:
            raise ValueError(f"{name} must be {self.text}, got {value}" + (f": {self.why}" if self.why else ""))


# Below it, logits of ordinary size (up to 1e8) divided by the temperature would exceed the largest fp32, and the loss
# would be NaN. A sampler's greedy temperature of 0 has no log-probs either.
TEMPERATURE = Interval(at_least=1e-30, why="logits are divided by it")
BACKWARD_TOLERANCE = Interval(at_least=0, below=1)  # of the head: the share of a row's gradient that may be left out

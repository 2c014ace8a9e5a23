"""Adaptive control of the entropy bonus (Skywork-OR1, arXiv 2505.22312, section 3.2.3).

The coefficient rises by a fixed step after every update that measured an entropy at or below the target, and falls by
it after the others. It is applied only while the entropy of the last update was at or below the target.
"""

import math
from typing import Any

from fastgrpo.config.settings import GRPOConfig


class AdaptiveEntropy:
    """The coefficient of the entropy bonus, which follows the entropy that updates measure.

    Attributes:
        coef: The coefficient.
    """

    def __init__(self, args: GRPOConfig):
        self.coef, self._entropy = args.entropy_coef, None
        self._low, self._high = args.entropy_coef_min, args.entropy_coef_max
        self._delta, self._target = args.entropy_coef_delta, args.entropy_target

    @property
    def applied(self) -> float:
        """The coefficient of the next update: 0 where the last one measured more than the target, or none has."""
        return self.coef if self._entropy is not None and self._entropy <= self._target else 0.0

    def observe(self, entropy: float) -> None:
        """Move the coefficient after an update."""
        if not math.isfinite(entropy):
            return
        if entropy <= self._target:
            self.coef = min(self.coef + self._delta, self._high)
        else:
            self.coef = max(self.coef - self._delta, self._low)
        self._entropy = entropy

    def state_dict(self) -> dict[str, Any]:
        """Return the coefficient and the entropy of the last update, as JSON can hold them."""
        return {"coef": self.coef, "entropy": self._entropy}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` returned."""
        self.coef, self._entropy = state["coef"], state["entropy"]

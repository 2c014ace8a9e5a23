"""Batches that servers draw ahead of the steps that train on them (`max_staleness`).

A step sends its weights, begins the batch of the step that is `max_staleness` steps ahead, and waits for its own batch,
which was begun as many steps ago:

    step t    weights t -> begin batch t + K, wait for batch t, update
    servers   ............ draw batches t to t + K ...........

So the servers draw during updates, and the weights that draw a completion are at most K steps older than those that
are trained on it. A slow prompt delays its step, and is never discarded. A checkpoint has the groups that have
finished, and a resumed run draws the others again: each row is trained on as often as in a run without a stop.
"""

import json
from collections import deque
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from fastgrpo.data.records import Prompt, Sample
from fastgrpo.rewards.call import Judging
from fastgrpo.rollout.backend import Drawing, RolloutBackend
from fastgrpo.run.resume import digest_of_rows


def _saved(sample):
    """Return the fields of a drawn sample, in types that torch.load reads safely."""
    kept = {name: getattr(sample, name) for name in ("ids", "logps", "sampler_logps", "versions")}
    return kept | {"finish_reason": str(sample.finish_reason)}


@dataclass
class Batch:
    """Groups that are drawn and judged."""

    step: int  # the step that trains on them
    place: dict[str, Any]  # the state of the source before the rows were taken
    rows: list[dict]  # of all groups
    judging: Judging
    groups: dict[int, list[Prompt]] = field(default_factory=dict)  # prompts of the completions that this rank draws
    drawing: Drawing | None = None  # the requests of this rank; None with rollout_func
    restored: dict[int, list[Sample]] = field(default_factory=dict)  # samples from a checkpoint, by group

    def state_dict(self) -> dict[str, Any]:
        """Return what a checkpoint needs: the groups that have finished, and where the rows of the others are."""
        done = (self.restored | self.drawing.done).items()
        finished = {i: [_saved(sample) for sample in samples] for i, samples in done if samples[0].dialogue is None}
        place = json.loads(json.dumps(self.place))  # as the checkpoint's own state of the source
        return {"step": self.step, "place": place, "digest": digest_of_rows(self.rows), "finished": finished}


class Ahead:
    """The batches of the next steps."""

    def __init__(self, engine: RolloutBackend):
        self.engine, self.batches = engine, deque()  # the batches in progress
        self.saved = []  # states of the batches that a checkpoint had, and that have not begun again yet

    def wait(self, batch: Batch) -> None:
        """Draw until a batch has finished. The others go on."""
        others = [other for other in self.batches if other is not batch]
        try:
            for outputs in () if batch.drawing.over else self.engine.run():
                for each in (batch, *others):
                    each.drawing.add(outputs)
                if batch.drawing.over:
                    break
        finally:
            batch.drawing.abort()

    def poll(self) -> None:
        """Take what has finished, and send further requests, without waiting."""
        outputs = self.engine.step(timeout=0)
        self.engine.check_finite(outputs)
        for batch in self.batches:
            batch.drawing.add(outputs)

    def settle(self) -> None:
        """Wait for all batches, so that nothing is in flight."""
        for batch in self.batches:
            self.wait(batch)

    def close(self) -> None:
        """Drop all batches."""
        for batch in self.batches:
            batch.drawing.abort()
        self.batches.clear()
        if self.engine is not None:  # None in supervised training without rewards
            with suppress(ValueError):  # of wrong weights: logged, and no step trained on their completions
                self.engine.end_sync()

    def state_dict(self) -> dict[str, Any]:
        """Return the states of the batches."""
        if self.batches:
            self.poll()
        return {"batches": self.saved + [batch.state_dict() for batch in self.batches]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` returned; the next step begins the batches again."""
        self.saved = list(state["batches"])

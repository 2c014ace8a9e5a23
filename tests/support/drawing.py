"""Backends, prompts, and the completions of an engine."""

from functools import partial

from fastgrpo.rollout.backend import Drawing
from fastgrpo.rollout.engine import RolloutEngine
from fastgrpo.rollout.hf import HFBackend

BACKENDS = {name: partial(RolloutEngine, attention=name) for name in ("sdpa", "products")} | {"hf": HFBackend}
PROMPTS = [[5, 6, 7], [8], [9, 10, 11, 12, 13, 14, 15], [16, 17]]


def ids_of(rollouts):
    return [rollout.ids for rollout in rollouts]


def finish(engine, most=1000):
    outputs = {}
    engine.sync()
    for _ in range(most):
        outputs |= engine.step()
        if not engine.has_unfinished_requests():
            return outputs
    raise AssertionError(f"requests are left after {most} steps")


def first_groups(engine, groups, sampling, count):
    """Draw until `count` groups have finished."""
    drawing = Drawing(engine, groups, sampling, count)
    for outputs in engine.run():
        drawing.add(outputs)
    return dict(sorted(drawing.done.items())), drawing.lost

"""The backends that the tests of rollouts run on."""

from functools import partial

import pytest

from fastgrpo.rollout.engine import RolloutEngine
from fastgrpo.rollout.hf import HFBackend

ENGINES = [partial(RolloutEngine, attention=name) for name in ("sdpa", "products")]


@pytest.fixture(scope="session", params=[*ENGINES, HFBackend], ids=["sdpa", "products", "hf"])
def backend(request):
    return request.param

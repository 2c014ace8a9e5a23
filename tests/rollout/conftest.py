"""The backends that the tests of rollouts run on."""

from functools import partial

import pytest

from fastgrpo.rollout.engine import RolloutEngine
from fastgrpo.rollout.hf import HFBackend

BACKENDS = {name: partial(RolloutEngine, attention=name) for name in ("sdpa", "products")} | {"hf": HFBackend}


@pytest.fixture(scope="session", params=BACKENDS)
def backend(request):
    return BACKENDS[request.param]

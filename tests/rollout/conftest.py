"""The backends that the tests of rollouts run on."""

import pytest
from drawing import engine_of

from fastgrpo.rollout.hf import HFBackend


@pytest.fixture(
    scope="session", params=[engine_of("sdpa"), engine_of("products"), HFBackend], ids=["sdpa", "products", "hf"]
)
def backend(request):
    return request.param

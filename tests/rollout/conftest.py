"""The backends that the tests of rollouts run on."""

import pytest
from drawing import BACKENDS


@pytest.fixture(scope="session", params=BACKENDS)
def backend(request):
    return BACKENDS[request.param]

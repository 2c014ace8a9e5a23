"""A sharded policy computes on K ranks what the plain policy computes in one process."""

import pytest
import ranked

SIZES = (1, 2)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", ranked.names("sharded_updates"))
def test_updates(name, size):
    ranked.passes(name, size)

"""A sharded policy computes on K ranks what the plain policy computes in one process."""

import pytest
import ranked


@pytest.mark.parametrize("size", (1, 2))
@pytest.mark.parametrize("name", ranked.names("sharded_updates"))
def test_shards(name, size):
    ranked.passes(name, size)


@pytest.mark.slow
@pytest.mark.parametrize("module", ranked.MODULES)
def test_four_ranks(module):
    for name in ranked.names(module):
        ranked.passes(name, 4)


@pytest.mark.slow
@pytest.mark.parametrize("name", ranked.names("sharded_updates", rare=True))
def test_rarer_shards(name):
    ranked.passes(name, 2, rare=True)

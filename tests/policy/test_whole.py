"""The whole copy of a sharded policy: rollouts from it, its memory, and references and files that are made of it."""

import pytest
import ranked


@pytest.mark.parametrize("size", (1, 2))
@pytest.mark.parametrize("name", ranked.names("sharded_rollouts"))
def test_whole(name, size):
    ranked.passes(name, size)


@pytest.mark.slow
@pytest.mark.parametrize("name", ranked.names("sharded_rollouts", rare=True))
def test_rarer_things(name):
    pytest.importorskip("torchao", reason="not installed (extra: quantization)")
    ranked.passes(name, 2, rare=True)

"""A whole run that nothing stopped, which the tests of stopped ones share."""

import pytest
from resumed import (
    make_trainer,
)


@pytest.fixture(scope="session")
def whole(tmp_path_factory):
    """tmp_path of a run that nothing stopped, by dtype."""
    made = {}

    def make(dtype="float32"):
        if dtype not in made:
            made[dtype] = tmp_path_factory.mktemp(dtype)
            make_trainer(made[dtype], "whole", dtype=dtype).train()
        return made[dtype]

    return make

"""A run that nothing stopped, for the tests of stopped ones."""

import pytest
from resumed import make_trainer


@pytest.fixture(scope="session")
def whole(tmp_path_factory):
    """The folder of a run that nothing stopped, by dtype: a function."""
    made = {}

    def make(dtype="float32"):
        if dtype not in made:
            made[dtype] = tmp_path_factory.mktemp(dtype)
            make_trainer(made[dtype], "whole", dtype=dtype).train()
        return made[dtype]

    return make

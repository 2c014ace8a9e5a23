"""A whole run that nothing stopped, for the tests of stopped ones, and a whole model, for those of mistakes."""

import pytest
import tiny
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


@pytest.fixture(scope="session")
def saved(tmp_path_factory):
    """A whole model folder, which the tables of mistakes copy and spoil."""
    return tiny.save(tmp_path_factory.mktemp("saved") / "model")

"""What every interpreted test gets: a skip without the interpreter, and silence of numpy."""

import warnings

import loss_runs
import pytest

from fastgrpo.kernels import launch


@pytest.fixture(autouse=True)
def interpreter():
    if not launch.INTERPRET:
        pytest.skip("needs TRITON_INTERPRET=1 before the import")
    with warnings.catch_warnings():  # numpy warns of exp2(-inf), of NaN, and of every exp that overflows to a flag
        warnings.simplefilter("ignore", RuntimeWarning)
        yield


@pytest.fixture
def batch():
    return loss_runs.ragged_batch()

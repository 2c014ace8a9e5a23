"""What every interpreted test gets: a skip without the interpreter, and silence of numpy."""

import warnings

import pytest


@pytest.fixture(autouse=True)
def interpreter():
    # Imported here: pytest reads this file where there is no Triton too.
    from fastgrpo.kernels import launch

    if not launch.INTERPRET:
        pytest.skip("needs TRITON_INTERPRET=1 before the import")
    with warnings.catch_warnings():  # numpy warns of exp2(-inf), of NaN, and of every exp that overflows to a flag
        warnings.simplefilter("ignore", RuntimeWarning)
        yield


@pytest.fixture
def batch():
    """Return hidden, weight and keyword arguments of a ragged batch."""
    import loss_runs

    return loss_runs.ragged_batch()

"""What holds for all benchmarks that pytest runs."""

import pytest

from benchmarks.compare import KERNELS_ONLY


@pytest.fixture(autouse=True)
def kernels_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make it an error where plain PyTorch would take the place of a kernel.

    Args:
        monkeypatch: Takes the variable back after the benchmark.
    """
    for name, value in KERNELS_ONLY.items():
        monkeypatch.setenv(name, value)

"""Fixtures of all benchmarks."""

import pytest

from benchmarks.compare import KERNELS_ONLY


@pytest.fixture(autouse=True)
def kernels_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """Raise if a kernel fails its self-check, instead of falling back to plain PyTorch."""
    for name, value in KERNELS_ONLY.items():
        monkeypatch.setenv(name, value)

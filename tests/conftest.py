"""Fixtures of every test: seeded torch, NaN in uninitialised memory, no hub, and a skip without a GPU."""

import os
import signal

# cuBLAS is deterministic only with a workspace of its own; it reads this when CUDA starts.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
# No test needs Hugging Face's hub. Where it cannot be reached, asking it for a model that is not there takes a minute.
os.environ["HF_HUB_OFFLINE"] = "1"

import hypothesis
import pytest
import torch

# Property tests draw the same examples in every run, and a busy machine fails none.
hypothesis.settings.register_profile("fixed", derandomize=True, deadline=None, database=None)
hypothesis.settings.load_profile("fixed")

# A shell starts background jobs with SIGINT ignored, and tests and their processes would inherit that.
signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_modifyitems(items):
    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device, torch sees none"))


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def nan_in_uninitialised_memory(request):
    """`torch.empty` and its kin return NaN (the largest value for integers): a read before a write shows.

    Not in tests that are about a GPU: torch does it in its deterministic mode alone, whose kernels are others than
    people run, some of which wait for the host, and fills come into graphs.
    """
    if request.node.get_closest_marker("gpu"):
        yield
        return
    enabled = torch.are_deterministic_algorithms_enabled()
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    fill = torch.utils.deterministic.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    yield
    torch.utils.deterministic.fill_uninitialized_memory = fill
    torch.use_deterministic_algorithms(enabled, warn_only=warn_only)


@pytest.fixture(scope="session")
def saved(tmp_path_factory):
    """The folder of a tiny model, which tests read or copy."""
    import tiny  # pytest reads this file where there is no transformers too

    return tiny.save(tmp_path_factory.mktemp("saved") / "model")


@pytest.fixture
def without_curves(monkeypatch):
    """Runs that draw no picture at their end: matplotlib takes longer than eight steps of a tiny model."""
    monkeypatch.setattr("fastgrpo.run.curves.draw_curves", lambda *_, **__: None)

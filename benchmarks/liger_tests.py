"""Runs Liger-Kernel's tests of its GRPO losses on our implementations: `make liger-tests`.

    python -m benchmarks.liger_tests [--all-sizes] [arguments of pytest, such as -k luspo]

The tests come from Liger's source distribution (BSD-2), which pip downloads to a temporary folder. This file is also
the pytest plugin for them: it replaces the two names before the tests import them, deselects the cases of `LEFT_OUT`,
and reports their number and the reasons. Without a GPU it also deselects the larger sizes, which would take hours;
`--all-sizes` runs them.
"""

import collections
import functools
import math
import os
import shlex
import subprocess
import sys
import tarfile
import tempfile
from importlib import metadata
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parent.parent
VERSION = "0.8.5"
FILES = ("test/chunked_loss/test_grpo_loss.py", "test/transformers/test_grpo_loss.py")

INNER = "tests an internal function of Liger, neither of the two names"
SEQUENCE = "expects an error; ours supports cispo and sapo with sequence-level ratios"
LARGE = "a large batch, without a GPU; --all-sizes runs it"
PADDED_LUSPO = "luspo with a KL: Liger averages over the padded width, including padding"
PADDED_VESPO = "vespo with weights per token: Liger multiplies weights of the padding into W"


def _padded_luspo(case):
    return case["loss_type"] == "luspo" and case["beta"] != 0 and case["use_ref_model"]


def _logits(item):
    """Return the number of logits of a case: B T V, if it has these parameters."""
    case = item.callspec.params if hasattr(item, "callspec") else {}
    return math.prod(case.get(name, 1) for name in "BTV") if "V" in case else 0


# Name of a test -> (whether to deselect a case, from its parameters; reason).
LEFT_OUT = {
    "test_selective_chunk_forward_matches_reference": (lambda case: True, INNER),
    "test_functional_correctness": (lambda case: True, INNER),
    "test_reduce_grpo_loss_matches_reference": (lambda case: True, INNER),
    "test_reduce_grpo_loss_requires_max_completion_length": (lambda case: True, INNER),
    "test_selective_logprob_backward_skips_frozen_params": (lambda case: True, INNER),
    "test_selective_log_softmax": (lambda case: True, INNER),
    "test_sequence_level_rejects_unsupported_loss_types": (lambda case: True, SEQUENCE),
    "test_triton_sequence_level_rejects_unsupported_loss_types": (lambda case: True, SEQUENCE),
    "test_correctness": (_padded_luspo, PADDED_LUSPO),
    "test_correctness_with_vllm_is_ratio": (lambda case: case["loss_type"] == "vespo", PADDED_VESPO),
}
left_out, calls = collections.Counter(), collections.Counter()


def counted(function):
    """Count the calls of our function: tests that never call it would all pass."""

    @functools.wraps(function)
    def call(*args, **kwargs):
        calls[function.__qualname__] += 1
        return function(*args, **kwargs)

    return call


def pytest_addoption(parser):
    """Add an option for the sizes that take hours on a CPU."""
    parser.addoption("--all-sizes", action="store_true", default=torch.cuda.is_available())


def pytest_configure():
    """Replace Liger's names by ours in all modules from which tests import them."""
    import liger_kernel.chunked_loss.grpo_loss
    import liger_kernel.transformers.grpo_loss

    from fastgrpo.integrations.liger import LigerFusedLinearGRPOLoss, triton_grpo_loss

    class Counted(LigerFusedLinearGRPOLoss):
        forward = counted(LigerFusedLinearGRPOLoss.forward)

    for module in (liger_kernel.chunked_loss, liger_kernel.chunked_loss.grpo_loss):
        module.LigerFusedLinearGRPOLoss = Counted
    liger_kernel.transformers.grpo_loss.triton_grpo_loss = counted(triton_grpo_loss)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config, items):
    """Deselect the cases of LEFT_OUT. An entry that matches no case is an error."""
    gone = []
    for name, (leaves_out, reason) in LEFT_OUT.items():
        cases = [item for item in items if item.originalname == name]
        cases = [item for item in cases if leaves_out(item.callspec.params if hasattr(item, "callspec") else {})]
        if not cases:
            raise pytest.UsageError(f"LEFT_OUT[{name!r}] leaves out no case")
        left_out[reason] += len(cases)
        gone += cases
    if not config.option.all_sizes:
        large = [item for item in items if item not in set(gone) and _logits(item) >= 2**22]
        left_out[LARGE] = len(large)
        gone += large
    config.hook.pytest_deselected(items=gone)
    items[:] = [item for item in items if item not in set(gone)]


def pytest_terminal_summary(terminalreporter):
    """Report the deselected cases, and the number of calls of ours."""
    for reason, count in left_out.items():
        terminalreporter.write_line(f"left out {count}: {reason}")
    for name, count in calls.items():
        terminalreporter.write_line(f"called {count} times: {name}")


def pytest_sessionfinish(session):
    """Fail if a test file ran without calling our class or function."""
    files = {item.path for item in session.items}
    if len(calls) < len(files) and not session.config.option.collectonly:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def main(arguments):
    """Download Liger's source distribution and run its two test files. Return the exit status of pytest."""
    installed = metadata.version("liger_kernel")
    if installed != VERSION:
        raise SystemExit(f"the tests need liger-kernel {VERSION}, but {installed} is installed; install {VERSION}")
    with tempfile.TemporaryDirectory() as folder:
        download = [
            sys.executable,
            *["-m", "pip", "download", "--no-deps", "--no-build-isolation", "--no-binary", ":all:"],
        ]
        download += [*shlex.split(os.environ.get("PIP_ARGS", "")), f"liger-kernel=={VERSION}", "--dest", folder]
        subprocess.run(download, check=True)
        (archive,) = Path(folder).glob("*.tar.gz")
        with tarfile.open(archive) as tar:
            tar.extractall(folder, filter="data")
        command = [
            sys.executable,
            "-m",
            "pytest",
            *FILES,
            "-p",
            "benchmarks.liger_tests",
            "-p",
            "no:cacheprovider",
            *arguments,
        ]
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        tests = Path(folder) / f"liger_kernel-{VERSION}"
        return subprocess.run(command, cwd=tests, env=environment, check=False).returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""Runs the interpreted kernel tests, each file in a process of its own, two at a time.

TRITON_INTERPRET=1 changes what @triton.jit returns, for good and for the whole process: interpreted kernels cannot
share one with compiled ones. The tests that need the interpreter therefore lie in interpreted/*.py, which pytest does
not collect by itself, and this file hands each of them to a fresh pytest with the variable set. By hand:

    TRITON_INTERPRET=1 python -m pytest tests/kernels/interpreted/linear_grpo.py

Each of those files names the kernels that it mirrors. Marked slow are cases whose code other cases enter too.
"""

import os
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
from paths import ROOT

HERE = ROOT / "tests" / "kernels" / "interpreted"
# So many tests pass at least, ordinary and slow ones: a file that collects nothing must not look like a success.
FILES = {
    "engine.py": (6, 0),
    "linear_logprob.py": (100, 0),
    "linear_grpo.py": (70, 0),
    "sampling.py": (70, 0),
    "group_decode.py": (70, 0),
    "losses.py": (40, 2),
    "vocab_parallel.py": (1, 0),
    "logits_grpo.py": (20, 0),
    "policy_loss.py": (2, 0),
    "launch.py": (2, 0),
}


def test_every_interpreted_file_is_listed():
    assert {path.name for path in HERE.glob("*.py")} == {"conftest.py", *FILES}


@pytest.fixture(scope="module")
def runs(request):
    """The runs of the selected tests, under way in threads: (file, marker expression) -> a future of the process."""
    items = [item for item in request.session.items if item.module is request.module and hasattr(item, "callspec")]
    keys = [(item.callspec.params["name"], item.callspec.params["marked"]) for item in items]
    with ThreadPoolExecutor(2) as pool:
        yield {key: pool.submit(run_file, *key) for key in keys}
        pool.shutdown(cancel_futures=True)


def cases():
    for name, (_, slow) in FILES.items():
        yield pytest.param(name, "not slow", id=name)
        if slow:
            yield pytest.param(name, "slow", id=f"{name}-slow", marks=pytest.mark.slow)


@pytest.mark.parametrize(("name", "marked"), cases())
def test_interpreted(name, marked, runs):
    pytest.importorskip("triton")
    run = runs[name, marked].result()
    passed = re.search(r"(\d+) passed", run.stdout)
    assert run.returncode == 0, run.stdout[-6000:] + run.stderr[-2000:]
    assert int(passed[1]) >= FILES[name][marked == "slow"], run.stdout[-2000:]


def run_file(name, marked):
    command = [sys.executable, "-m", "pytest", str(HERE / name), "-q", "-x", "-p", "no:cacheprovider", "-m", marked]
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)

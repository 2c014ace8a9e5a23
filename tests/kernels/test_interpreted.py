"""Runs the interpreted kernel tests, in two processes at a time.

TRITON_INTERPRET=1 changes what @triton.jit returns, for good and for the whole process: interpreted kernels cannot
share one with compiled ones. The tests that need the interpreter therefore lie in interpreted/*.py, which pytest does
not collect by itself, and this file hands them to fresh ones with the variable set. By hand:

    TRITON_INTERPRET=1 python -m pytest tests/kernels/interpreted/linear_grpo.py

Each of those files names the kernels that it mirrors. Marked slow are cases whose code other cases enter too.
"""

import re
from concurrent.futures import ThreadPoolExecutor

import pytest
from paths import ROOT
from processes import run_pytest

HERE = ROOT / "tests" / "kernels" / "interpreted"
# Files that share a process, and how many of their tests pass at least, ordinary and slow ones: files that collect
# nothing must not look like a success.
RUNS = {
    "engine": (["engine.py"], 12, 0),
    "linear_grpo": (["linear_grpo.py"], 47, 0),
    "bf16": (["linear_grpo_bf16.py"], 19, 0),
    "linear_logprob": (["linear_logprob.py", "launch.py", "operators.py"], 66, 0),
    "rollout": (["sampling.py", "group_decode.py"], 120, 39),
    "losses": (["losses.py", "logits_grpo.py", "policy_loss.py", "self_check.py"], 79, 4),
    "vocab_parallel": (["vocab_parallel.py"], 1, 0),
}


def test_every_interpreted_file_is_listed():
    assert {path.name for path in HERE.glob("*.py")} == {"conftest.py"}.union(*(names for names, *_ in RUNS.values()))


@pytest.fixture(scope="module")
def runs(request):
    """The runs of the selected tests, under way in threads: (name, marker expression) -> a future of the process."""
    items = [item for item in request.session.items if item.module is request.module and hasattr(item, "callspec")]
    keys = [(item.callspec.params["name"], item.callspec.params["marked"]) for item in items]
    with ThreadPoolExecutor(2) as pool:
        yield {key: pool.submit(run_files, *key) for key in keys}
        pool.shutdown(cancel_futures=True)


CASES = [
    *(pytest.param(name, "not slow", id=name) for name in RUNS),
    *(pytest.param(name, "slow", id=f"{name}-slow", marks=pytest.mark.slow) for name, run in RUNS.items() if run[2]),
]


@pytest.mark.parametrize(("name", "marked"), CASES)
def test_interpreted(name, marked, runs):
    pytest.importorskip("triton")
    run = runs[name, marked].result()
    passed = re.search(r"(\d+) passed", run.stdout)
    assert run.returncode == 0, run.stdout[-6000:] + run.stderr[-2000:]
    assert int(passed[1]) >= RUNS[name][1 + (marked == "slow")], run.stdout[-2000:]


def run_files(name, marked):
    return run_pytest([HERE / file for file in RUNS[name][0]], marked, TRITON_INTERPRET="1")

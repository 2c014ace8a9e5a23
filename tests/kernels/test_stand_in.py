"""Runs the public calls of gpu_stand_in/ for GPUs that are not there, in two processes at a time.

A process has one driver, and so one GPU. By hand:

    FASTGRPO_STAND_IN=90 python -m pytest tests/kernels/gpu_stand_in/losses.py

test_aot.py looks at the machine code of chosen variants. This one asks whether every call that a user can make compiles
and can be launched. Marked slow are all calls for all GPUs; the others are a choice of them for sm_90, and for the
decode step of sm_89, which has other block sizes.
"""

import re
from concurrent.futures import ThreadPoolExecutor

import pytest
from paths import ROOT
from processes import run_pytest

HERE = ROOT / "tests" / "kernels" / "gpu_stand_in"
FILES = {"losses.py": (127, 428), "rollout.py": (62, 465)}  # how many of their tests pass: not slow ones, and all
CAPABILITIES = (80, 86, 89, 90, 100, 120)
ORDINARY = [("losses.py", 90), ("rollout.py", 90), ("rollout.py", 89)]
ALL = [(name, capability) for name in FILES for capability in CAPABILITIES]


def test_every_file_is_listed():
    assert {path.name for path in HERE.glob("*.py")} == {"conftest.py", *FILES}


@pytest.fixture(scope="module")
def runs(request):
    """The runs of the selected tests, under way in threads: (file, capability, whole) -> a future of the process."""
    items = [item for item in request.session.items if item.module is request.module and hasattr(item, "callspec")]
    keys = [tuple(item.callspec.params[name] for name in ("name", "capability", "whole")) for item in items]
    with ThreadPoolExecutor(2) as pool:
        yield {key: pool.submit(run, *key) for key in keys}
        pool.shutdown(cancel_futures=True)


CASES = [
    *(pytest.param(*run, False, id="{}-{}".format(*run)) for run in ORDINARY),
    *(pytest.param(*run, True, id="{}-{}-all".format(*run), marks=pytest.mark.slow) for run in ALL),
]


@pytest.mark.parametrize(("name", "capability", "whole"), CASES)
def test_every_call_can_be_launched(name, capability, whole, runs):
    pytest.importorskip("triton")
    result = runs[name, capability, whole].result()
    passed = re.search(r"(\d+) passed", result.stdout)
    assert result.returncode == 0, result.stdout[-6000:] + result.stderr[-2000:]
    assert int(passed[1]) == FILES[name][whole], result.stdout[-2000:]


def run(name, capability, whole):
    return run_pytest([HERE / name], "" if whole else "not slow", FASTGRPO_STAND_IN=str(capability))

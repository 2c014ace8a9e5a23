"""On a CPU the memory that a step frees stays with the process, unless the environment says otherwise."""

import os
import subprocess
import sys

import pytest
from runs import make_trainer

from fastgrpo.trainer import setup
from fastgrpo.trainer.setup import VARIABLES

# Prints what keep_freed_memory returned, and how many MiB more are resident after 256 MiB were written and freed.
PROGRAM = """
import psutil
from fastgrpo.trainer.setup import keep_freed_memory

kept, before = keep_freed_memory(), psutil.Process().memory_info().rss
blocks = [b"x" * (64 * 2**20) for _ in range(4)]
del blocks
print(kept, (psutil.Process().memory_info().rss - before) // 2**20)
"""

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="glibc is Linux's")


def freed(**given):
    environment = {name: value for name, value in os.environ.items() if name not in (*VARIABLES, "GLIBC_TUNABLES")}
    done = subprocess.run([sys.executable, "-c", PROGRAM], env=environment | given, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    kept, resident = done.stdout.split()
    return kept, int(resident)


def test_what_is_freed_stays_with_the_process():
    kept, resident = freed()
    assert kept == "True" and resident >= 240


@pytest.mark.parametrize(
    "given",
    [{"MALLOC_TRIM_THRESHOLD_": "131072"}, {"GLIBC_TUNABLES": "glibc.malloc.mmap_max=65536"}],
    ids=["variable", "tunable"],
)
def test_the_environment_decides_where_it_is_set(given):
    kept, resident = freed(**given)
    assert kept == "False" and resident < 64


def test_other_tunables_decide_nothing():
    assert freed(GLIBC_TUNABLES="glibc.cpu.x86_shstk=off")[0] == "True"


def test_a_trainer_on_a_cpu_asks_for_it(tmp_path, monkeypatch):
    asked = []
    monkeypatch.setattr(setup, "keep_freed_memory", lambda: asked.append(True))
    make_trainer(tmp_path)
    assert asked == [True]

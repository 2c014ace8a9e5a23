"""The benchmark helper measures what it says; the benchmark runs at a small size and writes nothing there."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from benchmarks.compare import append, compare, rows_of

ROOT = Path(__file__).parent.parent


def test_results_have_the_documented_structure():
    results = compare({"a": lambda: None, "b": lambda: torch.ones(10)}, rounds=3)
    assert list(results) == ["a", "b"]
    for result in results.values():
        assert set(result) == {"median_s", "p20", "p80", "peak_bytes"}
        assert 0 < result["p20"] <= result["median_s"] <= result["p80"]


def test_variants_run_in_turns():
    """One warm-up each, then each round starts with the next one."""
    calls = []
    compare({name: lambda name=name: calls.append(name) for name in "abc"}, rounds=4)
    assert "".join(calls) == "abc" + "abc" + "bca" + "cab" + "abc"


def test_seconds():
    result = compare({"sleep": lambda: time.sleep(0.02)}, rounds=2)["sleep"]
    assert result["p20"] >= 0.02 and result["median_s"] < 0.2


def allocate_and_leave():
    """At the peak 3,000,000 bytes are alive, 2,000,000 are left."""
    temporary = torch.empty(250_000)
    kept = torch.empty(500_000)
    del temporary
    return kept


def test_peak_memory_of_known_allocations():
    held = torch.empty(10**6)  # alive before: an input

    def one_after_the_other():
        for _ in range(3):
            torch.empty(300_000)

    # NaN-filling would allocate a scalar on the side.
    torch.utils.deterministic.fill_uninitialized_memory = False
    results = compare({"leave": allocate_and_leave, "in turn": one_after_the_other, "nothing": lambda: held}, 1)
    assert results["leave"]["peak_bytes"] == 1_000_000
    assert results["in turn"]["peak_bytes"] == 1_200_000
    assert results["nothing"]["peak_bytes"] == 0


def test_peak_memory_sees_inside_an_operator():
    """logsumexp holds a temporary as large as its input, which no Python-level hook sees."""
    logits = torch.randn(1000, 500)
    peak = compare({"logsumexp": lambda: logits.logsumexp(-1)}, 1)["logsumexp"]["peak_bytes"]
    assert 2_000_000 <= peak <= 2_100_000


@pytest.mark.gpu
def test_peak_memory_and_time_on_cuda():
    def call():
        temporary = torch.empty(2**20, device="cuda")
        kept = torch.empty(2**21, device="cuda")
        del temporary
        return kept

    result = compare({"leave": call}, 3, "cuda")["leave"]
    assert result["peak_bytes"] == 2**22 and 0 < result["median_s"] < 1


def test_rows_are_appended(tmp_path):
    results = {"mine": {"median_s": 0.002, "p20": 0.001, "p80": 0.003, "peak_bytes": 3 * 2**20}}
    rows = rows_of(results, benchmark="test", n=4)
    assert append(rows, "cpu", tmp_path) == append(rows, "cpu", tmp_path) == tmp_path / "cpu.jsonl"
    lines = (tmp_path / "cpu.jsonl").read_text().splitlines()
    assert len(lines) == 2 and json.loads(lines[0]) == json.loads(lines[1]) == rows[0]
    expected = {"variant": "mine", "ms_p20": 1, "ms_p50": 2, "ms_p80": 3, "peak_mib": 3, "benchmark": "test", "n": 4}
    assert expected.items() <= rows[0].items()
    assert {"commit", "torch", "python", "threads", "date"} <= rows[0].keys()


def results_on_disk():
    return {path.name: path.read_bytes() for path in (ROOT / "benchmarks").glob("results/*")}


def test_bench_loss_runs_small(tmp_path):
    """The gradients of all variants agree, and peers that are not installed are named."""
    before = results_on_disk()
    report = tmp_path / "report.json"
    command = [sys.executable, "-m", "pytest", "benchmarks/bench_loss.py", "--benchmark-only", "-p", "no:cacheprovider"]
    result = subprocess.run(
        [*command, f"--benchmark-json={report}"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        env={**os.environ, "FASTGRPO_BENCH_SMALL": "1"},
    )
    assert result.returncode == 0, result.stdout + result.stderr
    info = json.loads(report.read_text())["benchmarks"][0]["extra_info"]
    variants = {row["variant"] for row in info["rows"]}
    assert {"fastgrpo", "full logits"} <= variants and ("trl" in variants) != ("trl" in info["missing"])
    assert {row["case"] for row in info["rows"]} == {"all rows", "40% of the rows"}
    peaks = {(row["variant"], row["case"]): row["peak_mib"] for row in info["rows"]}
    logits = 256 * 2048 * 4 / 2**20
    assert logits <= peaks["fastgrpo", "all rows"] < 1.2 * logits  # one chunk: the logits, turned into their gradient
    assert 2.5 * logits < peaks["full logits", "all rows"] < 4 * logits
    assert peaks["fastgrpo", "40% of the rows"] < 0.5 * peaks["fastgrpo", "all rows"]
    assert all({"value", "at most", "met"} == set(bar) for bar in info["bars"].values()) and len(info["bars"]) >= 3
    assert results_on_disk() == before

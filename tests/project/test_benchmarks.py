"""Benchmarks measure correctly, and all of them run at a small size (slow)."""

import json
import os
import subprocess
import sys
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
from paths import ROOT

from benchmarks import first_gpu, report
from benchmarks.compare import append, compare, rows_of
from benchmarks.harness import at_least
from benchmarks.race import __main__ as race
from benchmarks.race.trainers import VARIANTS
from benchmarks.vllm_server import PYTHON

SMALL = {"FASTGRPO_BENCH_SMALL": "1"}


def test_variants_run_in_turns():
    calls = []
    results = compare({name: lambda name=name: calls.append(name) for name in "abc"}, rounds=4)
    assert "".join(calls) == "abc" + "abc" + "bca" + "cab" + "abc"
    assert all(0 < result["p20"] <= result["median_s"] <= result["p80"] for result in results.values())


def test_peak_memory():
    held, logits = torch.empty(10**6), torch.randn(1000, 500)

    def leave():
        temporary = torch.empty(250_000)
        kept = torch.empty(500_000)
        del temporary
        return kept

    def one_after_the_other():
        for _ in range(3):
            torch.empty(300_000)

    torch.utils.deterministic.fill_uninitialized_memory = False  # filling would allocate a scalar on the side
    calls = {"leave": leave, "in turn": one_after_the_other, "nothing": lambda: held}
    results = compare(calls | {"logsumexp": lambda: logits.logsumexp(-1)}, 1)
    peaks = {name: result["peak_bytes"] for name, result in results.items()}
    assert 2_000_000 <= peaks.pop("logsumexp") <= 2_100_000
    assert peaks == {"leave": 1_000_000, "in turn": 1_200_000, "nothing": 0}


def test_results_become_tables_of_their_newest_run(tmp_path, capsys):
    result = {"rounds": 5, "median_s": 0.002, "p20": 0.001, "p80": 0.003, "peak_bytes": 3 * 2**20}
    for median, date in ((0.009, "2026-01-01"), (0.002, "2026-02-02")):
        results = {"fastgrpo": result | {"median_s": median}, "peer": result | {"median_s": 0.005}}
        facts = {"benchmark": "step", "model": "tiny", "dtype": "float32", "date": date}
        rows = rows_of(results, {"absent": "not installed"}, bars={"fast": at_least(3.0, 1.5)}, **facts)
        append([*rows, rows[-1] | {"benchmark": "first_gpu", "part": date, "bar": f"bar {date}"}], "cpu", tmp_path)
    readme = tmp_path / "README.md"
    table = "<!-- bench:{}-cpu -->\nold\n<!-- /bench -->\n"
    readme.write_text("above\n" + table.format("first_gpu") + table.format("step") + "below\n")
    report.main(tmp_path, readme)
    assert "| fast | 3 | at least 1.5 | yes |" in capsys.readouterr().out
    text = readme.read_text()
    assert text.startswith("above\n") and text.endswith("below\n") and "old" not in text and "9.00" not in text
    assert "| tiny | fastgrpo | 2.00 (1.00 to 3.00) | 1.00 | 3 |" in text
    assert "bar 2026-01-01" in text and "bar 2026-02-02" in text  # the newest run of each part
    assert "| tiny | peer | 5.00 (1.00 to 3.00) | 2.50 | 3 |" in text and "Missing: absent (not installed)" in text


def test_parts_of_first_gpu_fit_into_its_time_and_measure_only_kernels():
    parts = {part.name: part for part in first_gpu.parts()}
    assert {parts[x].variables.get("FASTGRPO_SELF_CHECK") for x in ("head", "decode", "step", "choices")} == {"raise"}
    assert sum(part.seconds for name, part in parts.items() if name not in first_gpu.NAMED) <= first_gpu.SECONDS


def ran(*arguments):
    """What `python -m` prints in a run at the small size."""
    # pytest-benchmark measures nothing in a process of pytest-xdist, and takes any below it for one.
    environment = {name: value for name, value in os.environ.items() if name != "PYTEST_XDIST_WORKER"} | SMALL
    command = [sys.executable, "-m", *arguments]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def table(told):
    return [line.strip("| ").split(" | ") for line in told.splitlines() if line.startswith("| ")]


def results_on_disk():
    return {path: path.read_bytes() for path in (ROOT / "benchmarks" / "results").rglob("*") if path.is_file()}


@pytest.mark.slow
def test_every_benchmark_runs_small_and_writes_nothing(tmp_path):
    before, path = results_on_disk(), tmp_path / "report.json"
    told = ran("pytest", "benchmarks", "--benchmark-only", "-p", "no:cacheprovider", f"--benchmark-json={path}")
    assert results_on_disk() == before
    infos = [(run["fullname"], run["extra_info"]) for run in json.loads(path.read_text())["benchmarks"]]
    files = {name.split("::")[0].split("/")[-1] for name, _ in infos}
    assert files == {path.name for path in (ROOT / "benchmarks").glob("bench_*.py")}
    for name, info in infos:
        assert all(f"missing: {peer}: {reason}" in told for peer, reason in info["missing"].items())
        assert all(len(bar) == 3 and {"value", "met"} < set(bar) for bar in info["bars"].values())
        measured = [row for row in info["rows"] if "missing" not in row]
        assert measured and all(row.get("ms_p50", 1) > 0 for row in measured), name
        if "bench_head" in name and not torch.cuda.is_available():  # bf16 there
            errors = [value for row in measured for key, value in row.items() if key.startswith("error_")]
            assert errors and max(errors) < 1e-5


@pytest.mark.slow
def test_first_gpu_runs_small():
    names = [part.name for part in first_gpu.parts()]
    lines = table(ran("benchmarks.first_gpu", *names))[2:]
    assert list(dict.fromkeys(name for name, *_ in lines)) == names
    for name in ("check", "head", "decode", "choices"):
        values = [cells[1] for part, *cells in lines if part == name and not cells[0].endswith("active")]
        assert values and all(float(value) >= 0 for value in values)


def test_the_race_shows_the_newest_runs_that_ended():
    about = {"task": "embedded", "seed": 0, "commit": "0abc", "date": "2026-11-27T05", "torch": "2", "trl": "1"}
    about |= {"device": "cpu", "processor": "slow", "threads": 2}
    first = about | {"step": 0, "seconds": 0.0, "accuracy": 0.5}
    last = first | {"step": 40, "seconds": 20.0, "accuracy": 0.96, "peak_mib": 900, "last": True}
    other = [{**row, "seed": 1, "processor": "fast"} for row in (first, last)]
    bad, died = last | {"accuracy": 0.9}, about | {"missing": "died"}
    runs = ("fastgrpo", [*other, first, bad, first, last, first]), ("TRL", [first, last, first, died])
    rows = race.newest([row | {"variant": variant} for variant, of in runs for row in of])
    text = race.table(rows)
    assert "| fastgrpo | 1 | 20 | 40 | 512.00 |  | 0.960, 0.960 | 900 |" in text and "TRL, seed 0: died" in text
    assert text.startswith("cpu (slow, 2 threads), commit 0abc") and list(race.runs_of(rows)) == ["fastgrpo"]


@pytest.mark.parametrize("ends, steps", [(True, 10), (False, 30)])
def test_a_run_ends_at_the_target_only_if_its_task_does(ends, steps, monkeypatch, tmp_path):
    monkeypatch.setitem(race.TASKS, "t", race.TASKS["embedded"]._replace(steps=30, every=5, target=0.5, ends=ends))
    contestant = SimpleNamespace(entry=lambda: None, seconds=lambda name: 1.0, resident=0)
    contestant.values = {"fastgrpo": [{"rollout_s": 0.5}]}
    monkeypatch.setattr(race, "taking_part", lambda made: nullcontext([contestant]))
    examiner = SimpleNamespace(before=0.1, accuracy=lambda weights, left=[0.6] * 9 + [0.4]: left.pop())
    *_, row = race.run("t", "fastgrpo", 0, tmp_path, examiner)
    assert row["step"] == steps and row["last"] and row["rollout_s"] == steps / 2


@pytest.mark.slow
@pytest.mark.parametrize("task", ["embedded", "calculator"])
def test_the_race_runs_small(task):
    told = ran("benchmarks.race", task)
    rows = table(told)[1:]
    assert [name for name, *_ in rows] == list(VARIANTS), told  # none is missing
    for *_, speed, share, _, peak in rows:
        assert float(speed) > 0 and float(peak) > 0 and 0 < int(share[:-1]) < 100, told


@pytest.mark.slow
@pytest.mark.skipif(not PYTHON.exists(), reason="needs make .venv-vllm/.installed")
def test_asynchronous_rollouts_are_measured_small():
    header, _, *rows = table(ran("benchmarks.staleness", "embedded"))[:5]
    ages = [dict(zip(header, row, strict=True))["tokens by staleness"] for row in rows]
    assert [age.split(", ")[-1] for age in ages] == ["100%"] * 3  # all timed tokens have the full staleness

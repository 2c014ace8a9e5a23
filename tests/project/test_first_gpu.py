"""`make first-gpu` works from end to end, and a part that fails, is killed or takes too long costs its own lines."""

import json
import os
import re
import subprocess
import sys

import pytest
from paths import ROOT

from benchmarks import first_gpu, report
from benchmarks.first_gpu import Outcome, Part, bar_rows, read_json, read_sanitizer, read_tests, run_parts
from benchmarks.first_sizes import PREDICTED
from fastgrpo.check.processes import Ended

BAR = {"rows": [], "bars": {"time": {"value": 1.5, "at most": 2.0, "met": True}}, "note": "", "machine": {}}
TOLD = f"print({json.dumps(json.dumps(BAR))}, flush=True)"


def part(name, code, seconds=60, read=read_json):
    command = None if code is None else (sys.executable, "-c", code)
    return Part(name, command, seconds, ("time", "memory"), read, {"PLANTED": "yes"})


PLANTED = {
    "works": part("works", f"import os; assert os.environ['PLANTED']; {TOLD}"),
    "raises": part("raises", f"{TOLD}; raise OSError('no memory')"),
    "killed": part("killed", f"{TOLD}; import os, signal; os.kill(os.getpid(), signal.SIGKILL)"),
    "hangs": part("hangs", "import time; time.sleep(3600)", seconds=1),
    "not here": part("not here", None),
    "works too": part("works too", TOLD),
}


def outcomes(parts, **options):
    return {outcome.part.name: outcome for outcome in run_parts(parts, **options)}


def test_no_part_ends_the_others():
    """What a part told before it ended counts."""
    found = outcomes(PLANTED.values())
    problems = {name: outcome.problem for name, outcome in found.items()}
    assert problems == {
        "works": None,
        "raises": "OSError: no memory",
        "killed": "killed by SIGKILL",
        "hangs": "not done after 1 s",
        "not here": "compute-sanitizer is not here",
        "works too": None,
    }
    told = {name for name, outcome in found.items() if "time" in outcome.found.bars}
    assert told == {"works", "raises", "killed", "works too"}
    assert "Traceback" in found["raises"].output and found["works"].output == ""
    table = report.bar_table([row for outcome in found.values() for row in bar_rows(outcome)])
    assert "| killed | time | 1.5 |  | at most 2 | yes |" in table
    assert "| hangs | memory | - (not done after 1 s) |  |  |  |" in table
    assert "| works | memory | - (not measured) |  |  |  |" in table
    assert "| not here | time | - (compute-sanitizer is not here) |  |  |  |" in table


def test_what_was_told_before_the_time_was_over_counts():
    """A bar that is told again has its last value; half a line is none."""
    again = {**BAR, "bars": {"time": {"value": 3.0, "at most": 2.0, "met": False}}, "note": "both"}
    lines = [json.dumps(BAR), "noise", json.dumps(again), json.dumps(BAR)[:-5]]
    found = read_json(Ended("\n".join(lines), "", "not done after 9 s"))
    assert found.bars["time"]["value"] == 3 and found.note == "both"


def test_parts_without_time_say_so():
    """The clock is read before the first part, and before each part."""
    clock = iter((0.0, 0.0, 96.0)).__next__
    found = outcomes([PLANTED["works"], PLANTED["works too"]], seconds=100, now=clock)
    assert found["works"].problem is None and found["works too"].problem == "no time was left of 100 s"


def test_a_failed_part_makes_the_exit_code_1(monkeypatch, capsys):
    monkeypatch.setattr(first_gpu, "SMALL", True)
    monkeypatch.setattr(first_gpu, "parts", lambda: [PLANTED["works"], PLANTED["killed"], PLANTED["not here"]])
    assert first_gpu.main(["works", "not here"]) == 0 and first_gpu.main([]) == 1
    assert "killed: killed by SIGKILL" in capsys.readouterr().out
    assert first_gpu.main(["unknown"]) == 2
    assert "there is no part 'unknown'; the parts are works, killed, not here" in capsys.readouterr().err


def test_without_a_gpu_one_line_says_so(monkeypatch, capsys):
    monkeypatch.setattr(first_gpu, "CUDA", False)
    monkeypatch.setattr(first_gpu, "SMALL", False)
    assert first_gpu.main([]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("error: make first-gpu needs a CUDA GPU") and err.count("\n") == 1


def test_what_is_kept_for_the_mail(monkeypatch, tmp_path, capsys):
    """On a GPU the rows and bars are added after each part, and the text has the outputs of those that failed."""
    monkeypatch.setattr(first_gpu, "CUDA", True)
    monkeypatch.setattr(first_gpu, "SMALL", False)
    monkeypatch.setattr("torch.cuda.get_device_name", lambda device: "A GPU")
    monkeypatch.setattr(first_gpu.append, "__defaults__", (tmp_path,))
    monkeypatch.setattr(first_gpu.keep_text, "__defaults__", (tmp_path,))
    monkeypatch.setattr(first_gpu, "parts", lambda: [PLANTED["works"], PLANTED["raises"]])
    assert first_gpu.main([]) == 1
    assert f"Please mail {tmp_path / 'a-gpu-first.txt'}" in capsys.readouterr().out
    rows = report.newest(tmp_path / "a-gpu.jsonl")["first_gpu"]
    assert [(row["part"], row["bar"]) for row in rows] == [
        (name, bar) for name in ("works", "raises") for bar in ("time", "memory")
    ]
    table = report.table(rows, "a-gpu")
    assert table.startswith("a-gpu, commit ") and "| raises | memory | - (OSError: no memory) |" in table
    text = (tmp_path / "a-gpu-first.txt").read_text()
    assert "| works | time | 1.5 |" in text and "## raises: OSError: no memory" in text and "Traceback" in text


def test_tests_count_however_far_they_came():
    output = (
        "tests/kernels/test_gpu.py::test_a[(8192, 896)] PASSED [ 10%]\ntests/a.py::test_b FAILED [ 20%]\n"
        "tests/a.py::test_c SKIPPED (needs two GPUs) [ 30%]\ntests/a.py::test_d "
    )
    found = read_tests("failing")(Ended(output, "", "not done after 9 s"))
    assert found.bars["failing"] == {"value": 1, "at most": 0, "met": False}
    assert found.note == "1 passed, 1 failed, 1 skipped; tests/a.py::test_b"
    skipped = read_tests("failing")(Ended("tests/a.py::test_c SKIPPED [1%]\n", "", None))
    assert skipped.bars == {} and skipped.note == "1 skipped"  # nothing was measured


def test_the_sanitizers_errors_are_read():
    (bar,) = read_sanitizer(Ended("========= ERROR SUMMARY: 3 errors\n", "", "exit code 1")).bars.values()
    assert bar == {"value": 3, "at most": 0, "met": False}
    assert read_sanitizer(Ended("", "", "not done after 60 s")).bars == {}


def test_every_prediction_is_of_a_bar():
    known = {re.sub("with(out)? liger", "LIGER", bar) for part in first_gpu.parts() for bar in part.bars}
    assert {re.sub("with(out)? liger", "LIGER", bar) for bar in PREDICTED} <= known
    rows = bar_rows(Outcome(first_gpu.parts()[3], first_gpu.Found([], {}), "not done after 90 s", ""))
    assert "| 1.05 to 1.10 |" in report.bar_table(rows)


def small(*names):
    """The command at its small size: part -> the lines of the table."""
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.first_gpu", *names],
        cwd=ROOT,
        env={**os.environ, "FASTGRPO_BENCH_SMALL": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    lines = [line.split(" | ") for line in done.stdout.splitlines() if line.startswith("| ")][2:]
    return {name.removeprefix("| "): bars for name, bars in _grouped(lines).items()}


def _grouped(lines):
    groups = {}
    for name, *cells in lines:
        groups.setdefault(name, []).append(cells)
    return groups


def test_the_command_from_end_to_end():
    table = small("head")
    assert table.keys() == {"head"}
    measured = {bar: value for bar, value, *_ in table["head"]}
    assert float(measured["256 x 16 x 2048: time, of the bare products"]) > 0


@pytest.mark.slow
def test_every_part_from_end_to_end():
    """What needs no GPU is measured; the rest says why not."""
    table = small()
    assert list(table) == [part.name for part in first_gpu.parts()] and "torch" in table["versions"][0][1]
    for name in ("check", "head", "rollout", "choices"):
        values = [value for bar, value, *_ in table[name] if not bar.endswith("active")]  # peers may be missing
        assert values and all(float(value) >= 0 for value in values), table[name]
    assert all("skipped" in table[name][0][1] for name in ("the same bits", "gpu")) or first_gpu.CUDA


def test_the_page_shows_the_predictions():
    page = (ROOT / "docs" / "benchmarks.md").read_text()
    for bar, predicted in PREDICTED.items():
        assert f"| {bar.replace('0.5b', '0.5B')} | {predicted} |" in page, bar
    parts_of_page = re.findall(r"^\| ([\w ]+) \| ", page.split("## First GPU")[1].split("## How")[0], re.MULTILINE)
    assert [part.name for part in first_gpu.parts()] == [
        name for name in parts_of_page if name not in ("part", "figure")
    ]

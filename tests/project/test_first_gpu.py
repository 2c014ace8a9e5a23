"""`make first-gpu` works from end to end, and a part that fails, is killed or takes too long costs its own lines."""

import json
import os
import re
import subprocess
import sys

import pytest
from paths import ROOT

from benchmarks import first_gpu, first_kernels, first_parts, predictions, report
from benchmarks.compare import COMMIT
from benchmarks.contestants import Contestant
from benchmarks.first_gpu import (
    Ended,
    Outcome,
    Part,
    bar_rows,
    read_json,
    read_sanitizer,
    read_tests,
    run_limited,
    run_parts,
)
from benchmarks.first_sizes import PREDICTED
from fastgrpo.kernel_checks import runner
from fastgrpo.kernel_checks.cases import CASES

BAR = {"rows": [], "bars": {"time": {"value": 1.5, "at most": 2.0, "met": True}}, "note": "", "machine": {}}
TOLD = f"print({json.dumps(json.dumps(BAR))}, flush=True)"


def part(name, code, seconds=60, read=read_json):
    command = None if code is None else (sys.executable, "-c", code)
    return Part(name, command, seconds, ("time", "memory"), read, {"PLANTED": "yes"})


HAS_RUN = "import os; assert os.environ['PLANTED'] and os.environ['FASTGRPO_BENCH_COMMIT'] == "
PLANTED = {
    "works": part("works", f"{HAS_RUN}{COMMIT!r}; {TOLD}"),
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


def test_a_row_that_is_told_again_has_its_last_values():
    rows = [{"benchmark": "step", "variant": name, "ms_p50": ms} for name, ms in (("a", 1), ("a", 2), ("b", 3))]
    lines = [json.dumps({**BAR, "rows": told}) for told in (rows[:1], rows[1:])]
    assert read_json(Ended("\n".join(lines), "", None)).rows == rows[1:]


def test_parts_without_time_say_so():
    """The clock is read before the first part, and before each part."""
    clock = iter((0.0, 0.0, 96.0)).__next__
    found = outcomes([PLANTED["works"], PLANTED["works too"]], seconds=100, now=clock)
    assert found["works"].problem is None and found["works too"].problem == "no time was left of 100 s"


def test_time_is_reserved_for_a_later_part():
    """50 of 100 seconds are over before the second part; the third has them all, less the second's none."""
    reserving = PLANTED["works"]._replace(name="reserves", reserved=48)
    clock = iter((0.0, 0.0, 50.0, 50.0)).__next__
    found = outcomes([PLANTED["works"], PLANTED["works too"], reserving], seconds=100, now=clock)
    assert {name: outcome.problem for name, outcome in found.items()} == {
        "works": None, "works too": "no time was left of 100 s", "reserves": None,
    }  # fmt: skip


def test_the_limits_fit_into_the_time():
    """Also where every part takes all of its time, those before `choices` and the tests at the end have theirs."""
    parts = first_gpu.parts()
    names = [part.name for part in parts]
    limits = sum(part.seconds for part in parts[: names.index("choices")])
    assert limits + sum(part.reserved for part in parts) <= first_gpu.SECONDS and parts[-1].reserved >= 30
    assert names.index("times") > names.index("step") > names.index("check")


def test_no_part_measures_plain_pytorch_under_the_name_of_a_kernel():
    level = {part.name: part.variables.get("FASTGRPO_SELF_CHECK") for part in first_gpu.parts()}
    assert {level[name] for name in ("head", "rollout", "step", "choices")} == {"raise"}
    assert level["sanitizer"] == "0"  # kernels alone


def test_what_the_sanitizer_watches_was_checked_before(capsys, monkeypatch):
    """The sizes are those of the checks, so that all is compiled."""
    assert set(first_kernels.NAMES) <= {case.name for case in CASES if "gpu" in case.modes}
    monkeypatch.setattr(first_kernels, "modes_here", lambda: ("cpu", "interpreter"))
    first_kernels.main()
    assert capsys.readouterr().out.splitlines() == ["linear_grpo_loss", "linear_logprob, entropy"]


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
    assert found.bars["failing"] == {"value": 1, "at most": 0, "met": False, "complete": False}
    assert found.note == "1 passed, 1 failed, 1 skipped; tests/a.py::test_b; ended in tests/a.py::test_d"
    skipped = read_tests("failing")(Ended("tests/a.py::test_c SKIPPED [1%]\n", "", None))
    assert skipped.bars == {} and skipped.note == "1 skipped"  # nothing was measured


@pytest.mark.parametrize(
    ("last", "met", "limit", "note"),
    (
        ("pass", True, "at most 0", "2 passed"),
        ("assert False", False, "at most 0", "1 passed, 1 failed; tests/test_planted.py::test_b"),
        ("os.abort()", False, "at most 0, and not all ran", "1 passed; ended in tests/test_planted.py::test_b"),
    ),
)
def test_tests_that_died_are_no_success(tmp_path, last, met, limit, note):
    """A real run of pytest, whose second test passes, fails, or ends the process as a bad access does."""
    (tmp_path / "tests").mkdir()
    code = f"import os\ndef test_a(): pass\ndef test_b(): {last}\n"
    (tmp_path / "tests" / "test_planted.py").write_text(code)
    command = [sys.executable, "-m", "pytest", "-v", "-p", "no:cacheprovider", "-c", os.devnull, "--rootdir=."]
    ended = run_limited([*command, "tests/test_planted.py"], 60, dict(os.environ), str(tmp_path))
    found = read_tests("failing")(ended)
    tests = PLANTED["works"]._replace(bars=("failing",))
    (row,) = bar_rows(Outcome(tests, found, ended.problem, ""))
    assert (row["met"], row["limit"], found.note) == (met, limit, note)


def told(capsys):
    """What a part has told so far, in turn."""
    return [json.loads(line) for line in capsys.readouterr().out.splitlines() if line.startswith('{"rows"')]


def test_kernels_count_as_right_when_all_were_checked(monkeypatch, capsys):
    names = [case.name for case in CASES if "gpu" in case.modes]

    def check(table, mode, seconds, most):
        for name in names[:most]:
            yield runner.Line(name, mode, {}, "crash" if name == failing else None)

    monkeypatch.setattr(first_parts, "SMALL", False)
    monkeypatch.setattr(first_parts, "modes_here", lambda: ("gpu",))
    monkeypatch.setattr(runner, "check", check)
    failing = None
    first_parts.check_kernels()
    bars = [told["bars"]["kernels that fail their check"] for told in told(capsys)]
    assert [bar["met"] for bar in bars] == [False] * (len(names) - 1) + [True]
    failing = names[0]
    first_parts.check_kernels()
    last = told(capsys)[-1]
    assert last["bars"]["kernels that fail their check"] == {"value": 1, "at most": 0, "met": False, "complete": True}
    assert f"{failing} failed: crash" in last["note"]


def test_children_end_with_the_command():
    """The child would hold a pipe open for an hour."""
    code = "import subprocess, sys, time; subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(3600)'])"
    how = {"environment": dict(os.environ)}
    assert run_limited([sys.executable, "-c", code], 60, **how).problem is None
    late = run_limited([sys.executable, "-c", code + "; time.sleep(3600)"], 1, **how)
    assert late.problem == "not done after 1 s"


def test_our_figures_are_told_before_another_one_starts(monkeypatch, capsys):
    monkeypatch.setenv("PYTHONPATH", f"{ROOT}:{ROOT / 'tests' / 'support'}")
    names = ("fastgrpo", "dies")
    contestants = [Contestant(name, "planted_contestants:entry", "cpu", variant=name) for name in names]

    def judge(found):
        under_way = [contestant.name for contestant in contestants if contestant.process is not None]
        return [{"variant": name} for name in (*found.results, *under_way)], {}

    first_parts.tell_contest(contestants, {"absent": "not installed"}, judge)
    first, last = told(capsys)
    assert [row["variant"] for row in first["rows"]] == ["fastgrpo", "fastgrpo"] and first["note"] == ""
    assert last["note"] == "absent: not installed; dies: failed: its process ended with code 3"


def test_without_nvidia_smi_the_versions_are_told(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert first_parts._driver() == "unknown"


def test_noise_decides_about_no_bar(monkeypatch, capsys):
    """Where `flatten` changes nothing, its time is no bar; elsewhere a hundredth is allowed."""
    launch = pytest.importorskip("fastgrpo.kernels.launch")
    linear_logprob = pytest.importorskip("fastgrpo.kernels.head")
    monkeypatch.setattr(linear_logprob, "linear_logprob", lambda hidden, *rest, **options: (hidden[:, 0],))
    times = {True: {"median_s": 1.009}, False: {"median_s": 1.0}}
    monkeypatch.setattr(first_parts, "compare", lambda calls, *rest: {name: times[name] for name in calls})
    monkeypatch.setattr(first_parts, "FLATTEN_SIZES", ((4, 16, 8),))
    for descriptors in (False, True):
        monkeypatch.setattr(launch, "uses_descriptors", lambda *matrices, found=descriptors: found)
        first_parts.compare_choices()
        bars = {name: bar for told in told(capsys) for name, bar in told["bars"].items()}
        assert bars["4 x 16 x 8: tokens that flatten gives other bits"]["met"]
        assert ("4 x 16 x 8: time with flatten, of that without" in bars) == descriptors
    assert bars["4 x 16 x 8: time with flatten, of that without"] == {"value": 1.009, "at most": 1.01, "met": True}


def test_the_sanitizers_errors_are_read():
    (bar,) = read_sanitizer(Ended("========= ERROR SUMMARY: 3 errors\n", "", "exit code 1")).bars.values()
    assert bar["value"] == 3 and not bar["met"]
    none = "========= ERROR SUMMARY: 0 errors\n"
    met = {problem: read_sanitizer(Ended(none, "", problem)).bars for problem in (None, "killed by SIGSEGV")}
    assert [bar["met"] for bars in met.values() for bar in bars.values()] == [True, False]
    assert read_sanitizer(Ended("", "", "not done after 60 s")).bars == {}


def test_every_prediction_is_of_a_bar():
    known = {re.sub("with(out)? liger", "LIGER", bar) for part in first_gpu.parts() for bar in part.bars}
    assert {re.sub("with(out)? liger", "LIGER", bar) for bar in PREDICTED} <= known
    rows = bar_rows(Outcome(first_gpu.parts()[3], first_gpu.Found([], {}), "not done after 90 s", ""))
    step, forward = predictions.predicted(896)
    assert all(f"| {ratio:.3f} |" in report.bar_table(rows) for ratio in (step, forward))


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
    for bar, predicted in ((bar, predicted) for bar, predicted in PREDICTED.items() if bar.startswith("0.5b")):
        assert f"| {bar.replace('0.5b', '0.5B')} | {predicted} |" in page, bar
    parts_of_page = re.findall(r"^\| ([\w ]+) \| ", page.split("## First GPU")[1].split("## How")[0], re.MULTILINE)
    assert [part.name for part in first_gpu.parts()] == [
        name for name in parts_of_page if name not in ("part", "figure")
    ]

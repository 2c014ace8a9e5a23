"""make first-gpu: what only a GPU can tell, by one command of at most 8 minutes whose results are mailed.

    python -m benchmarks.first_gpu [PART ...]

Each part is a process with a time limit of its own, the most telling ones first; one that fails, is killed or takes too
long costs its own lines. The table at the end has every bar with what was measured and what was predicted. Results are
added to results/<gpu>.jsonl after each part, and the table and the ends of the outputs of parts that failed go to
results/<gpu>-first.txt. Without a GPU the exit code is 2; with FASTGRPO_BENCH_SMALL=1 the parts run small on a CPU, and
nothing is written.
"""

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from glob import glob
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.compare import KERNELS_ONLY, RESULTS, SAME_RUN, append, results_file, rows_of
from benchmarks.first_sizes import (
    FLATTEN_SIZES,
    HEAD_SHAPES,
    PREDICTED,
    ROLLOUT_SIZE,
    STEP_SIZE,
    TRL_BARS,
    size_name,
)
from benchmarks.harness import CUDA, SMALL, Bar, in_words, none_of
from benchmarks.layers import LAYERS
from benchmarks.report import bar_table
from fastgrpo.kernel_checks.runner import problem

ROOT = Path(__file__).parent.parent
SECONDS = 470  # of the 8 minutes, for the parts together
LEAST = 5  # seconds below which a part is not started
TAIL = 3000  # characters of the output of a part that failed
SUMMARY = re.compile(r"^=+ .*\b(passed|failed|skipped|errors?)\b.* in [\d.]+s.* =+$", re.MULTILINE)  # of a whole run
STARTED_TEST = re.compile(r"^(tests/\S*?::.*?) *\Z", re.MULTILINE)  # pytest prints the name, and then the verdict
ROW_NAMES = ("benchmark", "model", "n", "d", "v", "case", "variant")  # what tells the rows of a part from one another
VERDICT = re.compile(r"^(tests/.*?::.*?) (PASSED|FAILED|ERROR|SKIPPED)\b", re.MULTILINE)
KERNEL_TESTS = ("tests/kernels/test_gpu.py", "tests/kernels/test_rollout_kernels_gpu.py")
SANITIZER = "compute-sanitizer"
SANITIZERS = ("/usr/local/cuda*/bin/compute-sanitizer", "/opt/cuda/bin/compute-sanitizer")


class Ended(NamedTuple):
    """How a command ended: what it wrote to stdout and stderr, and in one line why it did not end well, or None."""

    output: str
    errors: str
    problem: str | None


class Found(NamedTuple):
    """What a part found.

    Attributes:
        rows: Rows for results/.
        bars: Judgements by name.
        note: A remark for the table.
        machine: Facts about the machine.
    """

    rows: list[dict[str, Any]]
    bars: dict[str, Bar]
    note: str = ""
    machine: dict[str, str] | None = None


class Part(NamedTuple):
    """One part of the command.

    Attributes:
        name: Its name.
        command: Program and arguments; None where the machine has no such program.
        seconds: Its time limit.
        bars: The bars that it is held to, which the table has whether it ends or not.
        read: Makes out of its end what it found.
        variables: Variables of its environment.
        reserved: Seconds that the parts before it leave to it.
    """

    name: str
    command: Sequence[str] | None
    seconds: float
    bars: tuple[str, ...]
    read: Callable[[Ended], Found]
    variables: dict[str, str]
    reserved: float = 0


class Outcome(NamedTuple):
    """What came of a part.

    Attributes:
        part: The part.
        found: What it found before it ended, however that was.
        problem: Why it did not end well, or was not started; None where it did.
        output: The end of what it printed, where it did not end well.
    """

    part: Part
    found: Found
    problem: str | None
    output: str


def run_limited(
    command: Sequence[str], seconds: float, environment: dict[str, str], folder: str | None = None
) -> Ended:
    """Run a command in a process group of its own; when its time is over, all processes of the group are killed."""
    # Files and no pipes: a process that the command leaves behind could hold a pipe open for ever.
    with (
        tempfile.TemporaryFile("w+", errors="replace") as output,
        tempfile.TemporaryFile("w+", errors="replace") as errors,
    ):
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=output, stderr=errors, env=environment, cwd=folder,
            start_new_session=True,
        )  # fmt: skip
        late = False
        try:
            process.wait(seconds)
        except subprocess.TimeoutExpired:
            late = True
        finally:
            with contextlib.suppress(ProcessLookupError):  # all of them may have ended
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        texts = [(stream.seek(0), stream.read())[1] for stream in (output, errors)]
    return Ended(*texts, f"not done after {seconds:.0f} s" if late else problem(process.returncode, texts[1]))


def read_json(ended: Ended) -> Found:
    """Read what a part of first_parts.py printed; its last lines count where it tells the same bar or row again.

    Args:
        ended: How it ended.
    """
    rows, bars, notes, machine = {}, {}, {}, {}
    for line in ended.output.splitlines():
        if line.startswith('{"rows"') and line.endswith("}"):
            found = json.loads(line)
            rows |= {tuple(row.get(name) for name in ROW_NAMES): row for row in found["rows"]}
            bars |= found["bars"]
            machine |= found["machine"]
            if found["note"]:
                notes[tuple(found["bars"])] = found["note"]
    return Found(list(rows.values()), bars, "; ".join(dict.fromkeys(notes.values())), machine)


def read_tests(bar: str) -> Callable[[Ended], Found]:
    """Return what reads the output of pytest -v, however far it came.

    Args:
        bar: Name of the bar that no test may fail. Where none ran, nothing is measured.
    """

    def read(ended: Ended) -> Found:
        verdicts = VERDICT.findall(ended.output)
        by = {verdict: [name for name, v in verdicts if v == verdict] for _, verdict in verdicts}
        bad = by.get("FAILED", []) + by.get("ERROR", [])
        note = ", ".join(f"{len(names)} {verdict.lower()}" for verdict, names in by.items())
        note += "".join(f"; {name}" for name in bad[:3])
        note += "".join(f"; ended in {name}" for name in STARTED_TEST.findall(ended.output))
        ran = len(bad) + len(by.get("PASSED", []))
        all_ran = SUMMARY.search(ended.output) is not None and (bool(bad) or ended.problem is None)
        return Found([], {bar: none_of(len(bad), all_ran)} if ran else {}, note)

    return read


def read_sanitizer(ended: Ended) -> Found:
    """Read compute-sanitizer's count of errors.

    Args:
        ended: How it ended.
    """
    counts = re.findall(r"ERROR SUMMARY: (\d+) error", ended.output)
    return Found([], {f"errors of {SANITIZER}": none_of(int(counts[-1]), ended.problem is None)} if counts else {})


def find_sanitizer() -> str | None:
    """Return the path of compute-sanitizer, which comes with CUDA's toolkit; None where it is not installed."""
    return shutil.which(SANITIZER) or next((path for pattern in SANITIZERS for path in sorted(glob(pattern))), None)


def gpu_tests() -> list[str]:
    """Return the files that hold tests for a GPU: to collect all others would take a minute."""
    files = sorted((ROOT / "tests").rglob("test_*.py"))
    return [str(path.relative_to(ROOT)) for path in files if re.search(r"\bmark\.gpu\b", path.read_text())]


def parts() -> list[Part]:
    """Return the parts, those that tell most first."""

    def own(name: str, seconds: float, *bars: str, **variables: str) -> Part:
        return Part(name, (sys.executable, "-m", "benchmarks.first_parts", name), seconds, bars, read_json, variables)

    def pytest(name: str, seconds: float, *arguments: str, reserved: float = 0) -> Part:
        bar = f"tests that fail: {name}"
        command = (sys.executable, "-m", "pytest", "-v", "-p", "no:cacheprovider", "-m", "gpu", *arguments)
        return Part(name, command, seconds, (bar,), read_tests(bar), {}, reserved)

    head = ("time, of the bare products", "forward time, of one product", "time, of trl, 100% active",
            "time, of liger, 100% active", *(() if SMALL else ("peak memory, of the formula",)))  # fmt: skip
    sanitizer = find_sanitizer()
    watched = (sanitizer, "--tool", "memcheck", sys.executable, "-m", "benchmarks.first_kernels")
    flatten = ("tokens that flatten gives other bits", "time with flatten, of that without")
    interpreted = {} if CUDA else {"TRITON_INTERPRET": "1"}
    return [
        own("versions", 20),
        pytest("the same bits", 50, *KERNEL_TESTS, "-k", "anchor or same_bits"),
        own("check", 100, "kernels that fail their check"),
        own("head", 70, *(f"{size_name(shape)}: {bar}" for shape in HEAD_SHAPES for bar in head), **KERNELS_ONLY),
        own("rollout", 75, *(() if SMALL else (f"{ROLLOUT_SIZE}: share of the bandwidth limit, {LAYERS}",)),
            f"{ROLLOUT_SIZE}: graphs, times without", **KERNELS_ONLY),
        own("step", 110, f"{STEP_SIZE}: samples a second, times trl, {LAYERS}", **KERNELS_ONLY),
        own("choices", 45, *(f"{size_name(size)}: {bar}" for size in FLATTEN_SIZES for bar in flatten),
            **interpreted, **KERNELS_ONLY),
        own("trl", 75, *TRL_BARS, **KERNELS_ONLY),
        own("times", 45),
        # Without the caching allocator the sanitizer knows where each tensor ends. It watches the kernels alone.
        Part("sanitizer", watched if sanitizer else None, 90, (f"errors of {SANITIZER}",), read_sanitizer,
             {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1", "FASTGRPO_SELF_CHECK": "0"}),
        pytest("gpu", SECONDS, *gpu_tests(), reserved=45),
    ]  # fmt: skip


def run_parts(
    chosen: Sequence[Part], seconds: float = SECONDS, now: Callable[[], float] = time.monotonic
) -> Iterator[Outcome]:
    """Run parts one after the other.

    Args:
        chosen: The parts.
        seconds: Time for all of them.
        now: A clock, in seconds.

    Yields:
        What came of each, as soon as it has ended.
    """
    end, reserved = now() + seconds, sum(part.reserved for part in chosen)
    for part in chosen:
        reserved -= part.reserved
        left = end - now() - reserved
        if part.command is None:
            yield Outcome(part, Found([], {}), f"{SANITIZER} is not here", "")
        elif left < LEAST:
            yield Outcome(part, Found([], {}), f"no time was left of {seconds:.0f} s", "")
        else:
            ended = run_limited(part.command, min(part.seconds, left), {**os.environ, **SAME_RUN, **part.variables},
                                str(ROOT))  # fmt: skip
            output = (ended.output + ended.errors)[-TAIL:] if ended.problem else ""
            yield Outcome(part, part.read(ended), ended.problem, output)


def bar_rows(outcome: Outcome) -> list[dict[str, Any]]:
    """Return a line of the table for each bar of a part, measured or not, and for a part without bars one line.

    Args:
        outcome: What came of the part.
    """
    part, found, ended_badly, _ = outcome
    why = ended_badly or found.note or "not measured"
    measured = {name: in_words(bar) for name, bar in found.bars.items()}
    absent = {name: {"missing": why} for name in part.bars if name not in measured}
    lines = [
        {"part": part.name, "bar": name, "predicted": PREDICTED.get(name), **values}
        for name, values in {**measured, **absent}.items()
    ]
    remark = "; ".join(text for text in (ended_badly, found.note) if text)
    return lines or [{"part": part.name, "bar": "", "missing": remark or "done"}]


def main(names: Sequence[str]) -> int:
    """Run the command.

    Args:
        names: The parts to run; none of them runs all.

    Returns:
        The exit code: 0; 1 where a part failed or took too long; 2 where there is no GPU, or no part of such a name.
    """
    known = {part.name: part for part in parts()}
    refusal = None
    if not (CUDA or SMALL):
        refusal = "make first-gpu needs a CUDA GPU, and torch sees none; FASTGRPO_BENCH_SMALL=1 runs it small on a CPU"
    elif unknown := [name for name in names if name not in known]:
        refusal = f"there is no part {unknown[0]!r}; the parts are {', '.join(known)}"
    if refusal:
        print(f"error: {refusal}", file=sys.stderr)
        return 2
    lines, outputs, failed, machine = [], [], False, {}
    for outcome in run_parts([known[name] for name in names] or list(known.values())):
        part, found, why, output = outcome
        print(f"{part.name}: {why or 'done'}{'; ' + found.note if found.note else ''}", flush=True)
        machine |= found.machine or {}
        new = bar_rows(outcome)
        lines += new
        failed = failed or (why is not None and part.command is not None)
        outputs += [f"## {part.name}: {why}\n\n{output}"] if output else []
        if not SMALL:
            (common,) = rows_of({}, {"all": ""}, benchmark="first_gpu", machine=machine)
            append(found.rows + [common | row for row in new], "cuda")
    print(f"\n{bar_table(lines)}")
    if not SMALL:
        print(f"\nPlease mail {keep_text(lines, outputs)} and the .jsonl file beside it.")
    return int(failed)


def keep_text(lines: list[dict[str, Any]], outputs: list[str], folder: Path = RESULTS) -> Path:
    """Write the table, and the ends of the outputs of parts that failed, beside the results.

    Args:
        lines: What `bar_rows` returned for all parts.
        outputs: The outputs.
        folder: Folder of the results.

    Returns:
        The file.
    """
    path = results_file("cuda", folder)
    path = path.with_name(f"{path.stem}-first.txt")
    path.write_text("\n\n".join([bar_table(lines), *outputs]) + "\n")
    return path


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

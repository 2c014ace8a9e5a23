"""make first-gpu: the measurements that need a GPU, in one command of at most eight minutes, to be mailed.

    python -m benchmarks.first_gpu [PART ...]

Each part is a process with its own time limit, the most important ones first. The parts of `NAMED` run only if they are
named; the eight minutes are not a limit for named parts. A part that fails, is killed or times out loses only its own
lines. The final table has the measured and the predicted value of every bar. Results are added to results/<gpu>.jsonl
after each part. The table, and the last output of failed parts, go to results/<gpu>-first.txt. Without a GPU the exit
code is 2. With FASTGRPO_BENCH_SMALL=1 the parts run at a tiny size on a CPU, have no time limit, and write nothing.
"""

import contextlib
import json
import math
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

from benchmarks.compare import KERNELS_ONLY, SAME_RUN, append, results_file, rows_of
from benchmarks.first_sizes import (
    DECODE,
    FLATTEN_SIZES,
    HEAD_SHAPES,
    PREDICTED,
    STEP_SIZE,
    TRL_BARS,
    size_name,
)
from benchmarks.harness import CUDA, SMALL, Bar, in_words, none_of
from benchmarks.layers import LAYERS
from benchmarks.report import bar_table
from fastgrpo.kernel_checks.runner import problem

ROOT = Path(__file__).parent.parent
SECONDS = math.inf if SMALL else 450  # time limit of all parts together; starting and reading take some seconds
LEAST = 5  # minimum seconds left to start a part
NAMED = ("race", "choices", "trl", "times", "sanitizer")
TAIL = 3000  # characters kept of the output of a failed part
ROW_NAMES = ("benchmark", "model", "n", "d", "v", "case", "variant")  # key of a row within a part
SANITIZER = "compute-sanitizer"
SANITIZERS = ("/usr/local/cuda*/bin/compute-sanitizer", "/opt/cuda/bin/compute-sanitizer")


class Ended(NamedTuple):
    """Result of a command: stdout, stderr, and its problem in one line, or None."""

    output: str
    errors: str
    problem: str | None


class Found(NamedTuple):
    """Results of a part."""

    rows: list[dict[str, Any]]  # for results/
    bars: dict[str, Bar]
    note: str = ""  # for the table
    machine: dict[str, str] | None = None  # facts about the machine


class Part(NamedTuple):
    """One part of the command."""

    name: str
    command: Sequence[str] | None  # None if the program is not installed
    seconds: float  # time limit
    bars: tuple[str, ...]  # names, which the table lists even if the part fails
    read: Callable[[Ended], Found]  # parses the result of the command
    variables: dict[str, str]  # of the environment


class Outcome(NamedTuple):
    """Outcome of a part."""

    part: Part
    found: Found  # possibly incomplete
    problem: str | None  # why it failed or was not started
    output: str  # the end of its output, if it failed


def run_limited(
    command: Sequence[str], seconds: float, environment: dict[str, str], folder: str | None = None
) -> Ended:
    """Run a command in its own process group. On timeout, kill all processes of the group."""
    # Files, not pipes: a child process that outlives the command could keep a pipe open.
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
            with contextlib.suppress(ProcessLookupError):  # all of them may have exited
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        texts = [(stream.seek(0), stream.read())[1] for stream in (output, errors)]
    return Ended(*texts, f"not done after {seconds:.0f} s" if late else problem(process.returncode, texts[1]))


def read_json(ended: Ended) -> Found:
    """Parse the output of a part of first_parts.py. Later lines replace earlier ones for the same bar or row."""
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


def read_sanitizer(ended: Ended) -> Found:
    """Parse compute-sanitizer's count of errors."""
    counts = re.findall(r"ERROR SUMMARY: (\d+) error", ended.output)
    return Found([], {f"errors of {SANITIZER}": none_of(int(counts[-1]), ended.problem is None)} if counts else {})


def find_sanitizer() -> str | None:
    """Return the path of compute-sanitizer, a part of CUDA's toolkit, or None if it is not installed."""
    return shutil.which(SANITIZER) or next((path for pattern in SANITIZERS for path in sorted(glob(pattern))), None)


def parts() -> list[Part]:
    """Return the parts, the most important ones first."""

    def own(name: str, seconds: float, *bars: str, **variables: str) -> Part:
        return Part(name, (sys.executable, "-m", "benchmarks.first_parts", name), seconds, bars, read_json, variables)

    head = ("time, of the bare products", "forward time, of one product", "time, of trl, 100% active",
            "time, of liger, 100% active", *(() if SMALL else ("peak memory, of the formula",)))  # fmt: skip
    sanitizer = find_sanitizer()
    watched = (sanitizer, "--tool", "memcheck", sys.executable, "-m", "benchmarks.first_kernels")
    flatten = ("tokens that flatten gives other bits", "time with flatten, of that without")
    interpreted = {} if CUDA else {"TRITON_INTERPRET": "1"}
    return [
        own("versions", 30),
        own("check", 90, "kernels that fail their check"),
        own("head", 65, *(f"{size_name(shape)}: {bar}" for shape in HEAD_SHAPES for bar in head), **KERNELS_ONLY),
        own("decode", 110, *(f"{name}: tokens/s" for name in DECODE), **KERNELS_ONLY),
        own("step", 155, f"{STEP_SIZE}: samples a second, times trl, {LAYERS}", **KERNELS_ONLY),
        own("race", 230),
        own("choices", 45, *(f"{size_name(size)}: {bar}" for size in FLATTEN_SIZES for bar in flatten),
            **interpreted, **KERNELS_ONLY),
        own("trl", 150, *TRL_BARS, **KERNELS_ONLY),
        own("times", 45),
        # Without the caching allocator, the sanitizer detects accesses past the end of a tensor.
        Part("sanitizer", watched if sanitizer else None, 90, (f"errors of {SANITIZER}",), read_sanitizer,
             {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1", "FASTGRPO_SELF_CHECK": "0"}),
    ]  # fmt: skip


def run_parts(chosen: Sequence[Part], seconds: float) -> Iterator[Outcome]:
    """Run parts in order, within `seconds` for all of them, and yield the outcome of each as soon as it ends."""
    end = time.monotonic() + seconds
    for part in chosen:
        left = end - time.monotonic()
        if part.command is None:
            yield Outcome(part, Found([], {}), f"{SANITIZER} is not here", "")
        elif left < LEAST:
            yield Outcome(part, Found([], {}), f"no time was left of {seconds} s", "")
        else:
            limit = left if SMALL else min(part.seconds, left)
            ended = run_limited(part.command, limit, {**os.environ, **SAME_RUN, **part.variables}, str(ROOT))
            output = (ended.output + ended.errors)[-TAIL:]  # a peer may fail in a part that ends well
            yield Outcome(part, part.read(ended), ended.problem, output)


def bar_rows(outcome: Outcome) -> list[dict[str, Any]]:
    """Return a line of the table for each bar of a part, measured or not; for a part without bars, one line."""
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
    """Run the named parts, or all but those of `NAMED`, and return the exit code.

    It is 1 if a part failed or timed out, and 2 if there is no GPU, or no part of this name.
    """
    known = {part.name: part for part in parts()}
    refusal = None
    if not (CUDA or SMALL):
        refusal = "make first-gpu needs a CUDA GPU, but torch sees none; set FASTGRPO_BENCH_SMALL=1 to try it on a CPU"
    elif unknown := [name for name in names if name not in known]:
        refusal = f"there is no part {unknown[0]!r}; the parts are {', '.join(known)}"
    if refusal:
        print(f"error: {refusal}", file=sys.stderr)
        return 2
    lines, outputs, failed, machine = [], [], False, {}
    chosen = names or [name for name in known if name not in NAMED]
    for outcome in run_parts([known[name] for name in chosen], math.inf if names else SECONDS):
        part, found, why, output = outcome
        print(f"{part.name}: {why or 'done'}{'; ' + found.note if found.note else ''}", flush=True)
        machine |= found.machine or {}
        new = bar_rows(outcome)
        lines += new
        failed = failed or (why is not None and part.command is not None)
        outputs += [f"## {part.name}: {why or 'done'}\n\n{output}"] if output else []
        if not SMALL:
            (common,) = rows_of({}, {"all": ""}, benchmark="first_gpu", machine=machine)
            append(found.rows + [common | row for row in new], "cuda")
            text = keep_text(lines, outputs)
    print(f"\n{bar_table(lines)}")
    if not names:
        print(f'\nnot run: {", ".join(NAMED)}; to run them: make first-gpu ARGS="{" ".join(NAMED)}"')
    if not SMALL:
        print(f"\nPlease mail {text} and the .jsonl file beside it.")
    return int(failed)


def keep_text(lines: list[dict[str, Any]], outputs: list[str]) -> Path:
    """Write the table and the last output of each part beside the results, and return the file."""
    path = results_file("cuda")
    path = path.with_name(f"{path.stem}-first.txt")
    path.write_text("\n\n".join([bar_table(lines), *outputs]) + "\n")
    return path


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

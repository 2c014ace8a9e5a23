"""Plants the errors of mutants.yaml in a copy of the tree, one at a time; the tests named beside each must fail.

    python tests/mutants/run.py [--jobs N] [NAME ...]        make mutants ARGS="..."

The named tests first run on the unchanged tree. A mutant is killed when a test fails, or does not end within LONGEST
seconds. The exit status is 1 if one survives.
"""

import argparse
import os
import queue
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import yaml

ROOT = Path(__file__).resolve().parents[2]
LIST = Path(__file__).with_name("mutants.yaml")
LONGEST = 900  # seconds that the tests of a mutant may take


def load(names: list[str]) -> list[dict]:
    """Read the mutants, all of them or those with the given names."""
    mutants = yaml.safe_load(LIST.read_text())
    unknown = set(names) - {mutant["name"] for mutant in mutants}
    if unknown:
        sys.exit(f"no such mutant: {', '.join(sorted(unknown))}")
    return [mutant for mutant in mutants if not names or mutant["name"] in names]


def copy_tree(folder: Path) -> Path:
    """Copy the files that git knows or does not ignore."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT, check=True, capture_output=True, text=True,
    ).stdout  # fmt: skip
    for name in filter(None, listed.split("\0")):
        if (ROOT / name).is_file():
            target = folder / name
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, target)
    return folder


def run_tests(tree: Path, tests: Sequence[str], limit: float | None = None) -> str:
    """Run tests in a copy. Returns "passed", "failed", "slow", or "broken" where pytest could not run them."""
    env = {**os.environ, "PYTHONPATH": str(tree), "TMPDIR": str(tree.parent), "OMP_NUM_THREADS": "1"}
    if interpreted(tests):
        env["TRITON_INTERPRET"] = "1"
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-n", "0", "-p", "no:cacheprovider", *tests]
    process = subprocess.Popen(
        command, cwd=tree, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
    )
    try:
        output, _ = process.communicate(timeout=limit)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
        return "slow"
    result = {0: "passed", 1: "failed"}.get(process.returncode, "broken")
    if result == "passed" and " passed" not in output:  # all were skipped
        result = "broken"
    if result == "broken":
        print(output[-2000:], flush=True)
    return result


def interpreted(tests: Sequence[str]) -> bool:
    """Tell whether tests need Triton's interpreter."""
    return any("/interpreted/" in test for test in tests)


def broken_tests(in_tree: Callable, sets: list[tuple[str, ...]]) -> set[tuple[str, ...]]:
    """Run all named tests on the unchanged tree, and return the sets that do not pass."""
    broken = set()
    for kind in (False, True):
        chosen = [tests for tests in sets if interpreted(tests) == kind]
        together = list(dict.fromkeys(test for tests in chosen for test in tests))
        if together and in_tree(run_tests, together) != "passed":
            broken |= {tests for tests in chosen if in_tree(run_tests, tests) != "passed"}
    for tests in broken:
        print(f"these tests do not pass on the unchanged tree: {' '.join(tests)}", flush=True)
    return broken


def planted(tree: Path, mutant: dict, number: int) -> tuple[str, float]:
    """Plant one mutant in a copy, run its tests, and take it out again. Returns the verdict and the seconds."""
    begin, path = time.monotonic(), tree / mutant["file"]
    text = path.read_text()
    if text.count(mutant["old"]) != 1:
        return "BROKEN", 0.0
    path.write_text(text.replace(mutant["old"], mutant["new"]))
    stamp = time.time() + 10 * number
    os.utime(path, (stamp, stamp))  # Python recompiles a module whose time has changed
    try:
        result = run_tests(tree, mutant["tests"], LONGEST)
    finally:
        shutil.copy2(ROOT / mutant["file"], path)
    told = {"failed": "killed", "slow": "killed", "passed": "SURVIVED", "broken": "BROKEN"}[result]
    return told, time.monotonic() - begin


def main() -> int:
    """Run the mutants that the command line names, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="mutants to run; none runs all of them")
    parser.add_argument("--jobs", type=int, default=2, help="mutants that run at the same time")
    options = parser.parse_args()
    mutants = load(options.names)
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder, ThreadPoolExecutor(options.jobs) as pool:
        trees: queue.Queue[Path] = queue.Queue()
        for i in range(options.jobs):
            trees.put(copy_tree(Path(folder) / str(i) / "tree"))

        def in_tree(function, *arguments):
            tree = trees.get()
            try:
                return function(tree, *arguments)
            finally:
                trees.put(tree)

        broken = broken_tests(in_tree, sorted({tuple(mutant["tests"]) for mutant in mutants}))

        def verdict(number, mutant):
            told, seconds = "BROKEN", 0.0
            if tuple(mutant["tests"]) not in broken:
                told, seconds = in_tree(planted, mutant, number)
            print(f"{told:9} {seconds:5.0f} s  {mutant['name']}", flush=True)
            return told, seconds

        verdicts = list(pool.map(verdict, range(1, len(mutants) + 1), mutants))
    print("\n| mutant | result | seconds | what a user would lose |\n|---|---|---|---|")
    for mutant, (told, seconds) in zip(mutants, verdicts, strict=True):
        print(f"| {mutant['name']} | {told} | {seconds:.0f} | {mutant['why']} |")
    bad = [mutant["name"] for mutant, (told, _) in zip(mutants, verdicts, strict=True) if told != "killed"]
    print(f"\n{len(mutants) - len(bad)} of {len(mutants)} mutants killed" + (f"; not: {', '.join(bad)}" if bad else ""))
    return bool(bad)


if __name__ == "__main__":
    sys.exit(main())

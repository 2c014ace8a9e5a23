"""Runs the slow tests in parts, one after another, and prints how long each part took.

    python tests/slow.py [PART ...] [-- ARGUMENTS OF PYTEST]        make test-slow PARTS="aot site" ARGS="-x"

Without a name all parts run. A part that fails does not stop the next one; the exit status is then 1.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).parent.parent
RESUME = "resume or torchrun or parallel or ranks"
PARTS = {  # the tests of each part; "rest" has the slow tests of all other folders
    "aot": ("tests/kernels", "tests/kernel_checks", "tests/loss"),
    "benchmarks": ("tests/project/test_benchmarks.py",),
    "packaging": ("tests/project/test_packaging.py",),
    "notebook": ("tests/project/test_notebook.py",),
    "site": ("tests/project/test_site.py",),
    "runs": ("tests/tasks", "tests/whole", "-k", f"not ({RESUME})"),
    "resume": ("tests/tasks", "tests/whole", "-k", RESUME),
}
PARTS["rest"] = ("tests", *sorted({f"--ignore={x}" for part in PARTS.values() for x in part if x.startswith("tests/")}))
QUANTIZED = "8_bit or int8 or nf4 or quantiz"
PARTS["quantization"] = ("tests/policy", "tests/whole", "tests/trainer/test_optim.py", "-k", QUANTIZED)
PARTS["clients"] = ("tests/serving/test_clients.py", "tests/tools/test_openenv.py")
PACKAGES = {  # for one part only: torchao warns in every process that finds it, and the clients need a hundred others
    "quantization": ("torchao", "bitsandbytes"),
    "clients": ("openai", "lm-eval[api]", "verifiers", "renderers", "openenv-core"),
}
PIP = (sys.executable, "-m", "pip", "install", "-q", "-c", "constraints.txt")


def run(part: str, arguments: list[str]) -> int:
    """Run a part, and return pytest's exit status."""
    environment = {"OMP_NUM_THREADS": "1", **os.environ}
    with tempfile.TemporaryDirectory() as folder:
        marked = "slow"
        if part in PACKAGES:
            marked = ""
            environment["PYTHONPATH"] = os.pathsep.join(filter(None, (folder, os.environ.get("PYTHONPATH"))))
            plan = [*PIP, "--dry-run", "--report", "-", *PACKAGES[part]]  # which packages the environment lacks
            found = json.loads(subprocess.run(plan, cwd=ROOT, check=True, stdout=subprocess.PIPE).stdout)["install"]
            missing = ["{name}=={version}".format(**each["metadata"]) for each in found]
            if missing:
                subprocess.run([*PIP, "--no-deps", "--target", folder, *missing], cwd=ROOT, check=True)
        command = [sys.executable, "-m", "pytest", "-m", marked, "--dist", "loadfile", "-q", *PARTS[part], *arguments]
        return subprocess.run(command, cwd=ROOT, env=environment, check=False).returncode


def main(argv: list[str]) -> int:
    """Run the parts that the command line names, and print a table of their times."""
    cut = argv.index("--") if "--" in argv else len(argv)
    parts, arguments = argv[:cut] or list(PARTS), argv[cut + 1 :]
    if unknown := set(parts) - set(PARTS):
        print(f"no such part: {', '.join(sorted(unknown))}; the parts are {' '.join(PARTS)}", file=sys.stderr)
        return 2
    results = []
    for part in parts:
        print(f"\n=== {part}", flush=True)
        begin = time.monotonic()
        try:
            status = run(part, arguments)
        except subprocess.CalledProcessError as error:
            status = error.returncode
        results.append((part, status, time.monotonic() - begin))
    print("\n| part | result | seconds |\n|---|---|---|")
    for part, status, seconds in results:
        print(f"| {part} | {'passed' if status == 0 else f'FAILED (exit status {status})'} | {seconds:.0f} |")
    return int(any(status for _, status, _ in results))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""python -m fastgrpo tells the version and the commands, without loading what they need."""

import re
import subprocess
import sys

import pytest
from paths import ROOT

import fastgrpo
from fastgrpo.__main__ import COMMANDS, main


def test_the_version_comes_without_torch():
    command = [sys.executable, "-X", "importtime", "-m", "fastgrpo", "--version"]
    told = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=True)
    assert told.stdout == f"fastgrpo {fastgrpo.__version__}\n"
    loaded = {line.rpartition("|")[2].strip() for line in told.stderr.splitlines()}
    assert "fastgrpo" in loaded and not loaded & {"torch", "transformers", "fastgrpo.config"}


@pytest.mark.parametrize("argv", [[], ["--help"], ["-h"]], ids=str)
def test_the_commands_are_listed(argv, capsys):
    """Every module beside the wings is one, but for ranks.py, and docs/commands.md has the same table."""
    assert main(argv) == 0
    listed = re.findall(r"python -m fastgrpo\.(\w+) +(\S.+)", capsys.readouterr().out)
    assert [name for name, _ in listed] == list(COMMANDS)
    modules = {path.stem for path in (ROOT / "fastgrpo").glob("*.py") if not path.stem.startswith("_")}
    assert set(COMMANDS) == modules - {"ranks"}
    table = re.findall(r"\| `python -m fastgrpo\.(\w+)", (ROOT / "docs" / "commands.md").read_text())
    assert table == list(COMMANDS)


@pytest.mark.parametrize(
    ("argv", "told"),
    [(["train", "--beta", "0"], "python -m fastgrpo.train"), (["--versoin"], "takes only --version"),
     (["--version", "now"], "takes only --version")],
    ids=str,
)  # fmt: skip
def test_other_arguments_are_refused(argv, told, capsys):
    assert main(argv) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and told in error

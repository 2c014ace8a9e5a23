"""The commands: which there are, and what their help and version import."""

import re
import subprocess
import sys

import pytest
from paths import ROOT

import fastgrpo
from fastgrpo.__main__ import COMMANDS
from fastgrpo.__main__ import main as overview


@pytest.mark.parametrize("argv, first, without", [
    (["fastgrpo", "--version"], f"fastgrpo {fastgrpo.__version__}", {"torch", "transformers", "fastgrpo.config"}),
    (["fastgrpo.train", "--help"], "usage: ", {"transformers"}),
])  # fmt: skip
def test_the_version_comes_without_torch_and_help_without_transformers(argv, first, without):
    command = [sys.executable, "-X", "importtime", "-m", *argv]
    told = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=True)
    loaded = {line.rpartition("|")[2].strip() for line in told.stderr.splitlines()}
    assert told.stdout.startswith(first) and "fastgrpo" in loaded and not loaded & without


def test_the_commands_are_listed(capsys):
    """Every top-level module is a command, except ranks.py; docs/commands.md has the same table."""
    assert overview([]) == 0
    listed = re.findall(r"python -m fastgrpo\.(\w+) +(\S.+)", capsys.readouterr().out)
    assert [name for name, _ in listed] == list(COMMANDS)
    modules = {path.stem for path in (ROOT / "fastgrpo").glob("*.py") if not path.stem.startswith("_")}
    assert set(COMMANDS) == modules - {"ranks"}
    assert re.findall(r"\| `python -m fastgrpo\.(\w+)", (ROOT / "docs" / "commands.md").read_text()) == list(COMMANDS)
    for argv in (["train", "--beta", "0"], ["--versoin"], ["--version", "now"]):
        assert overview(argv) == 2 and capsys.readouterr().err.startswith("error: ")

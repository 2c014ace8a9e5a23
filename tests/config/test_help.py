"""The output of --help of every command, compared with help.txt.

    python tests/config/test_help.py > tests/config/help.txt        (make settings does it too)

Read the difference before you commit it.
"""

import contextlib
import importlib
import io
import os
from pathlib import Path

from fastgrpo import __version__
from fastgrpo.__main__ import COMMANDS
from fastgrpo.__main__ import main as overview

HELP = Path(__file__).with_name("help.txt")


def written() -> str:
    """The help of all commands; of training, all settings too."""
    asked = [(name, "--help") for name in COMMANDS] + [("train", "--help-all")]
    parts = []
    for name, flag in [("", "--help"), *asked]:
        main = importlib.import_module(f"fastgrpo.{name}").main if name else overview
        told = io.StringIO()
        with contextlib.redirect_stdout(told), contextlib.suppress(SystemExit):
            main([flag])
        parts.append(f"$ python -m fastgrpo{'.' * bool(name)}{name} {flag}\n{told.getvalue()}")
    return "\n".join(parts).replace(__version__, "VERSION")


def test_help_equals_the_snapshot(monkeypatch):
    monkeypatch.setenv("COLUMNS", "100")
    assert written().splitlines() == HELP.read_text().splitlines(), "make settings writes tests/config/help.txt anew"


if __name__ == "__main__":
    os.environ["COLUMNS"] = "100"
    print(written(), end="")

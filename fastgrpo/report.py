"""python -m fastgrpo.report RUN [RUN ...]: write an HTML page that shows runs, and print its path.

The page is one file, needs no server and sends no requests. It shows the current content of the run folders, also of
unfinished runs. The command also redraws curves.png of each run.
"""

import contextlib
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from fastgrpo.config.command import parse_flags, run_command
from fastgrpo.config.fields import Several, settings_class
from fastgrpo.config.settings import Settings
from fastgrpo.page.reading import find_runs, names_of, read_run
from fastgrpo.run.curves import PANELS, SUPERVISED_PANELS, Panel, draw_curves
from fastgrpo.run.folder import made_in, note

PAGE = "report.html"
MADE_BY = b'<meta name="generator" content="fastgrpo.report">'  # in the head of every page
HEAD = 2000  # bytes at the start of a file that are searched for it


@settings_class
class ReportConfig(Settings):
    """The settings of the command."""

    runs: Several[str]
    """Show these run folders. The folder of a sweep shows all its runs."""
    output: str | None = None
    """Write the page to this file. None writes report.html into the run folder, or into the current folder if there are
    several runs."""


def report(argv: list[str]) -> None:
    """Write the page of the given runs."""
    config = parse_flags(ReportConfig, argv, prog="python -m fastgrpo.report", description=__doc__)
    if not config.runs:
        raise ValueError("an argument is missing: the folder of a run, such as runs/TASK-1")
    folders = list(map(Path, config.runs))
    runs = find_runs(folders)
    # The page of one folder goes into it, and a comparison into the current folder.
    default = folders[0] / PAGE if len(folders) == 1 else PAGE
    page = Path(default if config.output is None else config.output)
    _refuse_page(page)
    for run in runs:
        with contextlib.suppress(OSError):
            _claim(run, "curves.png")
    text = _page(runs)
    for run in runs:
        try:
            print(draw_curves(run, panels=_panels(run)))
        except OSError as error:  # the folder is read-only
            print(f"warning: {run / 'curves.png'} cannot be written: {error.strerror}", file=sys.stderr)
    _write(page, text)
    print(page)


def _page(runs: Sequence[Path]) -> str:
    """Read the runs and render their page. `draw_curves` warns of unreadable lines."""
    from fastgrpo.page.payload import payload
    from fastgrpo.page.render import render

    records = [read_run(run, name, lambda _: None) for run, name in zip(runs, names_of(runs), strict=True)]
    panels = {}  # each title once, with the most curves
    for panel in (panel for run in runs for panel in _panels(run, told=False)):
        if panel.title not in panels or {*panels[panel.title].metrics} < {*panel.metrics}:
            panels[panel.title] = panel
    return render(payload(records, list(panels.values())))


def _panels(run, told=True) -> Sequence[Panel]:
    """Return the panels of the run's task, or the usual ones for a task of the user."""
    from fastgrpo.tasks import find_task, panels_of

    try:
        config = json.loads((run / "config.json").read_text())
        if config.get("command") == "sft":
            return SUPERVISED_PANELS
        return panels_of(find_task(config["task"]))
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        if told:
            print(f"{run / 'config.json'} names no built-in task; drawing the standard diagrams", file=sys.stderr)
        return PANELS


def _refuse_page(page):
    """Refuse to overwrite a file that this command did not write."""
    if page.parent.is_dir() and made_in(page.parent) and page.name == PAGE:
        _claim(page.parent, page.name)
    elif page.is_dir():
        raise ValueError(f"{page} is a folder; name a file")
    elif not page.parent.is_dir():
        raise ValueError(f"the folder of --output {page} does not exist; create it, or choose another file")
    elif os.path.lexists(page) and not _is_page(page):
        raise ValueError(f"{page} was not made by this command and is not overwritten; move it away")


def _is_page(path):
    if not path.is_file():
        return False
    with open(path, "rb") as file:
        return MADE_BY in file.read(HEAD)


def _claim(folder, name):
    """Note a file in the run folder, or refuse if something else has its name."""
    path, noted = folder / name, made_in(folder)
    if path.is_symlink() or (noted and path.exists() and name not in noted):
        raise ValueError(f"{path} was not made by a run and is not overwritten; move it away")
    if path.is_dir():
        raise ValueError(
            f"{path} is a folder; the {'page' if name == PAGE else 'picture'} needs this name; move it away"
        )
    if noted and name not in noted:
        note(folder, name)


def _write(page, text):
    """Write the page atomically, since a browser may reload it meanwhile."""
    part = page.with_name(f".{page.name}.{os.getpid()}.part")
    try:
        part.write_text(text, encoding="utf-8", errors="backslashreplace")
        os.replace(part, os.path.realpath(page))
    finally:
        part.unlink(missing_ok=True)


def main(argv: list[str] | None = None) -> int:
    """Run the command line."""
    return run_command(report, argv)


if __name__ == "__main__":
    sys.exit(main())

"""python -m fastgrpo.report RUN: draw curves.png from the metrics of a run folder, and print its path."""

import json
import sys
from dataclasses import dataclass
from pathlib import Path

from fastgrpo.config.command import parse_flags, run_command
from fastgrpo.config.fields import REQUIRED, documented, setting
from fastgrpo.config.settings import Settings
from fastgrpo.run.curves import PANELS, SUPERVISED_PANELS, draw_curves
from fastgrpo.run.folder import made_in, note


@documented
@dataclass(frozen=True)
class ReportConfig(Settings):
    """The settings of the command."""

    run: str = setting(REQUIRED, "Folder of a run, with its metrics.jsonl.")


def report(argv: list[str]) -> None:
    """Draw the curves of the run that the command line names.

    Args:
        argv: The arguments.

    Raises:
        ValueError: There is no such run.
    """
    run = Path(parse_flags(ReportConfig, argv, prog="python -m fastgrpo.report", description=__doc__).run)
    if not (run / "metrics.jsonl").is_file():
        raise ValueError(
            f"{run} is not the folder of a run: it has no metrics.jsonl; name a folder such as runs/TASK-1"
        )
    picture, noted = run / "curves.png", made_in(run)
    if picture.is_symlink() or (noted and picture.exists() and picture.name not in noted):
        raise ValueError(f"{picture} was not made by a run and is not overwritten; move it away")
    if noted:  # not in a folder without notes, as of an older version: its first ones are made when it goes on
        note(run, picture.name)
    print(draw_curves(run, panels=_panels(run)))


def _panels(run):
    """Find what the picture of the run's task shows. A run from Python may have a task that is none of ours."""
    from fastgrpo.tasks import find_task, panels_of

    try:
        config = json.loads((run / "config.json").read_text())
        if config.get("command") == "sft":
            return SUPERVISED_PANELS
        return panels_of(find_task(config["task"]))
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        print(f"{run / 'config.json'} names no task of this package; the usual diagrams are drawn", file=sys.stderr)
        return PANELS


def main(argv: list[str] | None = None) -> int:
    """Run the command line.

    Args:
        argv: The arguments; None takes those of the process.

    Returns:
        The exit code: 0, or 2 for a mistake that the user can fix, which is reported in a line or two.
    """
    return run_command(report, argv)


if __name__ == "__main__":
    sys.exit(main())

"""What a command shows in the terminal: one bar, a line for each logged step at most, and tables.

Where stdout is a terminal, rich colours warnings, errors and tables, unless NO_COLOR or TERM=dumb forbid it. Elsewhere,
as in a pipe or a log file, there is plain text without colours and control characters, and no bar.
"""

import os
import re
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TextIO

from rich import box
from rich.console import Console
from rich.table import Column, Table
from rich.text import Text
from tqdm import tqdm

from fastgrpo.config.command import escape_controls
from fastgrpo.run.curves import duration, markdown_table, table

URGENT = re.compile(r"(?:step \d+: )?(warning|error)\b")  # how a text begins that --quiet does not keep back
STYLES = {"warning": "yellow", "error": "bold red"}
BAR = "{desc}: {percentage:3.0f}%|{bar}| {n_fmt}/{total_fmt}{postfix}"
SHARE_BAR = "{desc}: {percentage:3.0f}%|{bar}| {elapsed}<{remaining}"
REDRAW_SECONDS = 0.1  # between two pictures of a bar
BESIDE = 2  # values of the last step behind the bar, which leave room for it in 80 columns


class Terminal:
    """The owner of what a command shows: the bar (None without one), the lines and the tables."""

    def __init__(self, bars: bool = True, quiet: bool = False, silent: bool = False) -> None:
        self.quiet, self.silent = quiet or silent, silent
        self.bars = bars and not self.quiet
        self.bar, self.total, self.done = None, 0, 0
        self._started, self._first, self._shown = 0.0, 0, ""

    def say(self, text: str) -> None:
        """Print a text above the bar. Control characters in it are spelled as escapes."""
        urgent = URGENT.match(text)
        if urgent or not self.quiet:
            self._print(text, STYLES[urgent[1]] if urgent else "")

    def last(self, text: str) -> None:
        """Print a text that --quiet does not keep back either, such as the last line, which names the folder."""
        self._print(text)

    def _print(self, text, style=""):
        if self.silent:
            return
        text = escape_controls(text)
        with tqdm.external_write_mode(file=sys.stdout):
            if is_terminal(sys.stdout):
                Console(highlight=False).print(Text(text, style), soft_wrap=True)
            else:
                print(text)

    def table(self, rows: Sequence[tuple[str, Any]]) -> None:
        """Print a table of names and values."""
        if not self.quiet:
            with tqdm.external_write_mode(file=sys.stdout):
                print_table(rows)

    def columns(self, lines: Sequence[Sequence[str]]) -> None:
        """Print a table with titles."""
        if not self.quiet:
            with tqdm.external_write_mode(file=sys.stdout):
                print_columns(lines)

    def logged(self, step: int, values: Mapping[str, float], seconds: float | None = None) -> None:
        """Print the line of a logged step."""
        total = f"/{self.total}" if self.total else ""
        cells = [f"step {step:>{max(1, len(total) - 1)}}{total}"]
        cells += [f"{name} {value:<8.3g}" for name, value in values.items()]
        cells += [] if seconds is None else [f"{seconds:.3g} s a step"]
        left = self.seconds_left()
        if not self._live() and left:  # a visible bar shows this
            cells.append(f"{duration(left)} left")
        self.say("  ".join(cells))

    def progress(self, total: int, name: str, done: int = 0) -> None:
        """Start a bar in place of the one before it. `advance` moves it."""
        self.close_bar()
        self.total, self.done, self._first, self._shown = total, done, done, ""
        hidden = not (self.bars and is_terminal(sys.stderr))
        # With miniters, no thread of tqdm draws the bar over another text.
        self.bar = tqdm(
            total=total, initial=done, desc=name, dynamic_ncols=True, file=sys.stderr, disable=hidden, miniters=1,
            mininterval=REDRAW_SECONDS, bar_format=BAR,
        )  # fmt: skip
        self._started = time.perf_counter()

    def advance(self, count: int = 1, **values: float) -> None:
        """Move the bar, and show the time that is left."""
        self.done += count
        if values:
            self._shown = " ".join(f"{name} {value:.3g}" for name, value in [*values.items()][:BESIDE])
        self._show_left()
        self.bar.update(count)

    def seconds_left(self) -> float | None:
        """Estimate the seconds to the end from the mean pace since the bar began; None before the first step."""
        here = self.done - self._first
        return (time.perf_counter() - self._started) / here * (self.total - self.done) if here else None

    def _show_left(self):
        """Put the time that is left, and the values of the last step, behind the bar."""
        left = self.seconds_left()
        shown = [self._shown, "" if left is None else f"{duration(left)} left"]
        self.bar.set_postfix_str(", ".join(reversed([*filter(None, shown)])), refresh=False)

    @contextmanager
    def share(self, name: str) -> Iterator[Callable[[float], object]]:
        """Show how much of some work is done: behind the bar where there is one, else on a bar that goes away.

        The time that is left assumes that every completion goes on to its limit; most end earlier. Its rate is that of
        the whole work so far, because prompts are read faster than completions are drawn.
        """
        if not self._live():
            hidden = not (self.bars and is_terminal(sys.stderr)) or self.bar is not None
            # The shares add up to 1 but for rounding, and tqdm warns of a bar that is more than full.
            with tqdm(
                total=1.0 + 1e-6, desc=name, leave=False, smoothing=0, bar_format=SHARE_BAR, disable=hidden,
                dynamic_ncols=True,
            ) as bar:  # fmt: skip
                yield bar.update
            return
        done, drawn = 0.0, 0.0

        def update(share):
            nonlocal done, drawn
            done, now = done + share, time.perf_counter()
            if now - drawn > REDRAW_SECONDS:
                self.bar.set_postfix_str(f"{name} {done:.0%}", refresh=False)
                self.bar.refresh()
                drawn = now

        yield update
        self._show_left()
        self.bar.refresh()

    def _live(self):
        """Whether there is a bar to see."""
        return self.bar is not None and not self.bar.disable

    def close_bar(self) -> None:
        """Close the bar, if there is one."""
        if self.bar is not None:
            self.bar.close()
            self.bar = None


def is_terminal(stream: TextIO) -> bool:
    """Tell whether a stream is a terminal that can move its cursor."""
    return stream.isatty() and os.environ.get("TERM", "") not in ("dumb", "unknown")


def print_table(rows: Sequence[tuple[str, Any]]) -> None:
    """Print names and values: as a table of rich in a terminal, and as aligned plain text elsewhere."""
    rows = [(escape_controls(name), escape_controls(str(value))) for name, value in rows]
    if is_terminal(sys.stdout):
        _print_rich(rows, Column(style="bold", no_wrap=True), Column(overflow="fold"))
    else:
        print(table(rows))


def print_columns(lines: Sequence[Sequence[str]]) -> None:
    """Print a table with titles: as a table of rich in a terminal, and as a Markdown table elsewhere."""
    titles, *rows = [[escape_controls(cell) for cell in line] for line in lines]
    if is_terminal(sys.stdout):
        styles = ["bold", *[""] * len(titles)]
        _print_rich(rows, *(Column(Text(t), overflow="fold", style=s) for t, s in zip(titles, styles, strict=False)))
        return
    # A line of a Markdown table is one line, and | ends a cell.
    lines = [[" ".join(cell.split("\n")).replace("|", "\\|") for cell in line] for line in (titles, *rows)]
    print(markdown_table(lines))


def _print_rich(rows, *columns):
    shown = Table(*columns, box=box.ROUNDED, show_header=any(column.header for column in columns))
    for row in rows:
        shown.add_row(*map(Text, row))
    Console(highlight=False).print(shown)

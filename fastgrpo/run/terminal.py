"""The terminal output of a command: one bar, at most one line per logged step, and tables.

In a terminal, rich colors warnings, errors and tables, unless NO_COLOR or TERM=dumb is set. In a pipe or file, output
is plain text without colors, control characters and bar.
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
from fastgrpo.run.curves import duration, markdown_table, table, three_digits

URGENT = re.compile(r"(?:step \d+: )?(warning|error)\b")  # prefix of texts that --quiet still prints
STYLES = {"warning": "yellow", "error": "bold red"}
BAR = "{desc}: {percentage:3.0f}%|{bar}| {n_fmt}/{total_fmt}{postfix}"
SHARE_BAR = "{desc}: {percentage:3.0f}%|{bar}| {elapsed}<{remaining}"
REDRAW_SECONDS = 0.1  # between two draws of a bar
BESIDE = 2  # values of the last step beside the bar, which fit in 80 columns


class Terminal:
    """Prints the bar (None without one), lines and tables of a command."""

    def __init__(self, bars: bool = True, quiet: bool = False, silent: bool = False) -> None:
        self.quiet, self.silent = quiet or silent, silent
        self.bars = bars and not self.quiet
        self.bar, self.total, self.done = None, 0, 0
        self._started, self._first, self._shown = 0.0, 0, ""

    def say(self, text: str) -> None:
        """Print a text above the bar, with control characters as escapes."""
        urgent = URGENT.match(text)
        if urgent or not self.quiet:
            self._print(text, STYLES[urgent[1]] if urgent else "")

    def last(self, text: str) -> None:
        """Print a text even with --quiet, such as the last line with the run folder."""
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
        cells += [f"{name} {three_digits(value):<8}" for name, value in values.items()]
        cells += [] if seconds is None else [f"{three_digits(seconds)} s per step"]
        left = self.seconds_left()
        if not self._live() and left:  # a visible bar shows this
            cells.append(f"{duration(left)} left")
        self.say("  ".join(cells))

    def progress(self, total: int, name: str, done: int = 0) -> None:
        """Replace the bar by a new one. `advance` moves it."""
        self.close_bar()
        self.total, self.done, self._first, self._shown = total, done, done, ""
        hidden = not (self.bars and is_terminal(sys.stderr))
        # With miniters, no thread of tqdm draws the bar over another text.
        self.bar = tqdm(
            total=total, initial=done, desc=name, dynamic_ncols=True, file=sys.stderr, disable=hidden, miniters=1,
            mininterval=REDRAW_SECONDS, bar_format=BAR,
        )  # fmt: skip
        self._started = time.perf_counter()

    def begun(self) -> None:
        """Estimate the remaining time from the first step of this process on, without the setup before it."""
        if self.done == self._first:
            self._started = time.perf_counter()

    def advance(self, count: int = 1, **values: float) -> None:
        """Move the bar, and show the remaining time."""
        self.done += count
        if values:
            self._shown = " ".join(f"{name} {three_digits(value)}" for name, value in [*values.items()][:BESIDE])
        self._show_left()
        self.bar.update(count)

    def seconds_left(self) -> float | None:
        """Estimate the remaining seconds from the mean pace of the bar; None before the first step."""
        here = self.done - self._first
        return (time.perf_counter() - self._started) / here * (self.total - self.done) if here else None

    def _show_left(self):
        """Show the remaining time and the values of the last step beside the bar."""
        left = self.seconds_left()
        shown = [self._shown, "" if left is None else f"{duration(left)} left"]
        self.bar.set_postfix_str(", ".join(reversed([*filter(None, shown)])), refresh=False)

    @contextmanager
    def share(self, name: str) -> Iterator[Callable[[float], object]]:
        """Show the progress of a task: beside the bar if there is one, else on a temporary bar.

        The remaining time assumes that every completion reaches its limit; most end earlier. It uses the mean rate,
        because prompts are processed faster than completions are generated.
        """
        if not self._live():
            hidden = not (self.bars and is_terminal(sys.stderr)) or self.bar is not None
            # Shares sum to 1 up to rounding, and tqdm warns about a bar above 100%.
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
        """Return whether a bar is visible."""
        return self.bar is not None and not self.bar.disable

    def close_bar(self) -> None:
        """Close the bar, if there is one."""
        if self.bar is not None:
            self.bar.close()
            self.bar = None


def is_terminal(stream: TextIO) -> bool:
    """Return whether a stream is a terminal that can move its cursor."""
    return stream.isatty() and os.environ.get("TERM", "") not in ("dumb", "unknown")


def print_table(rows: Sequence[tuple[str, Any]]) -> None:
    """Print names and values: as a rich table in a terminal, otherwise as aligned text."""
    rows = [(escape_controls(name), escape_controls(str(value))) for name, value in rows]
    if is_terminal(sys.stdout):
        _print_rich(rows, Column(style="bold", no_wrap=True), Column(overflow="fold"))
    else:
        print(table(rows))


def print_columns(lines: Sequence[Sequence[str]]) -> None:
    """Print a table with titles: as a rich table in a terminal, otherwise as a Markdown table."""
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

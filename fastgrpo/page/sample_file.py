"""Reads a run's samples.jsonl for the page: where its steps and groups lie, and the lines of one group.

The file may have gigabytes and may be written at this moment. So it is gone through once, which keeps a place for each
group and no text, and afterwards a group is read when it is asked for.
"""

import json
import re
from collections.abc import Iterator
from typing import Any, BinaryIO, NamedTuple

LONGEST = 64 << 20  # bytes of a line; a longer one is damaged, such as the zeros that a crash of the machine leaves
_HEAD = re.compile(rb'\{\s*"step":\s*(\d{1,15}),\s*"group":\s*(\d{1,15})\s*,')  # as a run writes it


class Block(NamedTuple):
    """The place of one group's lines in the file.

    Attributes:
        group: The number of the group in its step.
        offset: Where its first line begins, in bytes.
        count: Number of its lines.
    """

    group: int
    offset: int
    count: int


class SampleFile:
    """The steps of samples.jsonl and where their groups lie.

    A step that a resumed run wrote again replaces what was there: where the steps go back, those from there on were
    written before the resume, and are forgotten.

    Attributes:
        steps: The groups of each step, both in the order of the file.
        damaged: Number of lines that are no samples. Lines that are read later are judged when they are read.
        half: Whether the last line is not whole, as it is while a run writes it.
        replaced: The steps that were forgotten because they were written again.
    """

    def __init__(self, file: BinaryIO) -> None:
        self.steps: dict[int, list[Block]] = {}
        self.damaged, self.half = 0, False
        self.replaced: set[int] = set()
        self._file, self._last = file, (-1, -1)
        for offset, line in self._lines():
            self._note(offset, line)

    def _lines(self):
        """Yield the lines that are not empty, each with the place where it begins."""
        offset = 0
        while line := self._file.readline(LONGEST):
            start, offset = offset, offset + len(line)
            if len(line) == LONGEST and not line.endswith(b"\n"):
                while rest := self._file.readline(LONGEST):
                    offset += len(rest)
                    if rest.endswith(b"\n"):
                        break
                self.damaged += 1
            elif line.strip():
                yield start, line

    def _note(self, offset, line):
        """Note a line under its step and group."""
        place = _place(line)
        if place is None:
            if line.endswith(b"\n"):
                self.damaged += 1
            else:
                self.half = True
            return
        step, group = place
        last_step, last_group = self._last
        if step < last_step or (step == last_step and group < last_group):
            gone = [other for other in self.steps if other >= step]
            self.replaced.update(gone)
            for other in gone:
                del self.steps[other]
        blocks = self.steps.setdefault(step, [])
        if blocks and blocks[-1].group == group:
            blocks[-1] = blocks[-1]._replace(count=blocks[-1].count + 1)
        else:
            blocks.append(Block(group, offset, 1))
        self._last = place

    def read(self, step: int, block: Block) -> Iterator[dict[str, Any]]:
        """Read the lines of a group."""
        self._file.seek(block.offset)
        for _ in range(block.count):
            row = parse(self._file.readline(LONGEST))
            if row is not None and (row["step"], row["group"]) == (step, block.group):
                yield row


def _place(line):
    """Find the step and the group of a line; None where it is damaged. What lies behind them is not looked at."""
    if not line.rstrip().endswith(b"}"):
        return None
    head = _HEAD.match(line)
    if head:
        return int(head[1]), int(head[2])
    row = parse(line)
    return None if row is None else (row["step"], row["group"])


def parse(line: bytes) -> dict[str, Any] | None:
    """Read one line."""
    try:
        text = line.decode("utf-8", "surrogatepass")
    except UnicodeDecodeError:
        text = line.decode("utf-8", "replace")
    try:
        row = json.loads(text, parse_constant=lambda _: None)
    except (ValueError, RecursionError):
        return None
    if not isinstance(row, dict) or not all(_is_count(row.get(name)) for name in ("step", "group")):
        return None
    return row


def _is_count(value):
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0

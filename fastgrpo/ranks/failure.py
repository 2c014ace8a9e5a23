"""How a rank ends that cannot go on: its own error is said once, whole and with its number; those who lost it say so.

torchrun shows a table of the ranks that failed, with the earliest first, as the root of all. It reads what they write
to the file that TORCHELASTIC_ERROR_FILE names, and dates a rank without such a file by the end of its process.
"""

import inspect
import json
import os
import sys
import time
import traceback

from fastgrpo.ranks.group import RankLost, Ranks
from fastgrpo.ranks.notes import Notes, in_a_line

CONSEQUENCE = 60  # seconds by which torchrun takes an error for later, if it follows from another rank's
_left = False


def left() -> bool:
    """Tell whether this process ends by an error."""
    return _left


def end(error: BaseException, notes: Notes, text: str) -> None:
    """Tell the other ranks, the launcher and the user of the error that ends this rank.

    An error that rank 0 has too is not said again. A lost rank is said in one line.
    """
    global _left
    _left = True
    if isinstance(error, RankLost):
        _write_error_file(str(error), str(error), 0 if error.hung else CONSEQUENCE)
        print(error, file=sys.stderr, flush=True)
        return
    line = in_a_line(error)
    _write_error_file(line, text)
    notes.fail(line)
    notes.end_all(f"rank {notes.rank} failed: {line}")
    if not notes.said_by_lead(line):
        space = "" if text.startswith("\n") else " "
        print(f"error on rank {notes.rank}:{space}{text}", file=sys.stderr, flush=True)


def install(ranks: Ranks) -> None:
    """Let an exception that nobody catches end this process as `end` says."""
    before = sys.excepthook

    def hook(kind, error, trace):
        if isinstance(error, Exception):
            end(error, ranks.notes, "\n" + "".join(traceback.format_exception(kind, error, trace)).rstrip())
            if _beneath_torch(before) is not sys.__excepthook__:  # somebody's own, which may report errors elsewhere
                before(kind, error, trace)
        elif ranks.lead:  # of a KeyboardInterrupt, which all ranks have
            before(kind, error, trace)

    if ranks.size > 1:
        sys.excepthook = hook


def _beneath_torch(hook):
    """Return the hook to which that of a process group hands on what it gets, with the rank's number in each line."""
    while getattr(hook, "__module__", None) == "torch.distributed.distributed_c10d":
        hook = inspect.getclosurevars(hook).nonlocals.get("old_hook", sys.__excepthook__)
    return hook


def _write_error_file(line, text, later=0):
    """Write the file that torchrun reads.

    Source: `record_exception` in torch/distributed/elastic/multiprocessing/errors/error_handler.py, whose format this
    is. It writes a traceback in any case, and always the present time.
    """
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if path:
        extra = {"py_callstack": text.strip(), "timestamp": str(int(time.time()) + later)}
        with open(path, "w", encoding="utf-8") as file:
            json.dump({"message": {"message": line, "extraInfo": extra}}, file)

"""SIGINT and SIGTERM: after the first, a run finishes its step and saves; after the second, the process ends.

A closed output pipe, as after `head -1`, also makes a run finish its step and save. SIGPIPE itself stays ignored, as in
Python, because unrelated connections raise it too.

All ranks stop after the same step, even if a signal reaches only one. torchrun also sends SIGTERM to the ranks that
remain after a crash, so a rank reports a signal only after all ranks have agreed to stop.
"""

import contextlib
import os
import signal
import sys
import threading
from typing import NoReturn, Self

from fastgrpo.config.command import Guarded
from fastgrpo.ranks import ALONE, RankLost, Ranks, outlive_sigterm

SIGNALS = (signal.SIGINT, signal.SIGTERM)


class StopSignals:
    """A context manager that catches the first SIGINT or SIGTERM. It is true after a signal or a closed output pipe.

    After the first signal, both have their default effect again. An ignored signal stays ignored, as SIGINT under
    `nohup`. Python sets handlers only in the main thread; in other threads the context does nothing.
    """

    def __init__(self, ranks: Ranks = ALONE) -> None:
        self.received, self._ranks = None, ranks
        self._before, self._streams, self._told = {}, None, False

    def __enter__(self) -> Self:
        self._pid = os.getpid()
        if threading.current_thread() is threading.main_thread():
            for number in SIGNALS:
                if signal.getsignal(number) not in (signal.SIG_IGN, None):
                    self._before[number] = signal.signal(number, self._note)
            self._streams = sys.stdout, sys.stderr
            sys.stdout, sys.stderr = (
                None if stream is None else Guarded(stream, self._unread) for stream in self._streams
            )
        return self

    def __exit__(self, kind, error, trace):
        for number, handler in self._before.items():
            signal.signal(number, handler)
        if self._streams is not None:
            sys.stdout, sys.stderr = self._streams
        if isinstance(error, RankLost):
            outlive_sigterm()

    def agree(self, what: str) -> bool:
        """Return whether the run must stop. A signal of one rank stops all ranks, which must all call this."""
        received = next(filter(None, self._ranks.gather(self.received, what)), None)
        if received is None:
            return False  # a later signal counts at the next call
        if self._ranks.size > 1 and self._ranks.lead and not self._told:
            self._tell(f"{_reason(received)}: the step is finished, saving; a second signal ends the ranks at once")
        self.received, self._told = received, True
        return True

    def __bool__(self) -> bool:
        return self.received is not None

    def _note(self, number, frame):
        if os.getpid() != self._pid:  # a process that a reward function forked
            signal.signal(number, self._before[number])
            signal.raise_signal(number)
            return
        self.received = signal.Signals(number)
        for other in self._before:
            signal.signal(other, signal.SIG_DFL)
        if self._ranks.size == 1:
            why = _reason(self.received)
            self._tell(f"{why}: finishing the step, then saving; a second signal ends the process at once")

    def _unread(self):
        if self.received is None:
            self.received = signal.SIGPIPE
            if self._ranks.size == 1:
                self._tell(f"{_reason(self.received)}: finishing the step, then saving")

    @staticmethod
    def _tell(text):
        # os.write instead of print: the signal may have interrupted a print, which is not reentrant.
        with contextlib.suppress(OSError):  # stderr may be closed too
            os.write(2, f"\n{text}\n".encode())

    def leave(self) -> NoReturn:
        """End the process with the signal's exit code (130, 143 or 141), a failure for shells, torchrun and Slurm."""
        if self.received == signal.SIGINT:
            raise KeyboardInterrupt
        raise SystemExit(128 + self.received)


def _reason(number):
    return "the output pipe was closed" if number == signal.SIGPIPE else number.name

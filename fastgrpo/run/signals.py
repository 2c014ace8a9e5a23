"""SIGINT and SIGTERM: the first lets a run finish its step and save, the second ends the process at once."""

import os
import signal
import threading
from typing import NoReturn, Self

SIGNALS = (signal.SIGINT, signal.SIGTERM)


class StopSignals:
    """A context manager that catches the first SIGINT or SIGTERM. It is true once a signal has come.

    After the first signal both signals have their default effect again: they end the process, even inside a long
    kernel. A signal that was ignored before stays ignored, as SIGINT is under `nohup` and in background jobs. Python
    sets signal handlers in the main thread only, so in other threads the context does nothing.
    """

    def __init__(self) -> None:
        self.received = None
        self._before = {}

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            for number in SIGNALS:
                if signal.getsignal(number) not in (signal.SIG_IGN, None):
                    self._before[number] = signal.signal(number, self._note)
        return self

    def __exit__(self, kind, error, trace):
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def __bool__(self) -> bool:
        return self.received is not None

    def _note(self, number, frame):
        self.received = signal.Signals(number)
        for other in self._before:
            signal.signal(other, signal.SIG_DFL)
        # os.write and not print, because the signal may have interrupted a print, which cannot be entered twice.
        text = "finishing the step, then saving; a second signal ends the process at once"
        os.write(2, f"\n{self.received.name}: {text}\n".encode())

    def leave(self) -> NoReturn:
        """End the process as the signal would have ended it.

        Shells, torchrun and Slurm then see the exit code 130 or 143, and do not take the run for a success.

        Raises:
            KeyboardInterrupt: The signal was SIGINT.
            SystemExit: The signal was SIGTERM. The exit code is 143.
        """
        if self.received == signal.SIGINT:
            raise KeyboardInterrupt
        raise SystemExit(128 + self.received)

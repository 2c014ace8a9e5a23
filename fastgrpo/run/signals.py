"""SIGINT and SIGTERM: the first one is noted, so that a run can finish its step and save; a second one acts at once."""

import os
import signal
import threading

SIGNALS = (signal.SIGINT, signal.SIGTERM)


class StopSignals:
    """A context that listens, in the main thread alone, where Python allows it. True once a signal has come.

    From then on both signals do again what the system does with them: end the process, even inside of a long kernel.
    A signal that was ignored before (as `nohup` and background jobs do with SIGINT) stays ignored.
    """

    def __init__(self):
        self.received = None
        self._before = {}

    def __enter__(self):
        if threading.current_thread() is threading.main_thread():
            for number in SIGNALS:
                if signal.getsignal(number) not in (signal.SIG_IGN, None):
                    self._before[number] = signal.signal(number, self._note)
        return self

    def __exit__(self, kind, error, trace):
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def __bool__(self):
        return self.received is not None

    def _note(self, number, frame):
        self.received = signal.Signals(number)
        for other in self._before:
            signal.signal(other, signal.SIG_DFL)
        # Not print: the signal may have come in the middle of one.
        os.write(2, f"\n{self.received.name}: finishing the step, then saving; once more leaves at once\n".encode())

    def leave(self):
        """End as the signal would have ended the process: shells, torchrun and Slurm see 130 or 143, not success.

        Raises:
            KeyboardInterrupt: it was SIGINT. SystemExit: it was SIGTERM; code 143.
        """
        if self.received == signal.SIGINT:
            raise KeyboardInterrupt
        raise SystemExit(128 + self.received)

"""The lock of a run folder, so that one run at a time writes there."""

import errno
import fcntl
import gc
import os
import re
import socket
import stat
import threading
import weakref
from pathlib import Path

LOCK = ".lock"
_held = weakref.WeakValueDictionary()  # the locks that this process holds, by the identity of their files
_one_at_a_time = threading.RLock()  # for the threads of this process that take a folder or give it back


class FolderLock:
    """A lock on a folder, which this process holds until `close`, or until the process ends.

    It is a POSIX record lock: it ends with the process, however that ends, and child processes do not inherit it, so a
    child that outlives the run does not keep the folder locked. Such a lock admits a second holder in the same process;
    this class refuses one.
    """

    def __init__(self, path: Path) -> None:
        self.path = path / LOCK
        with _one_at_a_time:
            self._take()

    def _take(self):
        self._refuse_second_holder()
        self._file = self._open()
        try:
            owner = self._owner()
            fcntl.lockf(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            self._file.close()
            if error.errno in (errno.EACCES, errno.EAGAIN):
                raise ValueError(
                    f"output_dir {self.path.parent} is in use by a run that is still alive ({owner}); wait "
                    "until it ends, or choose another folder"
                ) from None
            raise
        except ValueError:
            self._file.close()
            raise
        self._file.seek(0)
        self._file.truncate()
        self._file.write(f"process {os.getpid()} on {socket.gethostname()}")
        self._file.flush()
        self._key = self._identity()
        _held[self._key] = self

    @property
    def held(self) -> bool:
        """Whether this lock still holds the folder."""
        return _held.get(self._key) is self

    def close(self) -> None:
        """Release the folder."""
        with _one_at_a_time:
            self._file.close()  # first: closing it later would release the lock of the next holder
            if self.held:
                del _held[self._key]

    def _identity(self):
        """Return what tells the lock's file from all others, or None where there is no such file."""
        try:
            status = os.lstat(self.path)
        except FileNotFoundError:
            return None
        return status.st_dev, status.st_ino

    def _refuse_second_holder(self):
        """Refuse a folder that this process holds already.

        This comes before the file is opened, because closing any of its descriptors would release the first lock.
        """
        if self._identity() in _held:
            gc.collect()  # a trainer that nothing refers to any more gives its folder back
        if self._identity() in _held:
            raise ValueError(
                f"output_dir {self.path.parent} is in use by another trainer of this process; let its train() end, or "
                "give the folder back with trainer.log.close()"
            )

    def _open(self):
        """Open the lock's file without following a link and without waiting for the other end of a pipe."""
        try:
            descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK, 0o644)
        except OSError as error:
            if error.errno in (errno.ELOOP, errno.EISDIR, errno.ENXIO):
                raise self._not_a_lock() from None
            raise
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            os.close(descriptor)
            raise self._not_a_lock()
        return open(descriptor, "r+", encoding="utf-8", errors="replace")

    def _owner(self):
        """Read who held the folder last. Raises ValueError where the file is not a lock of a run."""
        owner = self._file.read(1000)
        if owner and not re.fullmatch(r"process \d+ on .*", owner):
            raise self._not_a_lock()
        return owner

    def _not_a_lock(self):
        return ValueError(f"{self.path} is not the lock of a run; move it away, or choose another output_dir")

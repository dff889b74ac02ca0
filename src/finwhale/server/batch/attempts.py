"""The lines of a batch that were in flight when a process died.

A line may end the process that answers it, and then each next process. So a file names the lines
that have begun; a process that stops in good order removes its own from it. It is not synced: a
process that is killed has written it all the same.
"""

import os
from array import array
from collections import Counter
from pathlib import Path


class Attempts:
    """The file of one batch. All methods raise OSError. `deaths`: how many processes have died
    while a line was in flight, by the line's number; only for lines without a result."""

    def __init__(self, path: Path) -> None:
        self._path, self._file = path, path.open("a+b", buffering=0)
        self._file.seek(0)
        found, numbers = self._file.read(), array("Q")
        self._before = len(found) // numbers.itemsize * numbers.itemsize
        numbers.frombytes(found[: self._before])
        self.deaths = Counter(numbers)
        self.forget()

    def begin(self, number: int) -> None:
        """Notes that a line begins."""
        self._file.write(array("Q", [number]).tobytes())

    def forget(self) -> None:
        """Removes the lines that have begun in this process, which does not die."""
        self._file.truncate(self._before)

    def close(self, *, ended: bool) -> None:
        """Closes the file; removes it if the batch has ended or it is empty."""
        if ended or not os.fstat(self._file.fileno()).st_size:
            self._path.unlink(missing_ok=True)
        self._file.close()

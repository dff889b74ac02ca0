"""The results of a batch: a file that is only appended to, and read again after a stop.

A result begins with the number and the digest of its line, in its id. If the process was killed,
the last result may be incomplete: it is removed, and its line runs again.
"""

import fcntl
import itertools
import json
import os
import re
from collections import Counter
from pathlib import Path

from finwhale.errors import FinwhaleError
from finwhale.server.batch.lines import BatchLine, RawLine, Scan

_RESULT = re.compile(
    rb'\{"id": "batch_req_(\d{1,15})_([0-9a-f]{16})", "custom_id": (?:null|"(?:[^"\\]|\\.)*"), '
    rb'"response": (?:null|\{"status_code": (\d+), )'
)
_HEAD_BYTES = 16 << 10  # enough for a match of _RESULT


def result_of(
    raw: RawLine, line: BatchLine, status: int, request_id: str, body: bytes | bytearray
) -> bytes:
    """The result of a line that was answered. `body` is JSON in one line."""
    assert b"\n" not in body
    given = status, json.dumps(request_id).encode(), body
    response = b'{"status_code": %d, "request_id": %s, "body": %s}' % given
    return _result(raw, line, response, None)


def error_of(raw: RawLine, line: BatchLine, code: str, message: str) -> bytes:
    """The result of a line that did not run."""
    return _result(raw, line, b"null", {"code": code, "message": f"line {raw.number}: {message}"})


def _result(raw: RawLine, line: BatchLine, response: bytes, error: dict[str, str] | None) -> bytes:
    result_id = f"batch_req_{raw.number}_{raw.digest:016x}"
    head = f'{{"id": "{result_id}", "custom_id": {json.dumps(line.custom_id)}, "response": '
    return head.encode() + response + f', "error": {json.dumps(error)}}}\n'.encode()


class ResultFile:
    """A file of results. One process at a time may have it open."""

    def __init__(self, path: Path) -> None:
        """Raises FinwhaleError if the file cannot be opened, or another process has it open."""
        self.path = path
        try:
            self._file = path.open("a+b", buffering=0)
        except OSError as error:
            raise FinwhaleError(f"cannot write results: {error}") from error
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            self._file.close()
            raise FinwhaleError(f"another process writes {path} now") from error

    def recover(self, scan: Scan, done: bytearray, counts: Counter[str]) -> None:
        """Finds the lines that have results, and removes an incomplete result at the end.

        Args:
            done: is set to 1 for each of these lines: that of line n is at n - 1.
            counts: gets the numbers of those that were answered with status 200 ("completed"), and
                of the others ("failed").

        Raises:
            FinwhaleError: the file has other lines than the results of this input.
        """
        end = 0
        with self.path.open("rb") as file:
            for number in itertools.count(1):
                head = part = file.readline(_HEAD_BYTES)
                while part and not part.endswith(b"\n"):
                    part = file.readline(_HEAD_BYTES)
                if not part:
                    break
                end = file.tell()
                found = _RESULT.match(head)
                if found is None:
                    raise FinwhaleError(
                        f"{self.path}, line {number} is not a result of a batch: give another file"
                    )
                line, digest = int(found[1]) - 1, int(found[2], 16)
                if not 0 <= line < len(scan.digests) or scan.digests[line] != digest:
                    raise FinwhaleError(
                        f"{self.path}, line {number} is the result of another input than line "
                        f"{line + 1}: the input has changed, or the file belongs to another input"
                    )
                if done[line]:
                    raise FinwhaleError(f"{self.path}, line {number} is the result of a line "
                                        "that has one already")  # fmt: skip
                done[line] = 1
                counts["completed" if found[3] == b"200" else "failed"] += 1
        self._file.truncate(end)

    def append(self, result: bytes) -> None:
        """Raises FinwhaleError, for example if the disk is full."""
        rest = memoryview(result)
        try:
            while rest:
                rest = rest[self._file.write(rest) :]
        except OSError as error:
            raise FinwhaleError(f"cannot write results: {error}") from error

    def close(self) -> None:
        os.fsync(self._file.fileno())
        self._file.close()

"""Messages and bytes between two processes that know one secret, over TCP. Nothing is encrypted.

A message is its length, a code, and JSON. The code depends on the secret, on random numbers of both
sides, and on the message's place in the conversation. Whoever connects sends the first message, and
learns nothing that depends on the secret unless its code is right. A message is read up to a limit,
and parsed only if its code is right. Bytes that follow a message have no code.
"""

import hashlib
import hmac
import json
import secrets
import select
import socket
import struct
import time
from typing import Any

NONCE_BYTES, CODE_BYTES = 16, 32
HEAD = struct.Struct(f"<I{CODE_BYTES}s")  # length and code of a message
MOST_BYTES, MOST_FIRST_BYTES = 2**22, 2**12  # of a message; of the first one, from a stranger
# Methods of Channel raise these errors, and so does code that uses the content of a wrong message.
FAILURES = (OSError, ValueError, KeyError, TypeError, RuntimeError)


class Channel:
    """One end of a connection.

    Methods raise one of FAILURES if the other side is gone, too slow or does not know the secret.
    Then the connection is of no further use.

    Args:
        sides: the names of this side and the other one; "client" has connected to "server".

    Attributes:
        deadline: until when methods may wait for the other side (time.monotonic()).
    """

    def __init__(
        self, connection: socket.socket, secret: bytes, sides: tuple[str, str], deadline: float
    ) -> None:
        self._connection, self._key, self._sides = connection, secret, sides
        self._sent = self._received = 0
        self.deadline = deadline
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        nonce = secrets.token_bytes(NONCE_BYTES)
        self.send_bytes(nonce)
        other = self._receive(NONCE_BYTES)
        self._key = self._code("key", nonce + other if sides[0] == "client" else other + nonce)

    def send(self, message: dict[str, Any]) -> None:
        text = json.dumps(message).encode()
        code = self._code(self._sides[0], self._sent.to_bytes(8, "big") + text)
        self._sent += 1
        self.send_bytes(HEAD.pack(len(text), code) + text)

    def receive(self) -> dict[str, Any]:
        size, code = HEAD.unpack(self._receive(HEAD.size))
        if size > (MOST_BYTES if self._received else MOST_FIRST_BYTES):
            raise ValueError(f"it sends a message of {size} bytes")
        text = self._receive(size)
        wanted = self._code(self._sides[1], self._received.to_bytes(8, "big") + text)
        if not hmac.compare_digest(code, wanted):
            raise ValueError("its message has a wrong code: has it another prefix_salt?")
        self._received += 1
        return dict(json.loads(text))

    def send_bytes(self, data: bytes | memoryview) -> None:
        self._connection.settimeout(self._left())
        self._connection.sendall(data)

    def receive_bytes(self, into: memoryview) -> None:
        """Fill `into`."""
        while into:
            self._connection.settimeout(self._left())
            count = self._connection.recv_into(into)
            if not count:
                reason = "" if self._received else ": has it another prefix_salt, or many peers?"
                raise ConnectionError(f"it ended the connection{reason}")
            into = into[count:]

    def readable(self, seconds: float) -> bool:
        """Wait until the other side has sent something, or ended the connection."""
        poll = select.poll()
        poll.register(self._connection, select.POLLIN)
        return bool(poll.poll(seconds * 1000))

    def close(self) -> None:
        self._connection.close()

    def _receive(self, size: int) -> bytes:
        data = bytearray(size)
        self.receive_bytes(memoryview(data))
        return bytes(data)

    def _code(self, purpose: str, data: bytes) -> bytes:
        """A message authentication code: keyed BLAKE2."""
        person = purpose.encode()
        return hashlib.blake2b(data, key=self._key, person=person, digest_size=CODE_BYTES).digest()

    def _left(self) -> float:
        seconds = self.deadline - time.monotonic()
        if seconds <= 0:
            raise TimeoutError("timed out")
        return seconds

"""Messages and bytes between two processes that know one secret, over TCP. Nothing is encrypted.

Both sides first prove that they know the secret, the one that connects before the other: whoever
connects learns nothing that depends on it. Then each message is its length, a code that depends on
its place in the conversation, and JSON. It is read up to a limit, and parsed only if its code is
right. Bytes that follow a message have no code.
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
MOST_BYTES = 2**22  # of a message
# What a method of Channel raises, or what is raised by using the content of a message.
FAILURES = (OSError, ValueError, KeyError, TypeError, RuntimeError)


class Channel:
    """One end of a connection.

    Methods raise one of FAILURES if the other side is gone, too slow or does not know the secret.
    Then the connection is of no further use.

    Args:
        sides: the names of this side and the other one; "client" has connected to "server".
        deadline: until when the other side must prove that it knows the secret.

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
        nonce, is_client = secrets.token_bytes(NONCE_BYTES), sides[0] == "client"
        self.send_bytes(nonce)
        other = self._receive(NONCE_BYTES)
        nonces = nonce + other if is_client else other + nonce
        if is_client:
            self.send_bytes(self._code("client", nonces))
        try:
            proof = self._receive(CODE_BYTES)
        except ConnectionError:
            raise ConnectionError("it ended the connection: has it another prefix_salt?") from None
        if not hmac.compare_digest(proof, self._code(sides[1], nonces)):
            raise ValueError("it has another prefix_salt")
        if not is_client:
            self.send_bytes(self._code("server", nonces))
        self._key = self._code("messages", nonces)

    def send(self, message: dict[str, Any]) -> None:
        text = json.dumps(message).encode()
        code = self._code(self._sides[0], self._sent.to_bytes(8, "big") + text)
        self._sent += 1
        self.send_bytes(HEAD.pack(len(text), code) + text)

    def receive(self) -> dict[str, Any]:
        size, code = HEAD.unpack(self._receive(HEAD.size))
        if size > MOST_BYTES:
            raise ValueError(f"it sends a message of {size} bytes")
        text = self._receive(size)
        wanted = self._code(self._sides[1], self._received.to_bytes(8, "big") + text)
        if not hmac.compare_digest(code, wanted):
            raise ValueError("its message was changed on the way")
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
                raise ConnectionError("it ended the connection")
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

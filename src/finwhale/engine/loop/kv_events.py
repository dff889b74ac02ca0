"""Publishes changes of the prefix cache over ZMQ, in vLLM's format, for routers (extra `events`).

A message has three frames: the topic, a sequence number (8 bytes, big-endian) and msgpack of
[time, events, data-parallel rank]. An event is a map with the field `type`: "BlockStored",
"BlockRemoved" or "AllBlocksCleared" (vllm/distributed/kv_events.py).
"""

import logging
import time
from collections.abc import Sequence
from queue import Full, Queue
from threading import Thread
from typing import Any

from finwhale.engine.plan.prefix_index import Block
from finwhale.errors import ResourceError
from finwhale.extras import named_extras
from finwhale.options import host_and_port

with named_extras():
    import msgspec
    import zmq

logger = logging.getLogger(__name__)

MOST_WAITING = 10_000  # events that the thread has not sent
MOST_IN_BATCH = 256
CLOSE_S = 1


class KvEvents:
    """Tells subscribers of the cached blocks (CacheEvents has the contract).

    Args:
        address: EngineConfig.kv_events.

    Attributes:
        endpoint: where subscribers connect.
        dropped: number of events that were lost because the thread did not keep up. Then a sequence
            number is left out, by which subscribers notice the loss.

    Raises:
        ResourceError: the address cannot be used.
    """

    def __init__(self, address: str) -> None:
        where, _, topic = address.partition("/")
        host, port = host_and_port("kv_events", where, least=0)
        self._topic = topic.encode()
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.PUB)
        self._socket.ipv6 = ":" in host
        try:
            self._socket.bind(f"tcp://{f'[{host}]' if ':' in host else host}:{port or '*'}")
        except zmq.ZMQError as error:
            self._context.destroy()
            raise ResourceError(f"kv_events cannot use the address {address}: {error}") from None
        self.endpoint = self._socket.getsockopt_string(zmq.LAST_ENDPOINT)
        self.dropped = 0
        self._queue: Queue[dict[str, Any] | None] = Queue(MOST_WAITING)
        self._thread = Thread(target=self._run, name="kv-events", daemon=True)
        self._thread.start()
        logger.info("KV events on %s", self.endpoint)

    def stored(self, block: Block, token_ids: Sequence[int]) -> None:
        self._put(
            {
                "type": "BlockStored",
                "block_hashes": [_number(block.key)],
                "parent_block_hash": None if block.parent is None else _number(block.parent.key),
                "token_ids": list(token_ids),
                "block_size": len(token_ids),
                "lora_id": None,
                "medium": "GPU",
                "lora_name": None,
            }
        )

    def removed(self, block: Block) -> None:
        hashes = [_number(block.key)]
        self._put({"type": "BlockRemoved", "block_hashes": hashes, "medium": "GPU"})

    def cleared(self) -> None:
        self._put({"type": "AllBlocksCleared"})

    def _put(self, event: dict[str, Any]) -> None:
        try:
            self._queue.put_nowait(event)
        except Full:
            self.dropped += 1

    def _run(self) -> None:
        number, told, batch = 0, 0, list[dict[str, Any] | None]()
        while not batch or batch[-1] is not None:
            batch = [self._queue.get()]
            batch += [self._queue.get() for _ in range(min(self._queue.qsize(), MOST_IN_BATCH))]
            dropped = self.dropped
            number, told = number + (dropped > told), dropped
            events = [event for event in batch if event is not None]
            payload = msgspec.msgpack.encode([time.time(), events, 0])
            self._socket.send_multipart([self._topic, number.to_bytes(8, "big"), payload])
            number += 1

    def close(self) -> None:
        """End the thread, and give up the address. No call may follow."""
        self._queue.put(None)
        self._thread.join()
        self._context.destroy(linger=CLOSE_S * 1000)


def _number(key: bytes) -> int:
    """A block's key as the 64 bits that routers expect."""
    return int.from_bytes(key[:8], "big")

"""KV events: what subscribers are told agrees with the prefix cache."""

import socket
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq
from radixview.subscribe import _record
from radixview.tree import CacheTree
from radixview.wire import DecodedBatch, decode_multipart, sequence_break

from finwhale import LLM, SamplingParams
from finwhale.engine.loop import kv_events
from finwhale.engine.loop.kv_events import KvEvents, _number
from finwhale.engine.plan.prefix_index import Block, PrefixIndex
from finwhale.errors import FinwhaleError, ResourceError

from .test_prefix_store import draft_model


# The types with which vLLM's own subscribers decode events, since vLLM's pull request 42892.
class BlockStored(msgspec.Struct, tag=True):
    block_hashes: list[bytes | int]
    parent_block_hash: bytes | int | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None


class BlockRemoved(msgspec.Struct, tag=True):
    block_hashes: list[bytes | int]
    medium: str | None


class AllBlocksCleared(msgspec.Struct, tag=True):
    pass


class Batch(msgspec.Struct, array_like=True):
    ts: float
    events: list[BlockStored | BlockRemoved | AllBlocksCleared]
    data_parallel_rank: int | None = None


class Subscriber:
    """Receives messages in a thread, and lets radixview draw its tree."""

    def __init__(self, endpoint: str, topic: str = "") -> None:
        self.tree = CacheTree()
        self.batches: list[DecodedBatch] = []
        self.breaks: list[str] = []
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.SUB)
        self._socket.subscribe(topic.encode())
        self._socket.rcvtimeo = 10_000
        self._socket.connect(endpoint)
        self._last: dict[int, int] = {}

    def receive(self) -> list[dict[str, Any]]:
        """The events of the next message."""
        frames = self._socket.recv_multipart()
        batch = decode_multipart(frames)
        assert len(msgspec.msgpack.decode(frames[2], type=Batch).events) == len(batch.events)
        found = sequence_break(self._last, batch.attn_dp_rank or 0, batch.seq)
        self.breaks += [found] if found else []
        for event in batch.events:
            _record(self.tree, event, None)
        return list(batch.events)

    def receive_until(self, kind: str) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = []
        while not any(event["type"] == kind for event in found):
            found += self.receive()
        return found

    def close(self) -> None:
        self._context.destroy(linger=0)


def connect(events: Any, topic: str = "") -> Subscriber:
    """A subscriber that misses nothing from now on."""
    subscriber = Subscriber(events.endpoint, topic)
    subscriber._socket.rcvtimeo = 20
    while True:  # the connection is made in the background, and nobody says when
        events.cleared()
        try:
            subscriber.receive()
            break
        except zmq.Again:
            continue
    subscriber._socket.rcvtimeo = 10_000
    return subscriber


@pytest.fixture
def events() -> Iterator[KvEvents]:
    events = KvEvents("0/kv@here@model")
    yield events
    events.close()


def block(number: int, parent: Block | None = None) -> Block:
    return Block(number.to_bytes(8, "big") + bytes(8), parent, {})


def hashes(index: PrefixIndex) -> set[int]:
    return {_number(key) for key in index.blocks}


def test_radixview_reads_the_events(tmp_path: Path) -> None:
    """Blocks that are computed, loaded from a store, evicted and cleared."""
    path = draft_model(tmp_path, "mtp")
    options: dict[str, Any] = {"device": "cpu", "max_num_seqs": 2, "max_model_len": 1024}
    store = str(tmp_path / "store")
    params = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True)
    prompts = [[2 + (7 * i * i + n) % 290 for i in range(800)] for n in range(6)]
    with LLM(path, **options, prefix_store=store) as llm:
        llm.generate([{"prompt_token_ids": prompts[0]}], params)
    tight = {"cache_memory_bytes": 8_000_000}  # holds fewer blocks than the prompts have
    with LLM(path, **options, **tight, prefix_store=store, kv_events="0") as llm:
        index = llm._engine.scheduler.prefix
        assert index is not None and isinstance(index.events, KvEvents)
        subscriber = connect(index.events)
        told: list[dict[str, Any]] = []
        for prompt in prompts:
            llm.generate([{"prompt_token_ids": prompt}], params)
            index.events.stored(block(1), [])  # a mark at which the test may stop to read
            new = subscriber.receive()
            while not any(event.get("block_size") == 0 for event in new):
                new += subscriber.receive()
            told += [event for event in new if event.get("block_size") != 0]
            live: set[int] = set()
            for event in told:
                change = set(event.get("block_hashes", ()))
                live = live | change if event["type"] == "BlockStored" else live - change
            assert live == hashes(index)
        assert llm._engine.metrics().cached_tokens == 768  # the first prompt came from the store
        assert index.num_evicted
        stored = [event for event in told if event["type"] == "BlockStored"]
        by_hash = {event["block_hashes"][0]: event for event in stored}
        for prompt in prompts:
            chains = [e for e in stored if e["token_ids"] == prompt[512:768]]
            tokens: list[int] = []
            one: Any = chains[0]
            while one is not None:
                tokens = one["token_ids"] + tokens
                one = by_hash.get(one["parent_block_hash"])
            assert tokens == prompt[:768]
        llm._engine.reset_prefix_cache()
        cleared = subscriber.receive_until("AllBlocksCleared")
        assert cleared[-1]["type"] == "AllBlocksCleared"
        assert not any(event["type"] == "BlockRemoved" for event in cleared)
        assert not subscriber.breaks and llm._engine.metrics().dropped_events == 0
        assert not subscriber.tree.snapshot(None)["nodes"]
        subscriber.close()
    assert not [t for t in threading.enumerate() if t.name == "kv-events" and t.is_alive()]


def test_batches_and_topics(events: KvEvents) -> None:
    subscriber = connect(events, "kv@here@")
    first = block(1)
    events.stored(first, range(256))
    events.stored(block(2, first), range(256))
    events.removed(first)
    found = subscriber.receive_until("BlockRemoved")
    found = [event for event in found if event["type"] != "AllBlocksCleared"]
    assert [event["block_hashes"] for event in found] == [[1], [2], [1]]
    assert found[1]["parent_block_hash"] == 1 and found[1]["block_size"] == 256
    other = Subscriber(events.endpoint, "other")
    other._socket.rcvtimeo = 50
    events.cleared()
    with pytest.raises(zmq.Again):
        other.receive()
    other.close()
    subscriber.close()


def test_a_full_queue_drops_and_counts_and_delays_nobody(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(kv_events, "MOST_WAITING", 4)
    begin = threading.Event()
    run = KvEvents._run
    monkeypatch.setattr(KvEvents, "_run", lambda self: begin.wait(60) and run(self))
    events = KvEvents("0")
    for number in range(10):
        events.stored(block(number), [])
    assert events.dropped == 6
    begin.set()
    while not events._queue.empty():
        time.sleep(0.01)
    subscriber = connect(events)
    events.dropped += 1  # as if the queue had been full
    events.removed(block(1))
    subscriber.receive_until("BlockRemoved")
    assert len(subscriber.breaks) == 1 and "sequence gap" in subscriber.breaks[0]
    subscriber.close()
    events.close()


def test_only_this_machine_hears_unless_a_host_is_given(events: KvEvents) -> None:
    assert events.endpoint.startswith("tcp://127.0.0.1:")
    everywhere = KvEvents("*:0")
    assert everywhere.endpoint.startswith("tcp://0.0.0.0:")
    everywhere.close()


def test_an_address_that_is_taken() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ResourceError, match=f"kv_events cannot use the address {port}: "):
            KvEvents(str(port))


def test_a_start_that_fails_gives_the_address_back(tmp_path: Path) -> None:
    path, before = draft_model(tmp_path, "mtp"), threading.active_count()
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    with pytest.raises(FinwhaleError, match="the cache needs at least"):
        LLM(path, device="cpu", cache_memory_bytes=1, kv_events=str(port))
    assert threading.active_count() == before
    KvEvents(str(port)).close()


@pytest.mark.parametrize("given", ["", "here", "1:2:3", "99999", "tcp://*:5557"])
def test_a_wrong_option(given: str) -> None:
    with pytest.raises(FinwhaleError, match=r"kv_events must be \[HOST:\]PORT"):
        LLM(device="cpu", kv_events=given)


def test_what_kv_events_need(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(FinwhaleError, match="kv_events needs enable_prefix_caching"):
        LLM(device="cpu", kv_events="0", enable_prefix_caching=False)
    monkeypatch.delitem(sys.modules, "finwhale.engine.loop.kv_events")
    monkeypatch.setitem(sys.modules, "zmq", None)
    with pytest.raises(FinwhaleError, match=r"needs zmq: pip install 'finwhale\[events\]'"):
        LLM(device="cpu", kv_events="0")

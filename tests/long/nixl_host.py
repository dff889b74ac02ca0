"""A host with a prefix store whose records have the sizes of Flash's, driven by lines of JSON.

    python nixl_host.py DIRECTORY PEER_PORT ASKED_PORT

A port of 0 leaves the option out. Each line is the name of a function of Host and its arguments;
the answer is one line.
"""

import hashlib
import json
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from finwhale.config import EngineConfig
from finwhale.engine.plan.prefix_store import Record
from finwhale.engine.store import peers
from finwhale.engine.store.directory import DirectoryStore

SIZES = {"block": 899_712, "state": 5_009_408}
# Long enough for two busy cores; what is left alone is asked again soon.
peers.FIND_S, peers.READ_S, peers.LEASE_S = 20.0, 20.0, 60.0
peers.FIRST_PAUSE_S = peers.LONGEST_PAUSE_S = 0.2


def record(number):
    return Record(number.to_bytes(16, "big"), "state" if number % 8 == 7 else "block")


def content(number):
    size = SIZES[record(number).kind]
    return hashlib.shake_128(number.to_bytes(16, "big")).digest(size)


class Keeps:
    """A store that reads and writes only if it is told to."""

    def __init__(self, own, keeps):
        self.own, self.keeps = own, keeps
        self.contains, self.close = own.contains, own.close

    def read(self, record, into):
        return self.keeps and self.own.read(record, into)

    def write(self, record, content):
        return not self.keeps or self.own.write(record, content)


class Host:
    def __init__(self, path, peer_port, asked_port):
        about = {"test": "nixl"}
        self.own = DirectoryStore(Path(path), "f", about)
        config = EngineConfig(
            prefix_store=path,
            prefix_salt="salt",
            prefix_peer_port=peer_port if peer_port != "0" else None,
            prefix_peers=f"127.0.0.1:{asked_port}" if asked_port != "0" else None,
        )
        self.store = peers.open_peers(config, Keeps(self.own, asked_port == "0"), about, SIZES)

    def put(self, count):
        return [self.own.write(record(n), memoryview(content(n))) for n in range(count)]

    def find(self, count):
        return self.store.contains([record(number) for number in range(count)])

    def read(self, count, threads=8, seconds=20.0):
        """Reads some records at once; for each, whether it came, or "wrong"."""
        peers.READ_S = seconds

        def one(number):
            into = bytearray(SIZES[record(number).kind])
            found = self.store.read(record(number), memoryview(into))
            return "wrong" if found and into != content(number) else found

        with ThreadPoolExecutor(threads) as pool:
            return list(pool.map(one, range(count)))

    def rate(self, count, threads):
        """Bytes per second of reads, by the median of five rounds; for docs/notes."""
        buffers = [memoryview(bytearray(SIZES[record(n).kind])) for n in range(count)]
        rates = []
        for _ in range(5):
            began = time.perf_counter()
            with ThreadPoolExecutor(threads) as pool:
                found = list(pool.map(self.store.read, map(record, range(count)), buffers))
            rates.append(all(found) * sum(map(len, buffers)) / (time.perf_counter() - began))
        return sorted(rates)[2]


if __name__ == "__main__":
    host = Host(*sys.argv[1:])
    print("ready", flush=True)
    for line in sys.stdin:
        name, *arguments = json.loads(line)
        print(json.dumps(getattr(host, name)(*arguments)), flush=True)
    host.store.close()

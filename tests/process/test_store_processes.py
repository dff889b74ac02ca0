"""A prefix store whose server is killed, and the process that makes room in it."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from tests.unit.test_directory_store import ABOUT, content, get, open_store, put, record

from finwhale.engine.plan.prefix_store import Record, StoreCounts
from finwhale.engine.store import directory
from finwhale.engine.store.directory import DirectoryStore

WRITE = """
import sys
from pathlib import Path
from tests.unit.test_directory_store import content, open_store, put, record
store = open_store(Path(sys.argv[1]))
for number in range(10**6):
    put(store, record(number), content(number, 20_000))
"""


def test_a_killed_server_loses_no_finished_record(tmp_path: Path) -> None:
    child = subprocess.Popen([sys.executable, "-c", WRITE, str(tmp_path)])
    while not list((tmp_path / "store").rglob("*.block")):
        assert child.poll() is None
        time.sleep(0.01)
    time.sleep(0.1)
    child.kill()
    child.wait()
    store = open_store(tmp_path)
    count = len(list((tmp_path / "store").rglob("*.block")))
    assert count > 1
    for number in range(count):
        assert get(store, record(number), 20_000) == content(number, 20_000)


def put_and_wait(store: DirectoryStore, some: Record, data: bytes) -> bool:
    """Write a record, and wait until there is room for the next one."""
    written = put(store, some, data)
    if store._shrinking is not None:
        store._shrinking.wait()
    return written


def test_the_directory_stays_below_its_limit_and_keeps_what_is_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(directory, "MEASURE_SHARE", 1 / 8)
    limit = 50_000
    store = open_store(tmp_path, limit)
    chain = [record(number) for number in range(10)]
    for number, one in enumerate(chain):
        assert put_and_wait(store, one, content(number))
    long_ago = time.time_ns() - 10 * directory.USED_AGAIN_S * 10**9
    for file in (tmp_path / "store").rglob("*.block"):
        os.utime(file, ns=(long_ago, long_ago))
    assert all(store.contains(chain[:8]))  # used now
    for number in range(100, 200):
        put_and_wait(store, record(number), content(number))
        total = sum(file.stat().st_size for file in (tmp_path / "store").rglob("*.block"))
        assert total <= limit * (1 + directory.MEASURE_SHARE) + 2000
        if number == 130:  # 41 records of 1,028 bytes
            assert store.contains(chain) == [True] * 10
    assert store.contains(chain[8:]) == [False] * 2


def test_what_is_written_and_evicted_is_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(directory, "MEASURE_SHARE", 1 / 4)
    counts = StoreCounts()
    store = DirectoryStore(tmp_path / "store", "f1", ABOUT, 20_000, counts)
    for number in range(50):
        assert put_and_wait(store, record(number), content(number))
        assert put_and_wait(store, record(number), content(number))  # it has this one
    store.limit = 10**9  # and count what was removed last
    store._unmeasured = 10**9
    put_and_wait(store, record(0), content(0))
    store.close()
    size = 1000 + directory.HEADER.size
    assert counts.written_bytes == 51 * size
    left = len(list((tmp_path / "store").rglob("*.block")))
    assert counts.evicted == 51 - left > 20

"""The prefix store in a directory: whatever happens to a file or the disk is a miss."""

import fcntl
import json
import os
import resource
import shutil
import signal
import stat
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from finwhale.cli.main import main
from finwhale.engine.plan.prefix_store import Record
from finwhale.engine.store import directory
from finwhale.engine.store.directory import DirectoryStore, salt_of
from finwhale.errors import ResourceError

ABOUT = {"dtype": "float32"}


def record(number: int, kind: str = "block", owner: bytes = b"") -> Record:
    return Record(number.to_bytes(16, "big"), kind, owner)  # type: ignore[arg-type]


def content(number: int, size: int = 1000) -> bytes:
    return bytes((number + i) % 251 for i in range(size))


def open_store(path: Path, limit: int | None = None, fingerprint: str = "f1") -> DirectoryStore:
    return DirectoryStore(path / "store", fingerprint, ABOUT, limit)


def put(store: DirectoryStore, some: Record, data: bytes) -> bool:
    return store.write(some, memoryview(data))


def get(store: DirectoryStore, some: Record, size: int = 1000) -> bytes | None:
    into = bytearray(size)
    return bytes(into) if store.read(some, memoryview(into)) else None


def only_file(path: Path) -> Path:
    (found,) = (path / "store").rglob("*.block")
    return found


def test_what_is_written_is_read_by_another_server(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    some = [record(1), record(1, "state"), record(1, owner=b"x" * 16), record(2)]
    assert store.contains(some) == [False] * 4
    for number, one in enumerate(some[:3]):
        assert put(store, one, content(number))
    store.close()
    other = open_store(tmp_path)
    assert other.contains(some) == [True, True, True, False]
    assert [get(other, one) for one in some] == [content(0), content(1), content(2), None]
    assert not any(open_store(tmp_path, fingerprint="f2").contains(some))
    about = (tmp_path / "store" / "f1" / directory.ABOUT).read_text()
    assert json.loads(about) == ABOUT


def test_only_its_user_can_read_it(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    put(store, record(1), content(1))
    salt_of(tmp_path / "store")
    for path in (tmp_path / "store").rglob("*"):
        assert stat.S_IMODE(path.stat().st_mode) == (0o700 if path.is_dir() else 0o600), path


@pytest.mark.parametrize("at", [0, 5, 20, 27, 28, 500, -1])
def test_a_flipped_bit_is_a_miss_and_the_file_goes(tmp_path: Path, at: int) -> None:
    store = open_store(tmp_path)
    put(store, record(1), content(1))
    file = only_file(tmp_path)
    data = bytearray(file.read_bytes())
    data[at] ^= 4
    file.write_bytes(data)
    assert get(store, record(1)) is None
    assert store.contains([record(1)]) == [False]
    assert put(store, record(1), content(1)) and get(store, record(1)) == content(1)


@pytest.mark.parametrize(
    "change", [lambda d: d[:-1], lambda d: d[:10], lambda d: b"", lambda d: d * 2]
)
def test_another_length_is_a_miss(tmp_path: Path, change: Callable[[bytes], bytes]) -> None:
    store = open_store(tmp_path)
    put(store, record(1), content(1))
    file = only_file(tmp_path)
    file.write_bytes(change(file.read_bytes()))
    assert get(store, record(1)) is None
    put(store, record(1), content(1))
    assert get(store, record(1), size=999) is None  # other pages than those that were saved


def test_a_folder_in_place_of_a_file_is_a_miss(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    put(store, record(1), content(1))
    file = only_file(tmp_path)
    file.unlink()
    file.mkdir()
    assert get(store, record(1)) is None


def test_a_directory_that_vanishes_is_a_miss_and_comes_back(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    put(store, record(1), content(1))
    shutil.rmtree(tmp_path / "store")
    assert get(store, record(1)) is None and store.contains([record(1)]) == [False]
    assert not put(store, record(1), content(1))  # the server does not make the store again
    (tmp_path / "store").mkdir()
    assert put(store, record(1), content(1)) and get(store, record(1)) == content(1)


def test_a_full_disk_is_said_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    store = open_store(tmp_path)
    put(store, record(1), content(1))
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (2000, before[1]))
        assert not put(store, record(2), content(2, 5000))
        assert not put(store, record(3), content(3, 5000))
        assert put(store, record(4), content(4))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)
    assert len(caplog.records) == 1 and "cannot save" in caplog.text
    assert store.contains([record(n) for n in (1, 2, 3, 4)]) == [True, False, False, True]
    assert not list(tmp_path.rglob(".writing-*"))


def test_a_store_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "store").write_text("a file")
    with pytest.raises(ResourceError, match=r"the prefix store .*store cannot be used"):
        open_store(tmp_path)
    with pytest.raises(ResourceError, match="cannot be used"):
        salt_of(tmp_path / "store")


def test_two_writers_of_one_record(tmp_path: Path) -> None:
    stores = [open_store(tmp_path), open_store(tmp_path)]
    wrong = []

    def work(store: DirectoryStore) -> None:
        for number in range(200):
            put(store, record(number), content(number))
            found = get(store, record(number))
            if found != content(number):
                wrong.append(number)

    threads = [threading.Thread(target=work, args=(store,)) for store in stores * 2]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong and not list(tmp_path.rglob(".writing-*"))


def test_a_parent_goes_after_its_blocks(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    chain = [record(number) for number in range(20)]
    for one in chain:
        put(store, one, content(0))
    long_ago = time.time_ns() - 10 * directory.USED_AGAIN_S * 10**9
    for file in (tmp_path / "store").rglob("*.block"):
        os.utime(file, ns=(long_ago, long_ago))
    store.contains(chain)
    directory.shrink(tmp_path / "store", 10_000)
    found = store.contains(chain)
    assert 5 < sum(found) < 10 and found == sorted(found, reverse=True)


def test_what_a_dead_server_began_to_write_goes_after_an_hour(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    put(store, record(1), content(1))
    folder = only_file(tmp_path).parent
    old, new = folder / ".writing-1-1", folder / ".writing-1-2"
    old.write_bytes(b"x")
    new.write_bytes(b"x")
    os.utime(old, (0, time.time() - 2 * directory.ABANDONED_S))
    directory.shrink(tmp_path / "store", 10**6)
    assert new.exists() and not old.exists() and get(store, record(1)) == content(1)


def test_one_process_shrinks_at_a_time(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    for number in range(5):
        put(store, record(number), content(number))
    with (tmp_path / "store" / directory.LOCK).open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        directory.shrink(tmp_path / "store", 10)
        assert len(list(tmp_path.rglob("*.block"))) == 5
    directory.shrink(tmp_path / "store", 10)
    assert not list(tmp_path.rglob("*.block"))


def test_every_server_finds_the_same_salt(tmp_path: Path) -> None:
    found: list[str] = []
    threads = [
        threading.Thread(target=lambda: found.append(salt_of(tmp_path / "store"))) for _ in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(found)) == 1 and len(found) == 8 and len(found[0]) == 32
    assert salt_of(tmp_path / "store") == found[0] != salt_of(tmp_path / "other")


def test_what_differs_from_the_last_server_is_said_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "store"
    DirectoryStore(path, "f1", {"weights": "a", "dtype": "float32", "numerics": "1"})
    assert not caplog.text
    DirectoryStore(path, "f2", {"weights": "b", "dtype": "float32", "numerics": "2"})
    assert "differs from the last one in: weights, numerics" in caplog.text
    caplog.clear()
    DirectoryStore(path, "f1", {"weights": "a", "dtype": "float32", "numerics": "1"})
    (path / "f2" / "about.json").write_text("not JSON")
    DirectoryStore(path, "f2", {"weights": "b"})
    assert not caplog.text


def test_the_command_shows_and_removes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["store", str(tmp_path / "none")]) == 1
    assert "no prefix store" in capsys.readouterr().err
    first = open_store(tmp_path)
    other = DirectoryStore(tmp_path / "store", "f2", {"dtype": "bfloat16"})
    path, owner = str(tmp_path / "store"), b"x" * 16
    for number in range(3):
        put(first, record(number), content(number))
    put(first, record(3, owner=owner), content(3))
    put(other, record(4), content(4, 10**6))

    def shown() -> list[list[str]]:
        assert main(["store", path]) == 0
        text = capsys.readouterr().out
        return [line.replace("│", " ").split()[:4] for line in text.splitlines() if "│" in line]

    size = f"{(1000 + directory.HEADER.size) * 3 / 1e9:,.3f}"
    assert shown() == [
        ["f1", owner.hex()[:12], "1", "0.000"],
        ["f1", "everyone", "3", size],
        ["f2", "everyone", "1", "0.001"],
    ]
    assert main(["store", path]) == 0
    text = capsys.readouterr().out
    assert "dtype: bfloat16" in text and "f1 differs from it in: dtype" in text
    for wrong in "f", "f3", "f1/z":
        assert main(["store", path, "--remove", wrong]) == 1
        assert "wanted 1" in capsys.readouterr().err
    assert main(["store", path, "--remove", f"f1/{owner.hex()[:6]}"]) == 0
    assert first.contains([record(0), record(3, owner=owner)]) == [True, False]
    assert main(["store", path, "--remove", "f1"]) == 0
    assert other.contains([record(4)]) == [True] and first.contains([record(0)]) == [False]
    # A running server goes on.
    assert put(first, record(0), content(0)) and get(first, record(0)) == content(0)
    assert [row[0] for row in shown()] == ["f2", "f1"]
    assert main(["store", path, "--remove", "all"]) == 0
    assert shown() == []

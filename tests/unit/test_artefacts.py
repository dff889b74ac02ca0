"""The cache of compiled artefacts: whose it is, several processes, damage."""

import errno
import json
import os
import threading
from pathlib import Path

import pytest

from finwhale import artefacts
from finwhale.artefacts import Artefacts, default_directory, write_whole
from finwhale.errors import ResourceError

PLATFORM = {"device": "NVIDIA H200", "arch": "sm90", "torch": "2.11.0"}


def elf(sections: int = 64, size: int = 200) -> bytes:
    """So much of an ELF file as its header promises: one table of sections at `sections`."""
    header = bytearray(64)
    header[:6] = b"\x7fELF\x02\x01"
    header[40:48] = sections.to_bytes(8, "little")
    header[58:62] = (size - sections).to_bytes(2, "little") + (1).to_bytes(2, "little")
    return bytes(header) + b"x" * (size - 64)


def add_triton(cache: Artefacts, name: str) -> Path:
    entry = cache.path / "triton" / name
    entry.mkdir()
    (entry / "k.cubin").write_bytes(elf())
    (entry / "k.json").write_text('{"name": "k"}')
    children = {f: str(entry / f) for f in ("k.cubin", "k.json")}
    (entry / "__grp__k.json").write_text(json.dumps({"child_paths": children}))
    return entry


def add_deepgemm(cache: Artefacts, name: str) -> Path:
    entry = cache.path / "deepgemm/cache" / name
    entry.mkdir()
    (entry / "kernel.cu").write_text("code")
    (entry / "kernel.cubin").write_bytes(elf())
    return entry


@pytest.fixture
def cache(tmp_path: Path) -> Artefacts:
    return Artefacts(tmp_path, PLATFORM)


def test_each_device_and_version_has_its_own(tmp_path: Path, cache: Artefacts) -> None:
    assert Artefacts(tmp_path, PLATFORM).path == cache.path
    paths = {Artefacts(tmp_path, PLATFORM | {name: "other"}).path for name in PLATFORM}
    assert len(paths | {cache.path}) == 4
    assert "H200" in cache.path.name


def test_only_this_user_can_use_a_new_one(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        made = Artefacts(tmp_path / "parent" / "cache", PLATFORM).path
    finally:
        os.umask(before)
    folders = [made.parent, made, *made.rglob("*/")]
    assert len(folders) == 2 + 3  # triton, deepgemm, deepgemm/cache
    assert {folder.stat().st_mode & 0o7777 for folder in folders} == {0o700}
    Artefacts(made.parent, PLATFORM)


@pytest.mark.parametrize("mode", [0o720, 0o702, 0o777, 0o1777])
def test_one_that_others_can_write_to(tmp_path: Path, mode: int) -> None:
    made = Artefacts(tmp_path / "cache", PLATFORM).path
    for folder in (made.parent, made, made / "triton"):
        folder.chmod(mode)
        with pytest.raises(ResourceError, match=f"can be written by .*{mode:04o}.*chmod -R go-w"):
            Artefacts(tmp_path / "cache", PLATFORM)
        folder.chmod(0o755)
    Artefacts(tmp_path / "cache", PLATFORM)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a directory to another user")
def test_one_of_another_user(tmp_path: Path) -> None:
    made = Artefacts(tmp_path / "cache", PLATFORM).path
    for folder in (made.parent, made, made / "triton"):
        os.chown(folder, 12345, -1)
        with pytest.raises(ResourceError, match=r"belongs to another user \(id 12345\)"):
            Artefacts(tmp_path / "cache", PLATFORM)
        os.chown(folder, 0, -1)


def test_where_it_is_by_default() -> None:
    assert default_directory("/somewhere") == Path("/somewhere/finwhale")
    assert default_directory() == Path.home() / ".cache" / "finwhale"
    assert default_directory("") == Path.home() / ".cache" / "finwhale"


def test_a_directory_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ResourceError, match=r"cannot be used: .* \(--cache-dir\)"):
        Artefacts(tmp_path / "file", PLATFORM)


def test_a_write_that_fails_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(fd: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    path = tmp_path / "file"
    write_whole(path, b"old")
    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space"):
        write_whole(path, b"new")
    assert [entry.name for entry in tmp_path.iterdir()] == ["file"]
    assert path.read_bytes() == b"old"


def test_complete_for_one_configuration_and_source(
    cache: Artefacts, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache.mark_complete({"layers": 8}, ["a kernel", "another"])
    assert cache.is_complete({"layers": 8})
    assert not cache.is_complete({"layers": 9})
    cache.mark_complete({"layers": 9}, ["another", "a third"])
    assert cache.known() == {"a kernel", "another", "a third"}
    next(cache.path.glob("complete-*")).write_text("{ cut")
    assert len(cache.known()) == 2
    monkeypatch.setattr(artefacts, "source_digest", lambda: "another")
    assert not cache.is_complete({"layers": 8})
    assert not cache.known()


def test_the_source_s_digest_changes_with_it() -> None:
    assert len(artefacts.source_digest()) == 20


@pytest.mark.parametrize("sealed", [True, False])
def test_whole_artefacts_stay(
    cache: Artefacts, sealed: bool, caplog: pytest.LogCaptureFixture
) -> None:
    kept = [add_triton(cache, "A"), add_deepgemm(cache, "kernel.a")]
    if sealed:
        cache.mark_complete("all")
    assert cache.check() == 0
    assert all(entry.exists() for entry in kept)
    assert not caplog.records


@pytest.mark.parametrize("sealed", [True, False])
@pytest.mark.parametrize("file", ["k.cubin", "k.json"])
def test_a_truncated_file(
    cache: Artefacts, file: str, sealed: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """As a full disk or a lost power supply leaves it."""
    whole, entry = add_triton(cache, "A"), add_triton(cache, "B")
    if sealed:
        cache.mark_complete("all")
    (entry / file).write_bytes((entry / file).read_bytes()[:-5])
    assert cache.check() == 1
    assert whole.exists() and not entry.exists()
    assert len(caplog.records) == 1
    assert "1 damaged artefacts are removed and built again" in caplog.text
    assert cache.check() == 0


def test_a_changed_byte_of_what_was_finished(cache: Artefacts) -> None:
    entry = add_deepgemm(cache, "kernel.a")
    cache.mark_complete("all")
    content = bytearray((entry / "kernel.cubin").read_bytes())
    content[-1] ^= 1
    (entry / "kernel.cubin").write_bytes(bytes(content))
    assert cache.check() == 1


def test_what_was_built_again_may_differ(cache: Artefacts) -> None:
    entry = add_triton(cache, "A")
    cache.mark_complete("all")
    (entry / "k.cubin").write_bytes(elf(size=300)[:250])
    assert cache.is_complete("all")
    assert cache.check() == 1
    assert not cache.is_complete("all")
    (add_triton(cache, "A") / "k.cubin").write_bytes(elf(size=400))
    assert cache.check() == 0
    cache.mark_complete("all")
    assert cache.check() == 0


def test_a_file_that_is_gone(cache: Artefacts) -> None:
    (add_triton(cache, "A") / "k.cubin").unlink()
    (add_deepgemm(cache, "kernel.a") / "kernel.cubin").unlink()
    assert cache.check() == 2


def test_damaged_checksums_are_made_again(cache: Artefacts) -> None:
    add_triton(cache, "A")
    cache.mark_complete("all")
    (cache.path / artefacts.SEALS).write_text("{")
    assert cache.check() == 0
    cache.mark_complete("all")
    assert json.loads((cache.path / artefacts.SEALS).read_text())


def test_what_another_process_is_at_stays(cache: Artefacts) -> None:
    """Triton makes a folder first, then each file in one piece, then the list of them."""
    entry = cache.path / "triton" / "A"
    entry.mkdir()
    (entry / "tmp.pid_1_x").mkdir()
    (entry / "k.cubin").write_bytes(elf())
    assert cache.check() == 0
    assert entry.exists()


def test_one_process_fills_at_a_time(tmp_path: Path, cache: Artefacts) -> None:
    order: list[str] = []
    inside = threading.Event()

    def other() -> None:
        mine = Artefacts(tmp_path, PLATFORM)
        inside.wait()
        with mine.filling():
            order.append("second")

    thread = threading.Thread(target=other)
    thread.start()
    with cache.filling():
        inside.set()
        thread.join(0.2)
        order.append("first")
    thread.join()
    assert order == ["first", "second"]


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_filled_cache_may_be_read_only(tmp_path: Path, cache: Artefacts) -> None:
    cache.mark_complete("all")
    cache.path.chmod(0o555)
    try:
        mine = Artefacts(tmp_path, PLATFORM)
        assert not mine.writable and mine.is_complete("all") and mine.check() == 0
        with mine.filling():
            mine.mark_complete("more")
    finally:
        cache.path.chmod(0o755)

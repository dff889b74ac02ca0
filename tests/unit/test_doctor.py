"""`finwhale doctor` on machines that lack something."""

import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from finwhale.cli import doctor
from finwhale.cli.main import main
from finwhale.extras import EXTRAS
from finwhale.platform import Platform

ROOT = Path(__file__).parents[2]
DRIVER = "NVRM version: NVIDIA UNIX x86_64 Kernel Module  580.82.07  Wed Aug 20\n"
Capture = pytest.CaptureFixture[str]


def found(check: Callable[[], Iterator[doctor.Finding]]) -> dict[str, doctor.Finding]:
    return {one.subject: one for one in check()}


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    path = tmp_path / "version"
    monkeypatch.setattr(doctor, "DRIVER", path)
    return path


@pytest.fixture
def gpus(driver: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    def set_gpus(*archs: str, peers: bool = True, free: int = 140) -> None:
        driver.write_text(DRIVER)
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: len(archs))
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda i: (free * 2**30, 140 * 2**30))
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda i: "NVIDIA H200")
        monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda i, j: peers)
        platforms = [Platform("nvidia", arch) for arch in archs]
        monkeypatch.setattr(Platform, "detect", lambda index=0: platforms[index])

    return set_gpus


def test_a_cpu(driver: Path) -> None:
    (finding,) = doctor._gpus()
    assert (finding.found, finding.verdict) == ("none", "missing")
    assert found(doctor._processor)["processor"].verdict == "ok"


@pytest.mark.parametrize("build, says", [("2.11.0+cu130", False), ("2.13.0", True)])
def test_the_torch_that_has_run_on_a_gpu(
    build: str, says: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "__version__", build)
    assert ("only torch 2.11.0 was tested" in found(doctor._software)["torch"].advice) == says
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert f"torch=={doctor.GPU_TORCH}" in project["optional-dependencies"]["nvidia"]


def test_torch_without_cuda_beside_a_driver(
    driver: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    driver.write_text(DRIVER)
    monkeypatch.setattr(torch.version, "cuda", None)
    assert main(["doctor", "--no-run"]) == 1
    out = capsys.readouterr().out
    assert "NVIDIA driver 580.82.07, but torch sees no GPU" in out
    assert "a build without CUDA" in out


def test_hopper_gpus_that_reach_each_other(gpus: Callable[..., None]) -> None:
    gpus("sm90", "sm90")
    findings = {**found(doctor._gpus), **found(doctor._peers)}
    assert findings["NVIDIA driver"].found == "580.82.07"
    assert findings["GPU 1"].verdict == "ok"
    assert "Hopper kernels" in findings["GPU 1"].found
    assert findings["peer access"].found == "between all 2 GPUs"


def test_what_is_wrong_with_gpus(gpus: Callable[..., None]) -> None:
    gpus("sm89", "sm90", peers=False, free=20)
    findings = {**found(doctor._gpus), **found(doctor._peers)}
    assert "slow reference operators" in findings["GPU 0"].found
    assert "another process uses this GPU" in findings["GPU 1"].advice
    assert findings["peer access"].found == "not from GPU 0 to 1, 1 to 0"


def test_a_missing_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(EXTRAS, "hub", ("downloads", ("no_such_module",)))
    finding = found(doctor._extras)["extra hub"]
    assert finding.found == "no no_such_module"
    assert finding.advice == "for downloads: pip install 'finwhale[hub]'"


def test_a_prefix_store(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, driver: Path) -> None:
    """On a disk that has room, on one that has not, and in memory."""
    monkeypatch.setattr(doctor, "MEASURED_BYTES", 2**22)
    store = tmp_path / "not" / "there"
    mounts = tmp_path / "mounts"
    monkeypatch.setattr(doctor, "MOUNTS", mounts)
    for kind, size, advice in (
        ("ext4", ":1kB", ""),
        ("ext4", "", ""),
        ("ext4", ":999TB", "make room"),
        ("tmpfs", ":1kB", ""),
        ("tmpfs", "", "its files take memory"),
        ("tmpfs", ":999TB", "its files take memory"),
    ):
        mounts.write_text(f"none / xfs rw 0 0\nnone {tmp_path} {kind} rw 0 0\n")
        (finding,) = doctor._prefix_store(f"{store}{size}")
        assert finding.advice.startswith(advice) and bool(finding.advice) == bool(advice)
        assert "reads" in finding.found
    assert not list(tmp_path.glob("not*"))  # nothing is left behind


def test_a_check_that_fails_is_one_finding() -> None:
    def broken() -> Iterator[doctor.Finding]:
        yield doctor.Finding("first", "fine")
        raise RuntimeError("driver is gone\nmore")

    findings = list(doctor._attempt(broken))
    assert [one.verdict for one in findings] == ["ok", "failed"]
    assert findings[1].found == "RuntimeError: driver is gone"

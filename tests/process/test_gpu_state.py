"""The state of GPUs during a measurement, from a stub of nvidia-smi; tests/gpu has a real one."""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from finwhale.bench.gpu_state import GpuWatch, watch_gpus

LINES = """GPU-a, 1980, 310.5, 0x0000000000000000
GPU-b, 1410, 699.9, 0x0000000000000004
GPU-b, [N/A], [N/A], [N/A]
"""


@pytest.fixture
def nvidia_smi(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Path]:
    """Write a stub with the given shell lines; returns the file that it adds its arguments to."""
    (tmp_path / "sh").symlink_to("/bin/sh")
    (tmp_path / "sleep").symlink_to("/bin/sleep")
    monkeypatch.setenv("PATH", str(tmp_path))

    def write(lines: str) -> Path:
        file = tmp_path / "nvidia-smi"
        file.write_text(f'#!/bin/sh\necho "$@" >> {tmp_path}/asked\n{lines}\n')
        file.chmod(0o755)
        return tmp_path / "asked"

    return write


def seen(gpus: GpuWatch, samples: int) -> dict[str, Any]:
    result: dict[str, Any] = {}
    with gpus.during(result):
        before, limit = len(gpus._samples), time.monotonic() + 60
        while len(gpus._samples) < before + samples and time.monotonic() < limit:
            time.sleep(0.01)
    return result


def test_the_slowest_gpu_and_the_one_that_takes_most(
    nvidia_smi: Callable[[str], Path], tmp_path: Path
) -> None:
    (tmp_path / "lines").write_text(LINES)
    asked = nvidia_smi(f"while read line; do echo $line; done < {tmp_path}/lines")
    with watch_gpus(["GPU-a", "GPU-b"]) as gpus:
        for found in (seen(gpus, 4), seen(gpus, 4)):
            assert found.keys() == {"sm_mhz", "watts", "power_limited"}
            assert (found["sm_mhz"], found["watts"]) == (1410.0, 699.9)
            assert 0.25 <= found["power_limited"] <= 0.75  # of two GPUs in turns
    assert "--id=GPU-a,GPU-b" in asked.read_text()
    asked.unlink()
    time.sleep(0.5)
    assert not asked.exists()  # nothing is asked any more


@pytest.mark.parametrize("lines", ["exit 9", None])
def test_no_state(nvidia_smi: Callable[[str], Path], lines: str | None) -> None:
    """nvidia-smi fails, or there is none."""
    asked = None if lines is None else nvidia_smi(lines)
    result: dict[str, Any] = {}
    with watch_gpus(["GPU-a"]) as gpus, gpus.during(result):
        limit = time.monotonic() + 60
        while asked is not None and not asked.exists() and time.monotonic() < limit:
            time.sleep(0.01)
        time.sleep(0.5)
    assert result == {}
    assert asked is None or len(asked.read_text().splitlines()) == 1  # it is not asked again
    with watch_gpus([]) as gpus:
        assert seen(gpus, 0) == {}

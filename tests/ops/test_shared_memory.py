"""The kernels that prefer shared memory, and how they say so to the driver."""

from typing import Any

import pytest

from finwhale.ops.launch import shared_memory

from .kernel_sources import kernel_names


class Driver:
    def __init__(self) -> None:
        self.calls: list[tuple[int, int, int]] = []

    def cuFuncSetAttribute(self, function: Any, attribute: int, value: int) -> int:
        self.calls.append((function.value, attribute, value))
        return 0


def test_only_these_kernels_prefer_shared_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = Driver()
    monkeypatch.setattr(shared_memory, "_driver", lambda: driver)
    for handle, name in enumerate((*shared_memory.KERNELS, "tile_kernel"), start=1):
        shared_memory._prefer(None, handle, name, {}, "")
    # CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT is 9 in cuda.h; the value is a percentage.
    assert driver.calls == [(1, 9, 100), (2, 9, 100)]


def test_the_kernels_exist() -> None:
    """A kernel that was renamed would lose its preference silently."""
    names = {name.rpartition(".")[2] for name in kernel_names()}
    assert set(shared_memory.KERNELS) <= names

"""Which device each rank gets, and the errors of options that do not fit."""

import shutil
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from finwhale.bench import load
from finwhale.config import EngineConfig
from finwhale.engine.ranks.devices import choose_device, choose_devices, num_sharers
from finwhale.engine.ranks.memory_checks import check_gpu_memory, check_host_memory
from finwhale.errors import FinwhaleError, ResourceError
from finwhale.models.deepseek_v4.presets import published
from finwhale.platform import Platform, available_memory


def never(num_gpus: int) -> int:
    raise AssertionError("the options say how many")


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Lets torch see some GPUs."""

    def see(count: int) -> None:
        monkeypatch.setattr(torch.cuda, "is_available", lambda: count > 0)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
        platform = Platform("nvidia", "sm90") if count else Platform.cpu()
        monkeypatch.setattr(Platform, "detect", lambda index=0: platform)

    return see


@pytest.mark.parametrize(
    ("device", "size", "wanted"),
    [
        (None, 1, ("cuda",)),
        ("cuda", 1, ("cuda",)),
        ("cuda:3", None, ("cuda:3",)),
        ("cuda:3", 1, ("cuda:3",)),
        (None, 2, ("cuda:0", "cuda:1")),
        ("cuda", 4, ("cuda:0", "cuda:1", "cuda:2", "cuda:3")),
        ("cuda:3,1", None, ("cuda:3", "cuda:1")),
        ("cuda:2,3", 2, ("cuda:2", "cuda:3")),
        ("cuda:1,1", 2, ("cuda:1", "cuda:1")),
        ("cpu", None, ("cpu",)),
        ("cpu", 4, ("cpu",) * 4),
    ],
)
def test_devices_of_four_gpus(
    gpus: Callable[[int], None], device: str | None, size: int | None, wanted: tuple[str, ...]
) -> None:
    gpus(4)
    config = EngineConfig(device=device, tensor_parallel_size=size)
    assert choose_devices(config, never) == wanted


def test_the_ranks_that_share_a_gpu() -> None:
    names = {
        None: 1,
        "cpu": 1,
        "cuda": 1,
        "cuda:3": 1,
        "cuda:0,1": 1,
        "cuda:0,0": 2,
        "cuda:1,1,1,1": 4,
    }
    assert {name: num_sharers(name) for name in names} == names


def test_a_gpu_always_has_its_index(gpus: Callable[[int], None]) -> None:
    """A thread of its own has another current device, so "the current one" would be wrong there."""
    gpus(2)
    names = (None, "cuda", "cuda:0", "cuda:1")
    assert [choose_device(name)[1].index for name in names] == [0, 0, 0, 1]
    gpus(0)
    assert choose_device(None) == (Platform.cpu(), torch.device("cpu"))


def test_the_model_decides_where_the_options_do_not(gpus: Callable[[int], None]) -> None:
    gpus(4)
    assert choose_devices(EngineConfig(), lambda count: 2) == ("cuda:0", "cuda:1")
    assert choose_devices(EngineConfig(), lambda count: 1) == ("cuda",)
    gpus(0)
    assert choose_devices(EngineConfig(), never) == ("cpu",)
    assert choose_devices(EngineConfig(tensor_parallel_size=2), never) == ("cpu", "cpu")


@pytest.mark.parametrize(
    ("device", "size", "kind", "wanted"),
    [
        (None, 4, ResourceError, "tensor_parallel_size is 4, but torch sees 2 GPUs"),
        ("cuda:0,2", None, ResourceError, "device 'cuda:0,2' is not available: torch sees 2 GPUs"),
        (
            "cuda:1,0,1,0",
            None,
            FinwhaleError,
            "device 'cuda:1,0,1,0' names GPU 1 twice: name each GPU once, or only one for all "
            "ranks",
        ),
        (
            "cuda:0,1",
            4,
            FinwhaleError,
            "tensor_parallel_size is 4, but device 'cuda:0,1' names 2 GPUs: name one GPU for each "
            "rank",
        ),
        (
            "cuda:1",
            2,
            FinwhaleError,
            "tensor_parallel_size is 2, but device 'cuda:1' names 1 GPU: name one GPU for each "
            "rank",
        ),
        (
            "cuda:0,x",
            None,
            FinwhaleError,
            'device must be "cpu", "cuda", "cuda:N" or "cuda:N,N,...", got \'cuda:0,x\'',
        ),
    ],
)
def test_errors_on_two_gpus(
    gpus: Callable[[int], None],
    device: str | None,
    size: int | None,
    kind: type[FinwhaleError],
    wanted: str,
) -> None:
    gpus(2)
    with pytest.raises(kind) as caught:
        choose_devices(EngineConfig(device=device, tensor_parallel_size=size), never)
    assert str(caught.value) == wanted


def test_other_errors(gpus: Callable[[int], None]) -> None:
    gpus(8)
    with pytest.raises(FinwhaleError, match="1, 2, 4 or 8 GPUs, but device 'cuda:0,1,2' names 3"):
        choose_devices(EngineConfig(device="cuda:0,1,2"), never)
    with pytest.raises(FinwhaleError, match="must be one of 1, 2, 4, 8, got 3"):
        EngineConfig(tensor_parallel_size=3)
    with pytest.raises(FinwhaleError, match="names 2 GPUs instead of one"):
        choose_device("cuda:0,1")


def test_weights_that_do_not_fit_the_host_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("finwhale.engine.ranks.memory_checks.available_memory", lambda: 10**9)
    check_host_memory(10**9)
    with pytest.raises(ResourceError, match=r"take 2.5 GB, and 1.0 GB of memory are free"):
        check_host_memory(2_500_000_000)
    monkeypatch.setattr("finwhale.engine.ranks.memory_checks.available_memory", lambda: None)
    check_host_memory(10**15)


GIB = 2**30


def write_group(group: Path, limit: str, used: int, cached: int, version: int) -> None:
    """The files of a control group. `cached`: bytes of its page cache."""
    names = {1: ("limit_in_bytes", "usage_in_bytes"), 2: ("max", "current")}[version]
    group.mkdir(parents=True, exist_ok=True)
    for name, value in zip(names, (limit, used), strict=True):
        (group / f"memory.{name}").write_text(f"{value}\n")
    whole = "total_" if version == 1 else ""  # with the groups in this group
    stat = f"anon 7\n{whole}inactive_file {cached - 9}\n{whole}active_file 9\nshmem 5\n"
    (group / "memory.stat").write_text(stat if cached else "anon 7\n")


@pytest.mark.parametrize("version", [1, 2])
def test_memory_is_limited_by_control_groups(tmp_path: Path, version: int) -> None:
    assert available_memory(tmp_path) is None
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/meminfo").write_text(f"MemFree: 1 kB\nMemAvailable: {64 * 2**20} kB\n")
    assert available_memory(tmp_path) == 64 * GIB
    line = "4:cpu,memory:/pod/one" if version == 1 else "0::/pod/one"
    (tmp_path / "proc/self/cgroup").write_text(f"9:pids:/\n{line}\n")
    assert available_memory(tmp_path) == 64 * GIB  # the group's files are not there
    top = tmp_path / "sys/fs/cgroup" / ("memory" if version == 1 else "")
    no_limit = str(2**63 - 4096) if version == 1 else "max"
    write_group(top / "pod/one", no_limit, 3 * GIB, GIB, version)
    assert available_memory(tmp_path) == 64 * GIB
    write_group(top / "pod/one", str(8 * GIB), 3 * GIB, GIB, version)
    assert available_memory(tmp_path) == 6 * GIB
    write_group(top / "pod", str(9 * GIB), 5 * GIB, 0, version)
    assert available_memory(tmp_path) == 4 * GIB
    # In a container, its own group may be at the top.
    write_group(top, str(2 * GIB), 3 * GIB, 0, version)
    assert available_memory(tmp_path) == 0


def test_weights_that_do_not_fit_the_gpu_are_refused() -> None:
    check_gpu_memory(10**9, 10**9, 1)
    with pytest.raises(ResourceError, match=r"the weights take 2.5 GB, and 1.0 GB of the GPU may"):
        check_gpu_memory(2_500_000_000, 10**9, 1)
    with pytest.raises(ResourceError, match=r"weights of each of 2 ranks take 79.2 GB.*more GPUs"):
        check_gpu_memory(79_242_000_000, 78_000_000_000, 2)


def test_a_benchmark_writes_no_checkpoint_that_does_not_fit(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    config = published("flash").with_layers(1)
    args = Namespace(model=None, zeros=False)
    monkeypatch.setattr(load, "check_host_memory", lambda num_bytes: None)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=10**9))
    with pytest.raises(
        ResourceError, match=r"random weights take [\d.]+ GB, and 1.0 GB of .* are free"
    ):
        load._check_room(args, config, tmp_path, ["cpu"])
    args.model = str(tmp_path)  # nothing is to be written
    load._check_room(args, config, tmp_path, ["cpu"])

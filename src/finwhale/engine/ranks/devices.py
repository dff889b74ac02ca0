"""Chooses how many ranks share a model, and the device and dtype of each."""

import re
from collections.abc import Callable, Sequence

import torch

from finwhale.config import RANK_COUNTS, EngineConfig
from finwhale.distributed.rank import Rank
from finwhale.errors import FinwhaleError, ResourceError
from finwhale.models.protocol import ModelConfig
from finwhale.models.registry import architecture_of
from finwhale.ops import load_ops
from finwhale.platform import Platform

_COUNTS = f"{', '.join(map(str, RANK_COUNTS[:-1]))} or {RANK_COUNTS[-1]}"
_FORMS = 'device must be "cpu", "cuda", "cuda:N" or "cuda:N,N,..."'


def choose_devices(config: EngineConfig, fewest: Callable[[int], int]) -> tuple[str, ...]:
    """The device of each rank, as torch names it.

    Args:
        fewest: returns the number of ranks that the model needs, given the number of GPUs
            (fewest_ranks). It is called if the options do not say how many.

    Raises:
        FinwhaleError: the options contradict each other.
        ResourceError: a GPU does not exist.
    """
    size, given = config.num_ranks, config.device
    kind, indices = parse_device(given)
    if kind is None:
        kind = Platform.detect().device_type
    if kind == "cpu":
        return ("cpu",) * (size or 1)
    count = _num_gpus(given, indices)
    if indices:
        if size not in (None, len(indices)):
            raise FinwhaleError(
                f"{config.size_option} is {size}, but device {given!r} names "
                f"{_gpus(len(indices))}: name one GPU for each rank"
            )
        if len(indices) not in RANK_COUNTS:
            raise FinwhaleError(
                f"a model runs on {_COUNTS} GPUs, but device {given!r} names {len(indices)}"
            )
        return tuple(f"cuda:{index}" for index in indices)
    size = size or fewest(count)
    if size > count:
        raise ResourceError(f"{config.size_option} is {size}, but torch sees {_gpus(count)}")
    if size == 1:
        return (given or kind,)
    return tuple(f"cuda:{index}" for index in range(size))


def fewest_ranks(config: EngineConfig, model_config: ModelConfig, num_gpus: int) -> int:
    """The fewest GPUs that hold the model and leave a tenth of the allowed memory for the rest.

    All GPUs are taken to be as large as the first one. If all of them together are too small, the
    result is the largest number that can divide the model.
    """
    if num_gpus == 1:
        return 1
    platform, device = choose_device("cuda:0")
    ops = load_ops(platform, reference=config.reference, batch_invariant=config.batch_invariant)
    total = torch.cuda.get_device_properties(device).total_memory
    room = 0.9 * config.gpu_memory_utilization * total
    architecture, dtype = architecture_of(model_config), choose_dtype(config.dtype, platform)
    rounds = config.activations == "as-trained"
    most = 1
    for size in RANK_COUNTS:
        if size > num_gpus:
            break
        try:
            architecture.rank_config(model_config, Rank(0, size), round_activations=rounds)
        except FinwhaleError:
            continue
        most = size
        if architecture.weight_bytes(model_config, dtype, ops, Rank(0, size)) <= room:
            break
    return most


def device_kind(config: EngineConfig, size: int) -> str:
    """The kind of device ("cpu" or "cuda") of `size` ranks that a launcher has placed.

    Raises:
        FinwhaleError: the options contradict the launcher.
    """
    if size not in RANK_COUNTS:
        raise FinwhaleError(f"a model runs on {_COUNTS} ranks, but the launcher has placed {size}")
    if config.num_ranks not in (None, size):
        raise FinwhaleError(
            f"{config.size_option} is {config.num_ranks}, but the launcher has placed {size} "
            f"ranks: set it to {size}"
        )
    kind, indices = parse_device(config.device)
    if indices:
        raise FinwhaleError(
            f"device {config.device!r} names GPUs, but the launcher gives each rank its own: use "
            "CUDA_VISIBLE_DEVICES to choose the GPUs of a host"
        )
    return kind or Platform.detect().device_type


def parse_device(name: str | None) -> tuple[str | None, tuple[int, ...]]:
    """The kind of device (None: the name is None) and the indices of the named GPUs.

    Raises:
        FinwhaleError: the name has none of the known forms, or names a GPU twice among others.
    """
    if name is None:
        return None, ()
    found = re.fullmatch(r"cpu|cuda(?::(\d+(?:,\d+)*))?", name)
    if found is None:
        raise FinwhaleError(f"{_FORMS}, got {name!r}")
    indices = tuple(int(part) for part in (found[1] or "").split(",") if part)
    for index in indices:
        if indices.count(index) > 1 and len(set(indices)) > 1:
            raise FinwhaleError(
                f"device {name!r} names GPU {index} twice: name each GPU once, or only one for all "
                "ranks"
            )
    return name.partition(":")[0], indices


def num_sharers(name: str | None) -> int:
    """Number of ranks on each GPU of a device's name. More than one is for development."""
    _, indices = parse_device(name)
    return max(1, len(indices)) // max(1, len(set(indices)))


def choose_device(name: str | None) -> tuple[Platform, torch.device]:
    """The named device. None: a GPU if one exists, else the CPU.

    Raises:
        FinwhaleError: the name does not name exactly one device.
        ResourceError: the GPU does not exist.
    """
    kind, indices = parse_device(name)
    if len(indices) > 1:
        raise FinwhaleError(f"device {name!r} names {len(indices)} GPUs instead of one")
    kind = kind or Platform.detect().device_type
    if kind == "cpu":
        return Platform.cpu(), torch.device(kind)
    _num_gpus(name, indices)
    index = indices[0] if indices else 0
    return Platform.detect(index), torch.device(kind, index)


def choose_dtype(name: str | None, platform: Platform) -> torch.dtype:
    """The named dtype. None: the one that the platform's operators support."""
    if name is None:
        return torch.float32 if platform.vendor == "cpu" else torch.bfloat16
    return {"float32": torch.float32, "bfloat16": torch.bfloat16}[name]


def _num_gpus(name: str | None, indices: Sequence[int]) -> int:
    """The number of GPUs. Raises ResourceError if there is none, or a named one does not exist."""
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if count <= max(indices, default=0):
        raise ResourceError(f"device {name!r} is not available: torch sees {count} GPUs")
    return count


def _gpus(count: int) -> str:
    return "1 GPU" if count == 1 else f"{count} GPUs"

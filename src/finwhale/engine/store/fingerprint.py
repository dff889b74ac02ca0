"""What decides the bytes of cached pages. Servers share records only if all of it is equal."""

import hashlib
import json
import os
import platform
from collections.abc import Mapping, Sequence
from importlib.metadata import version

import torch

from finwhale.checkpoint.reader import Checkpoint
from finwhale.config import EngineConfig
from finwhale.engine.plan.executor import RankDescription
from finwhale.models.protocol import ModelConfig
from finwhale.models.registry import architecture_of

# Raise this when a change of the code changes the bits of a page, and keep the new digests in
# tests/process/test_numerics_version.py.
NUMERICS_VERSION = 4
DIGEST_BYTES = 16


def describe(
    config: EngineConfig,
    model_config: ModelConfig,
    checkpoint: Checkpoint | None,
    rank: RankDescription,
    page_bytes: Mapping[str, int],
    dtype: torch.dtype,
    packages: Sequence[str],
) -> dict[str, str]:
    """The parts of an engine's fingerprint, as people read them.

    Args:
        checkpoint: None: random weights.
        page_bytes: bytes of a page, by group.
        packages: the optional packages whose kernels the operators call, with versions.
    """
    device, library = torch.device(rank.device), "numpy"
    kind = f"{platform.machine()} {torch.backends.cpu.get_cpu_capability()}"
    if device.type == "cuda":
        kind, library = torch.cuda.get_device_name(device), "triton"
    libraries = f"torch {torch.__version__}", f"{library} {version(library)}", *packages
    others = architecture_of(model_config).OTHER_FILES
    ranks = str(rank.num_ranks) + " data-parallel" * (config.data_parallel_size > 1)
    return {
        "weights": "random" if checkpoint is None else weights_digest(checkpoint, others),
        "model": _digest(repr(model_config)),
        "pages": _digest(repr((rank.groups, sorted(page_bytes.items())))),
        "dtype": str(dtype).removeprefix("torch."),
        "activations": config.activations,
        "wo_a_input": config.wo_a_input,
        "operators": "reference" if config.reference else "compiled" if config.compile else "own",
        "ranks": "any" if config.batch_invariant else ranks,
        "batch_invariant": str(config.batch_invariant),
        "device": kind,
        "libraries": ", ".join(libraries),
        "numerics": str(NUMERICS_VERSION),
    }


def fingerprint(about: Mapping[str, str]) -> str:
    return _digest(json.dumps(about, sort_keys=True))


def weights_digest(checkpoint: Checkpoint, others: Sequence[str]) -> str:
    """A digest that differs between checkpoints. It has each file's name, size and time of change.
    A file of a hub's cache is named by the digest of its content, which takes the time's place.
    """
    files = []
    for name in sorted({info.file for info in checkpoint.tensors.values()}.union(others)):
        target = (checkpoint.path / name).resolve()
        found = target.stat()
        content = target.name if len(target.name) == 64 else str(found.st_mtime_ns)
        files.append((os.path.basename(name), found.st_size, content))
    return _digest(json.dumps([checkpoint.config, files], sort_keys=True))


def _digest(text: str) -> str:
    return hashlib.blake2b(text.encode(), digest_size=DIGEST_BYTES).hexdigest()

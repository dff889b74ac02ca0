"""Checks before a benchmark begins, so that a long run does not fail at its end."""

import argparse
import os
import shutil
from pathlib import Path

import torch

from finwhale.errors import ResourceError
from finwhale.platform import existing_folder

RECORD_BYTES = 10 * 2**20  # The largest record of this repository has 60 kB.


def record_path(text: str) -> Path:
    """The file of --record. Raises ArgumentTypeError if no record can be appended to it."""
    path = Path(text)
    folder = existing_folder(path.absolute().parent)
    if path.is_dir():
        raise argparse.ArgumentTypeError(f"{path} is a directory, not a file")
    if not folder.is_dir():
        raise argparse.ArgumentTypeError(f"{folder} is not a directory")
    if not os.access(path if path.exists() else folder, os.W_OK):
        raise argparse.ArgumentTypeError(f"{path} cannot be written: permission denied")
    if shutil.disk_usage(folder).free < RECORD_BYTES:
        raise argparse.ArgumentTypeError(f"the disk of {folder} is full")
    return path


def check_disk(folder: Path, num_bytes: float, what: str, remedy: str) -> None:
    """Raises ResourceError if `what`, which takes num_bytes, does not fit the folder's disk."""
    _check_room(num_bytes, shutil.disk_usage(folder).free, what, str(folder), remedy)


def check_gpu_memory(num_bytes: float, what: str, remedy: str) -> None:
    """Raises ResourceError if `what` does not fit the free memory of the current GPU."""
    _check_room(num_bytes, torch.cuda.mem_get_info()[0], what, "the GPU", remedy)


def _check_room(num_bytes: float, free: int, what: str, location: str, remedy: str) -> None:
    if num_bytes > free:
        raise ResourceError(
            f"{what} takes {num_bytes / 1e9:,.1f} GB, and {location} has "
            f"{free / 1e9:,.1f} GB free: {remedy}"
        )

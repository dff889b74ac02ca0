"""Frees a rank's memory while the engine sleeps or for good, and allocates it again."""

import gc
import tempfile
from collections.abc import Sequence

import torch

from finwhale.engine.ranks.local_executor import LocalExecutor
from finwhale.engine.ranks.memory_checks import check_disk, check_host_memory
from finwhale.ops.host_forms import forget_forms
from finwhale.weights.tree import tensors_of


def check_can_save(executor: LocalExecutor) -> None:
    """Check that there is room for the weights of all ranks of the host. Raises ResourceError."""
    num_bytes = executor.weights.ranks_on_host * executor.arenas["weights"].num_bytes
    drop = "or drop the weights (drop_weights, or level 2 of /sleep)"
    if executor.runner.device.type == "cuda":
        what = "the weights, which sleep saves in host memory,"
        check_host_memory(num_bytes, what, f"end other programs, {drop}")
    else:
        what = "the weights, which sleep saves in temporary files,"
        check_disk(tempfile.gettempdir(), num_bytes, what, f"set TMPDIR to a larger disk, {drop}")


def free_memory(executor: LocalExecutor, *, tags: Sequence[str], save_weights: bool) -> None:
    """Free memory.

    Args:
        tags: "weights", "cache" or both.
    """
    if "weights" in tags:
        for tensor in tensors_of(executor.runner.model.weights):
            forget_forms(tensor)
    for tag in tags:
        executor.arenas[tag].release(keep=save_weights and tag == "weights")
    gc.collect()
    if executor.runner.device.type == "cuda":
        torch.cuda.empty_cache()


@torch.inference_mode()
def free_for_good(executor: LocalExecutor) -> None:
    """Free the memory of an executor that is closed, whatever still refers to its tensors, such as
    the frames of a traceback.
    """
    runner, device = executor.runner, executor.runner.device
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    for tensor in (*tensors_of(runner.model.weights), *runner.cache.pages.values()):
        forget_forms(tensor)
        storage = tensor.untyped_storage()
        if storage.resizable():
            storage.resize_(0)
        else:  # memory that torch has not allocated, such as a file's
            tensor.set_()  # type: ignore[call-overload]
    for arena in executor.arenas.values():
        if arena.mapped:
            arena.release(keep=False)
    executor.release()
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def allocate_memory(executor: LocalExecutor, *, tags: Sequence[str]) -> None:
    """Allocate the memory again."""
    for tag in tags:
        executor.arenas[tag].restore()
    if "cache" in tags:
        for pages in executor.runner.cache.pages.values():
            pages.zero_()  # page 0, and rows that no step has written, must be finite

"""Updates an engine's weights from named tensors or from a checkpoint's directory."""

from collections.abc import Iterable, Iterator
from pathlib import Path

import torch
from torch import Tensor

from finwhale.engine.loop.engine import Engine, Requests
from finwhale.engine.rank.weight_update import Add, Begin, Commit, Discard, Prepare, Read
from finwhale.errors import EngineDeadError, RequestError

NamedTensors = Iterable[tuple[str, Tensor]]

# Tensors are sent to the processes of other ranks in messages of at most this size, or one tensor.
BUCKET_BYTES = 2**28


def update_weights(
    engine: Engine,
    source: str | Path | NamedTensors,
    *,
    partial: bool,
    requests: Requests,
) -> None:
    """Replace the weights (`LLM.update_weights`)."""
    if partial and isinstance(source, str | Path):
        raise RequestError("a directory holds all weights: leave out partial")
    engine.check_weights_can_change(partial)
    engine.on_ranks(Begin(partial))
    try:
        if isinstance(source, str | Path):
            engine.on_ranks(Read(Path(source)))
        else:
            for bucket in _buckets(source, alone=engine.executor.description.num_ranks == 1):
                engine.on_ranks(Add(bucket))
        engine.on_ranks(Prepare())
        engine.change_weights(Commit(), requests)
    except EngineDeadError:
        raise
    except BaseException:
        engine.on_ranks(Discard())
        raise


def _buckets(tensors: NamedTensors, *, alone: bool) -> Iterator[list[tuple[str, Tensor]]]:
    """Tensors in the form in which ranks take them, some at a time.

    Args:
        alone: the only rank is this process, which takes a tensor before the next one is made.
    """
    bucket: list[tuple[str, Tensor]] = []
    size = 0
    for item in tensors:
        if not (
            isinstance(item, tuple | list)
            and len(item) == 2
            and isinstance(item[0], str)
            and isinstance(item[1], Tensor)
        ):
            raise RequestError("the weights must be pairs of a name and a tensor")
        name, tensor = item[0], item[1].detach()
        if alone:
            yield [(name, tensor)]
            continue
        if bucket and size + tensor.nbytes > BUCKET_BYTES:
            yield bucket
            bucket, size = [], 0
        # A message holds a tensor's whole memory, of which the tensor may be a part, and the sender
        # may reuse that memory for the next tensor.
        copied = torch.empty(tensor.shape, dtype=tensor.dtype).copy_(tensor)
        bucket.append((name, copied))
        size += tensor.nbytes
    if bucket:
        yield bucket

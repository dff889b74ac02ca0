"""A check of new collectives: compares their results for known tensors with the references."""

from functools import partial

import torch
from torch import Tensor

from finwhale.distributed import ref
from finwhale.distributed.collectives import Collectives
from finwhale.errors import FinwhaleError

# Numbers of elements, one for each algorithm of Push. They are multiples of 32 like the model's
# messages, so that no other kernels are compiled.
WIDTH = 32
LENGTHS = (WIDTH, 2**12 + WIDTH, 2**18, 2**20 + WIDTH)
# Numbers of rows with one candidate each; ranks exchange candidates when they sample. Triton
# compiles one kernel if each row has a multiple of 8 candidates (LENGTHS use it, too), one if only
# all rows together do, and one for other numbers.
ROWS = (1, 8)
# Exchanges beside other work: values of a row, and the most bytes of a rank that are checked.
ROW, MOST_BESIDE = 1024, 2**24


def self_check(collectives: Collectives, device: torch.device) -> None:
    """Gather and sum tensors that every rank knows. All ranks call this at once.

    The buffers of `Push` are poisoned at first, so that missing words cannot look right.

    Raises:
        FinwhaleError: this rank received wrong values; names the rank that sent them.
        EngineDeadError: a rank was missing.
    """
    rank = collectives.rank
    for length in LENGTHS:
        known = [_known(index, length, device) for index in range(rank.size)]
        gathered = collectives.all_gather(known[rank.index], 0)
        for sender, part in enumerate(gathered.split(length)):
            _compare(collectives, part, known[sender], f"rank {sender}")
        for dtype in (torch.float32, torch.bfloat16):
            for sender in range(rank.size):
                # Only one rank's x is not 0, so that a wrong sum names it.
                parts = [x if p == sender else torch.zeros_like(x) for p, x in enumerate(known)]
                parts = [part.to(dtype) for part in parts]
                total = collectives.all_reduce(parts[rank.index])
                _compare(collectives, total, ref.all_reduce(parts), f"rank {sender}")
            parts = [part.to(dtype) for part in known]
            wanted = ref.all_reduce(parts)
            total = collectives.all_reduce(parts[rank.index])
            _compare(collectives, total, wanted, "all ranks")
            rows = collectives.reduce_scatter_rows(parts[rank.index].view(-1, WIDTH))
            wanted = wanted.view(-1, WIDTH)
            _compare(collectives, rows, wanted[rank.rows(len(wanted))], "all ranks")
            whole = collectives.all_gather_rows(rows, len(wanted))
            _compare(collectives, whole, wanted, "all ranks")
    if collectives.beside_bytes <= MOST_BESIDE:
        _check_beside(collectives, device)
    if rank.data_parallel:
        sent = [[_known(i, length, device) for length in (WIDTH, 3, 5)] for i in range(rank.size)]
        for number, whole in enumerate(collectives.all_gather_each(sent[rank.index])):
            for sender, part in enumerate(whole.chunk(rank.size)):
                _compare(collectives, part, sent[sender][number], f"rank {sender}")
    for num_rows in ROWS:
        known = [_known(index, num_rows, device).long()[:, None] for index in range(rank.size)]
        gathered = collectives.all_gather(known[rank.index], 1)
        for sender, column in enumerate(gathered.split(1, 1)):
            _compare(collectives, column, known[sender], f"rank {sender}")


def _check_beside(collectives: Collectives, device: torch.device) -> None:
    """Check the exchanges of the fewest rows that run beside other work."""
    rank = collectives.rank
    num_rows = rank.size * max(1, collectives.beside_bytes // (2 * ROW))
    shape = num_rows, ROW
    for dtype in (torch.float32, torch.bfloat16):
        parts = [_known(p, num_rows * ROW, device).view(shape).to(dtype) for p in range(rank.size)]
        own = rank.rows(num_rows)
        gathered = collectives.start_all_gather_rows(parts[0][own], num_rows, "experts")
        _compare(collectives, gathered(), parts[0], "all ranks")
        of_ranks = [parts[rank.index][rank.rows(num_rows, index)] for index in range(rank.size)]
        add = partial(_rows_of, of_ranks)
        total = collectives.reduce_scatter_parts(add, shape, dtype)
        _compare(collectives, total, ref.all_reduce(parts)[own], "all ranks")


def _rows_of(of_ranks: list[Tensor], index: int, some: slice) -> Tensor:
    return of_ranks[index][some]


def _known(index: int, length: int, device: torch.device) -> Tensor:
    """Integers other than 0 that bfloat16 can represent and that differ between the ranks."""
    return (torch.arange(length, device=device) * (2 * index + 3) % 127 + index + 1).float()


def _compare(collectives: Collectives, found: Tensor, wanted: Tensor, sender: str) -> None:
    equal = torch.equal(found, wanted)
    collectives.check()
    if not equal:
        differ = int((found != wanted).sum())
        raise FinwhaleError(
            f"self-check of the ranks' communication: rank {collectives.rank.index} received "
            f"{differ} of {found.numel()} wrong values from {sender}"
        )

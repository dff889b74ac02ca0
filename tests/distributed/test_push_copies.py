"""The protocol of `push_copies.py` under random schedules, in plain Python without kernels.

Each rank is a thread, and one thread runs at a time. A queue holds the copies of a rank, as its
CUDA stream does. They happen in order, at any time before the rank itself waits for them.
"""

import itertools
import random
import threading
from collections import defaultdict, deque
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from finwhale.distributed import ref

pytest.importorskip("triton", reason="needs triton, which is installed with the GPU packages")

from finwhale.distributed.push_copies import Copies
from finwhale.distributed.rank import Rank

LAYERS, ROWS, WIDTH = 3, 13, 4
CPU = torch.device("cpu")


class Schedule:
    """Lets one of several threads run, and changes it, or makes a copy, at random."""

    def __init__(self, size: int, seed: int) -> None:
        self.random = random.Random(seed)
        self.queues = [deque[Callable[[], Any]]() for _ in range(size)]
        self.change = threading.Condition()
        self.running = set(range(size))
        self.turn = self.idle = 0
        self.failure: BaseException | None = None

    def run(self, work: Callable[[int], None]) -> None:
        def thread(index: int) -> None:
            try:
                self._await_turn(index)
                work(index)
            except BaseException as error:
                self.failure = self.failure or error
            with self.change:
                self.running.discard(index)
                self._choose()

        threads = [threading.Thread(target=thread, args=(i,)) for i in range(len(self.queues))]
        for each in threads:
            each.start()
        for each in threads:
            each.join()
        if self.failure is not None:
            raise self.failure

    def step(self, index: int, blocked: bool = False) -> None:
        """Another thread may run, and some copies may be made; blocked: this one cannot go on."""
        self.idle = self.idle + 1 if blocked else 0
        assert self.idle < 1000, "no rank can go on"
        assert self.failure is None, "another rank has failed"
        for queue in self.queues:
            while queue and self.random.random() < 0.3:
                queue.popleft()()
        with self.change:
            self._choose()
        self._await_turn(index)

    def _choose(self) -> None:
        if self.running:
            self.turn = self.random.choice(sorted(self.running))
        self.change.notify_all()

    def _await_turn(self, index: int) -> None:
        with self.change:
            self.change.wait_for(lambda: self.turn == index)


class Scheduled(Copies):
    """Copies that a Schedule makes; a wait is a loop."""

    schedule: Schedule

    def _send(self, x: Tensor, *where: Any) -> None:
        send = super()._send
        self.schedule.queues[self._rank.index].append(lambda: send(x, *where))
        self.schedule.step(self._rank.index)

    def _raise_flag(self, *where: Any) -> None:
        raise_flag = super()._raise_flag
        self.schedule.queues[self._rank.index].append(lambda: raise_flag(*where))
        self.schedule.step(self._rank.index)

    def _arrive(self, reader: str) -> None:
        index, flags = self._rank.index, self._flags(reader, self._rank.index)
        while self.schedule.queues[index] or not flags.all():
            self.schedule.step(index, blocked=not self.schedule.queues[index])
        flags[self._rank.others()] = 0


def values(rank: int, layer: int, kind: int) -> Tensor:
    """A rank's rows [ROWS, WIDTH] of one exchange."""
    return torch.arange(ROWS * WIDTH).view(ROWS, WIDTH) + 1000.0 * (rank + 8 * (kind + 4 * layer))


@pytest.fixture
def plain_sum(monkeypatch: pytest.MonkeyPatch) -> None:
    def sum_landed(
        x: Tensor, out: Tensor, landed: Tensor, part: int, rank: int, size: int, early: bool
    ) -> None:
        words = x.numel()
        parts = [landed[i * part :][:words].view(torch.float32).view_as(x) for i in range(size)]
        out.copy_(ref.all_reduce([x if i == rank else part for i, part in enumerate(parts)]))

    monkeypatch.setattr("finwhale.distributed.push_triton.sum_landed", sum_landed)


def copies(size: int, seed: int) -> list[Scheduled]:
    """Copies of several ranks, whose memory all of them have reserved."""
    memories, schedule = defaultdict[int, list[Tensor]](list), Schedule(size, seed)
    made = []
    for index in range(size):
        numbers = itertools.count()

        def allocate(num_bytes: int, numbers: Iterator[int] = numbers) -> list[Tensor]:
            shared = memories[next(numbers)]
            if not shared:
                shared += [torch.empty(num_bytes, dtype=torch.uint8) for _ in range(size)]
            return shared

        one = Scheduled(Rank(index, size), CPU, allocate, lambda: None, torch.ones(1), 0)
        one.schedule = schedule
        for reader in ("compressor", "window", "experts", "sum"):
            assert one.reserve(reader, size * 4 * WIDTH * -(-ROWS // size))
        made.append(one)
    return made


def layer(made: Scheduled, number: int) -> None:
    """The exchanges of a decoder layer, in the order of the model; each result is read late."""
    rank, size, step = made._rank, made._rank.size, made.schedule.step

    def whole(kind: int) -> Tensor:
        return torch.cat([values(i, number, kind)[Rank(i, size).rows(ROWS)] for i in range(size)])

    def own(kind: int) -> Tensor:
        return values(rank.index, number, kind)[rank.rows(ROWS)].clone()

    window = made.start_all_gather_rows(own(1), ROWS, "window")
    entries = made.start_all_gather_rows(own(0), ROWS, "compressor")
    found = [entries(), window()]
    step(rank.index)
    assert torch.equal(found[0], whole(0)) and torch.equal(found[1], whole(1))
    gathered = made.start_all_gather_rows(own(2), ROWS, "experts")
    step(rank.index)
    x = gathered()

    def part(index: int, some: slice) -> Tensor:
        step(rank.index)
        assert torch.equal(x, whole(2))
        return values(rank.index, number, 3)[rank.rows(ROWS, index)][some].clone()

    total = made.reduce_scatter_parts(part, ROWS, 4 * WIDTH, False)
    wanted = ref.all_reduce([values(i, number, 3)[rank.rows(ROWS)] for i in range(size)])
    assert torch.equal(total, wanted)


@pytest.mark.parametrize("size", (2, 4))
def test_no_schedule_loses_or_overwrites_rows(size: int, plain_sum: None) -> None:
    for seed in range(12):
        made = copies(size, seed)

        def layers(index: int, made: list[Scheduled] = made) -> None:
            for number in range(LAYERS):
                layer(made[index], number)

        made[0].schedule.run(layers)


def test_a_reader_that_sends_again_at_once_is_found(plain_sum: None) -> None:
    """The test above can fail: this breaks the rule of `Collectives.start_all_gather_rows`."""

    def twice(made: Scheduled) -> None:
        for number in range(4):
            own = values(made._rank.index, number, 0)[made._rank.rows(ROWS)].clone()
            found = made.start_all_gather_rows(own, ROWS, "experts")()
            made.schedule.step(made._rank.index)
            for i in range(made._rank.size):
                rows = Rank(i, made._rank.size).rows(ROWS)
                assert torch.equal(found[rows], values(i, number, 0)[rows])

    def fails(seed: int) -> bool:
        made = copies(2, seed)
        try:
            made[0].schedule.run(lambda index: twice(made[index]))
        except AssertionError:
            return True
        return False

    assert any(map(fails, range(8)))

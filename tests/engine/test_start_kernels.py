"""The order in which ranks build and load kernels at a start."""

import threading
from types import SimpleNamespace
from typing import Any

import pytest
from torch._C._distributed_c10d import HashStore

from finwhale.distributed.peers import Peers
from finwhale.distributed.rank import Rank
from finwhale.engine.start.kernels import Kernels
from finwhale.ops.builds import Built


class Builds:
    """Tells when `prepare` begins, and ends it when it is told to."""

    def __init__(self, complete: bool) -> None:
        self.complete = complete
        self.begun, self.may_end = threading.Event(), threading.Event()

    def is_complete(self, configuration: object) -> bool:
        return self.complete

    def prepare(self, configuration: object, launch_all: object) -> Built:
        self.begun.set()
        assert self.may_end.wait(10)
        return Built(kernels=3)


@pytest.mark.parametrize("complete", [(True, True), (False, False), (True, False)])
def test_ranks_wait_for_rank_0_if_kernels_are_missing(
    complete: tuple[bool, bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Kernels, "_every_launch", lambda *args: None)
    store, builds, found = HashStore(), [Builds(one) for one in complete], list[Built]()

    def prepare(index: int) -> None:
        rank: Any = object.__new__(Kernels)
        rank._chosen = SimpleNamespace(build_configuration=lambda max_len: max_len)
        rank._peers, rank.builds = Peers(Rank(index, 2), store), builds[index]
        found.append(rank.prepare(None, 100))

    threads = [threading.Thread(target=prepare, args=(index,)) for index in range(2)]
    for thread in threads:
        thread.start()
    assert builds[0].begun.wait(10)
    assert builds[1].begun.wait(10 if all(complete) else 0.1) is all(complete)
    for one in builds:
        one.may_end.set()
    for thread in threads:
        thread.join(10)
    assert found == [Built(kernels=3)] * 2

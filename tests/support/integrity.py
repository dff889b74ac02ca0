"""Checks that an engine has lost no page, block or sequence."""

from collections.abc import Mapping, Sequence

from finwhale.engine.loop.engine import Engine
from finwhale.engine.plan.admission import Admission, in_order
from finwhale.engine.plan.pages import BlockTables, PageManager, PagePool
from finwhale.engine.plan.prefix_index import Block, PrefixIndex
from finwhale.engine.plan.scheduler import Scheduler
from finwhale.engine.plan.stored_prefixes import Load


def check_engine(engine: Engine) -> None:
    for lane in engine.lanes:
        scheduler, streams = lane.scheduler, lane.outputs.streams
        check_scheduler(scheduler)
        assert streams or not lane.in_flight
        assert len(streams) == len(scheduler.running) + scheduler.num_waiting
        assert lane.outputs.requests or not lane.outputs.work
    assert any(lane.in_flight for lane in engine.lanes) or not engine._loop.in_flight


def check_scheduler(scheduler: Scheduler) -> None:
    running = scheduler.running
    cached: dict[str, list[int]] | None = None
    if scheduler.prefix is not None:
        chains = [s.blocks for s in running]
        cached = {group.name: [] for group in scheduler.pages.groups}
        blocks = scheduler.prefix.blocks.values()
        held = [part for block in blocks for part in (block.pages, block.state or {})]
        if (stored := scheduler.admission.stored) is not None:
            chains += [load.chain for load in stored.loads]
            chains += [flush.chain for flush in stored.flushes]
            held += [pages for _, pages, _ in stored._saves]
            held += [pages for load in stored.loads for pages, _ in load.parts]
        for part in held:
            for name, numbers in part.items():
                cached[name] += numbers
        check_prefixes(scheduler.prefix, chains)
    check_pages(scheduler.pages, [s.tables for s in running], cached)
    slots = [s.slot for s in running]
    assert sorted(slots + scheduler._free_slots) == list(range(scheduler.sizes.num_seqs))
    assert running == sorted(running, key=in_order)
    check_admission(scheduler.admission)


def check_admission(admission: Admission) -> None:
    """The queue is in order, and every follower has a leader that runs or loads."""
    waiting, followers = admission.waiting, admission.followers
    assert waiting == sorted(waiting, key=in_order)
    for sequence in (*waiting, *(s for some in followers.values() for s in some)):
        assert not sequence.running and not sequence.blocks and not sequence.num_computed
        assert sequence.slot == -1
    assert followers.keys() <= admission._leaders.keys()
    for key, leader in admission._leaders.items():
        if isinstance(leader, Load):
            assert key in leader.keys
        else:
            assert leader.running and key in leader.keys[len(leader.blocks) :]


def check_pages(
    pages: PageManager,
    live: Sequence[BlockTables],
    cached: Mapping[str, Sequence[int]] | None = None,
) -> None:
    """All references come from the tables `live` and the prefix cache's pages."""
    for group in pages.groups:
        used = [page for tables in live for page in tables[group.name].pages if page]
        used += (cached or {}).get(group.name, ())
        _check_pool(pages.pools[group.name], used, group.name)


def _check_pool(pool: PagePool, used: Sequence[int], name: str) -> None:
    """`used` lists each page once for each reference, and the rest is free."""
    counts = [0] * pool.num_pages
    for page in used:
        counts[page] += 1
    assert counts[0] == 0
    assert counts == pool.references, f"reference counts of {name} pages are wrong"
    free = [page for page in range(1, pool.num_pages) if not counts[page]]
    assert sorted(pool._free) == free, f"free list of {name} pages is wrong"


def check_prefixes(prefix: PrefixIndex, chains: Sequence[Sequence[Block]]) -> None:
    """Only `chains` use the blocks, and the eviction order is valid."""
    users: dict[bytes, int] = dict.fromkeys(prefix.blocks, 0)
    for chain in chains:
        for parent, block in zip([None, *chain], chain, strict=False):
            assert block.parent is parent and prefix.blocks.get(block.key) is block
            users[block.key] += 1
    order = {key: index for index, key in enumerate(prefix._idle)}
    assert set(order) == {key for key, count in users.items() if not count}
    for key, block in prefix.blocks.items():
        assert block.key == key and block.users == users[key], "a block's users are miscounted"
        if block.parent is not None:
            assert prefix.blocks.get(block.parent.key) is block.parent, "a block lost its parent"
            assert block.parent.key not in order or order[key] < order[block.parent.key]
    with_state = {key for key, block in prefix.blocks.items() if block.state}
    assert not prefix._passed.keys() & prefix._lasting.keys()
    assert prefix._passed.keys() | prefix._lasting.keys() == with_state

"""Run an engine until it is idle, and check its integrity after each step."""

from tests.support.integrity import check_engine

from finwhale.engine.loop.engine import Engine


def run_until_idle(engine: Engine) -> None:
    while engine.has_work:
        engine.step()
        check_engine(engine)


def assert_idle(engine: Engine) -> None:
    check_engine(engine)
    assert not engine.has_work
    engine.reset_prefix_cache()
    for pool in engine.scheduler.pages.pools.values():
        assert pool.num_free == pool.num_pages - 1

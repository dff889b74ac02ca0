"""Run an engine until it is idle, and check its integrity after each step."""

from finwhale.engine.loop.engine import Engine


def run_until_idle(engine: Engine) -> None:
    while engine.has_work:
        engine.step()
        engine.check_integrity()


def assert_idle(engine: Engine) -> None:
    engine.check_integrity()
    assert not engine.has_work
    engine.reset_prefix_cache()
    for pool in engine.scheduler.pages.pools.values():
        assert pool.num_free == pool.num_pages - 1

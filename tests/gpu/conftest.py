"""How `just gpu` divides the tests among processes that share a GPU."""

from pathlib import Path
from typing import Any

import pytest
from xdist.scheduler import LoadScopeScheduling  # type: ignore[import-untyped]

# Files whose tests share no fixture. The tests of any other file share engines.
INDEPENDENT = {
    "test_experts",
    "test_rank_sizes",
    "test_rounded_attention",
    "test_sampling",
    "test_v41_attention",
    "test_v41_gemm",
}


class SharedFixturesTogether(LoadScopeScheduling):  # type: ignore[misc]
    """Runs the tests of a file in one process if they share fixtures."""

    def _split_scope(self, nodeid: str) -> str:
        file = nodeid.partition("::")[0]
        return nodeid if Path(file).stem in INDEPENDENT else file


@pytest.hookimpl
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> LoadScopeScheduling | None:
    """Replaces xdist's scheduler of `--dist loadfile`."""
    return SharedFixturesTogether(config, log) if config.getvalue("dist") == "loadfile" else None

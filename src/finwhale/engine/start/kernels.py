"""Builds the kernels of a rank's steps before any step launches them."""

from typing import Any

from finwhale.distributed.collectives import Collectives
from finwhale.engine.start.decisions import Decisions
from finwhale.engine.start.launch_signatures import LaunchEnumerator
from finwhale.engine.start.memory import LargestSteps
from finwhale.models.protocol import Model
from finwhale.ops.builds import Built, load_builds
from finwhale.weights.assembler import Assembler


class Kernels:
    """The kernels of one rank. If some are missing, rank 0 builds them before the others load."""

    def __init__(self, decisions: Decisions) -> None:
        self._chosen, self._peers = decisions, decisions.peers
        cache = decisions.config.cache_dir
        self.builds = load_builds(
            decisions.ops,
            decisions.platform,
            decisions.device.index or 0,
            None if cache is None else str(cache),
        )
        if not self._peers.rank.index:
            self.builds.expect(decisions.build_configuration(decisions.longest))

    def begin(self, unfilled: Assembler[Any], collectives: Collectives) -> None:
        """Compile missing kernels while the GPU's memory is free.

        Args:
            unfilled: the weights on torch's meta device.
        """
        chosen = self._chosen

        def launch_all() -> None:
            weights = unfilled.finish_unfilled()
            model, _ = chosen.build_model(weights, chosen.longest, collectives)
            self._every_launch(model, chosen.longest)()

        if chosen.capabilities.builds_kernels and not self._peers.rank.index:
            self.builds.begin(chosen.build_configuration(chosen.longest), launch_all)

    def prepare(self, model: Model, max_len: int) -> Built:
        """Build and load every kernel that a request may use, of sequences up to max_len tokens."""
        peers, configuration = self._peers, self._chosen.build_configuration(max_len)
        missing = not peers.minimum(int(self.builds.is_complete(configuration)))
        if missing and peers.rank.index:
            peers.barrier()
        built = self.builds.prepare(configuration, self._every_launch(model, max_len))
        if missing and not peers.rank.index:
            peers.barrier()
        return built

    def _every_launch(self, model: Model, max_len: int) -> LaunchEnumerator:
        groups, ops = self._chosen.groups, self._chosen.ops
        cache = LargestSteps.alone(model, groups, ops).cache
        return LaunchEnumerator(model, groups, ops, cache, self._chosen.step_limits(max_len))

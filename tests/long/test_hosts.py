"""torchrun with two node agents on loopback: a request over HTTP, and the loss of a rank."""

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.support.tiny import divisible_config, random_weights, write_plain_checkpoint

from .servers import (
    Program,
    complete,
    descendants,
    free_ports,
    is_ready,
    is_there,
    python,
    wait_for,
)

OPTIONS = ("--device", "cpu", "--activations", "exact")
RENDEZVOUS = {
    1: ("--master-addr", "127.0.0.1", "--master-port", "{port}", "--node-rank", "{node}"),
    2: ("--rdzv-backend", "c10d", "--rdzv-endpoint", "127.0.0.1:{port}", "--rdzv-id", "test"),
}
ENDED_S = 10


class Cluster:
    """`finwhale serve` on two node agents of torchrun with `per_node` ranks each."""

    def __init__(self, path: Path, logs: Path, per_node: int) -> None:
        rendezvous, self.port = free_ports(2)
        self.agents = [
            Program(
                python(
                    *("-m", "torch.distributed.run", "--nnodes", "2"),
                    *("--nproc-per-node", str(per_node), "--local-addr", "127.0.0.1"),
                    *(word.format(port=rendezvous, node=node) for word in RENDEZVOUS[per_node]),
                    *("-m", "finwhale", "serve", str(path), "--port", str(self.port), *OPTIONS),
                ),
                logs / f"node{node}.log",
                {"OMP_NUM_THREADS": "1"},
            )
            for node in range(2)
        ]
        wait_for(lambda: is_ready(self.port) or self.ended(), 120, self.agents)
        assert not self.ended(), self.output()

    def ended(self) -> bool:
        return any(agent.process.poll() is not None for agent in self.agents)

    def output(self) -> str:
        return "\n".join(agent.output for agent in self.agents)

    def processes(self, node: int) -> list[int]:
        return descendants(self.agents[node].process.pid)

    def all_processes(self) -> list[int]:
        return [pid for node in range(2) for pid in self.processes(node)]

    def close(self) -> None:
        for agent in self.agents:
            agent.close()


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path, config = tmp_path_factory.mktemp("hosts") / "model", divisible_config() | {"o_groups": 4}
    write_plain_checkpoint(path, config, random_weights(config, 3))
    return path


@pytest.fixture(scope="module")
def expected(path: Path, tmp_path_factory: pytest.TempPathFactory) -> str:
    """The tokens of one rank."""
    (port,) = free_ports(1)
    arguments = python("-m", "finwhale", "serve", str(path), "--port", str(port), *OPTIONS)
    alone = Program(arguments, tmp_path_factory.mktemp("alone") / "log")
    try:
        wait_for(lambda: is_ready(port), 120, [alone])
        return complete(port, [5, 6, 7])
    finally:
        alone.close()


@pytest.fixture(params=[1, 2], ids=["2x1", "2x2"])
def cluster(request: pytest.FixtureRequest, path: Path, tmp_path: Path) -> Iterator[Cluster]:
    cluster = Cluster(path, tmp_path, request.param)
    yield cluster
    cluster.close()


def test_a_request_and_the_loss_of_a_rank(cluster: Cluster, expected: str) -> None:
    assert complete(cluster.port, [5, 6, 7]) == expected
    processes = cluster.all_processes()
    os.kill(cluster.processes(1)[-1], signal.SIGKILL)
    began = time.monotonic()
    wait_for(lambda: not any(map(is_there, processes)), 40, cluster.agents)
    assert time.monotonic() - began < ENDED_S
    assert "of " in cluster.output() and "the connection to it is lost" in cluster.output()
    codes = [agent.process.wait(ENDED_S) for agent in cluster.agents]
    assert all(codes), codes


@pytest.mark.parametrize("cluster", [1], indirect=True)
def test_sigterm_ends_everything_in_good_order(cluster: Cluster) -> None:
    processes = cluster.all_processes()
    server = cluster.processes(0)[0]
    os.kill(server, signal.SIGTERM)
    wait_for(lambda: not any(map(is_there, processes)), 40, cluster.agents)
    codes = [agent.process.wait(ENDED_S) for agent in cluster.agents]
    assert codes == [0, 0], cluster.output()


@pytest.mark.parametrize("cluster", [1], indirect=True)
@pytest.mark.parametrize("victim", ["agent of rank 0", "engine"])
def test_the_loss_of_rank_0_ends_the_ranks_of_other_hosts(cluster: Cluster, victim: str) -> None:
    processes = cluster.all_processes()
    if victim == "engine":
        for pid in descendants(cluster.processes(0)[0]):
            os.kill(pid, signal.SIGKILL)
    else:
        for pid in (cluster.agents[0].process.pid, *cluster.processes(0)):
            os.kill(pid, signal.SIGKILL)
    wait_for(lambda: not any(map(is_there, processes)), 40, cluster.agents)
    assert cluster.agents[1].process.wait(ENDED_S) != 0

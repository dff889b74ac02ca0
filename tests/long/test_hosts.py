"""torchrun with two node agents on loopback: a request over HTTP, and the loss of a rank."""

import os
import re
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import openai
import pytest
from tests.support.tiny import divisible_config, random_weights, write_plain_checkpoint

from finwhale import LLM, SamplingParams

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
PROMPTS = [[5, 6, 7], [9] * 140, [8, 8], [33, 12, 4]]
LONGEST = 300  # tokens, which take seconds
CLUSTERS = [(1, "tensor"), (2, "tensor"), (1, "data"), (2, "data")]
SMALL = [(1, "tensor"), (1, "data")]


class Cluster:
    """`finwhale serve` on two node agents of torchrun with `per_node` ranks each.

    Args:
        kind: "tensor" or "data": how the ranks share the model.
    """

    def __init__(self, path: Path, logs: Path, per_node: int, kind: str) -> None:
        self.size, self.kind = 2 * per_node, kind
        more = ("--data-parallel-size", str(self.size)) if kind == "data" else ()
        rendezvous, self.port = free_ports(2)
        self.agents = [
            Program(
                python(
                    *("-m", "torch.distributed.run", "--nnodes", "2"),
                    *("--nproc-per-node", str(per_node), "--local-addr", "127.0.0.1"),
                    *(word.format(port=rendezvous, node=node) for word in RENDEZVOUS[per_node]),
                    *(
                        "-m",
                        "finwhale",
                        "serve",
                        str(path),
                        "--port",
                        str(self.port),
                        *OPTIONS,
                        *more,
                    ),
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

    def process_of(self, rank: int) -> int:
        variable = f"RANK={rank}".encode()
        return next(
            pid
            for pid in self.all_processes()
            if variable in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
        )

    def close(self) -> None:
        for agent in self.agents:
            agent.close()


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path, config = tmp_path_factory.mktemp("hosts") / "model", divisible_config() | {"o_groups": 4}
    write_plain_checkpoint(path, config, random_weights(config, 3))
    return path


@pytest.fixture(params=CLUSTERS, ids=lambda one: f"2x{one[0]}-{one[1]}")
def cluster(request: pytest.FixtureRequest, path: Path, tmp_path: Path) -> Iterator[Cluster]:
    cluster = Cluster(path, tmp_path, *request.param)
    yield cluster
    cluster.close()


def expected(path: Path, cluster: Cluster) -> list[list[int]]:
    """The tokens of one rank, or of as many lanes of an engine that starts its ranks itself."""
    lanes = cluster.size if cluster.kind == "data" else 1
    params = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True)
    with LLM(path, device="cpu", activations="exact", data_parallel_size=lanes) as llm:
        return [one.outputs[0].token_ids for one in llm.generate(PROMPTS, params)]


def test_requests_and_the_loss_of_a_rank(cluster: Cluster, path: Path) -> None:
    with ThreadPoolExecutor(len(PROMPTS)) as pool:
        found = list(pool.map(partial(complete, cluster.port), PROMPTS))
        assert found == expected(path, cluster)
        running = [pool.submit(complete, cluster.port, one, LONGEST) for one in PROMPTS]
        time.sleep(0.5)
        processes, last = cluster.all_processes(), cluster.size - 1
        os.kill(cluster.process_of(last), signal.SIGKILL)
        began = time.monotonic()
        wait_for(lambda: not any(map(is_there, processes)), 40, cluster.agents)
        assert time.monotonic() - began < ENDED_S
        assert all(isinstance(one.exception(), openai.APIError) for one in running)
    message = rf"rank {last} \(cpu of \S+\) has ended, or the connection to it is lost"
    assert re.search(message, cluster.output()), cluster.output()
    codes = [agent.process.wait(ENDED_S) for agent in cluster.agents]
    assert all(codes), codes


@pytest.mark.parametrize("cluster", SMALL, indirect=True)
def test_sigterm_ends_everything_in_good_order(cluster: Cluster) -> None:
    processes = cluster.all_processes()
    server = cluster.processes(0)[0]
    os.kill(server, signal.SIGTERM)
    wait_for(lambda: not any(map(is_there, processes)), 40, cluster.agents)
    codes = [agent.process.wait(ENDED_S) for agent in cluster.agents]
    assert codes == [0, 0], cluster.output()


@pytest.mark.parametrize("cluster", SMALL, indirect=True)
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

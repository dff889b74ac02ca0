"""What test_ray.py runs where Ray is installed: `python on_ray.py PATH generate|kill|"too few"`."""

import os
import signal
import sys
import time

import ray
from ray.cluster_utils import Cluster

from finwhale import LLM, EngineDeadError, FinwhaleError, SamplingParams
from finwhale.distributed import ray_actors
from finwhale.engine.ranks.ranks import Ranks

PROMPTS = [[5, 6, 7], [9] * 140]
GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)


def main(path: str, how: str) -> None:
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1})
    if how != "too few":
        cluster.add_node(num_cpus=1)
    ray.init(address=cluster.address)
    if how == "too few":
        vars(ray_actors).update(CONNECT_S=3.0)
    try:
        llm = LLM(
            path,
            device="cpu",
            activations="exact",
            max_num_seqs=4,
            tensor_parallel_size=2,
            distributed_executor="ray",
        )
    except FinwhaleError as error:
        assert how == "too few" and "has not placed the ranks" in str(error), error
        return
    assert how != "too few"
    states = ray.available_resources()
    print("hosts", sum(1 for node in ray.nodes() if node["Alive"]), flush=True)
    assert states.get("CPU", 0) == 0, states  # both nodes are full
    results = llm.generate(PROMPTS, GREEDY)
    print("tokens", [result.outputs[0].token_ids for result in results], flush=True)
    executor = llm._engine.executor
    assert isinstance(executor, Ranks)
    if how == "kill":
        kill(llm, executor)
    executor.close()
    end = time.monotonic() + 10
    while ray.available_resources().get("CPU", 0) != 2:
        assert time.monotonic() < end, "the placement group is still there"
        time.sleep(0.1)


def kill(llm: LLM, executor: Ranks) -> None:
    began = time.monotonic()
    os.kill(executor.workers.states()[0].process.pid, signal.SIGKILL)
    try:
        llm.generate(PROMPTS, GREEDY)
    except EngineDeadError as error:
        assert "rank 1 (cpu of " in str(error), error
        assert time.monotonic() - began < 10
    else:
        raise AssertionError("the loss of a rank went unnoticed")


if __name__ == "__main__":
    main(*sys.argv[1:])

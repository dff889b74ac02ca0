"""What test_ray.py runs where Ray is installed, on two nodes:

python on_ray.py PATH tensor|data SIZE generate|kill|"too few"
"""

import os
import signal
import sys
import threading
import time
from dataclasses import replace

import ray
from ray.cluster_utils import Cluster

from finwhale import LLM, EngineDeadError, FinwhaleError, SamplingParams
from finwhale.distributed import ray_actors
from finwhale.engine.ranks.ranks import Ranks

PROMPTS = [[5, 6, 7], [9] * 140, [8, 8], [33, 12, 4]]
GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)


def main(path: str, kind: str, size: str, how: str) -> None:
    of_node = int(size) // 2
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": of_node})
    if how != "too few":
        cluster.add_node(num_cpus=of_node)
    ray.init(address=cluster.address)
    vars(ray_actors).update(CONNECT_S=3.0 if how == "too few" else 240.0)
    try:
        llm = LLM(
            path,
            device="cpu",
            activations="exact",
            max_num_seqs=4,
            distributed_executor="ray",
            **{f"{kind}_parallel_size": int(size)},
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
    while ray.available_resources().get("CPU", 0) != int(size):
        assert time.monotonic() < end, "the placement group is still there"
        time.sleep(0.1)


def kill(llm: LLM, executor: Ranks) -> None:
    last = executor.workers.states()[-1]
    began = time.monotonic()
    threading.Timer(0.5, os.kill, (last.process.pid, signal.SIGKILL)).start()
    try:
        llm.generate(PROMPTS, replace(GREEDY, max_tokens=300))
    except EngineDeadError as error:
        assert f"{last.name} has ended" in str(error), error
        assert time.monotonic() - began < 10
    else:
        raise AssertionError("the loss of a rank went unnoticed")


if __name__ == "__main__":
    main(*sys.argv[1:])

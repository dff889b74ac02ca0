"""A trainer's process: it broadcasts new weights to a server, while the server waits.

    finwhale serve --device cpu --enable-rollout-endpoints --port 8000
    python examples/trainer.py http://127.0.0.1:8000

The "training" multiplies one tensor of the embedded model. The trainer is rank 0 of a process
group, and the ranks of the server are the others. On GPUs, the backend is "nccl", and the device of
the trainer's group is "cuda".
"""

import json
import socket
import sys
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

from finwhale.checkpoint.reader import Checkpoint
from finwhale.demo import DEMO_PATH
from finwhale.weights.weight_group import GroupAddress, WeightGroup

BUCKET = 200  # tensors in one request


def call(url: str, body: Any = None) -> Any:
    """POST a body; without one, GET."""
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"content-type": "application/json"})
    with urllib.request.urlopen(request, timeout=600) as response:
        return json.load(response)


def ask(url: str) -> str:
    body = {"model": "finwhale-demo", "prompt": "Once upon a time", "max_tokens": 12}
    found = call(f"{url}/v1/completions", body | {"temperature": 0})
    return str(found["choices"][0]["text"])


def connect(url: str, pool: ThreadPoolExecutor) -> WeightGroup:
    """Connect with the ranks of the server, which join while this process listens."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    world_size = 1 + call(f"{url}/get_world_size")["world_size"]
    address = GroupAddress(
        master_address="127.0.0.1", master_port=port, world_size=world_size, backend="gloo"
    )
    info = {
        "master_address": address.master_address,
        "master_port": port,
        "rank_offset": 1,
        "world_size": world_size,
        "backend": address.backend,
    }
    joining = pool.submit(call, f"{url}/init_weight_transfer_engine", {"init_info": info})
    group = WeightGroup(address, 0, torch.device("cpu"))
    joining.result()
    return group


def send(url: str, group: WeightGroup, weights: dict[str, torch.Tensor], version: str) -> None:
    """Replace the weights of the server."""
    call(f"{url}/pause?mode=keep", {})  # requests that run wait
    call(f"{url}/start_weight_update", {})
    names = list(weights)
    with ThreadPoolExecutor(1) as pool:
        for start in range(0, len(names), BUCKET):
            some = names[start : start + BUCKET]
            info = {
                "names": some,
                "dtype_names": [str(weights[name].dtype).removeprefix("torch.") for name in some],
                "shapes": [list(weights[name].shape) for name in some],
            }
            # The server begins to receive when it has these names, so both must run at once.
            receiving = pool.submit(call, f"{url}/update_weights", {"update_info": info})
            group.send([weights[name] for name in some])
            receiving.result()  # raises if the server has refused them
    call(f"{url}/finish_weight_update", {"weight_version": version})
    call(f"{url}/resume", {})


def main() -> None:
    url = sys.argv[1]
    checkpoint = Checkpoint.open(DEMO_PATH)
    with checkpoint.reader() as reader:
        weights = {name: reader.read(name) for name in checkpoint.tensors}
    before = ask(url)
    with ThreadPoolExecutor(1) as pool:
        group = connect(url, pool)
    for version, factor in (("step 1", -1.0), ("step 2", -1.0)):
        weights["norm.weight"] *= factor
        send(url, group, weights, version)
        print(call(f"{url}/weight_info")["weight_version"], repr(ask(url)))
    print("the same answer as before:", ask(url) == before)
    call(f"{url}/destroy_weights_update_group", {})
    group.close()


if __name__ == "__main__":
    main()

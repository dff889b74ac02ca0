"""A trainer's process on a GPU: the embedded model's weights, one of them changed.

trainer_process.py ipc DEVICE              shares them over CUDA IPC; prints a line of JSON
trainer_process.py nccl DEVICE PORT SIZE   broadcasts them when it reads a line
"""

import json
import sys

import torch
from tests.support.tensors import read_tensors
from torch import Tensor

from finwhale.demo import DEMO_PATH
from finwhale.distributed.cuda_ipc import export_handle
from finwhale.weights.weight_group import GroupAddress, WeightGroup


def changed_weights() -> dict[str, Tensor]:
    tensors = read_tensors(DEMO_PATH)
    tensors["norm.weight"] *= -1
    return tensors


def main() -> None:
    how, device = sys.argv[1], torch.device(sys.argv[2])
    torch.cuda.set_device(device)
    tensors = {name: tensor.to(device) for name, tensor in changed_weights().items()}
    if how == "ipc":
        buffer = torch.cat([tensor.reshape(-1).view(torch.uint8) for tensor in tensors.values()])
        uuid, handle = export_handle(buffer)
        print(json.dumps({uuid: handle.to_json()}), flush=True)
        sys.stdin.readline()  # the buffer must stay until the engine has read it
        return
    address = GroupAddress(
        master_address="127.0.0.1",
        master_port=int(sys.argv[3]),
        world_size=int(sys.argv[4]),
        backend="nccl",
    )
    group = WeightGroup(address, 0, device)
    sys.stdin.readline()
    group.send(tensors.values())
    sys.stdin.readline()
    group.close()


if __name__ == "__main__":
    main()

"""A trainer's process: broadcasts random weights of the divisible tiny model over Gloo.

Arguments: the port, the size of the group, and how many tensors to send before it dies. It begins
to send when it reads a line.
"""

import os
import sys

import torch
from tests.support.tiny import divisible_config, random_weights

from finwhale.weights.weight_group import GroupAddress, WeightGroup

port, world_size, count = map(int, sys.argv[1:4])
address = GroupAddress(
    master_address="127.0.0.1", master_port=port, world_size=world_size, backend="gloo"
)
tensors = list(random_weights(divisible_config(), 4).values())
group = WeightGroup(address, 0, torch.device("cpu"))
sys.stdin.readline()
for start in range(0, count, 10):
    group.send(tensors[start : start + 10])
if count >= len(tensors):
    sys.stdin.read()  # until the engine has received all
os._exit(1)

"""The backends, the default name and the default time limit of a group with a trainer."""

from typing import Literal

GroupBackend = Literal["nccl", "gloo"]
GROUP_NAME = "weight_update_group"
TIMEOUT_S = 300.0

"""What a trainer asks of a server with rollout endpoints, for tests."""

import shutil
from pathlib import Path
from typing import Any

import httpx2 as httpx
import pytest
import torch
from safetensors.torch import save_file
from tests.engine.trainers import (
    HOST,
    InThread,
    TorchTrainer,
    described,
    free_port,
    listening,
    port_of,
)
from tests.support.tensors import read_tensors
from torch import Tensor

from finwhale.demo import DEMO_PATH

from .running import MODEL

ASK = {"model": MODEL, "prompt": "Once upon a time", "max_tokens": 16, "temperature": 0}
NamedTensors = list[tuple[str, Tensor]]


def write_other_demo(path: Path) -> None:
    """Write a checkpoint of the embedded model with other weights."""
    shutil.copytree(DEMO_PATH, path, ignore=shutil.ignore_patterns("*.safetensors*"))
    tensors = read_tensors(DEMO_PATH)
    noise = torch.Generator().manual_seed(1)
    for name, tensor in tensors.items():
        if name.endswith("norm.weight"):
            tensor *= 1 + torch.randn(tensor.shape, generator=noise).to(tensor.dtype) / 2
    save_file(tensors, path / "model.safetensors")


class Asked:
    """A server, as a trainer sees it."""

    def __init__(self, url: str) -> None:
        self.url = url

    def answer(self) -> tuple[str, list[float]]:
        """A greedy completion, with its log-probabilities."""
        (choice,) = self.post("/v1/completions", ASK | {"logprobs": 1})["choices"]
        return choice["text"], choice["logprobs"]["token_logprobs"]

    def post(self, path: str, body: Any = None, status: int = 200) -> Any:
        found = httpx.post(self.url + path, json=body, timeout=60)
        assert found.status_code == status, found.text
        return found.json()

    def get(self, path: str) -> Any:
        return httpx.get(self.url + path, timeout=60).raise_for_status().json()

    def refusal(self, path: str, body: Any = None) -> str:
        return str(self.post(path, body, status=400)["error"]["message"])

    def group(self, group_name: str, init: str, **more: Any) -> TorchTrainer:
        """The trainer of a group with the server's engine."""
        listener = listening()
        port = port_of(listener)
        joining = InThread(lambda: TorchTrainer(listener, 2, group_name, 30))
        place = {"master_address": HOST, "master_port": port, "rank_offset": 1, "world_size": 2}
        body = place | more | {"group_name": group_name}
        self.post(init, body if "update_group" in init else {"init_info": body})
        trainer: TorchTrainer = joining.end()
        return trainer


def leave(url: str) -> None:
    """Join a group without a trainer, and leave before the answer."""
    place = {"master_address": HOST, "master_port": free_port(), "timeout_seconds": 600}
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(f"{url}/init_weights_update_group", json=place, timeout=0.5)


def buckets(tensors: NamedTensors) -> list[NamedTensors]:
    half = len(tensors) // 2
    return [tensors[:half], tensors[half:]]


def send(trainer: TorchTrainer, bucket: NamedTensors) -> InThread:
    return InThread(lambda: trainer.send(tensor for _, tensor in bucket))


def info_of(tensors: NamedTensors) -> dict[str, Any]:
    """vLLM's update_info."""
    found = described(tensors)
    return {"names": found["names"], "dtype_names": found["dtypes"], "shapes": found["shapes"]}

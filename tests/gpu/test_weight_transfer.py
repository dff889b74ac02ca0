"""New weights on a GPU over CUDA IPC and NCCL; captured graphs remain valid. About 2 minutes."""

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import pytest
import torch
from tests.engine.trainers import HOST, described, free_port
from tests.engine.weights import bits_of
from tests.support.tensors import read_tensors

from finwhale import LLM, BroadcastTensors, FinwhaleError, SamplingParams, SharedTensors
from finwhale.demo import DEMO_PATH
from finwhale.distributed.cuda_ipc import IpcHandle

ROOT = Path(__file__).parents[2]
PARAMS = SamplingParams(temperature=0, max_tokens=32, ignore_eos=True, logprobs=3)
PROMPTS = [[0, *range(20, 320)], [0, 21, 22]]
outputs = partial(bits_of, prompts=PROMPTS, params=PARAMS)


def new_llm(size: int = 1) -> LLM:
    return LLM(
        tensor_parallel_size=size,
        max_num_seqs=4,
        max_model_len=2048,
        batch_invariant=True,
        cache_memory_bytes=2**30,
    )


@pytest.fixture(scope="module")
def llm() -> LLM:
    return new_llm()


@contextmanager
def trainer(*arguments: str) -> Iterator["subprocess.Popen[str]"]:
    command = [sys.executable, "-m", "tests.gpu.trainer_process", *arguments]
    pipe = subprocess.PIPE
    process = subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, cwd=ROOT)
    with process:
        try:
            yield process
        finally:
            process.kill()


def tell(process: "subprocess.Popen[str]") -> None:
    """Write the line for which a trainer waits."""
    assert process.stdin is not None
    process.stdin.write("\n")
    process.stdin.flush()


def expect_changed(llm: LLM, before: list[object]) -> None:
    """The engine has the trainer's weights: the bits of an update from tensors."""
    after = outputs(llm)
    tensors = read_tensors(DEMO_PATH)
    llm.update_weights(DEMO_PATH)
    assert outputs(llm) == before
    tensors["norm.weight"] *= -1
    llm.update_weights(tensors.items())
    assert outputs(llm) == after != before
    llm.update_weights(DEMO_PATH)
    assert not sum(llm._engine.metrics().late_compilations.values())


def test_cuda_ipc(llm: LLM) -> None:
    before = outputs(llm)
    tensors = read_tensors(DEMO_PATH)
    with trainer("ipc", "cuda:0") as process:
        assert process.stdout is not None
        found = json.loads(process.stdout.readline())
        handles = {uuid: IpcHandle.from_json(handle) for uuid, handle in found.items()}
        other = {"GPU-00000000": next(iter(handles.values()))}
        with pytest.raises(FinwhaleError, match="there is no IPC handle for this rank's GPU"):
            llm.update_weights(SharedTensors(**described(tensors.items()), handles=other))
        assert outputs(llm) == before
        llm.update_weights(SharedTensors(**described(tensors.items()), handles=handles))
        tell(process)
        assert process.wait(60) == 0
    expect_changed(llm, before)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_nccl(llm: LLM) -> None:
    before = outputs(llm)
    broadcast(llm, 1)
    expect_changed(llm, before)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_a_trainer_that_sends_nothing(llm: LLM) -> None:
    """Its time limit ends the wait; engine and process go on, and take the next trainer."""
    before = outputs(llm)
    tensors = read_tensors(DEMO_PATH)
    port = free_port()
    with trainer("nccl", "cuda:1", str(port), "2") as process:
        llm.init_weights_update_group(HOST, port, timeout_seconds=20)
        began = time.monotonic()
        with pytest.raises(FinwhaleError, match="broadcast in the group"):
            llm.update_weights(BroadcastTensors(**described(tensors.items())))
        assert time.monotonic() - began < 60
        process.kill()
    assert outputs(llm) == before
    broadcast(llm, 1)
    expect_changed(llm, before)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_a_trainer_that_dies_between_two_updates(llm: LLM) -> None:
    """NCCL is connected already, so the next broadcast waits inside a kernel."""
    before = outputs(llm)
    tensors = read_tensors(DEMO_PATH)
    port = free_port()
    with trainer("nccl", "cuda:1", str(port), "2") as process:
        llm.init_weights_update_group(HOST, port, timeout_seconds=20)
        tell(process)
        llm.update_weights(BroadcastTensors(**described(tensors.items())))
        process.kill()
        process.wait(60)
        changed = outputs(llm)
        with pytest.raises(FinwhaleError, match="broadcast in the group"):
            llm.update_weights(BroadcastTensors(**described(tensors.items())))
    assert outputs(llm) == changed != before
    llm.update_weights(DEMO_PATH)
    assert outputs(llm) == before


@pytest.mark.skipif(torch.cuda.device_count() < 3, reason="needs three GPUs")
def test_nccl_with_two_ranks() -> None:
    llm = new_llm(2)
    before = outputs(llm)
    broadcast(llm, 2)
    expect_changed(llm, before)


def broadcast(llm: LLM, size: int) -> None:
    """Update from a trainer on the GPU behind those of the engine."""
    tensors = read_tensors(DEMO_PATH)
    port = free_port()
    with trainer("nccl", f"cuda:{size}", str(port), str(size + 1)) as process:
        llm.init_weights_update_group(HOST, port, timeout_seconds=60)
        tell(process)
        llm.update_weights(BroadcastTensors(**described(tensors.items())))
        llm.destroy_weights_update_group()
        tell(process)
        process.wait(60)

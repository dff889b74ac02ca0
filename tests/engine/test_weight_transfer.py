"""New weights over a process group and over CUDA IPC: the bits of a fresh start, or no change."""

import json
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support.tiny import random_weights, write_plain_checkpoint
from torch import Tensor

from finwhale import LLM, FinwhaleError, RequestError, SamplingParams, SharedTensors
from finwhale.distributed.cuda_ipc import IpcHandle
from finwhale.engine.loop import weight_updates
from finwhale.engine.ranks import rank_weights
from finwhale.engine.ranks.ranks import first_rank

from .trainers import (
    HOST,
    InThread,
    TorchTrainer,
    broadcast_of,
    described,
    free_port,
    listening,
    port_of,
)
from .weights import bits_of, weights_of

LONG = [7 * i % 400 for i in range(300)]  # more than a block
PROMPTS = [LONG, [1, 2, 3]]
GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, logprobs=3)
LAST = "norm.weight"
outputs = partial(bits_of, prompts=PROMPTS, params=GREEDY)


@pytest.fixture(scope="module")
def tensors(tiny_path: Path) -> dict[str, Tensor]:
    return random_weights(dict(json.loads((tiny_path / "config.json").read_text())), seed=4)


@pytest.fixture(scope="module")
def expected(
    tiny_path: Path, tensors: dict[str, Tensor], tmp_path_factory: pytest.TempPathFactory
) -> list[object]:
    """The outputs of a fresh start with the new weights."""
    path = tmp_path_factory.mktemp("new") / "model"
    write_plain_checkpoint(path, json.loads((tiny_path / "config.json").read_text()), tensors)
    return outputs(LLM(path, device="cpu", activations="exact", max_num_seqs=4))


@pytest.fixture(scope="module")
def shared(tiny_path: Path) -> LLM:
    return LLM(tiny_path, device="cpu", activations="exact", max_num_seqs=4)


@pytest.fixture(scope="module")
def before(shared: LLM) -> list[object]:
    return outputs(shared)


@pytest.fixture
def engine(shared: LLM, tiny_path: Path, before: list[object], one_thread: None) -> Iterator[LLM]:
    """One engine for all tests of this module, which get it with its first weights."""
    version = shared._updates.version
    yield shared
    executor = first_rank(shared._engine.executor)
    assert executor.weights.staged is None and not shared._updates.begun
    for name in list(executor.weights.groups):
        shared.destroy_weights_update_group(name)
    if shared._updates.version != version:
        shared.update_weights(tiny_path)


Connect = Callable[..., TorchTrainer]


@pytest.fixture
def connect(engine: LLM) -> Iterator[Connect]:
    """Makes a group of a trainer and the engine, called "trainer"."""
    made: list[TorchTrainer] = []

    def work(seconds: float = 120) -> TorchTrainer:
        listener = listening()
        port = port_of(listener)
        trainer = InThread(lambda: TorchTrainer(listener, 2, "trainer", seconds))
        engine.init_weights_update_group(HOST, port, group_name="trainer", timeout_seconds=seconds)
        made.append(trainer.end())
        return made[-1]

    yield work
    for trainer in made:
        trainer.close()


def test_a_broadcast_gives_the_bits_of_a_fresh_start(
    engine: LLM,
    connect: Connect,
    tensors: dict[str, Tensor],
    expected: list[object],
    before: list[object],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(weight_updates, "BUCKET_BYTES", 1 << 16)
    trainer = connect()
    addresses = [tensor.data_ptr() for tensor in weights_of(engine)]
    assert outputs(engine) == before != expected
    sending = InThread(lambda: trainer.send(tensors.values()))
    engine.update_weights(broadcast_of(tensors.items()))
    sending.end()
    assert engine.generate(LONG, GREEDY)[0].num_cached_tokens == 0
    assert outputs(engine) == expected
    assert [tensor.data_ptr() for tensor in weights_of(engine)] == addresses
    assert engine._updates.version != "0"
    # Some weights only, over the same group.
    some = [item for item in tensors.items() if item[0].startswith("layers.1.")]
    sending = InThread(lambda: trainer.send(tensor for _, tensor in some))
    engine.update_weights(broadcast_of(some), partial=True)
    sending.end()
    assert outputs(engine) == expected


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"names": ["none.weight"]}, "no tensor none.weight"),
        ({"shapes": [[3]]}, "norm.weight is BF16"),
        ({"shapes": [[2**40]]}, "no weight has the shape"),
        ({"dtypes": ["int64"]}, "norm.weight is I64"),
        ({"dtypes": ["complex64"]}, "complex64 is none of"),
        ({"dtypes": []}, "1 names, 0 dtypes"),
        ({}, "lacks"),
    ],
)
def test_wrong_tensors_are_refused_before_they_move(
    change: dict[str, Any],
    message: str,
    engine: LLM,
    connect: Connect,
    before: list[object],
    tensors: dict[str, Tensor],
) -> None:
    connect()  # a trainer that sends nothing
    source = described([(LAST, tensors[LAST].bfloat16())]) | change
    with pytest.raises(FinwhaleError, match=message):
        engine.update_weights(weight_updates.BroadcastTensors(**source, group_name="trainer"))
    assert outputs(engine) == before
    with pytest.raises(RequestError, match="in no group 'trainer'"):
        engine.update_weights(broadcast_of(tensors.items()))


@pytest.mark.parametrize("how", ["silent", "gone", "nan"])
def test_a_failed_broadcast_keeps_the_old_weights(
    how: str,
    engine: LLM,
    connect: Connect,
    before: list[object],
    tensors: dict[str, Tensor],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(weight_updates, "BUCKET_BYTES", 1 << 16)
    trainer = connect(5 if how == "silent" else 120)  # also the time to connect
    announced = {name: tensor for name, tensor in tensors.items() if name != LAST}
    announced[LAST] = tensors[LAST]
    sent = dict(announced)
    if how == "nan":
        sent[LAST] = torch.full_like(sent[LAST], torch.nan)
    else:
        del sent[LAST]

    def send() -> None:
        trainer.send(sent.values())
        if how == "gone":
            trainer.close()

    running = engine._engine.add_request("one", [1, 2, 3], GREEDY)
    sending = InThread(send)
    message = {"silent": "Timed out", "gone": "connection .* ended", "nan": "not finite"}[how]
    try:
        with pytest.raises(FinwhaleError, match=message):
            engine.update_weights(broadcast_of(announced.items()))
        sending.end()
        while not running.finished:
            engine._engine.step()
    finally:
        engine._engine.abort("one")
    assert not first_rank(engine._engine.executor).weights.groups
    assert outputs(engine) == before


def test_wrong_groups_are_refused(engine: LLM, connect: Connect) -> None:
    port = free_port()
    for options, message in (
        ({"backend": "nccl"}, "needs GPUs"),
        ({"rank_offset": 0}, "do not fit"),
        ({"rank_offset": 2, "world_size": 2}, "do not fit"),
        ({"timeout_seconds": 0.0}, "timeout_seconds"),
    ):
        with pytest.raises(FinwhaleError, match=message):
            engine.init_weights_update_group(HOST, port, **options)  # type: ignore[arg-type]
    connect()
    with pytest.raises(RequestError, match="already"):
        engine.init_weights_update_group(HOST, port, group_name="trainer")
    engine.destroy_weights_update_group("trainer")
    with pytest.raises(RequestError, match="no group"):
        engine.destroy_weights_update_group("trainer")


def test_one_update_at_a_time(engine: LLM, tiny_path: Path, before: list[object]) -> None:
    engine._updates.begin()
    with pytest.raises(RequestError, match="another update"):
        engine.update_weights(tiny_path)
    with pytest.raises(FinwhaleError, match="lacks"):
        engine._updates.finish()
    with pytest.raises(RequestError, match="no update"):
        engine._updates.finish()
    assert outputs(engine) == before


# --- CUDA IPC -------------------------------------------------------------------------------------


def test_shared_tensors(
    engine: LLM,
    before: list[object],
    expected: list[object],
    tensors: dict[str, Tensor],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The buffer is opened by a stand-in, because there is no GPU."""
    buffer = torch.cat([tensor.reshape(-1).view(torch.uint8) for tensor in tensors.values()])
    handle = IpcHandle(memory=b"m", size_bytes=buffer.nbytes, offset_bytes=0, counter=b"c",
                       counter_offset=0, event=b"e", waits=False)  # fmt: skip
    source = SharedTensors(**described(tensors.items()), handles={"GPU-1": handle})
    with pytest.raises(FinwhaleError, match="CUDA IPC needs a GPU"):
        engine.update_weights(source)
    opened: list[Any] = []

    def open_buffer(handles: Any, device: torch.device) -> Tensor:
        opened.append(handles)
        return buffer[:-1] if len(opened) == 1 else buffer

    monkeypatch.setattr(rank_weights, "open_buffer", open_buffer)
    with pytest.raises(FinwhaleError, match="fewer than the"):
        engine.update_weights(source)
    with pytest.raises(FinwhaleError, match="lacks"):
        engine.update_weights(
            SharedTensors(names=[], dtypes=[], shapes=[], handles={"GPU-1": handle})
        )
    assert outputs(engine) == before
    engine.update_weights(source)
    assert outputs(engine) == expected
    assert opened == [{"GPU-1": handle}] * 2

"""New weights on two ranks, in an engine that drafts, and in the layout of a GPU's table."""

import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tests.engine.trainers import described, free_port
from tests.engine.weights import bits_of, in_one_buffer
from tests.support.tensors import read_tensor
from tests.support.tiny import (
    divisible_config,
    random_weights,
    tiny_config,
    write_plain_checkpoint,
    write_quantised_checkpoint,
)
from torch import Tensor

from finwhale import (
    LLM,
    BroadcastTensors,
    CheckpointError,
    FinwhaleError,
    RequestError,
    SamplingParams,
)
from finwhale.checkpoint.reader import Checkpoint
from finwhale.distributed.rank import ALONE, Rank
from finwhale.engine.loop import weight_updates
from finwhale.engine.ranks.staged_weights import StagedWeights
from finwhale.models.registry import architecture_of, parse_config
from finwhale.ops import load_ops
from finwhale.platform import Platform
from finwhale.weights.allocation import WeightForm
from finwhale.weights.source import WeightSource
from finwhale.weights.tree import tensors_of

ROOT = Path(__file__).parents[2]
PROMPTS = [[5, 6, 7], [9] * 300, list(range(2, 40))]
GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True, logprobs=2)
outputs = partial(bits_of, prompts=PROMPTS, params=GREEDY)


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    directory, config = tmp_path_factory.mktemp("ranks"), divisible_config()
    for seed in (3, 4):
        write_plain_checkpoint(directory / str(seed), config, random_weights(config, seed))
    return [directory / "3", directory / "4"]


def open_llm(path: Path, size: int = 2, draft_tokens: int = 0) -> LLM:
    return LLM(
        path,
        device="cpu",
        activations="exact",
        tensor_parallel_size=size,
        max_num_seqs=4,
        draft_tokens=draft_tokens,
        enable_sleep_mode=size > 1,
    )


def test_two_ranks(paths: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weight_updates, "BUCKET_BYTES", 1 << 16)
    old, new = paths
    tensors = random_weights(divisible_config(), 4)
    fresh = open_llm(new)
    expected = outputs(fresh)
    del fresh
    llm = open_llm(old)
    before = outputs(llm)
    assert before != expected

    def stream(fails: bool = False) -> Iterator[tuple[str, Tensor]]:
        for name, tensor in in_one_buffer(tensors.items()):
            if fails and name == "layers.2.ffn.experts.1.w1.weight":
                raise ConnectionError("the sender is gone")
            yield name, tensor

    with pytest.raises(ConnectionError):
        llm.update_weights(stream(fails=True))
    with pytest.raises(CheckpointError, match="lacks"):
        llm.update_weights(item for item in stream() if item[0] != "norm.weight")
    with pytest.raises(CheckpointError, match="no such directory"):
        llm.update_weights(new.parent / "none")
    assert outputs(llm) == before
    llm.update_weights(stream())
    assert outputs(llm) == expected
    llm.update_weights(old)
    assert outputs(llm) == before
    llm.update_weights(new)
    assert outputs(llm) == expected
    llm.sleep()
    llm.wake()
    assert outputs(llm) == expected
    llm.sleep(drop_weights=True)
    llm.wake()
    llm.update_weights(stream())
    assert outputs(llm) == expected


def test_a_trainers_process_broadcasts_to_two_ranks(
    paths: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(weight_updates, "BUCKET_BYTES", 1 << 16)
    old, new = paths
    tensors = random_weights(divisible_config(), 4)
    fresh = open_llm(new)
    expected = outputs(fresh)
    del fresh
    llm = open_llm(old)
    before = outputs(llm)
    assert before != expected

    def update(count: int, **change: Any) -> None:
        """Update from a trainer that sends some tensors, and then dies or waits."""
        port = free_port()
        command = [sys.executable, "-m", "tests.long.trainer_process", str(port), "3", str(count)]
        with subprocess.Popen(command, stdin=subprocess.PIPE, cwd=ROOT) as trainer:
            try:
                llm.init_weights_update_group(
                    "127.0.0.1", port, rank_offset=1, world_size=3, timeout_seconds=60
                )
                assert trainer.stdin is not None
                trainer.stdin.write(b"\n")
                trainer.stdin.flush()
                source = described(tensors.items()) | change
                llm.update_weights(BroadcastTensors(**source))
            finally:
                trainer.kill()

    for _ in range(2):  # the trainer dies; the engine goes on, and takes the next one
        with pytest.raises(FinwhaleError, match=r"broadcast in the group .* failed"):
            update(40)
        assert outputs(llm) == before
        with pytest.raises(RequestError, match="in no group"):
            llm.destroy_weights_update_group()
    with pytest.raises(CheckpointError, match="no tensor"):
        update(0, names=["none", *list(tensors)[1:]])
    assert outputs(llm) == before
    update(len(tensors))
    assert outputs(llm) == expected
    llm.destroy_weights_update_group()
    llm.update_weights(old)
    assert outputs(llm) == before


def test_packed_weights_are_staged_as_they_are_loaded(tmp_path: Path) -> None:
    """FP8 and FP4 in the layout of a GPU's table, for two ranks, with scales before and after."""
    config = tiny_config(5, quantised=True) | {
        "num_attention_heads": 8,
        "o_groups": 4,
        "o_lora_rank": 128,
        "head_dim": 64,
        "moe_intermediate_size": 256,
    }
    for seed in (1, 2):
        write_quantised_checkpoint(tmp_path / str(seed), config, random_weights(config, seed))
    ops = load_ops(Platform("nvidia", "sm90"))
    ops = replace(ops, finish_experts=lambda w: w)
    model_config = parse_config(config)
    architecture = architecture_of(model_config)
    old, new = (Checkpoint.open(tmp_path / str(seed)) for seed in (1, 2))
    for rank in (ALONE, Rank(1, 2)):
        specs = architecture.weight_specs(model_config, rank)
        sources = [WeightSource(one, specs) for one in (old, new)]
        form = WeightForm(
            dtype=torch.bfloat16,
            round_activations=True,
            ops=ops,
            rank=rank,
            storages=sources[0].storages,
        )
        assert sources[1].storages == form.storages
        cpu = torch.device("cpu")
        running, fresh = (
            architecture.assembler(model_config, form, cpu).fill(source) for source in sources
        )
        model: Any = SimpleNamespace(config=model_config, weights=running, device=cpu)
        names = sorted(new.tensors, key=lambda name: name[::-1])
        for some in (False, True):
            staged = StagedWeights(model, form, partial=some)
            staged.add((name, read_tensor(new, name)) for name in names)
            staged.prepare()
            staged.commit()
            for ours, theirs in zip(tensors_of(running), tensors_of(fresh), strict=True):
                assert torch.equal(ours.view(torch.uint8), theirs.view(torch.uint8))
        staged = StagedWeights(model, form, partial=True)
        name = next(n for n in names if n.endswith("wq_a.weight"))
        with pytest.raises(CheckpointError, match=r"stored as bf16.*fp8_block"):
            staged.add([(name, read_tensor(new, name).to(torch.bfloat16))])
        staged = StagedWeights(model, form, partial=True)
        name = next(n for n in names if n.endswith(".scale"))
        staged.add([(name, read_tensor(new, name))])
        with pytest.raises(CheckpointError, match="without"):
            staged.prepare()


@pytest.mark.parametrize("requests", ["keep", "recompute", "abort"])
def test_a_drafting_engine(requests: str, paths: list[Path]) -> None:
    old, new = paths
    expected, *_ = (outputs(open_llm(path, 1, draft_tokens=2)) for path in (new, old))
    llm = open_llm(old, 1, draft_tokens=2)
    result = llm._engine.add_request("one", [9] * 300, GREEDY)
    while len(result.outputs[0].token_ids) < 4:
        llm._engine.step()
    llm.update_weights(new, requests=requests)  # type: ignore[arg-type]
    while not result.finished:
        llm._engine.step()
    assert len(result.outputs[0].token_ids) == GREEDY.max_tokens or requests == "abort"
    assert outputs(llm) == expected

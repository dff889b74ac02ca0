"""Tensor parallelism: how ranks divide a model's sizes, and who is refused."""

import io
import math
import re
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from rich.console import Console

from finwhale.cli import inspect
from finwhale.config import EngineConfig
from finwhale.distributed.peers import Peers
from finwhale.distributed.rank import Rank
from finwhale.engine.start.decisions import Decisions
from finwhale.errors import FinwhaleError
from finwhale.models.deepseek_v4 import architecture
from finwhale.models.deepseek_v4.architecture import (
    fits_whole_attention,
    weight_bytes,
    whole_attention_bytes,
)
from finwhale.models.deepseek_v4.config import DeepseekV4Config
from finwhale.models.deepseek_v4.presets import published
from finwhale.models.deepseek_v4.weights import weight_specs
from finwhale.models.sharding import rank_config
from finwhale.ops import Ops, load_ops
from finwhale.platform import Platform
from finwhale.weights.source import Inventory

MODELS = {name: published(name) for name in ("flash", "pro")}
# The last part of the name of every divided weight, with its axis.
DIVIDED = {
    "head.weight": 0,
    "attn.wq_b.weight": 0,
    "attn.attn_sink": 0,
    "attn.wo_a.weight": 0,
    "attn.wo_b.weight": 1,
    "w1.weight": 0,
    "w3.weight": 0,
    "w2.weight": 1,
}


def wanted_axis(name: str) -> int | None:
    ends = [axis for end, axis in DIVIDED.items() if f".{name}".endswith(f".{end}")]
    return ends[0] if ends else None


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("size", (2, 4, 8))
def test_blocks_and_rounding_groups_stay_whole(model: str, size: int) -> None:
    """Of each kind of weight: the experts of a layer are alike."""
    config = MODELS[model].with_layers(4)
    part = rank_config(config, Rank(0, size), round_activations=True)
    assert part.num_attention_heads * config.o_groups == config.num_attention_heads * part.o_groups
    for index in range(size):
        for spec in weight_specs(config, Rank(index, size)).values():
            axis = wanted_axis(spec.name)
            assert axis == (spec.shard and spec.shard.axis), spec
            assert axis == (spec.slice and spec.slice.axis), spec
            if spec.slice is None:
                assert spec.local_shape == spec.shape
                continue
            length = spec.shape[spec.slice.axis] // size
            assert spec.local_shape[spec.slice.axis] == length
            assert (spec.slice.start, spec.slice.stop) == (index * length, (index + 1) * length)
            if spec.slice.axis == 1 or spec.storage in ("fp8_block", "fp4"):
                assert length % 128 == 0


def tiny(**sizes: int) -> DeepseekV4Config:
    """A small model of all kinds of layers that 8 ranks can divide."""
    return replace(
        MODELS["flash"].with_layers(4),
        vocab_size=328,
        hidden_size=128,
        num_attention_heads=16,
        head_dim=64,
        qk_rope_head_dim=16,
        q_lora_rank=128,
        o_lora_rank=128,
        index_n_heads=32,
        n_routed_experts=2,
        num_experts_per_tok=2,
        moe_intermediate_size=1024,
        num_hash_layers=1,
        **sizes,
    )


@pytest.mark.parametrize(
    ("sizes", "size", "message"),
    [
        ({}, 3, "vocab_size 328 is not a multiple of 3. Set tensor_parallel_size to 1 or 2 or 4"),
        ({"vocab_size": 330}, 4, "vocab_size 330 is not a multiple of 4."),
        ({"num_attention_heads": 8, "o_groups": 2}, 4, "o_groups 2 is not a multiple of 4."),
        ({"moe_intermediate_size": 512}, 8, "moe_intermediate_size is 512, and 64 values a rank"),
        ({"o_lora_rank": 64}, 8, "o_groups * o_lora_rank is 512, and 64 values a rank"),
        ({"num_attention_heads": 8}, 8, "num_attention_heads * head_dim is 512, and 64 values"),
        ({}, 0, "the number of ranks must be at least 1, got 0."),
    ],
)
def test_sizes_that_do_not_divide_are_refused(
    sizes: dict[str, int], size: int, message: str
) -> None:
    config = replace(tiny(), **sizes)
    with pytest.raises(FinwhaleError) as caught:
        rank_config(config, Rank(0, size))
    text = str(caught.value)
    assert text.startswith(f"{size} ranks cannot divide this model: ") and message in text
    assert "\n" not in text and "Set tensor_parallel_size to 1" in text
    with pytest.raises(FinwhaleError):
        weight_specs(config, Rank(0, size))


def test_only_what_rounds_needs_whole_groups() -> None:
    plain = replace(tiny(), quantised=False, moe_intermediate_size=96, o_lora_rank=24)
    part = rank_config(plain, Rank(0, 8))
    assert (part.moe_intermediate_size, part.num_attention_heads, part.o_groups) == (12, 2, 1)
    assert part.vocab_size == plain.vocab_size and part.hidden_size == plain.hidden_size
    assert rank_config(plain, Rank(0, 1), round_activations=True) is plain
    with pytest.raises(FinwhaleError, match="a multiple of 128, the size of an FP8 block"):
        rank_config(plain, Rank(0, 8), round_activations=True)


@pytest.mark.parametrize("model", MODELS)
def test_bytes_of_a_rank(model: str) -> None:
    """One rank holds what all ranks hold, and its share of the rest, in the packed layout."""
    config, ops = MODELS[model].with_layers(3), packed_ops()
    whole = weight_bytes(config, torch.bfloat16, ops)
    divided = sum(
        math.prod(spec.shape) * {"fp4": 17 / 32, "fp8_block": 1 + 4 / 128**2}.get(spec.storage, 0)
        if spec.storage in ("fp4", "fp8_block")
        else math.prod(spec.shape) * (4 if spec.storage == "f32" else 2)
        for spec in weight_specs(config).values()
        if wanted_axis(spec.name) is not None
    )
    for size in (2, 4, 8):
        share = weight_bytes(config, torch.bfloat16, ops, Rank(0, size))
        assert share == whole - divided * (size - 1) / size


@pytest.mark.parametrize("model", MODELS)
def test_bytes_of_whole_attention(model: str) -> None:
    """It adds the weights of the other heads, and copies of some; no other weight changes."""
    config, ops = MODELS[model].with_layers(3), packed_ops()
    for size in (2, 8):
        rank = Rank(size - 1, size, whole_attention=True)
        part = weight_specs(config, replace(rank, whole_attention=False))
        both = weight_specs(config, rank)
        whole = {name for name in both if both[name].slice != part[name].slice}
        ends = ("wq_b.weight", "wo_a.weight", "wo_b.weight", "attn_sink")
        assert whole == {name for name in both if name.endswith(ends) and ".indexer." not in name}
        assert all(both[name].slice is None for name in whole)
        c4 = [i for i, ratio in enumerate(config.layer_ratios) if ratio == 4]
        assert 0 < len(c4) < 3
        copied = {name for name in whole if name.endswith("wo_b.weight")}
        copied |= {f"layers.{i}.attn.wq_b.weight" for i in c4}
        indexers = {f"layers.{i}.attn.indexer.wq_b.weight" for i in c4}
        added = 0.0
        for name in whole | indexers:
            others = 1.0 if name in copied | indexers else 1 - 1 / size
            each = 4 if name.endswith("attn_sink") else 1 + 4 / 128**2
            added += others * each * math.prod(both[name].shape)
        assert whole_attention_bytes(config, torch.bfloat16, ops, Rank(0, size)) == added
    values = sum(math.prod(both[name].shape) for name in whole | indexers)
    assert fits_whole_attention(config, 24 * values)
    assert not fits_whole_attention(config, 24 * values - 1)


H200, H100 = 150_000_000_000, 85_000_000_000


@pytest.mark.parametrize(
    ("options", "ranks", "gpus", "device", "sharers", "wanted"),
    [
        ({}, 2, (H200, H200), "cuda", 1, True),
        ({}, 2, (H200, H100), "cuda", 1, False),  # all ranks decide alike
        ({}, 2, (H200, H200), "cuda", 2, False),
        ({}, 4, (H100,) * 4, "cuda", 1, False),
        ({"whole_attention": True}, 4, (H100,) * 4, "cuda", 1, True),
        ({"whole_attention": False}, 2, (H200, H200), "cuda", 1, False),
        ({"batch_invariant": True}, 2, (H200, H200), "cuda", 1, False),
        ({"reference": True}, 2, (H200, H200), "cuda", 1, False),
        ({}, 2, (), "cpu", 1, False),
        ({"whole_attention": True}, 2, (), "cpu", 1, True),
        ({"whole_attention": True}, 1, (H200,), "cuda", 1, False),
    ],
)
def test_which_ranks_hold_attention_whole(
    monkeypatch: pytest.MonkeyPatch,
    options: dict[str, bool],
    ranks: int,
    gpus: tuple[int, ...],
    device: str,
    sharers: int,
    wanted: bool,
) -> None:
    start = new_start(monkeypatch, EngineConfig(**options), ranks, gpus, device, sharers)  # type: ignore[arg-type]
    assert start._holds_whole_attention(start._gpu_bytes()) is wanted


def new_start(
    monkeypatch: pytest.MonkeyPatch,
    config: EngineConfig,
    ranks: int,
    gpus: tuple[int, ...],
    device: str = "cuda",
    sharers: int = 1,
) -> Decisions:
    """Start rank 0 of Flash; its GPUs have these numbers of bytes."""
    properties = SimpleNamespace(total_memory=gpus[0] if gpus else 0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    start = object.__new__(Decisions)
    start.config, start.dtype = config, torch.bfloat16
    start.model_config, start.architecture = MODELS["flash"], architecture
    start.device, start.sharers = torch.device(device), sharers

    class OtherRanks(Peers):
        def minimum(self, value: int) -> int:
            return min(value, *(total // sharers for total in gpus))

    start.peers = OtherRanks(Rank(0, ranks))
    start.rank = Rank(0, ranks)
    return start


@pytest.mark.parametrize(
    ("gpus", "sharers", "num_seqs", "num_tokens"),
    [
        ((H200,) * 2, 1, 128, 8192),
        ((H200, H100), 1, 64, 2048),  # all ranks decide alike
        ((H200,) * 2, 2, 64, 2048),
        ((H100,) * 4, 1, 256, 8192),
        ((), 1, 64, 2048),
    ],
)
def test_sizes_of_steps_follow_from_what_weights_leave(
    monkeypatch: pytest.MonkeyPatch,
    gpus: tuple[int, ...],
    sharers: int,
    num_seqs: int,
    num_tokens: int,
) -> None:
    device = "cuda" if gpus else "cpu"
    start = new_start(monkeypatch, EngineConfig(), len(gpus) or 2, gpus, device, sharers)
    start.ops = load_ops(Platform("nvidia", "sm90"))
    start.capabilities = start.ops.capabilities
    sizes = start._step_sizes(start._gpu_bytes())
    assert (sizes.num_seqs, sizes.num_tokens) == (num_seqs, num_tokens)


def test_whole_attention_with_batch_invariance_is_refused() -> None:
    with pytest.raises(FinwhaleError, match="leave out whole_attention, or batch_invariant"):
        EngineConfig(whole_attention=True, batch_invariant=True)


def test_inspect_leaves_room_for_whole_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    config = MODELS["flash"].with_layers(3)
    storages = {name: spec.storage for name, spec in weight_specs(config).items()}
    shown = []
    for fits in (False, True):
        console = Console(record=True, width=160, file=io.StringIO())
        monkeypatch.setattr(architecture, "fits_whole_attention", partial(bool_of, fits))
        inspect._print_ranks(console, config, architecture, Inventory((), (), (), (), storages, {}))
        shown.append(console.export_text())
    rows = [re.findall(r"^│ (\d) +│ +([\d.]+ GiB) │ +([\d,]+) ", text, re.M) for text in shown]
    tokens = [{int(row[0]): int(row[2].replace(",", "")) for row in found} for found in rows]
    assert tokens[0].keys() == tokens[1].keys() == {1, 2, 4, 8}
    assert tokens[0][1] == tokens[1][1]
    assert all(tokens[0][size] > tokens[1][size] for size in (2, 4, 8))
    assert "--whole-attention" in shown[1] and "--whole-attention" not in shown[0]


def bool_of(fits: bool, config: DeepseekV4Config, total: int) -> bool:
    return fits


def packed_ops() -> Ops:
    ops = load_ops(Platform.cpu(), reference=True)
    return replace(ops, capabilities=replace(ops.capabilities, quantised_weights=True))

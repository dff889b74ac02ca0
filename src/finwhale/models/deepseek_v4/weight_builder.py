"""Allocates the model's weights and maps each checkpoint tensor to its targets.

The builder allocates memory before loading. Each official name has one setter, which copies a
stored tensor to its targets, so experts and fused projections never exist twice. An operator
table that supports packed weights gets the stored FP8 and FP4 codes with their scales; other tables
get the dequantised values.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Literal

import torch
from torch import Tensor

from finwhale.checkpoint.destinations import Destinations
from finwhale.checkpoint.formats import (
    FP4_BLOCK,
    FP8_BLOCK,
    e8m0_bytes,
    e8m0_to_float32,
    fp8_scale_shape,
    scale_to_float32,
)
from finwhale.checkpoint.loading import PLAIN_STORAGES, StoredWeight
from finwhale.checkpoint.spec import Slice, Storage, name_of_scale
from finwhale.distributed.rank import ALONE, Rank
from finwhale.errors import CheckpointError
from finwhale.models.deepseek_v4.attention import AttentionWeights, HeadWeights
from finwhale.models.deepseek_v4.compressor import C4Weights, C128Weights
from finwhale.models.deepseek_v4.config import DeepseekV4Config
from finwhale.models.deepseek_v4.dspark import DsparkWeights
from finwhale.models.deepseek_v4.dspark_config import NUM_STAGES, DsparkConfig
from finwhale.models.deepseek_v4.layer import LayerWeights
from finwhale.models.deepseek_v4.model import ModelWeights
from finwhale.models.deepseek_v4.moe import MoeWeights
from finwhale.models.deepseek_v4.mtp import MtpWeights
from finwhale.models.deepseek_v4.sharding import rank_config, rank_slice
from finwhale.models.deepseek_v4.weights import weight_specs
from finwhale.ops import Ops
from finwhale.ops.compressor import CompressorWeight
from finwhale.ops.linear import LinearWeight
from finwhale.ops.mhc import HcHeadWeight, MhcWeight
from finwhale.ops.moe import ExpertWeight

Setter = Callable[[StoredWeight], object]

# Unquantised weights of at least this size that need no conversion are read directly into their
# final memory. Smaller ones are not, because each direct read costs a separate check of the values
# after the last byte has arrived.
LARGE_BYTES = 2**20
# Tensors on these devices share allocations. The first has FIRST_SLAB_BYTES, and each later one
# twice as many, up to SLAB_BYTES. Ranks that load together map each other's allocations, which
# takes a millisecond for each.
SLAB_DEVICES = ("cuda",)
FIRST_SLAB_BYTES = 2**24
SLAB_BYTES = 2**28
SLAB_ALIGN = 256


class Slabs:
    """Allocates tensors that share a few large allocations."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._free: list[Tensor] = []  # the rest of each allocation, newest last
        self._size = FIRST_SLAB_BYTES

    def allocate(self, num_bytes: int) -> None:
        """Make an allocation, in which the next tensors lie as long as they fit."""
        self._free.append(torch.empty(num_bytes, dtype=torch.uint8, device=self._device))

    def empty(self, num_bytes: int) -> Tensor:
        """A uint8 tensor [num_bytes] without values."""
        size = -(-num_bytes // SLAB_ALIGN) * SLAB_ALIGN
        fits = (i for i in reversed(range(len(self._free))) if len(self._free[i]) >= size)
        at = next(fits, None)
        if at is None:
            self.allocate(max(size, self._size))
            self._size = min(2 * self._size, SLAB_BYTES)
            at = -1
        memory = self._free[at]
        if size == len(memory):
            del self._free[at]
        else:
            self._free[at] = memory[size:]
        return memory[:num_bytes]


class WeightBuilder:
    """Allocates a rank's weights, with a setter for each tensor.

    On the "meta" device it allocates nothing, and `num_bytes` is the size of the weights.

    Args:
        config: the configuration of the whole model.
        dtype: dtype of the projections that the checkpoint stores in FP8, FP4 or bf16. Norms,
            router, compressors, sinks and mHC are float32.
        round_activations: round the inputs of FP8 and FP4 projections to E4M3.
        round_wo_a: with round_activations, also round the input of wo_a.
        ops: the operator table that reads the weights and chooses their memory layout.
        storages: the stored format of each weight; by default the configuration's.
        rank: the rank that holds the weights.

    Attributes:
        config: the sizes of the rank.
        setters: by official name, a function that copies a stored weight to its targets.
        targets: by official name, tensors whose memory the setter writes to.
        destinations: by name of a weight or scale, where its bytes can be read directly. `complete`
            converts the E8M0 scales of FP8 weights; other tensors here need no conversion.
    """

    def __init__(
        self,
        config: DeepseekV4Config,
        *,
        dtype: torch.dtype,
        device: torch.device,
        round_activations: bool,
        ops: Ops,
        round_wo_a: bool = True,
        storages: Mapping[str, Storage] | None = None,
        rank: Rank = ALONE,
    ) -> None:
        self.config = rank_config(config, rank.size, round_activations=round_activations)
        self.dtype = dtype
        self.device = device
        self.round = round_activations
        self.round_wo_a = round_activations and round_wo_a
        self.prepare_linear = ops.prepare_linear
        self.prepare_experts = ops.prepare_experts
        self.specs = weight_specs(config, rank)
        self.quantised = ops.capabilities.quantised_weights
        self.storages = storages or {name: spec.storage for name, spec in self.specs.items()}
        self.setters: dict[str, Setter] = {}
        self.targets: dict[str, tuple[Tensor, ...]] = {}
        self.destinations = Destinations()
        self.num_bytes = 0
        self._rank = rank
        self._slabs = Slabs(device) if device.type in SLAB_DEVICES else None
        # By name of an FP8 weight in `destinations`: the float32 tensor of its converted scales.
        self._scales: dict[str, Tensor] = {}
        # Setters of additional targets, by the name of a weight that is read directly.
        self._further: dict[str, list[Setter]] = {}
        self._cuts: dict[str, Slice] = {}  # slices of the projections whose part is being allocated
        layers = tuple(
            self._layer(f"layers.{i}", ratio, config.is_hash_layer(i))
            for i, ratio in enumerate(config.layer_ratios)
        )
        mtp = self._mtp("mtp.0") if config.num_nextn_predict_layers else None
        dspark = None if config.dspark is None else self._dspark(config.dspark)
        self.weights = ModelWeights(
            embed=self._tensor("embed.weight", dtype),
            layers=layers,
            hc_head=self._hc_head(""),
            head=self._stacked(
                ("head.weight",), dtype, out_dtype=torch.float32 if self.quantised else None
            ),
            mtp=mtp,
            dspark=dspark,
        )
        self._add_scale_destinations()

    def _add_scale_destinations(self) -> None:
        """Allocate the destinations of the E8M0 scales of FP8 weights."""
        sizes = [scale.numel() for scale in self._scales.values()]
        exponents = torch.empty(sum(sizes), dtype=torch.uint8, device=self.device)
        self.destinations.divide(list(map(name_of_scale, self._scales)), exponents, sizes)

    def complete(self, names: Iterable[str]) -> None:
        """Convert scales, and set further targets, of weights that were read into `destinations`.

        Args:
            names: all weights that were read into `destinations`.
        """
        known = set(names)
        arrived = [name for name in self._scales if name in known]
        if arrived:
            parts = [self.destinations[name_of_scale(name)] for name in arrived]
            values = e8m0_to_float32(torch.cat(parts).view(torch.float8_e8m0fnu))
            targets = [self._scales[name].view(-1) for name in arrived]
            torch._foreach_copy_(targets, values.split([len(part) for part in parts]))
        for name, setters in self._further.items():
            if name in known:
                stored = self._weight_at_destination(name)
                for setter in setters:
                    setter(stored)

    def _weight_at_destination(self, name: str) -> StoredWeight:
        """A weight whose bytes were read into its destination."""
        shape, scale = self.specs[name].local_shape, None
        if name in self._scales:
            exponents = self.destinations[name_of_scale(name)]
            scale = exponents.view(torch.float8_e8m0fnu).view(fp8_scale_shape(shape))
        # The first target is the destination.
        return StoredWeight(self.targets[name][0].view(shape), scale, self.storages[name])

    def _empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        if self._slabs is None:
            tensor = torch.empty(shape, dtype=dtype, device=self.device)
        else:
            tensor = self._slabs.empty(math.prod(shape) * dtype.itemsize).view(dtype).view(shape)
        self.num_bytes += tensor.nbytes
        return tensor

    def _shape(self, name: str) -> tuple[int, ...]:
        """The shape of the part of a weight that the projection being allocated holds."""
        spec = self.specs[name]
        return self._cuts[name].shape_in(spec.shape) if name in self._cuts else spec.local_shape

    def _set(self, name: str, setter: Setter, *targets: Tensor) -> None:
        """Add a setter for a tensor. The setter writes to `targets`."""
        if name in self._cuts:
            setter = partial(_set_slice, setter, self._cuts[name])
        first = self.setters.get(name)
        self.setters[name] = setter if first is None else _both(first, setter)
        if name in self.destinations:
            self._further.setdefault(name, []).append(setter)
        self.targets[name] = (*self.targets.get(name, ()), *targets)

    def _may_add_destination(self, name: str) -> bool:
        """Whether the next target of a weight is its first one, and takes all of it."""
        return name not in self.setters and name not in self._cuts

    def _copy_to(self, name: str, target: Tensor) -> None:
        """Set a tensor by a copy that also converts, which avoids a second, float32 embedding."""

        def copy(stored: StoredWeight) -> None:
            dtype = torch.float32 if stored.scale is not None else stored.data.dtype
            target.copy_(stored.dequantise(dtype, self.device))

        may_add_destination = self._may_add_destination(name)
        self._set(name, copy, target)
        same = self.storages[name] == PLAIN_STORAGES.get(target.dtype)
        if may_add_destination and same and target.is_contiguous() and target.nbytes >= LARGE_BYTES:
            self.destinations.add(name, target)

    def _tensor(self, name: str, dtype: torch.dtype = torch.float32) -> Tensor:
        """Allocate memory for one tensor that needs no special layout."""
        tensor = self._empty(self.specs[name].local_shape, dtype)
        self._copy_to(name, tensor)
        return tensor

    def _projection(self, *names: str) -> LinearWeight:
        """Allocate matrices that the checkpoint stores in FP8, stacked along the rows."""
        weights = tuple(f"{name}.weight" for name in names)
        if self.quantised and self._are_fp8(weights):
            return self._packed_stack(weights)
        return self._stacked(weights, self.dtype, round_input=self.round)

    def _are_fp8(self, names: tuple[str, ...]) -> bool:
        """Whether all weights are FP8 and no scale block crosses a boundary of the stack."""
        return all(self.storages[name] == "fp8_block" for name in names) and all(
            self._shape(name)[0] % FP8_BLOCK == 0 for name in names[:-1]
        )

    def _packed_stack(self, names: tuple[str, ...]) -> LinearWeight:
        rows = [self._shape(name)[0] for name in names]
        columns = self._shape(names[0])[1]
        weight, scale = self._packed_fp8((sum(rows), columns))
        start = 0
        for name, count in zip(names, rows, strict=True):
            self._set_fp8(name, weight[start : start + count], scale[start // FP8_BLOCK :])
            start += count
        return self.prepare_linear(LinearWeight(weight, self.round, scale, self.dtype))

    def _packed_fp8(self, shape: tuple[int, int]) -> tuple[Tensor, Tensor]:
        weight = self._empty(shape, torch.float8_e4m3fn)
        return weight, self._empty(fp8_scale_shape(shape), torch.float32)

    def _set_fp8(self, name: str, weight: Tensor, scale: Tensor) -> None:
        """Set an FP8 weight. scale: the target of its scales, and possibly of later ones."""

        def copy(stored: StoredWeight) -> None:
            assert stored.scale is not None and stored.storage == "fp8_block"
            weight.copy_(stored.data)
            values = scale_to_float32(stored.scale)
            scale[: values.shape[0]].copy_(values)

        may_add_destination = self._may_add_destination(name)
        self._set(name, copy, weight, scale)
        if may_add_destination and weight.is_contiguous():
            self.destinations.add(name, weight)
            self._scales[name] = scale[: fp8_scale_shape(weight.shape)[0]]

    def _stacked(
        self,
        names: tuple[str, ...],
        dtype: torch.dtype,
        *,
        round_input: bool = False,
        out_dtype: torch.dtype | None = None,
    ) -> LinearWeight:
        """Allocate several matrices as one, stacked along the rows."""
        rows = [self._shape(name)[0] for name in names]
        stacked = self._empty((sum(rows), *self._shape(names[0])[1:]), dtype)
        w = self.prepare_linear(LinearWeight(stacked, round_input, out_dtype=out_dtype))
        for name, part in zip(names, w.weight.split(rows), strict=True):
            self._copy_to(name, part)
        return w

    def _in_float32(self, *names: str) -> LinearWeight:
        """Allocate bf16 matrices for GEMMs with float32 results. Packed tables keep the bf16."""
        weights = tuple(f"{name}.weight" for name in names)
        dtype = self.dtype if self.quantised else torch.float32
        return self._stacked(weights, dtype, out_dtype=torch.float32)

    def _mhc(self, layer: str, block: Literal["attn", "ffn"]) -> MhcWeight:
        H = self.config.hc_mult
        scale = self._empty((H + H + H * H,), torch.float32)

        def set_scale(stored: StoredWeight) -> None:
            three = stored.data
            scale.copy_(torch.cat((three[0].expand(H), three[1].expand(H), three[2].expand(H * H))))

        self._set(f"{layer}.hc_{block}_scale", set_scale, scale)
        return MhcWeight(
            fn=self._tensor(f"{layer}.hc_{block}_fn"),
            scale=scale,
            base=self._tensor(f"{layer}.hc_{block}_base"),
            norm=self._tensor(f"{layer}.{block}_norm.weight"),
        )

    def _hc_head(self, prefix: str) -> HcHeadWeight:
        return HcHeadWeight(
            fn=self._tensor(f"{prefix}hc_head_fn"),
            scale=self._tensor(f"{prefix}hc_head_scale"),
            base=self._tensor(f"{prefix}hc_head_base"),
            norm=self._tensor(f"{prefix}norm.weight"),
        )

    def _layer(self, layer: str, ratio: int, hashed: bool) -> LayerWeights:
        return LayerWeights(
            hc_attn=self._mhc(layer, "attn"),
            attn=self._attention(f"{layer}.attn", ratio),
            hc_ffn=self._mhc(layer, "ffn"),
            ffn=self._moe(f"{layer}.ffn", hashed),
        )

    def _attention(self, attn: str, ratio: int) -> AttentionWeights:
        compressor: C4Weights | C128Weights | None = None
        if ratio == 4:
            indexer = f"{attn}.indexer"
            compressor = C4Weights(
                proj=self._in_float32(
                    f"{attn}.compressor.wkv",
                    f"{attn}.compressor.wgate",
                    f"{indexer}.compressor.wkv",
                    f"{indexer}.compressor.wgate",
                    f"{indexer}.weights_proj",
                ),
                mix=self._mix(f"{attn}.compressor", 4),
                index_mix=self._mix(f"{indexer}.compressor", 4),
            )
        elif ratio == 128:
            compressor = C128Weights(
                proj=self._in_float32(f"{attn}.compressor.wkv", f"{attn}.compressor.wgate"),
                mix=self._mix(f"{attn}.compressor", 128),
            )
        heads = self._heads(attn, ratio)
        all_heads = None
        if self._rank.whole_attention:
            heads, all_heads = self._own_heads(heads, attn, ratio), heads
        return AttentionWeights(
            wq_a_wkv=self._projection(f"{attn}.wq_a", f"{attn}.wkv"),
            q_norm=self._tensor(f"{attn}.q_norm.weight"),
            kv_norm=self._tensor(f"{attn}.kv_norm.weight"),
            heads=heads,
            all_heads=all_heads,
            compressor=compressor,
        )

    def _heads(self, attn: str, ratio: int) -> HeadWeights:
        wq_b = [f"{attn}.wq_b", *([f"{attn}.indexer.wq_b"] if ratio == 4 else [])]
        return HeadWeights(
            wq_b=self._projection(*wq_b),
            wo_a=self._grouped(f"{attn}.wo_a.weight", self.round_wo_a),
            wo_b=self._projection(f"{attn}.wo_b"),
            attn_sink=self._tensor(f"{attn}.attn_sink"),
        )

    def _own_heads(self, all_heads: HeadWeights, attn: str, ratio: int) -> HeadWeights:
        """The rank's heads, where possible as views of the weights of all heads."""
        sinks = self._own_slice(f"{attn}.attn_sink")
        groups = self._own_slice(f"{attn}.wo_a.weight").over(self.config.o_lora_rank)
        queries = self._own_slice(f"{attn}.wq_b.weight")
        self._cuts[f"{attn}.wo_b.weight"] = self._own_slice(f"{attn}.wo_b.weight")
        wo_b = self._projection(f"{attn}.wo_b")
        if ratio == 4:
            # The rows of the indexer follow.
            self._cuts[f"{attn}.wq_b.weight"] = queries
            wq_b = self._projection(f"{attn}.wq_b", f"{attn}.indexer.wq_b")
        else:
            wq_b = all_heads.wq_b.rows(queries.start, queries.stop)
        self._cuts.clear()
        return HeadWeights(
            wq_b=wq_b,
            wo_a=all_heads.wo_a.rows(groups.start, groups.stop),
            wo_b=wo_b,
            attn_sink=sinks.of(all_heads.attn_sink),
        )

    def _own_slice(self, name: str) -> Slice:
        part = rank_slice(name, self.specs[name].shape, self._rank)
        assert part is not None
        return part

    def _grouped(self, name: str, round_input: bool) -> LinearWeight:
        rows, columns = self.specs[name].local_shape
        # A group has o_lora_rank rows.
        groups = rows // self.config.o_lora_rank
        if self.quantised and self._are_fp8((name,)) and rows // groups % FP8_BLOCK == 0:
            weight, scale = self._packed_fp8((rows, columns))
            self._set_fp8(name, weight, scale)
            return self.prepare_linear(
                LinearWeight(
                    weight.unflatten(0, (groups, -1)),
                    round_input,
                    scale.unflatten(0, (groups, -1)),
                    self.dtype,
                )
            )
        storage = self._empty((groups, rows // groups, columns), self.dtype)
        w = self.prepare_linear(LinearWeight(storage, round_input))

        def copy(stored: StoredWeight) -> None:
            values = stored.dequantise(torch.float32, self.device)
            w.weight.copy_(values.unflatten(0, (groups, -1)))

        self._set(name, copy, w.weight)
        return w

    def _mix(self, compressor: str, ratio: Literal[4, 128]) -> CompressorWeight:
        norm = self._tensor(f"{compressor}.norm.weight")
        width = norm.shape[0]
        if ratio == 128:
            return CompressorWeight(self._tensor(f"{compressor}.ape"), norm, ratio)
        ape = self._empty((8, width), torch.float32)

        def set_ape(stored: StoredWeight) -> None:
            ape.copy_(torch.cat(stored.data.split(width, 1)))

        self._set(f"{compressor}.ape", set_ape, ape)
        return CompressorWeight(ape, norm, ratio)

    def _moe(self, ffn: str, hashed: bool) -> MoeWeights:
        return MoeWeights(
            gate=self._tensor(
                f"{ffn}.gate.weight", self.dtype if self.quantised else torch.float32
            ),
            bias=None if hashed else self._tensor(f"{ffn}.gate.bias"),
            tid2eid=self._expert_table(f"{ffn}.gate.tid2eid") if hashed else None,
            experts=self._experts(f"{ffn}.experts", self.specs[f"{ffn}.gate.weight"].shape[0]),
            shared_experts=self._shared_expert(f"{ffn}.shared_experts"),
        )

    def _expert_table(self, name: str) -> Tensor:
        table = self._empty(self.specs[name].local_shape, torch.int64)
        experts = self.config.n_routed_experts

        def set_table(stored: StoredWeight) -> None:
            ids = stored.data
            if ids.numel() and not (int(ids.min()) >= 0 and int(ids.max()) < experts):
                raise CheckpointError(
                    f"{name} holds expert ids from {int(ids.min())} to {int(ids.max())}, wanted "
                    f"0 to {experts - 1}; the file is damaged or belongs to another model"
                )
            table.copy_(ids)

        self._set(name, set_table, table)
        return table

    def _shared_expert(self, expert: str) -> ExpertWeight:
        hidden, width = self.config.hidden_size, self.config.moe_intermediate_size
        names = _expert_names(expert)
        if self.quantised and self._are_fp8(names):
            w13, scale13 = self._packed_fp8((2 * width, hidden))
            w2, scale2 = self._packed_fp8((hidden, width))
            self._set_fp8(names[0], w13[:width], scale13)
            self._set_fp8(names[1], w13[width:], scale13[width // FP8_BLOCK :])
            self._set_fp8(names[2], w2, scale2)
            return self.prepare_experts(ExpertWeight(w13, w2, self.round, scale13, scale2))
        w = self.prepare_experts(
            ExpertWeight(
                self._empty((2 * width, hidden), self.dtype),
                self._empty((hidden, width), self.dtype),
                self.round,
            )
        )
        self._set_expert(expert, w.w13, w.w2)
        return w

    def _experts(self, experts: str, count: int) -> ExpertWeight:
        hidden, width = self.config.hidden_size, self.config.moe_intermediate_size
        names = [name for e in range(count) for name in _expert_names(f"{experts}.{e}")]
        if self.quantised and {self.storages[name] for name in names} == {"fp4"}:
            return self._packed_experts(names, count)
        w = self.prepare_experts(
            ExpertWeight(
                self._empty((count, 2 * width, hidden), self.dtype),
                self._empty((count, hidden, width), self.dtype),
                self.round,
            )
        )
        for e in range(count):
            self._set_expert(f"{experts}.{e}", w.w13[e], w.w2[e])
        return w

    def _packed_experts(self, names: list[str], count: int) -> ExpertWeight:
        """Allocate FP4 codes and exponents in their stored form.

        Args:
            names: w1, w3 and w2 of the first expert, then of the second, and so on.
        """
        hidden, width = self.config.hidden_size, self.config.moe_intermediate_size

        if self._slabs is not None:
            # One allocation for all of them: 3 hidden * width values in codes and exponents.
            values = 3 * hidden * width * count
            self._slabs.allocate(values // 2 + values // FP4_BLOCK)

        def empty(rows: int, columns: int) -> tuple[Tensor, Tensor]:
            codes = self._empty((count, rows, columns // 2), torch.uint8)
            return codes, self._empty((count, rows, columns // FP4_BLOCK), torch.uint8)

        w13, scale13 = empty(2 * width, hidden)
        w2, scale2 = empty(hidden, width)
        names13 = [name for i, name in enumerate(names) if i % 3 < 2]
        self._set_fp4(names13, w13, scale13)
        self._set_fp4(names[2::3], w2, scale2)
        return self.prepare_experts(ExpertWeight(w13, w2, self.round, scale13, scale2))

    def _set_fp4(self, names: Sequence[str], codes: Tensor, exponents: Tensor) -> None:
        """Set FP4 weights, which divide `codes` and `exponents` equally, by copying their bytes."""
        count, destinations = len(names), self.destinations
        destinations.divide(names, codes, [codes.nbytes // count] * count)
        scales = list(map(name_of_scale, names))
        destinations.divide(scales, exponents, [exponents.nbytes // count] * count)
        # Calling `_set` for each of a model's 36,000 expert weights takes too long. Each of them
        # is set only once, so this code makes the entries of `_set` itself.
        self.setters.update((name, partial(_copy_fp4, destinations, name)) for name in names)
        self.targets.update(dict.fromkeys(names, (codes, exponents)))

    def _set_expert(self, name: str, w13: Tensor, w2: Tensor) -> None:
        w1, w3 = w13.chunk(2)
        for weight, target in zip(_expert_names(name), (w1, w3, w2), strict=True):
            self._copy_to(weight, target)

    def _mtp(self, mtp: str) -> MtpWeights:
        return MtpWeights(
            enorm=self._tensor(f"{mtp}.enorm.weight"),
            hnorm=self._tensor(f"{mtp}.hnorm.weight"),
            e_proj=self._projection(f"{mtp}.e_proj"),
            h_proj=self._projection(f"{mtp}.h_proj"),
            layer=self._layer(mtp, 0, False),
            hc_head=self._hc_head(f"{mtp}."),
        )

    def _dspark(self, head: DsparkConfig) -> DsparkWeights:
        stages = [f"mtp.{i}" for i in range(NUM_STAGES)]
        layers = tuple(self._layer(stage, 0, False) for stage in stages)
        # A stage multiplies the rows of a block by its wkv, and the rows of the context by a copy
        # that is stacked with the other stages' wkv.
        names = [f"{stage}.attn.wkv" for stage in stages]
        context_kv = self._projection(*names)
        last = stages[-1]
        confidence = f"{last}.confidence_head.proj.weight"
        return DsparkWeights(
            main_proj=self._projection(f"{stages[0]}.main_proj"),
            main_norm=self._tensor(f"{stages[0]}.main_norm.weight"),
            context_kv=context_kv,
            layers=layers,
            hc_head=self._hc_head(f"{last}."),
            markov_w1=self._tensor(f"{last}.markov_head.markov_w1.weight", self.dtype),
            markov_w2=self._stacked(
                (f"{last}.markov_head.markov_w2.weight",),
                self.dtype,
                out_dtype=torch.float32 if self.quantised else None,
            ),
            confidence=self._tensor(confidence) if head.enable_confidence_head else None,
        )


def _expert_names(expert: str) -> tuple[str, str, str]:
    """An expert's weights, in the order of the packed tensors w13 and w2."""
    return f"{expert}.w1.weight", f"{expert}.w3.weight", f"{expert}.w2.weight"


def _copy_fp4(destinations: Destinations, name: str, stored: StoredWeight) -> None:
    assert stored.scale is not None and stored.storage == "fp4"
    destinations[name].copy_(stored.data.view(torch.uint8).reshape(-1))
    destinations[name_of_scale(name)].copy_(e8m0_bytes(stored.scale).reshape(-1))


def _set_slice(setter: Setter, part: Slice, stored: StoredWeight) -> None:
    setter(stored.sliced(part))


def _both(first: Setter, second: Setter) -> Setter:
    def copy(stored: StoredWeight) -> None:
        first(stored)
        second(stored)

    return copy

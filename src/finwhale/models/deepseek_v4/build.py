"""Allocate the model's weights and say where each checkpoint tensor goes.

Storage comes first, then loading: each official name has one setter that copies the dequantised
tensor to its place, so experts and fused projections are never held twice.
"""

from collections.abc import Callable, Iterable
from typing import Literal

import torch
from torch import Tensor

from finwhale.checkpoint.loading import StoredWeight
from finwhale.checkpoint.spec import WeightSpec
from finwhale.errors import CheckpointError
from finwhale.models.deepseek_v4.attention import AttentionWeights
from finwhale.models.deepseek_v4.compressor import C4Weights, C128Weights
from finwhale.models.deepseek_v4.config import ModelConfig
from finwhale.models.deepseek_v4.layer import LayerWeights
from finwhale.models.deepseek_v4.model import ModelWeights, MtpWeights
from finwhale.models.deepseek_v4.moe import MoeWeights
from finwhale.models.deepseek_v4.weights import weight_specs
from finwhale.ops import Ops
from finwhale.ops.compressor import CompressorWeight
from finwhale.ops.linear import LinearWeight
from finwhale.ops.mhc import HcHeadWeight, MhcWeight
from finwhale.ops.moe import ExpertWeight

Setter = Callable[[Tensor], object]


class WeightBuilder:
    """The model's weights, empty, and `setters`: official name -> copy a tensor into its place.

    On the "meta" device it allocates nothing and `num_bytes` tells what it would.

    Args:
        dtype: of the projections that the checkpoint stores in FP8, FP4 or bf16; norms, router,
            compressors, sinks and mHC are float32.
        round_activations: the inputs of FP8 and FP4 projections are rounded to E4M3.
        ops: the table whose operators will read the weights; it chooses how they lie in memory.
    """

    def __init__(
        self,
        config: ModelConfig,
        *,
        dtype: torch.dtype,
        device: torch.device,
        round_activations: bool,
        ops: Ops,
    ) -> None:
        self.config = config
        self.dtype = dtype
        self.device = device
        self.round = round_activations
        self.prepare_linear = ops.prepare_linear
        self.prepare_experts = ops.prepare_experts
        self.specs = weight_specs(config)
        self.setters: dict[str, Setter] = {}
        self.num_bytes = 0
        layers = tuple(
            self._layer(f"layers.{i}", ratio, config.is_hash_layer(i))
            for i, ratio in enumerate(config.layer_ratios)
        )
        mtp = self._mtp("mtp.0") if config.num_nextn_predict_layers else None
        self.weights = ModelWeights(
            embed=self._tensor("embed.weight", dtype),
            layers=layers,
            hc_head=self._hc_head(""),
            head=self._linear("head", round_input=False),
            mtp=mtp,
        )

    def _empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        tensor = torch.empty(shape, dtype=dtype, device=self.device)
        self.num_bytes += tensor.nbytes
        return tensor

    def _tensor(self, name: str, dtype: torch.dtype = torch.float32) -> Tensor:
        """Storage for one tensor as it is."""
        tensor = self._empty(self.specs[name].shape, dtype)
        self.setters[name] = tensor.copy_
        return tensor

    def _linear(self, name: str, *, round_input: bool | None = None) -> LinearWeight:
        rounds = self.round if round_input is None else round_input
        return self._stacked((f"{name}.weight",), self.dtype, round_input=rounds)

    def _stacked(
        self, names: tuple[str, ...], dtype: torch.dtype, *, round_input: bool = False
    ) -> LinearWeight:
        """Several matrices as one, one above the other."""
        rows = [self.specs[name].shape[0] for name in names]
        stacked = self._empty((sum(rows), *self.specs[names[0]].shape[1:]), dtype)
        w = self.prepare_linear(LinearWeight(stacked, round_input))
        for name, part in zip(names, w.weight.split(rows), strict=True):
            self.setters[name] = part.copy_
        return w

    def _mhc(self, layer: str, block: Literal["attn", "ffn"]) -> MhcWeight:
        H = self.config.hc_mult
        scale = self._empty((H + H + H * H,), torch.float32)
        self.setters[f"{layer}.hc_{block}_scale"] = lambda three: scale.copy_(
            torch.cat((three[0].expand(H), three[1].expand(H), three[2].expand(H * H)))
        )
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
                wkv_wgate=self._compressor_projection(f"{attn}.compressor"),
                mix=self._mix(f"{attn}.compressor", 4),
                index_wkv_wgate=self._compressor_projection(f"{indexer}.compressor"),
                index_mix=self._mix(f"{indexer}.compressor", 4),
                index_wq_b=self._linear(f"{indexer}.wq_b"),
                index_weights_proj=self._stacked(
                    (f"{indexer}.weights_proj.weight",), torch.float32
                ),
            )
        elif ratio == 128:
            compressor = C128Weights(
                wkv_wgate=self._compressor_projection(f"{attn}.compressor"),
                mix=self._mix(f"{attn}.compressor", 128),
            )
        return AttentionWeights(
            wq_a=self._linear(f"{attn}.wq_a"),
            q_norm=self._tensor(f"{attn}.q_norm.weight"),
            wq_b=self._linear(f"{attn}.wq_b"),
            wkv=self._linear(f"{attn}.wkv"),
            kv_norm=self._tensor(f"{attn}.kv_norm.weight"),
            wo_a=self._grouped(f"{attn}.wo_a.weight"),
            wo_b=self._linear(f"{attn}.wo_b"),
            attn_sink=self._tensor(f"{attn}.attn_sink"),
            compressor=compressor,
        )

    def _compressor_projection(self, compressor: str) -> LinearWeight:
        names = (f"{compressor}.wkv.weight", f"{compressor}.wgate.weight")
        return self._stacked(names, torch.float32)

    def _grouped(self, name: str) -> LinearWeight:
        groups = self.config.o_groups
        rows, columns = self.specs[name].shape
        storage = self._empty((groups, rows // groups, columns), self.dtype)
        w = self.prepare_linear(LinearWeight(storage, self.round))
        self.setters[name] = lambda tensor: w.weight.copy_(tensor.unflatten(0, (groups, -1)))
        return w

    def _mix(self, compressor: str, ratio: Literal[4, 128]) -> CompressorWeight:
        norm = self._tensor(f"{compressor}.norm.weight")
        width = norm.shape[0]
        if ratio == 128:
            return CompressorWeight(self._tensor(f"{compressor}.ape"), norm, ratio)
        ape = self._empty((8, width), torch.float32)
        self.setters[f"{compressor}.ape"] = lambda halves: ape.copy_(
            torch.cat(halves.split(width, 1))
        )
        return CompressorWeight(ape, norm, ratio)

    def _moe(self, ffn: str, hashed: bool) -> MoeWeights:
        return MoeWeights(
            gate=self._tensor(f"{ffn}.gate.weight"),
            bias=None if hashed else self._tensor(f"{ffn}.gate.bias"),
            tid2eid=self._expert_table(f"{ffn}.gate.tid2eid") if hashed else None,
            experts=self._experts(f"{ffn}.experts"),
            shared_experts=self._shared_expert(f"{ffn}.shared_experts"),
        )

    def _expert_table(self, name: str) -> Tensor:
        table = self._tensor(name, torch.int64)
        experts = self.config.n_routed_experts

        def set_table(ids: Tensor) -> None:
            if ids.numel() and not (int(ids.min()) >= 0 and int(ids.max()) < experts):
                raise CheckpointError(
                    f"{name} holds expert ids from {int(ids.min())} to {int(ids.max())}, wanted "
                    f"0 to {experts - 1}; the file is damaged or of another model"
                )
            table.copy_(ids)

        self.setters[name] = set_table
        return table

    def _shared_expert(self, expert: str) -> ExpertWeight:
        hidden, width = self.config.hidden_size, self.config.moe_intermediate_size
        w13 = self._empty((2 * width, hidden), self.dtype)
        w2 = self._empty((hidden, width), self.dtype)
        w = self.prepare_experts(ExpertWeight(w13, w2, self.round))
        self._set_expert(expert, w.w13, w.w2)
        return w

    def _experts(self, experts: str) -> ExpertWeight:
        count, hidden = self.config.n_routed_experts, self.config.hidden_size
        width = self.config.moe_intermediate_size
        w13 = self._empty((count, 2 * width, hidden), self.dtype)
        w2 = self._empty((count, hidden, width), self.dtype)
        w = self.prepare_experts(ExpertWeight(w13, w2, self.round))
        for e in range(count):
            self._set_expert(f"{experts}.{e}", w.w13[e], w.w2[e])
        return w

    def _set_expert(self, name: str, w13: Tensor, w2: Tensor) -> None:
        w1, w3 = w13.chunk(2)
        self.setters[f"{name}.w1.weight"] = w1.copy_
        self.setters[f"{name}.w3.weight"] = w3.copy_
        self.setters[f"{name}.w2.weight"] = w2.copy_

    def _mtp(self, mtp: str) -> MtpWeights:
        return MtpWeights(
            enorm=self._tensor(f"{mtp}.enorm.weight"),
            hnorm=self._tensor(f"{mtp}.hnorm.weight"),
            e_proj=self._linear(f"{mtp}.e_proj"),
            h_proj=self._linear(f"{mtp}.h_proj"),
            layer=self._layer(mtp, 0, False),
            hc_head=self._hc_head(f"{mtp}."),
        )


WeightStream = Iterable[tuple[WeightSpec, StoredWeight]]


def load_weights(
    config: ModelConfig,
    stream: WeightStream,
    *,
    dtype: torch.dtype,
    device: torch.device,
    round_activations: bool,
    ops: Ops,
) -> ModelWeights:
    """Allocate the model's weights and fill them from `stream`, one tensor at a time.

    Raises:
        CheckpointError: a tensor comes twice, is not the model's, or never comes.
    """
    builder = WeightBuilder(
        config, dtype=dtype, device=device, round_activations=round_activations, ops=ops
    )
    waiting = dict(builder.setters)
    for spec, stored in stream:
        setter = waiting.pop(spec.name, None)
        if setter is None:
            raise CheckpointError(f"tensor {spec.name} comes twice or is none of this model's")
        # Plain tensors are converted as they are copied: no second copy of an embedding in float32.
        wanted = torch.float32 if stored.scale is not None else stored.data.dtype
        setter(stored.dequantise(wanted, device))
    if waiting:
        raise CheckpointError(f"{len(waiting)} tensors never came, such as {min(waiting)}")
    return builder.weights

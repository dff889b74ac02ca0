"""The table of DeepSeek-V4's weights: one line each, in the place where the model reads it.

A line has the weight's name, shape and storage, and how the ranks divide it (models/sharding.py).
The call around it says in which form the model reads it; several lines in a call are packed into
one tensor.
Specs, destinations and sizes in memory follow from the table (weights/table.py).

Legend: D hidden_size, V vocab_size, C head_dim, Q q_lora_rank, K index_head_dim,
E n_routed_experts, H hc_mult.
"""

from collections.abc import Mapping
from functools import lru_cache, partial
from typing import Literal

import torch
from torch import Tensor

from finwhale.checkpoint.spec import Storage, WeightSpec
from finwhale.collection import no_collection
from finwhale.distributed.rank import ALONE, Rank
from finwhale.errors import CheckpointError
from finwhale.models.deepseek_v4.attention import AttentionWeights
from finwhale.models.deepseek_v4.compressor import C4Weights, C128Weights
from finwhale.models.deepseek_v4.config import DeepseekV4Config
from finwhale.models.deepseek_v4.dspark import DsparkWeights
from finwhale.models.deepseek_v4.layer import LayerWeights
from finwhale.models.deepseek_v4.model import ModelWeights
from finwhale.models.deepseek_v4.moe import MoeWeights
from finwhale.models.deepseek_v4.mtp import MtpWeights
from finwhale.models.dspark_config import NUM_STAGES, DsparkConfig
from finwhale.models.sharding import rank_config
from finwhale.models.weight_parts import TOKEN_ROWS, WeightTable, logits_weight, mhc_weight
from finwhale.ops.compressor import CompressorWeight
from finwhale.ops.mhc import HcHeadWeight
from finwhale.weights.allocation import WeightForm
from finwhale.weights.assembler import Assembler
from finwhale.weights.table import Lines, WeightList


# A start asks for them several times.
@lru_cache(maxsize=2)
def weight_specs(config: DeepseekV4Config, rank: Rank = ALONE) -> Mapping[str, WeightSpec]:
    """Every tensor of a checkpoint of this configuration, by name.

    The table omits `.scale` tensors, which belong to their weights. If the configuration is not
    quantised, the storage of every FP8 and FP4 weight is "bf16". `config` describes the whole
    model; each spec names the slice that `rank` loads.

    Raises:
        FinwhaleError: this number of ranks cannot divide the model.
    """
    rank_config(config, rank)
    listed = WeightList(rank)
    with no_collection():
        _Table(config, listed).model()
    return listed.specs


def assembler(
    config: DeepseekV4Config, form: WeightForm, device: torch.device
) -> Assembler[ModelWeights]:
    """Allocate a rank's weights on a device, for the caller to load.

    Raises:
        FinwhaleError: this number of ranks cannot divide the model.
    """
    rank_config(config, form.rank, round_activations=form.round_activations)
    return Assembler(lambda weights: _Table(config, weights).model(), form, device)


def ignored_prefixes(config: DeepseekV4Config) -> dict[str, str]:
    """Name prefixes of tensors that the loader ignores, each with the reason."""
    if config.draft_head is None:
        return {"mtp.": "the model runs without its draft head"}
    return {}


class _Table(WeightTable):
    config: DeepseekV4Config

    def model(self) -> ModelWeights:
        config, make = self.config, self.make
        D, V = config.hidden_size, config.vocab_size
        w = self._lines("", "embedding and head")
        return ModelWeights(
            embed=make.tensor(w("embed.weight", (V, D), "bf16"), make.dtype),
            head=logits_weight(make, w("head.weight", (V, D), "bf16", TOKEN_ROWS)),
            hc_head=self._hc_head(self._lines("", "final norm and hc head")),
            layers=tuple(
                self._layer(f"layers.{i}.", "norms and mHC", ratio, config.is_hash_layer(i))
                for i, ratio in enumerate(config.layer_ratios)
            ),
            mtp=self._mtp("mtp.0.") if config.num_nextn_predict_layers else None,
            dspark=None if config.dspark is None else self._dspark(config.dspark),
        )

    def _layer(self, layer: str, part: str, ratio: int, hashed: bool) -> LayerWeights:
        w, D, H = self._lines(layer, part), self.config.hidden_size, self.config.hc_mult
        return LayerWeights(
            hc_attn=mhc_weight(self.make, w, "attn", D, H),
            hc_ffn=mhc_weight(self.make, w, "ffn", D, H),
            attn=self._attention(f"{layer}attn.", ratio),
            ffn=self._moe(f"{layer}ffn.", hashed),
        )

    def _hc_head(self, w: Lines) -> HcHeadWeight:
        D, H, make = self.config.hidden_size, self.config.hc_mult, self.make
        return HcHeadWeight(
            norm=make.tensor(w("norm.weight", (D,), "bf16")),
            fn=make.tensor(w("hc_head_fn", (H, H * D), "f32")),
            base=make.tensor(w("hc_head_base", (H,), "f32")),
            scale=make.tensor(w("hc_head_scale", (1,), "f32")),
        )

    def _attention(self, attn: str, ratio: int) -> AttentionWeights:
        parts, all_heads = self._attention_parts(attn, ratio == 4)
        compressor = self._compressor(attn, ratio) if ratio else None
        return AttentionWeights(**parts, all_heads=all_heads, compressor=compressor)

    def _compressor(self, attn: str, ratio: int) -> C4Weights | C128Weights:
        C, K, make = self.config.head_dim, self.config.index_head_dim, self.make
        w = self._lines(f"{attn}compressor.", "compressor")
        proj = self._compressor_lines(w, C, ratio)
        if ratio == 128:
            return C128Weights(
                proj=make.matrix(*proj, dtype=self.precise, out_dtype=torch.float32),
                mix=self._mix(w, C, 128),
            )
        indexer = self._lines(f"{attn}indexer.", "indexer")
        keys = self._lines(f"{attn}indexer.compressor.", "indexer")
        shape = self.config.index_n_heads, self.config.hidden_size
        proj += *self._compressor_lines(keys, K, 4), indexer("weights_proj.weight", shape, "bf16")
        return C4Weights(
            proj=make.matrix(*proj, dtype=self.precise, out_dtype=torch.float32),
            mix=self._mix(w, C, 4),
            index_mix=self._mix(keys, K, 4),
        )

    def _compressor_lines(self, w: Lines, dim: int, ratio: int) -> tuple[WeightSpec, ...]:
        # Ratio 4: the two overlapping halves Ca and Cb.
        shape = 2 * dim if ratio == 4 else dim, self.config.hidden_size
        return w("wkv.weight", shape, "bf16"), w("wgate.weight", shape, "bf16")

    def _mix(self, w: Lines, dim: int, ratio: Literal[4, 128]) -> CompressorWeight:
        norm = self.make.tensor(w("norm.weight", (dim,), "bf16"))
        if ratio == 128:
            return CompressorWeight(self.make.tensor(w("ape", (128, dim), "f32")), norm, ratio)
        line = w("ape", (4, 2 * dim), "f32")
        ape = self.make.tensor(line, shape=(8, dim), convert=_halves_as_rows)
        return CompressorWeight(ape, norm, ratio)

    def _moe(self, ffn: str, hashed: bool) -> MoeWeights:
        c, make = self.config, self.make
        D, E = c.hidden_size, c.n_routed_experts
        w = self._lines(ffn, "router")
        fp4: Storage = "fp4" if c.quantised and c.expert_dtype == "fp4" else self.fp8
        gate = make.tensor(w("gate.weight", (E, D), "bf16"), self.precise)
        bias: Tensor | None = None
        tid2eid: Tensor | None = None
        if hashed:
            line = w("gate.tid2eid", (c.vocab_size, c.num_experts_per_tok), "i64")
            convert = partial(_checked_expert_ids, name=line.name, num_experts=E)
            tid2eid = make.tensor(line, torch.int64, convert=convert)
        else:
            bias = make.tensor(w("gate.bias", (E,), "f32"))
        return MoeWeights(
            gate=gate,
            bias=bias,
            tid2eid=tid2eid,
            **self._experts(ffn, E, fp4),
        )

    def _mtp(self, mtp: str) -> MtpWeights:
        D, make, part = self.config.hidden_size, self.make, "norms, mHC and projections"
        w = self._lines(mtp, part)
        return MtpWeights(
            enorm=make.tensor(w("enorm.weight", (D,), "bf16")),
            hnorm=make.tensor(w("hnorm.weight", (D,), "bf16")),
            e_proj=make.projection(w("e_proj.weight", (D, D), self.fp8)),
            h_proj=make.projection(w("h_proj.weight", (D, D), self.fp8)),
            hc_head=self._hc_head(w),
            layer=self._layer(mtp, part, 0, False),
        )

    def _dspark(self, head: DsparkConfig) -> DsparkWeights:
        part, stages = "norms, mHC and projections", [f"mtp.{i}." for i in range(NUM_STAGES)]
        first, last = self._lines(stages[0], part), self._lines(stages[-1], part)
        markov = self._lines(f"{stages[-1]}markov_head.", "Markov head")
        of_stage = _Table(self.config.of_stage(), self.make)
        return DsparkWeights(
            confidence=self._confidence(head, last),
            **self._dspark_input(head, first),
            layers=tuple(of_stage._layer(stage, part, 0, False) for stage in stages),
            context_kv=self._context_kv(stages),
            hc_head=self._hc_head(last),
            **self._markov(head, markov, "markov_w1", "markov_w2"),
        )


def _halves_as_rows(ape: Tensor) -> Tensor:
    """[4, Ca | Cb] to [8, C]."""
    return torch.cat(ape.chunk(2, 1))


def _checked_expert_ids(ids: Tensor, *, name: str, num_experts: int) -> Tensor:
    if ids.numel() and not (int(ids.min()) >= 0 and int(ids.max()) < num_experts):
        raise CheckpointError(
            f"{name} holds expert ids from {int(ids.min())} to {int(ids.max())}, wanted "
            f"0 to {num_experts - 1}; the file is damaged or belongs to another model"
        )
    return ids

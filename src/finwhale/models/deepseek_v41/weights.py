"""The table of DeepSeek-V4.1's weights: one line each, in the place where the model reads it.

deepseek_v4/weights.py describes such tables. The indexer, compressors and Engram's projections are
whole on every rank.

Legend: D hidden_size, V vocab_size, C head_dim, Q q_lora_rank, J index_head_dim,
E n_routed_experts, H hc_mult.
"""

from collections.abc import Mapping
from dataclasses import replace
from functools import lru_cache

import torch

from finwhale.checkpoint.spec import Storage, WeightSpec
from finwhale.collection import no_collection
from finwhale.distributed.rank import ALONE, Rank
from finwhale.errors import FinwhaleError
from finwhale.models.deepseek_v41.config import GROUP, DeepseekV41Config
from finwhale.models.deepseek_v41.host_tables import TableAssembler
from finwhale.models.deepseek_v41.weight_classes import (
    AttentionWeights,
    CompressorWeights,
    DsparkWeights,
    EngramWeights,
    LayerWeights,
    ModelWeights,
    MoeWeights,
)
from finwhale.models.dspark_config import DsparkConfig
from finwhale.models.sharding import rank_config
from finwhale.models.weight_parts import TOKEN_ROWS, WeightTable, logits_weight, mhc_weight
from finwhale.ops.linear import LinearWeight
from finwhale.weights.allocation import WeightForm
from finwhale.weights.assembler import Assembler
from finwhale.weights.table import WeightList


# A start asks for them several times.
@lru_cache(maxsize=2)
def weight_specs(config: DeepseekV41Config, rank: Rank = ALONE) -> Mapping[str, WeightSpec]:
    """Every tensor of a checkpoint of this configuration, by name, except the vision encoder's.

    The table omits `.scale` tensors, which belong to their weights. `config` describes the whole
    model; each spec names the slice that `rank` loads.

    Raises:
        FinwhaleError: the ranks cannot divide the model in this way.
    """
    if rank.whole_attention:
        raise FinwhaleError("DeepSeek-V4.1's ranks divide all heads: leave out whole_attention")
    rank_config(config, rank)
    listed = WeightList(rank)
    with no_collection():
        _Table(config, listed).model()
    return listed.specs


def assembler(
    config: DeepseekV41Config, form: WeightForm, device: torch.device
) -> Assembler[ModelWeights]:
    """Allocate a rank's weights on a device, for the caller to load.

    Raises:
        FinwhaleError: this number of ranks cannot divide the model.
    """
    rank_config(config, form.rank, round_activations=form.round_activations)
    form = replace(form, round_wo_a=False)  # as the model was trained
    return TableAssembler(lambda weights: _Table(config, weights).model(), form, device)


def ignored_prefixes(config: DeepseekV41Config) -> dict[str, str]:
    """Name prefixes of tensors that the loader ignores, each with the reason."""
    ignored = dict.fromkeys(("vision.", "aligner.", "image_"), "only text is served")
    if config.dspark is None:
        ignored["mtp."] = "the model runs without its draft head"
    return ignored


class _Table(WeightTable):
    config: DeepseekV41Config
    fp8, input_group = "fp8_block_32", GROUP

    def model(self) -> ModelWeights:
        config, make = self.config, self.make
        D, V = config.hidden_size, config.vocab_size
        w = self._lines("", "embedding and head")
        return ModelWeights(
            embed=make.tensor(w("embed.weight", (V, D), "bf16"), make.dtype),
            head=logits_weight(make, w("head.weight", (V, D), "bf16", TOKEN_ROWS)),
            norm=make.tensor(self._lines("", "final norm")("norm.weight", (D,), "bf16")),
            layers=tuple(self._layer(i) for i in range(config.num_hidden_layers)),
            dspark=None if config.dspark is None else self._dspark(config.dspark),
        )

    def _name(self, layer: int) -> str:
        """The beginning of the names of a layer's weights."""
        stage = layer - self.config.num_hidden_layers
        return f"layers.{layer}." if stage < 0 else f"mtp.{stage}."

    def _layer(self, layer: int) -> LayerWeights:
        c, make = self.config, self.make
        D, H, name = c.hidden_size, c.hc_mult, self._name(layer)
        w = self._lines(name, "norms and mHC")
        return LayerWeights(
            engram=self._engram(f"{name}engram.", layer),
            hc_attn=mhc_weight(make, w, "attn", D, H),
            hc_ffn=mhc_weight(make, w, "ffn", D, H),
            attn=self._attention(f"{name}attn.", layer),
            ffn=self._moe(f"{name}ffn.", c.of_layer(layer).n_routed_experts),
        )

    def _engram(self, engram: str, layer: int) -> EngramWeights | None:
        D, H, make, c = self.config.hidden_size, self.config.hc_mult, self.make, self.config.engram
        if c is None or layer not in c.layer_ids:
            return None
        rows = c.num_embeddings[c.layer_ids.index(layer)]
        w, table = self._lines(engram, "Engram"), self._lines(engram, "Engram tables")
        fp8: Storage = "fp8_row_32" if self.config.quantised else "bf16"
        return EngramWeights(
            embed=make.lookup(table("embed.weight", (rows, c.head_dim), fp8)),
            wkv=make.projection(w("wkv.weight", ((H + 1) * D, c.num_rows * c.head_dim), self.fp8)),
            q_weight=make.tensor(w("q_weight", (H, D), "bf16")),
            k_weight=make.tensor(w("k_weight", (H, D), "bf16")),
        )

    def _attention(self, attn: str, layer: int) -> AttentionWeights:
        c = self.config
        selects = layer in c.index_source_layer_ids
        parts, _ = self._attention_parts(attn, selects)
        return AttentionWeights(
            **parts,
            index_proj=self._index_proj(attn, layer) if selects else None,
            compressor=self._compressor(attn) if layer in c.kv_source_layer_ids else None,
        )

    def _index_proj(self, attn: str, layer: int) -> LinearWeight:
        c, lines = self.config, list[WeightSpec]()
        w, indexer = self._lines(f"{attn}compressor.", "compressor"), f"{attn}indexer."
        if layer in c.kv_source_layer_ids:
            shape = c.head_dim, c.hidden_size
            lines.append(w("wkv.weight", shape, "bf16"))
            if c.compress_ratios[layer] == 2:
                lines.append(w("wgate.weight", shape, "bf16"))
        shape = c.index_n_heads, c.hidden_size
        lines.append(self._lines(indexer, "indexer")("weights_proj.weight", shape, "bf16"))
        return self.make.matrix(*lines, dtype=self.precise, out_dtype=torch.float32)

    def _compressor(self, attn: str) -> CompressorWeights:
        C, J, make = self.config.head_dim, self.config.index_head_dim, self.make
        w = self._lines(f"{attn}compressor.", "compressor")
        indexer = self._lines(f"{attn}indexer.", "indexer")
        return CompressorWeights(
            norm=make.tensor(w("norm.weight", (C,), "bf16")),
            wk=make.matrix(indexer("wk.weight", (J, C), "bf16"), dtype=make.dtype),
            k_norm=make.tensor(indexer("k_norm.weight", (J,), "bf16")),
        )

    def _moe(self, ffn: str, num_experts: int) -> MoeWeights:
        make, D, E, w = self.make, self.config.hidden_size, num_experts, self._lines(ffn, "router")
        fp4: Storage = "fp4" if self.config.quantised else "bf16"
        return MoeWeights(
            gate=make.tensor(w("gate.weight", (E, D), "bf16"), self.precise),
            bias=make.tensor(w("gate.bias", (E,), "f32")),
            tid2eid=None,
            bias_vl=make.tensor(w("gate.bias_vl", (E,), "f32")),
            **self._experts(ffn, E, fp4),
        )

    def _dspark(self, head: DsparkConfig) -> DsparkWeights:
        c, part = self.config, "norms and projections"
        numbers = range(c.num_hidden_layers, c.num_hidden_layers + c.num_draft_layers)
        stages = [self._name(number) for number in numbers]
        first, last = self._lines(stages[0], part), self._lines(stages[-1], part)
        markov = self._lines(f"{stages[-1]}markov_head.", "Markov head")
        return DsparkWeights(
            confidence=self._confidence(head, last),
            **self._dspark_input(head, first),
            layers=tuple(map(self._layer, numbers)),
            context_kv=self._context_kv(stages),
            norm=self.make.tensor(last("norm.weight", (c.hidden_size,), "bf16")),
            **self._markov(head, markov, "embed", "head"),
        )

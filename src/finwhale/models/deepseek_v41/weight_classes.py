"""The weights of DeepSeek-V4.1, as its layers read them.

Legend: D hidden_size, V vocab_size, X tokens whose logits a rank computes, C head_dim,
Q q_lora_rank, I index_n_heads, J index_head_dim, E n_routed_experts, H hc_mult.
"""

from dataclasses import dataclass

from torch import Tensor

from finwhale.models.deepseek_v4 import moe
from finwhale.models.weight_parts import DsparkParts, HeadWeights
from finwhale.ops.linear import LinearWeight
from finwhale.ops.mhc import MhcWeight
from finwhale.weights.table import LookupTable


@dataclass(frozen=True, slots=True, kw_only=True)
class CompressorWeights:
    """The weights that a KV source applies to a latent. Norms: float32.

    Attributes:
        norm: [C], the RMSNorm that makes the latent.
        wk: [J, C], from the latent before rope to an index key.
        k_norm: [J].
    """

    norm: Tensor
    wk: LinearWeight
    k_norm: Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionWeights:
    """Weights of attention. Projections with the same input are one matrix. Norms: float32.

    Attributes:
        wq_a_wkv: [Q + C, D]: the checkpoint's wq_a above its wkv.
        heads: this rank's heads; in index sources with the index queries.
        index_proj: float32 results, in index sources only. In a KV source, the compressor's wkv
            [C, D] and, with ratio 2, its wgate [C, D]; then the indexer's weights_proj [I, D].
        compressor: of a KV source; None: the layer is none.
    """

    wq_a_wkv: LinearWeight
    q_norm: Tensor
    kv_norm: Tensor
    heads: HeadWeights
    index_proj: LinearWeight | None
    compressor: CompressorWeights | None


@dataclass(frozen=True, slots=True, kw_only=True)
class MoeWeights(moe.MoeWeights):
    """bias_vl [E] float32: the bias for tokens of images."""

    bias_vl: Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class EngramWeights:
    """The weights of a layer's Engram.

    Attributes:
        embed: the table that n-grams address.
        wkv: [(H + 1) * D, values of a token's rows]: the keys of each stream, then the value.
        q_weight, k_weight: [H, D] float32.
    """

    embed: LookupTable
    wkv: LinearWeight
    q_weight: Tensor
    k_weight: Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerWeights:
    """The weights of a decoder layer. hc_attn and hc_ffn contain attn_norm and ffn_norm."""

    engram: EngramWeights | None
    hc_attn: MhcWeight
    attn: AttentionWeights
    hc_ffn: MhcWeight
    ffn: MoeWeights


@dataclass(frozen=True, slots=True, kw_only=True)
class DsparkWeights(DsparkParts):
    """The head's own weights. norm: [D] float32, before the LM head."""

    layers: tuple[LayerWeights, ...]
    norm: Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelWeights:
    """embed [V,D], head [X,D]; norm [D] float32, before the head."""

    embed: Tensor
    head: LinearWeight
    norm: Tensor
    layers: tuple[LayerWeights, ...]
    dspark: DsparkWeights | None

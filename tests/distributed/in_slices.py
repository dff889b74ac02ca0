"""One rank that adds its partial sums in the same order as several ranks.

An independent definition of what several ranks compute: it cuts the loaded weights of the whole
model, and uses neither the sharding of weights nor collectives. On the CPU table it gives the bits
of the ranks. One rank as it is adds in another order.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from finwhale.models.deepseek_v4.attention import Attention
from finwhale.models.deepseek_v4.layer import DecoderLayer
from finwhale.models.deepseek_v4.model import DeepseekV4
from finwhale.models.deepseek_v4.moe import Moe
from finwhale.models.step_inputs import StepInputs
from finwhale.ops.linear import LinearWeight
from finwhale.ops.moe import ExpertWeight


def add_in_slices(model: DeepseekV4, size: int, whole_from: int | None = None) -> None:
    """Change a model of one rank so that it adds as `size` ranks do.

    Args:
        whole_from: the ranks hold attention's weights whole, and divide the tokens of steps of
            this many tokens and more. Then attention has no partial sums.
    """
    assert model.ranks.rank.size == 1
    head = model.draft_head
    for layer in (*model.layers, *(() if head is None else head.layers)):
        assert isinstance(layer, DecoderLayer)
        _change_attention(layer.attn, size, whole_from)
        layer.ffn = _SlicedMoe(layer.ffn, size)  # type: ignore[assignment]


def _tree(parts: list[Tensor]) -> Tensor:
    """((p0 + p1) + (p2 + p3)) + ..."""
    while len(parts) > 1:
        parts = [a + b for a, b in zip(parts[::2], parts[1::2], strict=True)]
    return parts[0]


def _change_attention(attn: Attention, size: int, whole_from: int | None) -> None:
    whole = attn.heads
    whole_output = whole.output
    w, heads = whole.weights, whole.number // size
    columns = [
        LinearWeight(part.clone(), w.wo_b.input_group) for part in w.wo_b.weight.chunk(size, 1)
    ]
    sinks = [part.clone() for part in w.attn_sink.chunk(size)]
    attend = attn.sparse_attention

    def is_whole(o_NAC: Tensor) -> bool:
        return whole_from is not None and len(o_NAC) >= whole_from

    def some_heads(*args: Tensor) -> None:
        """BLAS may give a head other bits beside another number of heads."""
        q_NAC, *others, sink_A, scale, out_NAC, scales_NS = args
        assert sink_A is w.attn_sink and scales_NS is None
        if is_whole(out_NAC):
            attend(*args)  # type: ignore[arg-type]
            return
        parts = zip(q_NAC.split(heads, 1), sinks, out_NAC.split(heads, 1), strict=True)
        for q, sink, out in parts:
            each = torch.empty(out.shape)
            attend(q, *others, sink, scale, each, None)  # type: ignore[arg-type]
            out.copy_(each)

    def output(o_NAC: Tensor, scales_NS: Tensor | None) -> Tensor:
        if is_whole(o_NAC):
            return whole_output(o_NAC, scales_NS)
        o_NGK = o_NAC.view(o_NAC.shape[0], whole.groups, -1)
        mixed = whole.grouped_linear(o_NGK, w.wo_a, scales_NS).flatten(1)
        parts = zip(mixed.chunk(size, 1), columns, strict=True)
        return _tree([attn.linear(part.contiguous(), each) for part, each in parts])

    attn.sparse_attention = some_heads  # type: ignore[assignment]
    whole.output = output  # type: ignore[assignment,method-assign]


class _SlicedMoe:
    def __init__(self, moe: Moe, size: int) -> None:
        self.route = moe.route
        self.parts: list[Callable[..., Tensor]] = []
        experts, shared = moe.weights.experts, moe.weights.shared_experts
        for some, own in zip(_slices(experts, size), _slices(shared, size), strict=True):
            self.parts.append(_one_slice(moe, some, own))

    def __call__(self, x_ND: Tensor, inputs: StepInputs) -> Tensor:
        ids, weights = self.route(x_ND, inputs)
        return _tree([part(x_ND, ids, weights) for part in self.parts])


def _one_slice(moe: Moe, experts: ExpertWeight, shared: ExpertWeight) -> Callable[..., Tensor]:
    def run(x_ND: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        pairs = moe.dispatch(ids, moe.num_experts)
        each = moe.compute(x_ND, weights, pairs, experts, moe.limit)
        return moe.combine(each, ids, moe.swiglu_mlp(x_ND, shared, moe.limit))

    return run


def _slices(w: ExpertWeight, size: int) -> list[ExpertWeight]:
    """The experts cut along their intermediate width."""
    w1, w3 = (half.chunk(size, -2) for half in w.w13.chunk(2, -2))
    w2 = w.w2.chunk(size, -1)
    return [
        ExpertWeight(torch.cat((gate, up), -2), down.clone(), w.input_group)
        for gate, up, down in zip(w1, w3, w2, strict=True)
    ]

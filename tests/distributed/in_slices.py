"""One rank that adds its partial sums in the same order as several ranks.

An independent definition of what several ranks compute: it cuts the loaded weights of the whole
model, and uses neither the sharding of weights nor collectives. On the CPU table it gives the bits
of the ranks. One rank as it is adds in another order.
"""

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from finwhale.models.deepseek_v4.attention import Attention
from finwhale.models.deepseek_v4.layer import DecoderLayer
from finwhale.models.deepseek_v4.model import DeepseekV4
from finwhale.models.deepseek_v4.moe import Moe
from finwhale.models.deepseek_v41 import attention as v41_attention
from finwhale.models.deepseek_v41 import layer as v41_layer
from finwhale.models.deepseek_v41.model import DeepseekV41
from finwhale.models.step_inputs import StepInputs
from finwhale.models.weight_parts import HeadWeights
from finwhale.ops.linear import LinearWeight
from finwhale.ops.moe import ExpertWeight


def add_in_slices(
    model: DeepseekV4 | DeepseekV41, size: int, whole_from: int | None = None
) -> None:
    """Change a model of one rank so that it adds as `size` ranks do.

    Args:
        whole_from: the ranks hold attention's weights whole, and divide the tokens of steps of
            this many tokens and more. Then attention has no partial sums.
    """
    assert model.ranks.rank.size == 1
    head = model.draft_head
    for layer in (*model.layers, *(() if head is None else head.layers)):
        if isinstance(layer, v41_layer.DecoderLayer):
            if whole_from is None:
                _change_v41_attention(layer.attn, size)
        else:
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
    w, attend = whole.weights, attn.sparse_attention
    attend_in_slices = _some_heads(attend, w, size)
    project = _some_columns(attn.linear, w, size)

    def is_whole(o_NAC: Tensor) -> bool:
        return whole_from is not None and len(o_NAC) >= whole_from

    def some_heads(*args: Tensor) -> None:
        out_NAC, scales_NS = args[-2:]
        assert scales_NS is None
        (attend if is_whole(out_NAC) else attend_in_slices)(*args)  # type: ignore[operator]

    def output(o_NAC: Tensor, scales_NS: Tensor | None) -> Tensor:
        if is_whole(o_NAC):
            return whole_output(o_NAC, scales_NS)
        o_NGK = o_NAC.view(o_NAC.shape[0], whole.groups, -1)
        return project(whole.grouped_linear(o_NGK, w.wo_a, scales_NS).flatten(1), w.wo_b)

    attn.sparse_attention = some_heads  # type: ignore[assignment]
    whole.output = output  # type: ignore[assignment,method-assign]


def _change_v41_attention(attn: v41_attention.Attention, size: int) -> None:
    ops, w = attn.ops, attn.weights.heads
    attend, linear = (
        _some_heads(ops.sparse_attention, w, size),
        _some_columns(ops.linear, w, size),
    )
    attn.ops = replace(ops, sparse_attention=attend, linear=linear)  # type: ignore[arg-type]


def _some_heads(attend: Callable[..., None], w: HeadWeights, size: int) -> Callable[..., None]:
    """Attention for some heads at a time: BLAS may give a head other bits beside others."""
    sinks = [part.clone() for part in w.attn_sink.chunk(size)]

    def some_heads(*args: Tensor) -> None:
        q_NAC, *others = args[:6]
        sink_A, scale, out_NAC = args[6:9]
        assert sink_A is w.attn_sink
        parts = zip(q_NAC.chunk(size, 1), sinks, out_NAC.chunk(size, 1), strict=True)
        for q, sink, out in parts:
            each = torch.empty(out.shape)
            attend(q.contiguous(), *others, sink, scale, each, *args[9:])
            out.copy_(each)

    return some_heads


def _some_columns(
    linear: Callable[..., Tensor], w: HeadWeights, size: int
) -> Callable[[Tensor, LinearWeight], Tensor]:
    """A linear operator that multiplies by some columns of wo_b at a time."""
    columns = [
        LinearWeight(part.clone(), w.wo_b.input_group) for part in w.wo_b.weight.chunk(size, 1)
    ]

    def some_columns(x_NX: Tensor, weight: LinearWeight) -> Tensor:
        if weight is not w.wo_b:
            return linear(x_NX, weight)
        parts = zip(x_NX.chunk(size, 1), columns, strict=True)
        return _tree([linear(part.contiguous(), each) for part, each in parts])

    return some_columns


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

"""Custom operators of torch.library over a table's own functions.

A schema names every tensor and number that the contract's classes hold. The default mode registers
nothing: there operators are called directly.

Legend as in the families' packages.
"""

import hashlib
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.library import Library

from finwhale.ops import Ops
from finwhale.ops.linear import LinearWeight
from finwhale.ops.mhc import MhcParams, MhcWeight
from finwhale.ops.moe import ExpertWeight
from finwhale.ops.paging import PageTable, Tokens

_MHC_WEIGHT = "Tensor fn, Tensor scale, Tensor base, Tensor norm"
_MHC_PARAMS = "int num_iters, float eps, float rms_eps"
_LINEAR = "Tensor x, Tensor weight, Tensor? scale, bool round_input, ScalarType? out_dtype"

SCHEMAS = {
    "mhc_pre": f"(Tensor residual, {_MHC_WEIGHT}, {_MHC_PARAMS}) -> (Tensor, Tensor, Tensor)",
    "mhc_post_pre": f"(Tensor x, Tensor post, Tensor res, Tensor residual, {_MHC_WEIGHT}, "
    f"{_MHC_PARAMS}) -> (Tensor, Tensor, Tensor, Tensor)",
    "linear": f"({_LINEAR}) -> Tensor",
    "grouped_linear": f"({_LINEAR}) -> Tensor",
    "prepare_qkv": "(Tensor q_lora, Tensor q_norm, Tensor kv, Tensor kv_norm, Tensor rotary, "
    "float eps, bool round_nope, Tensor positions, Tensor sequence, Tensor query_start, "
    "Tensor(a!) pool, Tensor pages, Tensor first, int rows_per_page) -> Tensor",
    "route_by_score": "(Tensor x, Tensor gate, Tensor bias, int topk, float scaling, "
    "Tensor positions) -> (Tensor, Tensor)",
    "route_by_hash": "(Tensor x, Tensor gate, Tensor tid2eid, Tensor token_ids, float scaling, "
    "Tensor positions) -> (Tensor, Tensor)",
    "swiglu_mlp": "(Tensor x, Tensor w13, Tensor w2, Tensor? scale13, Tensor? scale2, "
    "bool round_input, float limit) -> Tensor",
}


def namespace(ops: Ops) -> str:
    """Where a table's operators are registered: no two tables share one, every process agrees."""
    digest = hashlib.sha256(repr(ops.implementations()).encode()).hexdigest()
    return f"finwhale_{ops.linear.__module__.rpartition('.')[2]}_{digest[:8]}"


@cache
def register(ops: Ops) -> Library:
    """Register a table's operators, once; they stay for as long as the process."""
    library = Library(namespace(ops), "DEF")
    kernels, fakes = _kernels(ops), _fakes(ops)
    for name, schema in SCHEMAS.items():
        library.define(name + schema, tags=torch.Tag.needs_exact_strides)
        library.impl(name, kernels[name], "CompositeExplicitAutograd")
        library._register_fake(name, fakes[name])
    return library


def custom(ops: Ops) -> Ops:
    """`ops` with what stands in a compiled graph replaced by calls of custom operators."""
    register(ops)
    calls: dict[str, Any] = _calls(getattr(torch.ops, namespace(ops)))
    return replace(ops, **calls)


def _kernels(ops: Ops) -> dict[str, Callable[..., Any]]:
    """The flat arguments of a schema to the contract's."""

    def mhc_pre(residual: Tensor, *flat: Any) -> Any:
        return ops.mhc_pre(residual, MhcWeight(*flat[:4]), MhcParams(*flat[4:]))

    def mhc_post_pre(x: Tensor, post: Tensor, res: Tensor, residual: Tensor, *flat: Any) -> Any:
        weight, params = MhcWeight(*flat[:4]), MhcParams(*flat[4:])
        return ops.mhc_post_pre(x, post, res, residual, weight, params)

    def linear(
        x: Tensor,
        weight: Tensor,
        scale: Tensor | None,
        round_input: bool,
        out_dtype: torch.dtype | None,
    ) -> Tensor:
        return ops.linear(x, LinearWeight(weight, round_input, scale, out_dtype))

    def grouped_linear(
        x: Tensor,
        weight: Tensor,
        scale: Tensor | None,
        round_input: bool,
        out_dtype: torch.dtype | None,
    ) -> Tensor:
        return ops.grouped_linear(x, LinearWeight(weight, round_input, scale, out_dtype))

    def prepare_qkv(
        q_lora: Tensor,
        q_norm: Tensor,
        kv: Tensor,
        kv_norm: Tensor,
        rotary: Tensor,
        eps: float,
        round_nope: bool,
        positions: Tensor,
        sequence: Tensor,
        query_start: Tensor,
        pool: Tensor,
        pages: Tensor,
        first: Tensor,
        rows_per_page: int,
    ) -> Tensor:
        # The bounds are not this operator's: it writes each token's own row.
        tokens = Tokens(positions, sequence, query_start, max_len=0, max_query=0)
        table = PageTable(pages, first, rows_per_page)
        return ops.prepare_qkv(
            q_lora, q_norm, kv, kv_norm, rotary, eps, round_nope, tokens, pool, table
        )

    def swiglu_mlp(
        x: Tensor,
        w13: Tensor,
        w2: Tensor,
        scale13: Tensor | None,
        scale2: Tensor | None,
        round_input: bool,
        limit: float,
    ) -> Tensor:
        return ops.swiglu_mlp(x, ExpertWeight(w13, w2, round_input, scale13, scale2), limit)

    return {
        "mhc_pre": mhc_pre,
        "mhc_post_pre": mhc_post_pre,
        "linear": linear,
        "grouped_linear": grouped_linear,
        "prepare_qkv": prepare_qkv,
        "route_by_score": ops.route_by_score,
        "route_by_hash": ops.route_by_hash,
        "swiglu_mlp": swiglu_mlp,
    }


def _fakes(ops: Ops) -> dict[str, Callable[..., Any]]:
    """Shapes and dtypes of the results, as the contracts and the tables give them."""
    id_dtype = ops.capabilities.expert_id_dtype

    def mhc_pre(residual: Tensor, *_: Any) -> tuple[Tensor, Tensor, Tensor]:
        N, H, D = residual.shape
        mix = residual.new_empty(N, H, dtype=torch.float32)
        return residual.new_empty(N, D), mix, mix.new_empty(N, H, H)

    def mhc_post_pre(
        x: Tensor, post: Tensor, res: Tensor, residual: Tensor, *_: Any
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        return *mhc_pre(residual), residual.new_empty(residual.shape)

    def linear(x: Tensor, weight: Tensor, *flat: Any) -> Tensor:
        dtype = flat[-1] or (torch.bfloat16 if weight.itemsize == 1 else weight.dtype)
        return x.new_empty((*x.shape[:-1], weight.shape[-2]), dtype=dtype)

    def prepare_qkv(q_lora: Tensor, *_: Any) -> Tensor:
        return q_lora.new_empty(q_lora.shape)

    def chosen(x: Tensor, topk: int) -> tuple[Tensor, Tensor]:
        shape = (x.shape[0], topk)
        return x.new_empty(shape, dtype=id_dtype), x.new_empty(shape, dtype=torch.float32)

    def route_by_score(x: Tensor, gate: Tensor, bias: Tensor, topk: int, *_: Any) -> Any:
        return chosen(x, topk)

    def route_by_hash(x: Tensor, gate: Tensor, tid2eid: Tensor, *_: Any) -> Any:
        return chosen(x, tid2eid.shape[1])

    def swiglu_mlp(x: Tensor, w13: Tensor, w2: Tensor, *_: Any) -> Tensor:
        dtype = x.dtype if w2.itemsize == 1 else w2.dtype
        return x.new_empty(x.shape, dtype=dtype)

    return {
        "mhc_pre": mhc_pre,
        "mhc_post_pre": mhc_post_pre,
        "linear": linear,
        "grouped_linear": linear,
        "prepare_qkv": prepare_qkv,
        "route_by_score": route_by_score,
        "route_by_hash": route_by_hash,
        "swiglu_mlp": swiglu_mlp,
    }


def _calls(space: Any) -> dict[str, Callable[..., Any]]:
    """The contracts' arguments to the flat ones."""

    def mhc_pre(residual: Tensor, w: MhcWeight, p: MhcParams) -> Any:
        return space.mhc_pre(residual, *_mhc(w, p))

    def mhc_post_pre(
        x: Tensor, post: Tensor, res: Tensor, residual: Tensor, w: MhcWeight, p: MhcParams
    ) -> Any:
        return space.mhc_post_pre(x, post, res, residual, *_mhc(w, p))

    def linear(x: Tensor, w: LinearWeight) -> Any:
        return space.linear(x, w.weight, w.scale, w.round_input, w.out_dtype)

    def grouped_linear(x: Tensor, w: LinearWeight, scales: Tensor | None = None) -> Any:
        assert scales is None, "a graph's input is not rounded"
        return space.grouped_linear(x, w.weight, w.scale, w.round_input, w.out_dtype)

    def prepare_qkv(
        q_lora: Tensor,
        q_norm: Tensor,
        kv: Tensor,
        kv_norm: Tensor,
        rotary: Tensor,
        eps: float,
        round_nope: bool,
        tokens: Tokens,
        pool: Tensor,
        table: PageTable,
    ) -> Any:
        return space.prepare_qkv(
            q_lora,
            q_norm,
            kv,
            kv_norm,
            rotary,
            eps,
            round_nope,
            tokens.positions,
            tokens.sequence,
            tokens.query_start,
            pool,
            table.pages,
            table.first,
            table.rows_per_page,
        )

    def swiglu_mlp(x: Tensor, w: ExpertWeight, limit: float) -> Any:
        return space.swiglu_mlp(x, w.w13, w.w2, w.scale13, w.scale2, w.round_input, limit)

    def route_by_score(*flat: Any) -> Any:
        return space.route_by_score(*flat)

    def route_by_hash(*flat: Any) -> Any:
        return space.route_by_hash(*flat)

    return {
        "mhc_pre": mhc_pre,
        "mhc_post_pre": mhc_post_pre,
        "linear": linear,
        "grouped_linear": grouped_linear,
        "prepare_qkv": prepare_qkv,
        "route_by_score": route_by_score,
        "route_by_hash": route_by_hash,
        "swiglu_mlp": swiglu_mlp,
    }


def _mhc(w: MhcWeight, p: MhcParams) -> tuple[Any, ...]:
    return w.fn, w.scale, w.base, w.norm, p.num_iters, p.eps, p.rms_eps

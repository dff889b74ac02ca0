"""Compile Triton kernels for SM90, or another GPU, without a GPU.

CALLS names calls of operators on tensors of the meta device, with the sizes of Flash and Pro in
bfloat16; other modules named sm90_* have CALLS of their own. In sm90_worker.py, `compile_launch`
stands in for a launch.
"""

import os
import re
import subprocess
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch
import triton
from torch import Tensor
from triton._C.libtriton import ir
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.compiler.compiler import make_backend
from triton.experimental.gluon._runtime import GluonASTSource
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor as GluonDescriptor
from triton.tools.tensor_descriptor import TensorDescriptor

from finwhale.engine.start.memory import all_sampling_options, without_filters
from finwhale.ops.attention import AllEntries, RowForm, TopkEntries, Window
from finwhale.ops.attention import prepare_qkv_triton as prepare
from finwhale.ops.attention.layout import RopeRow
from finwhale.ops.attention.sparse_attention_triton import sparse_attention as portable_attention
from finwhale.ops.compressor import CompressorWeight, CompressPart, Rounding
from finwhale.ops.compressor import compress_triton as compressor
from finwhale.ops.drafts import BlockShape, ConfidenceWeight, PlannedTokens, VerifiedStep
from finwhale.ops.drafts import drafts_triton as drafts
from finwhale.ops.indexer import select_entries_triton as indexer
from finwhale.ops.indexer.layout import IndexKey
from finwhale.ops.indexer.topk_long_triton import NUM_WARPS
from finwhale.ops.linear import LinearWeight, few_tokens_hopper, quantise_triton
from finwhale.ops.linear import linear_triton as linear
from finwhale.ops.mhc import HcHeadWeight, MhcParams, MhcWeight
from finwhale.ops.mhc import mhc_triton as mhc
from finwhale.ops.moe import ExpertWeight
from finwhale.ops.moe import router_triton as moe
from finwhale.ops.norm import rms_norm_triton as norm
from finwhale.ops.paging import CacheRows, PageTable, Tokens
from finwhale.ops.sampling import SamplingBatch
from finwhale.ops.sampling import sample_triton as sampling

from .index_ranges import Range, Ranges
from .made_once import made_once

TARGET = GPUTarget("cuda", 90, 32)
CUOBJDUMP = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
TYPES = {
    torch.bfloat16: "*bf16",
    torch.float8_e4m3fn: "*fp8e4nv",
    torch.float32: "*fp32",
    torch.float64: "*fp64",
    torch.bool: "*i1",
    torch.int16: "*i16",
    torch.int32: "*i32",
    torch.int64: "*i64",
    torch.uint8: "*u8",
}
# hidden_size, num_attention_heads, q_lora_rank, n_routed_experts.
MODELS = {"flash": (4096, 64, 1024, 256), "pro": (7168, 128, 1536, 384)}
Report = dict[str, Any]
DONE: dict[str, Report] = {}  # by what decides the compiled kernel
FOUND: list[Report] = []  # of the present call
LAUNCHES: dict[str, list["Launch"]] = {}  # by kernel and constants: the first launch and the last
IR: dict[str, str] = {}  # by the same, for all calls
mode = "compile"  # or "names", or "indices"
# Bounds of loaded values that indices are computed from. A page number is not bounded.
LOADED = {
    "positions_ptr": (-1, 2**22),
    "sequence_ptr": (-1, 2**22),
    "first_ptr": (0, 2**20),  # pages that a table leaves out
    "window_first_ptr": (0, 2**20),
    "entry_first_ptr": (0, 2**20),
    "state_first_ptr": (0, 2**20),
    "candidates_ptr": (0, 2**20),  # entries of one sequence
    "reached_ptr": (0, 2**12),  # candidates of a chunk
    # Experts, and pairs of a token and an expert: a step has at most 2^22.
    "ids_ptr": (-1, 2**10),
    "blocks_ptr": (-1, 2**22),
    "order_ptr": (-1, 2**22),
    "pair_rows_ptr": (-1, 2**22),
    "before_ptr": (0, 2**22),
    "totals_ptr": (0, 2**22),
    "counts_ptr": (0, 2**22),
}
# Strides within a token are taken as they are, others, between rows or pages, as any up to 2^24:
# some kernels multiply them in 32 bits by up to 127 rows of a block.
INNER_STRIDES = {
    "stride_qa", "stride_oa", "stride_qi",  # heads
    "stride_xg", "stride_sg",  # groups of a linear layer
    "stride_h", "stride_r",  # residual streams, and their partial sums
    "stride_sk", "stride_ss", "stride_scale",  # scales of 128 values each
}  # fmt: skip


def special(parameter: Any, value: Any) -> bool:
    """Whether Triton compiles a kernel once more for what this number is or divides."""
    return isinstance(value, int) and not parameter.do_not_specialize


def descriptor_type(value: Any) -> str:
    element = TYPES[value.base.dtype][1:]
    layout = f",{value.layout!r}" if isinstance(value, GluonDescriptor) else ""
    return f"tensordesc<{element}{list(value.block_shape)}{layout}>"


def source(kernel: Any, arguments: dict[str, Any]) -> ASTSource:
    """As a launch specialises it: 16-byte pointers, integers of 1 and multiples of 16."""
    signature, constants, attributes = {}, {}, {}
    for position, parameter in enumerate(kernel.params):
        name, value = parameter.name, arguments[parameter.name]
        if isinstance(value, TensorDescriptor | GluonDescriptor):
            signature[name] = descriptor_type(value)
        elif isinstance(value, Tensor):
            signature[name] = TYPES[value.dtype]
            attributes[(position,)] = [["tt.divisibility", 16]]
        elif parameter.is_constexpr or value is None or (special(parameter, value) and value == 1):
            signature[name] = "constexpr"
            constants[(position,)] = value
        elif isinstance(value, int):
            signature[name] = "i32" if value < 2**31 else "i64"
            if special(parameter, value) and value % 16 == 0:
                attributes[(position,)] = [["tt.divisibility", 16]]
        else:
            signature[name] = "fp32"
    make = GluonASTSource if kernel.is_gluon() else ASTSource
    return make(kernel, signature, constants, attributes)


def arguments_of(kernel: Any, args: Any, kwargs: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """A launch's arguments by name, and its options."""
    names = [parameter.name for parameter in kernel.params]
    arguments = dict(zip(names, args, strict=False))
    arguments |= {name: value for name, value in kwargs.items() if name in names}
    return arguments, {name: value for name, value in kwargs.items() if name not in names}


def compile_launch(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
    """In place of a launch."""
    arguments, options = arguments_of(self, args, kwargs)
    if mode == "indices":
        grid = tuple(grid(arguments) if callable(grid) else grid)
        launch = Launch(self, arguments, grid, options)
        first_and_last = LAUNCHES.setdefault(launch.key, [])
        first_and_last[1:] = [launch]
        return
    constants = {name: value for name, value in arguments.items() if name.isupper()}
    add_report(source(self, arguments), options, constants)


def name_of(kernel: Any) -> str:
    return f"{kernel.__module__.removeprefix('finwhale.ops.')}.{kernel.__name__}"


def add_report(ast: ASTSource, options: dict[str, Any], constants: dict[str, Any]) -> None:
    """Add what a source compiles to, to FOUND."""
    name = name_of(ast.fn)
    if mode == "names":
        FOUND.append({"kernel": name, "options": sorted(options)})
        return
    key = f"{TARGET.arch} {name} {ast.signature} {ast.constants} {ast.attrs} {options}"
    if key not in DONE:
        DONE[key] = shared_report(key, ast, options) | {"constants": str(constants)}
    FOUND.append(DONE[key])


def shared_report(key: str, ast: ASTSource, options: dict[str, Any]) -> Report:
    """What a source compiles to. Of all workers of a session, the first one compiles it."""
    name = sha256(key.encode()).hexdigest()
    path = Path(os.environ["TRITON_CACHE_DIR"]) / f"{name}.report"
    found: Report = made_once(path, partial(compiled_report, ast, options))
    return found


def compiled_report(ast: ASTSource, options: dict[str, Any]) -> Report:
    """Run every stage of the compiler. triton.compile would also write each stage's result to a
    cache that nothing reads.
    """
    compiled, stages, metadata = first_ir(ast, options)
    for name, stage in stages.items():
        compiled = stage(compiled, metadata)
        if name == "ptx":
            loads = re.findall(r"cp\.async\.bulk\.tensor\S*complete_tx::bytes\S*", compiled)
            streamed = len(re.findall(r"ld\.global\S*evict_first", compiled))
        elif name == "amdgcn":
            assembly = compiled
    if TARGET.backend == "hip":
        return amd_report(ast, assembly, metadata)
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled)
        file.flush()
        command = [CUOBJDUMP, "-res-usage", file.name]
        usage = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return {
        "kernel": name_of(ast.fn),
        "signature": str(ast.signature),
        "code": sha256(compiled).hexdigest(),
        "registers": int(re.findall(r"REG:(\d+)", usage)[0]),
        "spilled": int(re.findall(r"STACK:(\d+)", usage)[0]),
        "shared": metadata["shared"],
        "tma_loads": loads,
        "streamed_loads": streamed,
    }


def amd_report(ast: ASTSource, assembly: str, metadata: dict[str, Any]) -> Report:
    """What an AMD GPU's assembler is told. `spilled` are bytes of memory a lane, as on SM90."""
    said = {name: int(value) for name, value in re.findall(r"\.(\w+): +(\d+)\n", assembly)}
    return {
        "kernel": name_of(ast.fn),
        "registers": said["vgpr_count"],
        "spilled": said["private_segment_fixed_size"],
        "shared": metadata["shared"],
    }


def first_ir(
    ast: ASTSource, options: dict[str, Any]
) -> tuple[Any, dict[str, Callable[..., Any]], dict[str, Any]]:
    """The kernel before the compiler's first stage, all stages, and the metadata that they add to.

    The last stage returns the GPU's code, such as a cubin.
    """
    backend, context = make_backend(TARGET), ir.context()
    ir.load_dialects(context)
    backend.load_dialects(context)
    parsed = backend.parse_options(ast.parse_options() | options)
    functions = backend.get_codegen_implementation(parsed)
    module = ast.make_ir(TARGET, parsed, functions, backend.get_module_map(), context)
    stages: dict[str, Callable[..., Any]] = {}
    backend.add_stages(stages, parsed, ast.language)
    return module, stages, {"target": TARGET, **parsed.__dict__}


@dataclass
class Launch:
    """A launch of which the ranges of indices are wanted."""

    kernel: Any
    arguments: dict[str, Any]
    grid: tuple[int, ...]
    options: dict[str, Any]

    def __post_init__(self) -> None:
        self.source = source(self.kernel, self.arguments)
        fixed = self.source.signature, self.source.constants, self.source.attrs
        self.key = f"{TARGET.arch} {name_of(self.kernel)} {fixed} {self.options}"

    def ir(self) -> str:
        """The kernel's first representation: Triton's, or Gluon's. It depends on the key alone."""
        if self.key not in IR:
            IR[self.key] = self.make_ir()
        return IR[self.key]

    def make_ir(self) -> str:
        module, stages, metadata = first_ir(self.source, self.options)
        return str(stages[self.source.ext](module, metadata).str_nodebug())

    def wraps(self) -> list[str]:
        given = []
        for name, kind in self.source.signature.items():
            value = self.arguments[name]
            if kind == "constexpr":
                continue
            if isinstance(value, int):
                far = name.startswith("stride") and name not in INNER_STRIDES
                value = Range(0, 2**24) if far else Range(value, value)
            given.append((name, value))
        return Ranges(given, self.grid, LOADED).run(self.ir())


def add_ranges() -> None:
    """Add what the launches' indices may come to, to FOUND."""
    launches = [launch for first_and_last in LAUNCHES.values() for launch in first_and_last]
    LAUNCHES.clear()
    for launch in launches:
        FOUND.append({"kernel": name_of(launch.kernel), "wraps": launch.wraps()})


def meta(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def f32(*shape: int) -> Tensor:
    return meta(*shape, dtype=torch.float32)


def call_mhc(D: int, N: int) -> None:
    params = MhcParams(num_iters=20, eps=1e-6, rms_eps=1e-6)
    w = MhcWeight(f32(24, 4 * D), f32(24), f32(24), f32(D))
    head = HcHeadWeight(f32(4, 4 * D), f32(1), f32(4), f32(D))
    post, res, streams = f32(N, 4), f32(N, 4, 4), meta(N, 4, D)
    how = mhc.MhcOptions(inline_asm=True)
    mhc.mhc_pre(meta(N, D)[:, None].expand(-1, 4, -1), w, params, options=how)
    mhc.mhc_post(meta(N, D), post, res, streams, options=how)
    mhc.mhc_post_pre(meta(N, D), post, res, streams, w, params, options=how)
    mhc.hc_head(streams, head, params, options=how)


def call_all(D: int, A: int, Q: int, E: int, N: int) -> None:
    """Every operator of activations that has a kernel, for N tokens; mHC and linear layers have
    more classes.
    """
    norm.rms_norm(meta(N, Q), f32(Q), 1e-6)
    for dtype in (torch.float32, torch.bfloat16):
        gate = meta(E, D, dtype=dtype)
        positions = meta(N, dtype=torch.int64)
        moe.route_by_score(meta(N, D), gate, f32(E), 6, 1.5, positions)
        table = meta(129280, 6, dtype=torch.int64)
        moe.route_by_hash(meta(N, D), gate, table, positions, 1.5, positions)
    sampling.sample(f32(N, 129280), SamplingBatch())
    logits = f32(N, 129280)
    every = replace(all_sampling_options(N, 129280, logits.device), logprobs=())
    for early in (False, True):
        sampling.sample(logits, every, early_launch=early)
        for batch in (without_filters(every), SamplingBatch()):
            sampling.best_candidates(logits[:, :64640], batch, 64640, early_launch=early)
        for count in (8, 128, 1024):
            candidates = meta(N, count, dtype=torch.int64)
            sampling.merge_candidates(candidates, early_launch=early)


def e4m3(*shape: int) -> LinearWeight:
    blocks = (*shape[:-2], shape[-2] // 128, shape[-1] // 128)
    return LinearWeight(meta(*shape, dtype=torch.float8_e4m3fn), 128, f32(*blocks))


FEW = linear.LinearOptions(early_launch=True, few_tokens=few_tokens_hopper.launch)


def call_e4m3(
    D: int,
    A: int,
    Q: int,
    I: int,  # noqa: E741
    N: int,
    options: linear.LinearOptions = linear.DEFAULT,
) -> None:
    """The linear layers of one model that have E4M3 weights and rounded inputs, for N tokens."""
    groups = A // 8
    for rows, width in ((Q + 512, D), (A * 512 + 8192, Q), (D, groups * 1024)):
        linear.linear(meta(N, width), e4m3(rows, width), options=options)
    linear.grouped_linear(meta(N, groups, 4096), e4m3(groups, 1024, 4096), options=options)
    w13, w2 = e4m3(2 * I, D), e4m3(D, I)
    shared = ExpertWeight(w13.weight, w2.weight, 128, w13.scale, w2.scale)
    linear.swiglu_mlp(meta(N, D), shared, 10.0, options=options)


def call_few(D: int, A: int, Q: int, I: int, N: int) -> None:  # noqa: E741
    """The linear layers of one model that few_tokens_hopper.py computes, for N tokens."""
    call_e4m3(D, A, Q, I, N, FEW)
    for rows in (2624, 1024):
        w = LinearWeight(meta(rows, D), out_dtype=torch.float32)
        linear.linear(meta(N, D), w, options=FEW)


def call_linear(D: int, A: int, Q: int, I: int, N: int) -> None:  # noqa: E741
    """The linear layers of one model, for N tokens."""
    call_e4m3(D, A, Q, I, N)
    groups = A // 8
    wo_a = replace(e4m3(groups, 1024, 4096), input_group=0)
    linear.grouped_linear(meta(N, groups, 4096), wo_a)
    for rounded in (False, True):
        w = LinearWeight(meta(2624, D), 128 * rounded, out_dtype=torch.float32)
        linear.linear(meta(N, D), w)
    quantise_triton.swiglu_quantise(meta(N, 2 * I), 10.0)
    if N <= 64:
        w = LinearWeight(meta(129280, D), out_dtype=torch.float32)
        linear.linear(meta(N, D), w)


def call_drafts(D: int, B: int, K: int) -> None:
    """A step of B sequences that verifies K drafts of each, and makes as many."""

    def ids(*shape: int) -> Tensor:
        return meta(*shape, dtype=torch.int64)

    N, W = B * (1 + K), 1 + K
    step = VerifiedStep(
        ids_N=ids(N), positions_N=ids(N), first_B=ids(B), token_indices_BP=ids(B, K)
    )
    planned = PlannedTokens(ids_S=ids(2 * N), sources_N=ids(N), positions_N=ids(N), links_N=ids(N))
    drafts.continue_tokens(planned, ids(2, B + 1, W), ids(N), ids(N))
    drafts.accept_drafts(ids(N), step, ids(B, W), ids(B, W))
    newest, last = ids(B, W)[:, 0], step_tokens(B, 2**20, 1)
    drafts.make_blocks(newest, last, page_table(B, 64), BlockShape(K, 2**17, 128))
    for early in (False, True):
        call_markov(B, linear.LinearOptions(early_launch=early))
    head = HcHeadWeight(f32(4, 4 * D), f32(1), f32(4), f32(D))
    streams = meta(B, K + 1, 4, D)[:, 1:]
    for w1 in (None, meta(129280, 256)):
        proj = f32(1, D + (0 if w1 is None else 256))
        w = ConfidenceWeight(head, proj, w1)
        drafts.draft_confidences(streams, newest, ids(B, K), w, MhcParams(20, 1e-6, 1e-6))


def call_markov(B: int, options: linear.LinearOptions) -> None:
    """The product of the Markov head's correction on one of 1, 2 and 4 ranks."""
    for X in (129280, 64640, 32320):
        for dtype in (torch.bfloat16, torch.float32):
            w2 = LinearWeight(meta(X, 256, dtype=dtype), out_dtype=torch.float32)
            linear.linear(meta(B, 256, dtype=dtype), w2, options=options)


def step_tokens(N: int, max_len: int, max_query: int) -> Tokens:
    positions = meta(N, dtype=torch.int64)
    ints = meta(N, dtype=torch.int32)
    return Tokens(positions, ints, meta(N + 1, dtype=torch.int32), max_len, max_query)


def page_table(N: int, rows_per_page: int) -> PageTable:
    pages = meta(N, 4096, dtype=torch.int32)
    return PageTable(pages, meta(N, dtype=torch.int32), rows_per_page)


def compress_part(N: int, width: int, ratio: int, rounding: Rounding) -> CompressPart:
    mixed, share, rows = (8, 4, 64) if ratio == 4 else (128, 2, 2)
    if rounding == "key":
        num_bytes = IndexKey(width).page_bytes(rows)
    else:
        num_bytes = RopeRow(width, 64).page_bytes(rows)
    pool = meta(1024, num_bytes, dtype=torch.uint8)
    weight = CompressorWeight(f32(mixed, width), f32(width), ratio)  # type: ignore[arg-type]
    state = CacheRows(f32(1024, share * width), page_table(N, 8 if ratio == 4 else 128))
    entries = CacheRows(pool, page_table(N, rows))
    return CompressPart(f32(N, share * width), weight, state, entries, rounding)


def call_indexer(width: int, heads: int, topk: int, N: int, max_len: int, max_query: int) -> None:
    """Compressors and the indexer of one model, for N tokens."""
    tokens, rotary = step_tokens(N, max_len, max_query), f32(2**20, 32, 2)
    parts = (compress_part(N, width, 4, "nope"), compress_part(N, 128, 4, "key"))
    compressor.compress(parts, tokens, rotary, 1e-6, 4)
    part = compress_part(N, width, 128, "nope")
    compressor.compress((part,), tokens, rotary, 1e-6, 4)
    q, weights, keys = meta(N, heads, 128), f32(N, heads), parts[1].entries
    options = {"inline_asm": True, "early_launch": True, "long_warps": NUM_WARPS}
    indexer.select_entries(q, weights, keys, rotary, tokens, topk, 0.1, True, **options)


def call_attention(
    A: int,
    C: int,
    Q: int,
    topk: int,
    N: int,
    max_query: int,
    sparse_attention: Any = portable_attention,
) -> None:
    """Attention over packed rows, for N tokens: the kernels that every GPU can have."""
    tokens, rotary = step_tokens(N, 2**20, max_query), f32(2**20, 32, 2)
    pool = meta(1024, RopeRow(C, 64).page_bytes(64), dtype=torch.uint8)
    rows, form = CacheRows(pool, page_table(N, 64)), RowForm(f32(C), rotary, 1e-6, True)
    prepare.prepare_qkv(meta(N, Q), f32(Q), meta(N, C), form, tokens, rows)
    selected = CacheRows(torch.empty_like(pool), page_table(N, 64))
    small = meta(1024, RopeRow(C, 64).page_bytes(2), dtype=torch.uint8)
    values, scales = quantise_triton.empty_quantised(N, A, C, pool)
    for entries, *out in (
        (None, meta(N, A, C)),
        (None, values, scales.flatten(1)),
        (TopkEntries(selected, meta(N, topk, dtype=torch.int32)), meta(N, A, C)),
        (AllEntries(CacheRows(small, page_table(N, 2)), 128), meta(N, A, C)),
    ):
        sparse_attention(
            meta(N, A, C),
            rotary,
            1e-6,
            tokens,
            Window(rows, 128),
            entries,
            f32(A),
            C**-0.5,
            *out,
        )


def calls() -> dict[str, Callable[[], None]]:
    found: dict[str, Callable[[], None]] = {}
    for name, (D, A, Q, E) in MODELS.items():
        for N in (8, 8192):
            found[f"activations-{name}-{N}"] = partial(call_all, D, A, Q, E, N)
        for N in (1, 2, 16, 256):
            found[f"drafts-{name}-{N}"] = partial(call_drafts, D, N, 5)
        for N in (2, 1024, 8192):
            found[f"mhc-{name}-{N}"] = partial(call_mhc, D, N)
        for N in (1, 2, 8, 64, 8192):
            found[f"linear-{name}-{N}"] = partial(
                call_linear, D, A, Q, 2048 if D == 4096 else 3072, N
            )
    for N in (1, 8):  # of one of eight ranks
        found[f"linear-flash-rank-{N}"] = partial(call_linear, 4096, 8, 1024, 256, N)
    for N in (8, 16):  # of one of two ranks
        found[f"linear-flash-few-{N}"] = partial(call_few, 4096, 32, 1024, 1024, N)
    # Of one of eight ranks, some parts have a single step.
    found["linear-flash-few-rank-8"] = partial(call_e4m3, 4096, 8, 1024, 256, 8, FEW)
    for sizes in ((512, 64, 512), (512, 64, 1024), (128, 16, 64)):  # width, heads, topk
        for step in ((8, 2**20, 1), (8192, 8192, 8192), (8192, 65536, 8192)):
            found[f"indexer-{sizes[2]}-{step[0]}-{step[1]}"] = partial(call_indexer, *sizes, *step)
    flash = (64, 512, 1024, 512)
    for N, max_query in ((1, 1), (32, 1), (8192, 8192)):
        found[f"attention-flash-{N}"] = partial(call_attention, *flash, N, max_query)
    # Their decodes differ in the number of heads and shares alone.
    for name, heads in (("pro", (128, 512, 1536, 1024)), ("demo", (8, 128, 128, 64))):
        found[f"attention-{name}-8192"] = partial(call_attention, *heads, 8192, 8192)
    return found


CALLS = calls()

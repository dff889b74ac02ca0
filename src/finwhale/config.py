"""Options of the engine that do not depend on a model. Frozen, self-checking; no torch."""

import argparse
from dataclasses import dataclass, field, fields
from typing import Literal, get_args

from finwhale.errors import FinwhaleError

Activations = Literal["as-trained", "exact"]
DraftTokens = int | Literal["auto"]
DtypeName = Literal["float32", "bfloat16"]
WoAInput = Literal["fp8", "bf16"]


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """How one engine runs.

    Attributes:
        device: "cpu", "cuda" or "cuda:N"; None: a GPU where there is one.
        dtype: the dtype of activations and caches; None: bfloat16 on a GPU, float32 on a CPU.
        activations: "as-trained" rounds activations and cached kv to FP8, and the indexer's
            queries and keys to FP4, as the model was trained; "exact" rounds none of them.
        wo_a_input: the input of wo_a, the first half of attention's output projection. "fp8"
            rounds it to FP8 like the input of every FP8 projection. "bf16" does not round it, as
            the authors' inference code: on a GPU it is then bfloat16, on a CPU float32. "bf16" is
            refused with exact activations, which round nothing.
        reference: run the plain torch definitions instead of the platform's table.
        batch_invariant: give a request's tokens the same bits whatever else is in the batch and
            however its prompt is cut, captured or not. On a CPU float32 always does; other dtypes
            and the references are refused.
        enforce_eager: launch every kernel from the host instead of replaying captured graphs.
        graph_sizes: batch sizes whose decode is captured; None: a ladder up to max_num_seqs.
        max_model_len: tokens of prompt and output of one sequence at most; None: what the
            checkpoint allows and the memory holds.
        max_num_seqs: sequences that run at once.
        max_num_batched_tokens: tokens of one forward (prefill chunks and decodes together).
        gpu_memory_utilization: of a GPU's memory, the part that weights, workspaces and cache may
            take; what others hold on it counts too.
        cache_memory_bytes: memory for the paged state; None: on a GPU what is left of
            gpu_memory_utilization, on a CPU at most 1 GiB.
        enable_prefix_caching: keep the state of what was read, so that a request which begins with
            the same tokens goes on from there. No token changes.
        compile: run decoder layers as graphs that are compiled ahead of time and kept in cache_dir.
        cache_dir: where compiled kernels are kept for the next start; None: finwhale in
            ~/.cache.
        draft_tokens: tokens that the MTP layer drafts after each of the model's, which the next
            forward verifies: the output is the same token for token, at any temperature. 0: none;
            "auto": as many as pay, by what was accepted and how long steps took.
        watchdog_seconds: when a step takes this long, every thread's stack is written to stderr;
            None: never.
    """

    device: str | None = None
    dtype: DtypeName | None = None
    activations: Activations = "as-trained"
    wo_a_input: WoAInput = field(
        default="fp8",
        metadata={
            "help": "round the input of attention's wo_a to FP8, or leave it bfloat16 as the "
            "authors' code does"
        },
    )
    reference: bool = False
    batch_invariant: bool = False
    enforce_eager: bool = False
    graph_sizes: tuple[int, ...] | None = None
    max_model_len: int | None = None
    max_num_seqs: int = 64
    max_num_batched_tokens: int = 2048
    gpu_memory_utilization: float = 0.9
    cache_memory_bytes: int | None = None
    enable_prefix_caching: bool = True
    compile: bool = False
    cache_dir: str | None = None
    draft_tokens: DraftTokens = 0
    watchdog_seconds: float | None = None

    def __post_init__(self) -> None:
        if self.dtype not in (None, "float32", "bfloat16"):
            raise FinwhaleError(f'dtype must be "float32" or "bfloat16", got {self.dtype!r}')
        if self.activations not in ("as-trained", "exact"):
            raise FinwhaleError(
                f'activations must be "as-trained" or "exact", got {self.activations!r}'
            )
        if self.wo_a_input not in get_args(WoAInput):
            raise FinwhaleError(f'wo_a_input must be "fp8" or "bf16", got {self.wo_a_input!r}')
        if self.wo_a_input == "bf16" and self.activations == "exact":
            raise FinwhaleError(
                'wo_a_input "bf16" means nothing with activations "exact", which round no input: '
                "leave one of them out"
            )
        if self.graph_sizes is not None and not all(
            0 < size <= self.max_num_seqs for size in self.graph_sizes
        ):
            raise FinwhaleError(
                f"graph_sizes must lie in 1..max_num_seqs ({self.max_num_seqs}), got "
                f"{self.graph_sizes}"
            )
        if not isinstance(self.enable_prefix_caching, bool):
            raise FinwhaleError(
                f"enable_prefix_caching must be True or False, got {self.enable_prefix_caching!r}"
            )
        drafts = self.draft_tokens
        if drafts != "auto" and (
            isinstance(drafts, bool)
            or not isinstance(drafts, int)
            or not 0 <= drafts <= MAX_DRAFT_TOKENS
        ):
            raise FinwhaleError(
                f'draft_tokens must be 0 to {MAX_DRAFT_TOKENS} or "auto", got {drafts!r}'
            )
        share = self.gpu_memory_utilization
        if isinstance(share, bool) or not isinstance(share, int | float) or not 0 < share <= 1:
            raise FinwhaleError(
                f"gpu_memory_utilization must be above 0 and at most 1, got {share!r}"
            )
        limit = self.watchdog_seconds
        if limit is not None and (
            isinstance(limit, bool) or not isinstance(limit, int | float) or not 0 < limit < 1e9
        ):
            raise FinwhaleError(f"watchdog_seconds must be above 0 or None, got {limit!r}")
        for name in _COUNTS:
            value = getattr(self, name)
            if value is None and name in _MAY_BE_NONE:
                continue
            if isinstance(value, bool) or not isinstance(value, int):
                raise FinwhaleError(f"{name} must be an integer, got {value!r}")
            if value < 1:
                raise FinwhaleError(f"{name} must be at least 1, got {value}")


# The largest draft_tokens of any draft head. A model's own limit is its max_draft_tokens.
MAX_DRAFT_TOKENS = 3
_COUNTS = ("max_model_len", "max_num_seqs", "max_num_batched_tokens", "cache_memory_bytes")
_MAY_BE_NONE = ("max_model_len", "cache_memory_bytes")


def add_wo_a_input(parser: argparse._ActionsContainer) -> None:
    """--wo-a-input, as EngineConfig declares it."""
    (option,) = (option for option in fields(EngineConfig) if option.name == "wo_a_input")
    parser.add_argument(
        "--wo-a-input",
        choices=get_args(WoAInput),
        default=option.default,
        help=f"{option.metadata['help']} (default: %(default)s)",
    )

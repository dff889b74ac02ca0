"""What the engine needs of a model: its configuration, cache, weights, forward and draft head.

The engine, the server and the commands use models through this module and `registry.py` only.

Legend: N tokens of a step, all sequences one after the other; M rows whose logits are wanted; H
residual streams; D hidden; X tokens of the vocabulary whose logits this rank computes.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, fields, is_dataclass, replace
from math import lcm
from pathlib import Path
from typing import Any, Literal, ParamSpec, Protocol

import torch
from torch import Tensor

from finwhale.chat.effort import EffortLadder
from finwhale.checkpoint.joint import JointRanks
from finwhale.checkpoint.loading import StoredWeight
from finwhale.checkpoint.places import Places
from finwhale.checkpoint.spec import Storage, WeightSpec
from finwhale.distributed.collectives import Collectives
from finwhale.distributed.rank import ALONE, Rank
from finwhale.ops import Ops
from finwhale.ops.attention import layout as row_layout
from finwhale.ops.indexer import layout as key_layout
from finwhale.ops.launch.sizes import ModelSizes
from finwhale.ops.paging import BLOCK_TOKENS, PageTable, Tokens
from finwhale.ops.sampling import Sample

P = ParamSpec("P")
FieldKind = Literal["row", "key", "state"]

# Bytes. Kernels load 16 bytes at once, so every part of a page begins at a multiple of 16. A page
# of packed parts begins at a multiple of a cache line.
PART_ALIGN, PAGE_ALIGN = 16, 128
# Triton compiles a kernel anew for a row stride that is no multiple of 16 float32 values.
STATE_ALIGN = 64


# --- The cache ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheField:
    """One kind of row that some layers store in the cache.

    Attributes:
        width: values in a row.
        kind: "row" of attention, "key" of an indexer, or "state" of a compressor. State is float32
            whatever the dtype of the activations.
        rope: number of last values of a row, which are never rounded.
        layers: the layers that store it. The draft layers' numbers follow the model's.
    """

    name: str
    width: int
    kind: FieldKind
    rope: int
    layers: tuple[int, ...]

    @property
    def full_precision(self) -> bool:
        return self.kind == "state"

    def packed_bytes(self, rows_per_page: int) -> int:
        """Bytes of one layer's part of a packed page. A packed index key of 128 FP4 values takes 68
        bytes, for example.
        """
        assert not self.full_precision
        if self.kind == "row":
            return row_layout.page_bytes(rows_per_page, self.width, self.rope)
        return key_layout.page_bytes(rows_per_page, self.width)


@dataclass(frozen=True, slots=True, kw_only=True)
class PageLayout:
    """The layout of a group's rows in its pages.

    A page of a packed group has one part for each field and layer. A page of another group has
    rows_per_page rows, each with the values of every field and layer. So row r of page p lies
    row_bytes * (p * rows_per_page + r) bytes after row 0 of page 0, and a layer's rows form a
    strided tensor [rows, width].

    Attributes:
        page_bytes: size of a page.
        row_bytes: bytes from one row to the next; 0: the group is packed.
        offsets: byte offset in a page of each part, by field name and layer.
    """

    page_bytes: int
    row_bytes: int
    offsets: Mapping[tuple[str, int], int]


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheGroup:
    """Fields whose rows share their pages and their page table.

    A sequence can resume at the end of any block of another sequence with the same prefix. It needs
    all rows of the groups that keep every row, and the rows of tokens first_needed(end) .. end-1 of
    the other groups. No page spans two blocks, so no sequence writes into a page that another one
    reads.

    Attributes:
        tokens_per_row: 1, or the compression ratio: row r exists once tokens_per_row * (r + 1)
            tokens have been computed.
        keep: None: the group keeps every row. (align, before): after n tokens, it keeps the rows of
            the tokens from floor(n / align) * align - before on.
        tail_only: a step writes only the rows that later steps need to resume at the ends of its
            blocks and to continue after it. They can continue after any token of a step that has at
            most max_verify_tokens.
        max_verify_tokens: the most tokens of a sequence in a step that verifies drafts. Only the
            first token is certain to be accepted.
    """

    name: str
    tokens_per_row: int
    rows_per_page: int
    keep: tuple[int, int] | None
    tail_only: bool
    max_verify_tokens: int = 1
    fields: tuple[CacheField, ...]

    def __post_init__(self) -> None:
        assert self.block_tokens % self.tokens_per_page == 0

    @property
    def tokens_per_page(self) -> int:
        return self.tokens_per_row * self.rows_per_page

    @property
    def block_tokens(self) -> int:
        return BLOCK_TOKENS

    def first_needed(self, num_tokens: int) -> int:
        """The first token whose row a token at position num_tokens or later can need."""
        if self.keep is None:
            return 0
        align, before = self.keep
        return max(0, num_tokens // align * align - before)

    def unneeded_at(self, first_page: int) -> int:
        """The smallest number of tokens after which no token needs page number first_page."""
        assert self.keep is not None
        align, before = self.keep
        return -(-((first_page + 1) * self.tokens_per_page + before) // align) * align

    def first_written(self, start: int, end: int) -> int:
        """The first token whose row a step over tokens start..end-1 writes."""
        if not self.tail_only:
            return start
        settled = end if end - start > self.max_verify_tokens else start + 1
        return max(start, self.first_needed(settled))

    def layout(self, itemsize: int, packed: bool = False) -> PageLayout:
        """The layout of a page.

        Args:
            itemsize: bytes of one activation.
            packed: rows and keys are stored as the bytes that the kernels read, not as values.
        """
        states = {f.full_precision for f in self.fields}
        assert len(states) == 1, f"{self.name}: states have groups of their own"
        packed = packed and states == {False}
        offsets: dict[tuple[str, int], int] = {}
        end = 0
        for f in self.fields:
            size = f.width * (4 if f.full_precision else itemsize)
            if packed:
                size = f.packed_bytes(self.rows_per_page)
            for layer in f.layers:
                offsets[f.name, layer] = end
                end += _aligned(size, PART_ALIGN)
        if packed:
            return PageLayout(page_bytes=_aligned(end, PAGE_ALIGN), row_bytes=0, offsets=offsets)
        # A row holds a whole number of each field's rows: a table on a CPU finds a layer's row r
        # as row k * r of a contiguous array (ops/cpu_math.py).
        widths = [f.width * itemsize for f in self.fields]
        row_bytes = _aligned(end, STATE_ALIGN if states == {True} else lcm(PART_ALIGN, *widths))
        return PageLayout(
            page_bytes=self.rows_per_page * row_bytes, row_bytes=row_bytes, offsets=offsets
        )

    def page_bytes(self, itemsize: int, packed: bool = False) -> int:
        """Bytes of one page with all fields and layers. The arguments are those of `layout`."""
        return self.layout(itemsize, packed).page_bytes


def _aligned(size: int, align: int) -> int:
    return -(-size // align) * align


@dataclass(frozen=True, slots=True)
class PagedCache:
    """The memory of the cache.

    Attributes:
        pools: field -> layer -> the layer's rows in all pages, a strided view of `pages`: [rows,
            width], where row r of page p is row p * rows_per_page + r; for packed rows and keys,
            uint8 [num_pages, bytes of the layer's part].
        pages: group -> uint8 [num_pages, page_bytes]. A page is contiguous and has the rows of all
            layers, so copying it saves or restores all of them. Empty while a graph is traced,
            which needs only some pools.
    """

    pools: Mapping[str, Mapping[int, Tensor]]
    pages: Mapping[str, Tensor] = field(default_factory=dict)

    def pool(self, field: str, layer: int) -> Tensor:
        return self.pools[field][layer]


# --- One step -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class StepInputs:
    """The inputs of one forward over a batch of sequences of different lengths.

    Attributes:
        token_ids: [N] int64.
        tokens: the positions and sequences of the tokens.
        tables: the page table of each group of the cache.
        further_slots: [N,K] int32: slots of rows of the window group that each token sees in
            addition to its own window, in layers without compressed entries; unused slots are -1
            and come last. None: a token sees only its window.
        own_tokens: in a model whose ranks divide the tokens of this step, those of this rank; the
            model sets it. None: the ranks do not divide them.
    """

    token_ids: Tensor
    tokens: Tokens
    tables: Mapping[str, PageTable]
    further_slots: Tensor | None = None
    own_tokens: Tokens | None = None

    def bounded(self, max_len: int, max_query: int) -> "StepInputs":
        """The same inputs with other bounds of the tokens."""
        own = self.own_tokens
        return replace(
            self,
            tokens=self.tokens.bounded(max_len, max_query),
            own_tokens=None if own is None else own.bounded(max_len, max_query),
        )


class Segments(Protocol):
    """Divides a forward into captured graphs and functions that run eagerly between them."""

    def eager(self, fn: Callable[P, None], *args: P.args, **kwargs: P.kwargs) -> None:
        """Run `fn` outside the captured graph. `fn` writes into its arguments.

        At a replay, a StepInputs among the arguments may have other bounds (`StepInputs.bounded`).
        """
        ...


class Inline:
    """Segments without a capture: `eager` calls the function."""

    def eager(self, fn: Callable[P, None], *args: P.args, **kwargs: P.kwargs) -> None:
        fn(*args, **kwargs)


# --- The model ------------------------------------------------------------------------------------


class ModelConfig(Protocol):
    """The part of a configuration that code outside the model may read.

    Implementations are frozen data classes: `dataclasses.asdict` identifies a configuration.
    """

    @property
    def model_type(self) -> str: ...
    @property
    def vocab_size(self) -> int: ...
    @property
    def max_position_embeddings(self) -> int: ...
    @property
    def bos_token_id(self) -> int: ...
    @property
    def eos_token_ids(self) -> tuple[int, ...]: ...
    @property
    def draft_head(self) -> str | None:
        """The kind of the checkpoint's draft head ("mtp", "dspark"); None: it has none."""
        ...

    @property
    def max_draft_tokens(self) -> int:
        """The most drafts that the draft head makes at once; 0 if there is none."""
        ...

    @property
    def draft_block_tokens(self) -> int:
        """Number of rows that a draft pass writes, starting at the newest token, whatever the
        number of drafts. 0: K drafts write K - 1 rows.
        """
        ...

    def without_draft_head(self) -> "ModelConfig":
        """The same model without its draft head."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftStart:
    """The inputs from which a draft head makes the drafts of B sequences.

    Attributes:
        hidden: [B,..]: the row that the head returned for each sequence's last verified token.
        newest_ids: [B] int64: the token after it, which the model has not computed yet.
        tokens: the last verified token of each sequence, in order. Position -1 is padding.
        tables: the page tables of the B sequences, with pages for the drafts.
    """

    hidden: Tensor
    newest_ids: Tensor
    tokens: Tokens
    tables: Mapping[str, PageTable]


ChooseDraft = Callable[[Tensor, int], Tensor]
"""Chooses a draft of each sequence: (logits, k) -> ids.

    logits: [B,X] float32: this rank's part of the logits for draft k, counted from 0.
    ids: [B] int64, the same on all ranks, and valid even if logits are not finite.

With several ranks, the call is a collective.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Drafts:
    """K drafts of each of B sequences.

    Attributes:
        ids: [K,B] int64.
        confidences: [K,B] float32: the estimated probability that the model accepts the draft if it
            accepts all drafts before it; None: the head does not estimate it.
    """

    ids: Tensor
    confidences: Tensor | None = None


class DraftHead(Protocol):
    """Layers that draft tokens from the model's residual streams.

    A head has its own rows in the cache, at the positions of the tokens that it computes. A later
    step overwrites the rows of rejected drafts before any token reads them. No call waits for the
    device, so the engine can capture the calls in graphs.
    """

    def __call__(
        self,
        inputs: StepInputs,
        streams_NHD: Tensor,
        next_token_ids: Tensor,
        cache: PagedCache,
        segments: Segments,
    ) -> Tensor:
        """Compute the N tokens that the model has computed; returns a row for each (DraftStart).

        Args:
            streams_NHD: the model's residual streams of these tokens.
            next_token_ids: [N] int64: the token that follows each of them.
        """
        ...

    def draft(
        self,
        start: DraftStart,
        num_drafts: int,
        cache: PagedCache,
        segments: Segments,
        choose: ChooseDraft,
    ) -> Drafts:
        """Draft `num_drafts` tokens after each sequence's newest token.

        Args:
            choose: called once for each draft, in order.
        """
        ...

    def compute_logits(self, streams_MHD: Tensor) -> Tensor:
        """This rank's logits [M,X] float32 of rows that the head returned."""
        ...


class Model(Protocol):
    """One rank of a model, on one device. All ranks make the same calls in the same order."""

    @property
    def config(self) -> ModelConfig:
        """The configuration of the whole model."""
        ...

    @property
    def weights(self) -> Any:
        """The result of `WeightLoading.fill`: data classes and tuples of tensors."""
        ...

    @property
    def device(self) -> torch.device: ...
    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the activations."""
        ...

    @property
    def residual_shape(self) -> tuple[int, ...]:
        """Shape of one token's residual streams: (H, D)."""
        ...

    @property
    def launch_sizes(self) -> ModelSizes:
        """The sizes that the launch signatures of kernels depend on."""
        ...

    @property
    def divided_steps(self) -> "DividedSteps | None":
        """The steps in which a rank computes whole layers for some tokens; None: there are none."""
        ...

    @property
    def draft_head(self) -> DraftHead | None: ...
    @property
    def vocab_part(self) -> range:
        """The token ids whose logits this rank computes. A single rank computes all."""
        ...

    @property
    def sample(self) -> Sample:
        """Samples from the ranks' logits: each rank passes its own [S,X], and all get the tokens.

        The tokens are those that the sampling operator chooses from the whole rows. With several
        ranks, the call is a collective.
        """
        ...

    def __call__(self, inputs: StepInputs, cache: PagedCache, segments: Segments) -> Tensor:
        """Compute N tokens and write their state; returns their residual streams [N,H,D]."""
        ...

    def compute_logits(self, streams_MHD: Tensor) -> Tensor:
        """This rank's logits [M,X] float32 of residual streams [M,H,D]; no collective."""
        ...

    @property
    def writes_draft_context(self) -> bool:
        """Whether a forward also writes rows that only the draft head reads."""
        ...

    def forward_with_logits(
        self, inputs: StepInputs, cache: PagedCache, segments: Segments, for_drafts: bool = True
    ) -> tuple[Tensor, Tensor]:
        """A call, then `compute_logits` of all tokens: logits [N,X] and residual streams.

        for_drafts: False: leave out the rows of `writes_draft_context`.
        """
        ...

    def run_one_of_each(self, inputs: StepInputs, cache: PagedCache, segments: Segments) -> Tensor:
        """Run only one layer of each kind, which launches every kernel of the forward."""
        ...

    def run_library_gemms(self, num_rows: int, num_tokens: int) -> None:
        """Run the GEMMs of weights that are not quantised, for every number of rows.

        cuBLAS chooses among many kernels by the number of rows. It loads a kernel when it chooses
        it for the first time, and then waits until the GPU has no work.

        Args:
            num_rows: the most rows of logits.
            num_tokens: the most tokens of a step.
        """
        ...

    def without_collectives(self) -> AbstractContextManager[None]:
        """Within it, the model waits for no other rank, and its results have no meaning.

        The ranks build their kernels one after the other, so building must not communicate.
        """
        ...

    def record_routed_experts(self, max_tokens: int) -> Tensor:
        """From now on, let every call write the experts that its layers choose for each token.

        Args:
            max_tokens: the most tokens of a call.

        Returns:
            The tensor [max_tokens, layers, top-k] to which calls write: uint8 for models of up to
            256 experts, otherwise int16. Row i belongs to the call's token i.
        """
        ...

    def limit_positions(self, max_positions: int) -> None:
        """Shrink the rotary tables to the first `max_positions` positions."""
        ...


def tensors_of(value: object) -> list[Tensor]:
    """The tensors in nested data classes, tuples and lists, in a fixed order."""
    if isinstance(value, Tensor):
        return [value]
    parts: Sequence[object] = ()
    if is_dataclass(value):
        parts = [getattr(value, field.name) for field in fields(value)]
    elif isinstance(value, tuple | list):
        parts = value
    return [tensor for part in parts for tensor in tensors_of(part)]


class WeightStream(Protocol):
    """Reads the weights of a checkpoint, in any order."""

    @property
    def storages(self) -> Mapping[str, Storage]: ...
    def into(
        self, places: Places, ranks: JointRanks | None = None
    ) -> Iterator[tuple[WeightSpec, StoredWeight | None]]:
        """Yield each weight's specification and stored values.

        Args:
            places: destinations for the bytes of some weights. If the stream has written a
                weight to its destination itself, it yields None instead of the values.
            ranks: the ranks that iterate together, if they can read for each other.
        """
        ...


class RankConfig(Protocol):
    def __call__(self, config: Any, size: int, *, round_activations: bool = False) -> ModelConfig:
        """The sizes of one of `size` ranks. Raises FinwhaleError if they cannot divide the model.

        Args:
            round_activations: the model rounds groups of activations, which must remain whole.
        """
        ...


@dataclass(frozen=True, slots=True)
class DividedSteps:
    """Steps of `least` tokens and more, in which each of num_ranks ranks computes its share of the
    tokens with kernels for other sizes than in smaller steps.
    """

    least: int
    num_ranks: int
    sizes: ModelSizes

    def share(self, num_tokens: int) -> int:
        """The number of tokens of the first rank, in a step of num_tokens; 0: it is not divided."""
        return -(-num_tokens // self.num_ranks) if num_tokens >= self.least else 0


class WeightSpecs(Protocol):
    def __call__(self, config: Any, rank: Rank = ALONE) -> Mapping[str, WeightSpec]:
        """Every tensor of a checkpoint by its official name, with the slice that `rank` holds."""
        ...


class WeightBytes(Protocol):
    def __call__(self, config: Any, dtype: torch.dtype, ops: Ops, ranks: int = 1) -> int:
        """Bytes of one rank's weights in the memory layout of the operator table `ops`.

        Args:
            dtype: dtype of the activations.
        """
        ...


class WeightLoading(Protocol):
    """A rank's weights during loading, one tensor after the other, in any order.

    Attributes:
        num_bytes: bytes of all weights, as they are before `fill` brings some into another form.
    """

    @property
    def num_bytes(self) -> int: ...

    def fill(self, stream: WeightStream, ranks: JointRanks | None = None) -> Any:
        """Add every weight of `stream`, one at a time, and return the loaded weights.

        Args:
            ranks: the ranks that load together, if they can read for each other.

        Raises:
            CheckpointError: a tensor is missing, unknown to the model, or occurs twice.
        """
        ...

    def add(self, spec: WeightSpec, stored: StoredWeight | None) -> None:
        """Copy a stored weight to its destination.

        Raises:
            CheckpointError: the weight occurs twice, is unknown, or has invalid values.
        """
        ...

    def finish_unfilled(self) -> Any:
        """The weights without values: on torch's meta device, where tensors have no memory."""
        ...

    def finish_part(self, device: torch.device, current: Any) -> tuple[Any, frozenset[int]]:
        """The weights, some of which may be missing.

        Args:
            device: the device on which the operators convert weights to their final form.
            current: the weights that are updated; the result has the same tensors in the same
                order.

        Returns:
            The weights (see `fill`), and the ids of the tensors in them that are complete.

        Raises:
            CheckpointError: a tensor has only some of the weights that it is made of.
        """
        ...


class BeginLoading(Protocol):
    def __call__(
        self,
        config: Any,
        *,
        storages: Mapping[str, Storage],
        dtype: torch.dtype,
        device: torch.device,
        round_activations: bool,
        round_wo_a: bool,
        ops: Ops,
        rank: Rank,
    ) -> WeightLoading:
        """Allocate a rank's weights, which the caller then fills.

        Args:
            config: the whole model's configuration.
            storages: the stored format of each weight.
        """
        ...


class BuildModel(Protocol):
    def __call__(
        self,
        config: Any,
        ops: Ops,
        weights: Any,
        *,
        round_activations: bool,
        max_positions: int,
        collectives: Collectives = ...,
    ) -> Model:
        """Create one rank of the model from the weights of `WeightLoading.fill`.

        Args:
            config: the configuration of the whole model.
            round_activations: round activations and cached state as the model was trained.
            max_positions: the longest sequence.
            collectives: combines the ranks' results; by default there is one rank.
        """
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Architecture:
    """One kind of model in the registry: the functions that the engine needs to run it.

    Configurations come from `read_config`, and weights from `begin_loading`.

    Attributes:
        read_config: reads the contents of a config.json. Raises CheckpointError.
        check_rounding: raises CheckpointError if the model cannot round activations as trained.
        rank_config: returns the sizes of one rank of several.
        weight_specs: returns every tensor of a checkpoint, by its official name.
        ignored_prefixes: returns prefixes of tensor names that loading ignores, with the reason.
        kernel_obstacles: returns the reasons why the kernels for packed weights do not support this
            model with weights stored in these ways; empty: they support it.
        cache_groups: declares the cache, including that of draft layers.
        begin_loading: allocates the weights; the caller then fills them.
        build: creates the model.
        chat_dialect: returns the dialect of the chat format of the checkpoint in a directory.
        describe: describes the parts of the model for users: title and text.
        part_of: returns the part of the model to which a tensor belongs, by the tensor's name.
        weight_bytes: returns the bytes of one rank's weights.
        whole_attention_bytes: returns the bytes that `Rank.whole_attention` adds to them.
        fits_whole_attention: returns whether each of several ranks holds attention's weights whole
            (`Rank.whole_attention`) if nothing says otherwise, on GPUs with so many bytes.
    """

    read_config: Callable[[Mapping[str, Any]], ModelConfig]
    check_rounding: Callable[[Any], None]
    rank_config: RankConfig
    weight_specs: WeightSpecs
    ignored_prefixes: Callable[[Any], dict[str, str]]
    kernel_obstacles: Callable[[Any, Mapping[str, Storage]], Sequence[str]]
    cache_groups: Callable[[Any], tuple[CacheGroup, ...]]
    begin_loading: BeginLoading
    build: BuildModel
    chat_dialect: Callable[[Path], EffortLadder]
    describe: Callable[[Any], dict[str, str]]
    part_of: Callable[[str], str]
    weight_bytes: WeightBytes
    whole_attention_bytes: WeightBytes
    fits_whole_attention: Callable[[Any, int], bool]

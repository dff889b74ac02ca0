"""Protocols that a model implements: its configuration, its forward and its draft head.

The engine, the server and the commands use models through this module, `registry.py`, and the
modules that this one imports: `cache.py` and `step_inputs.py`.

Legend: N tokens of a step, all sequences one after the other; M rows whose logits are wanted; H
residual streams; D hidden; X tokens of the vocabulary whose logits this rank computes.
"""

from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from finwhale.models.cache import PagedCache
from finwhale.models.step_inputs import ChooseDraft, DraftStart, Segments, StepInputs
from finwhale.ops.launch.sizes import ModelSizes
from finwhale.ops.sampling import Sample


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

    @property
    def max_draft_tokens(self) -> int:
        """The most drafts that the draft head makes at once; 0 if there is none."""

    @property
    def draft_block_tokens(self) -> int:
        """Number of rows that a draft pass writes, starting at the newest token, whatever the
        number of drafts. 0: K drafts write K - 1 rows.
        """

    def without_draft_head(self) -> "ModelConfig":
        """The same model without its draft head."""

    def with_exact_prefill(self) -> "ModelConfig":
        """The same model, which computes prompts as EngineConfig.exact_prefill says.

        Raises:
            FinwhaleError: it always does.
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

    def draft(
        self,
        start: DraftStart,
        num_drafts: int,
        cache: PagedCache,
        segments: Segments,
        choose: ChooseDraft,
    ) -> Drafts:
        """Draft tokens after each sequence's newest one; calls `choose` once for each, in order."""

    def serve_others_tokens(self, lane_rows: int) -> None:
        """Take part in a call in which this data-parallel rank has no tokens (StepInputs)."""

    def serve_others(self, num_drafts: int, lane_rows: int) -> None:
        """Take part in a `draft` in which this data-parallel rank has no sequences (DraftStart)."""

    def compute_logits(self, streams_MHD: Tensor) -> Tensor:
        """This rank's logits [M,X] float32 of rows that the head returned."""


@dataclass(frozen=True, slots=True)
class DividedSteps:
    """Steps of `least` tokens and more, in which each of num_ranks ranks computes its share of the
    tokens with kernels for other sizes than in smaller steps.
    """

    least: int
    num_ranks: int
    sizes: ModelSizes

    def tokens_per_rank(self, num_tokens: int) -> int:
        """The number of tokens of the first rank, in a step of num_tokens; 0: it is not divided."""
        return -(-num_tokens // self.num_ranks) if num_tokens >= self.least else 0


class Model(Protocol):
    """One rank of a model, on one device. All ranks make the same calls in the same order."""

    @property
    def config(self) -> ModelConfig:
        """The configuration of the whole model."""

    @property
    def weights(self) -> Any:
        """The result of `Assembler.finish`: data classes and tuples of tensors."""

    @property
    def device(self) -> torch.device: ...
    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the activations."""

    @property
    def residual_shape(self) -> tuple[int, ...]:
        """Shape of one token's residual streams: (H, D)."""

    @property
    def draft_head(self) -> DraftHead | None: ...
    @property
    def vocab_part(self) -> range:
        """The token ids whose logits this rank computes. A single rank computes all."""

    @property
    def sample(self) -> Sample:
        """Samples from the ranks' logits: each rank passes its own [S,X], and all get the tokens.

        The tokens are those that the sampling operator chooses from the whole rows. With several
        ranks, the call is a collective.
        """

    def __call__(self, inputs: StepInputs, cache: PagedCache, segments: Segments) -> Tensor:
        """Compute N tokens and write their state; returns their residual streams [N,H,D]."""

    def compute_logits(self, streams_MHD: Tensor) -> Tensor:
        """This rank's logits [M,X] float32 of residual streams [M,H,D]; no collective."""

    def forward_with_logits(
        self, inputs: StepInputs, cache: PagedCache, segments: Segments
    ) -> tuple[Tensor, Tensor]:
        """A call, then `compute_logits` of all tokens: logits [N,X] and residual streams."""

    def serve_others(self, lane_rows: int) -> None:
        """Take part in a step of data-parallel ranks in which this rank has no tokens.

        Args:
            lane_rows: the most tokens that a rank has.
        """

    def record_routed_experts(self, max_tokens: int) -> Tensor:
        """Make every later call write the experts that its layers choose for each token.

        Args:
            max_tokens: the most tokens of a call.

        Returns:
            The tensor [max_tokens, layers, top-k] to which calls write: uint8 for models of up to
            256 experts, otherwise int16. Row i belongs to the call's token i.
        """

    def limit_positions(self, max_positions: int) -> None:
        """Shrink the rotary tables to the first `max_positions` positions."""

    # --- Kernels, which the engine builds and loads before the first step ---

    @property
    def launch_sizes(self) -> ModelSizes:
        """The sizes that the launch signatures of kernels depend on."""

    @property
    def divided_steps(self) -> DividedSteps | None:
        """The steps in which a rank computes whole layers for some tokens; None: there are none."""

    def run_one_of_each(self, inputs: StepInputs, cache: PagedCache, segments: Segments) -> Tensor:
        """Run only one layer of each kind, which launches every kernel of the forward."""

    def run_library_gemms(self, num_rows: int, num_tokens: int) -> None:
        """Run the GEMMs of weights that are not quantised, for every number of rows.

        cuBLAS chooses among many kernels by the number of rows. It loads a kernel when it chooses
        it for the first time, and then waits until the GPU has no work.

        Args:
            num_rows: the most rows of logits.
            num_tokens: the most tokens of a step.
        """

    def without_collectives(self) -> AbstractContextManager[None]:
        """Skip collectives inside this context. Results have the right shape, arbitrary values.

        The ranks build their kernels one after the other, so building must not communicate.
        """

"""Drafting: the MTP layer guesses the next tokens, one forward of the model verifies them.

After each forward the layer reads the same tokens, each with the one that follows it, and so keeps
up with the prompt; from the last it guesses on, from its own streams. Everything happens on the
device, where it is also decided which drafts of the step were right: nothing waits for the host
between a verification and the next drafts.

Its rows stand at the positions of the model's. What it wrote for guesses, or for drafts that were
wrong, is overwritten when the model reads these positions, before anybody sees it.

Legend: N tokens of the step, M rows whose logits are wanted, B sequences that get drafts, K the
most drafts of one, H residual streams, D hidden.
"""

from collections.abc import Sequence as Items
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
import torch
from torch import Tensor

from finwhale.config import DraftTokens
from finwhale.engine.plan.sequences import Chunk
from finwhale.engine.rank.batch import Batch
from finwhale.engine.rank.host_transfer import send
from finwhale.errors import FinwhaleError
from finwhale.models.protocol import DraftHead, Inline, ModelConfig, PagedCache, StepInputs
from finwhale.ops.paging import PageTable, Tokens
from finwhale.ops.sampling import Sample, SamplingBatch


@dataclass(frozen=True, slots=True)
class Forward:
    """One forward, before the MTP layer has read its tokens.

    Attributes:
        streams: [N,H,D].
        logits: [M,V] float32, rows batch.logits_rows of the tokens.
    """

    batch: Batch
    streams: Tensor
    logits: Tensor


def check_can_draft(draft_tokens: DraftTokens, config: ModelConfig) -> None:
    """Raises FinwhaleError if the checkpoint has no supported draft head for that many drafts."""
    most = config.max_draft_tokens
    if draft_tokens == 0 or (most and (draft_tokens == "auto" or draft_tokens <= most)):
        return
    if config.draft_head == "dspark":
        raise FinwhaleError(
            "draft_tokens: this checkpoint drafts with DSpark, which is not supported: use 0"
        )
    if config.draft_head is None:
        raise FinwhaleError("draft_tokens: this checkpoint has no MTP layer to draft with: use 0")
    raise FinwhaleError(
        f'draft_tokens must be 0 to {most} or "auto" with this checkpoint, got {draft_tokens}'
    )


class Drafter:
    """Makes drafts with the MTP layer."""

    def __init__(
        self, layer: DraftHead, cache: PagedCache, sample: Sample, device: torch.device
    ) -> None:
        self._layer, self._sample = layer, sample
        self._cache = cache
        self._device = device
        self._segments = Inline()

    @torch.inference_mode()
    def propose(
        self, forward: Forward, chunks: Items[Chunk], chosen_M: Tensor | None
    ) -> Tensor | None:
        """Read a step's tokens and guess on; chunk.propose drafts of each chunk.

        Args:
            chunks: of the step.
            chosen_M: int64: the tokens that were chosen from the logits; None: there are none.

        Returns:
            int64 [K,B] for the chunks with drafts, in order; meaningless past a chunk's own
            number. None: no chunk has any.
        """
        inputs, rows = forward.batch.inputs, forward.batch.logits_rows
        (following,) = send(self._device, np.array(_following(chunks), np.int64))
        if chosen_M is not None:
            following.index_copy_(0, rows, chosen_M)
        streams = self._layer(inputs, forward.streams, following, self._cache, self._segments)
        proposing = [chunk for chunk in chunks if chunk.propose]
        if not proposing:
            return None
        assert chosen_M is not None
        last_B = self._last_rows(chunks, rows, chosen_M)
        streams = streams.index_select(0, last_B)
        first_B = inputs.tokens.positions.index_select(0, last_B)
        drafts = [self._guess(streams, 0)]
        (places,) = send(
            self._device, np.array([i for i, c in enumerate(chunks) if c.propose], np.int64)
        )
        tables = _select(inputs, places)
        max_len = max(chunk.end + chunk.propose for chunk in proposing)
        out = drafts[0].new_zeros(max(c.propose for c in proposing), len(proposing))
        out[0] = drafts[0]
        ids, at = drafts[0], None
        count = len(proposing)
        for step in range(1, len(out)):
            going = [i for i, chunk in enumerate(proposing) if chunk.propose > step]
            if len(going) < count:
                before = [i for i, c in enumerate(proposing) if c.propose > step - 1]
                kept = [before.index(i) for i in going]
                (kept_B, at) = send(
                    self._device, np.array(kept, np.int64), np.array(going, np.int64)
                )
                ids, first_B = ids.index_select(0, kept_B), first_B.index_select(0, kept_B)
                streams = streams.index_select(0, kept_B)
                tables = {name: _rows(table, kept_B) for name, table in tables.items()}
                count = len(going)
            one_each = StepInputs(
                token_ids=ids,
                tokens=_one_each(first_B + step, max_len),
                tables=tables,
            )
            streams = self._layer(one_each, streams, ids, self._cache, self._segments)
            ids = self._guess(streams, step)
            if at is None:
                out[step] = ids
            else:
                out[step].index_copy_(0, at, ids)
        return out

    def _guess(self, streams_BHD: Tensor, step: int) -> Tensor:
        return guess(self._layer, self._sample, streams_BHD, step)

    def _last_rows(self, chunks: Items[Chunk], rows_M: Tensor, chosen_M: Tensor) -> Tensor:
        """[B]: among the step's tokens, the last that is right, of each chunk with drafts."""
        most = max(len(chunk.drafts) for chunk in chunks)
        starts = accumulate((chunk.num_logits for chunk in chunks), initial=0)
        first = [at for chunk, at in zip(chunks, starts, strict=False) if chunk.propose]
        expected = [
            [*chunk.drafts, *[-1] * (most - len(chunk.drafts))] for chunk in chunks if chunk.propose
        ]
        first_B, expected_BK = send(
            self._device,
            np.array(first, np.int64),
            np.array(expected, np.int64).reshape(len(first), most),
        )
        if not most:
            return rows_M.index_select(0, first_B)
        steps = torch.arange(most, device=self._device)
        places = (first_B[:, None] + steps).clamp_(max=len(chosen_M) - 1)
        right = chosen_M[places] == expected_BK
        return rows_M.index_select(0, first_B + right.cumprod(1).sum(1))


def guess(layer: DraftHead, sample: Sample, streams_BHD: Tensor, place: int) -> Tensor:
    """[B] int64: the likeliest tokens. Ids of the vocabulary whatever the logits are."""
    return sample(layer.compute_logits(streams_BHD, place), SamplingBatch()).ids_S


def _following(chunks: Items[Chunk]) -> list[int]:
    """The token after each of a step's tokens; 0 where it is being chosen."""
    ids: list[int] = []
    for chunk in chunks:
        ids += chunk.sequence.token_ids[chunk.start + 1 : chunk.known + 1]
        ids += [0] * chunk.num_logits
    return ids


def _select(inputs: StepInputs, places_B: Tensor) -> dict[str, PageTable]:
    return {"window": _rows(inputs.tables["window"], places_B)}


def _rows(table: PageTable, places_B: Tensor) -> PageTable:
    return PageTable(
        table.pages.index_select(0, places_B),
        table.first.index_select(0, places_B),
        table.rows_per_page,
    )


def _one_each(positions_B: Tensor, max_len: int) -> Tokens:
    """One token of each sequence."""
    count = torch.arange(len(positions_B) + 1, dtype=torch.int32, device=positions_B.device)
    return Tokens(
        positions=positions_B,
        sequence=count[:-1],
        query_start=count,
        max_len=max_len,
        max_query=1,
    )

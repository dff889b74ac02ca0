"""What requests ask of the sampling operator: their state between steps, and it as tensors."""

import secrets
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from finwhale.chat.grammar import Matcher
from finwhale.engine.rank.host_transfer import send
from finwhale.errors import RequestError
from finwhale.ops.sampling import AllowedTokens, Bias, Filters, LogprobRows, Penalties
from finwhale.ops.sampling.draws import derive_seed, states, uniforms
from finwhale.request import SamplingParams

NOT_FINITE = "the model's logits for this token are not finite (NaN or infinity)"

NO_TOKEN_FITS = "no token fits the grammar here, or the model's logits are not finite"


class Seen:
    """Token ids of a request's prompt and output, and how often the output holds each."""

    def __init__(self, prompt_token_ids: Iterable[int]) -> None:
        unique = list(dict.fromkeys(prompt_token_ids))
        self._slots = {token_id: slot for slot, token_id in enumerate(unique)}
        self._ids = np.array(unique or [0], dtype=np.int64)
        self._counts = np.zeros(len(self._ids), dtype=np.float32)

    def __len__(self) -> int:
        return len(self._slots)

    @property
    def ids(self) -> NDArray[np.int64]:
        return self._ids[: len(self)]

    @property
    def counts(self) -> NDArray[np.float32]:
        return self._counts[: len(self)]

    def copy(self) -> "Seen":
        other = object.__new__(Seen)
        other._slots = dict(self._slots)
        other._ids, other._counts = self._ids.copy(), self._counts.copy()
        return other

    def count(self, token_id: int) -> None:
        slot = self._slots.get(token_id)
        if slot is None:
            slot = self._slots[token_id] = len(self._slots)
            if slot == len(self._ids):
                self._ids = np.resize(self._ids, 2 * slot)
                self._counts = np.resize(self._counts, 2 * slot)
            self._ids[slot], self._counts[slot] = token_id, 0
        self._counts[slot] += 1


class RequestState:
    """What is kept of one request between steps."""

    __slots__ = ("greedy", "matcher", "params", "seed", "seen", "step", "vocab_size")

    def __init__(
        self,
        params: SamplingParams,
        prompt: Iterable[int],
        vocab_size: int,
        index: int,
        matcher: Matcher | None,
    ) -> None:
        seed = secrets.randbits(64) if params.seed is None else params.seed
        self.params = params
        self.seed = derive_seed(seed, index)
        self.step = 0
        self.vocab_size = vocab_size
        self.matcher = matcher
        # The operator computes in float32, where the smallest temperatures are 0.
        self.greedy = float(np.float32(params.temperature)) == 0.0
        self.seen: Seen | None = None
        if params.repetition_penalty != 1:
            prompt = list(prompt)
            if prompt and not 0 <= min(prompt) <= max(prompt) < vocab_size:
                wrong = next(i for i in prompt if not 0 <= i < vocab_size)
                raise RequestError(f"prompt token id {wrong} is not in 0..{vocab_size - 1}")
            self.seen = Seen(prompt)
        elif params.presence_penalty or params.frequency_penalty:
            self.seen = Seen(())

    @property
    def request(self) -> "RequestState":
        """It is the choice of its own next token, as a DraftRow is of a later one."""
        return self

    def accept(self, token_id: int) -> None:
        """A token is output."""
        if self.seen is not None:
            self.seen.count(token_id)
        if self.matcher is not None:
            self.matcher.accept(token_id)

    def rows(self, drafts: Sequence[int]) -> "Rows":
        """The choice of the next token, and of those after each draft."""
        rows: list[RequestState | DraftRow] = [self]
        for draft in drafts:
            rows.append(DraftRow(rows[-1], draft))
        return rows

    def why_no_token(self) -> str:
        return _why_no_token(self.matcher)


class DraftRow:
    """The choice that a request has after another one, if that gave a draft."""

    __slots__ = ("matcher", "request", "seed", "seen", "step")

    def __init__(self, before: "RequestState | DraftRow", draft: int) -> None:
        self.request: RequestState = before.request
        self.seed: int = before.seed
        self.step: int = before.step + 1
        self.seen: Seen | None = before.seen
        self.matcher: Matcher | None = before.matcher
        if self.seen is not None:
            self.seen = self.seen.copy()
            self.seen.count(draft)
        if self.matcher is not None:
            self.matcher = self.matcher.copy()
            self.matcher.accept(draft)

    def why_no_token(self) -> str:
        return _why_no_token(self.matcher)


Rows = Sequence[RequestState | DraftRow]


def draws_further(rows: Rows, further_B: Tensor) -> Tensor:
    """The draws of runs of as many rows each, which begin 1 + further steps later. [R] float64."""
    width = len(rows) // len(further_B)
    firsts = [row.request for row in rows[::width]]
    drawing = [place for place, request in enumerate(firsts) if not request.greedy]
    span = 2 * width - 1
    seeds = [firsts[place].seed for place in drawing for _ in range(span)]
    steps = [firsts[place].step + 1 + k for place in drawing for k in range(span)]
    device = further_B.device
    all_RK, places = send(
        device, uniforms(seeds, steps).reshape(-1, span), np.array(drawing, np.int64)
    )
    first_R = further_B.index_select(0, places)[:, None]
    return all_RK.gather(1, first_R + torch.arange(width, device=device)).flatten()


def _why_no_token(matcher: Matcher | None) -> str:
    if matcher is None:
        return NOT_FINITE
    return matcher.error or NO_TOKEN_FITS


@dataclass(frozen=True, slots=True)
class Fixed:
    """What stays the same from step to step for the same requests in the same order.

    Attributes:
        drawing: the rows that `filters` are of.
        states: of their seeds.
        historic: some rows have penalties or a grammar.
    """

    drawing: Sequence[int] = ()
    states: NDArray[np.uint64] = field(default_factory=lambda: np.empty(0, np.uint64))
    historic: bool = False
    filters: Filters | None = None
    bias: Bias | None = None
    logprobs: tuple[LogprobRows, ...] = ()


def fix(requests: Sequence[RequestState], device: torch.device) -> Fixed:
    wanted: dict[int, list[int]] = {}
    for row, request in enumerate(requests):
        if request.params.logprobs is not None:
            wanted.setdefault(min(request.params.logprobs, request.vocab_size), []).append(row)
    logprobs = tuple(
        LogprobRows(rows_G=send(device, np.array(rows, np.int64))[0], num_top=num)
        for num, rows in sorted(wanted.items())
    )
    drawing = [row for row, request in enumerate(requests) if not request.greedy]
    return Fixed(
        drawing,
        states([requests[row].seed for row in drawing]),
        any(request.seen is not None or request.matcher is not None for request in requests),
        _filters(requests, device),
        _bias(requests, device),
        logprobs,
    )


def _filters(requests: Sequence[RequestState], device: torch.device) -> Filters | None:
    rows = [row for row, request in enumerate(requests) if not request.greedy]
    if not rows:
        return None
    params = [requests[row].params for row in rows]
    sizes = [requests[row].vocab_size for row in rows]
    top_k = {i: p.top_k for i, p in enumerate(params) if 0 < p.top_k < sizes[i]}
    top_p = {i: p.top_p for i, p in enumerate(params) if p.top_p < 1}
    arrays = {"temperature_R": np.array([p.temperature for p in params], np.float32)}
    if len(rows) < len(requests):
        arrays["rows_R"] = np.array(rows, np.int64)
    if any(p.min_p for p in params):
        arrays["min_p_R"] = np.array([p.min_p for p in params], np.float32)
    if top_k:
        arrays["top_k_rows_K"] = np.array(list(top_k), np.int64)
        arrays["top_k_K"] = np.array(list(top_k.values()), np.int64)
    if top_p:
        arrays["top_p_rows_P"] = np.array(list(top_p), np.int64)
        arrays["top_p_P"] = np.array(list(top_p.values()), np.float64)
    sent = dict(zip(arrays, send(device, *arrays.values()), strict=True))
    return Filters(
        rows_R=sent.pop("rows_R", None), max_top_k=max(top_k.values(), default=0), **sent
    )


def _bias(requests: Sequence[RequestState], device: torch.device) -> Bias | None:
    entries = [
        (row, token_id, value)
        for row, request in enumerate(requests)
        for token_id, value in (request.params.logit_bias or {}).items()
    ]
    if not entries:
        return None
    rows, ids, values = zip(*entries, strict=True)
    rows_N, ids_N, values_N = send(
        device,
        np.array(rows, np.int64),
        np.array(ids, np.int64),
        np.array(values, np.float32),
    )
    return Bias(rows_N=rows_N, ids_N=ids_N, values_N=values_N)


def allowed_tokens(rows: Rows, device: torch.device) -> AllowedTokens | None:
    guided = [(i, row.matcher, row.request.vocab_size) for i, row in enumerate(rows) if row.matcher]
    if not guided:
        return None
    words_GW = np.empty((len(guided), -(-guided[0][2] // 32)), np.int32)
    for words_W, (_, matcher, _) in zip(words_GW, guided, strict=True):
        matcher.allow(words_W)
    rows_G, words = send(device, np.array([row for row, _, _ in guided], np.int64), words_GW)
    return AllowedTokens(rows_G=rows_G, words_GW=words)


def penalties(choices: Rows, device: torch.device) -> Penalties | None:
    rows = [(i, row.seen, row.request.params) for i, row in enumerate(choices) if row.seen]
    if not rows:
        return None
    lengths = [len(seen) for _, seen, _ in rows]

    def spread(values: Sequence[float], dtype: type) -> NDArray[Any]:
        return np.repeat(np.array(values, dtype), lengths)

    rows_N, ids_N, counts_N, repetition_N, frequency_N, presence_N = send(
        device,
        spread([row for row, _, _ in rows], np.int64),
        np.concatenate([seen.ids for _, seen, _ in rows]),
        np.concatenate([seen.counts for _, seen, _ in rows]),
        spread([p.repetition_penalty for _, _, p in rows], np.float32),
        spread([p.frequency_penalty for _, _, p in rows], np.float32),
        spread([p.presence_penalty for _, _, p in rows], np.float32),
    )
    return Penalties(
        rows_N=rows_N,
        ids_N=ids_N,
        counts_N=counts_N,
        repetition_N=repetition_N,
        frequency_N=frequency_N,
        presence_N=presence_N,
    )

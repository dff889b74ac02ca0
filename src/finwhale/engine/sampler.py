"""Per-request sampling state, and the batch of choices of one step."""

import secrets
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from finwhale.chat.grammar import Matcher
from finwhale.engine.transfer import Arrival, Receiver, send
from finwhale.errors import RequestError
from finwhale.ops.sampling import (
    AllowedTokens,
    Bias,
    Filters,
    LogprobRows,
    Logprobs,
    Penalties,
    Sample,
    SamplingBatch,
)
from finwhale.ops.sampling.draws import derive_seed, draws, states, uniforms
from finwhale.request import SamplingParams

NOT_FINITE = "the model's logits for this token are not finite (NaN or infinity)"

NO_TOKEN_FITS = "no token fits the grammar here, or the model's logits are not finite"


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """A token's natural log-probability before penalties, temperature and filters; rank from 1."""

    logprob: float
    rank: int


@dataclass(frozen=True, slots=True)
class SampledToken:
    """One request's next token.

    Attributes:
        token_id: -1 where there is an error.
        logprobs: token id to log-probability, the sampled token first, then the most likely;
            None unless asked for.
        error: why there is no token; None where there is one.
    """

    token_id: int
    logprobs: dict[int, TokenLogprob] | None = None
    error: str | None = None


class _PlainTokens(dict[int, SampledToken]):
    """Tokens without log-probabilities, made once: there are many in every step."""

    def __missing__(self, token_id: int) -> SampledToken:
        token = self[token_id] = SampledToken(token_id)
        return token


class Sampler:
    """Chooses tokens for the running requests.

    A request's tokens depend on its parameters, its seed and its logits alone: not on the other
    requests of a step, nor on being paused. Its step counts its own tokens.
    """

    def __init__(self, sample: Sample) -> None:
        """`sample` is the platform's operator."""
        self._sample = sample
        self._receiver: Receiver | None = None
        self._plain = _PlainTokens()
        self._requests: dict[Hashable, _Request] = {}
        self._fixed_keys: tuple[Hashable, ...] | None = None
        self._fixed_device: torch.device | None = None
        self._fixed = _Fixed()

    def add(
        self,
        key: Hashable,
        params: SamplingParams,
        prompt_token_ids: Iterable[int],
        vocab_size: int,
        index: int = 0,
        matcher: Matcher | None = None,
    ) -> None:
        """Begins a request.

        Args:
            key: what `sample` and `remove` call it.
            params: its sampling parameters.
            prompt_token_ids: what the repetition penalty counts besides the output.
            vocab_size: V of the logits.
            index: which of the params.n continuations; each draws from a seed of its own.
            matcher: what its output must match, its own; None: any text.

        Raises:
            RequestError: a prompt token under a repetition penalty is outside the vocabulary.
        """
        assert key not in self._requests, f"request {key!r} is already sampled"
        self._requests[key] = _Request(params, prompt_token_ids, vocab_size, index, matcher)

    def choose_with(self, sample: Sample) -> None:
        """Use another operator from now on: for measurements."""
        self._sample = sample

    def bring(self, tensors: Sequence[Tensor]) -> Arrival:
        """Begin to bring tensors to the host, as the tokens are brought."""
        assert self._receiver is not None, "there are no tokens"
        return self._receiver.begin(tensors)

    def remove(self, key: Hashable) -> None:
        """Forgets a request."""
        del self._requests[key]
        self._fixed_keys = None

    def sample(self, keys: Sequence[Hashable], logits_SV: Tensor) -> list[SampledToken]:
        """The next token of each request.

        Args:
            keys: S distinct requests.
            logits_SV: [S,V] float32, row i for keys[i]; not changed.
        """
        return self.commit(self.start(keys, logits_SV))

    def start(self, keys: Sequence[Hashable], logits_SV: Tensor) -> "Sampling":
        """The first half of `sample`, for `commit`; nothing waits for the device.

        A request may be started again before its last token was committed, unless it
        `needs_history`, and be removed in between.
        """
        requests = [self._requests[key] for key in keys]
        sampling = self._start(requests, keys, logits_SV)
        for request in requests:
            request.step += 1
        return sampling

    def start_runs(
        self,
        keys: Sequence[Hashable],
        drafts: Sequence[Sequence[int]],
        logits_SV: Tensor,
        further_B: Tensor | None = None,
    ) -> "Sampling":
        """The first half of a step that verifies drafts, for `commit_runs`.

        Every row draws as if the drafts before it were the request's output: its token is the one
        that the request has there without drafting, if they are. Nothing changes until the commit.

        Args:
            keys: distinct requests.
            drafts: of each request.
            logits_SV: a row for each request's next token, then one after each of its drafts.
            further_B: int64: the requests' last tokens are not known yet. One each and, as the
                device knows, so many more come before these. All have as many drafts, and nobody
                `needs_history`.
        """
        rows: list[_Request | _Row] = []
        row_keys: list[Hashable] = []
        for key, expected in zip(keys, drafts, strict=True):
            rows += self._requests[key].rows(expected)
            row_keys += [key] * (1 + len(expected))
        return self._start(rows, row_keys, logits_SV, further_B)

    def _start(
        self,
        rows: "Rows",
        keys: Sequence[Hashable],
        logits_SV: Tensor,
        further_B: Tensor | None = None,
    ) -> "Sampling":
        assert logits_SV.shape[0] == len(rows), "one row of logits for each choice"
        device = logits_SV.device
        if self._receiver is None:
            self._receiver = Receiver(device)
        if not rows:
            return Sampling([], None, self._receiver.begin(()))
        sampled = self._sample(logits_SV, self._prepare(rows, keys, device, further_B))
        parts = [sampled.ids_S, sampled.valid_S]
        if sampled.logprobs is not None:
            found = sampled.logprobs
            parts += [found.token_S, found.rank_S, found.top_SL, found.top_ids_SL]
        arrival = self._receiver.begin(parts)
        return Sampling(rows, sampled.ids_S, arrival, self._fixed.historic)

    def needs_history(self, key: Hashable) -> bool:
        """Whether the host must know all of a request's tokens before its next is chosen."""
        request = self._requests[key]
        return request.seen is not None or request.matcher is not None

    def prepare(self, keys: Sequence[Hashable], device: torch.device) -> SamplingBatch:
        """The choices of the requests' next step, on `device`; changes no state."""
        return self._prepare([self._requests[key] for key in keys], keys, device)

    def _prepare(
        self,
        rows: "Rows",
        keys: Sequence[Hashable],
        device: torch.device,
        further_B: Tensor | None = None,
    ) -> SamplingBatch:
        if self._fixed_keys != tuple(keys) or self._fixed_device != device:
            choices = {(row.request, row.step) for row in rows}
            assert len(choices) == len(rows), "a request stands twice in a batch"
            self._fixed = _fix([row.request for row in rows], device)
            self._fixed_keys, self._fixed_device = tuple(keys), device
        uniform_R = None
        if self._fixed.filters is not None and further_B is not None:
            uniform_R = _draws_further(rows, further_B)
        elif self._fixed.filters is not None:
            steps = [rows[place].step for place in self._fixed.drawing]
            (uniform_R,) = send(device, draws(self._fixed.states, steps))
        return SamplingBatch(
            filters=self._fixed.filters,
            uniform_R=uniform_R,
            penalties=_penalties(rows, device) if self._fixed.historic else None,
            bias=self._fixed.bias,
            allowed=_allowed(rows, device) if self._fixed.historic else None,
            logprobs=self._fixed.logprobs,
        )

    def commit(self, sampling: "Sampling") -> list[SampledToken]:
        """Waits for the tokens of a step and counts them as output."""
        tokens = self._tokens(sampling)
        if sampling.historic:
            for row, token in zip(sampling.rows, tokens, strict=True):
                if token.error is None:
                    row.request.accept(token.token_id)
        return tokens

    def _tokens(self, sampling: "Sampling") -> list[SampledToken]:
        """Waits for the tokens of a step."""
        parts = sampling.arrival.wait()
        if not parts:
            return []
        ids_S, valid_S, *logprobs_S = parts
        ids, valid = ids_S.tolist(), valid_S.tolist()
        if not logprobs_S and all(valid):
            return [self._plain[i] for i in ids]
        logprobs = _LogprobLists(_as_logprobs(*logprobs_S)) if logprobs_S else None
        tokens: list[SampledToken] = []
        for place, row in enumerate(sampling.rows):
            if not valid[place]:
                tokens.append(SampledToken(-1, error=row.why_no_token()))
                continue
            if logprobs is not None and row.request.params.logprobs is not None:
                tokens.append(SampledToken(ids[place], logprobs.of(place, ids[place])))
                continue
            tokens.append(self._plain[ids[place]])
        return tokens

    def commit_runs(
        self, sampling: "Sampling", drafts: Sequence[Sequence[int]]
    ) -> list[list[SampledToken]]:
        """Waits for the tokens of a step that verifies drafts and counts them as output.

        Returns:
            Of each request the drafts that are its own tokens, then the first that is not a draft;
            an error ends a run.
        """
        tokens = iter(self._tokens(sampling))
        rows = iter(sampling.rows)
        runs = []
        for expected in drafts:
            run: list[SampledToken] = []
            runs.append(run)
            open_ = True
            for draft in (*expected, None):
                token, row = next(tokens), next(rows)
                if open_:
                    run.append(token)
                    if token.error is None:
                        row.request.step += 1
                        row.request.accept(token.token_id)
                    open_ = token.error is None and token.token_id == draft
        return runs


@dataclass(frozen=True, slots=True)
class Sampling:
    """A step's choices, which the device may still be making.

    Attributes:
        ids_S: int64 on the device, ids of the vocabulary even where a row turns out not to be
            valid; None: no rows.
        historic: some rows depend on the tokens before them.
    """

    rows: "Rows"
    ids_S: Tensor | None
    arrival: Arrival
    historic: bool = False


class _Seen:
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

    def copy(self) -> "_Seen":
        other = object.__new__(_Seen)
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


class _Request:
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
        self.seen: _Seen | None = None
        if params.repetition_penalty != 1:
            prompt = list(prompt)
            wrong = next((i for i in prompt if not 0 <= i < vocab_size), None)
            if wrong is not None:
                raise RequestError(f"prompt token id {wrong} is not in 0..{vocab_size - 1}")
            self.seen = _Seen(prompt)
        elif params.presence_penalty or params.frequency_penalty:
            self.seen = _Seen(())

    @property
    def request(self) -> "_Request":
        """It is the choice of its own next token, as a _Row is of a later one."""
        return self

    def accept(self, token_id: int) -> None:
        """A token is output."""
        if self.seen is not None:
            self.seen.count(token_id)
        if self.matcher is not None:
            self.matcher.accept(token_id)

    def rows(self, drafts: Sequence[int]) -> "Rows":
        """The choice of the next token, and of those after each draft."""
        rows: list[_Request | _Row] = [self]
        for draft in drafts:
            rows.append(_Row(rows[-1], draft))
        return rows

    def why_no_token(self) -> str:
        return _why_no_token(self.matcher)


class _Row:
    """The choice that a request has after another one, if that gave a draft."""

    __slots__ = ("matcher", "request", "seed", "seen", "step")

    def __init__(self, before: "_Request | _Row", draft: int) -> None:
        self.request: _Request = before.request
        self.seed: int = before.seed
        self.step: int = before.step + 1
        self.seen: _Seen | None = before.seen
        self.matcher: Matcher | None = before.matcher
        if self.seen is not None:
            self.seen = self.seen.copy()
            self.seen.count(draft)
        if self.matcher is not None:
            self.matcher = self.matcher.copy()
            self.matcher.accept(draft)

    def why_no_token(self) -> str:
        return _why_no_token(self.matcher)


Rows = Sequence[_Request | _Row]


def _draws_further(rows: Rows, further_B: Tensor) -> Tensor:
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
class _Fixed:
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


def _fix(requests: Sequence[_Request], device: torch.device) -> _Fixed:
    wanted: dict[int, list[int]] = {}
    for row, request in enumerate(requests):
        if request.params.logprobs is not None:
            wanted.setdefault(min(request.params.logprobs, request.vocab_size), []).append(row)
    logprobs = tuple(
        LogprobRows(rows_G=send(device, np.array(rows, np.int64))[0], num_top=num)
        for num, rows in sorted(wanted.items())
    )
    drawing = [row for row, request in enumerate(requests) if not request.greedy]
    return _Fixed(
        drawing,
        states([requests[row].seed for row in drawing]),
        any(request.seen is not None or request.matcher is not None for request in requests),
        _filters(requests, device),
        _bias(requests, device),
        logprobs,
    )


def _filters(requests: Sequence[_Request], device: torch.device) -> Filters | None:
    rows = [row for row, request in enumerate(requests) if not request.greedy]
    if not rows:
        return None
    params = [requests[row].params for row in rows]
    sizes = [requests[row].vocab_size for row in rows]
    top_k = {i: p.top_k for i, p in enumerate(params) if 0 < p.top_k < sizes[i]}
    top_p = {i: p.top_p for i, p in enumerate(params) if p.top_p < 1}
    min_p = [p.min_p for p in params]

    def tensor(values: Iterable[float], dtype: type) -> Tensor:
        return send(device, np.array(list(values), dtype))[0]

    return Filters(
        rows_R=None if len(rows) == len(requests) else tensor(rows, np.int64),
        temperature_R=tensor((p.temperature for p in params), np.float32),
        min_p_R=tensor(min_p, np.float32) if any(min_p) else None,
        top_k_rows_K=tensor(top_k, np.int64) if top_k else None,
        top_k_K=tensor(top_k.values(), np.int64) if top_k else None,
        max_top_k=max(top_k.values(), default=0),
        top_p_rows_P=tensor(top_p, np.int64) if top_p else None,
        top_p_P=tensor(top_p.values(), np.float64) if top_p else None,
    )


def _bias(requests: Sequence[_Request], device: torch.device) -> Bias | None:
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


def _allowed(rows: Rows, device: torch.device) -> AllowedTokens | None:
    guided = [(i, row.matcher, row.request.vocab_size) for i, row in enumerate(rows) if row.matcher]
    if not guided:
        return None
    words_GW = np.empty((len(guided), -(-guided[0][2] // 32)), np.int32)
    for words_W, (_, matcher, _) in zip(words_GW, guided, strict=True):
        matcher.allow(words_W)
    rows_G, words = send(device, np.array([row for row, _, _ in guided], np.int64), words_GW)
    return AllowedTokens(rows_G=rows_G, words_GW=words)


def _penalties(choices: Rows, device: torch.device) -> Penalties | None:
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


def _as_logprobs(token_S: Tensor, rank_S: Tensor, top_SL: Tensor, top_ids_SL: Tensor) -> Logprobs:
    return Logprobs(token_S=token_S, rank_S=rank_S, top_SL=top_SL, top_ids_SL=top_ids_SL)


class _LogprobLists:
    """A step's log-probabilities on the host."""

    def __init__(self, logprobs: Logprobs) -> None:
        self._token: list[float] = logprobs.token_S.tolist()
        self._rank: list[int] = logprobs.rank_S.tolist()
        self._top: list[list[float]] = logprobs.top_SL.tolist()
        self._top_ids: list[list[int]] = logprobs.top_ids_SL.tolist()

    def of(self, row: int, token_id: int) -> dict[int, TokenLogprob]:
        table = {token_id: TokenLogprob(self._token[row], self._rank[row])}
        for rank, (other, logprob) in enumerate(
            zip(self._top_ids[row], self._top[row], strict=True), start=1
        ):
            if other >= 0:
                table.setdefault(other, TokenLogprob(logprob, rank))
        return table

"""The choices of tokens: of one step's requests at once, and what comes back of them."""

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from finwhale.chat.grammar import Matcher
from finwhale.engine.rank.host_transfer import Arrival, Receiver, send
from finwhale.engine.rank.sampling_state import (
    DraftRow,
    Fixed,
    RequestState,
    Rows,
    allowed_tokens,
    draws_further,
    fix,
    penalties,
)
from finwhale.ops.sampling import Logprobs, Sample, SamplingBatch
from finwhale.ops.sampling.draws import draws
from finwhale.request import SamplingParams


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
        of_grammar: the request's grammar failed; the model's state is sound.
    """

    token_id: int
    logprobs: dict[int, TokenLogprob] | None = None
    error: str | None = None
    of_grammar: bool = False


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
        self._requests: dict[Hashable, RequestState] = {}
        self._fixed_keys: tuple[Hashable, ...] | None = None
        self._fixed_device: torch.device | None = None
        self._fixed = Fixed()

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
        self._requests[key] = RequestState(params, prompt_token_ids, vocab_size, index, matcher)

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
        rows: list[RequestState | DraftRow] = []
        row_keys: list[Hashable] = []
        for key, expected in zip(keys, drafts, strict=True):
            rows += self._requests[key].rows(expected)
            row_keys += [key] * (1 + len(expected))
        return self._start(rows, row_keys, logits_SV, further_B)

    def _start(
        self,
        rows: Rows,
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
        rows: Rows,
        keys: Sequence[Hashable],
        device: torch.device,
        further_B: Tensor | None = None,
    ) -> SamplingBatch:
        if self._fixed_keys != tuple(keys) or self._fixed_device != device:
            choices = {(row.request, row.step) for row in rows}
            assert len(choices) == len(rows), "a request stands twice in a batch"
            self._fixed = fix([row.request for row in rows], device)
            self._fixed_keys, self._fixed_device = tuple(keys), device
        uniform_R = None
        if self._fixed.filters is not None and further_B is not None:
            uniform_R = draws_further(rows, further_B)
        elif self._fixed.filters is not None:
            steps = [rows[place].step for place in self._fixed.drawing]
            (uniform_R,) = send(device, draws(self._fixed.states, steps))
        return SamplingBatch(
            filters=self._fixed.filters,
            uniform_R=uniform_R,
            penalties=penalties(rows, device) if self._fixed.historic else None,
            bias=self._fixed.bias,
            allowed=allowed_tokens(rows, device) if self._fixed.historic else None,
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
                failed = row.matcher is not None and row.matcher.error is not None
                tokens.append(SampledToken(-1, error=row.why_no_token(), of_grammar=failed))
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

    rows: Rows
    ids_S: Tensor | None
    arrival: Arrival
    historic: bool = False


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

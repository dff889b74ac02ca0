"""Converts a step's result to the requests' tokens: ids, log-probabilities, errors."""

from collections.abc import Sequence
from dataclasses import dataclass

from finwhale.engine.plan.executor import RowLogprobs, StepResult
from finwhale.engine.plan.sampling import History
from finwhale.engine.plan.sequences import SequenceState

NOT_FINITE = "the model's logits for this token are not finite (NaN or infinity)"
NO_TOKEN_FITS = "the request allows no token here, or the model's logits are not finite"


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """A token's natural log-probability before penalties, temperature and filters; rank from 1."""

    logprob: float
    rank: int


@dataclass(frozen=True, slots=True)
class SampledToken:
    """One request's next token.

    Attributes:
        token_id: the token's id; -1 if there is an error.
        logprobs: log-probabilities by token id, first the sampled token, then the most likely
            ones; None if not requested.
        error: the reason why there is no token; None if there is one.
        of_grammar: the error comes from the request's grammar, so the cached state is valid.
    """

    token_id: int
    logprobs: dict[int, TokenLogprob] | None = None
    error: str | None = None
    of_grammar: bool = False


class TokenReader:
    """Makes tokens from results. It reuses one object for each id without log-probabilities."""

    def __init__(self) -> None:
        self._plain = _PlainTokens()

    def read(
        self,
        result: StepResult,
        sequences: Sequence[SequenceState],
        histories: Sequence[History],
    ) -> list[SampledToken]:
        """Make the token of each row.

        Args:
            sequences: the sequence of each row.
            histories: the history of each row when its token was sampled. Empty if no row needs
                one.
        """
        ids, valid, plain = result.token_ids, result.valid, self._plain
        if result.logprobs is None and all(valid):
            return [plain[i] for i in ids]
        tokens: list[SampledToken] = []
        for row, sequence in enumerate(sequences):
            assert sequence.sampling is not None
            if not valid[row]:
                tokens.append(_no_token(histories[row] if histories else None))
            elif result.logprobs is not None and sequence.sampling.settings.logprobs is not None:
                logprobs = row_logprobs(result.logprobs, row, ids[row])
                tokens.append(SampledToken(ids[row], logprobs))
            else:
                tokens.append(plain[ids[row]])
        return tokens

    def read_runs(
        self,
        result: StepResult,
        sequences: Sequence[SequenceState],
        drafts: Sequence[Sequence[int]],
        histories: Sequence[History],
    ) -> list[list[SampledToken]]:
        """Make the tokens of a step that verified drafts, and add them to the histories.

        Args:
            sequences, drafts: the sequence and the drafts of each chunk. A chunk has a row for its
                next token and one after each draft.
            histories: the history of each row. Empty if no row needs one.

        Returns:
            For each chunk its accepted drafts, then the first token that is not a draft. An error
            ends the chunk's tokens.
        """
        of_rows = [s for s, ids in zip(sequences, drafts, strict=True) for _ in (None, *ids)]
        tokens = iter(self.read(result, of_rows, histories))
        runs = []
        for sequence, expected in zip(sequences, drafts, strict=True):
            assert sequence.sampling is not None
            run: list[SampledToken] = []
            runs.append(run)
            right = True
            for draft in (*expected, None):
                token = next(tokens)
                if right:
                    run.append(token)
                    if token.error is None:
                        sequence.sampling.history.accept(token.token_id)
                    right = token.error is None and token.token_id == draft
        return runs


class _PlainTokens(dict[int, SampledToken]):
    def __missing__(self, token_id: int) -> SampledToken:
        token = self[token_id] = SampledToken(token_id)
        return token


def _no_token(history: History | None) -> SampledToken:
    """Make the token that reports why sampling gave none."""
    if history is None or not history.masked:
        return SampledToken(-1, error=NOT_FINITE)
    error = None if history.matcher is None else history.matcher.error
    return SampledToken(-1, error=error or NO_TOKEN_FITS, of_grammar=error is not None)


def row_logprobs(found: RowLogprobs, row: int, token_id: int) -> dict[int, TokenLogprob]:
    """The log-probabilities of one row, by token id: first the row's own token."""
    table = {token_id: TokenLogprob(found.token[row], found.rank[row])}
    for rank, (other, logprob) in enumerate(
        zip(found.top_ids[row], found.top[row], strict=True), start=1
    ):
        if other >= 0:
            table.setdefault(other, TokenLogprob(logprob, rank))
    return table

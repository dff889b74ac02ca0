"""A step's result as tokens of the requests: ids, log-probabilities, errors."""

from collections.abc import Sequence
from dataclasses import dataclass

from finwhale.engine.plan.executor import RowLogprobs, StepResult
from finwhale.engine.plan.sampling import History
from finwhale.engine.plan.sequences import Sequence as RunningSequence

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
        of_grammar: the request's grammar failed; the model's state is sound.
    """

    token_id: int
    logprobs: dict[int, TokenLogprob] | None = None
    error: str | None = None
    of_grammar: bool = False


class TokenReader:
    """Makes tokens from results. Tokens without log-probabilities are made once and shared."""

    def __init__(self) -> None:
        self._plain = _PlainTokens()

    def read(
        self,
        result: StepResult,
        sequences: Sequence[RunningSequence],
        histories: Sequence[History],
    ) -> list[SampledToken]:
        """The token of each row.

        Args:
            sequences: of each row.
            histories: of each row, as they were when the token was chosen. Empty: no row needs any.
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
                logprobs = _logprobs(result.logprobs, row, ids[row])
                tokens.append(SampledToken(ids[row], logprobs))
            else:
                tokens.append(plain[ids[row]])
        return tokens

    def read_runs(
        self,
        result: StepResult,
        sequences: Sequence[RunningSequence],
        drafts: Sequence[Sequence[int]],
        histories: Sequence[History],
    ) -> list[list[SampledToken]]:
        """The tokens of a step that verified drafts, added to the sequences' histories.

        Args:
            sequences, drafts: of each chunk: it has a row for its next token, and one after each
                draft.
            histories: of each row. Empty: no row needs any.

        Returns:
            For each chunk the drafts that are the sequence's own tokens, then the first token that
            is not a draft. An error ends a run.
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
    """Says why there is no token."""
    if history is None or history.matcher is None:
        return SampledToken(-1, error=NOT_FINITE)
    error = history.matcher.error
    return SampledToken(-1, error=error or NO_TOKEN_FITS, of_grammar=error is not None)


def _logprobs(found: RowLogprobs, row: int, token_id: int) -> dict[int, TokenLogprob]:
    table = {token_id: TokenLogprob(found.token[row], found.rank[row])}
    for rank, (other, logprob) in enumerate(
        zip(found.top_ids[row], found.top[row], strict=True), start=1
    ):
        if other >= 0:
            table.setdefault(other, TokenLogprob(logprob, rank))
    return table

"""Messages between the server and the engine's process, over one pipe: plain data."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, Self

from finwhale.engine.loop.metrics import EngineMetrics
from finwhale.engine.plan.prefix_store import StoreName
from finwhale.engine.plan.token_filter import TokenFilter
from finwhale.request import (
    ExpertIds,
    FinishReason,
    Logprob,
    PromptProgress,
    RequestTimes,
    SamplingParams,
)


@dataclass(frozen=True, slots=True)
class Add:
    """Starts a request; `Engine.add_request` describes the fields.

    Attributes:
        grammar_bytes: memory that the grammar takes, as its trial measured.
        saves_first: the answer waits until the prefix store has the prompt.
        progress: while the prompt is read, deltas without tokens tell how far.
    """

    request_id: str
    prompt_token_ids: Sequence[int]
    params: SamplingParams
    stop_after: int | None = None
    priority: int = 0
    prefix_owner: str = ""
    user: str = ""
    grammar_bytes: int = 0
    filter: TokenFilter | None = None
    saves_first: bool = False
    progress: bool = False


@dataclass(frozen=True, slots=True)
class Abort:
    """Ends a request."""

    request_id: str


@dataclass(frozen=True, slots=True)
class Stop:
    """Ends the process."""


@dataclass(frozen=True, slots=True)
class Call:
    """Calls a method of RolloutControl; `work` can be pickled."""

    call_id: str
    work: Callable[[Any], Any]


@dataclass(frozen=True, slots=True)
class Cancel:
    """Cancel a call whose client has left. It ends if it waits for a trainer or has not begun."""

    call_id: str


Command = Add | Abort | Stop | Call | Cancel


@dataclass(frozen=True, slots=True)
class Ready:
    """The model is loaded.

    Attributes:
        max_model_len: maximum number of tokens of one sequence, prompt and output together.
        max_num_seqs: maximum number of sequences that run at once.
        max_num_batched_tokens: maximum number of tokens of a step.
        vocab_size: every token id is below it.
        bos_token_id: the token with which a text prompt begins.
        ranks: the number of ranks and the device of the first, such as "2 ranks, cuda:0".
        unused_draft_head: the draft head that the engine does not use, as the engine says.
        tool_grammar: whether calls hold their tools' schemas even if a request does not ask for it.
        prefix_store: the name of the engine's store; None: it has none.
        phases: seconds of each phase of the start, from the start of the process.
    """

    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    vocab_size: int
    bos_token_id: int
    ranks: str = ""
    unused_draft_head: str | None = None
    tool_grammar: bool = False
    prefix_store: StoreName | None = None
    phases: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Accepted:
    """The engine has accepted a request. `compile_seconds`: of its grammar; None: it has none."""

    request_id: str
    compile_seconds: float | None = None


@dataclass(frozen=True, slots=True)
class Refused:
    """The engine has refused a request; `message` says why. `full`: the client may try again."""

    request_id: str
    message: str
    full: bool = False


@dataclass(frozen=True, slots=True)
class LogprobColumns:
    """Tables of log-probabilities as columns, which pickle ten times as fast; iterating gives the
    tables. The size of a table is 0 for a token that has none (None)."""

    sizes: list[int]
    token_ids: list[int]
    logprobs: list[float]
    ranks: list[int]
    texts: list[str]

    @classmethod
    def of(cls, tables: Iterable[Mapping[int, Logprob] | None]) -> Self:
        given = [table or {} for table in tables]
        entries = [entry for table in given for entry in table.values()]
        return cls(
            [len(table) for table in given],
            [token_id for table in given for token_id in table],
            [entry.logprob for entry in entries],
            [entry.rank for entry in entries],
            [entry.decoded_token for entry in entries],
        )

    def __iter__(self) -> Iterator[dict[int, Logprob] | None]:
        entries = zip(
            self.token_ids, map(Logprob, self.logprobs, self.ranks, self.texts), strict=True
        )
        for size in self.sizes:
            yield dict(islice(entries, size)) if size else None


LogprobTables = LogprobColumns | Sequence[dict[int, Logprob] | None]


@dataclass(frozen=True, slots=True)
class Milestone:
    """Facts about a request, which the first and the last delta of a continuation carry.

    Attributes:
        cached_tokens: number of the prompt's tokens that were found in the prefix cache.
        times: as in RequestOutput, so far.
        prompt_logprobs, prompt_routed_experts: as in RequestOutput, in the first delta of
            continuation 0.
        routed_experts: as in CompletionOutput.
    """

    cached_tokens: int
    times: RequestTimes | None
    prompt_logprobs: LogprobTables | None
    prompt_routed_experts: ExpertIds | None = None
    routed_experts: ExpertIds | None = None


@dataclass(slots=True)
class Delta:
    """What one step added to one continuation.

    Attributes:
        index: the index of the continuation in its request.
        token_ids, text, logprobs: what is new; logprobs is None unless the request asked for it.
        finish_reason, stop_reason: as in CompletionOutput.
        error: why the request failed; None if it did not.
        milestone: None, except in the first and the last delta of the continuation.
        progress: how far the prompt is read, in a delta that has nothing else.
    """

    request_id: str
    index: int
    token_ids: list[int]
    text: str
    logprobs: LogprobTables | None = None
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    error: str | None = None
    milestone: Milestone | None = None
    progress: PromptProgress | None = None

    @property
    def cached_tokens(self) -> int:
        return 0 if self.milestone is None else self.milestone.cached_tokens

    @property
    def prompt_logprobs(self) -> LogprobTables | None:
        return None if self.milestone is None else self.milestone.prompt_logprobs


@dataclass(frozen=True, slots=True)
class Step:
    """The result of one step, and now and then the engine's metrics."""

    deltas: list[Delta]
    metrics: EngineMetrics | None = None


@dataclass(frozen=True, slots=True)
class Answered:
    """A call has ended. `error`: why it failed; None: it returned `value`."""

    call_id: str
    value: Any = None
    error: Exception | None = None


@dataclass(frozen=True, slots=True)
class EngineFailed:
    """The engine has failed and sends nothing more; `message` says why."""

    message: str


Report = Ready | Accepted | Refused | Step | Answered | EngineFailed

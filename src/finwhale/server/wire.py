"""What the server and the engine's process say to each other over one pipe: plain data."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from finwhale.engine.loop.metrics import EngineMetrics
from finwhale.request import FinishReason, Logprob, SamplingParams

# --- Server to engine -----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Add:
    """Begin a request; the fields are those of `Engine.add_request`."""

    request_id: str
    prompt_token_ids: Sequence[int]
    params: SamplingParams
    stop_after: int | None = None
    priority: int = 0


@dataclass(frozen=True, slots=True)
class Abort:
    request_id: str


@dataclass(frozen=True, slots=True)
class Stop:
    """End the process."""


Command = Add | Abort | Stop

# --- Engine to server -----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Ready:
    """The model is loaded.

    Attributes:
        max_model_len: tokens of prompt and output of one sequence at most.
        max_num_seqs: sequences that run at once.
        vocab_size: token ids are below it.
        bos_token_id: what a text prompt begins with.
        phases: seconds of each part of the start, from the process's beginning on.
    """

    max_model_len: int
    max_num_seqs: int
    vocab_size: int
    bos_token_id: int
    phases: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Accepted:
    request_id: str


@dataclass(frozen=True, slots=True)
class Refused:
    request_id: str
    message: str


@dataclass(slots=True)
class Delta:
    """What one step added to one continuation.

    Attributes:
        index: which of the request's continuations.
        token_ids, text, logprobs: what is new; logprobs None unless asked for.
        finish_reason, stop_reason: as in CompletionOutput.
        cached_tokens: of the prompt, found in the prefix cache.
        error: why the request failed; None where it did not.
    """

    request_id: str
    index: int
    token_ids: list[int]
    text: str
    logprobs: list[dict[int, Logprob]] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    cached_tokens: int = 0
    error: str | None = None


@dataclass(frozen=True, slots=True)
class Step:
    """What one step brought; `metrics` where they are due."""

    deltas: list[Delta]
    metrics: EngineMetrics | None = None


@dataclass(frozen=True, slots=True)
class Failed:
    """The engine cannot go on; nothing follows."""

    message: str


Report = Ready | Accepted | Refused | Step | Failed

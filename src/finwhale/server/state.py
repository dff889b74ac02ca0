"""State that the endpoints share: the model's names and tokenizer, the engine and the limits."""

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, TypeVar

from finwhale.chat.dialect import Dialect
from finwhale.chat.template import ChatTemplate
from finwhale.chat.tokenizer import Tokenizer
from finwhale.engine.loop.request_checks import new_filter
from finwhale.errors import EngineDeadError, RequestError
from finwhale.request import SamplingParams
from finwhale.server.config import ServerConfig
from finwhale.server.edge.bodies import SMALL_BYTES, Budget, TooManyItems, max_body_bytes
from finwhale.server.edge.room import Room
from finwhale.server.edge.shares import Shares
from finwhale.server.errors import TRY_AGAIN, ApiError, as_api_error, context_length_error
from finwhale.server.grammars.check import GrammarChecker
from finwhale.server.keys import Keys
from finwhale.server.link.client import EngineClient, Generation
from finwhale.server.link.wire import Add, Delta, Ready
from finwhale.server.observe.logs import RequestLog
from finwhale.server.observe.metrics import Metrics

if TYPE_CHECKING:
    from finwhale.server.observe.tracing import Traces  # its packages are an extra

logger = logging.getLogger(__name__)

T = TypeVar("T")

# Added to the priority of a batch's requests: lower numbers come first, and no request can ask for
# a number as large as this.
BATCH_PRIORITY = 1 << 32
BATCH_WINDOW_S = 24 * 3600.0  # time in which a batch ends
NUM_LARGE = 2  # number of large requests that are converted and encoded at once
_loading = partial(ApiError, 503, "the model is still loading", code="loading")


class ServerState:
    """The state of one server."""

    def __init__(
        self,
        config: ServerConfig,
        client: EngineClient,
        tokenizer: Tokenizer | None,
        dialect: Dialect,
        sampling_defaults: Mapping[str, Any] = MappingProxyType({}),
    ) -> None:
        self.config = config
        self.sampling_defaults = sampling_defaults  # of fields that requests leave out
        self.client = client
        self.tokenizer = tokenizer
        self.template = None if tokenizer is None else ChatTemplate(tokenizer, dialect)
        self.budget = Budget(config.max_buffered_bytes, lambda: self.max_body_bytes)
        # Sequences of requests that are not of batches, from their submission to their answers.
        self.queue = Shares(
            "running and waiting sequences",
            lambda: self.ready.max_num_seqs + config.max_queue,
            lambda: self.ready.max_num_seqs,
        )
        self.metrics = Metrics(client, self.budget)
        self.grammars = GrammarChecker(
            None if tokenizer is None else tokenizer.path.parent, self.metrics
        )
        self._large = ThreadPoolExecutor(NUM_LARGE, "large-request")
        self.started = int(time.time())
        self.draining = False
        self.keys = Keys(config.api_keys)
        # The time at which the event loop last ran (`health.pulse`); 0: it does not run yet.
        self.loop_seen = 0.0
        self.traces: Traces | None = None
        self.turn = asyncio.Lock()  # of the large answers (`in_turns`)
        self.told_of_other_store = False  # see protocols/prefill_decode.py
        self.only_batches = False  # whether the engine has no other requests
        self.batch_sequences = Room(lambda: self.max_batch_sequences)
        client.on_step = self.metrics.step
        client.on_compiled = self.metrics.compile_seconds.observe

    @property
    def model_name(self) -> str:
        return self.config.model_names[0]

    @property
    def loop_silent_s(self) -> float:
        """The seconds since the event loop last ran."""
        return time.monotonic() - self.loop_seen if self.loop_seen else 0.0

    @property
    def ready(self) -> Ready:
        if self.client.ready is not None:
            return self.client.ready
        if self.client.failure is not None:
            raise EngineDeadError(self.client.failure)
        raise _loading()

    @property
    def loading(self) -> bool:
        return self.client.ready is None and self.client.failure is None

    def unless_loading(self, error: ApiError) -> ApiError:
        """The error for a request above a limit that follows from the context.

        While the model loads, the context is not known, and the client may try again.
        """
        return _loading() if self.loading else error

    def to_api_error(self, error: Exception) -> ApiError:
        """The error for the client, who learns no details of an unexpected one; that is logged."""
        if isinstance(error, TooManyItems):
            error = self.unless_loading(error)
        told = as_api_error(error)
        if told is None:
            logger.error("unexpected error", exc_info=error)
            told = ApiError(500, "internal error", code="internal_error")
        if told.code in TRY_AGAIN:
            told.retry_after_s = self.config.retry_after_s
        return told

    def check_model(self, name: str) -> None:
        """Raises ApiError (404) if `name` is not a name of the model."""
        if name not in self.config.model_names:
            available = ", ".join(self.config.model_names)
            message = f"the model {name!r} does not exist here; available: {available}"
            raise ApiError(404, message, code="model_not_found", param="model")

    def need_tokenizer(self) -> Tokenizer:
        if self.tokenizer is None:
            raise RequestError("text needs a tokenizer, and this checkpoint has no tokenizer.json")
        return self.tokenizer

    def need_template(self) -> ChatTemplate:
        if self.template is None:
            raise RequestError("chat needs a tokenizer, and this checkpoint has no tokenizer.json")
        return self.template

    @property
    def max_body_bytes(self) -> int:
        return self.config.max_body_bytes or max_body_bytes(self.max_model_len)

    @property
    def max_model_len(self) -> int:
        """The number of tokens that the context holds; 0 while the model loads."""
        return 0 if self.client.ready is None else self.client.ready.max_model_len

    @property
    def max_batch_sequences(self) -> int:
        """The number of sequences of batches that the engine has at once.

        Without other requests, as many wait as run, so that each step is full. Otherwise an eighth
        of the engine stays free: a running sequence keeps its place until it ends.
        """
        running = self.ready.max_num_seqs
        return 2 * running if self.only_batches else max(1, running - -(-running // 8))

    async def in_thread(self, body_bytes: int, work: Callable[[], T]) -> T:
        """Converts and encodes a request on a thread; the tokenizers work without the GIL.

        Large requests have threads of their own: small ones do not wait for them.
        """
        threads = self._large if body_bytes > SMALL_BYTES else None
        return await asyncio.get_running_loop().run_in_executor(threads, work)

    def encode(self, text: str, *, with_bos: bool) -> list[int]:
        """The token ids of a text prompt. Raises RequestError and ApiError."""
        tokenizer = self.need_tokenizer()
        self.check_text(text)
        ids = tokenizer.encode(text)
        return [self.ready.bos_token_id, *ids] if with_bos else ids

    def check_ids(self, token_ids: Sequence[int]) -> None:
        """Raises RequestError if a token id is outside the vocabulary."""
        wrong = next((i for i in token_ids if i >= self.ready.vocab_size), None)
        if wrong is not None:
            raise RequestError(f"token id {wrong} is not in 0..{self.ready.vocab_size - 1}")

    def check_text(self, text: str) -> None:
        """Raises ApiError if a text cannot fit into the context, whatever its tokens are."""
        context = self.ready.max_model_len
        # Each token stands for at least one byte, and each character has at least one.
        least = -(-len(text) // self.need_tokenizer().longest_token)
        if least > context:
            raise context_length_error(least, context, exact=False)

    def check_prompt(self, token_ids: Sequence[int]) -> None:
        """Raises ApiError if a prompt is too long for this server."""
        limit, context = self.config.max_prompt_tokens, self.ready.max_model_len
        if len(token_ids) >= context:
            raise context_length_error(len(token_ids), context)
        if limit is not None and len(token_ids) > limit:
            raise context_length_error(len(token_ids), context, limit)

    def check_choices(self, num_sequences: int) -> None:
        """Raises ApiError if a request asks for more continuations than the server allows."""
        allowed = self.config.max_choices
        if num_sequences > allowed:
            message = f"prompts times n is {num_sequences}; this server allows {allowed}"
            raise ApiError(400, message, code="too_many_choices", param="n")

    def count(self, log: RequestLog, delta: Delta) -> None:
        """Counts a request's part of a step. Raises ApiError if the engine failed on it."""
        self.metrics.delta(log, delta)
        if delta.error is not None:
            raise ApiError(500, delta.error, code="generation_failed")

    def time_left_s(self, log: RequestLog) -> float:
        """The seconds until a request's time-out, which counts from its arrival."""
        limit_s = BATCH_WINDOW_S if log.batch else self.config.request_timeout_s
        return max(0.0, log.begin + limit_s - time.monotonic())

    @asynccontextmanager
    async def generating(
        self,
        prompts: Sequence[Sequence[int]],
        params: SamplingParams,
        log: RequestLog,
        stop_after: int | None = None,
        priority: int | None = None,
        progress: bool = False,
    ) -> AsyncGenerator[Generation, None]:
        """Runs a request on the engine, and removes it from the engine at the end.

        Args:
            prompts: prompts that `check_prompt` accepts.
            progress: also generate deltas that tell how far the prompts are read (wire.Delta).

        Raises:
            RequestError, ApiError, QueueFullError, EngineDeadError: the request is not accepted.
            TimeoutError: the request takes longer than the server allows.
        """
        log.num_sequences = len(prompts) * params.n
        self.check_choices(log.num_sequences)
        filter = None
        if params.filters_tokens:
            filter = await self.in_thread(
                log.body_bytes, lambda: new_filter(params, self.tokenizer, self.ready.vocab_size)
            )
        priority = priority or 0
        async with AsyncExitStack() as stack:
            if log.batch:
                await stack.enter_async_context(self.batch_sequences.taken(log.num_sequences))
                priority += BATCH_PRIORITY
            else:
                stack.enter_context(self.queue.taken(log.user, log.num_sequences))
            owner = "" if log.key is None or self.config.share_prefixes else log.key.identity
            if log.cache_salt is not None:
                owner += f"/{log.cache_salt}"
            size = self.grammars.bytes_of(params.guide, log.user)
            request = Add(
                *("", (), params, stop_after, priority, owner, log.user, size, filter),
                saves_first=log.saves_first,
                progress=progress,
            )
            generation = self.client.submit(prompts, request)
            # Count the request only now: a dead or stopping engine makes `submit` raise.
            log.params = params
            log.prompt_tokens = sum(map(len, prompts))
            if log.key is not None:
                log.key.use.tokens -= log.prompt_tokens
            self.metrics.begin(log)
            timer = asyncio.get_running_loop().call_later(self.time_left_s(log), generation.expire)
            try:
                await generation.accepted()
                yield generation
            finally:
                timer.cancel()
                generation.cancel()
                self.metrics.end(log)

"""Generation from Python: the LLM class."""

import itertools
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from finwhale.chat.template import ChatOptions, ChatPrompt, ChatTemplate
from finwhale.chat.tokenizer import Tokenizer
from finwhale.checkpoint.location import checkpoint_directory
from finwhale.checkpoint.reader import Checkpoint, read_config
from finwhale.config import (
    Activations,
    DistributedExecutor,
    DraftTokens,
    DtypeName,
    EngineConfig,
    LoadFormat,
    WoAInput,
)
from finwhale.distributed.hosts import Place
from finwhale.engine.loop.engine import Engine
from finwhale.engine.loop.opening import start_engine
from finwhale.errors import RequestError
from finwhale.models.protocol import ModelConfig
from finwhale.models.registry import architecture_of, parse_config
from finwhale.models.weight_sources import CheckpointWeights, DummyWeights, Weights
from finwhale.request import (
    CompletionOutput,
    RequestOutput,
    SamplingParams,
    check_stop_of_answers,
)

Prompt = str | Sequence[int]
Messages = Sequence[Mapping[str, Any]]
Progress = Callable[[int, int], None]

logger = logging.getLogger(__name__)


class LLM:
    """A model and an engine in this process; threads may share it, forked processes may not.

    On a CPU, numpy's BLAS is set to one thread for the whole process (ops/cpu_math.py says why).

    Args:
        path: directory of a checkpoint, or the id of a repository on the Hugging Face Hub, which
            is downloaded unless the cache has it; None: the embedded demo model.
        revision: branch, tag or commit of the repository; None: its main branch.
        progress: called with (bytes read, bytes in all) while weights load.

    The other arguments are the options of the engine; docs/options.md describes them.

    Raises:
        CheckpointError: the checkpoint is missing, broken or of another model.
        ResourceError: the device is missing or too small.
        FinwhaleError: an option is out of range.
    """

    def __init__(
        self,
        path: str | Path | None = None,
        *,
        revision: str | None = None,
        progress: Progress | None = None,
        device: str | None = None,
        tensor_parallel_size: int | None = None,
        distributed_executor: DistributedExecutor = "spawn",
        dtype: DtypeName | None = None,
        activations: Activations = "as-trained",
        wo_a_input: WoAInput = "fp8",
        load_format: LoadFormat = "auto",
        reference: bool = False,
        batch_invariant: bool = False,
        enforce_eager: bool = False,
        graph_sizes: tuple[int, ...] | None = None,
        max_model_len: int | None = None,
        max_num_seqs: int = 64,
        max_num_batched_tokens: int = 2048,
        gpu_memory_utilization: float = 0.9,
        cache_memory_bytes: int | None = None,
        enable_prefix_caching: bool = True,
        prefix_salt: str | None = None,
        compile: bool = False,
        cache_dir: str | Path | None = None,
        draft_tokens: DraftTokens = 0,
        watchdog_seconds: float | None = None,
    ) -> None:
        # tests/unit/test_options.py compares the signature with EngineConfig.
        given = locals() | {"cache_dir": None if cache_dir is None else str(cache_dir)}
        config = EngineConfig(**{one.name: given[one.name] for one in fields(EngineConfig)})
        self._directory = checkpoint_directory(path, revision)
        self.engine = open_engine(config, self._directory, progress)
        self.tokenizer = self.engine.tokenizer
        self._template: ChatTemplate | None = None
        self._ids = itertools.count()

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> list[RequestOutput]:
        """Continues each prompt. Returns one result for each prompt, in order.

        Args:
            prompts: texts or lists of token ids; a single prompt needs no list around it. The
                model's beginning-of-sequence token is put before a text, but not before token ids.
            sampling_params: one for all prompts, or a list with one for each.

        If a prompt cannot be served (it is empty, too long, or has an id outside the vocabulary),
        its result has an `error` and the finish reason "error". The other prompts are served.

        Raises:
            RequestError: the number of sampling_params is not the number of prompts.
        """
        listed = _as_prompts(prompts)
        params = _as_params(sampling_params, len(listed))
        return self._run(
            self._try_begin(prompt, one) for prompt, one in zip(listed, params, strict=True)
        )

    def chat(
        self,
        messages: Messages | Sequence[Messages],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        thinking: bool = False,
        tools: Sequence[Mapping[str, Any]] = (),
    ) -> list[RequestOutput]:
        """Answers each conversation. Returns one result for each conversation, in order.

        Args:
            messages: one conversation (a list of {"role": ..., "content": ...}) or several.
            sampling_params: one for all conversations, or a list with one for each.
            thinking: let the model think before it answers.
            tools: function tools as in OpenAI's Chat Completions.

        Each output's `message` is the answer, parsed into content, reasoning_content and
        tool_calls. Stop strings end the answer, not the reasoning. If a conversation is malformed
        or too long, its result has an `error`, as in `generate`.

        Raises:
            RequestError: `messages` has neither form, the checkpoint has no tokenizer, or stop
                strings come with options that answers do not support.
        """
        several = _as_conversations(messages)
        params = _as_params(sampling_params, len(several))
        for one in params:
            check_stop_of_answers(one, tuple(one.stop))
        template = self.chat_template()
        options = ChatOptions(thinking=thinking, tools=tools)
        stop_after = template.end_of_thinking if thinking else None
        prompts: list[ChatPrompt | None] = []

        def begin() -> Iterator[RequestOutput]:
            for conversation, one in zip(several, params, strict=True):
                prompts.append(None)
                try:
                    prompts[-1] = prompt = template.render(conversation, options)
                except RequestError as error:
                    yield self._refused(error, None, [])
                    continue
                yield self._try_begin(prompt.token_ids, one, prompt.text, stop_after)

        results = self._run(begin())
        for prompt, one, result in zip(prompts, params, results, strict=True):
            for output in result.outputs:
                if prompt is None or output.finish_reason == "error":
                    continue
                # A stop token is no part of the answer. The parser finds a stop string itself.
                stopped = isinstance(output.stop_reason, int)
                parser = template.parser(prompt, stop=tuple(one.stop))
                parser.feed(output.token_ids[:-1] if stopped else output.token_ids)
                parser.finish("length" if output.finish_reason == "length" else "stop")
                output.message = parser.message()
        return results

    def chat_template(self) -> ChatTemplate:
        """The checkpoint's chat format. Raises RequestError if the checkpoint has no tokenizer."""
        if self.tokenizer is None:
            raise RequestError("chat needs a tokenizer, and this checkpoint has no tokenizer.json")
        if self._template is None:
            dialect = architecture_of(self.engine.model_config).chat_dialect(self._directory)
            self._template = ChatTemplate(self.tokenizer, dialect)
        return self._template

    def stream(
        self, prompt: Prompt, sampling_params: SamplingParams | None = None
    ) -> Iterator[RequestOutput]:
        """Continues one prompt. Yields its result, always the same object, after each new token.

        Raises:
            RequestError: the prompt cannot be served.
        """
        text = prompt if isinstance(prompt, str) else None
        result = self._begin(prompt, sampling_params or SamplingParams(), text)
        shown, finished = 0, False
        try:
            while not finished:
                self.engine.step()
                # Another thread's stream or batch may have stepped this request to its end.
                finished = result.finished
                made = sum(len(output.token_ids) for output in result.outputs)
                if made > shown or finished:
                    shown = made
                    yield result
        finally:
            self.engine.abort(result.request_id)

    def encode(self, text: str) -> list[int]:
        """The token ids of a text prompt, which begin with the beginning-of-sequence token."""
        if self.tokenizer is None:
            raise RequestError(
                "a text prompt needs a tokenizer, and this checkpoint has no tokenizer.json: give "
                "token ids"
            )
        if not text:
            raise RequestError("the prompt is empty: give at least one character")
        return [self.engine.model_config.bos_token_id, *self.tokenizer.encode(text)]

    def _begin(
        self,
        prompt: Prompt,
        params: SamplingParams,
        text: str | None,
        stop_after: int | None = None,
    ) -> RequestOutput:
        """Adds a prompt to the engine. Raises RequestError."""
        token_ids = self.encode(prompt) if isinstance(prompt, str) else prompt
        return self.engine.add_request(str(next(self._ids)), token_ids, params, text, stop_after)

    def _try_begin(
        self,
        prompt: Prompt,
        params: SamplingParams,
        text: str | None = None,
        stop_after: int | None = None,
    ) -> RequestOutput:
        """`_begin`, but a prompt that cannot be served gives a finished result with an error."""
        text = prompt if isinstance(prompt, str) else text
        try:
            return self._begin(prompt, params, text, stop_after)
        except RequestError as error:
            return self._refused(error, text, [] if isinstance(prompt, str) else list(prompt))

    def _refused(
        self, error: RequestError, text: str | None, token_ids: list[int]
    ) -> RequestOutput:
        logger.warning("%s", error)
        output = CompletionOutput(0, finish_reason="error")
        return RequestOutput(str(next(self._ids)), text, token_ids, [output], True, str(error))

    def _run(self, beginning: Iterable[RequestOutput]) -> list[RequestOutput]:
        """Begins the requests and runs them to their ends. An exception aborts all of them."""
        results: list[RequestOutput] = []
        try:
            results.extend(beginning)
            while not all(result.finished for result in results):
                self.engine.step()
        finally:
            for result in results:
                self.engine.abort(result.request_id)
        return results


def open_engine(
    config: EngineConfig,
    directory: Path,
    progress: Progress | None = None,
    place: Place | None = None,
) -> Engine:
    """Open an engine with the weights and the tokenizer of a checkpoint's directory.

    Args:
        place: of this process, which has rank 0; None: no launcher has placed ranks.

    Raises:
        CheckpointError, ResourceError, FinwhaleError: as `LLM` does.
    """
    model_config, weights = _find_weights(config, directory, progress)
    tokenizer = Tokenizer.open(directory) if has_tokenizer(directory) else None
    return start_engine(config, model_config, weights, tokenizer, place)


def _find_weights(
    config: EngineConfig, directory: Path, progress: Progress | None
) -> tuple[ModelConfig, Weights]:
    """The configuration of a checkpoint and its weights."""
    if config.load_format == "dummy":
        model_config = parse_config(read_config(directory))
        return model_config, DummyWeights(model_config, progress)
    checkpoint = Checkpoint.open(directory)
    model_config = parse_config(checkpoint.config)
    return model_config, CheckpointWeights(model_config, checkpoint, progress)


def has_tokenizer(directory: Path) -> bool:
    """Whether a checkpoint's directory has a tokenizer.json."""
    return (directory / "tokenizer.json").exists()


def _as_prompts(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    if isinstance(prompts, str):
        return [prompts]
    if not _is_list(prompts):
        raise RequestError(
            f"prompts must be a text, a list of token ids or a list of these, got "
            f"{type(prompts).__name__}"
        )
    items = list(prompts)
    if items and all(isinstance(item, int) for item in items):
        return [items]  # type: ignore[list-item]
    for i, item in enumerate(items):
        if not (isinstance(item, str) or _is_list(item)):
            raise RequestError(
                f"prompt {i} must be a text or a list of token ids, got {type(item).__name__}"
            )
    return items  # type: ignore[return-value]


def _is_list(value: object) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, str | bytes | bytearray)


def _as_params(
    params: SamplingParams | Sequence[SamplingParams] | None, count: int
) -> list[SamplingParams]:
    if params is None or isinstance(params, SamplingParams):
        return [params or SamplingParams()] * count
    if not _is_list(params) or not all(isinstance(one, SamplingParams) for one in params):
        raise RequestError("sampling_params must be a SamplingParams, or a list of them")
    if len(params) != count:
        raise RequestError(f"{count} prompts, but {len(params)} sampling_params")
    return list(params)


def _as_conversations(messages: Messages | Sequence[Messages]) -> list[Messages]:
    if not _is_list(messages):
        raise RequestError(
            f"messages must be a list of dicts or a list of such lists, got "
            f"{type(messages).__name__}"
        )
    if not messages:
        raise RequestError("messages must not be empty")
    if all(isinstance(m, Mapping) for m in messages):
        return [messages]  # type: ignore[list-item]
    return list(messages)  # type: ignore[arg-type]

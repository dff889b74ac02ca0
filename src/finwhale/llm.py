"""Offline generation from Python: the LLM class."""

import itertools
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from finwhale.chat.template import ChatOptions, ChatPrompt, ChatTemplate
from finwhale.chat.tokenizer import Tokenizer
from finwhale.checkpoint.dummy import DummySource
from finwhale.checkpoint.loading import WeightSource
from finwhale.checkpoint.reader import Checkpoint, read_config
from finwhale.config import Activations, DraftTokens, DtypeName, EngineConfig, WoAInput
from finwhale.demo import DEMO_PATH
from finwhale.engine.loop.engine import Engine
from finwhale.engine.rank.runner import choose_device
from finwhale.errors import FinwhaleError, RequestError
from finwhale.models.protocol import ModelConfig, WeightStream
from finwhale.models.registry import architecture_of, parse_config
from finwhale.request import CompletionOutput, RequestOutput, SamplingParams

Prompt = str | Sequence[int]
Messages = Sequence[Mapping[str, Any]]
Progress = Callable[[int, int], None]
LoadFormat = Literal["auto", "dummy"]

logger = logging.getLogger(__name__)


class LLM:
    """A model and an engine in this process; threads may share it, forked processes may not.

    On a CPU, numpy's BLAS is set to one thread for the whole process (ops/host.py says why).

    Args:
        path: a checkpoint's directory; None: the embedded demo model.
        load_format: "auto" reads the checkpoint; "dummy" reads config.json alone and makes random
            weights on the device: the speed and the memory of the model, not its text.
        device: "cpu", "cuda" or "cuda:N"; None: a GPU where there is one.
        dtype: "float32" or "bfloat16"; None: bfloat16 on a GPU, float32 on a CPU.
        activations: "as-trained" rounds activations and cached state to FP8, and the indexer's
            queries and keys to FP4, as the model was trained; "exact" rounds none of them.
        wo_a_input: "fp8" rounds the input of attention's wo_a too; "bf16" does not, as the authors'
            inference code.
        reference: run the plain torch definitions of the operators instead of the platform's.
        batch_invariant: on a GPU, give a request's tokens the same bits whatever else is in the
            batch, however its prompt is cut; slower. On a CPU float32 always does.
        enforce_eager: on a GPU, launch every kernel from the host instead of replaying graphs.
        max_model_len: tokens of prompt and output of one sequence at most.
        max_num_seqs: sequences that run at once.
        max_num_batched_tokens: tokens of one forward.
        gpu_memory_utilization: of a GPU's memory, the part that weights, workspaces and cache may
            take.
        cache_memory_bytes: memory for the paged state, instead of what is left of that.
        enable_prefix_caching: keep the state of what was read for prompts that begin the same.
        compile: run decoder layers as graphs that are compiled ahead of time; the first start takes
            a minute or two for it, later ones load them from cache_dir.
        cache_dir: where compiled kernels are kept for the next start; None: finwhale in ~/.cache.
        watchdog_seconds: when a step takes this long, every thread's stack is written to stderr.
        draft_tokens: tokens that the MTP layer drafts for each step, 0 to 3, or "auto": faster, and
            no token changes. 0: none.
        progress: called with (bytes read, bytes in all) while weights load.

    Raises:
        CheckpointError: the checkpoint is not there, broken or not of this model.
        ResourceError: the device is not there or too small.
        FinwhaleError: an option is out of range.
    """

    def __init__(
        self,
        path: str | Path | None = None,
        *,
        load_format: LoadFormat = "auto",
        device: str | None = None,
        dtype: DtypeName | None = None,
        activations: Activations = "as-trained",
        wo_a_input: WoAInput = "fp8",
        reference: bool = False,
        batch_invariant: bool = False,
        enforce_eager: bool = False,
        max_model_len: int | None = None,
        max_num_seqs: int = 64,
        max_num_batched_tokens: int = 2048,
        gpu_memory_utilization: float = 0.9,
        cache_memory_bytes: int | None = None,
        enable_prefix_caching: bool = True,
        compile: bool = False,
        cache_dir: str | Path | None = None,
        watchdog_seconds: float | None = None,
        draft_tokens: DraftTokens = 0,
        progress: Progress | None = None,
    ) -> None:
        config = EngineConfig(
            device=device,
            dtype=dtype,
            activations=activations,
            wo_a_input=wo_a_input,
            reference=reference,
            batch_invariant=batch_invariant,
            enforce_eager=enforce_eager,
            max_model_len=max_model_len,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            gpu_memory_utilization=gpu_memory_utilization,
            cache_memory_bytes=cache_memory_bytes,
            enable_prefix_caching=enable_prefix_caching,
            compile=compile,
            cache_dir=None if cache_dir is None else str(cache_dir),
            watchdog_seconds=watchdog_seconds,
            draft_tokens=draft_tokens,
        )
        self._directory = directory = Path(path) if path is not None else DEMO_PATH
        model_config, source = _open(directory, load_format, device, progress)
        self.tokenizer = Tokenizer.open(directory) if has_tokenizer(directory) else None
        self.engine = Engine(config, model_config, source, self.tokenizer)
        self._template: ChatTemplate | None = None
        self._ids = itertools.count()

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> list[RequestOutput]:
        """Continue each prompt; one result a prompt, in order.

        Args:
            prompts: texts, or lists of token ids; one prompt alone may stand without a list.
                A text begins with the model's beginning-of-sequence token; token ids are taken
                as they are.
            sampling_params: one for all, or one for each prompt.

        A prompt that cannot be served (empty, too long, an id outside the vocabulary) has its
        `error` set and finish reason "error"; the others finish.

        Raises:
            RequestError: as many sampling_params as prompts were not given.
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
        """Answer each conversation; one result a conversation, in order.

        Args:
            messages: one conversation (a list of {"role": ..., "content": ...}) or several.
            sampling_params: one for all, or one for each conversation.
            thinking: let the model think before it answers.
            tools: function tools as in OpenAI's Chat Completions.

        Each output's `message` holds the answer parsed into content, reasoning_content and
        tool_calls. Stop strings count in the answer, not in the reasoning. A conversation that is
        malformed or too long has its `error` set, as in `generate`.

        Raises:
            RequestError: `messages` is neither form, or the checkpoint has no tokenizer.
        """
        several = _as_conversations(messages)
        params = _as_params(sampling_params, len(several))
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
                # A stop token is no part of the answer; a stop string the parser finds itself.
                stopped = isinstance(output.stop_reason, int)
                parser = template.parser(prompt, stop=tuple(one.stop))
                parser.feed(output.token_ids[:-1] if stopped else output.token_ids)
                parser.finish("length" if output.finish_reason == "length" else "stop")
                output.message = parser.message()
        return results

    def chat_template(self) -> ChatTemplate:
        """The checkpoint's chat format. Raises RequestError where there is no tokenizer."""
        if self.tokenizer is None:
            raise RequestError("chat needs a tokenizer, and this checkpoint has no tokenizer.json")
        if self._template is None:
            dialect = architecture_of(self.engine.model_config).chat_dialect(self._directory)
            self._template = ChatTemplate(self.tokenizer, dialect)
        return self._template

    def stream(
        self, prompt: Prompt, sampling_params: SamplingParams | None = None
    ) -> Iterator[RequestOutput]:
        """Continue one prompt; yields its result, the same object, after each new token.

        Raises:
            RequestError: the prompt cannot be served.
        """
        text = prompt if isinstance(prompt, str) else None
        result = self._begin(prompt, sampling_params or SamplingParams(), text)
        shown, finished = 0, False
        try:
            while not finished:
                self.engine.step()
                # Other streams and batches may have stepped too, even to this one's end.
                finished = result.finished
                made = sum(len(output.token_ids) for output in result.outputs)
                if made > shown or finished:
                    shown = made
                    yield result
        finally:
            self.engine.abort(result.request_id)

    def encode(self, text: str) -> list[int]:
        """The token ids of a text prompt: beginning of sequence, then the text."""
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
        """Hand a prompt to the engine. Raises RequestError."""
        token_ids = self.encode(prompt) if isinstance(prompt, str) else prompt
        return self.engine.add_request(str(next(self._ids)), token_ids, params, text, stop_after)

    def _try_begin(
        self,
        prompt: Prompt,
        params: SamplingParams,
        text: str | None = None,
        stop_after: int | None = None,
    ) -> RequestOutput:
        """The same, but a prompt that cannot be served gives a finished result with its error."""
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
        """Begin the requests and run them to their ends; whatever happens, none is left behind."""
        results: list[RequestOutput] = []
        try:
            results.extend(beginning)
            while not all(result.finished for result in results):
                self.engine.step()
        finally:
            for result in results:
                self.engine.abort(result.request_id)
        return results


def _open(
    directory: Path, load_format: LoadFormat, device: str | None, progress: Progress | None
) -> tuple[ModelConfig, WeightStream]:
    """The configuration of a checkpoint and the source of its weights."""
    if load_format not in ("auto", "dummy"):
        raise FinwhaleError(f'load_format must be "auto" or "dummy", got {load_format!r}')
    if load_format == "dummy":
        config = parse_config(read_config(directory))
        specs = architecture_of(config).weight_specs(config)
        return config, DummySource(specs, choose_device(device)[1], progress=progress)
    checkpoint = Checkpoint.open(directory)
    config = parse_config(checkpoint.config)
    architecture = architecture_of(config)
    return config, WeightSource(
        checkpoint,
        architecture.weight_specs(config),
        ignored=architecture.ignored_prefixes(config),
        device=choose_device(device)[1],
        progress=progress,
    )


def has_tokenizer(directory: Path) -> bool:
    """Whether a checkpoint's directory holds a tokenizer.json."""
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

"""Generation from Python: the LLM class."""

import inspect
import itertools
import logging
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import KW_ONLY, dataclass, fields, replace
from functools import cache
from pathlib import Path
from typing import Any, Concatenate, Literal, ParamSpec

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
from rich.progress import Progress as RichProgress

from finwhale.chat.answer_grammar import tools_matcher
from finwhale.chat.detokenizer import Detokenizer
from finwhale.chat.grammar import Matcher
from finwhale.chat.output import OutputParser, new_gate
from finwhale.chat.stop_strings import find_stop
from finwhale.chat.template import ChatOptions, ChatPrompt, ChatTemplate
from finwhale.chat.tokenizer import Tokenizer
from finwhale.checkpoint.generation_config import sampling_defaults
from finwhale.checkpoint.location import checkpoint_directory
from finwhale.checkpoint.reader import Checkpoint, read_config
from finwhale.config import EngineConfig
from finwhale.distributed.hosts import Placement
from finwhale.engine.loop import control
from finwhale.engine.loop.control import MemoryTag
from finwhale.engine.loop.engine import Engine, Requests
from finwhale.engine.loop.metrics import EngineMetrics
from finwhale.engine.loop.opening import start_engine
from finwhale.engine.loop.request_checks import new_matcher
from finwhale.engine.loop.weight_updates import WeightsSource, WeightUpdates
from finwhale.engine.plan.sampling import TokenMatcher
from finwhale.errors import FinwhaleError, RequestError
from finwhale.files import is_file
from finwhale.models.protocol import ModelConfig
from finwhale.models.registry import architecture_of, parse_config
from finwhale.models.weight_sources import Weights
from finwhale.options import similar
from finwhale.request import (
    CompletionOutput,
    RequestOutput,
    SamplingParams,
)
from finwhale.weights.weight_group import GROUP_NAME, TIMEOUT_S, GroupBackend

PlainPrompt = str | Sequence[int]
Prompt = PlainPrompt | Mapping[str, Any]  # a mapping as in vLLM: see `plain_prompt`
Messages = Sequence[Mapping[str, Any]]
Progress = Callable[[int, int], None]

P = ParamSpec("P")

logger = logging.getLogger(__name__)

BAR_INTERVAL_S = 0.1


@dataclass(frozen=True, slots=True)
class PreparedPrompt:
    """A prompt that is ready for the engine.

    Attributes:
        text: the prompt's text; None if the caller gave token ids.
        matcher: the compiled guide; None: no guide.
        stop_after: look for stop strings only after this token, which ends the reasoning.
        answer_to: the rendered conversation, if this is a chat.
        stop: a chat's stop strings. With tools, params lack them: they mean nothing inside tool
            calls, and only the parser knows where those are.
        raises: a refusal raises RequestError, instead of giving a result with an error.
    """

    token_ids: Sequence[int]
    params: SamplingParams
    text: str | None
    matcher: TokenMatcher | None
    stop_after: int | None = None
    answer_to: ChatPrompt | None = None
    stop: tuple[str, ...] = ()
    raises: bool = False


@dataclass(frozen=True)
class Arguments(EngineConfig):
    """What LLM and AsyncLLM take: the engine's options, and these (see LLM)."""

    path: str | Path | None = None
    _: KW_ONLY
    model: str | Path | None = None
    revision: str | None = None
    progress: Progress | None = None


def _taking(
    arguments: Callable[P, Arguments],
) -> Callable[[Callable[[Any, Arguments], None]], Callable[Concatenate[Any, P], None]]:
    """Makes an `__init__` of an object of arguments take the arguments themselves.

    Type checkers and `help` then see the fields of `Arguments` as the signature.
    """

    def decorate(init: Callable[[Any, Arguments], None]) -> Callable[Concatenate[Any, P], None]:
        signature = inspect.signature(arguments)
        names = signature.parameters

        def made(self: Any, /, *args: P.args, **given: P.kwargs) -> None:
            for name in given.keys() - names:
                raise TypeError(
                    f"{type(self).__name__} has no option {name!r}{similar(name, names)}"
                )
            init(self, arguments(*args, **given))

        own = inspect.Parameter("self", inspect.Parameter.POSITIONAL_ONLY)
        made.__signature__ = signature.replace(  # type: ignore[attr-defined]
            parameters=[own, *names.values()], return_annotation=None
        )
        return made

    return decorate


class LoadedModel:
    """The base of LLM and AsyncLLM: an engine in this process, its tokenizer and chat format."""

    @_taking(Arguments)
    def __init__(self, given: Arguments) -> None:
        path, model = given.path, given.model
        if path is not None and model is not None:
            raise TypeError(f"{type(self).__name__} takes the checkpoint once: as path or as model")
        config = EngineConfig(
            **{one.name: getattr(given, one.name) for one in fields(EngineConfig)}
        )
        self._directory = checkpoint_directory(model if path is None else path, given.revision)
        reads = config.generation_config == "auto" and self._directory.is_dir()
        self._defaults = sampling_defaults(self._directory) if reads else {}
        engine = open_engine(config, self._directory, given.progress)
        self._opened: tuple[Engine, WeightUpdates] | None = (engine, WeightUpdates(engine))
        self._template: ChatTemplate | None = None
        self._ids = itertools.count()
        self._on_open()

    def _on_open(self) -> None:
        """Called once the engine is open."""

    def _check_open(self) -> tuple[Engine, WeightUpdates]:
        if self._opened is None:
            raise FinwhaleError(f"this {type(self).__name__} is closed: make a new one")
        return self._opened

    @property
    def _engine(self) -> Engine:
        return self._check_open()[0]

    @property
    def _updates(self) -> WeightUpdates:
        return self._check_open()[1]

    def _close(self) -> None:
        """End all requests and free the memory, whatever still refers to this object."""
        if self._opened is not None:
            (engine, _), self._opened = self._opened, None
            engine.close()

    def __repr__(self) -> str:
        name = f"{type(self).__name__} {str(self._directory)!r}"
        if self._opened is None:
            return f"<{name}: closed>"
        rank = self._engine.executor.description
        ranks = f"{rank.num_ranks} ranks, " if rank.num_ranks > 1 else ""
        return (
            f"<{name}: {ranks}{rank.device}, context of {self._engine.max_model_len} tokens, "
            f"up to {self._engine.sizes.num_seqs} sequences at once>"
        )

    def metrics(self) -> EngineMetrics:
        """The engine's state and counters, such as `acceptance` of drafts."""
        return self._engine.metrics()

    def get_tokenizer(self) -> Tokenizer:
        """The checkpoint's tokenizer, which has `encode` and `decode`.

        `encode` of the tokenizer adds no beginning-of-sequence token; `LLM.encode` does.

        Raises:
            RequestError: the checkpoint has no tokenizer.
        """
        return self._tokenizer_for("this")

    def _tokenizer_for(self, what: str, advice: str = "") -> Tokenizer:
        tokenizer = self._engine.tokenizer
        if tokenizer is None:
            raise RequestError(
                f"{what} needs a tokenizer, and this checkpoint has no tokenizer.json{advice}"
            )
        return tokenizer

    def chat_template(self) -> ChatTemplate:
        """The checkpoint's chat format. Raises RequestError if the checkpoint has no tokenizer."""
        tokenizer = self._tokenizer_for("chat")
        if self._template is None:
            dialect = architecture_of(self._engine.model_config).chat_dialect(self._directory)
            self._template = ChatTemplate(tokenizer, dialect)
        return self._template

    def encode(self, text: str) -> list[int]:
        """The token ids of a text prompt, which begin with the beginning-of-sequence token."""
        tokenizer = self._tokenizer_for("a text prompt", ": give token ids")
        if not text:
            raise RequestError("the prompt is empty: give at least one character")
        return [self._engine.model_config.bos_token_id, *tokenizer.encode(text)]

    def get_default_sampling_params(self) -> SamplingParams:
        """The sampling parameters of calls that give none: those of the checkpoint."""
        return SamplingParams(**self._defaults)

    def _prepared(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None,
    ) -> Iterator[PreparedPrompt | RequestOutput]:
        """Prepare the prompts of `generate` lazily. A prompt that cannot be served gives its
        finished result.
        """
        listed = _as_prompts(prompts)
        params = _as_params(sampling_params, len(listed))
        return (self._prepare(prompt, one) for prompt, one in zip(listed, params, strict=True))

    def _prepare(
        self, prompt: PlainPrompt, params: SamplingParams
    ) -> PreparedPrompt | RequestOutput:
        try:
            return self._job(prompt, params)
        except RequestError as error:
            text, token_ids = (prompt, []) if isinstance(prompt, str) else (None, list(prompt))
            return self._error_result(error, text, token_ids)

    def _job(self, prompt: PlainPrompt, params: SamplingParams) -> PreparedPrompt:
        """Prepare one prompt. Raises RequestError."""
        params = params.with_defaults(self._defaults)
        text = prompt if isinstance(prompt, str) else None
        token_ids = self.encode(prompt) if isinstance(prompt, str) else prompt
        return PreparedPrompt(token_ids, params, text, new_matcher(params, self._engine.tokenizer))

    def _prepared_chats(
        self,
        messages: Messages | Sequence[Messages],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None,
        thinking: bool,
        tools: Sequence[Mapping[str, Any]],
    ) -> Iterator[PreparedPrompt | RequestOutput]:
        """Prepare the conversations of `chat`, as `_prepared` prepares prompts."""
        several = _as_conversations(messages)
        params = _as_params(sampling_params, len(several))
        template = self.chat_template()
        options = ChatOptions(thinking=thinking, tools=tools)
        alone = several[0] is messages
        after = template.end_of_thinking if thinking else None
        held = bool(tools) and self._engine.config.tool_grammar == "auto"
        of_tools = cache(
            lambda: tools_matcher(self.get_tokenizer(), tools, after) if held else None
        )
        return (
            self._prepare_chat(template, conversation, one, options, of_tools, alone)
            for conversation, one in zip(several, params, strict=True)
        )

    def _prepare_chat(
        self,
        template: ChatTemplate,
        conversation: Messages,
        params: SamplingParams,
        options: ChatOptions,
        of_tools: Callable[[], Matcher | None],
        alone: bool,
    ) -> PreparedPrompt | RequestOutput:
        prompt: ChatPrompt | None = None
        params = params.with_defaults(self._defaults)
        try:
            prompt = template.render(conversation, options)
            matcher = new_matcher(params, self._engine.tokenizer)
            if matcher is None and (compiled := of_tools()) is not None:
                matcher = compiled.for_request()
        except RequestError as error:
            if alone:
                raise
            if prompt is None:
                return self._error_result(error, None, [])
            return self._error_result(error, prompt.text, list(prompt.token_ids))
        stop_after = template.end_of_thinking if options.thinking else None
        stop = tuple(params.stop)
        if options.tools:
            params = replace(params, stop=())
        return PreparedPrompt(
            prompt.token_ids, params, prompt.text, matcher, stop_after, prompt, stop, alone
        )

    def _parse_answer(self, job: PreparedPrompt, result: RequestOutput) -> None:
        """Fill `message` of the outputs, if the job is a chat.

        With tools, also cut the outputs at their stop strings, which the engine has not looked for.
        """
        if job.answer_to is None:
            return
        template = self.chat_template()
        for output in result.outputs:
            if output.finish_reason == "error":
                continue
            # The end of sequence and a stop token are not part of the answer. The parser finds a
            # stop string itself.
            ended_by_token = output.finish_reason == "stop" and output.stop_reason not in job.stop
            gate = new_gate(self.get_tokenizer(), job.params, job.stop, job.stop_after)
            parser = template.parser(job.answer_to, () if gate else job.stop, gate)
            parser.feed(output.token_ids[:-1] if ended_by_token else output.token_ids)
            if parser.finished and not parser.broken and not job.params.stop:
                self._cut(output, job, parser)
            parser.finish("stop" if output.finish_reason == "stop" else "length")
            if parser.broken:
                output.finish_reason = "length"
            output.message = parser.message()

    def _cut(self, output: CompletionOutput, job: PreparedPrompt, parser: OutputParser) -> None:
        """End an output with the token at which its parser has found a stop string."""
        num_tokens = parser.num_tokens
        del output.token_ids[num_tokens:]
        if output.logprobs is not None:
            del output.logprobs[num_tokens:]
        if output.routed_experts is not None:
            output.routed_experts = output.routed_experts[: num_tokens - 1]
        detokenizer = Detokenizer(self.get_tokenizer(), job.params.skip_special_tokens)
        before = detokenizer.feed(output.token_ids[: parser.num_before_stop])
        text = before + detokenizer.feed(output.token_ids[parser.num_before_stop :])
        begin, end, stop = find_stop(text, job.stop, len(before))
        output.text = text[: end if job.params.include_stop_str_in_output else begin]
        output.finish_reason, output.stop_reason = "stop", stop

    def _refused(self, error: RequestError, job: PreparedPrompt) -> RequestOutput:
        """The finished result of a prompt that the engine refuses; a single chat raises."""
        if job.raises:
            raise error
        return self._error_result(error, job.text, list(job.token_ids))

    def _error_result(
        self, error: RequestError, text: str | None, token_ids: list[int]
    ) -> RequestOutput:
        logger.warning("%s", error)
        output = CompletionOutput(0, finish_reason="error")
        return RequestOutput(self._new_id(), text, token_ids, [output], True, str(error))

    def _new_id(self) -> str:
        """A request id that this model has not used before."""
        return str(next(self._ids))


def add_job(engine: Engine, request_id: str, job: PreparedPrompt) -> RequestOutput:
    """Begin a job on an engine. Raises RequestError, EngineDeadError."""
    return engine.add_request(
        request_id, job.token_ids, job.params, job.text, job.stop_after, matcher=job.matcher
    )


class LLM(LoadedModel):
    """A model and an engine in this process; threads may share it, forked processes may not.

    Use it with `with`, or call `close` at the end; garbage collection frees the memory, too.

    On a CPU, it sets numpy's BLAS to one thread for the whole process (ops/cpu_math.py says why).

    Args:
        path: directory of a checkpoint, or the id of a repository on the Hugging Face Hub, which
            is downloaded unless the cache has it; None: the embedded model.
        model: the same as `path`, as in vLLM.
        revision: branch, tag or commit of the repository; None: its main branch.
        progress: called with (bytes read, total bytes) while weights load.

    The other arguments are the options of the engine; docs/options.md describes them.

    Raises:
        CheckpointError: the checkpoint is missing, broken or not a DeepSeek-V4 model.
        ResourceError: the device is missing or has too little memory.
        FinwhaleError: an option is out of range.
        TypeError: an option is unknown.
    """

    def close(self) -> None:
        """Ends all requests and frees the memory, whatever still refers to this object.

        Later calls raise FinwhaleError; closing again does nothing.
        """
        self._close()

    def __enter__(self) -> "LLM":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        show_progress: bool = True,
    ) -> list[RequestOutput]:
        """Continues each prompt. Returns one result for each prompt, in order.

        Args:
            prompts: texts, lists of token ids, or mappings such as {"prompt_token_ids": [...]}; a
                single prompt needs no list around it. The
                engine adds the beginning-of-sequence token before a text, but not before token ids.
            sampling_params: one for all prompts, or a list with one for each.
            show_progress: show a progress bar, if standard error is a terminal.

        If a prompt cannot be served (it is empty, too long, or has an id outside the vocabulary),
        its result has an `error` and the finish reason "error". The other prompts are served.

        Raises:
            RequestError: the number of sampling_params is not the number of prompts.
        """
        return self._run(self._prepared(prompts, sampling_params), show_progress)

    def chat(
        self,
        messages: Messages | Sequence[Messages],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        thinking: bool = False,
        tools: Sequence[Mapping[str, Any]] = (),
        show_progress: bool = True,
    ) -> list[RequestOutput]:
        """Answers each conversation. Returns one result for each conversation, in order.

        Args:
            messages: one conversation (a list of {"role": ..., "content": ...}) or several.
            sampling_params: one for all conversations, or a list with one for each.
            thinking: let the model think before it answers.
            tools: function tools as in OpenAI's Chat Completions. Calls hold their schemas only
                with tool_grammar="auto". A `strict` schema that cannot hold is then an error.
            show_progress: show a progress bar, if standard error is a terminal.

        Each output's `message` is the answer, parsed into content, reasoning_content and
        tool_calls. Stop strings end the content, not the reasoning or a tool call. If one of
        several conversations is malformed or too long, its result has an `error`, as in `generate`.

        Raises:
            RequestError: a single conversation is malformed or too long, `messages` has neither
                form, the checkpoint has no tokenizer, or stop strings come with options that
                answers do not support.
        """
        jobs = self._prepared_chats(messages, sampling_params, thinking, tools)
        return self._run(jobs, show_progress)

    def stream(
        self, prompt: Prompt, sampling_params: SamplingParams | None = None
    ) -> Iterator[RequestOutput]:
        """Continues one prompt. Yields its result, always the same object, after each new token.

        Raises:
            RequestError: the prompt cannot be served.
        """
        engine = self._engine
        job = self._job(plain_prompt(prompt), sampling_params or SamplingParams())
        request_id = self._new_id()  # before it begins, so that an interrupt aborts it
        shown, finished = 0, False
        try:
            result = add_job(engine, request_id, job)
            while not finished:
                engine.step()
                # Another thread's stream or batch may have stepped this request to its end.
                finished = result.finished
                made = sum(len(output.token_ids) for output in result.outputs)
                if made > shown or finished:
                    shown = made
                    yield result
        finally:
            engine.abort(request_id)

    def update_weights(
        self,
        source: WeightsSource,
        *,
        partial: bool = False,
        requests: Requests = "recompute",
    ) -> None:
        """Replaces the weights (see docs/rollouts.md).

        The engine stages the new weights in host memory while other threads' requests continue.
        Between two steps, it then writes them in place and clears the prefix cache. If it raises,
        the old weights stay, except after an EngineDeadError.

        Args:
            source: the directory of a checkpoint of the same model; pairs of an official name and
                a tensor on any device, in any order (the iterable may reuse a tensor's memory for
                the next pair); BroadcastTensors; or SharedTensors.
            partial: accept some of the weights; the others stay. Weights that are packed into one
                tensor must be in the same update.
            requests: how to treat running requests. "recompute": the engine computes their tokens
                so far again. "keep": they continue with the cache of the old weights. "abort": they
                end with the finish reason "abort".

        Raises:
            CheckpointError: a tensor is missing, unknown, or has a wrong shape, dtype or value.
            ResourceError: the host has too little memory to stage the weights.
            FinwhaleError: a broadcast timed out. The engine has left the group.
            EngineDeadError: a rank failed, perhaps while it wrote the weights. Start a new engine.
        """
        self._updates.update(source, partial=partial, requests=requests)

    def init_weights_update_group(
        self,
        master_address: str,
        master_port: int,
        *,
        rank_offset: int = 1,
        world_size: int | None = None,
        group_name: str = GROUP_NAME,
        backend: GroupBackend | None = None,
        timeout_seconds: float = TIMEOUT_S,
    ) -> None:
        """Joins a process group over which a trainer, its rank 0, broadcasts weights.

        Blocks until all members have joined. Meanwhile the engine runs no step.

        Args:
            master_address: the host of the trainer's TCPStore.
            master_port: the port of this store.
            rank_offset: the first rank of this engine in the group.
            world_size: number of members; None: the trainer and this engine.
            backend: "nccl" or "gloo"; None: "nccl" on GPUs.
            timeout_seconds: time limit for this call, and for each broadcast.

        Raises:
            RequestError: an argument is wrong, or the engine is already in a group of this name.
            FinwhaleError: the members did not join in time.
        """
        self._updates.join(
            master_address,
            master_port,
            rank_offset=rank_offset,
            world_size=world_size,
            group_name=group_name,
            backend=backend,
            timeout_seconds=timeout_seconds,
        )

    def destroy_weights_update_group(self, group_name: str = GROUP_NAME) -> None:
        """Leaves a group. Raises RequestError if the engine is not in it."""
        self._updates.leave(group_name)

    def pause(self, mode: Literal["keep", "abort"] = "keep") -> None:
        """Runs no more steps until `resume`; calls of other threads wait.

        Args:
            mode: "abort" ends all requests with the finish reason "abort".
        """
        control.pause(self._engine, mode)

    def resume(self) -> None:
        """Continues after `pause`."""
        control.resume(self._engine)

    def sleep(
        self,
        tags: Sequence[MemoryTag] = ("weights", "cache"),
        *,
        drop_weights: bool = False,
        requests: Literal["recompute", "abort"] = "recompute",
    ) -> None:
        """Frees memory until `wake`; needs enable_sleep_mode.

        A sleeping engine runs no steps and refuses new requests. The prefix cache is lost.

        Args:
            tags: "weights", "cache" or both.
            drop_weights: do not save the weights. After `wake`, the engine continues only after
                `update_weights` with all weights. Otherwise the weights are saved in host memory,
                or on a CPU in a temporary file.
            requests: how to treat running requests. "recompute": they wait, and the engine computes
                their tokens so far again. "abort": they end with the finish reason "abort".

        Raises:
            ResourceError: the host has too little memory to save a GPU's weights. The engine stays
                awake.
        """
        control.sleep(self._engine, tags, drop_weights=drop_weights, requests=requests)

    def wake(self, tags: Sequence[MemoryTag] = ("weights", "cache")) -> None:
        """Allocates memory again after `sleep`. The engine continues when it has all of it."""
        control.wake(self._engine, tags)

    def _run(
        self, jobs: Iterable[PreparedPrompt | RequestOutput], show_progress: bool
    ) -> list[RequestOutput]:
        """Begins the requests and runs them to their ends. An exception aborts all of them."""
        engine = self._engine
        begun: list[tuple[PreparedPrompt | None, RequestOutput]] = []
        ids: list[str] = []
        try:
            for job in jobs:
                if isinstance(job, RequestOutput):
                    begun.append((None, job))
                    continue
                ids.append(self._new_id())  # as in `stream`
                try:
                    begun.append((job, add_job(engine, ids[-1], job)))
                except RequestError as error:
                    begun.append((None, self._refused(error, job)))
            results = [result for _, result in begun]
            with _progress(show_progress, results) as update:
                while not all(result.finished for result in results):
                    engine.step()
                    update()
        finally:
            for request_id in ids:
                engine.abort(request_id)
        for accepted, result in begun:
            if accepted is not None:
                self._parse_answer(accepted, result)
        return results


def progress_bar(what: str) -> RichProgress:
    """A progress bar on standard error. Its tasks have a field `rate`, in tokens/s."""
    return RichProgress(
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn(f"{what}, {{task.fields[rate]:.0f}} tokens/s"),
        TimeElapsedColumn(),
        console=Console(stderr=True),
    )


@contextmanager
def _progress(show: bool, results: Sequence[RequestOutput]) -> Iterator[Callable[[], None]]:
    """Shows finished prompts and tokens per second on standard error, if it is a terminal.

    Yields:
        A function that updates them, a few times a second.
    """
    if not (show and results and sys.stderr.isatty()):
        yield lambda: None
        return
    began = shown = time.monotonic()
    with progress_bar("prompts") as bar:
        task = bar.add_task("", total=len(results), rate=0.0)

        def update(interval: float = BAR_INTERVAL_S) -> None:
            nonlocal shown
            if (now := time.monotonic()) - shown <= interval:
                return
            shown = now
            finished = sum(result.finished for result in results)
            made = sum(len(output.token_ids) for one in results for output in one.outputs)
            bar.update(task, completed=finished, rate=made / max(now - began, 1e-9))

        try:
            yield update
        finally:
            update(0.0)


def open_engine(
    config: EngineConfig,
    directory: Path,
    progress: Progress | None = None,
    placement: Placement | None = None,
) -> Engine:
    """Open an engine with the weights and the tokenizer of a checkpoint's directory.

    Args:
        placement: that of this process, which has rank 0; None: no launcher has placed ranks.

    Raises:
        CheckpointError, ResourceError, FinwhaleError: as `LLM` does.
    """
    model_config, weights = _find_weights(config, directory, progress)
    tokenizer = Tokenizer.open(directory) if has_tokenizer(directory) else None
    return start_engine(config, model_config, weights, tokenizer, placement)


def _find_weights(
    config: EngineConfig, directory: Path, progress: Progress | None
) -> tuple[ModelConfig, Weights]:
    """The configuration of a checkpoint and its weights."""
    if config.load_format == "dummy":
        model_config = parse_config(read_config(directory))
        return model_config, Weights(model_config, progress=progress)
    checkpoint = Checkpoint.open(directory)
    model_config = parse_config(checkpoint.config)
    return model_config, Weights(model_config, checkpoint, progress)


def has_tokenizer(directory: Path) -> bool:
    """Whether a checkpoint's directory has a tokenizer.json. Raises CheckpointError."""
    return is_file(directory / "tokenizer.json")


def _as_prompts(prompts: Prompt | Sequence[Prompt]) -> list[PlainPrompt]:
    if isinstance(prompts, str | Mapping):
        return [plain_prompt(prompts)]
    if not _is_list(prompts):
        raise RequestError(
            f"prompts must be a text, a list of token ids or a list of these, got "
            f"{type(prompts).__name__}"
        )
    items = list(prompts)
    if items and all(isinstance(item, int) for item in items):
        return [items]  # type: ignore[list-item]
    items = [plain_prompt(item) if isinstance(item, Mapping) else item for item in items]
    for i, item in enumerate(items):
        if not (isinstance(item, str) or _is_list(item)):
            raise RequestError(
                f"prompt {i} must be a text or a list of token ids, got {type(item).__name__}"
            )
    return items  # type: ignore[return-value]


def plain_prompt(prompt: Prompt) -> PlainPrompt:
    """A prompt's text or ids. A mapping has one of them: `prompt` or `prompt_token_ids`.

    Raises:
        RequestError: a mapping has other keys or values.
    """
    if not isinstance(prompt, Mapping):
        return prompt
    if len(prompt) != 1 or not prompt.keys() <= {"prompt", "prompt_token_ids"}:
        raise RequestError(
            'a prompt that is a mapping has one key, "prompt" or "prompt_token_ids", got '
            f"{sorted(map(str, prompt))}"
        )
    ((key, found),) = prompt.items()
    if not (isinstance(found, str) if key == "prompt" else _is_list(found)):
        wanted = "a text" if key == "prompt" else "a list of token ids"
        raise RequestError(f"{key} of a prompt must be {wanted}, got {type(found).__name__}")
    return found  # type: ignore[no-any-return]


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

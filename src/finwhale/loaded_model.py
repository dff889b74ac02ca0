"""What LLM and AsyncLLM share: an engine in this process, its tokenizer, and its prompts."""

import inspect
import itertools
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, fields, replace
from functools import cache
from pathlib import Path
from typing import Any, Concatenate, ParamSpec

from finwhale.chat.answer_grammar import tools_matcher
from finwhale.chat.detokenizer import Detokenizer
from finwhale.chat.output import OutputParser, new_gate
from finwhale.chat.stop_strings import find_stop
from finwhale.chat.template import ChatPrompt, ChatTemplate, check_tools
from finwhale.chat.tokenizer import Tokenizer
from finwhale.checkpoint.config_files import read_config, sampling_defaults
from finwhale.checkpoint.location import checkpoint_directory
from finwhale.checkpoint.reader import Checkpoint
from finwhale.checkpoint.spec import Progress
from finwhale.config import EngineConfig
from finwhale.distributed.rank import Placement
from finwhale.engine.loop.engine import Engine
from finwhale.engine.loop.metrics import EngineMetrics
from finwhale.engine.loop.opening import start_engine
from finwhale.engine.loop.request_checks import new_matcher
from finwhale.engine.loop.weight_updates import WeightUpdates
from finwhale.engine.plan.sampling import TokenMatcher
from finwhale.errors import FinwhaleError, RequestError
from finwhale.models.registry import DIALECTS, parse_config
from finwhale.models.weight_sources import Weights
from finwhale.options import similar
from finwhale.prompts import Messages, PlainPrompt, Prompt, as_conversations, as_params, as_prompts
from finwhale.request import CompletionOutput, RequestOutput, SamplingParams

P = ParamSpec("P")

logger = logging.getLogger(__name__)


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
            f"up to {self._engine.max_num_seqs} sequences at once>"
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
            dialect = DIALECTS[self._engine.model_config.model_type](self._directory)
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
        """Prepare prompts lazily. A prompt that cannot be served gives its finished result."""
        listed = as_prompts(prompts)
        return map(self._prepare, listed, as_params(sampling_params, len(listed)))

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
        several = as_conversations(messages)
        given = as_params(sampling_params, len(several))
        template = self.chat_template()
        check_tools(tools)
        after = template.end_of_thinking if thinking else None
        held = bool(tools) and self._engine.config.tool_grammar == "auto"
        tokenizer, dialect = self.get_tokenizer(), template.dialect
        of_tools = cache(lambda: tools_matcher(tokenizer, tools, after, dialect) if held else None)
        alone = several[0] is messages

        def prepare(
            conversation: Messages, params: SamplingParams
        ) -> PreparedPrompt | RequestOutput:
            prompt: ChatPrompt | None = None
            params = params.with_defaults(self._defaults)
            try:
                prompt = template.render(conversation, thinking=thinking, tools=tools)
                matcher = new_matcher(params, self._engine.tokenizer)
                if matcher is None and (compiled := of_tools()) is not None:
                    matcher = compiled.for_request()
            except RequestError as error:
                if alone:
                    raise
                given = (None, []) if prompt is None else (prompt.text, list(prompt.token_ids))
                return self._error_result(error, *given)
            stop = tuple(params.stop)
            if tools:
                params = replace(params, stop=())
            return PreparedPrompt(
                prompt.token_ids, params, prompt.text, matcher, after, prompt, stop, alone
            )

        return map(prepare, several, given)

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
    checkpoint = None if config.load_format == "dummy" else Checkpoint.open(directory)
    model_config = parse_config(read_config(directory) if checkpoint is None else checkpoint.config)
    weights = Weights(model_config, checkpoint, progress)
    return start_engine(config, model_config, weights, Tokenizer.find(directory), placement)

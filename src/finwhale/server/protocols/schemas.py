"""The fields of request bodies. A field that is not listed is refused, not dropped.

Fields marked "no effect" belong to hosted services (billing, storage, moderation). Clients send
them without being asked to, and this server has nothing that they could change.
"""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, create_model

from finwhale.chat.template import ProtocolName
from finwhale.errors import RequestError
from finwhale.options import Option, options_of
from finwhale.request import MAX_LOGPROBS, SamplingParams


def _up_to_the_first_wrong(bias: Any) -> Any:
    """The first wrong value alone: a bias of 100,000 wrong values has one error, too."""
    for key, value in bias.items() if isinstance(bias, dict) else ():
        if type(value) not in (int, float) or not -100 <= value <= 100:
            return {key: value}
    return bias


Text = Annotated[str, Field(max_length=1 << 24)]
# An error in the first item ends the check: a list of a million wrong items has one error.
Texts = Annotated[list[Text], Field(fail_fast=True)]
Names = Annotated[list[str], Field(max_length=16)]
TokenId = Annotated[int, Field(ge=0, lt=2**31)]
MaxTokens = Annotated[int, Field(ge=1, lt=2**31)]
TokenIds = Annotated[list[TokenId], Field(fail_fast=True)]
Bias = Annotated[
    dict[str, Annotated[float, Field(ge=-100, le=100)]], BeforeValidator(_up_to_the_first_wrong)
]
Json = dict[str, Any]
LOGPROBS = "message.output_text.logprobs"
Includable = Literal[
    "code_interpreter_call.outputs",
    "computer_call_output.output.image_url",
    "file_search_call.results",
    "message.input_image.image_url",
    "message.output_text.logprobs",
    "reasoning.encrypted_content",
    "web_search_call.action.sources",
    "web_search_call.results",
]
Jsons = Annotated[list[Json], Field(fail_fast=True)]
# The description of a field that vllm-router and sglang-router add to a request.
_ROUTERS = "routers add false, which has no effect; true is not supported"
# The API description says which engine or client an extension comes from.
_VLLM, _SGLANG = "extension, as in vLLM", "extension, as in SGLang"
# Of response_format, in chat completions and completions.
_FORMAT = (
    'text, json_object or json_schema; extensions: {"type": "regex", "regex": ...}, '
    '{"type": "grammar", "grammar": ...} (Lark), and the whole field in completions'
)
_BOS = "false puts no beginning-of-sequence token before a text"


def described(description: str, default: Any = None) -> Any:
    """A field that may be left out, with what the API description says of it."""
    return Field(default=default, description=description)


class Body(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)
    protocol: ClassVar[ProtocolName | None] = None  # whose conversation the body has


class StreamOptions(Body):
    include_usage: bool = False
    include_obfuscation: bool = described("no effect", False)


class UsageStreamOptions(StreamOptions):
    """The stream options of chat completions and completions."""

    continuous_usage_stats: bool = described(
        f"{_VLLM}: with include_usage, every chunk has the usage so far", False
    )


class KvTransferParams(Body):
    """What a router passes from a prefill server to a decode server, in vLLM's form."""

    do_remote_decode: bool = described(
        "true: the answer waits until --prefix-store has the prompt, and names the store", False
    )
    do_remote_prefill: bool = described(
        "no effect: every request looks for its prompt in the store", False
    )
    prefix_store: Annotated[str, Field(pattern="^[0-9a-f]{32}$")] | None = described(
        "the store that the prefill server's answer names; another one is logged"
    )
    remote_engine_id: None = described("must be null")
    remote_block_ids: None = described("must be null")
    remote_host: None = described("must be null")
    remote_port: None = described("must be null")


class StructuredOutputs(Body):
    """One format of an answer, as in vLLM: exactly one field is set."""

    # Not named `json`, which is a method of BaseModel.
    json_schema: str | Json | None = Field(
        default=None, alias="json", description="a JSON schema, as an object or as text"
    )
    json_object: bool | None = described("true: any JSON object")
    regex: Text | None = described("a regular expression")
    choice: Annotated[list[Text], Field(min_length=1, max_length=1024)] | None = described(
        "texts; the answer is one of them"
    )
    grammar: Text | None = described("a grammar in llguidance's dialect of Lark")


def _extension(one: Option, origin: str) -> Any:
    """The type and the field of an option of SamplingParams that a body may have."""
    kind: Any = one.kind
    if kind in (int, float):
        kind = Annotated[kind, Field(ge=one.least, gt=one.above, le=one.most)]
    elif kind is not bool:
        item = TokenId if kind == Sequence[int] else Annotated[str, Field(max_length=256)]
        kind = Annotated[list[item], Field(max_length=one.items, fail_fast=True)]  # type: ignore[valid-type]
    return kind | None, described(f"{origin}: {one.help}")


def _extensions(base: type[Body], **origins: str) -> Any:
    """A body with more fields: the options of SamplingParams that have one of these marks.
    `origins`: for each mark, the beginning of the fields' descriptions."""
    found = {
        one.name: _extension(one, text)
        for mark, text in origins.items()
        for one in options_of(SamplingParams)
        if mark in one.marks
    }
    return create_model("Extensions", __base__=base, **found)


class SamplingBody(_extensions(Body, all="extension")):  # type: ignore[misc]
    """The fields that the three chat protocols and completions share, with our extensions."""

    model: Annotated[str, Field(max_length=512)]
    stream: bool | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    priority: Annotated[int, Field(ge=-(2**31), lt=2**31)] | None = described(
        "extension: requests with lower numbers come first; 0 by default"
    )
    cache_salt: Annotated[str, Field(min_length=1, max_length=256)] | None = described(
        "extension: only requests with the same value share cached prefixes"
    )
    kv_transfer_params: KvTransferParams | None = described(
        f"{_VLLM}: routers send it to prefill and decode servers; needs --prefix-store"
    )

    def sampling_params(
        self,
        *,
        max_tokens: int | None,
        stop: tuple[str, ...] = (),
        logprobs: int | None = None,
        defaults: Mapping[str, Any] | None = None,
    ) -> SamplingParams:
        """The sampling parameters that the body asks for.

        Args:
            defaults: values of fields that the client left out.

        Raises:
            RequestError: a value is out of range.
        """
        given = {one.name: getattr(self, one.name, None) for one in options_of(SamplingParams)}
        for name, (first, _) in SECOND_NAMES.items():
            if first in given and getattr(self, name, None):
                given[first] = getattr(self, name)
        given |= {"max_tokens": max_tokens, "stop": stop, "logprobs": logprobs}
        given["logit_bias"] = self.bias_of_ids() if isinstance(self, OpenAIBody) else None
        sent = {k: v for k, v in given.items() if v is not None}
        return SamplingParams(**{"max_tokens": None, **(defaults or {}), **sent})


class _FirstNames(_extensions(SamplingBody, vllm=_VLLM, sglang=_SGLANG)):  # type: ignore[misc]
    structured_outputs: StructuredOutputs | None = described(f"{_VLLM}: the format of the answer")


# Second names of fields, and where they come from.
SECOND_NAMES = {
    "no_stop_trim": ("include_stop_str_in_output", _SGLANG),
    "guided_json": ("structured_outputs.json", _VLLM),
    "guided_regex": ("structured_outputs.regex", _VLLM),
    "guided_choice": ("structured_outputs.choice", _VLLM),
    "guided_grammar": ("structured_outputs.grammar", _VLLM),
    "regex": ("structured_outputs.regex", _SGLANG),
}


def _second_names(base: type[Body]) -> Any:
    """A body with the second names of its fields."""
    inner = {one.alias or name: one for name, one in StructuredOutputs.model_fields.items()}
    known = base.model_fields | {f"structured_outputs.{name}": one for name, one in inner.items()}
    found: dict[str, Any] = {
        name: (known[first].annotation, described(f"{text}: the same as {first}"))
        for name, (first, text) in SECOND_NAMES.items()
    }
    return create_model("SecondNames", __base__=base, **found)


class OpenAIBody(_second_names(_FirstNames)):  # type: ignore[misc]
    n: Annotated[int, Field(ge=1, le=128)] | None = None
    stop: str | Names | None = None
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] | None = None
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    logit_bias: Bias | None = None
    stream_options: UsageStreamOptions | None = None
    user: str | None = described("no effect")
    request_id: Annotated[str, Field(min_length=1, max_length=256)] | None = described(
        f"{_VLLM}: the answer's id ends with it"
    )
    return_token_ids: bool | None = described(
        f"{_VLLM}: prompt_token_ids and token_ids in the answer"
    )
    return_progress: bool | None = described(
        "extension, as in llama.cpp: a stream tells how far the prompt is read"
    )
    return_hidden_states: Literal[False] | None = described(_ROUTERS)

    @property
    def wants_progress(self) -> bool:
        """Whether a stream tells how far the prompt is read."""
        return bool(self.stream and self.return_progress)

    @property
    def wants_usage(self) -> bool:
        """Whether a stream ends with a chunk of usage."""
        return self.stream_options is not None and self.stream_options.include_usage

    @property
    def wants_continuous_usage(self) -> bool:
        """Whether every chunk of a stream has the usage so far."""
        options = self.stream_options
        return options is not None and options.include_usage and options.continuous_usage_stats

    def check_stream(self) -> None:
        """Raises RequestError if the answer cannot stream as the body asks."""
        if self.stream and self.prompt_logprobs is not None:
            raise RequestError("prompt_logprobs is not available in streams")
        if self.stream and self.return_routed_experts:
            raise RequestError("return_routed_experts is not available in streams")

    def stop_strings(self) -> tuple[str, ...]:
        """The stop strings. Raises RequestError if one is empty."""
        several = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())
        if not all(several):
            raise RequestError("stop strings must not be empty")
        return several

    def bias_of_ids(self) -> dict[int, float] | None:
        """The logit bias by token id. Raises RequestError if a key is not a token id."""
        for key in self.logit_bias or ():
            if not (key.isascii() and key.isdecimal() and len(key) <= 10):
                raise RequestError(f"logit_bias must have token ids as keys, got {key[:40]!r}")
        return None if self.logit_bias is None else {int(k): v for k, v in self.logit_bias.items()}


class CompletionBody(OpenAIBody):
    prompt: Text | Texts | TokenIds | Annotated[list[TokenIds], Field(fail_fast=True)]
    max_tokens: Annotated[int, Field(ge=0, lt=2**31)] | None = None
    logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    echo: bool | None = None
    add_special_tokens: bool | None = described(f"{_VLLM}: {_BOS}")
    best_of: Annotated[int, Field(ge=1, le=128)] | None = described("must equal n")
    suffix: str | None = described("not supported: must be null")
    response_format: Json | None = described(_FORMAT)


class _ToolsAndHosting(Body):
    """The fields that chat completions and Responses share besides those of SamplingBody."""

    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    tools: Annotated[Jsons, Field(max_length=1024)] | None = None
    tool_choice: str | Json | None = None
    parallel_tool_calls: bool | None = None
    metadata: Json | None = described("no effect")
    store: bool | None = described("no effect")
    service_tier: str | None = described("no effect")
    safety_identifier: str | None = described("no effect")
    prompt_cache_key: str | None = described("no effect")
    prompt_cache_retention: str | None = described("no effect")


class ChatBody(_ToolsAndHosting, OpenAIBody):
    protocol: ClassVar[ProtocolName] = "chat"
    messages: Annotated[Jsons, Field(min_length=1)]
    max_tokens: MaxTokens | None = None
    max_completion_tokens: MaxTokens | None = described("the same as max_tokens")
    logprobs: bool | None = None
    response_format: Json | None = described(_FORMAT)
    thinking: Json | None = described('DeepSeek\'s: {"type": "enabled"} or {"type": "disabled"}')
    reasoning_effort: str | int | None = described("integers: DeepSeek-V4.1 only")
    modalities: Annotated[list[Literal["text"]], Field(fail_fast=True)] | None = described(
        'only ["text"] is supported'
    )
    verbosity: str | None = described("no effect")
    chat_template_kwargs: Json | None = described(
        f"{_VLLM}: thinking or enable_thinking (true or false), and reasoning_effort"
    )
    continue_final_message: bool | None = described(
        f"{_VLLM}: continue the last message, which is an assistant's"
    )
    add_generation_prompt: bool | None = described(
        f"{_VLLM}: false only together with continue_final_message"
    )
    separate_reasoning: bool | None = described(
        f"{_SGLANG}: false leaves the reasoning in the content"
    )
    stream_reasoning: bool | None = described(f"{_SGLANG}: false sends the reasoning in one piece")
    include_reasoning: bool | None = described(
        f"{_VLLM}: false leaves the reasoning out of the answer"
    )


class ResponsesBody(_ToolsAndHosting, SamplingBody):
    protocol: ClassVar[ProtocolName] = "responses"
    input: Text | Jsons
    instructions: Text | None = None
    max_output_tokens: MaxTokens | None = None
    include: Annotated[list[Includable], Field(max_length=64)] | None = described(
        f"{LOGPROBS}; no other value has an effect"
    )
    text: Json | None = None
    reasoning: Json | None = None
    thinking: Json | None = None
    truncation: Literal["disabled"] | None = described('only "disabled" is supported')
    background: Literal[False] | None = described("only false is supported")
    stream_options: StreamOptions | None = None
    previous_response_id: None = described("not supported: send the whole conversation")
    user: str | None = described("no effect")
    client_metadata: Json | None = described("no effect")


class _MessagesFields(Body):
    """The fields of a message and of a count of its tokens."""

    protocol: ClassVar[ProtocolName] = "messages"
    messages: Annotated[Jsons, Field(min_length=1)]
    system: Text | Jsons | None = None
    tools: Annotated[Jsons, Field(max_length=1024)] | None = None
    tool_choice: Json | None = None
    thinking: Json | None = None
    output_config: Json | None = None
    output_format: Json | None = None
    context_management: Json | None = described(
        "no effect: the answer says that no edits were applied"
    )
    cache_control: Json | None = described("no effect: every prefix may be cached")


class CountTokensBody(_MessagesFields):
    model: Annotated[str, Field(max_length=512)]


class MessagesBody(_MessagesFields, SamplingBody):
    max_tokens: MaxTokens
    stop_sequences: Names | None = None
    thread: Json | None = described(
        "refused: Anthropic's tool runner then sends the whole conversation each time"
    )
    metadata: Json | None = described("no effect")
    service_tier: str | None = described("no effect")


class TokenizeBody(Body):
    protocol: ClassVar[ProtocolName] = "chat"
    model: str | None = None
    prompt: Text | None = described("text; or give messages")
    messages: Annotated[Jsons, Field(min_length=1)] | None = None
    tools: Jsons | None = None
    thinking: Json | None = None
    add_special_tokens: bool = described(_BOS, True)
    return_token_strs: bool = False


class DetokenizeBody(Body):
    model: str | None = None
    tokens: Annotated[TokenIds, Field(max_length=1 << 22)]
    skip_special_tokens: bool = False


class TokenizeAnswer(BaseModel):
    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = None


class DetokenizeAnswer(BaseModel):
    prompt: str


class ModelCard(BaseModel):
    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "finwhale"
    max_model_len: int  # vLLM's name for the context
    context_length: int  # the name that routers know
    # Anthropic's fields
    type: Literal["model"] = "model"
    display_name: str
    created_at: str
    max_input_tokens: int
    max_tokens: int


class ModelList(BaseModel):
    """The list in OpenAI's and in Anthropic's form."""

    object: Literal["list"] = "list"
    data: list[ModelCard]
    has_more: bool = False
    first_id: str
    last_id: str


class Health(BaseModel):
    status: str
    reason: str | None = None

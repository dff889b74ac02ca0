"""/tokenize, /detokenize, /v1/messages/count_tokens and /v1/responses/input_tokens."""

from typing import Any

from finwhale.chat.template import ProtocolRequest, convert
from finwhale.errors import RequestError
from finwhale.server.protocols import schemas
from finwhale.server.protocols.chat_requests import convert_body
from finwhale.server.state import ServerState


async def tokenize(
    state: ServerState, body: schemas.TokenizeBody, body_bytes: int
) -> dict[str, Any]:
    """The fields of TokenizeAnswer. Raises RequestError, ApiError."""
    if body.model is not None:
        state.check_model(body.model)
    if (body.prompt is None) == (body.messages is None):
        raise RequestError("give either prompt or messages")
    ids = await state.in_thread(body_bytes, lambda: _encode(state, body))
    strings = None
    if body.return_token_strs:
        tokenizer = state.need_tokenizer()
        strings = (tokenizer.token_text(i) for i in ids)
    length = state.ready.max_model_len
    return {"count": len(ids), "max_model_len": length, "tokens": ids, "token_strs": strings}


def _encode(state: ServerState, body: schemas.TokenizeBody) -> list[int]:
    if body.prompt is not None:
        return state.encode(body.prompt, with_bos=body.add_special_tokens)
    given = {"messages": body.messages, "tools": body.tools, "thinking": body.thinking}
    fields = {name: value for name, value in given.items() if value}
    converted = convert("chat", fields, default_thinking=state.config.default_thinking)
    return _encode_converted(state, converted)


def _encode_converted(state: ServerState, converted: ProtocolRequest) -> list[int]:
    return state.need_template().encode(converted, state.check_text).token_ids


async def detokenize(
    state: ServerState, body: schemas.DetokenizeBody, body_bytes: int
) -> dict[str, Any]:
    """The fields of DetokenizeAnswer. Raises RequestError, ApiError."""
    if body.model is not None:
        state.check_model(body.model)
    tokenizer = state.need_tokenizer()
    state.check_ids(body.tokens)
    text = await state.in_thread(
        body_bytes, lambda: tokenizer.decode(body.tokens, body.skip_special_tokens)
    )
    return {"prompt": text}


async def count(
    state: ServerState, body: schemas.CountTokensBody | schemas.ResponsesBody, body_bytes: int
) -> int:
    """The number of tokens of a prompt of Messages or Responses. Raises RequestError, ApiError."""
    state.check_model(body.model)

    def encode() -> list[int]:
        return _encode_converted(state, convert_body(state, body)[0])

    return len(await state.in_thread(body_bytes, encode))

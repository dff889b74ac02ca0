"""/tokenize, /detokenize, /v1/messages/count_tokens and /v1/responses/input_tokens."""

from typing import Any

from fastapi import FastAPI, Request
from starlette.responses import Response

from finwhale.chat.template import ProtocolRequest, convert
from finwhale.errors import RequestError
from finwhale.server.protocols import schemas
from finwhale.server.protocols.chat_requests import convert_body
from finwhale.server.protocols.json_answer import json_answer
from finwhale.server.state import ServerState


def add_tokens(app: FastAPI, state: ServerState, responses: dict[int | str, Any]) -> None:
    """Adds the paths."""

    def encode_converted(converted: ProtocolRequest) -> list[int]:
        return state.need_template().encode(converted, state.check_text).token_ids

    def encode(body: schemas.TokenizeBody) -> list[int]:
        if body.prompt is not None:
            return state.encode(body.prompt, with_bos=body.add_special_tokens)
        given = {"messages": body.messages, "tools": body.tools, "thinking": body.thinking}
        fields = {name: value for name, value in given.items() if value}
        thinking, dialect = state.config.default_thinking, state.need_template().dialect
        return encode_converted(convert("chat", fields, default_thinking=thinking, dialect=dialect))

    async def count(body: schemas.CountTokensBody | schemas.ResponsesBody, request: Request) -> int:
        state.check_model(body.model)
        ids = await state.in_thread(
            request.state.body_bytes, lambda: encode_converted(convert_body(state, body)[0])
        )
        return len(ids)

    @app.post("/v1/messages/count_tokens", responses=responses)
    async def count_tokens(body: schemas.CountTokensBody, request: Request) -> dict[str, int]:
        return {"input_tokens": await count(body, request)}

    @app.post("/v1/responses/input_tokens", responses=responses)
    async def count_input_tokens(
        body: schemas.ResponsesBody, request: Request
    ) -> dict[str, int | str]:
        return {"object": "response.input_tokens", "input_tokens": await count(body, request)}

    @app.post("/tokenize", responses=responses, response_model=schemas.TokenizeAnswer)
    async def tokenize(body: schemas.TokenizeBody, request: Request) -> Response:
        if body.model is not None:
            state.check_model(body.model)
        if (body.prompt is None) == (body.messages is None):
            raise RequestError("give either prompt or messages")
        ids = await state.in_thread(request.state.body_bytes, lambda: encode(body))
        found: dict[str, Any] = {"count": len(ids), "max_model_len": state.ready.max_model_len}
        spell = state.need_tokenizer().token_text if body.return_token_strs else None
        found |= {"tokens": ids, "token_strs": None if spell is None else map(spell, ids)}
        return json_answer(found, state.turn)

    @app.post("/detokenize", responses=responses, response_model=schemas.DetokenizeAnswer)
    async def detokenize(body: schemas.DetokenizeBody, request: Request) -> Response:
        if body.model is not None:
            state.check_model(body.model)
        tokenizer = state.need_tokenizer()
        state.check_ids(body.tokens)
        text = await state.in_thread(
            request.state.body_bytes,
            lambda: tokenizer.decode(body.tokens, body.skip_special_tokens),
        )
        return json_answer({"prompt": text}, state.turn)

"""Writes docs/fields.md: `python -m finwhale.server.fields_page > docs/fields.md`."""

from finwhale.server.protocols import schemas

COLUMNS: tuple[type[schemas.Body], ...] = (
    schemas.ChatBody,
    schemas.CompletionBody,
    schemas.ResponsesBody,
    schemas.MessagesBody,
)
PAGE = """# Request fields

This page is for those who write clients.
`python -m finwhale.server.fields_page > docs/fields.md` writes this page from the server's schemas.

The columns chat, completions, responses and messages stand for `/v1/chat/completions`, `/v1/completions`,
`/v1/responses` and `/v1/messages`. The server refuses a request with a field that its column does not have, unless it
runs with `--lenient`. A field without a meaning here means what its protocol says. "No effect" marks fields that
clients send unasked.

| field | chat | completions | responses | messages | meaning |
|---|---|---|---|---|---|
{fields}

`stream_options` has these fields:

{stream_options}

`structured_outputs` has exactly one of these fields:

{structured_outputs}

## Fields of vLLM and SGLang

- `prompt_logprobs: K` adds `prompt_logprobs` to a chat completion, or to each choice of a completion. This list has
  null for the first token of the prompt. For each other token it has an object whose keys are token ids, the token
  itself and the K most likely ones, and whose values have `logprob`, `rank` and `decoded_token`. The request computes
  its whole prompt, without cached prefixes. A request may ask for at most 262,144 of these values.
- `return_routed_experts: true` adds `routed_experts` to each choice, and `prompt_routed_experts` to a chat completion
  or to each choice of a completion. Each is an object with `data` (the array's bytes in base64, in C order), `shape`
  ([tokens, layers, experts]) and `dtype` (`uint8` or `int16`). There is a row for each token of the prompt, and for
  each generated token but the last. The request computes its whole prompt, without cached prefixes. The server needs
  `--enable-return-routed-experts`. [Rollouts](rollouts.md#routed-experts) shows how to read the arrays.
- `echo` with `logprobs` puts the prompt's tokens before the generated ones. With `max_tokens: 0`, it returns the
  prompt's tokens alone.
- `logprobs: K` of completions: each object of `top_logprobs` has the K most likely tokens and the token itself, as in
  OpenAI's API.
- `return_token_ids` adds `token_ids` to each choice, and `prompt_token_ids` to a chat completion, to each choice of a
  completion, or to the first chunk of a stream.
- Until an output has `min_tokens` tokens, the end of sequence and stop tokens cannot be chosen, and stop strings do not
  end it. A grammar may end it earlier.
- `structured_outputs`, the `guided_` fields, `regex` and `response_format` exclude each other. Grammars are in
  llguidance's dialect of Lark, not in GBNF.
- `separate_reasoning: false` leaves the reasoning in the content, up to `</think>`. `include_reasoning: false` leaves
  it out, and `stream_reasoning: false` sends it in one piece.
- A request may have both `max_tokens` and `max_completion_tokens` if they are equal.
"""  # noqa: E501


def fields_page() -> str:
    """The whole page."""
    names = dict.fromkeys(name for body in COLUMNS for name in body.model_fields)
    return PAGE.format(
        fields="\n".join(map(_row, names)),
        stream_options=_list(schemas.UsageStreamOptions),
        structured_outputs=_list(schemas.StructuredOutputs),
    )


def _row(name: str) -> str:
    having = [name in body.model_fields for body in COLUMNS]
    meanings = dict.fromkeys(
        body.model_fields[name].description or "" for body in COLUMNS if name in body.model_fields
    )
    marks = " | ".join("x" if has else "" for has in having)
    meaning = "; ".join(filter(None, meanings)).replace("|", "\\|")
    return f"| `{name}` | {marks} | {meaning} |"


def _list(body: type[schemas.Body]) -> str:
    lines = []
    for name, field in body.model_fields.items():
        meaning = f": {field.description}" if field.description else ""
        lines.append(f"- `{field.alias or name}`{meaning}")
    return "\n".join(lines)


if __name__ == "__main__":
    print(fields_page(), end="")

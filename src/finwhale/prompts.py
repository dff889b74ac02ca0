"""The forms in which LLM and AsyncLLM take prompts, conversations and sampling parameters."""

from collections.abc import Mapping, Sequence
from typing import Any

from finwhale.errors import RequestError
from finwhale.request import SamplingParams

PlainPrompt = str | Sequence[int]
Prompt = PlainPrompt | Mapping[str, Any]  # a mapping as in vLLM: see `plain_prompt`
Messages = Sequence[Mapping[str, Any]]


def as_prompts(prompts: Prompt | Sequence[Prompt]) -> list[PlainPrompt]:
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


def as_params(
    params: SamplingParams | Sequence[SamplingParams] | None, count: int
) -> list[SamplingParams]:
    if params is None or isinstance(params, SamplingParams):
        return [params or SamplingParams()] * count
    if not _is_list(params) or not all(isinstance(one, SamplingParams) for one in params):
        raise RequestError("sampling_params must be a SamplingParams, or a list of them")
    if len(params) != count:
        raise RequestError(f"{count} prompts, but {len(params)} sampling_params")
    return list(params)


def as_conversations(messages: Messages | Sequence[Messages]) -> list[Messages]:
    if not _is_list(messages):
        raise RequestError(
            f"messages must be a list of dicts or a list of such lists, got "
            f"{type(messages).__name__}"
        )
    if all(isinstance(m, Mapping) for m in messages):
        return [messages]  # type: ignore[list-item]
    return list(messages)  # type: ignore[arg-type]

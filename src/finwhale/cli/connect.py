"""`finwhale connect`: print the settings with which a coding agent uses a running server."""

import argparse
import json
import os
import shlex
import sys
from collections.abc import Sequence
from http.client import HTTPException
from string import Template
from urllib.error import HTTPError
from urllib.request import Request, urlopen

from finwhale.errors import FinwhaleError
from finwhale.options import Parser, similar

KEY = "FINWHALE_API_KEY"
# Of each program, where its settings belong, and their template. JSON is indented later.
PROGRAMS = {
    "claude-code": ("the shell that starts claude", """\
export ANTHROPIC_BASE_URL=$url
export ANTHROPIC_AUTH_TOKEN=$key
export ANTHROPIC_MODEL=$model
export ANTHROPIC_DEFAULT_OPUS_MODEL=$model
export ANTHROPIC_DEFAULT_SONNET_MODEL=$model
export ANTHROPIC_DEFAULT_HAIKU_MODEL=$model
export CLAUDE_CODE_MAX_CONTEXT_TOKENS=$context"""),
    "codex": ("~/.codex/config.toml", """\
model = "$model"
model_provider = "finwhale"
model_context_window = $context
[model_providers.finwhale]
name = "Finwhale"
base_url = "$url/v1"
wire_api = "responses"
experimental_bearer_token = "$key"
"""),
    "opencode": ("~/.config/opencode/opencode.json", """\
{"model": "finwhale/$model", "small_model": "finwhale/$model",
 "provider": {"finwhale": {
   "npm": "@ai-sdk/openai-compatible", "options": {"baseURL": "$url/v1", "apiKey": "$key"},
   "models": {"$model": {"reasoning": true, "interleaved": {"field": "reasoning_content"},
                         "limit": {"context": $context, "output": $output}}}}}}"""),
    "cline": ("~/.cline/data/settings/providers.json", """\
{"version": 1, "lastUsedProvider": "openai-compatible",
 "providers": {"openai-compatible": {"updatedAt": "2026-01-01T00:00:00Z", "settings": {
   "provider": "openai-compatible", "baseUrl": "$url/v1", "apiKey": "$key", "model": "$model",
   "contextWindow": $context}}}}"""),
    "continue": ("~/.continue/config.yaml", """\
name: Finwhale
version: 1.0.0
schema: v1
models:
  - name: "$model"
    provider: openai
    model: "$model"
    apiBase: "$url/v1"
    apiKey: "$key"
    capabilities: [tool_use]
    defaultCompletionOptions: {contextLength: $context, maxTokens: $output}"""),
    "qwen-code": ("~/.qwen/settings.json", """\
{"env": {"FINWHALE_API_KEY": "$key"}, "security": {"auth": {"selectedType": "openai"}},
 "model": {"name": "$model"},
 "modelProviders": {"openai": [{
   "id": "$model", "baseUrl": "$url/v1", "envKey": "FINWHALE_API_KEY",
   "generationConfig": {"contextWindowSize": $context}}]}}"""),
    "zed": ("Zed's settings.json; Zed asks for the API key", """\
{"agent": {"default_model": {"provider": "finwhale", "model": "$model"}},
 "language_models": {"openai_compatible": {"finwhale": {
   "api_url": "$url/v1",
   "available_models": [{
     "name": "$model", "max_tokens": $context, "max_output_tokens": $output,
     "capabilities": {"tools": true, "images": false, "parallel_tool_calls": true,
                      "prompt_cache_key": false, "interleaved_reasoning": true}}]}}}}"""),
    "litellm": ("config.yaml of LiteLLM's proxy", """\
model_list:
  - model_name: "$model"
    litellm_params: {model: "anthropic/$model", api_base: "$url", api_key: "$key"}
    model_info: {max_input_tokens: $context, max_output_tokens: $output}"""),
}  # fmt: skip


def run(argv: Sequence[str]) -> int:
    """Returns 0."""
    args = _parser().parse_args(argv)
    if args.name is None:
        print("\n".join(f"{name:11}  for {place}" for name, (place, _) in PROGRAMS.items()))
        return 0
    if args.name not in PROGRAMS:
        meant = similar(args.name, PROGRAMS) or "; `finwhale connect` lists the programs"
        raise FinwhaleError(f"unknown program {args.name!r}{meant}")
    url = args.url.rstrip("/").removesuffix("/v1")
    key = args.api_key or os.environ.get(KEY, "").partition(",")[0]
    text = settings(args.name, url, key, *_served(url, key))
    print(f"# for {PROGRAMS[args.name][0]}:", file=sys.stderr)
    print(text)
    return 0


def settings(name: str, url: str, key: str, model: str, context: int) -> str:
    """The settings of one of PROGRAMS. An empty `key`: the server asks for none."""
    block = PROGRAMS[name][1]
    is_shell = block.startswith("export")  # elsewhere, texts stand in the quotes of JSON
    values: dict[str, object] = {"context": context, "output": min(context // 4, 32768)}
    for one, text in {"url": url, "model": model, "key": key or "none"}.items():
        values[one] = shlex.quote(text) if is_shell else json.dumps(text)[1:-1]
    filled = Template(block.strip()).substitute(values)
    return json.dumps(json.loads(filled), indent=2) if filled.startswith("{") else filled


def _served(url: str, key: str) -> tuple[str, int]:
    """The name and the context of a server's model. Raises FinwhaleError."""
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    try:
        with urlopen(Request(f"{url}/v1/models", headers=headers), timeout=10) as answer:
            card = json.load(answer)["data"][0]
        # The proxy of LiteLLM gives only max_input_tokens.
        return str(card["id"]), int(card.get("context_length") or card["max_input_tokens"])
    except HTTPError as error:
        wants = f"needs {'another' if key else 'an'} API key: set {KEY} or --api-key"
        what = wants if error.code == 401 else f"answers {error.code} {error.reason}"
    except (LookupError, TypeError, AttributeError, json.JSONDecodeError):
        what = "names no model with a context_length at /v1/models"
    except (OSError, ValueError, HTTPException) as error:
        reason = getattr(error, "reason", error)
        what = f"does not answer ({reason}): start `finwhale serve`, or set --url"
    raise FinwhaleError(f"{url} {what}")


def _parser() -> argparse.ArgumentParser:
    about = "Print the settings with which a program uses a running server; without NAME, list all."
    parser = Parser(prog="finwhale connect", description=about)
    parser.add_argument("name", nargs="?", metavar="NAME", help="the program")
    url = "http://127.0.0.1:8000"
    parser.add_argument("--url", default=url, help="of the server (default: %(default)s)")
    parser.add_argument("--api-key", metavar="KEY", help=f"of the server (default: {KEY})")
    return parser

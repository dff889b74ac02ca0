"""The banner that `finwhale serve` prints in a terminal once the model is ready."""

import json
import shlex

import finwhale
from finwhale.server.link.wire import Ready

KEY = "YOUR_KEY"
MESSAGES = [{"role": "user", "content": "Tell me about fin whales."}]


def banner(ready: Ready, model: str, url: str, needs_key: bool) -> str:
    """Several lines: model, addresses, context, ranks, and a request with curl and with Python.

    Args:
        url: of the server, as listening.url_of gives it.
        needs_key: whether requests must have an API key.
    """
    socket = url.removeprefix("unix:") if url.startswith("unix:") else None
    base = "http://localhost" if socket is not None else url
    body = json.dumps({"model": model, "messages": MESSAGES})
    curl = ["curl", f"{base}/v1/chat/completions", "-H", "Content-Type: application/json"]
    if needs_key:
        curl += ["-H", f"Authorization: Bearer {KEY}"]
    if socket is not None:
        curl[1:1] = ["--unix-socket", socket]
    drafts = []
    if ready.unused_draft_head is not None:
        head = {"mtp": "MTP layer", "dspark": "DSpark head"}[ready.unused_draft_head]
        drafts = [f"  drafts   none: --draft-tokens auto lets the checkpoint's {head} draft tokens"]
    lines = [
        "",
        f"  Finwhale {finwhale.__version__} serves {model}",
        "",
        f"  API      {base}/v1  (OpenAI, Anthropic)" + (f" on {socket}" if socket else ""),
        f"  page     {base}/",
        f"  context  {ready.max_model_len:,} tokens, up to {ready.max_num_seqs} sequences at once, "
        f"{ready.max_num_batched_tokens:,} tokens a step",
        f"  ranks    {ready.ranks}",
        *drafts,
        "",
        f"  {shlex.join([*curl, '-d', body])}",
    ]
    if socket is None:
        key = KEY if needs_key else "-"
        python = (
            f"from openai import OpenAI; print(OpenAI(base_url={json.dumps(base + '/v1')}, "
            f"api_key={json.dumps(key)}).chat.completions.create(model={json.dumps(model)}, "
            f"messages={json.dumps(MESSAGES)}).choices[0].message.content)"
        )
        lines.append(f"  {shlex.join(['python', '-c', python])}")
    return "\n".join([*lines, ""])

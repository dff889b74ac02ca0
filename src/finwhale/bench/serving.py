"""Load-test an OpenAI-compatible endpoint: throughput, and latencies in the record.

Requests go to /v1/completions, with prompts of token ids, and stream. Time to first token (TTFT) is
the time from sending a request to its first piece. Time between tokens (ITL) is the time between
successive pieces. Time per output token (TPOT) is the time from the first piece to the last,
divided by the number of tokens after the first. The server counts the tokens (usage).
"""

import argparse
import asyncio
import os
import statistics
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from finwhale.bench.arguments import new_parser
from finwhale.bench.load_client import Endpoint, Result, check_client, check_endpoint, run_load
from finwhale.bench.record import keep_record, percentile, stamp
from finwhale.bench.workload import DATASETS, ServerLoad
from finwhale.options import add_options, read_options


def main(argv: Sequence[str]) -> int:
    """Run `finwhale bench serving`. Returns 1 if a request failed, otherwise 0."""
    args = _parser().parse_args(argv)
    sizes = DATASETS[args.dataset]
    given = {name: getattr(args, name) for name in sizes if getattr(args, name) is not None}
    load = read_options(args, ServerLoad, **sizes | given)
    root = args.url.rstrip("/").removesuffix("/v1")
    endpoint = Endpoint(url=root, model=args.model, api_key=os.environ.get("OPENAI_API_KEY"))
    asyncio.run(check_endpoint(endpoint))
    check_client(load)
    found = summarise(*asyncio.run(run_load(endpoint, load)))
    server = {"url": root, "model": args.model, "api_key": endpoint.api_key is not None}
    described = server | asdict(load) | {"request_rate": str(load.request_rate)}
    record = stamp("serving", argv, ("aiohttp",)) | {"load": described} | found
    keep_record(args.record, record)
    return 0 if found["completed"] == load.num_requests else 1


def summarise(results: Sequence[Result], seconds: float) -> dict[str, Any]:
    """Compute the mean, P50 and P99 of each latency in milliseconds, and the throughput."""
    good = [r for r in results if r.error is None]
    errors = Counter(r.error for r in results if r.error is not None)
    output = sum(r.output_tokens for r in good)
    prompt = sum(r.prompt_tokens for r in good)
    return {
        "seconds": round(seconds, 3),
        "completed": len(good),
        "errors": dict(errors),
        "prompt_tokens": prompt,
        "cached_tokens": sum(r.cached_tokens for r in good),
        "output_tokens": output,
        "requests_per_second": round(len(good) / seconds, 3),
        "output_tokens_per_second": round(output / seconds, 2),
        "total_tokens_per_second": round((prompt + output) / seconds, 2),
        "ttft_ms": _spread([r.ttft for r in good]),
        "tpot_ms": _spread([r.tpot for r in good if r.tpot is not None]),
        "itl_ms": _spread([gap for r in good for gap in r.between]),
        "e2e_ms": _spread([r.end for r in good]),
    }


def _spread(seconds: Sequence[float]) -> dict[str, float] | None:
    if not seconds:
        return None
    times = [1e3 * value for value in seconds]
    p50, p99 = percentile(times, 0.5), percentile(times, 0.99)
    return {"mean": round(statistics.fmean(times), 4), "p50": p50, "p99": p99}


def _span(text: str) -> tuple[int, int]:
    low, _, high = text.partition(":")
    span = int(low), int(high or low)
    if not 1 <= span[0] <= span[1]:
        raise argparse.ArgumentTypeError(f"must be N or LOW:HIGH, from 1 on, got {text!r}")
    return span


def _default(name: str) -> str:
    """The default sizes of the data sets, in words."""
    sizes = [DATASETS[dataset][name] for dataset in ("uniform", "agents")]
    spans = [s if isinstance(s, int) else ":".join(map(str, dict.fromkeys(s))) for s in sizes]
    return f" (default: {spans[0]}; agents: {spans[1]})"


def _parser() -> argparse.ArgumentParser:
    parser = new_parser("serving", __doc__, "serving.jsonl")
    parser.epilog = "The API key is read from OPENAI_API_KEY."
    add = parser.add_argument
    add("--url", default="http://127.0.0.1:8000", help="URL of the endpoint")
    add("--model", required=True, help="the endpoint's name of the model")
    about = "length of a prompt, or a range of lengths; of agents: what each turn adds"
    add("--input-tokens", type=_span, metavar="N[:M]", help=about + _default("input_tokens"))
    about = "length of an output, or a range of lengths"
    add("--output-tokens", type=_span, metavar="N[:M]", help=about + _default("output_tokens"))
    about = "number of tokens with which all prompts begin; of agents: the system prompt"
    add("--shared-prefix", type=int, metavar="N", help=about + _default("shared_prefix"))
    add_options(parser, ServerLoad)
    return parser

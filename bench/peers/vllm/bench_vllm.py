"""Measures vLLM with DeepSeek-V4-Flash, cut to its first layers, with random weights.

    python bench_vllm.py --layers 43 --out flash43-tp2.json --extra '{"tensor_parallel_size": 2}'

The result is written again after each case. Times from the start of the process count from T0, an
environment variable with the time (`date +%s.%N`) before the command.
"""

import argparse
import json
import os
import random
import statistics
import time
from pathlib import Path

import dsv4_config
import vllm
from vllm import LLM, SamplingParams
from vllm.sampling_params import RequestOutputKind

STARTED = float(os.environ.get("T0", time.time()))
VOCABULARY = 129280
RECORDED_VARIABLES = ("VLLM", "DG_", "TILELANG", "FLASHINFER")


class Engine:
    """vLLM's engine, which is given token ids and stepped here."""

    def __init__(self, **arguments) -> None:
        self.engine = LLM(**arguments).llm_engine
        self.random = random.Random(7)
        self.submitted = 0

    def submit(self, requests):
        """Adds requests, given as (prompt tokens, output tokens); returns when that began."""
        made = [
            ([self.random.randrange(3, VOCABULARY - 1000) for _ in range(prompt)], output)
            for prompt, output in requests
        ]
        start = time.perf_counter()
        for ids, output in made:
            self.submitted += 1
            params = SamplingParams(
                temperature=0.0,
                max_tokens=output,
                ignore_eos=True,
                detokenize=False,
                output_kind=RequestOutputKind.DELTA,
            )
            self.engine.add_request(str(self.submitted), {"prompt_token_ids": ids}, params)
        return start

    def drain(self, limit=300):
        """Runs all requests. Returns (time, {request: new tokens}) by step, and all tokens."""
        steps, tokens = [], {}
        end = time.perf_counter() + limit
        while self.engine.has_unfinished_requests() and time.perf_counter() < end:
            outputs = self.engine.step()
            now, new = time.perf_counter(), {}
            for output in outputs:
                ids = output.outputs[0].token_ids
                if len(ids):
                    new[output.request_id] = len(ids)
                    tokens.setdefault(output.request_id, []).extend(ids)
            if new:
                steps.append((now, new))
        if self.engine.has_unfinished_requests():
            self.engine.abort_request([str(i) for i in range(1, self.submitted + 1)])
        return steps, tokens


def decode(engine, batch, context, output):
    """Milliseconds of the steps in which all requests decode and none prefills."""
    start = engine.submit([(context, output)] * batch)
    steps, tokens = engine.drain()
    counts, firsts, intervals, last = {}, {}, [], None
    for now, new in steps:
        all_decode = len(new) == batch and all(counts.get(i, 0) >= 2 for i in new)
        if last is not None and all_decode and max(new.values()) == 1:
            intervals.append(now - last)
        for i, count in new.items():
            counts[i] = counts.get(i, 0) + count
            firsts.setdefault(i, now - start)
        last = now if len(new) == batch else None
    ms = sorted(interval * 1e3 for interval in intervals)
    return {
        "batch": batch,
        "context": context,
        "out": output,
        "steps": len(ms),
        "tpot_ms_mean": round(statistics.mean(ms), 3),
        "tpot_ms_median": round(statistics.median(ms), 3),
        "tpot_ms_min_p90": [round(ms[0], 3), round(ms[int(len(ms) * 0.9)], 3)],
        "tok_per_s": round(batch / statistics.mean(intervals), 1),
        "ttft_ms_first": round(min(firsts.values()) * 1e3, 1),
        "ttft_ms_last": round(max(firsts.values()) * 1e3, 1),
        "events": len(steps),
        "distinct_tokens": len({token for ids in tokens.values() for token in ids}),
        "tokens": sum(map(len, tokens.values())),
    }


def prefill(engine, tokens, prompts, repeats):
    """Prompts of so many tokens at once, with one output token each."""
    seconds = []
    for _ in range(repeats):
        start = engine.submit([(tokens, 1)] * prompts)
        seconds.append(engine.drain()[0][-1][0] - start)
    return {
        "prompt": tokens,
        "prompts": prompts,
        "s_all": [round(s, 4) for s in seconds],
        "tok_per_s_best": round(tokens * prompts / min(seconds), 1),
        "tok_per_s_median": round(tokens * prompts / statistics.median(seconds), 1),
    }


def mixed(engine, requests, prompt, output):
    """Requests that all arrive at once; the engine runs as many as it has places."""
    start = engine.submit([(prompt, output)] * requests)
    steps, tokens = engine.drain()
    seconds = steps[-1][0] - start
    generated = sum(map(len, tokens.values()))
    return {
        "requests": requests,
        "in": prompt,
        "out": output,
        "s": round(seconds, 3),
        "gen_tok_per_s": round(generated / seconds, 1),
        "total_tok_per_s": round((generated + requests * prompt) / seconds, 1),
        "generated": generated,
        "steps": len(steps),
    }


CASES = [
    ("warmup", decode, 2, 300, 16),
    ("decode", decode, 1, 1024, 129),
    ("decode", decode, 8, 1024, 129),
    ("decode", decode, 32, 1024, 129),
    ("decode", decode, 128, 1024, 129),
    ("decode", decode, 1, 8192, 65),
    ("prefill", prefill, 2048, 1, 3),
    ("prefill", prefill, 8192, 1, 3),
    ("prefill", prefill, 32768, 1, 3),
    ("prefill", prefill, 2048, 16, 2),
    # The first of the two may compile kernels for sizes that come for the first time.
    ("mixed", mixed, 256, 1024, 256),
    ("mixed", mixed, 256, 1024, 256),
    ("decode", decode, 1, 65536, 65),
    ("decode_repeat", decode, 1, 1024, 129),
    ("decode_repeat", decode, 128, 1024, 65),
    ("prefill", prefill, 8192, 4, 2),
]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--utilization", type=float, default=0.9)
    parser.add_argument("--extra", type=json.loads, default={}, help="more arguments of LLM")
    parser.add_argument("--start-only", action="store_true")
    args = parser.parse_args()
    result = {"layers": args.layers, "vllm": vllm.__version__}
    result["env"] = {k: v for k, v in os.environ.items() if k.startswith(RECORDED_VARIABLES)}
    result["t_import_s"] = time.time() - STARTED
    result["engine_args"] = {
        "model": dsv4_config.write(args.layers, f"model{args.layers}"),
        "skip_tokenizer_init": True,
        "load_format": "dummy",
        "kv_cache_dtype": "fp8",
        "block_size": 256,
        "max_model_len": 73728,
        "max_num_seqs": 128,
        "max_num_batched_tokens": 8192,
        "enable_prefix_caching": False,
        "gpu_memory_utilization": args.utilization,
        "seed": 0,
        "disable_log_stats": True,
        **args.extra,
    }
    engine = Engine(**result["engine_args"])
    result["t_engine_ready_s"] = time.time() - STARTED
    engine.submit([(16, 1)])
    engine.drain()
    result["t_first_token_s"] = time.time() - STARTED
    for name, measure, *sizes in [] if args.start_only else CASES:
        result.setdefault(name, []).append(measure(engine, *sizes))
        args.out.write_text(json.dumps(result, indent=1))
    result["t_end_s"] = time.time() - STARTED
    args.out.write_text(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()

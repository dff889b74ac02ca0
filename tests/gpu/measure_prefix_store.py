"""Measures a prefix store with an engine of random weights; no test by itself.

    python -m tests.gpu.measure_prefix_store --dummy --prefix-store DIR [--tensor-parallel-size 2]

For prompts of some lengths: the time to the first token of a hit in the device's cache, of a load
from the page cache (host memory), and of a load from the disk after the page cache was dropped,
which needs root. A direct read (O_DIRECT) of one large file in the same directory is the disk's
rate. Then sessions of agents (those of `bench serving`) whose blocks do not fit the device's cache,
and the same prompts again with an empty cache, as after a restart; the intervals of streams that
decode beside requests whose prefixes are in the device's cache, and beside the same requests whose
prefixes load; and decode and prefill while the store finds nothing and saves (on), and while it is
switched off.
"""

import argparse
import json
import mmap
import os
import random
import subprocess
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from tests.support.stored_pages import digests, run, saved

from finwhale import SamplingParams
from finwhale.bench.arguments import add_model_arguments, new_parser
from finwhale.bench.engine import begin, begin_decodes, measured, open_engine, prefill
from finwhale.bench.record import keep_record, percentile, stamp, summary
from finwhale.bench.workload import DATASETS, ServerLoad, make_sessions
from finwhale.engine.loop.engine import Engine
from finwhale.engine.plan.prefix_index import State
from finwhale.engine.plan.stored_prefixes import MOVING_STATES
from finwhale.engine.start.kv_cache import plan_cache
from finwhale.engine.store.opening import parse

COMMAND = "python -m tests.gpu.measure_prefix_store"
FIRST = SamplingParams(max_tokens=1, temperature=0, ignore_eos=True)
PIECE = 2**24
PROMPTS = 8
ARRIVALS = ("hits", "loads", "hits again", "loads again")
DIRECT_BYTES = 2**30


def prompt(engine: Engine, length: int) -> list[int]:
    return random.choices(range(3, engine.model_config.vocab_size), k=length)


def drop_page_cache() -> None:
    os.sync()
    Path("/proc/sys/vm/drop_caches").write_text("3\n")


def direct_rate(folder: Path) -> float:
    """Bytes per second of a direct sequential read of one large file."""
    file = folder / "direct"
    subprocess.run(
        ["dd", "if=/dev/urandom", f"of={file}", "bs=16M", f"count={DIRECT_BYTES // PIECE}"],
        check=True,
        stderr=subprocess.DEVNULL,
    )
    drop_page_cache()
    buffer = mmap.mmap(-1, PIECE)
    descriptor = os.open(file, os.O_RDONLY | os.O_DIRECT)
    began = time.perf_counter()
    while os.readv(descriptor, [buffer]):
        pass
    seconds = time.perf_counter() - began
    os.close(descriptor)
    file.unlink()
    return DIRECT_BYTES / seconds


def first_tokens(engine: Engine, length: int, repeats: int) -> dict[str, Any]:
    """Milliseconds to the first token of one prompt, by where its prefix is."""
    stored = engine.scheduler.admission.stored
    assert stored is not None
    counts = stored.counts
    ids = prompt(engine, length)
    result: dict[str, Any] = {"tokens": length}
    written, began = counts.written_bytes, time.perf_counter()
    run(engine, ids, FIRST)
    result["prefill_ms"] = 1e3 * (time.perf_counter() - began)
    saved(engine)
    result["until_saved_ms"] = 1e3 * (time.perf_counter() - began)
    result["skipped_saves"] = counts.skipped
    if counts.skipped:  # what was skipped is saved when the prompt is used again
        run(engine, ids, FIRST)
        saved(engine)
    result["written_bytes"] = counts.written_bytes - written
    known = ids[: (length - 1) // 256 * 256]  # a hit computes the rest again
    pages = digests(engine, known)
    for where in ("device", "memory", "disk"):
        times, read = [], counts.read_bytes
        for _ in range(repeats):
            if where != "device":
                engine.reset_prefix_cache()
            if where == "disk":
                drop_page_cache()
            began = time.perf_counter()
            found = run(engine, ids, FIRST)
            times.append(1e3 * (time.perf_counter() - began))
            assert found.num_cached_tokens == len(known)
            saved(engine)
            assert digests(engine, known) == pages, where
        result[f"{where}_ms"] = summary(times)
        result[f"{where}_bytes"] = (counts.read_bytes - read) // repeats
    return result


def intervals(engine: Engine, streams: int, prefixes: int, length: int) -> dict[str, Any]:
    """Milliseconds between the tokens of streams: alone, and while requests resume from prefixes in
    the device's cache (hits) or in the store (loads). One arrives every few steps, or all at once.
    """
    prompts = [prompt(engine, length + 1) for _ in range(prefixes)]
    for ids in prompts:
        prefill(engine, ids)
        saved(engine)
    running = begin_decodes(engine, [prompt(engine, 1024) for _ in range(streams)])
    result: dict[str, Any] = {"streams": streams, "prefixes": prefixes, "prefix_tokens": length}
    for name, every in (
        ("alone", 0),
        ("alone, later", 0),
        *((f"{what}, one every {every} steps", every) for every in (4, 0) for what in ARRIVALS),
    ):
        if name.startswith("loads"):
            engine.reset_prefix_cache()
        for _ in range(20):
            engine.step()
        left = [] if name.startswith("alone") else list(prompts)
        waiting: list[Any] = []
        times: list[float] = []
        began = last = time.perf_counter()
        while (
            left
            or not all(one.finished for one in waiting)
            or len(times) < (200 if name.startswith("alone") else 20)
        ):
            if left and (not every or len(times) % every == 0):
                waiting += [begin(engine, ids, 1) for ids in (left[:1] if every else left)]
                left = left[1:] if every else []
            if running[0].request_id in {one.request_id for one in engine.step()}:
                now = time.perf_counter()
                times.append(1e3 * (now - last))
                last = now
        result[name] = summary(times) | {
            "p99": percentile(times, 0.99),
            "seconds": round(time.perf_counter() - began, 4),
            "cached": sum(one.num_cached_tokens == length for one in waiting),
        }
    for one in running:
        engine.abort(one.request_id)
    saved(engine)
    return result


def overhead(engine: Engine, streams: int, length: int, rounds: int) -> dict[str, Any]:
    """Milliseconds of decode steps, and for each of several prompts that wait together, with the
    store on and off in turn.
    """
    stored = engine.scheduler.admission.stored
    assert stored is not None
    times: dict[str, list[float]] = {
        f"{w} {s}": [] for w in ("decode", "prefill") for s in ("on", "off")
    }
    for number in range(2 * rounds):
        state = ("on", "off", "off", "on")[number % 4]
        stored.off = "" if state == "on" else "measuring"
        running = begin_decodes(engine, [prompt(engine, 1024) for _ in range(streams)])
        for _ in range(10):
            engine.step()
        last = time.perf_counter()
        for _ in range(100):
            engine.step()
            now = time.perf_counter()
            times[f"decode {state}"].append(1e3 * (now - last))
            last = now
        for one in running:
            engine.abort(one.request_id)
        while engine.has_work:
            engine.step()
        began = time.perf_counter()
        several = [begin(engine, prompt(engine, length), 1) for _ in range(PROMPTS)]
        while not all(one.finished for one in several):
            engine.step()
        times[f"prefill {state}"].append(1e3 * (time.perf_counter() - began) / PROMPTS)
        saved(engine)
    stored.off = ""
    return {name: summary(values) for name, values in times.items()}


def agents(engine: Engine, sessions: int, turns: int, prefix: int) -> dict[str, Any]:
    """How much of what agents could reuse they reuse, with 5% of their blocks in the cache."""
    load = ServerLoad(
        dataset="agents",
        num_requests=sessions * turns,
        turns=turns,
        shared_prefix=prefix,
        input_tokens=DATASETS["agents"]["input_tokens"],
        output_tokens=(4, 12),
    )
    bodies = [[json.loads(body) for body in each] for each in make_sessions(load, "")]
    blocks = {
        hash(tuple(body["prompt"][:end]))
        for each in bodies
        for body in each
        for end in range(256, len(body["prompt"]) + 1, 256)
    }
    engine.reset_prefix_cache()
    longest = max(len(body["prompt"]) for each in bodies for body in each)
    held = cut_cache(engine, max(len(blocks) // 20, longest // 256 + 2))
    result: dict[str, Any] = {"sessions": sessions, "turns": turns, "blocks": len(blocks)}
    result["pages"] = {name: pool.num_free for name, pool in engine.scheduler.pages.pools.items()}
    for name in ("first", "after a restart"):
        engine.reset_prefix_cache()
        reusable = reused = cached = 0
        preempted, began = engine.scheduler.counts.preemptions, time.perf_counter()
        running: list[tuple[int, int, Any]] = []
        waiting = [(session, 0) for session in range(sessions)]
        while running or waiting:
            for session, turn in waiting:
                body = bodies[session][turn]
                ids, count = body["prompt"], body["max_tokens"]
                params = SamplingParams(max_tokens=count, temperature=0, ignore_eos=True)
                running.append(
                    (session, turn, engine.add_request(f"{name} {session}.{turn}", ids, params))
                )
            waiting = []
            engine.step()
            for session, turn, one in [each for each in running if each[2].finished]:
                running.remove((session, turn, one))
                last = (len(one.prompt_token_ids) - 1) // 256 * 256
                known = last
                if name == "first":
                    before = len(bodies[session][turn - 1]["prompt"]) if turn else prefix
                    known = min(last, before // 256 * 256)
                reusable, reused = reusable + known, reused + min(known, one.num_cached_tokens)
                cached += one.num_cached_tokens
                if turn + 1 < turns:
                    waiting.append((session, turn + 1))
        saved(engine)
        result[name] = {
            "reusable": reusable - (prefix if name == "first" else 0),  # somebody computes it
            "reused": reused,
            "cached": cached,
            "seconds": round(time.perf_counter() - began, 1),
            "preemptions": engine.scheduler.counts.preemptions - preempted,
        }
        print(name, result[name], flush=True)
    for pages in held:
        engine.scheduler.pages.drop(pages)
    return result


def cut_cache(engine: Engine, blocks: int) -> list[State]:
    """Allocate pages until as many are free as a cache of `blocks` blocks has."""
    pages, sizes = engine.scheduler.pages, engine.sizes
    held: list[State] = []
    plan = plan_cache(
        pages.groups,
        itemsize=2,
        packed=True,
        budget_bytes=10**13,  # the number of pages alone is of use
        max_num_seqs=sizes.num_seqs,
        max_step_tokens=sizes.num_tokens,
        wanted_tokens=blocks * 256,
        prefix_caching=True,
        moving_states=MOVING_STATES,
    )
    for group in pages.groups:
        more = pages.pools[group.name].num_free - plan.num_pages[group.name]
        held.append(pages.allocate_several({group: more}))
    return held


def main(argv: Sequence[str] | None = None) -> None:
    parser = new_parser("prefix-store", __doc__, "prefix-store.jsonl", COMMAND)
    add_model_arguments(parser, without=["max_model_len"], max_num_batched_tokens=8192)
    add = parser.add_argument
    add("--lengths", type=int, nargs="+", default=[65536, 100000])
    add("--streams", type=int, default=32)
    add("--prefixes", type=int, default=64)
    add("--prefix-tokens", type=int, default=8192)
    add("--repeats", type=int, default=5)
    add("--sessions", type=int, default=64)
    add("--turns", type=int, default=8)
    add("--shared-prefix", type=int, default=4096)
    add("--rounds", type=int, default=4, help="of the overhead, each with the store on and off")
    add("--only", nargs="*", help="run the stages whose names begin so")
    args: argparse.Namespace = parser.parse_args(argv)
    path, _ = parse(args.prefix_store)
    engine, start_s = open_engine(args, max(args.lengths) + 4096)
    random.seed(time.time_ns())
    record = stamp("prefix-store", [], ("torch",), COMMAND) | {"start_s": start_s}
    record |= measured(args, engine)
    stages: dict[str, Callable[[], Any]] = {
        f"{length} tokens": partial(first_tokens, engine, length, args.repeats)
        for length in args.lengths
    }
    stages |= {
        "direct read, bytes/s": partial(direct_rate, path),
        "agents": partial(agents, engine, args.sessions, args.turns, args.shared_prefix),
        "intervals": partial(intervals, engine, args.streams, args.prefixes, args.prefix_tokens),
        "overhead": partial(overhead, engine, args.streams, args.prefix_tokens, args.rounds),
    }
    for name, stage in stages.items():
        if args.only and not name.startswith(tuple(args.only)):
            continue
        began = time.perf_counter()
        record[name] = stage()
        print(f"{time.perf_counter() - began:.1f} s, {name}: {record[name]}", flush=True)
    record["store"] = str(engine.metrics().store)
    keep_record(args.record, record)
    engine.close()


if __name__ == "__main__":
    main()

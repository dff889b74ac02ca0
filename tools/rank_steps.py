"""Times the captured steps of one rank's share on one GPU, and shows when each kernel ends.

    python tools/rank_steps.py --ranks 2 --layers 12 --timeline

One GPU runs the sizes of one of several ranks, without communication, and the whole LM head. The
weights of Flash-0731 are random. One sequence verifies its drafts in a step ("verify"), and gets
new ones ("draft"). Notes in docs/notes call these figures "a rank's sizes".
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from finwhale import SamplingParams
from finwhale.config import EngineConfig
from finwhale.distributed.rank import Rank
from finwhale.engine.loop.opening import start_engine
from finwhale.engine.ranks.ranks import first_rank
from finwhale.models.deepseek_v4.presets import published
from finwhale.models.sharding import rank_config
from finwhale.models.weight_sources import Weights

# Replays of a graph before a measurement, and of one measurement.
WARM_UP, REPLAYS = 5, 25
# Replays of the timeline; the first one is left out.
PROFILED = 6
# The last kernel of a layer of few tokens, and kernels that only some kinds of layers have.
LAST_OF_LAYER = "_few_down_kernel"
KINDS = {"_select_kernel": "C4", "_compress_kernel": "C128"}


@dataclass(frozen=True)
class Kernel:
    """A kernel of a timeline: its name and grid, and when it ended, in microseconds."""

    name: str
    end: float


def captured_steps(ranks: int, layers: int, drafts: int, context: int) -> dict[str, Any]:
    """The CUDA graphs of a step, ready to be replayed at a context of about `context` tokens."""
    config = rank_config(published("flash-0731").with_layers(layers), Rank(0, ranks))
    options = EngineConfig(
        device="cuda",
        draft_tokens=drafts,
        max_num_seqs=1,
        max_model_len=4 * context,
        cache_memory_bytes=2**28,
        graph_sizes=(1,),
    )
    engine = start_engine(options, config, Weights(config), None)
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(0, config.vocab_size, (context,), generator=generator).tolist()
    params = SamplingParams(temperature=0, max_tokens=context, ignore_eos=True)
    result = engine.add_request("0", ids, params)
    while len(result.outputs[0].token_ids) < 8:
        engine.step()
    torch.cuda.synchronize()
    print(f"chosen tokens: {result.outputs[0].token_ids}")
    steps = first_rank(engine.executor).runner.verification_steps
    assert steps is not None
    # The engine has no other way to replay a step without its sampling.
    sizes = 1, 1 + drafts
    return {"verify": steps._verifying[sizes], "draft": steps._drafting[*sizes, drafts]}


def microseconds(graph: Any) -> float:
    """The mean time of a replay."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    for _ in range(WARM_UP):
        graph.replay()
    begin.record()
    for _ in range(REPLAYS):
        graph.replay()
    end.record()
    end.synchronize()
    return float(1e3 * begin.elapsed_time(end) / REPLAYS)


def timelines(graph: Any) -> Iterator[list[Kernel]]:
    """Replay the graph, and yield one list of kernels per replay, ordered by start time."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for _ in range(PROFILED):
            graph.replay()
        torch.cuda.synchronize()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profile.export_chrome_trace(str(path))
        events = json.loads(path.read_text())["traceEvents"]
    found = sorted(
        (event for event in events if event.get("cat") == "kernel"), key=lambda event: event["ts"]
    )
    each = len(found) // PROFILED
    for start in range(each, PROFILED * each, each):
        yield [
            Kernel(f"{e['name'][:40]} {e['args']['grid']}", e["ts"] + e["dur"])
            for e in found[start : start + each]
        ]


def ends_by_layer(graph: Any) -> Mapping[str, Mapping[str, float]]:
    """Return when each kernel ends, in microseconds after its layer begins.

    The times are medians over all layers of a kind (the outer key) and over the replays.
    """
    times: dict[str, dict[str, list[float]]] = {}
    for kernels in timelines(graph):
        last = [i for i, one in enumerate(kernels) if one.name.startswith(LAST_OF_LAYER)]
        for begin, end in itertools.pairwise(last):
            layer, seen = kernels[begin + 1 : end + 1], dict[str, int]()
            marks = [KINDS[name] for name in KINDS if any(k.name.startswith(name) for k in layer)]
            kind = times.setdefault(marks[0] if marks else "window", {})
            for kernel in layer:
                seen[kernel.name] = seen.get(kernel.name, 0) + 1
                name = f"{kernel.name} ({seen[kernel.name]})"
                kind.setdefault(name, []).append(kernel.end - kernels[begin].end)
    return {
        kind: {name: statistics.median(values) for name, values in ends.items()}
        for kind, ends in times.items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--ranks", type=int, default=2, help="number of ranks of the whole model")
    parser.add_argument("--layers", type=int, default=12, help="use only the first N layers")
    parser.add_argument("--drafts", type=int, default=5, help="drafts of a step")
    parser.add_argument("--context", type=int, default=1050, help="tokens of the prompt")
    parser.add_argument("--rounds", type=int, default=9, help="measurements of each graph")
    parser.add_argument("--timeline", action="store_true", help="show when each kernel ends")
    args = parser.parse_args()
    graphs = captured_steps(args.ranks, args.layers, args.drafts, args.context)
    for name, graph in graphs.items():
        times = [microseconds(graph) for _ in range(args.rounds)]
        print(f"{name}: {statistics.median(times):.1f} us, at least {min(times):.1f}")
    if args.timeline:
        for kind, ends in ends_by_layer(graphs["verify"]).items():
            print(f"{kind} layer, us since the end of the layer before it")
            for name, end in sorted(ends.items(), key=lambda item: item[1]):
                print(f"{end:8.1f}  {name}")


if __name__ == "__main__":
    with torch.inference_mode():
        main()

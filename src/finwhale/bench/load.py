"""Measure loading a checkpoint from the page cache, and a plain read of the same files.

The plain read copies the bytes of the same files to the same device, with the same number of
threads and the same pinned memory. The benchmark times both in turns, after one read that fills the
page cache. Without --model it first writes a checkpoint of random weights in the official layout.
It times the rearrangement of the experts' weights for the kernels ("fold") separately.
"""

import argparse
import gc
import os
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from queue import Queue
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from finwhale.bench.arguments import add_sizes, new_parser
from finwhale.bench.record import append_record, stamp, summary
from finwhale.checkpoint.dummy import DummySource
from finwhale.checkpoint.loading import WeightSource
from finwhale.checkpoint.reader import Checkpoint
from finwhale.checkpoint.staging import PIECE_BYTES, PINNED_PIECES, num_threads
from finwhale.checkpoint.writer import write_stored
from finwhale.config import EngineConfig
from finwhale.engine.rank.devices import choose_device
from finwhale.models.deepseek_v4.build import load_weights
from finwhale.models.deepseek_v4.config import ModelConfig
from finwhale.models.deepseek_v4.model import ModelWeights
from finwhale.models.deepseek_v4.weights import ignored_prefixes, weight_specs
from finwhale.ops import Ops, load_ops
from finwhale.options import add_options


def plain_read(checkpoint: Checkpoint, device: torch.device) -> None:
    """Copy all bytes of the files to the device, in pieces that overwrite each other there."""
    cuda = device.type == "cuda"
    free: Queue[tuple[torch.Tensor, Any]] = Queue()
    for _ in range(PINNED_PIECES):
        free.put((torch.empty(PIECE_BYTES, dtype=torch.uint8, pin_memory=cuda), None))
    target = torch.empty(PIECE_BYTES, dtype=torch.uint8, device=device)
    stream = torch.cuda.Stream(device) if cuda else None
    with ExitStack() as stack:
        jobs = []
        for file, _ in checkpoint.shards():
            number = os.open(checkpoint.path / file, os.O_RDONLY)
            stack.callback(os.close, number)
            size = os.fstat(number).st_size
            jobs += [(number, start) for start in range(0, size, PIECE_BYTES)]

        def move(job: tuple[int, int]) -> None:
            buffer, event = free.get()
            if event is not None:
                event.synchronize()
            number, start = job
            count = os.preadv(number, [buffer.numpy().data], start)
            if stream is None:
                target[:count].copy_(buffer[:count])
                free.put((buffer, None))
                return
            with torch.cuda.stream(stream):
                target[:count].copy_(buffer[:count], non_blocking=True)
            free.put((buffer, stream.record_event()))

        with ThreadPoolExecutor(num_threads()) as pool:
            for _ in pool.map(move, jobs):
                pass
    if cuda:
        torch.cuda.synchronize(device)


class Loader:
    """Loads one checkpoint in several ways."""

    def __init__(self, path: Path, config: ModelConfig, device: torch.device, ops: Ops) -> None:
        self.checkpoint = Checkpoint.open(path)
        self.config, self.device, self.ops = config, device, ops
        self.weights: ModelWeights | None = None

    def plain(self) -> None:
        plain_read(self.checkpoint, self.device)

    def load(self, reading_device: torch.device | None = None) -> None:
        """Load the weights; `reading_device`: where the source puts them; None: on the device."""
        source = WeightSource(
            self.checkpoint,
            weight_specs(self.config),
            ignored=ignored_prefixes(self.config),
            device=reading_device or self.device,
        )
        self.weights = load_weights(
            self.config,
            source,
            dtype=torch.bfloat16 if self.ops.capabilities.quantised_weights else torch.float32,
            device=self.device,
            round_activations=True,
            ops=replace(self.ops, finish_experts=lambda w: w),
        )
        self._settle()

    def fold(self) -> None:
        assert self.weights is not None
        for layer in self.weights.layers:
            self.ops.finish_experts(layer.ffn.experts)
        self._settle()

    def free(self) -> None:
        self.weights = None
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def _settle(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


def timed(run: Callable[[], None]) -> float:
    begin = time.perf_counter()
    run()
    return time.perf_counter() - begin


def run(args: argparse.Namespace, directory: Path, console: Console) -> dict[str, Any]:
    platform, device = choose_device(args.device)
    config = ModelConfig.preset(args.config).without_draft_head().with_layers(args.layers)
    if args.model is None and not any(directory.glob("*.safetensors")):
        written = timed(
            lambda: write_stored(
                directory,
                {"written_by": "finwhale bench load", "num_hidden_layers": args.layers},
                DummySource(weight_specs(config), device),
            )
        )
        console.print(f"wrote {directory} in {written:.1f} s")
    if args.model is not None:
        config = ModelConfig.from_dict(Checkpoint.open(directory).config)
    loader = Loader(directory, config, device, load_ops(platform))
    size = sum((directory / file).stat().st_size for file, _ in loader.checkpoint.shards())
    times: dict[str, list[float]] = {"plain read": [], "load": [], "mapped load": [], "fold": []}
    loader.plain()  # This fills the page cache.
    for _ in range(args.repeats):
        times["plain read"].append(timed(loader.plain))
        times["load"].append(timed(loader.load))
        times["fold"].append(timed(loader.fold))
        loader.free()
        if args.mapped:
            times["mapped load"].append(timed(lambda: loader.load(torch.device("cpu"))))
            loader.free()
    table = Table(title=f"{size / 1e9:.1f} GB to {device}; medians", title_justify="left")
    for column in ("", "s", "GB/s", "of the plain read"):
        table.add_column(column, justify="right" if column else "left")
    results = {name: summary(found) for name, found in times.items() if found}
    plain = results["plain read"]["median"]
    for name, found in results.items():
        seconds = max(found["median"], 1e-6)
        rate, share = f"{size / seconds / 1e9:.1f}", f"{plain / seconds:.0%}"
        table.add_row(name, f"{seconds:.3f}", *(("", "") if name == "fold" else (rate, share)))
    console.print(table)
    return {
        "benchmark": "load",
        "config": args.model or args.config,
        "layers": config.num_hidden_layers,
        "bytes": size,
        "threads": num_threads(),
        "seconds": results,
        "share": round(plain / results["load"]["median"], 3),
    }


def main(argv: Sequence[str]) -> int:
    """Run `finwhale bench load`."""
    parser = new_parser("load", __doc__, "load-h200.jsonl")
    add_sizes(parser, 6)
    parser.add_argument("--model", metavar="PATH", help="directory of a checkpoint to use instead")
    parser.add_argument(
        "--directory", metavar="DIR", help="keep the synthetic checkpoint here (default: delete it)"
    )
    parser.add_argument("--repeats", type=int, default=3, help="number of repetitions")
    parser.add_argument("--mapped", action="store_true", help="measure memory-mapped loading too")
    add_options(parser, EngineConfig, ("device",))
    args = parser.parse_args(argv)
    console = Console()
    if not console.is_terminal:
        console.width = 120
    record = stamp("load", argv, ("torch",))
    with tempfile.TemporaryDirectory(prefix="finwhale-load-") as temporary:
        record |= run(args, Path(args.model or args.directory or temporary), console)
    if args.record:
        append_record(args.record, record)
        console.print(f"recorded in {args.record}")
    return 0

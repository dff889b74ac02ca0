"""Measure loading a checkpoint from the page cache, and a plain read of the same files.

The plain read copies the bytes of the same files to the same device, with the same number of
threads and the same pinned memory. With several ranks, each one in a process, all load at once, and
in the plain read each copies a part of the files; the slowest rank counts. The benchmark times both
in turns, after one read that fills the page cache. Without --model it first writes a checkpoint of
random weights in the official layout, or with --zeros one of sparse files, which need no disk. It
times the rearrangement of the experts' weights for the kernels ("fold") separately.
"""

import argparse
import gc
import math
import os
import pickle
import tempfile
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from dataclasses import replace
from functools import partial
from pathlib import Path
from queue import Queue
from typing import Any

import torch

from finwhale.bench.arguments import add_sizes, new_parser
from finwhale.bench.record import keep_record, stamp, summary
from finwhale.bench.timing import seconds_of
from finwhale.checkpoint.reader import Checkpoint
from finwhale.checkpoint.writer import write_stored, write_zeros
from finwhale.config import EngineConfig
from finwhale.distributed.peers import Peers, join_store, serve_store
from finwhale.distributed.rank import Rank, StoreAddress
from finwhale.distributed.worker import OwnerLink
from finwhale.distributed.worker_messages import Answer, Opened
from finwhale.distributed.workers import SpawnedProcesses, Workers
from finwhale.engine.ranks.devices import choose_device, choose_devices
from finwhale.engine.ranks.memory_checks import check_disk, check_host_memory
from finwhale.models.deepseek_v4.architecture import weight_bytes
from finwhale.models.deepseek_v4.config import DeepseekV4Config
from finwhale.models.deepseek_v4.config_json import config_of
from finwhale.models.deepseek_v4.model import ModelWeights
from finwhale.models.deepseek_v4.presets import published
from finwhale.models.deepseek_v4.weights import assembler, ignored_prefixes, weight_specs
from finwhale.ops import load_ops
from finwhale.options import add_options
from finwhale.platform import Platform
from finwhale.weights.allocation import WeightForm
from finwhale.weights.dummy import DummySource
from finwhale.weights.joint_ranks import JointRanks
from finwhale.weights.source import WeightSource
from finwhale.weights.staging import PIECE_BYTES, PINNED_PIECES, num_threads

# Bytes of one value in a checkpoint. The scales of FP8 and FP4 add less than 7%.
STORED_BYTES = {"bf16": 2, "f16": 2, "f32": 4, "i64": 8, "fp8_block": 1.01, "fp4": 0.54}


def plain_read(checkpoint: Checkpoint, rank: Rank, device: torch.device) -> None:
    """Copy a rank's part of the files to its device, in pieces that overwrite each other there."""
    cuda = device.type == "cuda"
    free: Queue[tuple[torch.Tensor, Any]] = Queue()
    for _ in range(PINNED_PIECES * num_threads()):
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
            for _ in pool.map(move, jobs[rank.index :: rank.size]):
                pass
    if cuda:
        torch.cuda.synchronize(device)


class Loader:
    """Loads one rank's weights of a checkpoint."""

    def __init__(
        self, path: Path, config: DeepseekV4Config, devices: Sequence[str], peers: Peers
    ) -> None:
        rank = peers.rank
        self.checkpoint, self.config, self.rank = Checkpoint.open(path), config, rank
        platform, self.device = choose_device(devices[rank.index])
        if self.device.index is not None:
            torch.cuda.set_device(self.device)
        self.ops = load_ops(platform)
        self.ranks = JointRanks(peers, self.device)
        self.weights: ModelWeights | None = None

    def plain(self) -> None:
        plain_read(self.checkpoint, self.rank, self.device)

    def load(self) -> None:
        self.weights = self.loaded(self.ranks)

    def loaded(self, ranks: JointRanks | None = None) -> ModelWeights:
        """Load the weights; `ranks` read together, or if it is None, this rank reads alone."""
        specs, ignored = weight_specs(self.config, self.rank), ignored_prefixes(self.config)
        source = WeightSource(self.checkpoint, specs, ignored=ignored, device=self.device)
        form = WeightForm(
            ops=replace(self.ops, finish_experts=lambda w: w),
            dtype=torch.bfloat16 if self.ops.capabilities.quantised_weights else torch.float32,
            round_activations=True,
            rank=self.rank,
            storages=source.storages,
        )
        weights = assembler(self.config, form, self.device).fill(source, ranks)
        self._settle()
        return weights

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


class Loaders:
    """The loaders of all ranks: rank 0's in this process, the others in worker processes."""

    def __init__(self, new_loader: Callable[[Peers], Loader], devices: Sequence[str]) -> None:
        self._workers: Workers | None = None
        peers = Peers()
        if len(devices) > 1:
            store, address = serve_store()
            main = partial(serve, new_loader, address)
            self._workers = Workers(main, SpawnedProcesses(devices[1:]))
            peers = Peers(Rank(0, len(devices)), store, self._workers.check)
        self.own = new_loader(peers)
        if self._workers is not None:
            self._workers.wait_opened()

    def run(self, what: str) -> None:
        """Call a method of every loader at once, and wait for all."""
        if self._workers is not None:
            self._workers.send(what.encode())
        getattr(self.own, what)()
        if self._workers is not None:
            self._workers.wait_answers()

    def close(self) -> None:
        if self._workers is not None:
            self._workers.close()


def serve(new_loader: Callable[[Peers], Loader], address: StoreAddress, owner: OwnerLink) -> None:
    """Run one rank's loader in its process."""
    loader = new_loader(Peers(owner.rank, join_store(address)))
    owner.report(Opened())
    while True:
        getattr(loader, owner.read().decode())()
        owner.report(Answer(pickle.dumps(None)))


def run(args: argparse.Namespace, directory: Path) -> dict[str, Any]:
    options = EngineConfig(device=args.device, tensor_parallel_size=args.tensor_parallel_size)
    devices = choose_devices(options, lambda count: 1)
    if args.model is None:
        config = published(args.config).without_draft_head().with_layers(args.layers)
    else:
        config = config_of(Checkpoint.open(directory).config)
    _check_room(args, config, directory, devices)
    if args.model is None:
        specs, about = weight_specs(config), {"written_by": "finwhale bench load"}
        about |= {"num_hidden_layers": args.layers}
        if args.zeros:
            write_zeros(directory, about, specs.values())
        else:
            source = DummySource(specs, choose_device(devices[0])[1])
            written = seconds_of(lambda: write_stored(directory, about, source))
            print(f"wrote {directory} in {written:.1f} s")
    with closing(Loaders(partial(Loader, directory, config, devices), devices)) as loaders:
        return measure(args, config, loaders)


def _check_room(
    args: argparse.Namespace, config: DeepseekV4Config, directory: Path, devices: Sequence[str]
) -> None:
    """Checks, before anything is written, that memory and disk suffice. Raises ResourceError."""
    if devices[0] == "cpu":
        ops = load_ops(Platform.cpu())
        check_host_memory(weight_bytes(config, torch.float32, ops))
    specs = weight_specs(config).values()
    stored = sum(math.prod(spec.shape) * STORED_BYTES[spec.storage] for spec in specs)
    if args.zeros:
        remedy = "end other programs, or use fewer --layers"
        check_host_memory(int(stored), "the page cache, which holds all files,", remedy)
    elif args.model is None:
        remedy = "set TMPDIR to a folder on a larger disk, or use fewer --layers"
        check_disk(directory, stored, "random weights", remedy)


def measure(args: argparse.Namespace, config: DeepseekV4Config, loaders: Loaders) -> dict[str, Any]:
    checkpoint = loaders.own.checkpoint
    size = sum((checkpoint.path / file).stat().st_size for file, _ in checkpoint.shards())
    loaders.run("plain")  # This fills the page cache.
    ways = {"plain read": "plain", "load": "load", "fold": "fold"}
    times: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(args.repeats):
        for name, what in ways.items():
            times[name].append(seconds_of(partial(loaders.run, what)))
        loaders.run("free")
    ranks = loaders.own.rank.size
    results = {name: summary(found) for name, found in times.items()}
    plain = results["plain read"]["median"]
    return {
        "config": args.model or args.config,
        "layers": config.num_hidden_layers,
        "tensor_parallel_size": ranks,
        "bytes": size,
        "threads": num_threads(),
        "seconds": results,
        "share": round(plain / results["load"]["median"], 3),
    }


def main(argv: Sequence[str]) -> int:
    """Run `finwhale bench load`."""
    parser = _parser()
    args = parser.parse_args(argv)
    if args.zeros and args.model is not None:
        parser.error("--zeros writes a checkpoint, and --model uses one: give only one of them")
    record = stamp("load", argv, ("torch",))
    with tempfile.TemporaryDirectory(prefix="finwhale-load-") as temporary:
        record |= run(args, Path(args.model or temporary))
        # Deleting the files comes later: with all layers, it takes many seconds.
        keep_record(args.record, record)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = new_parser("load", __doc__, "load-h200.jsonl")
    add_sizes(parser, 6)
    add = parser.add_argument
    add("--model", metavar="PATH", help="directory of a checkpoint to use instead")
    add("--zeros", action="store_true", help="write only zeros, which take no room on the disk")
    add("--repeats", type=int, default=3, help="number of repetitions")
    add_options(parser, EngineConfig, ("device", "tensor_parallel_size"))
    return parser

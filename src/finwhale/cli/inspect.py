"""`finwhale inspect`: describe a checkpoint and find what is wrong with it."""

import argparse
import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import ModuleType

import torch
from rich.console import Console

from finwhale.checkpoint.location import checkpoint_directory
from finwhale.checkpoint.reader import Checkpoint
from finwhale.checkpoint.spec import WeightSpec
from finwhale.cli.options import add_path
from finwhale.config import RANK_COUNTS, EngineConfig
from finwhale.distributed.rank import Rank
from finwhale.engine.plan.step_sizes import choose_step_sizes
from finwhale.engine.start.kv_cache import plan_cache
from finwhale.errors import FinwhaleError, ResourceError
from finwhale.models.cache import CacheGroup
from finwhale.models.protocol import ModelConfig
from finwhale.models.registry import architecture_of, parse_config
from finwhale.ops import Ops, load_ops
from finwhale.options import Parser
from finwhale.platform import Platform
from finwhale.printing import print_table
from finwhale.weights.source import Inventory, inventory_report

SHOWN = 10

# Bytes of GPU memory that torch sees.
GPUS = {"H100 80 GB": 85_000_000_000, "H200 141 GB": 150_000_000_000}
# GPU memory that is not for weights and cache. Flash's steps took 4.6 GiB (step_sizes.py), without
# the graphs of large steps, and CUDA takes about 1 GiB.
WORKSPACE_BYTES = 8 * 2**30


def run(argv: Sequence[str]) -> int:
    """Returns 0 if the checkpoint can be loaded, 1 if tensors are missing or wrong."""
    args = _parser().parse_args(argv)
    console = Console()
    checkpoint = Checkpoint.open(checkpoint_directory(args.path, args.revision))
    config = parse_config(checkpoint.config)
    architecture = architecture_of(config)
    specs = architecture.weight_specs(config)
    inventory = inventory_report(checkpoint, specs, architecture.ignored_prefixes(config))
    console.print(f"[bold]{checkpoint.path}[/]")
    description = architecture.describe(config).items()
    print_table(console, "model", ("", ""), description, num_texts=2, show_header=False)
    _print_tensors(console, checkpoint, specs)
    _print_memory(console, config, architecture)
    _print_ranks(console, config, architecture, inventory)
    if args.tensors:
        _print_all_tensors(console, checkpoint)
    return _print_verdict(console, inventory)


def _size(num_bytes: float) -> str:
    if num_bytes < 1024:
        return f"{num_bytes:,.0f} B"
    units = ("KiB", "MiB", "GiB", "TiB")
    power = min(int(math.log2(num_bytes)) // 10, len(units))
    return f"{num_bytes / 1024**power:,.2f} {units[power - 1]}"


def _print_tensors(
    console: Console, checkpoint: Checkpoint, specs: Mapping[str, WeightSpec]
) -> None:
    parts = {name: spec.part for spec in specs.values() for name in (spec.name, spec.scale_name)}
    groups: dict[tuple[str, str], list[int]] = defaultdict(lambda: [0, 0])
    for info in checkpoint.tensors.values():
        part = parts.get(info.name, "not in the model")
        entry = groups[part, str(info.dtype).removeprefix("torch.")]
        entry[0] += 1
        entry[1] += info.num_bytes
    # Parts in order of first appearance, with the dtypes of one part together.
    order = list(dict.fromkeys(part for part, _ in groups))
    found = sorted(groups.items(), key=lambda item: order.index(item[0][0]))
    rows = [(*names, f"{count:,}", _size(num_bytes)) for names, (count, num_bytes) in found]
    files, count = len(checkpoint.shards()), f"{len(checkpoint.tensors):,}"
    last = f"{files} file{'s' * (files > 1)}", "", count, _size(checkpoint.total_bytes)
    columns = ("part", "dtype", "tensors", "bytes")
    print_table(console, "tensors", columns, rows, num_texts=2, last=last)


def _print_memory(console: Console, config: ModelConfig, architecture: ModuleType) -> None:
    """Memory with values in two dtypes, and packed in FP8 and FP4 as on a Hopper GPU."""
    forms = _forms()
    weights = [architecture.weight_bytes(config, *form) for form in forms]
    rows = {"weights": weights}
    if config.max_draft_tokens:
        without = [architecture.weight_bytes(config.without_draft_head(), *f) for f in forms]
        head = [both - rest for both, rest in zip(weights, without, strict=True)]
        rows["of which the draft head"] = head
    groups = architecture.cache_groups(config)

    def token_bytes(group: CacheGroup, dtype: torch.dtype, ops: Ops) -> float:
        page = group.page_bytes(dtype.itemsize, ops.capabilities.packed_cache)
        return page / group.tokens_per_page

    per_token = [sum(token_bytes(g, *form) for g in groups if g.keep is None) for form in forms]
    rows["cache, each token"] = per_token
    # A sequence also holds up to as many tokens as each of the other groups keeps.
    state = [sum(sum(g.keep) * token_bytes(g, *form) for g in groups if g.keep) for form in forms]
    rows["cache, each sequence"] = state
    rows["cache, one full context"] = [c * config.max_position_embeddings for c in per_token]
    title = "memory needed, with weights and cache in"
    cells = ((name, *map(_size, sizes)) for name, sizes in rows.items())
    print_table(console, title, ("", "float32", "bfloat16", "packed"), cells)


def _forms() -> tuple[tuple[torch.dtype, Ops], ...]:
    """The dtype of activations and the table: float32 and bfloat16 values, and packed weights."""
    values = load_ops(Platform.cpu(), reference=True)
    packed = replace(values.capabilities, quantised_weights=True, packed_cache=True)
    return (
        (torch.float32, values),
        (torch.bfloat16, values),
        (torch.bfloat16, replace(values, capabilities=packed)),
    )


def _print_ranks(
    console: Console, config: ModelConfig, architecture: ModuleType, inventory: Inventory
) -> None:
    """The weights of one rank of several GPUs, and the tokens of context that fit beside them."""
    gpus = dict(GPUS)
    if torch.cuda.is_available():
        here = torch.cuda.get_device_properties(0)
        gpus[f"this {here.name}"] = here.total_memory
    share = EngineConfig().gpu_memory_utilization
    columns = ("GPUs", "weights of each", *(f"tokens on {name}" for name in gpus))
    rows: list[tuple[str, ...]] = []
    refusals: list[FinwhaleError] = []
    added: list[int] = []
    for size in RANK_COUNTS:
        rank = Rank(0, size)
        try:
            part = architecture.rank_config(config, rank, round_activations=True)
        except FinwhaleError as error:
            refusals.append(error)
            rows.append((str(size), "cannot divide it"))
            continue
        is_packed = not architecture.kernel_obstacles(part, inventory.storages)
        dtype, ops = _forms()[2 if is_packed else 1]
        weights = architecture.weight_bytes(config, dtype, ops, rank)
        left = [int(share * total) - weights - WORKSPACE_BYTES for total in gpus.values()]
        if is_packed and size > 1:
            whole = architecture.whole_attention_bytes(config, dtype, ops, rank)
            for i, total in enumerate(gpus.values()):
                if architecture.fits_whole_attention(config, total):
                    left[i] -= whole
                    added.append(whole)
        tokens = [_capacity_tokens(config, architecture, dtype, ops, size, room) for room in left]
        rows.append((str(size), _size(weights), *(f"{n:,}" if n else "no room" for n in tokens)))
    print_table(console, "context that fits on several GPUs", columns, rows)
    console.print(
        f"tokens of all sequences together, about: with {share:.0%} of the memory in use, of which "
        f"{_size(WORKSPACE_BYTES)} for workspace",
        highlight=False,
    )
    if added:
        console.print(
            f"each of several GPUs with enough memory also holds attention's weights whole "
            f"(--whole-attention): up to {_size(max(added))} more",
            highlight=False,
        )
    if refusals:
        console.print(str(refusals[0]), highlight=False)


def _capacity_tokens(
    config: ModelConfig,
    architecture: ModuleType,
    dtype: torch.dtype,
    ops: Ops,
    num_ranks: int,
    room: int,
) -> int:
    """Tokens of context for which a cache of `room` bytes has pages, with the default options."""
    options = EngineConfig()
    sizes = choose_step_sizes(options, num_ranks, room + WORKSPACE_BYTES)
    try:
        return plan_cache(
            architecture.cache_groups(config),
            itemsize=dtype.itemsize,
            packed=ops.capabilities.packed_cache,
            budget_bytes=max(0, room),
            max_num_seqs=sizes.num_seqs,
            max_step_tokens=sizes.num_tokens,
            wanted_tokens=max(0, room),  # no limit: a token takes more than a byte
            prefix_caching=options.enable_prefix_caching,
        ).capacity_tokens
    except ResourceError:
        return 0


def _print_all_tensors(console: Console, checkpoint: Checkpoint) -> None:
    rows = (
        (i.name, str(i.dtype).removeprefix("torch."), " x ".join(map(str, i.shape)), i.file)
        for i in checkpoint.tensors.values()
    )
    print_table(console, "every tensor", ("name", "dtype", "shape", "file"), rows, num_texts=4)


def _print_verdict(console: Console, inventory: Inventory) -> int:
    for title, items in (
        ("missing", inventory.missing),
        ("unexpected", inventory.unexpected),
        ("not as config.json implies", inventory.mismatched),
        ("left out", inventory.ignored),
    ):
        if items:
            console.print(f"[bold]{len(items)} tensors {title}[/]:", highlight=False)
            for item in items[:SHOWN]:
                console.print(f"  {item}", highlight=False)
            if len(items) > SHOWN:
                console.print(f"  and {len(items) - SHOWN} more")
    if inventory.complete:
        console.print("complete: every tensor that the model needs is there, in the right shape")
        return 0
    console.print("[bold]it cannot be loaded[/]")
    return 1


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="finwhale inspect",
        description="Show a checkpoint's configuration, its tensors and their sizes, the memory "
        "that it needs on one and on several GPUs, and which tensors are missing or unexpected. "
        "Only headers are read.",
    )
    add_path(parser)
    parser.add_argument("--tensors", action="store_true", help="list every tensor")
    return parser

"""`finwhale inspect`: describe a checkpoint and find what is wrong with it."""

import argparse
import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import ModuleType

import torch
from rich.console import Console

from finwhale.bench.estimate import GPUS, Gpu, StepTimes
from finwhale.checkpoint.location import checkpoint_directory
from finwhale.checkpoint.reader import Checkpoint
from finwhale.checkpoint.spec import Storage, WeightSpec
from finwhale.cli.options import add_path
from finwhale.config import RANK_COUNTS, EngineConfig
from finwhale.distributed.rank import Rank
from finwhale.engine.plan.pages import windowed_pages
from finwhale.engine.plan.step_sizes import StepSizes, choose_step_sizes
from finwhale.engine.start.kv_cache import plan_cache
from finwhale.engine.steps.drafter import check_can_draft
from finwhale.errors import FinwhaleError, ResourceError
from finwhale.models.cache import CacheGroup
from finwhale.models.protocol import ModelConfig
from finwhale.models.registry import architecture_of, parse_config, published_config
from finwhale.ops import Ops, load_ops
from finwhale.options import Parser
from finwhale.platform import Platform
from finwhale.printing import new_console, print_table
from finwhale.weights.source import Inventory, inventory_report
from finwhale.weights.table import table_bytes

SHOWN = 10
CONTEXT, OUTPUT = 8192, 256  # tokens of a sequence, if the model has as many

# GPU memory that is not for weights and cache. Flash's steps took 4.6 GiB (step_sizes.py), without
# the graphs of large steps, and CUDA takes about 1 GiB.
WORKSPACE_BYTES = 8 * 2**30
RECORDED = "deepseek_v4"  # whose times bench/results has
TABLES = "lookup tables, in host memory, once for all GPUs"


def run(argv: Sequence[str]) -> int:
    """Returns 0 if the checkpoint can be loaded, 1 if tensors are missing or wrong."""
    parser = _parser()
    args = parser.parse_args(argv)
    console = new_console()
    planned = (args.config, args.gpu, args.context, args.output, args.sequences, args.draft_tokens)
    if not args.gpus and any(planned):
        parser.error("these options need --gpus too")
    if (args.path and args.config) or (args.gpus and args.tensors):
        parser.error("give either PATH or --config, and either --tensors or --gpus")
    if args.config:
        published = published_config(args.config)
        specs = architecture_of(published).weight_specs(published)
        _print_plan(console, published, {n: one.storage for n, one in specs.items()}, args)
        return 0
    checkpoint = Checkpoint.open(checkpoint_directory(args.path, args.revision))
    config = parse_config(checkpoint.config)
    architecture = architecture_of(config)
    specs = architecture.weight_specs(config)
    inventory = inventory_report(checkpoint, specs, architecture.ignored_prefixes(config))
    console.print(f"[bold]{checkpoint.path}[/]")
    if args.gpus:
        _print_plan(console, config, inventory.storages, args)
        return _print_verdict(console, inventory)
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
    if tables := table_bytes(architecture.weight_specs(config), {}):
        rows[TABLES] = [tables] * len(forms)
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


class RankMemory:
    """The memory of one rank of `size`. Raises FinwhaleError if they cannot divide the model."""

    def __init__(self, config: ModelConfig, storages: Mapping[str, Storage], size: int) -> None:
        self.config, self.size, rank = config, size, Rank(0, size)
        self.architecture = architecture_of(config)
        part = self.architecture.rank_config(config, rank, round_activations=True)
        self.is_packed = not self.architecture.kernel_obstacles(part, storages)
        form = self.dtype, self.ops = _forms()[2 if self.is_packed else 1]
        self.weights: int = self.architecture.weight_bytes(config, *form, rank)
        self.whole_attention: int = 0
        if self.is_packed and size > 1:
            self.whole_attention = self.architecture.whole_attention_bytes(config, *form, rank)

    def added(self, total: int) -> int:
        """Bytes of attention's weights that a GPU of `total` bytes holds besides its part."""
        fits = self.architecture.fits_whole_attention(self.config, total)
        return self.whole_attention if fits else 0

    def room(self, total: int) -> int:
        """Bytes for the cache on a GPU of `total` bytes."""
        share = EngineConfig().gpu_memory_utilization
        return int(share * total) - self.weights - self.added(total) - WORKSPACE_BYTES

    def cache(self, total: int, options: EngineConfig) -> tuple[int, int, StepSizes]:
        """Tokens of context that fit (0: there is no room), bytes of running sequences' windows and
        compressors' states, and the sizes of steps.
        """
        room = self.room(total)
        sizes = choose_step_sizes(options, self.size, room + self.added(total) + WORKSPACE_BYTES)
        groups = self.architecture.cache_groups(self.config)
        form = self.dtype.itemsize, self.ops.capabilities.packed_cache
        most = sizes.num_seqs, sizes.num_tokens
        reuse = options.enable_prefix_caching, bool(options.draft_tokens)
        windows = sum(
            g.page_bytes(*form) * windowed_pages(g, *most, *reuse) for g in groups if g.keep
        )
        try:
            plan = plan_cache(
                groups,
                itemsize=form[0],
                packed=form[1],
                budget_bytes=max(0, room),
                max_num_seqs=sizes.num_seqs,
                max_step_tokens=sizes.num_tokens,
                wanted_tokens=max(0, room),  # no limit: a token takes more than a byte
                prefix_caching=reuse[0],
                drafts=reuse[1],
            )
        except ResourceError:
            return 0, windows, sizes
        return plan.capacity_tokens, windows, sizes


def _gpus() -> dict[str, Gpu]:
    """The known kinds of GPUs, and that of this machine."""
    gpus = dict(GPUS)
    if torch.cuda.is_available():
        here = torch.cuda.get_device_properties(0)
        speeds = [gpu.speed for name, gpu in GPUS.items() if name.split()[0] in here.name]
        gpus[f"this {here.name}"] = Gpu(here.total_memory, *speeds)
    return gpus


def _print_ranks(
    console: Console, config: ModelConfig, architecture: ModuleType, inventory: Inventory
) -> None:
    """The weights of one rank of several GPUs, and the tokens of context that fit beside them."""
    gpus, options = _gpus(), EngineConfig()
    columns = ("GPUs", "weights of each", *(f"tokens on {name}" for name in gpus))
    rows: list[tuple[str, ...]] = []
    refusals: list[FinwhaleError] = []
    added = 0
    for size in RANK_COUNTS:
        try:
            rank = RankMemory(config, inventory.storages, size)
        except FinwhaleError as error:
            refusals.append(error)
            rows.append((str(size), "cannot divide it"))
            continue
        added = max(added, *(rank.added(gpu.num_bytes) for gpu in gpus.values()))
        tokens = [rank.cache(gpu.num_bytes, options)[0] for gpu in gpus.values()]
        cells = (f"{n:,}" if n else "no room" for n in tokens)
        rows.append((str(size), _size(rank.weights), *cells))
    print_table(console, "context that fits on several GPUs", columns, rows)
    console.print(
        f"tokens of all sequences together, about: with {options.gpu_memory_utilization:.0%} of "
        f"the memory in use, of which {_size(WORKSPACE_BYTES)} for workspace",
        highlight=False,
    )
    if added:
        console.print(
            f"each of several GPUs with enough memory also holds attention's weights whole "
            f"(--whole-attention): up to {_size(added)} more",
            highlight=False,
        )
    if refusals:
        console.print(str(refusals[0]), highlight=False)


def _print_plan(
    console: Console, config: ModelConfig, storages: Mapping[str, Storage], args: argparse.Namespace
) -> None:
    """What fits on --gpus GPUs, and how fast it should be: all of it is calculated."""
    options = EngineConfig(max_num_seqs=args.sequences, draft_tokens=args.draft_tokens)
    check_can_draft(options.draft_tokens, config)
    most, drafts = config.max_position_embeddings, args.draft_tokens
    output = OUTPUT if args.output is None else args.output
    context = min(CONTEXT, most) if args.context is None else args.context
    if not 0 < output < context <= most:
        raise FinwhaleError(
            f"--output must be less than --context, and that at most {most}: got {output} and "
            f"{context}"
        )
    config = config if drafts else config.without_draft_head()
    rank, gpus = RankMemory(config, storages, args.gpus), _gpus()
    name = next((name for name in gpus if args.gpu and args.gpu in name), list(gpus)[-1])
    gpu = gpus[name]
    tokens, windows, sizes = rank.cache(gpu.num_bytes, options)
    at_once = min(sizes.num_seqs, tokens // context)
    rows = {
        "weights": _size(rank.weights),
        "attention's weights whole": _size(rank.added(gpu.num_bytes)),
        "workspace, assumed": _size(WORKSPACE_BYTES),
        f"windows and states of {sizes.num_seqs} sequences": _size(windows),
        "left for tokens of context and for states of prefixes": (
            _size(rank.room(gpu.num_bytes) - windows) if tokens else "no room"
        ),
        "tokens of context that fit, of all sequences": f"{tokens:,}",
        f"sequences of {context:,} tokens that fit at once": f"{at_once} of {sizes.num_seqs}",
    }
    if tables := table_bytes(rank.architecture.weight_specs(config), storages):
        rows[TABLES] = _size(tables)
    title = f"memory of each of {args.gpus} GPUs ({name}), calculated"
    print_table(console, title, ("", ""), rows.items(), show_header=False)
    recorded = config.model_type == RECORDED
    if not rank.is_packed or not at_once or not recorded:
        why = "there is no room" if rank.is_packed else "the records are of packed weights"
        why = why if recorded else "no record is of this model"
        console.print(f"no expected times: {why}", highlight=False)
        return
    times, prompt = StepTimes(config, args.gpus, gpu), context - output
    step, mixed = times.decode(context, at_once, drafts), sizes.mixed_tokens
    rate, without = 1e3 * at_once / step, ", without drafts" if drafts else ""
    with_drafts = f" to {rate * (1 + drafts):,.0f}, all drafts accepted" if drafts else ""
    rows = {
        f"decode step of {at_once} sequences at that context": f"{step:,.1f} ms",
        "output tokens/s while no prompt is read": f"{rate:,.0f}{with_drafts}",
        "decode step of one sequence": f"{times.decode(context, 1, drafts):,.2f} ms",
        f"first token of a prompt of {prompt:,} tokens alone": (
            f"{times.prefill(prompt, sizes.num_tokens) / 1e3:,.2f} s"
        ),
        "longest step beside prompts": f"{times.prefill(mixed, mixed):,.0f} ms",
        f"output tokens/s with such prompts and {output:,} output tokens{without}": (
            f"{times.tokens_per_s(prompt, output, at_once, mixed):,.0f}"
        ),
    }
    print_table(console, "expected times, calculated", ("", ""), rows.items(), show_header=False)
    console.print(
        "from bytes and operations, with the efficiency of the records in bench/results: random "
        "weights, no cached prefixes. docs/production.md says how far from the records they are.",
        highlight=False,
    )


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
        "that it needs of the host and on one and several GPUs, and which tensors are missing or "
        "unexpected. Only headers are read.",
    )
    add_path(parser)
    add = parser.add_argument
    add("--tensors", action="store_true", help="list every tensor")
    plan = parser.add_argument_group("plan")
    about = "calculate what fits on this many GPUs and how fast it is, and show nothing else"
    plan.add_argument("--gpus", type=int, choices=RANK_COUNTS, help=about)
    about = "plan for flash, flash-0731, pro or pro-0813 instead of a checkpoint"
    plan.add_argument("--config", metavar="NAME", help=about)
    about = "kind of the GPUs (default: this machine's, or H200)"
    plan.add_argument("--gpu", choices=[name.split()[0] for name in GPUS], help=about)
    about = f"tokens of prompt and output of a sequence (default: {CONTEXT})"
    plan.add_argument("--context", type=int, metavar="N", help=about)
    about = f"output tokens of a sequence (default: {OUTPUT})"
    plan.add_argument("--output", type=int, metavar="N", help=about)
    about = "sequences that run at once (default: what the engine chooses)"
    plan.add_argument("--sequences", type=int, metavar="N", help=about)
    plan.add_argument("--draft-tokens", type=int, default=0, metavar="N", help="drafts of a step")
    return parser

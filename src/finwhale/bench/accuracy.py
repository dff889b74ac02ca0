"""Compare the logits, tokens and selected entries of a platform's operators with the references.

A model of real widths with random weights reads one random text: whole, in chunks, and its end
token by token. The float32 references with as-trained rounding are the truth; the bfloat16
references show what the activations' dtype alone costs.
"""

import argparse
import gc
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from finwhale.bench.arguments import add_sizes, new_parser
from finwhale.bench.record import append_record, stamp
from finwhale.checkpoint.dummy import DummySource
from finwhale.config import EngineConfig
from finwhale.engine.loop.engine import Engine
from finwhale.engine.loop.opening import start_engine
from finwhale.engine.rank.startup import choose_device
from finwhale.models.deepseek_v4.config import ModelConfig
from finwhale.models.deepseek_v4.model import DeepseekV4
from finwhale.models.deepseek_v4.weights import weight_specs
from finwhale.options import add_options
from finwhale.testing.stepping import Stepper

TRUTH, BFLOAT16, TABLE = "references, float32", "references, bfloat16", "the platform's table"
WHOLE, CHUNKED, DECODED = "whole", "chunked", "decoded"
# No worse than the bfloat16 references by more than a third.
ALLOWED = 4 / 3


@dataclass(slots=True)
class Reading:
    """What one engine made of the text.

    Attributes:
        logits: by way of reading, [P,V] float32 on the CPU.
        selected: of the whole reading, each C4 layer's slots [N,K].
    """

    logits: dict[str, Tensor] = field(default_factory=dict)
    selected: list[Tensor] = field(default_factory=list)


def read(
    engine: Engine, text: list[int], wanted: Tensor, cuts: list[int], tail: int, every_way: bool
) -> Reading:
    """Read the text; logits at the positions `wanted`, and of its tail as a decode gives them.

    Read whole, and with `every_way` in chunks and the tail token by token.
    """
    stepper, reading = Stepper(engine), Reading()
    model = stepper.runner.model
    assert isinstance(model, DeepseekV4)
    layers: list[Any] = list(model.layers)
    indexers = [layer.attn.entries for layer in layers if hasattr(layer.attn.entries, "topk")]
    kept = [indexer.select_entries for indexer in indexers]

    def noting(run: Any) -> Any:
        def select_entries(*args: Any) -> Any:
            slots = run(*args)
            reading.selected.append(slots.long().cpu())
            return slots

        return select_entries

    for indexer, run in zip(indexers, kept, strict=True):
        indexer.select_entries = noting(run)
    streams = stepper.read(text)
    for indexer, run in zip(indexers, kept, strict=True):
        indexer.select_entries = run
    reading.logits[WHOLE] = stepper.logits(streams[wanted]).cpu()
    reading.logits[CHUNKED] = reading.logits[WHOLE]
    decoded = streams[-tail:]
    if every_way:
        reading.logits[CHUNKED] = stepper.logits(stepper.read(text, cuts)[wanted]).cpu()
        decoded = stepper.read(text, list(range(len(text) - tail, len(text))))[-tail:]
    reading.logits[DECODED] = stepper.logits(decoded).cpu()
    return reading


def compare(found: Tensor, wanted: Tensor) -> dict[str, float]:
    """Relative error of the logits and the share of rows with the same best token."""
    error = ((found - wanted).norm() / wanted.norm()).item()
    same = (found.argmax(-1) == wanted.argmax(-1)).float().mean().item()
    return {"relative_error": round(error, 6), "same_top_1": round(same, 4)}


def overlap(found: list[Tensor], wanted: list[Tensor]) -> float:
    """The share of the selected slots that the truth selects too."""
    common = total = 0
    for one, other in zip(found, wanted, strict=True):
        for a, b in zip(one.tolist(), other.tolist(), strict=True):
            chosen = set(b) - {-1}
            common += len(chosen & set(a))
            total += len(chosen)
    return common / max(total, 1)


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Everything that the record holds besides its stamp."""
    config = ModelConfig.preset(args.config).without_draft_head().with_layers(args.layers)
    generator = torch.Generator().manual_seed(0)
    text = torch.randint(config.vocab_size, (args.tokens,), generator=generator).tolist()
    tail = min(args.decodes, args.tokens - 1)
    wanted = torch.randperm(args.tokens, generator=generator)[: args.positions].sort().values
    cuts = torch.randperm(args.tokens - 1, generator=generator)[:7].add(1).sort().values.tolist()
    readings: dict[str, Reading] = {}
    for name, options in (
        (TRUTH, {"dtype": "float32", "reference": True}),
        (BFLOAT16, {"reference": True}),
        (TABLE, {}),
    ):
        start = time.perf_counter()
        engine = start_engine(
            EngineConfig(
                device=args.device,
                wo_a_input=args.wo_a_input,
                max_model_len=args.tokens + 256,
                max_num_seqs=1,
                max_num_batched_tokens=args.tokens,
                enforce_eager=True,
                **options,
            ),
            config,
            DummySource(weight_specs(config), choose_device(args.device)[1]),
            None,
        )
        readings[name] = read(
            engine, text, wanted.to(engine.executor.description.device), cuts, tail, name != TRUTH
        )
        if args.verbose:
            print(f"{name}: {time.perf_counter() - start:.1f} s", flush=True)
        del engine
        gc.collect()
        torch.cuda.empty_cache()
    truth = readings[TRUTH]
    result: dict[str, Any] = {
        "benchmark": "accuracy",
        "config": args.config,
        "layers": args.layers,
        "tokens": args.tokens,
    }
    for name in (BFLOAT16, TABLE):
        reading = readings[name]
        result[name] = {
            f"{way} against the truth": compare(reading.logits[way], truth.logits[way])
            for way in (WHOLE, CHUNKED, DECODED)
        }
        whole = reading.logits[WHOLE]
        result[name]["chunked against whole"] = compare(reading.logits[CHUNKED], whole)
        result[name]["entries selected"] = {"overlap": overlap(reading.selected, truth.selected)}
    return result


def passes(result: dict[str, Any]) -> bool:
    """Whether the table is no worse than the bfloat16 references by more than a third."""
    for what, ours in result[TABLE].items():
        theirs = result[BFLOAT16][what]
        if "overlap" in ours:
            if ours["overlap"] < min(0.99, theirs["overlap"]):
                return False
            continue
        if not ours["relative_error"] <= ALLOWED * theirs["relative_error"] + 1e-5:
            return False
        if not 1 - ours["same_top_1"] <= ALLOWED * (1 - theirs["same_top_1"]) + 0.01:
            return False
    return True


def main(argv: Sequence[str]) -> int:
    """`finwhale bench accuracy`: 0, or 1 where the table is worse than it may be."""
    parser = new_parser("accuracy", __doc__, "accuracy-h200.jsonl")
    add_sizes(parser, 4)
    parser.add_argument("--tokens", type=int, default=2560, help="length of the text")
    parser.add_argument(
        "--positions", type=int, default=512, help="number of positions whose logits are compared"
    )
    parser.add_argument(
        "--decodes", type=int, default=16, help="number of last tokens that are decoded one by one"
    )
    add_options(parser, EngineConfig, ("device", "wo_a_input"))
    parser.add_argument("--verbose", action="store_true", help="print how long each table takes")
    args = parser.parse_args(argv)
    console = Console()
    if not console.is_terminal:
        console.width = 120
    record = stamp("accuracy", argv, ("torch",))
    record |= run(args)
    table = Table(title=f"{args.config}, {args.layers} layers, {args.tokens} tokens")
    for column in ("", BFLOAT16, TABLE):
        table.add_column(column)
    for what in record[TABLE]:
        cells = (
            ", ".join(f"{name} {value:.4g}" for name, value in record[name_of][what].items())
            for name_of in (BFLOAT16, TABLE)
        )
        table.add_row(what, *cells)
    console.print(table)
    record["passes"] = passes(record)
    if args.record:
        append_record(args.record, record)
        console.print(f"recorded in {args.record}")
    return 0 if record["passes"] else 1

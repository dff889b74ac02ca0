"""Compare the logits, tokens and selected entries of a platform's operators with the references.

    python -m tools.accuracy

A model of real widths with random weights prefills one random text at once (a long one in steps of
STEP_TOKENS, which bound the references' memory), then in chunks, and then decodes its end token by
token. The float32 references with as-trained rounding are the truth.
The bfloat16 references show how much error the dtype of the activations causes. The references run
on one device, the platform's operators on every rank (--tensor-parallel-size); the ranks must
compute the same bits.
"""

import argparse
import gc
import hashlib
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
from tools.stepping import Stepper
from torch import Tensor

from finwhale.bench.arguments import add_sizes, new_parser
from finwhale.bench.engine import call_ranks_collectively
from finwhale.bench.record import keep_record, stamp
from finwhale.cli.bench import run_tool
from finwhale.config import EngineConfig
from finwhale.engine.loop.opening import start_engine
from finwhale.engine.ranks.devices import parse_device
from finwhale.engine.ranks.local_executor import LocalExecutor
from finwhale.models.deepseek_v4.model import DeepseekV4
from finwhale.models.deepseek_v4.presets import published
from finwhale.models.weight_sources import Weights
from finwhale.options import add_options

COMMAND = "python -m tools.accuracy"
TRUTH, BFLOAT16, TABLE = "references, float32", "references, bfloat16", "the platform's table"
WHOLE, CHUNKED, DECODED = "whole", "chunked", "decoded"
STEP_TOKENS = 2560
# The platform's error may be this many times the error of the bfloat16 references.
ALLOWED = 4 / 3
OPTIONS = ("device", "tensor_parallel_size", "batch_invariant", "wo_a_input")


@dataclass(slots=True)
class Results:
    """The values that one rank computed for the text.

    Attributes:
        logits: [P,V] float32 on the CPU for each way to compute them (WHOLE, CHUNKED, DECODED).
            Rank 0 alone keeps them.
        selected: the slots [N,K] that each C4 layer selected in each step of the prefill of the
            whole text, or those of the rank's share of the step's N tokens.
        digest: a hash of all values; equal digests show that ranks computed the same bits.
    """

    logits: dict[str, Tensor] = field(default_factory=dict)
    selected: list[Tensor] = field(default_factory=list)
    digest: str = ""


@dataclass(frozen=True, slots=True)
class SampleText:
    """A text, and which of its logits are compared.

    Attributes:
        wanted: positions [P] on the CPU.
        cuts: where the chunks of a chunked prefill end.
        tail: number of last tokens that are decoded one by one.
    """

    token_ids: list[int]
    wanted: Tensor
    cuts: list[int]
    tail: int


def compute(text: SampleText, every_way: bool, executor: LocalExecutor) -> Results:
    """Compute the logits of a text at its wanted positions, and those of its tail, on one rank.

    Args:
        every_way: also prefill the text in chunks, and decode the tail token by token. Otherwise
            the logits of the whole prefill stand for these ways too.
    """
    stepper, results = Stepper(executor), Results()
    ids, wanted, tail = text.token_ids, text.wanted.to(stepper.runner.device), text.tail
    digest = hashlib.sha256()

    def prefill(cuts: Sequence[int] = ()) -> Tensor:
        streams = stepper.read(ids, [*cuts, *range(STEP_TOKENS, len(ids), STEP_TOKENS)])
        digest.update(streams.cpu().contiguous().view(torch.uint8).numpy().data)
        return streams

    model = stepper.runner.model
    assert isinstance(model, DeepseekV4)

    def recording(run: Any) -> Any:
        def select_entries(*args: Any) -> Any:
            slots = run(*args)
            results.selected.append(slots.long().cpu())
            return slots

        return select_entries

    with ExitStack() as stack:
        for layer in model.layers:
            indexer: Any = layer.attn.compressor
            if hasattr(indexer, "topk"):
                run = recording(indexer.select_entries)
                stack.enter_context(patch.object(indexer, "select_entries", run))
        streams = prefill()
    results.logits[WHOLE] = stepper.logits(streams[wanted]).cpu()
    results.logits[CHUNKED] = results.logits[WHOLE]
    decoded = streams[-tail:]
    if every_way:
        results.logits[CHUNKED] = stepper.logits(prefill(text.cuts)[wanted]).cpu()
        decoded = prefill(range(len(ids) - tail, len(ids)))[-tail:]
    results.logits[DECODED] = stepper.logits(decoded).cpu()
    for logits in results.logits.values():
        digest.update(logits.numpy().data)
    results.digest = digest.hexdigest()
    if executor.collectives.rank.index:
        results.logits.clear()
    return results


def compare(found: Tensor, wanted: Tensor) -> dict[str, float]:
    """The relative error of the logits, and the share of rows with the same most likely token."""
    error = ((found - wanted).norm() / wanted.norm()).item()
    same = (found.argmax(-1) == wanted.argmax(-1)).float().mean().item()
    return {"relative_error": round(error, 6), "same_top_1": round(same, 4)}


def overlap(found: list[Tensor], wanted: list[Tensor]) -> float:
    """The share of the slots in `wanted` that `found` has too.

    A rank of several may have selected for its share of the tokens only: rank 0 for the first ones.
    """
    common = total = 0
    for one, other in zip(found, wanted, strict=True):
        for a, b in zip(one.tolist(), other[: len(one)].tolist(), strict=True):
            chosen = set(b) - {-1}
            common += len(chosen & set(a))
            total += len(chosen)
    return common / max(total, 1)


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Run the benchmark; returns the record without its stamp."""
    config = published(args.config).without_draft_head().with_layers(args.layers)
    generator = torch.Generator().manual_seed(0)
    token_ids = torch.randint(config.vocab_size, (args.tokens,), generator=generator).tolist()
    tail = min(args.decodes, args.tokens - 1)
    wanted = torch.randperm(args.tokens, generator=generator)[: args.positions].sort().values
    cuts = torch.randperm(args.tokens - 1, generator=generator)[:7].add(1).sort().values.tolist()
    text = SampleText(token_ids, wanted, cuts, tail)
    kind, indices = parse_device(args.device)
    first = f"{kind}:{indices[0]}" if indices else args.device
    one_rank: dict[str, Any] = {"device": first, "tensor_parallel_size": 1, "reference": True}
    computed: dict[str, list[Results]] = {}
    given = {name: getattr(args, name) for name in OPTIONS}
    for name, more in (
        (TRUTH, {**one_rank, "dtype": "float32"}),
        (BFLOAT16, one_rank),
        (TABLE, given),
    ):
        options = {"wo_a_input": args.wo_a_input, **more, "enforce_eager": True, "max_num_seqs": 1}
        options |= {"max_num_batched_tokens": min(args.tokens, STEP_TOKENS)}
        options |= {"max_model_len": args.tokens + 256}
        engine = start_engine(EngineConfig(**options), config, Weights(config), None)
        computed[name] = call_ranks_collectively(
            engine.executor, partial(compute, text, name != TRUTH)
        )
        del engine
        gc.collect()
        torch.cuda.empty_cache()
    (truth,) = computed[TRUTH]
    result: dict[str, Any] = {
        "config": args.config,
        "layers": args.layers,
        "tensor_parallel_size": len(computed[TABLE]),
        "tokens": args.tokens,
        "same_bits_on_all_ranks": len({results.digest for results in computed[TABLE]}) == 1,
    }
    for name in (BFLOAT16, TABLE):
        results = computed[name][0]
        result[name] = {
            f"{way} against the truth": compare(results.logits[way], truth.logits[way])
            for way in (WHOLE, CHUNKED, DECODED)
        }
        whole = results.logits[WHOLE]
        result[name]["chunked against whole"] = compare(results.logits[CHUNKED], whole)
        result[name]["entries selected"] = {"overlap": overlap(results.selected, truth.selected)}
    return result


def passes(result: dict[str, Any]) -> bool:
    """Whether all ranks have the same bits, and the table's errors are at most ALLOWED times those
    of the bfloat16 references.
    """
    if not result["same_bits_on_all_ranks"]:
        return False
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
    """Run the benchmark. Returns 1 if the table's errors are too large, otherwise 0."""
    args = _parser().parse_args(argv)
    record = stamp("accuracy", argv, ("torch",), COMMAND) | run(args)
    if not record["same_bits_on_all_ranks"]:
        print("the ranks have computed different bits")
    record["passes"] = passes(record)
    keep_record(args.record, record)
    return 0 if record["passes"] else 1


def _parser() -> argparse.ArgumentParser:
    parser = new_parser("accuracy", __doc__, "accuracy-h200.jsonl", COMMAND)
    add_sizes(parser, 4)
    add = parser.add_argument
    add("--tokens", type=int, default=2560, help="length of the text")
    add("--positions", type=int, default=512, help="number of positions whose logits are compared")
    add("--decodes", type=int, default=16, help="number of last tokens that are decoded one by one")
    add_options(parser, EngineConfig, OPTIONS)
    return parser


if __name__ == "__main__":
    # Ranks find a function by the name of its module, and could not import `__main__`.
    from tools import accuracy

    run_tool(accuracy.main)

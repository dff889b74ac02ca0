"""Compare CPU decode and prefill with transformers' DeepSeek-V4: same weights, same run.

Both get the same prompts, and with exact activations Finwhale must choose the same tokens. They
take turns, a few steps each, so that other work on the machine affects both. A step of Finwhale is
a whole step of its engine (scheduling, forward, sampling, detokenisation). A step of transformers
is its forward and an argmax.
"""

import argparse
import importlib
import random
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from finwhale.bench.arguments import new_parser
from finwhale.bench.floors import weight_sums
from finwhale.bench.preflight import check_disk
from finwhale.bench.record import keep_record, stamp, summary
from finwhale.bench.timing import seconds_of
from finwhale.checkpoint.loading import WeightSource
from finwhale.checkpoint.location import checkpoint_directory
from finwhale.checkpoint.reader import Checkpoint
from finwhale.checkpoint.writer import write_checkpoint
from finwhale.config import Activations
from finwhale.engine.rank.memory_checks import check_host_memory
from finwhale.errors import FinwhaleError, ResourceError
from finwhale.llm import LLM
from finwhale.models.deepseek_v4.architecture import weight_bytes
from finwhale.models.deepseek_v4.config import DeepseekV4Config
from finwhale.models.deepseek_v4.weights import ignored_prefixes, weight_specs
from finwhale.ops import load_ops
from finwhale.platform import Platform
from finwhale.printing import new_console, print_table
from finwhale.request import SamplingParams

BATCHES = (1, 8)
TURN = 8  # decode steps that one contender runs before the next one's turn
QUANTISED = ("quantization_config", "expert_dtype")  # fields that an unquantised model lacks
EXPERTS = ("grouped_mm", "batched_mm", "eager")  # transformers' ways to run experts

Prompts = list[list[int]]
# The name of a contender, and how many milliseconds each of its steps took.
Times = dict[str, list[float]]


class Finwhale:
    """Finwhale's engine in float32. `begin` prefills prompts; each step adds a token to all.

    Args:
        prompts: the largest number of prompts, and their largest number of tokens.
    """

    def __init__(
        self, path: Path, activations: Activations, prompts: tuple[int, int], compile: bool = False
    ) -> None:
        self.name = f"finwhale {activations}{' compiled' if compile else ''}"
        self._llm = LLM(
            path,
            device="cpu",
            dtype="float32",
            activations=activations,
            max_num_seqs=prompts[0],
            max_num_batched_tokens=prompts[0] * prompts[1],
            compile=compile,
            generation_config="none",
        )
        self._requests: list[Any] = []

    def begin(self, prompts: Prompts, steps: int) -> None:
        """Prefill the prompts in one step, which also gives each sequence its first token."""
        params = SamplingParams(max_tokens=steps + 1, temperature=0, ignore_eos=True)
        engine = self._llm._engine
        self._requests = [engine.add_request(str(i), p, params) for i, p in enumerate(prompts)]
        engine.step()
        assert all(request.outputs[0].token_ids for request in self._requests), "a request waits"

    def step(self) -> None:
        self._llm._engine.step()

    def finish(self) -> list[list[int]]:
        for request in self._requests:
            self._llm._engine.abort(request.request_id)
        return [request.outputs[0].token_ids for request in self._requests]


class Transformers:
    """transformers in float32 with its own cache.

    Args:
        experts: one of EXPERTS, transformers' ways to run experts.
        threads: number of torch threads.
    """

    def __init__(self, model: Any, experts: str, threads: int) -> None:
        self.name = f"transformers {experts} {threads} thread{'s' if threads > 1 else ''}"
        self._model = model
        self._experts = experts
        self._threads = threads
        self._cache: Any = None
        self._tokens = torch.empty(0)
        self._chosen: list[list[list[int]]] = []

    @torch.inference_mode()
    def begin(self, prompts: Prompts, steps: int) -> None:
        self._cache = None
        self._tokens = torch.tensor(prompts)
        self._chosen = []
        self.step()

    @torch.inference_mode()
    def step(self) -> None:
        if self._model.config._experts_implementation != self._experts:
            self._model.set_experts_implementation(self._experts)
        before = torch.get_num_threads()
        torch.set_num_threads(self._threads)
        out = self._model(
            input_ids=self._tokens, past_key_values=self._cache, use_cache=True, logits_to_keep=1
        )
        self._cache = out.past_key_values
        self._tokens = out.logits[:, -1].argmax(-1, keepdim=True)
        self._chosen.append(self._tokens.tolist())
        torch.set_num_threads(before)

    def finish(self) -> list[list[int]]:
        self._cache = None
        return [[row[i][0] for row in self._chosen] for i in range(len(self._chosen[0]))]


def load_transformers(path: Path) -> Any:
    """Load a checkpoint into transformers' model, in float32."""
    try:
        transformers = importlib.import_module("transformers")
    except ImportError as error:
        raise FinwhaleError(
            "this benchmark needs transformers, which is not installed: "
            "pip install 'transformers>=5.23'"
        ) from error
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    return transformers.AutoModelForCausalLM.from_pretrained(
        path, dtype=torch.float32, attn_implementation="eager"
    )


def write_plain_twin(checkpoint: Checkpoint, path: Path) -> None:
    """Write a copy of a checkpoint with its weights dequantised to float32, for transformers."""
    config = DeepseekV4Config.from_dict(checkpoint.config)
    source = WeightSource(checkpoint, weight_specs(config), ignored=ignored_prefixes(config))
    weights = ((spec.name, stored.dequantise(torch.float32)) for spec, stored in source)
    plain = {k: v for k, v in checkpoint.config.items() if k not in QUANTISED}
    plain["torch_dtype"] = "float32"
    specs = weight_specs(DeepseekV4Config.from_dict(plain))
    write_checkpoint(path, plain, weights, specs, plain_dtype=torch.float32)


# --- Measuring ----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Workload:
    """The sizes of the measurements.

    Attributes:
        context: tokens of each prompt before a decode.
        steps: tokens to decode.
        rounds: repetitions of each measurement.
        prefill: tokens of the prompt of a prefill.
    """

    context: int
    steps: int
    rounds: int
    prefill: int
    vocab_size: int

    def prompts(self, batch: int, length: int, round_: int) -> Prompts:
        generator = torch.Generator().manual_seed(1000 * batch + round_)
        ids = torch.randint(2, self.vocab_size, (batch, length), generator=generator)
        return [list(map(int, row)) for row in ids.tolist()]


Contender = Finwhale | Transformers


def measure_decode(
    contenders: Sequence[Contender], work: Workload, batch: int
) -> tuple[Times, dict[str, list[list[int]]]]:
    """Measure decode steps; returns the milliseconds of each step and the tokens, by contender."""
    times: Times = {c.name: [] for c in contenders}
    tokens: dict[str, list[list[int]]] = {c.name: [] for c in contenders}
    for round_ in range(work.rounds):
        prompts = work.prompts(batch, work.context, round_)
        order = random.Random(round_).sample(contenders, len(contenders))
        for contender in order:
            contender.begin(prompts, work.steps)
        for _ in range(work.steps // TURN):
            for contender in order:
                contender.step()  # The others' turns have displaced its data from the CPU caches.
                steps = (1e3 * seconds_of(contender.step) for _ in range(TURN - 1))
                times[contender.name] += steps
        for contender in order:
            tokens[contender.name] += contender.finish()
    return times, tokens


def measure_prefill(contenders: Sequence[Contender], work: Workload) -> Times:
    """Measure the milliseconds to the first token of a `prefill`-token prompt, by contender."""
    times: Times = {c.name: [] for c in contenders}
    for round_ in range(work.rounds):
        prompts = work.prompts(1, work.prefill, round_)
        for contender in random.Random(round_).sample(contenders, len(contenders)):
            prefill = partial(contender.begin, prompts, 0)
            times[contender.name].append(1e3 * seconds_of(prefill))
            contender.finish()
    return times


def fastest_transformers(model: Any, work: Workload, batch: int) -> Transformers:
    """Choose the way to run experts and the number of threads that decode fastest here."""
    short = replace(work, steps=3 * TURN, rounds=1)
    threads = sorted({1, torch.get_num_threads()})
    candidates = [Transformers(model, experts, n) for experts in EXPERTS for n in threads]
    times, _ = measure_decode(candidates, short, batch)
    return min(candidates, key=lambda c: summary(times[c.name])["p10"])


def machine_rates() -> tuple[float, float]:
    """Measure this machine: bytes per second that a sum reads, and float32 operations per second of
    a GEMM.
    """
    memory = torch.ones(2**26)
    matrix = torch.ones(1024, 1024)
    reads = [seconds_of(memory.sum) for _ in range(5)]
    gemms = [seconds_of(lambda: matrix @ matrix) for _ in range(5)]
    return memory.nbytes / min(reads), 2 * 1024**3 / min(gemms)


def floor_ms(config: DeepseekV4Config, tokens: int, sequences: int) -> float:
    """The least time of a forward: reading its float32 weights once, or computing its GEMMs."""
    specs = weight_specs(config.without_draft_head())
    others, experts = weight_sums(specs)
    head = torch.Size(specs["head.weight"].shape).numel()
    share = config.num_experts_per_tok / config.n_routed_experts
    read = 4 * (others + experts * min(1.0, tokens * share))
    operations = 2 * (tokens * (others - head + experts * share) + sequences * head)
    bandwidth, rate = machine_rates()
    return 1e3 * max(read / bandwidth, operations / rate)


# --- Reporting ----------------------------------------------------------------------------------


def report(
    what: str, times: Times, tokens_a_step: int, floor: float, console: Console
) -> dict[str, Any]:
    """Print a table of one measurement, and return its part of the record."""
    base = summary(next(v for name, v in times.items() if name.startswith("transformers")))
    rows, cells = [], []
    for name, values in times.items():
        line = summary(values)
        rate = tokens_a_step / line["median"] * 1e3
        speedup = {key: round(base[key] / line[key], 2) for key in ("median", "p10")}
        shown = (*(line[key] for key in ("median", "p10", "p90")), rate, *speedup.values())
        cells.append((name, *(f"{value:,.{int(value < 100)}f}" for value in shown)))
        rows.append(
            {"engine": name, "ms": line, "tokens_per_s": round(rate, 1), "speedup": speedup}
        )
    cells.append(("the machine's floor", f"{floor:,.2f}"))
    columns = ("", "ms", "p10", "p90", "tokens/s", "x", "x p10")
    caption = "medians; p10 is near the time on an idle machine"
    print_table(console, what, columns, cells, no_wrap=True, caption=caption)
    return {"what": what, "floor_ms": round(floor, 3), "engines": rows}


def same_share(tokens: dict[str, list[list[int]]], name: str, other: str) -> float:
    """The share of sequences in which two contenders chose all the same tokens."""
    same = [a == b for a, b in zip(tokens[name], tokens[other], strict=True)]
    return sum(same) / len(same)


def run(args: argparse.Namespace, console: Console) -> dict[str, Any]:
    """Run the benchmark; returns the record without its stamp."""
    checkpoint = Checkpoint.open(checkpoint_directory(args.path))
    config = DeepseekV4Config.from_dict(checkpoint.config)
    work = Workload(args.context, args.steps, args.rounds, args.prefill, config.vocab_size)
    longest = max(work.context + work.steps + 1, work.prefill + 1)
    if longest > config.max_position_embeddings:
        raise ResourceError(
            f"{longest} tokens are more than the model's {config.max_position_embeddings}: lower "
            "--context, --steps or --prefill"
        )
    _check_room(config, num_engines=4 if args.compile else 2)
    with tempfile.TemporaryDirectory(prefix="finwhale-cpu-") as directory:
        write_plain_twin(checkpoint, Path(directory) / "plain")
        model = load_transformers(Path(directory) / "plain")
    prompts = max(args.batches), longest
    modes: tuple[Activations, ...] = ("exact", "as-trained")
    eager = [Finwhale(checkpoint.path, mode, prompts) for mode in modes]
    compiled = [Finwhale(checkpoint.path, mode, prompts, True) for mode in modes if args.compile]
    exact = eager[0].name
    results = []
    for batch in args.batches:
        best = fastest_transformers(model, work, batch)
        times, tokens = measure_decode([best, *eager, *compiled], work, batch)
        what = f"decode, batch {batch}, context {work.context}"
        result = report(what, times, batch, floor_ms(config, batch, batch), console)
        result["same_tokens"] = same_share(tokens, exact, best.name)
        console.print(f"the same {work.steps + 1} tokens: {result['same_tokens']:.0%} of sequences")
        if compiled:
            result["same_tokens_compiled"] = same_share(tokens, compiled[0].name, exact)
        results.append(result)
    if work.prefill:
        best = Transformers(model, "eager", torch.get_num_threads())
        times = measure_prefill([best, *eager], work)
        floor = floor_ms(config, work.prefill, 1)
        results.append(
            report(f"prefill, {work.prefill} tokens", times, work.prefill, floor, console)
        )
    return {
        "model": checkpoint.path.name,
        "threads": torch.get_num_threads(),
        "rounds": work.rounds,
        "steps": work.steps,
        "results": results,
    }


def _check_room(config: DeepseekV4Config, num_engines: int) -> None:
    """Checks, before anything is written, that memory and disk suffice. Raises ResourceError."""
    twin = weight_bytes(config, torch.float32, load_ops(Platform.cpu()))
    check_host_memory((1 + num_engines) * twin)  # transformers' model and Finwhale's
    remedy = "set TMPDIR to a folder on a larger disk"
    check_disk(Path(tempfile.gettempdir()), twin, "the model in float32", remedy)


def main(argv: Sequence[str]) -> int:
    """Run `finwhale bench cpu`. Returns 1 if the engines chose different tokens, otherwise 0."""
    parser = _parser()
    args = parser.parse_args(argv)
    if args.steps < TURN:
        parser.error(f"--steps must be at least {TURN}")
    if args.threads:
        torch.set_num_threads(args.threads)
    record = stamp("cpu", argv, ("torch", "transformers"))
    record |= run(args, new_console(100))
    keep_record(args.record, record)
    return 0 if all(r.get("same_tokens", 1) == 1 for r in record["results"]) else 1


def _parser() -> argparse.ArgumentParser:
    parser = new_parser("cpu", __doc__, "cpu.jsonl")
    add = parser.add_argument
    about = "directory of a checkpoint (default: the embedded model)"
    add("path", nargs="?", type=Path, metavar="PATH", help=about)
    add("--context", type=_count, default=300, help="length of a prompt")
    add("--steps", type=_count, default=64, help="number of tokens to decode in each round")
    add("--rounds", type=_count, default=5, help="number of rounds")
    add("--prefill", type=int, default=2048, help="number of tokens to prefill; 0 skips it")
    add("--compile", action="store_true", help="measure decode in the compiled mode too")
    add("--batches", type=_count, nargs="+", default=list(BATCHES), help="batch sizes of decode")
    add("--threads", type=_count, help="number of torch threads (default: torch's choice)")
    return parser


def _count(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, got {text}")
    return value

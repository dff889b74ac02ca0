"""Compare CPU decode and prefill with transformers' DeepSeek-V4: same weights, same run.

    python tools/compare_transformers.py [--record bench/results/cpu.jsonl]

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
from functools import partial
from pathlib import Path
from typing import Any

import torch

from finwhale.bench.arguments import new_parser
from finwhale.bench.engine import begin
from finwhale.bench.floors import weight_sums
from finwhale.bench.record import keep_record, stamp, summary
from finwhale.bench.timing import seconds_of
from finwhale.checkpoint.location import checkpoint_directory
from finwhale.checkpoint.reader import Checkpoint
from finwhale.checkpoint.spec import Storage
from finwhale.checkpoint.stored import StoredWeight
from finwhale.checkpoint.writer import write_stored
from finwhale.cli.bench import run_tool
from finwhale.config import Activations
from finwhale.engine.ranks.memory_checks import check_disk, check_host_memory
from finwhale.errors import ResourceError
from finwhale.llm import LLM
from finwhale.models.deepseek_v4.architecture import weight_bytes
from finwhale.models.deepseek_v4.config import DeepseekV4Config
from finwhale.models.deepseek_v4.config_json import config_of
from finwhale.models.deepseek_v4.weights import ignored_prefixes, weight_specs
from finwhale.ops import load_ops
from finwhale.platform import Platform
from finwhale.weights.source import WeightSource

COMMAND = "python tools/compare_transformers.py"
BATCHES = (1, 8)
TURN = 8  # decode steps that one contender runs before the next one's turn
QUANTISED = ("quantization_config", "expert_dtype")  # fields that an unquantised model lacks
EXPERTS = ("grouped_mm", "batched_mm", "eager")  # transformers' ways to run experts

Prompts = list[list[int]]
# The name of a contender, and how many milliseconds each of its steps took.
Times = dict[str, list[float]]


class Finwhale:
    """Finwhale's engine in float32. `begin` prefills prompts; each step adds a token to all.
    `prompts` is the largest number of prompts, and their largest number of tokens.
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
        engine = self._llm._engine
        self._requests = [begin(engine, prompt, steps + 1) for prompt in prompts]
        engine.step()
        assert all(request.outputs[0].token_ids for request in self._requests), "a request waits"

    def step(self) -> None:
        self._llm._engine.step()

    def finish(self) -> list[list[int]]:
        for request in self._requests:
            self._llm._engine.abort(request.request_id)
        return [request.outputs[0].token_ids for request in self._requests]


class Transformers:
    """transformers in float32 with its own cache; `experts` is one of EXPERTS."""

    def __init__(self, model: Any, experts: str, threads: int) -> None:
        self.name = f"transformers {experts} {threads} thread{'s' if threads > 1 else ''}"
        self._model = model
        self._experts = experts
        self._threads = threads

    @torch.inference_mode()
    def begin(self, prompts: Prompts, steps: int) -> None:
        self._cache: Any = None
        self._tokens = torch.tensor(prompts)
        self._chosen: list[list[list[int]]] = []
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
    transformers: Any = importlib.import_module("transformers")
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    return transformers.AutoModelForCausalLM.from_pretrained(
        path, dtype=torch.float32, attn_implementation="eager"
    )


def write_plain_twin(checkpoint: Checkpoint, path: Path) -> None:
    """Write a copy of a checkpoint with its weights dequantised to float32, for transformers."""
    config = config_of(checkpoint.config)
    source = WeightSource(checkpoint, weight_specs(config), ignored=ignored_prefixes(config))
    plain = {k: v for k, v in checkpoint.config.items() if k not in QUANTISED}
    plain["torch_dtype"] = "float32"

    def dequantised(stored: StoredWeight) -> StoredWeight:
        storage: Storage = "i64" if stored.storage == "i64" else "f32"
        return StoredWeight(stored.dequantise(torch.float32), None, storage)

    write_stored(path, plain, ((spec, dequantised(stored)) for spec, stored in source))


# --- Measuring ----------------------------------------------------------------------------------


def random_prompts(vocab_size: int, batch: int, length: int, round_: int) -> Prompts:
    """The prompts of a round, which have `length` tokens each."""
    generator = torch.Generator().manual_seed(1000 * batch + round_)
    prompts: Prompts = torch.randint(2, vocab_size, (batch, length), generator=generator).tolist()
    return prompts


Contender = Finwhale | Transformers


def measure_decode(
    contenders: Sequence[Contender], vocab_size: int, batch: int, args: argparse.Namespace
) -> tuple[Times, dict[str, list[list[int]]]]:
    """Measure decode steps; returns the milliseconds of each step and the tokens, by contender."""
    times: Times = {c.name: [] for c in contenders}
    tokens: dict[str, list[list[int]]] = {c.name: [] for c in contenders}
    for round_ in range(args.rounds):
        prompts = random_prompts(vocab_size, batch, args.context, round_)
        order = random.Random(round_).sample(contenders, len(contenders))
        for contender in order:
            contender.begin(prompts, args.steps)
        for _ in range(args.steps // TURN):
            for contender in order:
                contender.step()  # The others' turns have displaced its data from the CPU caches.
                steps = (1e3 * seconds_of(contender.step) for _ in range(TURN - 1))
                times[contender.name] += steps
        for contender in order:
            tokens[contender.name] += contender.finish()
    return times, tokens


def measure_prefill(
    contenders: Sequence[Contender], vocab_size: int, args: argparse.Namespace
) -> Times:
    """Measure the milliseconds to the first token of a prompt of --prefill tokens, by contender."""
    times: Times = {c.name: [] for c in contenders}
    for round_ in range(args.rounds):
        prompts = random_prompts(vocab_size, 1, args.prefill, round_)
        for contender in random.Random(round_).sample(contenders, len(contenders)):
            prefill = partial(contender.begin, prompts, 0)
            times[contender.name].append(1e3 * seconds_of(prefill))
            contender.finish()
    return times


def fastest_transformers(model: Any, vocab_size: int, batch: int, context: int) -> Transformers:
    """Choose the way to run experts and the number of threads that decode fastest here."""
    short = argparse.Namespace(context=context, steps=3 * TURN, rounds=1)
    threads = sorted({1, torch.get_num_threads()})
    candidates = [Transformers(model, experts, n) for experts in EXPERTS for n in threads]
    times, _ = measure_decode(candidates, vocab_size, batch, short)
    return min(candidates, key=lambda c: summary(times[c.name])["p10"])


def machine_rates() -> tuple[float, float]:
    """Measure this machine: bytes per second of a sum, float32 operations per second of a GEMM."""
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


def result_of(what: str, times: Times, tokens_a_step: int, floor: float) -> dict[str, Any]:
    """The part of the record about one measurement."""
    base = summary(next(v for name, v in times.items() if name.startswith("transformers")))
    engines = []
    for name, values in times.items():
        line = summary(values)
        rate = round(tokens_a_step / line["median"] * 1e3, 1)
        speedup = {key: round(base[key] / line[key], 2) for key in ("median", "p10")}
        engines.append({"engine": name, "ms": line, "tokens_per_s": rate, "speedup": speedup})
    return {"what": what, "floor_ms": round(floor, 3), "engines": engines}


def same_share(tokens: dict[str, list[list[int]]], name: str, other: str) -> float:
    """The share of sequences in which two contenders chose all the same tokens."""
    same = [a == b for a, b in zip(tokens[name], tokens[other], strict=True)]
    return sum(same) / len(same)


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Run the benchmark; returns the record without its stamp."""
    checkpoint = Checkpoint.open(checkpoint_directory(args.path))
    config = config_of(checkpoint.config)
    vocab_size = config.vocab_size
    longest = max(args.context + args.steps + 1, args.prefill + 1)
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
        best = fastest_transformers(model, vocab_size, batch, args.context)
        times, tokens = measure_decode([best, *eager, *compiled], vocab_size, batch, args)
        what = f"decode, batch {batch}, context {args.context}"
        result = result_of(what, times, batch, floor_ms(config, batch, batch))
        result["same_tokens"] = same_share(tokens, exact, best.name)
        if compiled:
            result["same_tokens_compiled"] = same_share(tokens, compiled[0].name, exact)
        results.append(result)
    if args.prefill:
        best = Transformers(model, "eager", torch.get_num_threads())
        times = measure_prefill([best, *eager], vocab_size, args)
        floor = floor_ms(config, args.prefill, 1)
        what = f"prefill, {args.prefill} tokens"
        results.append(result_of(what, times, args.prefill, floor))
    return {
        "model": checkpoint.path.name,
        "threads": torch.get_num_threads(),
        "rounds": args.rounds,
        "steps": args.steps,
        "results": results,
    }


def _check_room(config: DeepseekV4Config, num_engines: int) -> None:
    """Checks, before anything is written, that memory and disk suffice. Raises ResourceError."""
    twin = weight_bytes(config, torch.float32, load_ops(Platform.cpu()))
    check_host_memory((1 + num_engines) * twin)  # transformers' model and Finwhale's
    remedy = "set TMPDIR to a folder on a larger disk"
    check_disk(tempfile.gettempdir(), twin, "the weights in float32", remedy)


def main(argv: Sequence[str]) -> int:
    """Compare both. Returns 1 if they chose different tokens, otherwise 0."""
    parser = _parser()
    args = parser.parse_args(argv)
    if args.steps < TURN:
        parser.error(f"--steps must be at least {TURN}")
    if min(args.context, args.rounds, *args.batches, args.threads) < 1:
        parser.error("--context, --rounds, --batches and --threads must be at least 1")
    torch.set_num_threads(args.threads)
    record = stamp("cpu", argv, ("torch", "transformers"), COMMAND) | run(args)
    keep_record(args.record, record)
    return 0 if all(r.get("same_tokens", 1) == 1 for r in record["results"]) else 1


def _parser() -> argparse.ArgumentParser:
    parser = new_parser("cpu", __doc__, "cpu.jsonl", COMMAND)
    add = parser.add_argument
    about = "directory of a checkpoint (default: the embedded model)"
    add("path", nargs="?", type=Path, metavar="PATH", help=about)
    add("--context", type=int, default=300, help="length of a prompt")
    add("--steps", type=int, default=64, help="number of tokens to decode in each round")
    add("--rounds", type=int, default=5, help="number of rounds")
    add("--prefill", type=int, default=2048, help="number of tokens to prefill; 0 skips it")
    add("--compile", action="store_true", help="measure decode in the compiled mode too")
    add("--batches", type=int, nargs="+", default=list(BATCHES), help="batch sizes of decode")
    about = "number of torch threads (default: torch's choice)"
    add("--threads", type=int, default=torch.get_num_threads(), help=about)
    return parser


if __name__ == "__main__":
    run_tool(main)

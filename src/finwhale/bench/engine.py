"""Opens the engine that a benchmark measures, runs it, and describes it in the record."""

import argparse
import secrets
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import torch

from finwhale.chat.tokenizer import Tokenizer
from finwhale.checkpoint.location import checkpoint_directory
from finwhale.checkpoint.reader import Checkpoint
from finwhale.collection import freeze_heap
from finwhale.config import EngineConfig
from finwhale.engine.loop.engine import Engine
from finwhale.engine.loop.opening import start_engine
from finwhale.engine.plan.executor import Executor
from finwhale.engine.ranks.local_executor import LocalExecutor
from finwhale.engine.ranks.ranks import Ranks, first_rank
from finwhale.engine.start.capture import new_verification_steps
from finwhale.engine.steps.draft_decode import VerificationSteps
from finwhale.engine.steps.step_limits import step_limits
from finwhale.errors import FinwhaleError
from finwhale.models.registry import parse_config, published_config
from finwhale.models.weight_sources import Weights
from finwhale.options import read_options
from finwhale.request import RequestOutput, SamplingParams

T = TypeVar("T")


def source(args: argparse.Namespace, *, draft_head: bool = False) -> tuple[Any, Weights]:
    """The configuration and the weights that the arguments of `add_model_arguments` name.
    Raises FinwhaleError if they name none.

    Args:
        draft_head: include the draft head in a model of random weights.
    """
    if args.model is not None:
        checkpoint = Checkpoint.open(checkpoint_directory(args.model))
        config: Any = parse_config(checkpoint.config)
        return config, Weights(config, checkpoint)
    if not args.dummy:
        raise FinwhaleError("give --dummy for random weights, or --model PATH for a checkpoint")
    config = published_config(args.config)
    if not draft_head:
        config = config.without_draft_head()
    if args.layers is not None:
        config = config.with_layers(args.layers)
    return config, Weights(config)


def open_engine(
    args: argparse.Namespace, longest: int, tokenizer: Tokenizer | None = None, **options: Any
) -> tuple[Engine, float]:
    """Open an engine for the model and with the options of the arguments; returns it and the
    seconds of its start.

    Args:
        longest: maximum number of tokens of a sequence, unless the model's context is shorter.
        options: options that the benchmark sets.
    """
    config, weights = source(args)
    options["max_model_len"] = min(longest, config.max_position_embeddings)
    start = time.perf_counter()
    engine = start_engine(read_options(args, EngineConfig, **options), config, weights, tokenizer)
    took = round(time.perf_counter() - start, 1)
    freeze_heap()  # as finwhale serve does
    return engine, took


def begin(engine: Engine, prompt: list[int], max_tokens: int = 10**6) -> RequestOutput:
    """Add a greedy request whose output has `max_tokens` tokens."""
    params = SamplingParams(max_tokens=max_tokens, temperature=0, ignore_eos=True)
    return engine.add_request(f"bench-{secrets.token_hex(8)}", prompt, params)


def begin_decodes(
    engine: Engine, prompts: Sequence[list[int]], max_tokens: int = 10**6
) -> list[RequestOutput]:
    """Begin a request for each prompt, and step until all of them decode. Raises FinwhaleError if a
    request ended before all prompts were prefilled.
    """
    longest = max(map(len, prompts))
    if longest > engine.sizes.num_tokens:
        # While sequences decode, a prompt that is longer than a step gets a small part of it. So
        # the first sequences would generate many tokens before the last prompt is prefilled.
        for prompt in prompts:
            prefill(engine, prompt)
    results = [begin(engine, prompt, max_tokens) for prompt in prompts]
    while not all(result.outputs[0].token_ids for result in results):
        if any(output.finished for output in engine.step()):
            raise FinwhaleError(
                f"a request ended before {len(prompts)} prompts of {longest} tokens were "
                "prefilled: use a smaller batch or context, and leave the prefix cache on"
            )
    return results


def prefill(engine: Engine, prompt: list[int]) -> None:
    """Run a request for one token to its end."""
    begin(engine, prompt, 1)
    while engine.has_work:
        engine.step()


def timed_steps(engine: Engine) -> Iterator[float]:
    """Run steps without end; yields the milliseconds of each.

    A call of `step` returns the tokens of the previous step while the next one is in flight. So a
    step takes the time between two returns, not the time of a call.
    """
    last = time.perf_counter()
    while True:
        engine.step()
        now = time.perf_counter()
        yield 1e3 * (now - last)
        last = now


def call_ranks_collectively(executor: Executor, work: Callable[[LocalExecutor], T]) -> list[T]:
    """Call `work` on every rank at once, with the rank's executor; returns the ranks' results.

    `work` may use collectives, unlike that of Executor.call_ranks. So if it raises on one rank, the
    others might wait for that rank forever, and the engine dies.

    Args:
        work: makes the same collective calls on all ranks; picklable, as is its result.
    """
    if isinstance(executor, Ranks):
        return executor.call_ranks_collectively(work)
    return executor.call_ranks(work)


def draft_on_device(executor: LocalExecutor, config: EngineConfig) -> VerificationSteps:
    """Run drafting decodes as on a GPU, launched by the host."""
    runner, sizes = executor.runner, executor.description.sizes
    can_capture = runner.ops.capabilities.captures_steps
    largest = step_limits(config, sizes, runner.model.config, can_capture, runner.max_model_len)
    steps = runner.verification_steps = new_verification_steps(runner, largest, None)
    executor.description = replace(executor.description, device_drafts=steps.description)
    return steps


def measured(args: argparse.Namespace, engine: Engine) -> dict[str, Any]:
    """The fields of a record that describe the model: its name, layers and number of ranks."""
    config: Any = engine.model_config
    rank = first_rank(engine.executor).collectives.rank
    return {
        "config": args.model or args.config,
        "layers": config.num_hidden_layers,
        "tensor_parallel_size": 1 if rank.data_parallel else rank.size,
        "data_parallel_size": rank.size if rank.data_parallel else 1,
    }


def memory(engine: Engine) -> dict[str, float]:
    """GiB on a GPU: of the cache, reserved by torch, and the peak that torch has allocated."""
    if not engine.executor.description.device.startswith("cuda"):
        return {}
    gib = 2.0**30
    return {
        "cache_gib": round(engine.memory.cache / gib, 2),
        "reserved_gib": round(torch.cuda.memory_reserved() / gib, 2),
        "peak_allocated_gib": round(torch.cuda.max_memory_allocated() / gib, 2),
    }

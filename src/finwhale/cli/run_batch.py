"""`finwhale run-batch`: answer a file of requests in OpenAI's batch format."""

import argparse
import asyncio
import os
import sys
from collections.abc import Sequence
from contextlib import closing
from importlib import import_module
from pathlib import Path

from finwhale.checkpoint.config_files import described
from finwhale.cli.options import PATH_HELP, add_engine_options, add_revision
from finwhale.cli.serve import open_checkpoint, options_of_model
from finwhale.cli.settings import parse_settings
from finwhale.distributed.rank import Placement
from finwhale.errors import EngineDeadError, FinwhaleError
from finwhale.interrupts import terminated_as_interrupted
from finwhale.options import Parser, add_options, read_options
from finwhale.progress_bars import token_bar
from finwhale.server.api.app import create_app
from finwhale.server.batch.lines import ENVELOPE_BYTES, scan
from finwhale.server.batch.results import ResultFile
from finwhale.server.batch.runner import MAX_HELD_BYTES, BatchJob
from finwhale.server.batch.runner import run as run_lines
from finwhale.server.config import ServerConfig
from finwhale.server.edge.bodies import max_items
from finwhale.server.edge.room import Room
from finwhale.server.link.client import EngineClient
from finwhale.server.observe import logs
from finwhale.server.state import ServerState

OPTIONS = ("model_names", "default_thinking", "max_body_bytes", "max_choices", "lenient")
# Number of lines that are read and encoded while the engine is full.
AHEAD = 16
# Maximum size of a line before the length of the context is known.
SCAN_BYTES = 64 << 20


def run(argv: Sequence[str]) -> int:
    args = parse_settings(_parser(), argv)
    model = options_of_model(args, args.model)
    config = read_options(args, ServerConfig, **model, log_level="warning")
    placement = Placement.find(os.environ)
    logs.configure(config.log_level, config.log_format)
    if placement is not None and placement.rank.index:
        import_module("finwhale.distributed.hosts").work_at(placement)
    source, output = Path(args.input), Path(args.output)
    if not source.is_file():
        raise FinwhaleError(f"no input: {source} is not a file")
    if output.exists() and output.samefile(source):
        raise FinwhaleError(f"{output} is the input: give another file for the results")
    with closing(ResultFile(output)) as results:
        found = scan(source, SCAN_BYTES, max_items(1 << 20), shares_cpu=False)
        if found.duplicate is not None:
            first, second = found.duplicate
            raise FinwhaleError(
                f"{source}: lines {first} and {second} have the same custom_id, so that nobody "
                "could tell their answers apart: give each line its own"
            )
        begun = output.with_name(f"{output.name}.begun")
        job = BatchJob(
            source, found, SCAN_BYTES, max_items(1 << 20), None, results, results, begun, 1
        )
        job.recover()
        earlier = job.counts.total()
        if earlier < found.num_lines:
            _answer(args, config, placement, job)
    counts = job.counts
    print(
        f"{source}: {found.num_lines} lines, {counts['completed']} answered, {counts['failed']} "
        f"with errors{f', {earlier} of them in earlier runs' if earlier else ''}",
        file=sys.stderr,
    )
    return 0


def _answer(
    args: argparse.Namespace, config: ServerConfig, placement: Placement | None, job: BatchJob
) -> None:
    """Opens the engine in a process of its own, and runs the lines that have no result."""
    tokenizer, dialect, load, defaults = open_checkpoint(args.model, args, config, placement)
    if defaults:
        print(described(defaults), file=sys.stderr)
    client = EngineClient.spawn(load)
    state = ServerState(config, client, tokenizer, dialect, defaults)
    state.only_batches = True
    try:
        with terminated_as_interrupted():
            asyncio.run(_run(state, job))
    except EngineDeadError as error:
        raise FinwhaleError(f"{error}; the same command continues") from error
    except OSError as error:
        raise FinwhaleError(f"cannot write {job.begun}: {error}") from error


async def _run(state: ServerState, job: BatchJob) -> None:
    app = create_app(state)
    await state.grammars.start()
    try:
        await state.client.start()
        job.max_bytes = state.max_body_bytes + ENVELOPE_BYTES
        job.max_items = max_items(state.max_model_len)
        job.in_flight = state.max_batch_sequences + AHEAD

        def read() -> tuple[int, int]:
            metrics = state.client.metrics
            tokens = 0 if metrics is None else metrics.output_tokens
            return job.counts.total(), tokens

        with token_bar("lines", job.scan.num_lines, read) as job.on_result:
            await run_lines(app, job, Room(lambda: MAX_HELD_BYTES))
    finally:
        await state.grammars.close()
        await state.client.close()


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="finwhale run-batch",
        description="Answer each line of INPUT, which is a request in OpenAI's batch format for "
        "/v1/chat/completions, /v1/completions or /v1/responses, as `finwhale serve` would. Each "
        "line gets one line in OUTPUT. If the command is stopped, the same command continues "
        "where it stopped.",
        epilog="The exit code is 0 if each line has a result, which may be an error.",
    )
    parser.add_argument("input", metavar="INPUT", help="file of requests, one JSON object a line")
    parser.add_argument("output", metavar="OUTPUT", help="file to which results are appended")
    parser.add_argument("--model", metavar="PATH", help=PATH_HELP)
    add_revision(parser)
    group = parser.add_argument_group("requests")
    add_options(group, ServerConfig, OPTIONS, default_thinking=None)
    add_engine_options(parser, watchdog_seconds=60.0)
    return parser

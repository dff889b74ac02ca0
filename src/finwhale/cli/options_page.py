"""Writes docs/options.md: `python -m finwhale.cli.options_page > docs/options.md`."""

from collections.abc import Callable

from finwhale.checkpoint.generation_config import SAMPLING as OF_CHECKPOINT
from finwhale.cli.options import SAMPLING
from finwhale.config import EngineConfig
from finwhale.options import Option, options_of
from finwhale.request import SamplingParams
from finwhale.server.config import ServerConfig

PAGE = """# Options

This page is for everyone who looks for an option.
`python -m finwhale.cli.options_page > docs/options.md` writes this page from the declarations of the options.

## Shell completion

`pip install 'finwhale[completion]'`, then write the script for your shell to where it looks for completions:

    finwhale completion bash > ~/.local/share/bash-completion/completions/finwhale
    finwhale completion fish > ~/.config/fish/completions/finwhale.fish
    finwhale completion zsh > DIRECTORY/_finwhale     # a DIRECTORY of $fpath

It completes commands, options, their values, files and directories. Write it again after an update of Finwhale.

## Chat in the terminal

`finwhale chat` edits lines as a shell does (where Python has readline), and keeps their history in `chat_history` in the
directory of `--cache-dir`, for the user alone. Ctrl-C ends an answer and keeps the conversation; a second one, or Ctrl-D, leaves.
`/system` replaces the system message, `/save FILE` writes the conversation as JSON, `/stats` shows the speed of the last
answer, and `/help` lists all commands.

## Engine

The commands `serve`, `run-batch`, `warmup`, `generate`, `chat` and `validate` have these options, and `LLM` has the arguments.
The default of `--watchdog-seconds` is 60 for `serve`, `run-batch` and `warmup`, that of `--max-num-seqs` is 1 for `generate` and `chat`.
By default, `validate` drafts as many tokens as the draft head can.

**For throughput.** The defaults let the tokens of running requests come steadily. If only the total counts, as in
batches, give `--max-num-batched-tokens 16384` and `--max-num-seqs 256`: prompts are read faster, and tokens of running
requests come at intervals of up to 0.3 s meanwhile ([figures](notes/2026-11-28-sizes-of-steps.md)). Where memory for
the cache is short, both cost some of it.

| command line | Python | meaning |
|---|---|---|
{engine}

## Server

`finwhale serve` also has these options. As with vLLM, the checkpoint's directory may be given as `--model PATH`, and
`--api-key KEY` (repeatable) gives a key on the command line, where other users of the machine can see it.

| command line | default | meaning |
|---|---|---|
{server}

## Sampling

These are the arguments of `SamplingParams`. `generate` and `chat` have options for {sampling_options}; they sample
with temperature 0.7 and top_p 0.95 by default. `generate` also has `--stop` and `--ignore-eos`.

If the checkpoint has a `generation_config.json`, its {checkpoint} hold
where a request leaves them out: over HTTP, on the command line and in `SamplingParams`. `serve` logs them at its start, and
`--generation-config none` ignores them. `serve --enable-rollout-endpoints`, `validate` and the benchmarks always ignore
them. Its end tokens (`eos_token_id`) are added to those of `config.json` in any case. Nothing else of the file is read:
`max_new_tokens` and `do_sample` have no effect.

| Python | meaning |
|---|---|
{sampling}
"""  # noqa: E501


def options_page() -> str:
    """The whole page."""
    return PAGE.format(
        engine=_rows(EngineConfig, _flag, _argument, _meaning),
        server=_rows(ServerConfig, _flag, _default, lambda one: one.help),
        sampling=_rows(SamplingParams, _argument, _meaning),
        sampling_options=", ".join(f"`--{name.replace('_', '-')}`" for name in SAMPLING),
        checkpoint=", ".join(f"`{name}`" for name in OF_CHECKPOINT),
    )


def _rows(config: type, *cells: Callable[[Option], str]) -> str:
    rows = ([cell(one).replace("|", "\\|") for cell in cells] for one in options_of(config))
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def _flag(one: Option) -> str:
    value = one.metavar or "|".join(one.words)
    flag = one.flag
    if one.kind is bool and one.default is not False and not flag.startswith("--no-"):
        flag = flag.replace("--", "--[no-]", 1)
    return f"`{flag} {value}`" if value else f"`{flag}`"


def _argument(one: Option) -> str:
    return f"`{one.name}={one.default!r}`"


def _default(one: Option) -> str:
    return one.unset or ("off" if one.kind is bool else f"{one.default}")


def _meaning(one: Option) -> str:
    if one.flag.startswith("--no-"):
        return f"False: {one.help}"
    told = one.unset and one.unset != "none" and one.optional
    return f"{one.help} (None: {one.unset})" if told else one.help


if __name__ == "__main__":
    print(options_page(), end="")

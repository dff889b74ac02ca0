"""`finwhale validate`: check that a checkpoint's weights behave as those of a trained model."""

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict, replace
from functools import partial

from rich.markup import escape

import finwhale
from finwhale.checkpoint.location import checkpoint_directory, is_demo
from finwhale.checkpoint.reader import Checkpoint
from finwhale.cli.options import add_engine_options, add_path, engine_config, load_model
from finwhale.cli.settings import parse_settings
from finwhale.errors import CheckpointError, FinwhaleError
from finwhale.models.registry import parse_config
from finwhale.options import Parser
from finwhale.printing import new_console, print_table
from finwhale.validation.chat import check_chat, check_drafts, check_recall
from finwhale.validation.expectations import Expectations, expectations_of
from finwhale.validation.language import check_language
from finwhale.validation.report import Check, attempt, skipped
from finwhale.validation.weights import check_weights

STYLES = {"ok": "green", "unusual": "yellow", "failed": "bold red", "skipped": "dim"}
# Tokens for the answer of the recall check, and for the chat format around its prompt.
RECALL_ROOM = 128
MIN_RECALL_TOKENS = 64
MIN_CONTEXT = 512  # room for the longest text, and for a question with tools
GSM8K = (
    "lm_eval --model local-chat-completions --tasks gsm8k --num_fewshot 8 --apply_chat_template "
    "--gen_kwargs max_gen_toks=8192 --model_args "
    "model={name},base_url=http://127.0.0.1:8000/v1/chat/completions,num_concurrent=32"
)


def run(argv: Sequence[str]) -> int:
    """Returns 1 if a check failed, otherwise 0."""
    args = parse_settings(_parser(), argv)
    config = engine_config(args)
    if config.load_format == "dummy":
        raise FinwhaleError("validate checks a checkpoint's own weights: omit --load-format dummy")
    if args.recall_tokens < MIN_RECALL_TOKENS:
        raise FinwhaleError(
            f"recall_tokens must be at least {MIN_RECALL_TOKENS}, got {args.recall_tokens}"
        )
    checkpoint = Checkpoint.open(checkpoint_directory(args.path, args.revision))
    if args.draft_tokens is None:
        most = parse_config(checkpoint.config).max_draft_tokens
        config = replace(config, draft_tokens=most)
    config = replace(config, generation_config="none")
    expectations = expectations_of(checkpoint.config)
    try:
        llm = load_model(checkpoint.path, config)
        checks = _check_model(llm, expectations, args.recall_tokens)
    except CheckpointError as error:
        checks = [Check("loading", str(error), "no error", "failed")]
    checks = [*check_weights(checkpoint), *checks]
    name = "finwhale-demo" if is_demo(args.path) else checkpoint.path.resolve().name
    command = GSM8K.format(name=name)
    if args.json:
        record = {
            "checkpoint": str(checkpoint.path),
            "model": expectations.model,
            "finwhale": finwhale.__version__,
            "checks": [asdict(check) for check in checks],
            "gsm8k_command": command,
        }
        print(json.dumps(record, indent=1, ensure_ascii=False))
    else:
        _print(checkpoint, expectations, checks, command)
    return int(any(check.verdict == "failed" for check in checks))


def _check_model(
    llm: "finwhale.LLM", expectations: Expectations, recall_tokens: int
) -> list[Check]:
    """All checks that run the model. Raises FinwhaleError if the context limit is too low."""
    if llm._engine.max_model_len < MIN_CONTEXT:
        raise FinwhaleError(
            f"validate needs room for {MIN_CONTEXT} tokens, and max_model_len is "
            f"{llm._engine.max_model_len}: raise it, or give the cache more memory"
        )
    if llm._engine.tokenizer is None:
        return [skipped("texts and chat", "the checkpoint has no tokenizer.json")]
    checks = attempt("perplexity", partial(check_language, llm, expectations))
    if not expectations.chats:
        return [*checks, skipped("chat, recall and drafts", "base checkpoints do not chat")]
    checks += attempt("chat", partial(check_chat, llm))
    if expectations.recalls:
        num_tokens = min(recall_tokens, llm._engine.max_model_len - RECALL_ROOM)
        checks += attempt("recall", partial(check_recall, llm, num_tokens))
    else:
        checks.append(skipped("recall", "this small model was not trained enough to recall"))
    name = "accepted drafts"
    if llm._engine.executor.description.can_draft:
        return checks + attempt(name, partial(check_drafts, llm, expectations))
    config = llm._engine.model_config
    reason = "--draft-tokens 0"
    if not config.max_draft_tokens:
        reason = f"the draft head is {config.draft_head or 'absent'}: there is none to check"
    return [*checks, skipped(name, reason)]


def _print(
    checkpoint: Checkpoint, expectations: Expectations, checks: Sequence[Check], command: str
) -> None:
    console = new_console(160)
    rows = []
    for check in checks:
        texts = map(escape, (check.name, check.found, check.expected))
        verdict = f"[{STYLES[check.verdict]}]{check.verdict}[/]"
        rows.append((*texts, verdict, escape(check.reason)))
    columns = ("check", "found", "expected", "verdict", "reason")
    title = f"{checkpoint.path} ({expectations.model})"
    print_table(console, title, columns, rows, num_texts=5)
    console.print(
        "For a score, start `finwhale serve PATH` and run this command; compare with the GSM8K "
        "score on the model card:",
        highlight=False,
    )
    console.print(command, highlight=False, soft_wrap=True)
    counts = {verdict: sum(check.verdict == verdict for check in checks) for verdict in STYLES}
    console.print(", ".join(f"{count} {verdict}" for verdict, count in counts.items()))


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="finwhale validate",
        description="Load a checkpoint and check that its weights behave as those of a trained "
        "model: perplexity of built-in texts, chat, tools, recall, drafts, and values that are "
        "not finite. The exit code is 1 if a check failed. Without --draft-tokens, the draft head "
        "drafts as many tokens as it can.",
    )
    add_path(parser)
    parser.add_argument("--json", action="store_true", help="print the report as JSON")
    about = "length of the recall check's prompt, at most the context limit (default: 16384)"
    parser.add_argument("--recall-tokens", type=int, default=16384, metavar="N", help=about)
    add_engine_options(parser, ("generation_config",), draft_tokens=None)
    return parser

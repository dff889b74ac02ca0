"""`finwhale chat`: a conversation of several turns in the terminal."""

import argparse
import sys
from collections.abc import Sequence
from typing import Any, TextIO

import finwhale
from finwhale.chat.template import ChatOptions, ChatTemplate
from finwhale.checkpoint.location import checkpoint_directory
from finwhale.cli.options import (
    DIM,
    PLAIN,
    add_model_options,
    add_sampling_options,
    engine_config,
    load_model,
)
from finwhale.cli.settings import parse_settings
from finwhale.errors import RequestError
from finwhale.options import Parser, read_options
from finwhale.request import SamplingParams

HELP = "/reset starts over, /think turns thinking on or off, /exit (or Ctrl-D) leaves."


def run(argv: Sequence[str]) -> int:
    args = parse_settings(_parser(), argv)
    params = read_options(args, SamplingParams)
    directory = checkpoint_directory(args.model, args.revision)
    llm = load_model(directory, engine_config(args))
    conversation = Conversation(llm, params, args.system, args.think)
    if sys.stdin.isatty():
        print(HELP, file=sys.stderr)
    failed = False
    while True:
        try:
            line = input("> " if sys.stdin.isatty() else "").strip()
        except EOFError:
            return int(failed)
        except UnicodeDecodeError as error:
            raise RequestError(
                f"standard input is not text in {error.encoding}: {error}"
            ) from error
        if line in ("/exit", "/quit"):
            return int(failed)
        if line == "/reset":
            conversation.reset()
        elif line == "/think":
            conversation.thinking = not conversation.thinking
            print(f"thinking {'on' if conversation.thinking else 'off'}", file=sys.stderr)
        elif line.startswith("/"):
            print(HELP, file=sys.stderr)
        elif line:
            try:
                conversation.answer(line, sys.stdout)
            except RequestError as error:
                failed = not sys.stdin.isatty()
                print(f"finwhale: error: {error} (/reset starts over)", file=sys.stderr)


class Conversation:
    """A chat: the messages so far, and the model that writes the next answer."""

    def __init__(
        self, llm: "finwhale.LLM", params: SamplingParams, system: str | None, thinking: bool
    ) -> None:
        self.llm = llm
        self.params = params
        self.system = system
        self.thinking = thinking
        self.template: ChatTemplate = llm.chat_template()
        self.reset()

    def reset(self) -> None:
        """Forgets everything but the system message."""
        self.messages: list[dict[str, Any]] = []
        if self.system is not None:
            self.messages.append({"role": "system", "content": self.system})

    def answer(self, text: str, out: TextIO) -> None:
        """Streams the answer to `text`. A failed or interrupted turn is not kept."""
        messages = [*self.messages, {"role": "user", "content": text}]
        prompt = self.template.render(messages, ChatOptions(thinking=self.thinking))
        parser = self.template.parser(prompt)
        reasoning = False
        fed = 0
        try:
            for result in self.llm.stream(prompt.token_ids, self.params):
                output = result.outputs[0]
                events = parser.feed(output.token_ids[fed:])
                fed = len(output.token_ids)
                if output.finish_reason is not None:
                    length = output.finish_reason == "length"
                    events = [*events, *parser.finish("length" if length else "stop")]
                for event in events:
                    if (event.kind == "reasoning") != reasoning:
                        reasoning = event.kind == "reasoning"
                        out.write((DIM if reasoning else PLAIN + "\n") if out.isatty() else "\n")
                    out.write(event.text)
                    out.flush()
                if result.error is not None:
                    raise RequestError(result.error)
        except KeyboardInterrupt:
            out.write(f"{PLAIN if out.isatty() else ''}\n(interrupted; this turn is not kept)\n")
            return
        out.write((PLAIN if reasoning and out.isatty() else "") + "\n")
        self.messages = [*messages, parser.message()]


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="finwhale chat",
        description="Talk to the model in the terminal.",
        epilog=HELP,
    )
    parser.add_argument("--system", metavar="TEXT", help="the system message")
    parser.add_argument("--think", action="store_true", help="let the model think before answering")
    add_sampling_options(parser, max_tokens=512)
    add_model_options(parser)
    return parser

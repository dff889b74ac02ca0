"""`finwhale chat`: a conversation of several turns in the terminal."""

import argparse
import importlib
import json
import os
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import Any, TextIO

import finwhale
from finwhale.chat.template import ChatTemplate
from finwhale.checkpoint.location import checkpoint_directory
from finwhale.cli import options
from finwhale.cli.settings import parse_settings
from finwhale.errors import RequestError
from finwhale.options import Parser
from finwhale.request import RequestOutput, SamplingParams

HELP = """commands:
  /system TEXT  replace the system message; without TEXT, show it
  /think        turn thinking on or off
  /reset        start over, with the system message
  /save FILE    write the conversation as JSON, which LLM.chat takes
  /stats        the speed of the last answer, and how much of the context is full
  /help         this list
  /exit         leave, as Ctrl-D does; Ctrl-C ends an answer, and leaves if pressed twice"""
LEAVE = ("/exit", "/quit")
HISTORY, HISTORY_LINES = "chat_history", 1000


def run(argv: Sequence[str]) -> int:
    args = parse_settings(_parser(), argv)
    directory, config = checkpoint_directory(args.model, args.revision), options.engine_config(args)
    llm = options.load_model(directory, config)
    conversation = Conversation(llm, options.sampling_params(args, llm), args.system, args.think)
    if not sys.stdin.isatty():
        return _answer_lines(conversation)
    device, length = llm._engine.executor.description.device, llm._engine.max_model_len
    print(
        f"{directory} on {device}, context of {length} tokens; /help lists the commands",
        file=sys.stderr,
    )
    assert config.cache_dir is not None
    with _history(Path(config.cache_dir) / HISTORY):
        _talk(conversation)
    return 0


def _answer_lines(conversation: "Conversation") -> int:
    """Answers each line of standard input, for a script. Returns 1 if one of them failed."""
    failed = False
    try:
        for line in map(str.strip, sys.stdin):
            if line in LEAVE:
                break
            failed |= not conversation.take(line, sys.stdout)
    except UnicodeDecodeError as error:
        raise RequestError(f"standard input is not text in {error.encoding}: {error}") from error
    return int(failed)


def _talk(conversation: "Conversation") -> None:
    """Answers a person, until Ctrl-D, /exit, or Ctrl-C twice, which raises KeyboardInterrupt."""
    while True:
        try:
            line = input("> ").strip()
            if line in LEAVE:
                return
            conversation.interrupted = False
            conversation.take(line, sys.stdout)
        except EOFError:
            print()
            return
        except UnicodeDecodeError:
            print("finwhale: error: the line is not text", file=sys.stderr)
        except KeyboardInterrupt:
            if conversation.interrupted:
                raise
            conversation.interrupted = True
            print("\n(Ctrl-C again, or Ctrl-D, leaves)", file=sys.stderr)


class Conversation:
    """A chat: the messages so far, and the model that writes the next answer.

    Attributes:
        last: the result of the last answer.
        interrupted: whether Ctrl-C was pressed since the last line.
    """

    def __init__(
        self, llm: "finwhale.LLM", params: SamplingParams, system: str | None, thinking: bool
    ) -> None:
        self.llm = llm
        self.params = params
        self.system = system
        self.thinking = thinking
        self.template: ChatTemplate = llm.chat_template()
        self.turns: list[dict[str, Any]] = []
        self.last: RequestOutput | None = None
        self.interrupted = False

    @property
    def messages(self) -> list[dict[str, Any]]:
        system = [] if self.system is None else [{"role": "system", "content": self.system}]
        return [*system, *self.turns]

    def take(self, line: str, out: TextIO) -> bool:
        """Carries out a command, or answers a line. Returns whether that succeeded."""
        command, _, text = line.partition(" ")
        try:
            if line.startswith("/"):
                print(self._carry_out(command, text.strip()), file=sys.stderr)
            elif line:
                self.answer(line, out)
        except (RequestError, OSError) as error:
            print(f"finwhale: error: {error} (/reset starts over)", file=sys.stderr)
            return False
        return True

    def _carry_out(self, command: str, text: str) -> str:
        """Returns what to show. Raises OSError: the file of /save cannot be written."""
        if command == "/system":
            self.system = text or self.system
            return f"system message: {self.system or 'none'}"
        if command == "/think":
            self.thinking = not self.thinking
            return f"thinking {'on' if self.thinking else 'off'}"
        if command == "/reset":
            self.turns = []
            return "started over"
        if command == "/save" and text:
            saved = json.dumps(self.messages, ensure_ascii=False, indent=1)
            Path(text).expanduser().write_text(saved + "\n", encoding="utf-8")
            return f"{len(self.messages)} messages are in {text}"
        if command == "/stats":
            if self.last is None:
                return "no answer yet"
            used = len(self.last.prompt_token_ids) + len(self.last.outputs[0].token_ids)
            length = self.llm._engine.max_model_len
            return f"{options.speed(self.last)}; {used} of the context's {length} tokens are used"
        return HELP

    def answer(self, text: str, out: TextIO) -> None:
        """Streams the answer to `text`. A turn that failed is not kept.

        Ctrl-C ends the answer, which is kept as it is; a second one raises KeyboardInterrupt.
        """
        messages = [*self.messages, {"role": "user", "content": text}]
        prompt = self.template.render(messages, thinking=self.thinking)
        parser = self.template.parser(prompt)
        reasoning = False
        fed = 0
        with self._interruptible():
            for result in self.llm.stream(prompt.token_ids, self.params):
                output = result.outputs[0]
                events = parser.feed(output.token_ids[fed:])
                fed = len(output.token_ids)
                ended = output.finish_reason is not None or self.interrupted
                if ended:
                    stop = output.finish_reason == "stop"
                    events = [*events, *parser.finish("stop" if stop else "length")]
                for event in events:
                    if (event.kind == "reasoning") != reasoning:
                        reasoning = event.kind == "reasoning"
                        style = options.DIM if reasoning else f"{options.PLAIN}\n"
                        out.write(style if out.isatty() else "\n")
                    out.write(event.text)
                    out.flush()
                if result.error is not None:
                    raise RequestError(result.error)
                if ended:
                    break
        out.write((options.PLAIN if reasoning and out.isatty() else "") + "\n")
        if self.interrupted:
            print("(interrupted; Ctrl-C again leaves)", file=sys.stderr)
        self.last = result
        self.turns = [*self.turns, messages[-1], parser.message()]

    @contextmanager
    def _interruptible(self) -> Iterator[None]:
        """Let Ctrl-C set `interrupted`, because an exception within a step would end an engine on
        several GPUs. A second Ctrl-C raises KeyboardInterrupt.
        """

        def interrupt(number: int, frame: FrameType | None) -> None:
            if self.interrupted or not sys.stdin.isatty():
                raise KeyboardInterrupt
            self.interrupted = True

        before = signal.signal(signal.SIGINT, interrupt)
        try:
            yield
        finally:
            signal.signal(signal.SIGINT, before)


@contextmanager
def _history(path: Path) -> Iterator[None]:
    """Let `input` edit lines, and recall those of earlier sessions, which only the user can read.

    Python has no readline on some systems, and a history that cannot be kept is no error.
    """
    try:
        readline = importlib.import_module("readline")
    except ImportError:
        yield
        return
    readline.set_history_length(HISTORY_LINES)
    with suppress(OSError):
        readline.read_history_file(path)
    try:
        yield
    finally:
        with suppress(OSError):
            path.parent.mkdir(parents=True, exist_ok=True)
            os.close(os.open(path, os.O_CREAT | os.O_WRONLY, 0o600))
            readline.write_history_file(path)


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="finwhale chat",
        description="Talk to the model in the terminal. Lines can be edited; the cache directory "
        f"keeps their history, in {HISTORY}.",
        epilog=HELP,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--system", metavar="TEXT", help="the system message")
    parser.add_argument("--think", action="store_true", help="let the model think before answering")
    options.add_sampling_options(parser, max_tokens=512)
    options.add_model_options(parser)
    return parser

"""The blocks of README and of docs: what a reader types, saves or sees."""

import re
from dataclasses import dataclass

# Pages of docs whose commands tests/long/test_first_hour.py runs with the embedded model.
RUNNABLE = ("batches", "benchmarks", "drafting", "options", "validating")
FENCE = re.compile(r'^```(\w+)(?: title="([^"]*)")?$')
MARK = re.compile(r"^<!-- (not run: .+|run by .+) -->$")
# The first word of a command, after variables that are set for it alone.
COMMAND = re.compile(
    r"(?:\w+=\S+ )*(?:\S*/)?(?:finwhale|pip|python3?|pytest|just|\.|export|echo|printf|cd|cp|mkdir"
    r"|sed|git|docker|kubectl|helm|systemctl|curl|npm|npx|claude|codex|opencode|torchrun|ray"
    r"|guidellm|vllm-router|lm_eval|compute-sanitizer)\s"
)


@dataclass(frozen=True)
class Block:
    """`language` is "bash" for an indented block of commands; `mark` says who runs the block."""

    language: str
    title: str
    text: str
    mark: str


def blocks(document: str) -> list[Block]:
    """Fences, and indented blocks that begin with a command."""
    found: list[Block] = []
    mark, before, lines = "", "", iter([*document.splitlines(), ""])
    for line in lines:
        if fence := FENCE.match(line):
            text = "".join(f"{line}\n" for line in iter(lambda: next(lines), "```"))
            found.append(Block(fence[1], fence[2] or "", text, mark))
        elif line.startswith("    ") and (not before or before.startswith("<!-- ")):
            text = ""
            while line.startswith("    "):
                text, line = f"{text}{line[4:]}\n", next(lines)
            if COMMAND.match(text):
                found.append(Block("bash", "", text, mark))
        before = line
        if line:
            mark = found_mark[1] if (found_mark := MARK.match(line)) else ""
    return found


def part(document: str, marker: str) -> str:
    """A part of README that a page of docs includes."""
    return document.partition(f"--8<-- [start:{marker}]")[2].partition(f"--8<-- [end:{marker}]")[0]

"""Shells complete finwhale's commands: each installed shell is asked."""

import os
import pty
import select
import shutil
import subprocess
import time
from pathlib import Path

import pytest
import shtab

from finwhale.cli.completion import SHELLS, whole_parser
from finwhale.cli.main import COMMANDS

# For each typed text: words that the shell must offer, and words that it must not.
CASES = {
    "finwhale ": (set(COMMANDS), {"ops.py"}),
    "finwhale ser": ({"serve"}, {"chat"}),
    "finwhale run-b": ({"run-batch"}, {"serve"}),
    "finwhale serve --max-nu": ({"--max-num-seqs", "--max-num-batched-tokens"}, {"--seed"}),
    "finwhale generate --se": ({"--seed"}, {"--served-model-name"}),
    "finwhale serve --dtype ": ({"float32", "bfloat16"}, {"serve"}),
    "finwhale bench off": ({"offline"}, {"start"}),
    "finwhale bench offline --dr": ({"--draft-tokens"}, {"--steps"}),
    "finwhale serve --batch-dir che": ({"checkpoints/"}, {"checked.txt"}),
    "finwhale completion f": ({"fish"}, {"bash"}),
}


@pytest.fixture(scope="module")
def scripts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a script for each shell."""
    directory = tmp_path_factory.mktemp("scripts")
    parser = whole_parser()
    for shell in SHELLS:
        (directory / shell).write_text(shtab.complete(parser, shell))
    (directory / "checkpoints").mkdir()
    (directory / "checked.txt").touch()
    return directory


def asked(shell: str, typed: str, directory: Path) -> set[str]:
    if shutil.which(shell) is None:
        pytest.skip(f"{shell} is not installed")
    if shell == "zsh":
        return in_terminal(typed, directory)
    if shell == "fish":
        command = f"source ./fish; complete -C '{typed}'"
    else:
        # bash runs this when a user presses Tab.
        words = typed.split(" ")
        quoted = " ".join(f"'{word}'" for word in words)
        command = (
            f"source ./bash; COMP_WORDS=({quoted}); COMP_CWORD={len(words) - 1}; "
            "function=$(complete -p finwhale | sed 's/.*-F \\([^ ]*\\).*/\\1/'); "
            f"$function finwhale '{words[-1]}' '{words[-2]}'; "
            'for one in "${COMPREPLY[@]}"; do [ -d "$one" ] && one=$one/; echo "$one"; done'
        )
    ran = subprocess.run(
        [shell, "-c", command], cwd=directory, capture_output=True, text=True, timeout=200
    )
    return {text.split("\t")[0].strip() for text in ran.stdout.splitlines()}


def in_terminal(typed: str, directory: Path) -> set[str]:
    """The words on zsh's screen after Tab."""
    pid, end = pty.fork()
    if pid == 0:
        os.chdir(directory)
        os.execvpe("zsh", ["zsh", "-f", "-i"], {**os.environ, "TERM": "dumb", "COLUMNS": "200"})
    setup = (
        "unset zle_bracketed_paste; PS1='> '; setopt nobeep; autoload -U compinit; compinit -u -D; "
        "cp zsh _finwhale; fpath=($PWD $fpath); autoload -U _finwhale; compdef _finwhale finwhale; "
        "LISTMAX=1000; echo rea''dy\n"
    )
    try:
        os.write(end, setup.encode())
        read_until(end, {"ready"})
        os.write(end, f"{typed}\t\t".encode())
        found = read_until(end, set(COMMANDS))
    finally:
        os.close(end)
        os.waitpid(pid, 0)
    return set(found.replace("\a", " ").split())


def read_until(end: int, words: set[str]) -> str:
    """Reads a terminal for at most two minutes, until it has shown all `words`."""
    shown, deadline = "", time.monotonic() + 120
    while time.monotonic() < deadline and not words <= set(shown.replace("\a", " ").split()):
        if select.select([end], [], [], 1)[0]:
            shown += os.read(end, 65536).decode(errors="replace")
    return shown


@pytest.mark.parametrize("shell", ["bash", "fish"])
@pytest.mark.parametrize("typed", CASES)
def test_a_shell_completes(shell: str, typed: str, scripts: Path) -> None:
    wanted, unwanted = CASES[typed]
    found = asked(shell, typed, scripts)
    assert wanted <= found, found
    assert not unwanted & found


def test_zsh_completes(scripts: Path) -> None:
    found = asked("zsh", "finwhale ", scripts)
    assert set(COMMANDS) <= found, found

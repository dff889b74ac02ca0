"""Commands that run an engine: what they print where, exit codes, interruptions."""

import contextlib
import io
import json
import os
import pty
import re
import select
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

import finwhale
from finwhale import LLM, SamplingParams
from finwhale.cli.bench import run_tool
from finwhale.cli.main import main
from finwhale.engine.steps.runner import ModelRunner
from tools import collectives

Capture = pytest.CaptureFixture[str]
TEXT = "The fin whale is"


@pytest.fixture
def command(tiny_path: Path, one_thread: None) -> Callable[..., list[str]]:
    """A command line on the tiny model."""

    def make(name: str, *args: object) -> list[str]:
        return [name, *map(str, args), "--model", str(tiny_path), "--device", "cpu"]

    return make


def give_stdin(monkeypatch: pytest.MonkeyPatch, data: str | bytes) -> None:
    raw = data.encode() if isinstance(data, str) else data
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(raw), encoding="utf-8"))


# --- generate -------------------------------------------------------------------------------------


def test_generate_prints_the_text_and_nothing_else(
    command: Callable[..., list[str]], llm: LLM, capsys: Capture
) -> None:
    options = ("--temperature", 0, "--max-tokens", 20, "--activations", "exact", "--ignore-eos")
    assert main(command("generate", TEXT, *options)) == 0
    captured = capsys.readouterr()
    params = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
    assert captured.out == llm.generate(TEXT, params)[0].outputs[0].text + "\n"
    assert captured.err == ""


def test_generate_from_stdin_with_stats(
    command: Callable[..., list[str]], capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = ("--seed", 3, "--max-tokens", 9, "--ignore-eos")
    assert main(command("generate", TEXT, *options)) == 0
    wanted = capsys.readouterr().out
    give_stdin(monkeypatch, TEXT)
    assert main(command("generate", "-", *options, "--stats")) == 0
    captured = capsys.readouterr()
    assert captured.out == wanted
    assert "tokens/s over 9 tokens" in captured.err


def test_generate_with_drafts(command: Callable[..., list[str]], capsys: Capture) -> None:
    options = ("--temperature", 0.8, "--seed", 1, "--max-tokens", 20, "--ignore-eos")
    texts = []
    for drafts in ("0", "2", "auto"):
        assert main(command("generate", TEXT, *options, "--draft-tokens", drafts)) == 0
        texts.append(capsys.readouterr().out)
    assert texts[1:] == texts[:1] * 2
    with pytest.raises(SystemExit):
        main(command("generate", TEXT, "--draft-tokens", "many"))
    assert 'expected a number or "auto"' in capsys.readouterr().err
    assert main(command("generate", TEXT, "--draft-tokens", "9")) != 0
    assert "draft_tokens must be 0 to 7" in capsys.readouterr().err


def test_generate_with_wo_a_s_input_not_rounded(
    command: Callable[..., list[str]], tiny_path: Path, capsys: Capture
) -> None:
    options = ("--temperature", 0, "--max-tokens", 60, "--ignore-eos")
    texts = []
    for value in ("fp8", "bf16"):
        assert main(command("generate", TEXT, *options, "--wo-a-input", value)) == 0
        texts.append(capsys.readouterr().out)
        params = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)
        own = LLM(tiny_path, device="cpu", wo_a_input=value)  # type: ignore[arg-type]
        assert texts[-1] == own.generate(TEXT, params)[0].outputs[0].text + "\n"
    assert texts[0] != texts[1]
    assert main(command("generate", TEXT, "--wo-a-input", "fp8", "--max-tokens", 1)) == 0
    both = ("--wo-a-input", "bf16", "--activations", "exact")
    assert main(command("generate", TEXT, *both)) != 0
    assert "means nothing with activations" in capsys.readouterr().err


def test_generate_stops_before_a_string(command: Callable[..., list[str]], capsys: Capture) -> None:
    options = ("--temperature", 0, "--max-tokens", 20, "--ignore-eos")
    assert main(command("generate", TEXT, *options)) == 0
    whole = capsys.readouterr().out
    stop = next(whole[i : i + 3] for i in range(4, 20) if "\ufffd" not in whole[i : i + 3])
    assert main(command("generate", TEXT, *options, "--stop", "never", "--stop", stop)) == 0
    assert capsys.readouterr().out == whole[: whole.index(stop)] + "\n"


@pytest.mark.parametrize(
    ("data", "wanted"),
    [
        (b"", "the prompt is empty"),
        (b"\xff\xfe", "standard input is not text in utf-8"),
        (b"whale " * 1000, "room for 512"),
    ],
)
def test_bad_stdin(
    command: Callable[..., list[str]],
    capsys: Capture,
    monkeypatch: pytest.MonkeyPatch,
    data: bytes,
    wanted: str,
) -> None:
    give_stdin(monkeypatch, data)
    assert main(command("generate", "-")) == 1
    captured = capsys.readouterr()
    assert captured.err.startswith("finwhale: error: ") and captured.err.count("\n") == 1
    assert wanted in captured.err


def test_a_model_that_computes_nan(
    command: Callable[..., list[str]], capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    logits = ModelRunner.logits
    steps = 0

    def spoiled(self: ModelRunner, chunks: Any) -> torch.Tensor:
        nonlocal steps
        steps += 1
        return logits(self, chunks) * (1 if steps < 4 else torch.nan)

    monkeypatch.setattr(ModelRunner, "logits", spoiled)
    assert main(command("generate", TEXT, "--seed", 1, "--ignore-eos")) == 1
    captured = capsys.readouterr()
    assert captured.out.endswith("\n") and len(captured.out) > 1
    assert captured.err.startswith("finwhale: error: ") and captured.err.count("\n") == 1
    assert "not finite" in captured.err


# --- chat -----------------------------------------------------------------------------------------


def test_chat(
    command: Callable[..., list[str]],
    capsys: Capture,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    """Turns add up, /reset forgets, commands are no turns."""
    saved = tmp_path / "talk.json"
    seen: list[Sequence[int]] = []
    stream = LLM.stream

    def watched(self: LLM, prompt: Any, params: Any = None) -> Any:
        seen.append(prompt)
        return stream(self, prompt, params)

    monkeypatch.setattr(LLM, "stream", watched)
    lines = (
        "/stats|One||Two|/what|/think|/stats|/system|/reset|/system Be kind|Three"
        f"|/save {saved}|/save /no/such/place|/exit|never|"
    )
    give_stdin(monkeypatch, lines.replace("|", "\n"))
    assert main(command("chat", "--max-tokens", 4, "--system", "Be brief", "--seed", 1)) == 1
    captured = capsys.readouterr()
    assert "thinking on" in captured.err and "  /reset " in captured.err
    assert "no answer yet" in captured.err and "tokens/s over 4 tokens; " in captured.err
    assert "system message: Be brief" in captured.err and "Traceback" not in captured.err
    assert captured.err.count("finwhale: error: ") == 1 and "/no/such/place" in captured.err
    system, question, answer = json.loads(saved.read_text())
    assert (system["content"], question["content"]) == ("Be kind", "Three")
    assert answer["role"] == "assistant"
    llm_tokenizer = finwhale.LLM(command("chat")[2], device="cpu").get_tokenizer()
    prompts = [llm_tokenizer.decode(ids, skip_special=False) for ids in seen]
    assert len(prompts) == 3
    assert ["Be brief" in prompt for prompt in prompts] == [True, True, False]
    assert "Be kind" in prompts[2]
    assert "One" in prompts[1] and "Two" in prompts[1]
    assert "One" not in prompts[2] and "Three" in prompts[2]
    assert len(captured.out.rstrip("\n").splitlines()) >= 3


class Typist:
    """A command in a terminal, and somebody who types."""

    def __init__(self, *args: str, **environment: str) -> None:
        self.args = [sys.executable, "-m", "finwhale", *args]
        source = str(Path(finwhale.__file__).parents[1])
        path = os.pathsep.join([environment.pop("PYTHONPATH", source), source])
        more = {"OMP_NUM_THREADS": "1", "TERM": "xterm", "COLUMNS": "200", "PYTHONPATH": path}
        self.environment = {**os.environ, **more, **environment}
        self.shown = ""

    def __enter__(self) -> "Typist":
        self.pid, self.end = pty.fork()
        if self.pid == 0:
            heed_control_c()
            os.execvpe(self.args[0], self.args, self.environment)
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self.end)

    def read_until(self, text: str) -> None:
        """Reads until the terminal shows `text`; fails if the command ends before."""
        while text not in self.shown:
            try:
                self.read_more()
            except OSError:  # the terminal is gone
                pytest.fail(f"no {text!r} in {self.shown!r}")
        self.shown = self.shown.partition(text)[2]

    def read_more(self) -> None:
        ready, _, _ = select.select([self.end], [], [], 60)
        if not ready:
            pytest.fail(f"nothing more after {self.shown!r}")
        self.shown += os.read(self.end, 65536).decode(errors="replace")

    def answer(self, keys: str, text: str) -> None:
        """Types at the prompt, and reads until `text`."""
        self.read_until("> ")
        self.type(keys)
        self.read_until(text)

    def press_control_c(self, text: str | None) -> None:
        """Presses Ctrl-C until the terminal shows `text`, or (None) until the command ends.

        readline may miss a signal that comes just when it has shown its prompt, so this presses
        again after a long silence.
        """
        try:
            while text is None or text not in self.shown:
                self.type("\x03")
                while (text is None or text not in self.shown) and select.select(
                    [self.end], [], [], 20
                )[0]:
                    self.read_more()
        except OSError:  # the terminal is gone
            assert text is None, self.shown
        else:
            self.read_until(text)

    def type(self, keys: str) -> None:
        os.write(self.end, keys.encode())

    def exit_code(self) -> int:
        with contextlib.suppress(OSError):  # the terminal is gone
            while os.read(self.end, 65536):
                pass
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])


def test_chat_in_a_terminal(endless: list[str], tmp_path: Path) -> None:
    """Lines can be edited and recalled, also later; Ctrl-C ends an answer, not the conversation."""
    home, saved = tmp_path / "cache", tmp_path / "talk.json"
    options = [*endless[2:-1], "--cache-dir", str(home), "--seed", "1", "--temperature", "0"]
    leaves = "(Ctrl-C again, or Ctrl-D, leaves)"
    with Typist("chat", *options) as typist:
        typist.read_until(f"{tmp_path} on cpu, context of 100000 tokens; /help lists the commands")
        typist.answer("/systum\x1b[D\x7fe\x1b[C Be odd\n", "system message: Be odd")
        typist.answer("Hello\n", "\r\n")
        typist.read_more()
        typist.type("\x03")
        typist.read_until("(interrupted; Ctrl-C again leaves)")
        typist.answer("/stats\n", "of the context's 100000 tokens are used")
        typist.read_until("> ")
        typist.press_control_c(leaves)
        typist.answer(f"/save {saved}\n", "3 messages are in")
        typist.read_until("> ")
        typist.press_control_c(leaves)
        typist.press_control_c(None)
        assert typist.exit_code() == 130
    assert [one["role"] for one in json.loads(saved.read_text())] == ["system", "user", "assistant"]
    assert (home / "chat_history").stat().st_mode & 0o777 == 0o600
    with Typist("chat", *options) as typist:
        typist.answer("\x1b[A\x1b[A\n", "no answer yet")
        typist.read_until("> ")
        typist.type("\x04")
        assert typist.exit_code() == 0


def test_chat_without_readline(endless: list[str], tmp_path: Path) -> None:
    (tmp_path / "readline.py").write_text("raise ImportError('no readline')")
    options = [*endless[2:-1], "--cache-dir", str(tmp_path / "cache")]
    with Typist("chat", *options, PYTHONPATH=str(tmp_path)) as typist:
        typist.answer("/think\n", "thinking on")
        typist.read_until("> ")
        typist.type("\x04")
        assert typist.exit_code() == 0


def test_chat_that_thinks(
    command: Callable[..., list[str]], capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    give_stdin(monkeypatch, "One\n/think\n/exit\n")
    assert main(command("chat", "--max-tokens", 4, "--think")) == 0
    captured = capsys.readouterr()
    assert captured.out.strip() and "thinking off" in captured.err


def test_a_failed_turn_is_not_kept_in_the_conversation(
    command: Callable[..., list[str]], capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The conversation goes on; a script learns of it from the exit code."""
    give_stdin(monkeypatch, "whale " * 1000 + "\nHello\n")
    assert main(command("chat", "--max-tokens", 4, "--temperature", 0)) == 1
    captured = capsys.readouterr()
    assert captured.err.startswith("finwhale: error: the prompt has")
    assert captured.err.count("\n") == 1
    give_stdin(monkeypatch, "Hello\n")
    assert main(command("chat", "--max-tokens", 4, "--temperature", 0)) == 0
    assert captured.out == capsys.readouterr().out


def test_chat_with_undecodable_input(
    command: Callable[..., list[str]], capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    give_stdin(monkeypatch, b"\xff\xfe\n")
    assert main(command("chat")) == 1
    assert capsys.readouterr().err.startswith("finwhale: error: standard input is not text")


def test_chat_without_a_tokenizer(
    no_tokenizer_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    give_stdin(monkeypatch, "Hello\n")
    assert main(["chat", "--model", str(no_tokenizer_path), "--device", "cpu"]) == 1
    assert main(["generate", "hi", "--model", str(no_tokenizer_path), "--device", "cpu"]) == 1
    chat, generate = capsys.readouterr().err.splitlines()
    assert "chat needs a tokenizer" in chat and "no tokenizer.json" in chat
    assert "a text prompt needs a tokenizer" in generate


# --- Processes ------------------------------------------------------------------------------------


def start(*args: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "finwhale.cli.main", *args],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"},
        preexec_fn=heed_control_c,
    )


def heed_control_c() -> None:
    """A shell's background jobs, such as CI, ignore the signal, and children inherit that."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


@pytest.fixture
def endless(tiny_path: Path, tmp_path: Path) -> list[str]:
    """A command that writes for longer than the test waits: a context of a million tokens."""
    for name in ("tokenizer.json", "model.safetensors"):
        (tmp_path / name).symlink_to(tiny_path / name)
    config = json.loads((tiny_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 100000}))
    return [
        "generate", TEXT, "--model", str(tmp_path), "--device", "cpu", "--max-tokens", "90000",
        "--ignore-eos",
    ]  # fmt: skip


def test_an_error_in_a_process_of_its_own() -> None:
    process = start("generate", "hi", "--model", "/no/such/place")
    out, err = process.communicate(timeout=300)
    assert process.returncode == 1
    assert out == ""
    assert err == "finwhale: error: no checkpoint at /no/such/place: no such directory\n"


def test_control_c(endless: list[str]) -> None:
    process = start(*endless)
    assert process.stdout is not None
    process.stdout.read(20)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=300)
    assert process.returncode == 130
    assert err.strip() == ""


def test_a_closed_output_pipe_ends_the_command(endless: list[str]) -> None:
    """`finwhale generate ... | head -c 20`."""
    process = start(*endless)
    assert process.stdout is not None and process.stderr is not None
    process.stdout.read(20)
    process.stdout.close()
    err = process.stderr.read()
    assert process.wait(timeout=300) == 1
    process.stderr.close()
    assert err == ""


# --- Starts ---------------------------------------------------------------------------------------


def test_warmup_reports_its_time_and_its_results(
    tiny_path: Path, tmp_path: Path, capsys: Capture
) -> None:
    cache = tmp_path / "kernels"
    assert main(["warmup", str(tiny_path), "--device", "cpu", "--cache-dir", str(cache)]) == 0
    phases, kernels = capsys.readouterr().out.splitlines()
    assert re.fullmatch(
        r"import [\d.]+ s, weights [\d.]+ s, kernels 0.0 s, .*rest [\d.]+ s, total [\d.]+ s", phases
    )
    assert kernels == "cpu needs no compiled kernels"
    assert not cache.exists()  # a CPU keeps nothing


def test_bench_start_measures_each_start(tmp_path: Path, capsys: Capture) -> None:
    record = tmp_path / "start.jsonl"
    small = "--device cpu --warm 1 --max-num-seqs 2 --max-model-len 256"
    assert main(["bench", "start", *small.split(), "--record", str(record)]) == 0
    assert "first token, s" in capsys.readouterr().out
    found = json.loads(record.read_text())
    assert [start["start"] for start in found["results"]] == ["cold", "warm"]
    for start in found["results"]:
        assert 0 < start["ready_s"] <= start["first_token_s"] <= start["process_s"]


def test_a_tool_names_a_mistake_in_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    monkeypatch.setattr(sys, "argv", ["tools.collectives"])
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    with pytest.raises(SystemExit) as ended:
        run_tool(collectives.main)
    wanted = "finwhale: error: this benchmark needs 2 GPUs, and torch sees 0\n"
    assert ended.value.code == 1 and capsys.readouterr().err == wanted


def test_bench_throughput_among_others(tiny_path: Path, tmp_path: Path, capsys: Capture) -> None:
    record = tmp_path / "throughput.jsonl"
    small = (
        "--device cpu --requests 5 --prompt-tokens 260 --output-tokens 20 --max-num-seqs 3 "
        f"--max-num-batched-tokens 256 --long-prompt 480 --model {tiny_path}"
    )
    assert main(["bench", "throughput", *small.split(), "--record", str(record)]) == 0
    shown = capsys.readouterr().out
    assert "between tokens" in shown and "total tokens per s per gpu" in shown
    found = json.loads(record.read_text())["results"]
    for row in found.values():
        assert row["total_tokens_per_s_per_gpu"] > row["output_tokens_per_s"] > 0
        assert 0 < row["between_tokens_ms"]["p50"] <= row["between_tokens_ms"]["p99"]
    others = found["among others"]["others"]
    assert all(others["count"].values())
    assert 0 < others["prefix_tokens_found"] <= 256  # once it was read

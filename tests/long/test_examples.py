"""The programs and the notebook of examples/, as a reader runs them."""

import json
import subprocess
from pathlib import Path

import nbclient
import nbformat
import pytest

from .servers import Program, free_ports, is_ready, python, wait_for

EXAMPLES = Path(__file__).parents[2] / "examples"
# Words that each program must print.
PROGRAMS = {
    "batch_file.py": ["What is the capital of Italy? The capital of Italy is Rome."],
    "tools.py": ["get_weather({'city': 'Paris'}) -> ", "It is sunny in Paris."],
    "structured_output.py": ["'name': ", "'mood': "],
    "drafting.py": ["accepted drafts by position", "drafting changed nothing"],
    "several_gpus.py": ["2 ranks", "there was a"],
    "trainer.py": ["step 1 ", "step 2 ", "the same answer as before: True"],
    "openai_client.py": ["finwhale-demo:", "The capital of France is Paris."],
}


def test_every_program_runs_here() -> None:
    assert {path.name for path in EXAMPLES.glob("*.py")} == PROGRAMS.keys()


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_program(name: str, tmp_path: Path) -> None:
    arguments = []
    server = None
    if name in ("openai_client.py", "trainer.py"):
        (port,) = free_ports(1)
        command = python("-m", "finwhale", "serve", "--device", "cpu", "--port", str(port))
        command += ["--enable-rollout-endpoints"]
        server = Program(command, tmp_path / "log")
        arguments = [f"http://127.0.0.1:{port}"]
    try:
        if server is not None:
            wait_for(lambda: is_ready(port), 120, [server])
        ran = subprocess.run(
            python(str(EXAMPLES / name), *arguments),
            cwd=tmp_path, capture_output=True, text=True, timeout=300, check=False,
        )  # fmt: skip
    finally:
        if server is not None:
            server.close()
    assert ran.returncode == 0, ran.stderr
    for text in PROGRAMS[name]:
        assert text in ran.stdout, ran.stdout


def test_the_notebook(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path))
    monkeypatch.setenv("JUPYTER_PREFER_ENV_PATH", "1")
    notebook = nbformat.read(EXAMPLES / "tour.ipynb", as_version=4)
    nbclient.NotebookClient(notebook, timeout=300, kernel_name="python3").execute()
    shown = json.dumps(notebook)
    for text in ("The capital of France is Paris.", "get_weather", "It is sunny in Paris."):
        assert text in shown, text

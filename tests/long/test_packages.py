"""The wheel and the sdist contain what they should, and run in clean environments.

`FINWHALE_TORCH_INDEX` names the package index that torch comes from; without it, pip's own.
"""

import email
import os
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from . import environments
from .servers import Program, client, free_ports, is_ready, wait_for

ROOT = Path(__file__).parents[2]
VERSIONS = ("3.11", "3.12", "3.13")
# Nothing that this environment sets may help the packages.
CLEAN = {"PYTHONPATH": "", "PYTHONNOUSERSITE": "1"}
# Files of the repository that are for its hosting and its developers' editors alone.
NOT_IN_THE_SDIST = (".github/ISSUE_TEMPLATE/", ".github/pull_request_template.md", ".pre-commit")


def run(*words: object, directory: Path, seconds: float = 300) -> str:
    done = subprocess.run(
        list(map(str, words)),
        cwd=directory,
        env={**os.environ, **CLEAN},
        capture_output=True,
        text=True,
        timeout=seconds,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def repository_files() -> set[str]:
    return set(run("git", "ls-files", directory=ROOT).splitlines())


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with the sdist, and the wheel that was built from it."""
    programs = environments.make(tmp_path_factory.mktemp("environment"), "build")
    directory = tmp_path_factory.mktemp("dist")
    run(programs / "python", "-m", "build", "--outdir", directory, ROOT, directory=directory)
    return directory


@pytest.fixture(scope="module")
def wheel(built: Path) -> Path:
    (path,) = built.glob("*.whl")
    return path


@pytest.fixture(scope="module")
def sdist(built: Path) -> Path:
    (path,) = built.glob("*.tar.gz")
    return path


@pytest.fixture(scope="module")
def source(sdist: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory that the sdist unpacks to."""
    directory = tmp_path_factory.mktemp("source")
    with tarfile.open(sdist) as archive:
        archive.extractall(directory, filter="data")
    (root,) = directory.iterdir()
    return root


def test_the_wheel_contains_the_package_and_its_licences(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        found = {name for name in archive.namelist() if ".dist-info/" not in name}
        expected = {name for name in repository_files() if name.startswith("src/finwhale/")}
        assert {f"src/{name}" for name in found} == expected
        assert {
            "finwhale/py.typed",
            "finwhale/demo/base.safetensors",
            "finwhale/demo/mtp.safetensors",
            "finwhale/demo_dspark/dspark.safetensors",
            "finwhale/demo_v41/model.safetensors",
            "finwhale/server/web/index.html",
        } <= found
        for name in found:
            if name.startswith("finwhale/server/web/vendor/") and name.endswith(".js"):
                assert name.removesuffix(".js") + ".LICENSE.txt" in found
        (metadata,) = (n for n in archive.namelist() if n.endswith(".dist-info/METADATA"))
        message = email.message_from_bytes(archive.read(metadata))
        for name in message.get_all("License-File", []):
            licence = archive.read(f"{Path(metadata).parent}/licenses/{name}")
            assert licence == (ROOT / name).read_bytes()
    assert message.get_all("License-File") == ["LICENSE", "NOTICE"]
    assert message["License-Expression"] == "Apache-2.0"
    for version in VERSIONS:
        assert f"Programming Language :: Python :: {version}" in message.get_all("Classifier", [])


def test_the_sdist_contains_the_repository(source: Path) -> None:
    found = {str(p.relative_to(source)) for p in source.rglob("*") if p.is_file()}
    expected = {n for n in repository_files() if not n.startswith(NOT_IN_THE_SDIST)}
    assert found == expected | {"PKG-INFO"}


def test_the_sdist_is_enough_for_the_unit_tests(source: Path) -> None:
    environment = {**os.environ, **CLEAN, "PYTHONPATH": str(source / "src")}
    command = [sys.executable, "-m", "pytest", "-n0", "tests/unit"]
    done = subprocess.run(
        command, cwd=source, env=environment, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_sdist_is_enough_for_the_documentation(source: Path, tmp_path: Path) -> None:
    programs = environments.make(tmp_path / "environment", *extra("docs"))
    run(programs / "python", "-m", "mkdocs", "build", "--strict", directory=source)
    assert (source / "build/site/index.html").is_file()


def extra(name: str) -> list[str]:
    """The requirements of one of Finwhale's extras, without Finwhale."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    return list(project["optional-dependencies"][name])


def interpreter(version: str) -> str:
    """A Python of this version, from the PATH or from pyenv."""
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv"))
    installed = sorted(pyenv.glob(f"versions/{version}.*/bin/python{version}"))
    for program in (shutil.which(f"python{version}"), *map(str, installed)):
        # A shim of pyenv fails if its version is not selected.
        if program and subprocess.run([program, "-c", ""], capture_output=True).returncode == 0:
            return program
    pytest.skip(f"Python {version} is not installed")


@pytest.fixture(scope="module", params=VERSIONS)
def programs(request: pytest.FixtureRequest, wheel: Path, tmp_path_factory) -> Iterator[Path]:
    """The programs of an environment with the wheel and nothing of this repository."""
    directory = tmp_path_factory.mktemp(f"python{request.param}")
    run(interpreter(request.param), "-m", "venv", directory / "environment", directory=directory)
    programs = directory / "environment/bin"
    install = (programs / "python", "-m", "pip", "install", "--quiet", "--no-compile")
    index = os.environ.get("FINWHALE_TORCH_INDEX")
    options = ("--index-url", index) if index else ()
    run(*install, *options, "torch==2.13.0", directory=directory, seconds=1800)
    run(*install, f"{wheel}[server]", directory=directory, seconds=600)
    yield programs
    shutil.rmtree(directory)  # several GB, if torch came with CUDA


def generate(programs: Path, directory: Path) -> None:
    words = ("generate", "Once upon a time", "--max-tokens", "20", "--temperature", "0")
    text = run(programs / "finwhale", *words, directory=directory)
    assert len(text.split()) > 4


def serve(programs: Path, directory: Path) -> None:
    (port,) = free_ports(1)
    command = [str(programs / "finwhale"), "serve", "--device", "cpu", "--port", str(port)]
    server = Program([*command, "--max-model-len", "4096"], directory / "log", CLEAN)
    try:
        wait_for(lambda: is_ready(port), 180, [server])
        answer = client(port).chat.completions.create(
            model="finwhale-demo",
            messages=[{"role": "user", "content": "What is the capital of France?"}],
            max_tokens=50,
            temperature=0,
        )
        assert answer.choices[0].message.content == "The capital of France is Paris."
        page = f"http://127.0.0.1:{port}"
        for path in ("/", "/page/vendor/marked.js", "/docs"):
            run("curl", "--silent", "--fail", page + path, directory=directory)
    finally:
        server.close()


def test_the_wheel_runs(programs: Path, tmp_path: Path) -> None:
    generate(programs, tmp_path)
    serve(programs, tmp_path)


def test_type_checkers_see_the_wheel(programs: Path, tmp_path: Path) -> None:
    words = "import importlib.resources as r; print(r.files('finwhale').joinpath('py.typed'))"
    found = Path(run(programs / "python", "-c", words, directory=tmp_path).strip())
    assert found.is_relative_to(programs.parent) and found.is_file()


def test_the_sdist_runs(programs: Path, sdist: Path, tmp_path: Path) -> None:
    """After the wheel's tests, in their environment."""
    install = ("-m", "pip", "install", "--quiet", "--force-reinstall", "--no-deps")
    run(programs / "python", *install, sdist, directory=tmp_path)
    generate(programs, tmp_path)
    serve(programs, tmp_path)

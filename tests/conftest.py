"""Shared fixtures: a tiny checkpoint with a tokenizer, an engine on it; skips, and random seeds."""

import gc
import json
import os
import random
import re
import shutil
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import Any

# Before torch. Every core has a worker of pytest's: one thread each, here and in child processes,
# where a test does not ask for more; of these, those that wait sleep.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import deepseek_recipe as recipe
import numpy as np
import pytest
import tokenizers
import torch
from hypothesis import settings
from safetensors.torch import save_file
from tests.support.integrity import check_engine
from tests.support.tensors import read_tensors
from tests.support.tiny import random_weights, tiny_config, write_plain_checkpoint
from tokenizers import decoders, models, pre_tokenizers, trainers

from finwhale import LLM
from finwhale.checkpoint.config_files import read_config
from finwhale.demo import DEMO_PATH

# Before any kernel's module is imported. Without a GPU, this process runs Triton kernels in
# Triton's interpreter; what compiles them does so in a process of its own (tests/ops/conftest.py).
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

# Random schedules: as many as CI has time for, the same in every run, so that a failure comes back.
# `pytest --hypothesis-profile long` draws others each time, and prints what repeats a failure.
settings.register_profile("short", deadline=None, derandomize=True, print_blob=True)
settings.register_profile("long", deadline=None, max_examples=3000, print_blob=True)
settings.load_profile("short")

# With FINWHALE_NO_SKIPS, which .ci/run and hosted CI set, a skipped test fails, unless its reason
# matches one of these: what a machine may lack, and never what `pip install -e .[test]` brings.
MAY_SKIP = (
    "takes long: ",  # hosted CI runs these every night
    "compiles kernels: ",  # hosted CI runs these every night, and after changes of kernels
    "needs (an NVIDIA GPU|two GPUs|three GPUs)",
    "without DeepGEMM ",  # of the extra nvidia
    "needs Chromium",  # hosted CI installs it for `just long-page`
    "(zsh|fish) is not installed",  # bash is on every machine
    "OpenBLAS's [a-zA-Z]+ kernels need a CPU with ",
    "no digests of cached rows are known for ",  # of these libraries, or this vendor's CPUs
    "only root can ",  # of two tests, root runs one and everybody else the other
    "root may write everywhere",
)

# torch.manual_seed takes 0.4 ms without a GPU: it notes the stack, to seed a GPU later.
SEED_TORCH = torch.manual_seed if torch.cuda.is_available() else torch.default_generator.manual_seed
GPU_TESTS = Path(__file__).parent / "gpu"
CONTROL = [
    getattr(recipe.SpecialToken, name).default_str()
    for name in ("Bos", "Eos", "User", "Assistant", "ThinkingStart", "ThinkingEnd", "Dsml")
]
# A sliding window, C4, C128, and C4; the first two with experts by hash.
SHORT_DEMO_LAYERS = (0, 1, 2, 5)
CORPUS = [
    "The fin whale is the second longest animal on Earth after the blue whale.",
    "It can swim as fast as a small ship, and sings notes too low for people to hear.",
    "naïve café — 你好, 世界 🐋, numbers 0123456789 and signs (){}[]<>!?;:'\"",
] * 3


def pytest_xdist_auto_num_workers() -> int:
    """Processes of a plain `pytest`: one where a GPU is, of which every engine takes most.

    Otherwise one more than cores, because some tests wait for other processes; at most five.
    """
    return 1 if torch.cuda.is_available() else min(5, 1 + (os.cpu_count() or 1))


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Skip what only other commands run.

    Tests in tests/gpu need a GPU, tests marked long FINWHALE_LONG. Others that are marked kernels
    need `-m kernels`.
    """
    with_kernels = "kernels" in config.option.markexpr
    for item in items:
        if item.get_closest_marker("long"):
            if not os.environ.get("FINWHALE_LONG"):
                item.add_marker(pytest.mark.skip(reason="takes long: `just long-marked` runs it"))
        elif item.get_closest_marker("kernels") and not with_kernels:
            item.add_marker(pytest.mark.skip(reason="compiles kernels: `just kernels` runs it"))
    here = [item for item in items if GPU_TESTS in item.path.parents]
    if here and not torch.cuda.is_available():
        for item in here:
            item.add_marker(pytest.mark.skip(reason="needs an NVIDIA GPU, and torch sees none"))
    for item in here:
        item.add_marker(pytest.mark.gpu)


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report() -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    """Fail a module that may not be skipped."""
    report = yield
    fail_skip(report)
    return report


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Fail a test that may not be skipped."""
    report = yield
    fail_skip(report)
    return report


def fail_skip(report: pytest.CollectReport | pytest.TestReport) -> None:
    if not (os.environ.get("FINWHALE_NO_SKIPS") and report.skipped) or hasattr(report, "wasxfail"):
        return
    reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
    reason = reason.removeprefix("Skipped: ")
    if not any(re.match(allowed, reason) for allowed in MAY_SKIP):
        report.outcome = "failed"
        report.longrepr = f"skipped, which FINWHALE_NO_SKIPS forbids: {reason}"


@pytest.fixture(autouse=True)
def seeded() -> None:
    """The same random numbers for a test in every run. Most tests have generators of their own."""
    random.seed(0)
    np.random.seed(0)
    SEED_TORCH(0)


def pytest_collection() -> None:
    """Collect no garbage while test modules are imported, which leaves next to none."""
    gc.disable()


def pytest_collection_finish() -> None:
    """Exclude the objects that imports and collection made from further garbage collections.

    There are 800,000 of them, and each full collection would spend 0.4 s on them.
    """
    gc.enable()
    gc.collect()
    gc.freeze()
    # Python's own thresholds would make collections a seventh of the time of tests/unit.
    gc.set_threshold(20_000, 20, 20)
    # For a benchmark that frees an engine: the next full collections would take as long again.
    gc.unfreeze = lambda: None


def write_tokenizer(directory: Path, vocab_size: int) -> None:
    """A byte-level BPE with DeepSeek's control tokens, learned from a few sentences."""
    bpe = tokenizers.Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=CONTROL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe.train_from_iterator(CORPUS, trainer)
    directory.mkdir(parents=True, exist_ok=True)
    bpe.save(str(directory / "tokenizer.json"))


def engine_config() -> dict[str, Any]:
    """A config.json: four narrow layers of all kinds, 400 tokens, a context of 512."""
    return tiny_config(3) | {
        "vocab_size": 400,
        "hidden_size": 64,
        "num_hidden_layers": 4,
        "num_hash_layers": 1,
        "compress_ratios": [0, 4, 128, 4, 0],
        "index_topk": 5,
        "sliding_window": 13,
        "max_position_embeddings": 512,
    }


@pytest.fixture(scope="session")
def tiny_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A plain checkpoint of `engine_config` with a tokenizer. Not to be written to."""
    path = tmp_path_factory.mktemp("tiny") / "model"
    config = engine_config()
    write_plain_checkpoint(path, config, random_weights(config, seed=3))
    write_tokenizer(path, config["vocab_size"])
    return path


@pytest.fixture(scope="session")
def no_tokenizer_path(tiny_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same checkpoint without its tokenizer."""
    path = tmp_path_factory.mktemp("bare") / "model"
    path.mkdir()
    for name in ("config.json", "model.safetensors"):
        (path / name).symlink_to(tiny_path / name)
    return path


@pytest.fixture(scope="session")
def short_demo_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The embedded model with four of its six layers. A step takes two thirds of the time, and
    texts still end, though they make less sense. Not to be written to.
    """
    path = tmp_path_factory.mktemp("short") / "demo"
    shutil.copytree(DEMO_PATH, path, ignore=shutil.ignore_patterns("*.safetensors*", "__*"))
    config = read_config(DEMO_PATH)
    ratios = [config["compress_ratios"][layer] for layer in (*SHORT_DEMO_LAYERS, -1)]
    config |= {"num_hidden_layers": 4, "num_hash_layers": 2, "compress_ratios": ratios}
    (path / "config.json").write_text(json.dumps(config))
    tensors = read_tensors(DEMO_PATH)
    for name in [name for name in tensors if name.startswith("layers.")]:
        _, layer, rest = name.split(".", 2)
        tensor = tensors.pop(name)
        if int(layer) in SHORT_DEMO_LAYERS:
            tensors[f"layers.{SHORT_DEMO_LAYERS.index(int(layer))}.{rest}"] = tensor
    save_file(tensors, path / "model.safetensors")
    return path


@pytest.fixture
def one_thread() -> Iterator[None]:
    """One torch thread: sums are taken in one order, and small models run faster."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="session")
def shared_llm(tiny_path: Path) -> LLM:
    return LLM(tiny_path, device="cpu", activations="exact", max_num_seqs=8)


@pytest.fixture
def llm(shared_llm: LLM, one_thread: None) -> Iterator[LLM]:
    """An engine on the tiny checkpoint; afterwards it must be idle and have lost nothing."""
    yield shared_llm
    assert_idle(shared_llm)


@pytest.fixture
def new_llm(tiny_path: Path, one_thread: None) -> Iterator[Callable[..., LLM]]:
    """Makes engines with options of their own; afterwards each must be idle."""
    made: list[LLM] = []

    def make(path: Path = tiny_path, **options: Any) -> LLM:
        made.append(LLM(path, **{"device": "cpu", "activations": "exact", **options}))
        return made[-1]

    yield make
    for llm in made:
        assert_idle(llm)


def assert_idle(llm: LLM) -> None:
    """No request, page or sampling state is left behind."""
    engine = llm._engine
    check_engine(engine)
    assert not engine.has_work
    assert not engine.scheduler.running
    assert not engine.outputs.streams and not engine.outputs.requests and not engine._loop.in_flight
    engine.reset_prefix_cache()
    for name, pool in engine.scheduler.pages.pools.items():
        assert pool.num_free == pool.num_pages - 1, f"pages of {name} are still held"

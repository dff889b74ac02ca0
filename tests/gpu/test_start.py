"""Starts on a GPU: ready means ready, a second one compiles nothing, a fork after import works."""

import json
import os
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from finwhale import LLM, SamplingParams
from finwhale.config import EngineConfig
from finwhale.engine.loop.engine import Engine
from finwhale.engine.loop.opening import start_engine
from finwhale.models.deepseek_v4.presets import published
from finwhale.models.weight_sources import Weights

triton = pytest.importorskip("triton")
tl = pytest.importorskip("triton.language")

OPTIONS: list[dict[str, Any]] = [
    {"temperature": 0},
    {"temperature": 0, "logprobs": 3},
    {"top_k": 7},
    {"top_p": 0.8, "min_p": 0.01},
    {"repetition_penalty": 1.2, "presence_penalty": 0.3, "frequency_penalty": 0.2},
    {"logit_bias": {5: 2.0}},
    {"n": 3, "seed": 5},
]


@pytest.fixture(scope="module", params=["demo", "flash", "eager", "invariant", "few graphs"])
def engine(request: pytest.FixtureRequest) -> Engine:
    options: dict[str, Any] = {"device": "cuda", "max_num_seqs": 24}
    if request.param == "demo":
        return LLM(max_model_len=4096, cache_memory_bytes=2**29, **options)._engine
    options |= {
        "flash": {},
        "eager": {"enforce_eager": True},
        "invariant": {"batch_invariant": True},
        "few graphs": {"graph_sizes": (1, 4)},
    }[request.param]
    model = published("flash").without_draft_head().with_layers(4)
    options |= {"max_num_batched_tokens": 1500, "cache_memory_bytes": 2**31}
    config = EngineConfig(max_model_len=40000, **options)
    return start_engine(config, model, Weights(model), None)


def serve_every_length(engine: Engine, others: int) -> None:
    """Serve prompts of 1 to 39 tokens, of `others` longer lengths and of the longest, alone and
    together, with every sampling option. Some prompts begin as others did.
    """
    draw = random.Random(0)
    vocab, longest = engine.model_config.vocab_size, engine.max_model_len - 40
    lengths = [*range(1, 40), *(int(longest ** draw.random()) for _ in range(others)), longest]
    count = 0
    for length in lengths:
        for _ in range(draw.choice((1, 1, 1, 2, 9, 30))):
            count += 1
            size = length if draw.random() < 0.5 else min(longest, draw.randint(1, 300))
            prompt = [(7 * i + draw.choice((0, 0, 3))) % vocab for i in range(size)]
            params = SamplingParams(
                max_tokens=draw.randint(1, 12), ignore_eos=True, **draw.choice(OPTIONS)
            )
            engine.add_request(f"{count}", prompt, params)
            for _ in range(draw.randint(0, 2)):
                engine.step()
        while engine.has_work:
            engine.step()


def test_nothing_is_compiled_after_ready(engine: Engine) -> None:
    assert engine.executor.description.kernels > 100
    serve_every_length(engine, 150)
    late = engine.metrics().late_compilations
    assert set(late) >= {"triton", "inductor"}
    assert not any(late.values()), late


def test_a_new_kernel_is_counted(engine: Engine) -> None:
    """So that the count can be something else than 0."""

    @triton.jit
    def kernel(x_ptr):  # type: ignore[no-untyped-def]
        tl.store(x_ptr, 1.0)

    before = engine.metrics().late_compilations["triton"]
    kernel[(1,)](torch.zeros(1, device="cuda"))
    assert engine.metrics().late_compilations["triton"] == before + 1


START = """
import json, sys
from finwhale import LLM, SamplingParams
llm = LLM(device="cuda", max_num_seqs=8, max_model_len=1024, cache_memory_bytes=2**28,
          max_num_batched_tokens=128, cache_dir=sys.argv[1])
out = llm.generate(["Once upon a time"], SamplingParams(temperature=0, max_tokens=24))
engine = llm._engine
print(json.dumps([engine.executor.description.kernels, engine.executor.description.compiled_kernels,
                  out[0].outputs[0].token_ids, sum(engine.metrics().late_compilations.values())]))
"""


def start(cache: Path) -> list[Any]:
    done = subprocess.run(
        [sys.executable, "-c", START, str(cache)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found: list[Any] = json.loads(done.stdout.splitlines()[-1])
    return [*found, done.stderr]


def test_a_second_start_compiles_nothing_and_damage_is_repaired(tmp_path: Path) -> None:
    kernels, compiled, tokens, late, _ = start(tmp_path)
    assert compiled > 100 and late == 0
    again = start(tmp_path)
    assert again[:4] == [kernels, 0, tokens, 0]
    # Folding happens while weights load, before kernels are prepared and counted.
    cubins = sorted(tmp_path.rglob("triton/*/*.cubin"))
    for cubin in [c for c in cubins if "fold" not in c.name][:3]:
        cubin.write_bytes(cubin.read_bytes()[:-100])
    again = start(tmp_path)
    assert again[:4] == [kernels, 3, tokens, 0]
    assert again[4].count("damaged artefacts are removed and built again") == 1


def test_two_starts_at_once_share_the_work(tmp_path: Path) -> None:
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", START, str(tmp_path)], stdout=subprocess.PIPE, text=True
        )
        for _ in range(2)
    ]
    found = [json.loads(p.communicate()[0].splitlines()[-1]) for p in processes]
    assert [p.returncode for p in processes] == [0, 0]
    assert found[0][2] == found[1][2]
    assert min(found[0][1], found[1][1]) == 0 < max(found[0][1], found[1][1])


def test_a_start_that_is_killed_half_way_harms_no_other(tmp_path: Path) -> None:
    for seconds in (12, 20):
        process = subprocess.Popen(
            [sys.executable, "-c", START, str(tmp_path)],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        try:
            process.wait(timeout=seconds)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
    assert start(tmp_path)[3] == 0


FORK = """
import importlib, os, pkgutil, sys
import finwhale, torch
from finwhale import LLM, SamplingParams
for module in pkgutil.walk_packages(finwhale.__path__, "finwhale."):
    if module.name.endswith("__main__"):
        continue
    try:
        importlib.import_module(module.name)
    except (ImportError, finwhale.FinwhaleError) as error:
        # An extra that is not installed here.
        assert "finwhale" not in (getattr(error, "name", None) or ""), error
assert not torch.cuda.is_initialized()
pid = os.fork()
if pid == 0:
    llm = LLM(device="cuda", max_num_seqs=2, max_model_len=512, cache_memory_bytes=2**28,
              max_num_batched_tokens=64, cache_dir=sys.argv[1])
    out = llm.generate(["Once upon a time"], SamplingParams(max_tokens=5, ignore_eos=True))
    os._exit(0 if len(out[0].outputs[0].token_ids) == 5 else 9)
assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
assert not torch.cuda.is_initialized()
print("forked")
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
def test_a_child_forked_after_importing_everything_runs_the_model(tmp_path: Path) -> None:
    """Kernels and their libraries included: importing initialises no CUDA."""
    done = subprocess.run(
        [sys.executable, "-c", FORK, str(tmp_path)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.splitlines()[-1] == "forked"

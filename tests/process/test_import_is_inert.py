"""Importing the package starts nothing: no CUDA, no kernels' compilers, no torch at the top.

A kernel's file imports its compiler, and changes nothing in it.

Each process imports its modules one by one and reports after each, so that a fault names its
module.
"""

import json
import os
import pkgutil
import subprocess
import sys
from pathlib import Path

import pytest

import finwhale

# What an operator's family holds besides its kernels, which only a platform's table imports.
NO_KERNELS = ("cases", "cpu", "layout", "noise", "ref")


# Ranks on GPUs alone import these, in `connect`.
BETWEEN_GPUS = (
    "finwhale.distributed.push",
    "finwhale.distributed.push_copies",
    "finwhale.distributed.push_triton",
    "finwhale.ops.ranks_triton",
)
# Needs the extra `ray`.
RAY = "finwhale.distributed.ray_actors"


def is_kernel(name: str) -> bool:
    if name in BETWEEN_GPUS:
        return True
    parts = name.split(".")
    in_family = parts[1] == "ops" and len(parts) == 4 and parts[2] != "tables"
    return in_family and parts[3] not in NO_KERNELS


EVERY = [info.name for info in pkgutil.walk_packages(finwhale.__path__, "finwhale.")]
MODULES = sorted(name for name in EVERY if not is_kernel(name) and name != RAY)
KERNELS = sorted(name for name in EVERY if is_kernel(name) and "deepgemm" not in name)
# A platform's table imports its kernels; those that import no compiler are tested here too.
CPU_TABLE = "finwhale.ops.tables.cpu"
TABLES = [CPU_TABLE]  # before any other
TABLES += [n for n in MODULES if n.startswith("finwhale.ops.tables.") and n != CPU_TABLE]
OTHERS = [name for name in MODULES if name not in TABLES]

PROBE = """
import importlib, json, sys
import torch
def libcuda_is_loaded():
    with open("/proc/self/maps") as maps:
        return "libcuda.so" in maps.read()
# Some CUDA builds of torch map the driver's library, uninitialised, when imported alone.
torch_loads_libcuda = libcuda_is_loaded()
def faults():
    found = [name for name in ("triton", "cutlass", "tilelang") if name in sys.modules]
    if torch.cuda.is_initialized():
        found.append("CUDA initialised")
    if libcuda_is_loaded() and not torch_loads_libcuda:
        found.append("libcuda loaded")
    return found
report = {}
for name in json.loads(sys.argv[1]):
    importlib.import_module(name)
    report[name] = faults()
    if report[name]:
        break
print(json.dumps(report))
"""


# A module could change these parts of Triton: the knobs, their hooks, and the launch of kernels.
KERNEL_PROBE = """
import inspect
from triton import knobs
from triton.experimental import gluon
from triton.runtime.jit import JITFunction
def state():
    found = {"run": JITFunction.run}
    for group, of in vars(knobs).items():
        if isinstance(of, knobs.base_knobs):
            for name in dir(of):
                value = getattr(of, name)
                is_method = inspect.isroutine(getattr(type(of), name, None))
                if not name.startswith("_") and not is_method:
                    found[group, name] = value, list(getattr(value, "calls", ()))
    return found
before = state()
""" + PROBE.replace('("triton", "cutlass", "tilelang")', '("cutlass", "tilelang")').replace(
    "    if torch.cuda.is_initialized():",
    "    found += [str(key) for key, value in state().items() if value != before[key]]\n"
    "    if torch.cuda.is_initialized():",
)


def python(code: str, *args: str) -> str:
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", code, *args], capture_output=True, text=True, env=env, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


def has_proc_maps() -> bool:
    return Path("/proc/self/maps").exists()


@pytest.mark.skipif(not has_proc_maps(), reason="reads /proc/self/maps, which is Linux's")
def test_modules_import_nothing_of_a_gpu() -> None:
    found = json.loads(python(PROBE, json.dumps(OTHERS)))
    assert {name: fault for name, fault in found.items() if fault} == {}
    assert list(found) == OTHERS


@pytest.mark.skipif(not has_proc_maps(), reason="reads /proc/self/maps, which is Linux's")
def test_tables_import_no_driver() -> None:
    """A table may import its kernels' compiler, never the driver."""
    probe = PROBE.replace("break", "continue")
    found = json.loads(python(probe, json.dumps(TABLES)))
    assert list(found) == TABLES
    for name, faults in found.items():
        assert not {"CUDA initialised", "libcuda loaded"} & set(faults), name
        if name == CPU_TABLE:
            assert faults == []


@pytest.mark.skipif(not has_proc_maps(), reason="reads /proc/self/maps, which is Linux's")
def test_kernels_change_nothing_in_their_compiler() -> None:
    pytest.importorskip("triton", reason="needs triton, which is installed with the GPU packages")
    found = json.loads(python(KERNEL_PROBE, json.dumps(KERNELS)))
    assert {name: fault for name, fault in found.items() if fault} == {}
    assert list(found) == KERNELS and len(KERNELS) > 40


def test_the_package_alone_imports_no_torch() -> None:
    heavy = python(
        "import sys, finwhale, finwhale.cli.main\n"
        "print([m for m in ('torch', 'numpy', 'tokenizers', 'safetensors') if m in sys.modules])"
    )
    assert heavy.strip() == "[]"


def test_scheduling_and_requests_import_no_torch() -> None:
    plan = [name for name in MODULES if name.startswith("finwhale.engine.plan")]
    assert len(plan) >= 8
    heavy = python(
        "import importlib, sys\n"
        "import finwhale.config, finwhale.request, finwhale.chat.template\n"
        "import finwhale.chat.stop_strings\n"
        f"for name in {plan}: importlib.import_module(name)\n"
        "print('torch' in sys.modules)"
    )
    assert heavy.strip() == "False"


def test_a_server_imports_no_torch() -> None:
    """Only the engine's process needs it, which starts after these imports."""
    heavy = python(
        "import sys, finwhale.cli.serve, finwhale.cli.run_batch, finwhale.server.run\n"
        "print([m for m in ('torch', 'triton', 'safetensors') if m in sys.modules])"
    )
    assert heavy.strip() == "[]"


def test_public_names() -> None:
    assert dir(finwhale) == sorted(finwhale.__all__)
    for name in finwhale.__all__:
        assert getattr(finwhale, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        _ = finwhale.nonsense
    assert finwhale.LLM.__module__ == "finwhale.llm"


FORK = """
import os, sys
from finwhale import LLM, FinwhaleError, SamplingParams
import finwhale.engine.ranks.local_executor
pid = os.fork()
if pid == 0:
    llm = LLM(sys.argv[1], device="cpu", max_num_seqs=2)
    out = llm.generate([[5, 6, 7]], SamplingParams(max_tokens=3, ignore_eos=True))
    os._exit(0 if len(out[0].outputs[0].token_ids) == 3 else 9)
print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
import torch
# torch's own OpenMP threads do not survive a fork; with one there are none to lose.
torch.set_num_threads(1)
params = SamplingParams(max_tokens=3, ignore_eos=True)
llm = LLM(sys.argv[1], device="cpu", max_num_seqs=2)
llm.generate([[5] * 400], params)
pid = os.fork()
if pid == 0:
    try:
        llm.generate([[5, 6]], params)
        os._exit(8)
    except FinwhaleError as error:
        assert "forked" in str(error), error
    own = LLM(sys.argv[1], device="cpu", max_num_seqs=2)
    out = own.generate([[5] * 400], params)
    os._exit(0 if len(out[0].outputs[0].token_ids) == 3 else 9)
print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
def test_a_forked_child_makes_its_own_model(tiny_path: Path) -> None:
    """One that is forked after the import, and one after its parent has used a model."""
    assert python(FORK, str(tiny_path)).split() == ["0", "0"]

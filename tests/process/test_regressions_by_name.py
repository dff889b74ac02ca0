"""Five failures that other engines shipped with this model, by name.

Each test runs twice: as it is, and with the mistake put back, which the same check must then see.
The first is marked long, because tests/engine/test_compiled.py has it with real graphs.
"""

import inspect
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support.stepping import Stepper

import finwhale.models.deepseek_v4.base as base_module
import finwhale.models.deepseek_v4.layer as layer_module
from finwhale import LLM
from finwhale.compiled.compiled_layer import CompiledLayer
from finwhale.compiled.graph_store import GraphStore
from finwhale.engine.ranks.ranks import first_rank
from finwhale.models.deepseek_v4.context import LayerContext
from finwhale.models.deepseek_v4.layer import DecoderLayer, LayerState
from finwhale.models.deepseek_v4.model import DeepseekV4
from finwhale.models.deepseek_v4.streams import PRIORITIES, SideStreams
from finwhale.models.step_inputs import Inline

MISTAKE = pytest.mark.parametrize("mistake", [False, True], ids=["as it is", "put back"])


def python(code: str, *args: str, path: Path | None = None) -> "subprocess.CompletedProcess[str]":
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    if path is not None:
        env["PYTHONPATH"] = os.pathsep.join([str(path), env.get("PYTHONPATH", "")])
    return subprocess.run(
        [sys.executable, "-c", code, *args], capture_output=True, text=True, env=env
    )


def expect(done: "subprocess.CompletedProcess[str]", mistake: bool, sign: str) -> None:
    """Success; or, with the mistake, the check's own failure and no other."""
    if mistake:
        assert done.returncode != 0 and sign in done.stderr, done.stderr[-2000:]
    else:
        assert done.returncode == 0, done.stderr[-2000:]


# --- 1 --------------------------------------------------------------------------------------------

REGISTERED = """
import sys
import torch
from finwhale import LLM
from finwhale.compiled.graph_store import GraphStore
from finwhale.compiled import custom_ops
from finwhale.ops.tables.cpu import OPS
register, traced = custom_ops.register, []
if sys.argv[2] == "True":
    custom_ops.register = lambda ops: None  # and only while a function is traced:
    begin = lambda: register(OPS)
else:
    begin = lambda: None
def graph(store, wanted):
    names = torch._C._dispatch_get_all_op_names()
    found = [n for n in names if n.startswith(custom_ops.namespace(OPS))]
    assert len(found) == len(custom_ops.OPERATORS), "a second start would not find its operators"
    begin()
    traced.append(wanted)
    return lambda flat: list(wanted.fn(flat))
GraphStore.graph = graph
LLM(sys.argv[1], device="cpu", compile=True, cache_dir=sys.argv[3])
assert traced
"""


@pytest.mark.long  # tests/engine/test_compiled.py has both cases with real graphs
@MISTAKE
def test_operators_registered_while_tracing(tiny_path: Path, tmp_path: Path, mistake: bool) -> None:
    """The second start loads what it does not trace: operators exist before any graph is asked."""
    done = python(REGISTERED, str(tiny_path), str(mistake), str(tmp_path))
    expect(done, mistake, "a second start would not find its operators")


# --- 2 --------------------------------------------------------------------------------------------


class ChangedLayer(DecoderLayer):
    """A decoder layer that one platform calls with its mixes in a value of their own."""

    def __call__(self, x: Any, *rest: Any, mixes: Any = ()) -> Any:  # type: ignore[override]
        return super().__call__((x, *mixes) if mixes else x, *rest)


@torch.inference_mode()
def check_draft_layer(llm: LLM) -> None:
    """Draft and decoder layers are of one class and signature, and both run."""
    run, stepper = first_rank(llm._engine.executor).runner, Stepper(llm._engine)
    model = run.model
    assert isinstance(model, DeepseekV4) and model.draft_head is not None
    layers = [*model.layers, *model.draft_head.layers]
    signatures = {str(inspect.signature(layer)) for layer in layers}
    assert signatures == {str(inspect.signature(layers[0]))}
    assert len({type(layer) for layer in layers}) == 1
    sequence = stepper.sequence([5, 6, 7, 8])
    (streams,) = stepper.step([(sequence, 4)])
    assert stepper.inputs is not None
    following = torch.tensor([6, 7, 8, 9])
    draft = model.draft_head(stepper.inputs, streams, following, run.cache, Inline())
    assert draft.shape == streams.shape and draft.isfinite().all()
    stepper.release(sequence)


@MISTAKE
@pytest.mark.parametrize("platform", ["cpu", "reference", "compiled"])
def test_the_draft_layer_left_behind(
    tiny_path: Path,
    tmp_path: Path,
    platform: str,
    mistake: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """When a decoder layer's signature changes on one platform."""
    monkeypatch.setattr(GraphStore, "graph", lambda self, wanted: lambda f: list(wanted.fn(f)))
    tables: dict[str, dict[str, Any]] = {
        "cpu": {},
        "reference": {"reference": True},
        "compiled": {"compile": True, "cache_dir": tmp_path},
    }
    options = tables[platform]
    llm = LLM(tiny_path, device="cpu", activations="exact", max_num_seqs=2, **options)
    if not mistake:
        check_draft_layer(llm)
        return
    model = first_rank(llm._engine.executor).runner.model
    assert isinstance(model, DeepseekV4)
    layers: list[Any] = list(model.layers)
    for layer in layers:
        layer.__class__ = ChangedLayer
    with pytest.raises((AssertionError, TypeError)):
        check_draft_layer(llm)


def test_a_compiled_layer_is_called_as_a_decoder_layer() -> None:
    compiled, plain = (inspect.signature(c.__call__) for c in (CompiledLayer, DecoderLayer))
    assert compiled == plain
    assert plain.return_annotation is not inspect.Signature.empty
    assert plain.parameters["state"].annotation == LayerState | torch.Tensor


# --- 3 --------------------------------------------------------------------------------------------

# A kernel package as some are: importing it takes the driver, which a forked child cannot use.
DRIVER = """
import os
initialised_by = os.getpid()
def run():
    if os.getpid() != initialised_by:
        raise RuntimeError("Cannot re-initialize CUDA in forked subprocess")
"""
FORK = """
import importlib, importlib.abc, json, os, sys
class Prepend(importlib.abc.MetaPathFinder):
    "Puts the mistake back: a module of the package that imports the driver's at its top."
    def find_spec(self, name, path, target=None):
        if name != "finwhale.platform":
            return None
        sys.meta_path.remove(self)
        import importlib.util
        spec = importlib.util.find_spec(name)
        load = spec.loader.get_source
        spec.loader.source_to_code = lambda data, path: compile(
            "import deep_gemm\\n" + load(name), path, "exec", dont_inherit=True)
        spec.loader.get_code = lambda name: spec.loader.source_to_code(b"", spec.origin)
        return spec
if sys.argv[2] == "True":
    sys.meta_path.insert(0, Prepend())
for name in json.loads(sys.argv[1]):
    importlib.import_module(name)
pid = os.fork()
if pid == 0:
    try:
        import deep_gemm
        deep_gemm.run()
    except RuntimeError as error:
        print(error, file=sys.stderr, flush=True)
        os._exit(1)
    os._exit(0)
sys.exit(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
"""
MODULES = (
    "finwhale.llm",
    "finwhale.engine.loop.engine",
    "finwhale.compiled",
    "finwhale.server.link.worker",
    "finwhale.cli.main",
    "finwhale.cli.serve",
    "finwhale.ops.tables.optional",
)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
@pytest.mark.parametrize(
    "mistake",
    [
        # tests/process/test_import_is_inert.py imports every module.
        pytest.param(False, id="as it is", marks=pytest.mark.long),
        pytest.param(True, id="put back"),
    ],
)
def test_cuda_initialised_by_an_import_before_a_fork(tmp_path: Path, mistake: bool) -> None:
    """With CUDA: tests/gpu."""
    (tmp_path / "deep_gemm").mkdir()
    (tmp_path / "deep_gemm" / "__init__.py").write_text(DRIVER)
    names = "[" + ", ".join(f'"{name}"' for name in MODULES) + "]"
    done = python(FORK, names, str(mistake), path=tmp_path)
    expect(done, mistake, "Cannot re-initialize CUDA in forked subprocess")


# --- 4 --------------------------------------------------------------------------------------------


@MISTAKE
def test_streams_created_per_draft_layer(
    tiny_path: Path, mistake: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three, once a model, which the MTP layer shares."""
    run = first_rank(LLM(tiny_path, device="cpu", max_num_seqs=2)._engine.executor).runner
    made: list[object] = []
    monkeypatch.setattr(torch.cuda, "Stream", lambda device, priority: made.append(device))

    def on_a_gpu(device: torch.device, wanted: bool = True) -> SideStreams:
        return SideStreams(torch.device("cuda"))

    def own_streams(context: LayerContext, weights: Any, layer: int) -> DecoderLayer:
        streams = on_a_gpu(torch.device("cpu"))
        return DecoderLayer(replace(context, side_streams=streams), weights, layer)

    monkeypatch.setattr(base_module, "SideStreams", on_a_gpu)
    if mistake:
        monkeypatch.setattr(layer_module, "DecoderLayer", own_streams)
    assert isinstance(run.model, DeepseekV4)
    weights, config = run.model.weights, run.model.config
    model = DeepseekV4(config, run.ops, weights, round_activations=False, max_positions=16)
    draft_head = model.draft_head
    assert draft_head is not None

    def check() -> None:
        assert len(made) == len(PRIORITIES)
        layers = [*model.layers, *draft_head.layers]
        for layer in layers:
            assert isinstance(layer, DecoderLayer)
            assert layer.attn.side_streams is layer.ffn.side_streams is model.side_streams

    if mistake:
        with pytest.raises(AssertionError):
            check()
    else:
        check()


# --- 5 --------------------------------------------------------------------------------------------

DEFAULT_MODE = """
import sys
import torch
from finwhale import LLM, SamplingParams
if sys.argv[2] == "True":
    import finwhale.engine.start.decisions as decisions
    from finwhale.compiled.custom_ops import custom
    load_ops = decisions.load_ops
    decisions.load_ops = lambda *args, **options: custom(load_ops(*args, **options))
llm = LLM(sys.argv[1], device="cpu", max_num_seqs=2)
llm.generate([[5, 6, 7]], SamplingParams(max_tokens=2, ignore_eos=True))
names = [n for n in torch._C._dispatch_get_all_op_names() if n.startswith("finwhale")]
assert not names, f"left registered: {names}"
from finwhale.ops.tables.cpu import OPS
layer = llm._engine.executor.runner.model.layers[0]
assert layer.mhc_pre is OPS.mhc_pre and layer.attn.linear is OPS.linear
"""


@MISTAKE
def test_a_wrapper_operator_left_registered_in_the_default_mode(
    tiny_path: Path, mistake: bool
) -> None:
    done = python(DEFAULT_MODE, str(tiny_path), str(mistake))
    expect(done, mistake, "left registered")

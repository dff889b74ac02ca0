"""The compiled mode: the same tokens, from graphs that a second process only loads."""

import json
import os
import subprocess
import sys
import zipfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from finwhale import LLM, FinwhaleError, SamplingParams
from finwhale.compiled import graph_forms, graph_store
from finwhale.compiled.compiled_layer import CompiledLayer
from finwhale.compiled.graph_forms import Graph
from finwhale.compiled.graph_store import GraphStore, Traceable
from finwhale.config import EngineConfig
from finwhale.engine.rank.executor import local_executor
from finwhale.engine.rank.launch_signatures import build_configuration
from finwhale.errors import ResourceError
from finwhale.models.deepseek_v4.dspark import DsparkHead
from finwhale.models.deepseek_v4.layer import DecoderLayer
from finwhale.models.deepseek_v4.model import DeepseekV4
from finwhale.testing.stepping import Stepper
from finwhale.testing.tiny import (
    random_weights,
    tiny_config,
    with_dspark,
    write_plain_checkpoint,
)

# Two graphs: the layer and the MTP layer are of one kind, and half the time of a test is g++'s.
ONE_LAYER = tiny_config(3) | {
    "vocab_size": 400,
    "hidden_size": 64,
    "sliding_window": 13,
    "max_position_embeddings": 512,
    "num_hidden_layers": 1,
    "num_hash_layers": 0,
    "compress_ratios": [0, 0],
    "hc_sinkhorn_iters": 3,
}
PROMPTS = [[5, 6, 7], [9] * 20, list(range(10, 150))]
GREEDY = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)

# What a process finds: tokens of the model, and the MTP layer's streams of a text.
START = """
import json, sys
import torch
from finwhale import LLM, SamplingParams
from finwhale.models.step_inputs import Inline
from finwhale.testing.stepping import Stepper
torch.set_num_threads(1)
BEFORE
options = json.loads(sys.argv[2])
llm = LLM(sys.argv[1], device="cpu", activations="exact", max_num_seqs=4, **options)
params = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)
tokens = [r.outputs[0].token_ids for r in llm.generate(json.loads(sys.argv[3]), params)]
runner, stepper = llm.engine.executor.runner, Stepper(llm.engine)
text = list(range(20, 40))
with torch.inference_mode():
    sequence = stepper.sequence(text)
    (streams,) = stepper.step([(sequence, len(text) - 1)])
    following = torch.tensor(text[1:])
    mtp = runner.model.draft_head
    draft = mtp(stepper.inputs, streams, following, runner.cache, Inline())
    draft = mtp.compute_logits(draft)
kinds = sorted({type(layer).__name__ for layer in [*runner.model.layers, *mtp.layers]})
count = llm.engine.executor.description.compiled_layers
print(json.dumps([tokens, draft.argmax(-1).tolist(), draft.tolist(), count, kinds]))
"""
# A second start may neither trace nor compile.
NO_TRACING = """
def refuse(*args, **kwargs):
    raise AssertionError("traced or compiled")
torch.export.export = torch.compile = torch._inductor.aoti_compile_and_package = refuse
torch._inductor.standalone_compile = refuse
"""
# No environment variable turns these precompiled headers off.
COMPILING = """
from torch._inductor import config
config.aot_inductor.precompile_headers = False
# Code without vector instructions, which takes less time to make.
config.cpp.simdlen = 0
"""
# The other form of a graph, which is a GPU's.
MODULES = """
from finwhale.compiled import graph_forms
graph_forms.FORMS["cpu"] = graph_forms.MODULE
"""
# The failure that other engines shipped: operators are registered where something is traced.
REGISTERED_WHILE_TRACING = """
from finwhale.compiled.graph_store import GraphStore
from finwhale.compiled import custom_ops
register, custom_ops.register = custom_ops.register, lambda ops: None
compile = GraphStore._compile
def tracing(self, *args):
    register(OPS)
    compile(self, *args)
GraphStore._compile = tracing
"""


def start(path: Path, options: dict[str, Any], before: str = "") -> "subprocess.CompletedProcess":
    # Code that calls the kernels is not worth g++'s time here, nor are precompiled headers for a
    # few files.
    fast = {
        "AOT_INDUCTOR_COMPILE_WRAPPER_OPT_LEVEL": "O0",
        "TORCHINDUCTOR_CPP_CACHE_PRECOMPILE_HEADERS": "0",
        "TORCHINDUCTOR_VEC_ISA_OK": "1",  # trying each kind of vector instructions takes 20 s
    }
    env = {**os.environ, "OMP_NUM_THREADS": "1", **fast}
    code = START.replace("BEFORE", before)
    arguments = [str(path), json.dumps(options), json.dumps(PROMPTS)]
    return subprocess.run(
        [sys.executable, "-c", code, *arguments], env=env, text=True, capture_output=True
    )


def read(done: "subprocess.CompletedProcess") -> Any:
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.fixture(scope="module")
def one_layer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("compiled") / "model"
    write_plain_checkpoint(path, ONE_LAYER, random_weights(ONE_LAYER, seed=5))
    return path


# Compiling takes most of the time. tests/ops/test_triton_amd.py also compiles layers as modules.
FORMS = [
    pytest.param("", id="libraries"),
    pytest.param(MODULES, id="modules", marks=pytest.mark.long),
]


@pytest.fixture(scope="module", params=FORMS)
def form(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def kept(form: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("kept")


@pytest.fixture(scope="module")
def first_start(one_layer: Path, form: str, kept: Path) -> Any:
    """What the process that compiles finds."""
    return read(start(one_layer, {"compile": True, "cache_dir": str(kept)}, form + COMPILING))


@pytest.fixture(scope="module")
def default_start(one_layer: Path) -> Any:
    """What a process finds without the compiled mode."""
    return read(start(one_layer, {}))


def test_a_second_start_loads_and_gives_the_same(
    one_layer: Path, form: str, kept: Path, first_start: Any, default_start: Any
) -> None:
    """On the model and on the MTP layer, bit for bit, and the tokens of the default mode."""
    tokens, drafts, logits, num_compiled, kinds = first_start
    assert num_compiled == 2 and kinds == ["CompiledLayer"]
    again = read(start(one_layer, {"compile": True, "cache_dir": str(kept)}, form + NO_TRACING))
    assert again == [tokens, drafts, logits, 0, kinds]
    assert default_start[:2] == [tokens, drafts] and default_start[3:] == [0, ["DecoderLayer"]]
    assert torch.allclose(torch.tensor(default_start[2]), torch.tensor(logits), atol=1e-4)


def test_operators_registered_while_tracing_fail_the_second_start(
    one_layer: Path, form: str, kept: Path, first_start: Any
) -> None:
    """So the test above sees that mistake."""
    done = start(
        one_layer,
        {"compile": True, "cache_dir": str(kept)},
        form + "from finwhale.ops.tables.cpu import OPS\n" + REGISTERED_WHILE_TRACING,
    )
    assert done.returncode != 0
    assert "finwhale_cpu" in done.stderr, done.stderr[-2000:]


def uncompiled(self: GraphStore, wanted: Traceable) -> Graph:
    """The function that would be compiled, as it is: what it takes and gives, in no time."""

    def run(arguments: list[Tensor]) -> list[Tensor]:
        assert len(arguments) == len(wanted.arguments)
        for given, argument in zip(arguments, wanted.arguments, strict=True):
            sample = argument.sample
            assert given.dtype == sample.dtype and given.dim() == sample.dim()
            fixed = [d for d in range(sample.dim()) if d not in argument.open_dims]
            assert [given.shape[d] for d in fixed] == [sample.shape[d] for d in fixed]
            if argument.open_dims:
                assert given.is_contiguous()
            else:
                assert given.stride() == sample.stride()
        return list(wanted.fn(arguments))

    self.num_compiled += 1
    return run


@pytest.fixture
def not_compiling(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(GraphStore, "graph", uncompiled)


@pytest.mark.usefixtures("not_compiling")
@pytest.mark.parametrize("seed", [0, 3, pytest.param(7, marks=pytest.mark.long)])
def test_traced_functions_give_the_layers_results(
    tmp_path: Path, seed: int, one_thread: None
) -> None:
    """Every kind of layer, prompts below and above what attention selects, decodes together."""
    config = tiny_config(seed)
    write_plain_checkpoint(tmp_path, config, random_weights(config, seed))
    options: dict[str, Any] = {"device": "cpu", "activations": "exact", "max_num_seqs": 4}
    plain = LLM(tmp_path, **options)
    traced = LLM(tmp_path, **options, compile=True, cache_dir=str(tmp_path / "kept"))
    text = [(7 * i) % config["vocab_size"] for i in range(300)]
    cuts = [*range(1, 12), 70, 71, 72, 200, *range(201, 280, 3)]
    found, wanted = (Stepper(llm.engine).read(text, cuts).flatten(1) for llm in (traced, plain))
    error = (found - wanted).norm(dim=1) / wanted.norm(dim=1)
    assert error.max() < 1e-4
    together = [text[:n] for n in (3, 130, 200)]
    params = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
    one, other = (llm.generate(together, params) for llm in (traced, plain))
    assert [r.outputs[0].token_ids for r in one] == [r.outputs[0].token_ids for r in other]


def keeping(run: Callable[..., Tensor], kept: list[Tensor]) -> Callable[..., Tensor]:
    """`run`, which adds its results to a list."""

    def noted(*args: Any) -> Tensor:
        kept.append(run(*args))
        return kept[-1]

    return noted


@pytest.mark.usefixtures("not_compiling")
def test_traced_stages_of_dspark_give_their_results(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, one_thread: None
) -> None:
    """Stages have fewer experts than the model's layers, and their tokens see further rows."""
    config = with_dspark(
        ONE_LAYER | {"num_hidden_layers": 3, "compress_ratios": [0, 4, 128]},
        dspark_n_routed_experts=2,
        dspark_num_experts_per_tok=1,
    )
    write_plain_checkpoint(tmp_path, config, random_weights(config, seed=5))
    found = []
    for options in ({}, {"compile": True, "cache_dir": str(tmp_path / "kept")}):
        engine = LLM(
            tmp_path,
            device="cpu",
            activations="exact",
            max_num_seqs=4,
            draft_tokens=5,
            **options,  # type: ignore[arg-type]
        ).engine
        runner = local_executor(engine.executor).runner
        assert isinstance(runner.model, DeepseekV4)
        head = runner.model.draft_head
        assert isinstance(head, DsparkHead)
        layers = {type(layer) for layer in [*runner.model.layers, *head.layers]}
        assert layers == {CompiledLayer if options else DecoderLayer}
        blocks: list[Tensor] = []
        monkeypatch.setattr(head, "run_block", keeping(head.run_block, blocks))
        texts = [[(7 * i) % 390 for i in range(n)] for n in (3, 130, 20)]
        params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
        results = [engine.add_request(str(i), text, params) for i, text in enumerate(texts)]
        while engine.has_work:
            engine.step()
        tokens = [result.outputs[0].token_ids for result in results]
        found.append((tokens, blocks))
    (tokens, wanted), (compiled_tokens, compiled) = found
    assert compiled_tokens == tokens and len(wanted) == len(compiled) >= 10
    for one, other in zip(compiled, wanted, strict=True):
        assert (one - other).norm() < 1e-4 * other.norm()


@pytest.mark.usefixtures("not_compiling")
def test_layers_of_a_kind_share_their_graphs(
    tiny_path: Path, tmp_path: Path, one_thread: None
) -> None:
    llm = LLM(tiny_path, device="cpu", compile=True, cache_dir=str(tmp_path))
    model = local_executor(llm.engine.executor).runner.model
    assert isinstance(model, DeepseekV4) and model.draft_head is not None
    layers = [*model.layers, *model.draft_head.layers]
    assert all(isinstance(layer, CompiledLayer) for layer in layers) and len(layers) == 5


def test_a_cache_that_one_mode_filled_is_not_complete_for_the_other(tiny_path: Path) -> None:
    """They launch different kernels: attention rounds its output in the default mode alone."""
    engine = LLM(tiny_path, device="cpu").engine
    config, model = engine.config, engine.model_config

    def of(config: EngineConfig) -> object:
        return build_configuration(config, model, can_capture=False, max_len=64)

    assert of(config) == of(replace(config, cache_dir="elsewhere"))
    for changes in ({"compile": True}, {"wo_a_input": "bf16"}):
        assert of(config) != of(replace(config, **changes))


def signatures(make: Callable[..., LLM], **options: Any) -> set[str]:
    found: list[str] = []

    def keep(self: GraphStore, wanted: Traceable) -> Graph:
        found.append(wanted.signature())
        return lambda arguments: list(wanted.fn(arguments))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(GraphStore, "graph", keep)
        make(compile=True, **options)
    return set(found)


def test_a_graph_s_signature_names_what_it_depends_on(
    new_llm: Callable[..., LLM], no_tokenizer_path: Path, tmp_path: Path
) -> None:
    """Rounding is in the code; the sizes of caches and batches are not."""
    kept = str(tmp_path)
    exact = signatures(new_llm, cache_dir=kept)
    # Entries: first with a window, C4, C128; the MTP layer enters as the first layer does. The
    # indexer's choice. Two ways to route.
    assert len(exact) == 3 + 1 + 2
    assert signatures(new_llm, cache_dir=kept, max_num_seqs=3, max_model_len=256) == exact
    trained = signatures(new_llm, cache_dir=kept, activations="as-trained")
    assert not trained & exact
    # The indexer's choice alone reads no weight of attention.
    other = signatures(new_llm, cache_dir=kept, activations="as-trained", wo_a_input="bf16")
    assert len(other) == len(trained) and len(trained & other) == 1


@pytest.fixture
def found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[], tuple[Any, int]]:
    """Gets a graph from a new store that fakes compilation. Returns it and `num_compiled`."""

    def compiling(self: GraphStore, wanted: Traceable, path: Path) -> None:
        graph_store.keep(path, b"code of " + wanted.name.encode())

    def loading(path: Path) -> Any:
        return path.read_bytes()

    monkeypatch.setattr(GraphStore, "_compile", compiling)
    form = replace(graph_forms.LIBRARY, load=loading)
    monkeypatch.setitem(graph_forms.FORMS, "cpu", form)
    wanted = Traceable("a graph", lambda flat: (flat[0],), [], ())

    def found() -> tuple[Any, int]:
        store = GraphStore(tmp_path / "graphs", torch.device("cpu"), "finwhale_cpu")
        return store.graph(wanted), store.num_compiled

    return found


def test_a_read_only_directory_is_enough_for_compiled_graphs(
    tmp_path: Path, found: Callable[[], tuple[Any, int]]
) -> None:
    assert found() == (b"code of a graph", 1)
    (path,) = (tmp_path / "graphs").glob("*.pt2")
    # Root may write to every directory, but a directory is no lock file.
    path.with_suffix(".lock").unlink()
    path.with_suffix(".lock").mkdir()
    assert found() == (b"code of a graph", 0)
    path.unlink()
    with pytest.raises(ResourceError, match=r"cannot be kept in .*: Is a directory"):
        found()


def test_a_damaged_graph_is_compiled_again(
    tmp_path: Path, found: Callable[[], tuple[Any, int]], caplog: pytest.LogCaptureFixture
) -> None:
    assert [found(), found()] == [(b"code of a graph", 1), (b"code of a graph", 0)]
    (path,) = (tmp_path / "graphs").glob("*.pt2")
    path.write_bytes(b"code of a gr")
    assert found() == (b"code of a graph", 1)
    assert sum("damaged" in record.message for record in caplog.records) == 1
    path.with_suffix(".sum").unlink()
    assert [found(), found()] == [(b"code of a graph", 1), (b"code of a graph", 0)]


@pytest.mark.parametrize(
    "dies", [True, pytest.param(False, marks=pytest.mark.long)], ids=["dies", "fails"]
)
def test_code_that_cannot_be_loaded_is_refused(
    tiny_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dies: bool
) -> None:
    """As on a machine whose compiler and torch do not fit: an error, and nothing is kept."""

    def compiling(program: Any, *, package_path: str, inductor_configs: Any) -> None:
        with zipfile.ZipFile(package_path, "w") as package:
            package.writestr("data/aotinductor/model/code.wrapper.so", b"none")

    monkeypatch.setattr(torch._inductor, "aoti_compile_and_package", compiling)
    if dies:
        monkeypatch.setattr(graph_forms, "TRIAL", "import os; os.kill(os.getpid(), 11)")
    how = "crashes with SIGSEGV" if dies else "fails: .+"
    with pytest.raises(FinwhaleError, match=rf"does not work here: a process .+ {how} \(torch"):
        LLM(tiny_path, device="cpu", compile=True, cache_dir=str(tmp_path))
    assert {path.suffix for path in (tmp_path / "layers").iterdir()} == {".lock"}


def test_unsupported_options_are_refused(tiny_path: Path, tmp_path: Path) -> None:
    for options in ({"reference": True}, {"dtype": "bfloat16"}):
        with pytest.raises(FinwhaleError, match="compiled mode is for the platform's own"):
            LLM(tiny_path, device="cpu", compile=True, cache_dir=str(tmp_path), **options)
    file = tmp_path / "file"
    file.touch()
    with pytest.raises(FinwhaleError, match="cannot be kept in"):
        LLM(tiny_path, device="cpu", compile=True, cache_dir=str(file))

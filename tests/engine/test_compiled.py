"""The compiled mode: the same tokens, from graphs that a second process only loads."""

import json
import os
import re
import subprocess
import sys
import zipfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support.tiny import (
    random_weights,
    tiny_config,
    with_dspark,
    write_plain_checkpoint,
)
from torch import Tensor

from finwhale import LLM, FinwhaleError
from finwhale.compiled import CompiledMode, graph_forms, graph_store
from finwhale.compiled.graph_forms import Graph
from finwhale.compiled.graph_store import Argument, GraphStore, Traceable, trace
from finwhale.config import EngineConfig
from finwhale.demo import DEMO_PATH, DSPARK_PATH
from finwhale.engine.ranks.ranks import first_rank
from finwhale.engine.start.decisions import Decisions
from finwhale.errors import ResourceError
from finwhale.models.deepseek_v4.compressor import C4Compressor
from finwhale.ops.tables.cpu import OPS

# Every kind of layer: sliding window alone, C4 and C128; hash-routed and ordinary experts; a draft
# head. Six graphs, of which the stages of DSpark use two of the model's and have one.
SMALL = with_dspark(
    tiny_config(3)
    | {
        "vocab_size": 400,
        "hidden_size": 64,
        "sliding_window": 13,
        "max_position_embeddings": 512,
        "num_hidden_layers": 3,
        "num_hash_layers": 1,
        "compress_ratios": [0, 4, 128, 0],
        "index_topk": 16,
        "hc_sinkhorn_iters": 2,
    }
)
# One layer, of the kind with the most operators. A graph takes ten seconds to compile.
ONE_LAYER = {name: value for name, value in SMALL.items() if not name.startswith("dspark")} | {
    "num_hidden_layers": 1,
    "num_hash_layers": 0,
    "compress_ratios": [4],
    "num_nextn_predict_layers": 0,
}

# What a process finds: tokens of three requests together, outputs of the draft head, and the
# residual streams of a text that is read in pieces.
START = """
import json, sys
import torch
from finwhale import LLM, SamplingParams
from finwhale.engine.ranks.ranks import first_rank
from tests.support.stepping import Stepper
torch.set_num_threads(1)
BEFORE
def found(**options):
    llm = LLM(
        sys.argv[1], device="cpu", activations="exact", max_num_seqs=4, draft_tokens=DRAFTS,
        **options,
    )
    executor, blocks = first_rank(llm._engine.executor), []
    model = executor.runner.model
    layers, head = list(model.layers), model.draft_head
    if DRAFTS:
        run = head.run_block
        head.run_block = lambda *args: blocks.append(run(*args)) or blocks[-1]
        layers += head.layers
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    prompts = [[(7 * i) % 390 for i in range(n)] for n in (3, 130, 20)]
    tokens = [r.outputs[0].token_ids for r in llm.generate(prompts, params)]
    text = [(7 * i) % 390 for i in range(300)]
    cuts = [*range(1, 12), 70, 71, 72, 200, *range(201, 280, 3)]
    streams = Stepper(llm._engine).read(text, cuts).flatten(1)
    kinds = sorted({type(layer).__name__ for layer in layers})
    return [tokens, executor.description.compiled_layers, kinds, blocks, streams]
def plain(tensors):
    return [t.tolist() for t in tensors]
compiled = found(compile=True, cache_dir=sys.argv[2])
print(json.dumps([*compiled[:3], plain(compiled[3]), compiled[4].tolist()]))
if sys.argv[3:]:
    default = found()
    assert default[:3] == [compiled[0], 0, ["DecoderLayer"]], default[:3]
    assert len(default[3]) == len(compiled[3]) and len(compiled[3]) >= min(DRAFTS, 3)
    for one, other in zip([*compiled[3], compiled[4]], [*default[3], default[4]], strict=True):
        error = (one - other).flatten(1).norm(dim=1) / other.flatten(1).norm(dim=1)
        assert error.max() < 1e-4, error
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


@dataclass(frozen=True)
class Case:
    """A model, and the form of its graphs."""

    config: dict[str, Any]
    num_graphs: int
    form: str = ""

    def start(
        self, path: Path, kept: Path, before: str, *compare: str
    ) -> subprocess.CompletedProcess[str]:
        # Code that calls the kernels is not worth g++'s time here.
        fast = {
            "AOT_INDUCTOR_COMPILE_WRAPPER_OPT_LEVEL": "O0",
            "TORCHINDUCTOR_CPP_CACHE_PRECOMPILE_HEADERS": "0",
            "TORCHINDUCTOR_VEC_ISA_OK": "1",  # trying each kind of vector instructions takes 20 s
        }
        env = {**os.environ, "OMP_NUM_THREADS": "1", **fast}
        drafts = self.config.get("dspark_block_size", 0)
        code = START.replace("BEFORE", self.form + before).replace("DRAFTS", str(drafts))
        arguments = [str(path), str(kept), *compare]
        return subprocess.run(
            [sys.executable, "-c", code, *arguments], env=env, text=True, capture_output=True
        )


def read(done: subprocess.CompletedProcess[str]) -> Any:
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


# Compiling takes most of the time. tests/ops/test_triton_amd.py also compiles layers as modules.
CASES = [
    pytest.param(Case(ONE_LAYER, 2), id="libraries"),
    pytest.param(Case(SMALL, 6), id="all-libraries", marks=pytest.mark.long),
    pytest.param(Case(SMALL, 6, MODULES), id="all-modules", marks=pytest.mark.long),
]


@pytest.fixture(scope="module", params=CASES)
def case(request: pytest.FixtureRequest) -> Case:
    case: Case = request.param
    return case


@pytest.fixture(scope="module")
def small(case: Case, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("compiled") / "model"
    write_plain_checkpoint(path, case.config, random_weights(case.config, seed=5))
    return path


@pytest.fixture(scope="module")
def kept(case: Case, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("kept")


@pytest.fixture(scope="module")
def first_start(small: Path, case: Case, kept: Path) -> Any:
    """What the process that compiles finds."""
    return read(case.start(small, kept, COMPILING))


def test_a_second_start_loads_and_gives_the_same(
    small: Path, case: Case, kept: Path, first_start: Any
) -> None:
    """Bit for bit, and the tokens of the default mode."""
    tokens, num_compiled, kinds, *values = first_start
    assert num_compiled == case.num_graphs and kinds == ["CompiledLayer"]
    again = read(case.start(small, kept, NO_TRACING, "compare"))
    assert again == [tokens, 0, kinds, *values]


def test_operators_registered_while_tracing_fail_the_second_start(
    small: Path, case: Case, kept: Path, first_start: Any
) -> None:
    """So the test above sees that mistake."""
    mistake = "from finwhale.ops.tables.cpu import OPS\n" + REGISTERED_WHILE_TRACING
    done = case.start(small, kept, mistake)
    assert done.returncode != 0
    assert "finwhale_cpu" in done.stderr, done.stderr[-2000:]


# The compiled mode as users start it, with the sizes of the embedded model: seven minutes of g++.
EMBEDDED = [("demo", "0"), ("demo", "3"), ("demo-dspark", "0"), ("demo-dspark", "5")]


@pytest.mark.long
@pytest.mark.parametrize("model", ["demo", "demo-dspark"])
def test_the_embedded_model_starts_twice(model: str, tmp_path: Path) -> None:
    """With and without drafts: the same text, and the second start of each compiles nothing."""

    def generate(*options: str, code: str = "") -> str:
        command = f"{code}\nimport sys\nfrom finwhale.cli.main import main\nsys.exit(main())"
        arguments = ["generate", "Once upon a time", "--max-tokens", "8", "--temperature", "0"]
        paths = ["--model", model] if model != "demo" else []
        done = subprocess.run(
            [sys.executable, "-c", command, *arguments, *paths, "--device", "cpu", *options],
            text=True,
            capture_output=True,
        )
        assert done.returncode == 0, done.stderr[-3000:]
        return done.stdout

    compiled = ("--compile", "--cache-dir", str(tmp_path))
    drafts = ("--draft-tokens", "3" if model == "demo" else "5")
    wanted = generate()
    assert wanted.strip()
    assert generate(*compiled) == wanted
    # The draft head is loaded with drafts only, so its graphs are compiled with them only.
    assert generate(*compiled, *drafts) == wanted
    for options in ((), drafts):
        assert generate(*compiled, *options, code="import torch\n" + NO_TRACING) == wanted


def test_every_graph_of_the_embedded_model_is_traced(one_thread: None) -> None:
    """With both draft heads, by torch's tracer: no graph fixes a size that must stay dynamic."""
    found: dict[tuple[str, ...], str] = {}
    for path, options in ((DEMO_PATH, {}), (DSPARK_PATH, {"draft_tokens": 5})):
        llm = LLM(path, device="cpu", max_model_len=300, max_num_seqs=1, **options)
        runner = first_rank(llm._engine.executor).runner
        for _, tracers in CompiledMode(OPS, runner.model.config).tracers(
            runner.model, runner.cache
        ):
            for tracer in tracers:
                # Each iteration adds the same operations again, and tracing them takes time.
                tracer.config = replace(tracer.config, hc_sinkhorn_iters=2)
                for wanted in (tracer.enter(), tracer.leave()):
                    # The heads' models are the same but for the names in the configuration.
                    key = wanted.name, *(a.signature() for a in wanted.arguments)
                    if key not in found:
                        trace(wanted)
                        found[key] = wanted.name
    kinds = ["enter C128Compressor", "enter C4Compressor", "enter window", "enter window first"]
    assert sorted(found.values()) == [*kinds, "leave hash", "leave score"]


def test_a_failure_names_the_graph(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, one_thread: None
) -> None:
    """In one line: a layer that fixes the number of tokens, and a compiler that fails."""
    project = C4Compressor.project

    def fixing(self: C4Compressor, x: Tensor) -> Tensor:
        return project(self, x[: len(x)])

    monkeypatch.setattr(C4Compressor, "project", fixing)
    config = SMALL | {"compress_ratios": [4, 0, 128, 0, 0, 0]}
    write_plain_checkpoint(tmp_path / "model", config, random_weights(config, seed=5))
    with pytest.raises(ResourceError) as caught:
        LLM(tmp_path / "model", device="cpu", compile=True, cache_dir=str(tmp_path))
    name = "enter C4Compressor first"
    line = rf'the compiled mode cannot trace the graph "{name}" \(torch \S+\): .*onstraint.*'
    assert re.fullmatch(line, str(caught.value)), caught.value
    store = GraphStore(tmp_path / "graphs", torch.device("cpu"), "none")
    wanted = Traceable("sum", lambda flat: (flat[0].sum(1),), [Argument(torch.ones(2, 3))], ())
    with (
        torch._inductor.config.patch({"cpp.cxx": ("false",), "cpp.vec_isa_ok": True}),
        pytest.raises(ResourceError) as caught,
    ):
        store.graph(wanted)
    line = (
        r'the compiled mode cannot compile the graph "sum", which needs a C\+\+ compiler \(torch .*'
    )
    assert re.fullmatch(line, str(caught.value)), caught.value
    assert {path.suffix for path in (tmp_path / "graphs").iterdir()} == {".lock"}


def test_a_cache_that_one_mode_filled_is_not_complete_for_the_other(tiny_path: Path) -> None:
    """They launch different kernels: attention rounds its output in the default mode alone."""
    engine = LLM(tiny_path, device="cpu")._engine
    config, model = engine.config, engine.model_config

    def of(config: EngineConfig) -> object:
        chosen = object.__new__(Decisions)
        chosen.config, chosen.model_config, chosen.sizes = config, model, engine.sizes
        chosen.groups = ()
        chosen.capabilities = first_rank(engine.executor).runner.ops.capabilities
        return chosen.build_configuration(64)

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
    # Entries: first with a window, C4, C128; the MTP layer enters as the first layer does. Two ways
    # to route.
    assert len(exact) == 3 + 2
    assert signatures(new_llm, cache_dir=kept, max_num_seqs=3, max_model_len=256) == exact
    trained = signatures(new_llm, cache_dir=kept, activations="as-trained")
    assert not trained & exact
    other = signatures(new_llm, cache_dir=kept, activations="as-trained", wo_a_input="bf16")
    assert len(other) == len(trained) and not trained & other


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

"""The AMD table in Triton's interpreter on the CPU, compared with the portable nvidia table.

Most kernels are the same; mHC takes two steps instead of one and rounds the residual streams
between them, so that the results are equal bit for bit. Tests marked long run the model, the MTP
layer and the engine.
"""

import sys
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support.stepping import Stepper
from tests.support.tiny import random_weights, tiny_config, write_quantised_checkpoint
from torch import Tensor
from triton.backends.amd.compiler import HIPOptions
from triton.runtime.interpreter import InterpretedFunction

import finwhale.engine.start.decisions as decisions
import finwhale.engine.start.kernels as kernels
import finwhale.engine.steps.inputs as inputs
from finwhale import LLM, SamplingParams
from finwhale.compiled import graph_forms
from finwhale.engine.ranks.ranks import first_rank
from finwhale.models.step_inputs import Inline
from finwhale.ops import load_ops
from finwhale.ops.mhc import ref
from finwhale.ops.paging import PageTable
from finwhale.platform import Platform

from .kernels_support import DTYPES, Inputs, assert_all_close
from .test_triton_attention import EPS, Case, check
from .test_triton_mhc import PARAMS, state, weight

AMD, NVIDIA = Platform("amd", "gfx942"), Platform("nvidia", "sm100")
# What the kernels take: whole groups of 128. A C4 and a C128 layer, and the MTP layer's window.
CONFIG = tiny_config(0, quantised=True) | {
    "vocab_size": 200,
    "hidden_size": 128,
    "num_hidden_layers": 2,
    "num_hash_layers": 1,
    "compress_ratios": [4, 128, 0],
    "num_attention_heads": 2,
    "o_groups": 1,
    "head_dim": 128,
    "qk_rope_head_dim": 64,
    "q_lora_rank": 128,
    "o_lora_rank": 128,
    "index_n_heads": 32,
    "index_head_dim": 128,
    "index_topk": 8,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 128,
    "sliding_window": 16,
    "hc_sinkhorn_iters": 3,
}
# A C4 entry completes. Never one token alone: its linear layers take the interpreter 20 s.
TEXT = [(7 * i) % 200 for i in range(8)]
GREEDY = SamplingParams(temperature=0, max_tokens=2, ignore_eos=True)


def llm_on(platform: Platform, path: Path, **options: Any) -> LLM:
    """An engine on the CPU that takes itself to be on another platform."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(decisions, "choose_device", lambda name: (platform, torch.device("cpu")))
        patch.setattr(kernels, "load_builds", no_builds)
        return LLM(path, max_num_seqs=2, max_model_len=256, enforce_eager=True, **options)


def no_builds(ops: Any, platform: Platform, index: int, directory: str | None) -> Any:
    from finwhale.ops.builds import Builds  # noqa: PLC0415

    return Builds()


@torch.inference_mode()
def read(llm: LLM) -> tuple[Tensor, Tensor]:
    """Logits after the last two tokens of two steps, of the model and of the MTP layer."""
    stepper, run = Stepper(llm._engine), first_rank(llm._engine.executor).runner
    mtp = run.model.draft_head
    assert mtp is not None
    sequence = stepper.sequence(TEXT[:-1])
    logits, drafts = [], []
    for start, end in ((0, 5), (5, 7)):
        (streams,) = stepper.step([(sequence, end - start)])
        assert stepper.inputs is not None
        following = torch.tensor(TEXT[start + 1 : end + 1])
        draft = mtp(stepper.inputs, streams, following, run.cache, Inline())
        logits.append(run.model.compute_logits(streams[-2:]))
        drafts.append(mtp.compute_logits(draft[-2:]))
    stepper.release(sequence)
    return torch.cat(logits), torch.cat(drafts)


def tokens_of(llm: LLM) -> list[list[int]]:
    """What two requests get that share their steps."""
    return [r.outputs[0].token_ids for r in llm.generate([TEXT[:3], TEXT[3:5]], GREEDY)]


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("amd") / "model"
    write_quantised_checkpoint(path, CONFIG, random_weights(CONFIG, seed=1))
    return path


def test_the_table_is_complete_and_portable() -> None:
    """No operator is a reference, and nothing of NVIDIA's is imported for it."""
    ops = load_ops(AMD)
    slow = [name for name, where in ops.implementations() if ".ref." in where]
    # "mhc_post_pre" is a pair of operators that are no references.
    assert set(slow) <= {"prepare_linear", "prepare_experts", "grouped_form", "mhc_post_pre"}
    assert ops.capabilities.packed_cache and not ops.capabilities.side_streams
    # torch 2.15 imports the package cuda itself.
    for package in ("deep_gemm", "cutlass", "flash_mla", "pynvml", "tilelang"):
        assert package not in sys.modules, package


@dataclass
class Amd:
    """An engine with the table, and its results.

    Attributes:
        values: what `read` gives.
        tokens: what `tokens_of` gives.
        options: the names of all launches' options.
    """

    llm: LLM
    values: tuple[Tensor, Tensor]
    tokens: list[list[int]]
    options: set[str]


@pytest.fixture(scope="module")
def amd(path: Path) -> Amd:
    options: set[str] = set()
    run = InterpretedFunction.run

    def recorded(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        options.update(kwargs.keys() - set(self.arg_names))
        return run(self, *args, grid=grid, warmup=warmup, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(InterpretedFunction, "run", recorded)
        llm = llm_on(AMD, path)
        assert first_rank(llm._engine.executor).runner.ops is load_ops(AMD)
        return Amd(llm, read(llm), tokens_of(llm), options)


@pytest.mark.long
def test_triton_knows_every_launch_s_options(amd: Amd) -> None:
    """The interpreter ignores options; Triton's compiler for AMD refuses those that it lacks."""
    assert "num_warps" in amd.options
    assert amd.options <= {field.name for field in fields(HIPOptions)}


@pytest.mark.long
def test_the_engine_s_tokens_are_the_nvidia_table_s(path: Path, amd: Amd) -> None:
    """And the logits, of the model and of the MTP layer, bit for bit."""
    nvidia = llm_on(NVIDIA, path)
    for found, wanted in zip(amd.values, read(nvidia), strict=True):
        assert found.isfinite().all()
        assert torch.equal(found, wanted)
    assert amd.tokens == tokens_of(nvidia)


@pytest.mark.long
def test_a_packed_page_is_one_piece_of_memory(amd: Amd) -> None:
    """The bytes of a sequence's pages, copied to other pages, are all of its state."""
    stepper = Stepper(amd.llm._engine)
    results = []
    for moves in (False, True):
        sequence = stepper.sequence(TEXT)
        stepper.step([(sequence, 6)])
        if moves:
            sequence = stepper.moved(sequence)
        results += stepper.step([(sequence, 2)])
        stepper.release(sequence)
    assert results[0].isfinite().all() and torch.equal(*results)


@pytest.mark.long
def test_compiled_layers_give_the_same(
    path: Path,
    amd: Amd,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """In a GPU's form, and where page tables lie as a captured step's do: rows apart."""

    made = 0

    def apart(pages: Tensor, first: Tensor, rows_per_page: int) -> PageTable:
        nonlocal made
        made += 1
        wide = pages.new_full((len(pages), pages.shape[1] + 3), -1)
        wide[:, : pages.shape[1]] = pages
        return PageTable(wide[:, : pages.shape[1]], first, rows_per_page)

    monkeypatch.setitem(graph_forms.FORMS, "cpu", graph_forms.MODULE)
    llm = llm_on(AMD, path, compile=True, cache_dir=tmp_path)
    assert llm._engine.executor.description.compiled_layers > 0
    monkeypatch.setattr(inputs, "PageTable", apart)
    for found, wanted in zip(read(llm), amd.values, strict=True):
        assert torch.equal(found, wanted)
    assert made


@pytest.mark.long
def test_logits_are_near_the_references(path: Path, amd: Amd) -> None:
    """In bfloat16 and with roundings to E4M3 between, as the references with them are to theirs."""
    wanted = read(llm_on(Platform.cpu(), path, dtype="float32"))
    for found, other in zip(amd.values, wanted, strict=True):
        error = (found - other).norm(dim=1) / other.norm(dim=1)
        assert error.max() < 0.25, error


@pytest.mark.parametrize("dtype", DTYPES)
def test_mhc_in_two_steps(dtype: torch.dtype) -> None:
    inputs = Inputs()
    w = weight(inputs, 100)
    args = state(inputs, 3, 100, dtype)
    found = load_ops(AMD).mhc_post_pre(*args, w, PARAMS)
    assert_all_close(found, ref.mhc_post_pre(*args, w, PARAMS))


def test_only_these_operators_are_the_table_s_own() -> None:
    """The experts are tested in test_triton_experts.py, mHC and attention below. The others differ
    in numbers of stages and of multiprocessors, which change no value in the interpreter.
    """
    amd, nvidia = load_ops(AMD), load_ops(NVIDIA)
    names = [name for name, _ in amd.implementations()]
    assert {name for name in names if getattr(amd, name) is not getattr(nvidia, name)} == {
        *("mhc_post_pre", "sparse_attention"),
        *("route_by_score", "route_by_hash", "experts_compute"),
        *("linear", "grouped_linear", "swiglu_mlp", "select_entries"),
    }


@pytest.mark.parametrize("dtype", DTYPES)
def test_mhc_has_the_nvidia_table_s_bits(dtype: torch.dtype) -> None:
    inputs = Inputs()
    w, args = weight(inputs, 100), state(inputs, 3, 100, dtype)
    found, wanted = (load_ops(table).mhc_post_pre(*args, w, PARAMS) for table in (AMD, NVIDIA))
    assert all(torch.equal(one, other) for one, other in zip(found, wanted, strict=True))


@pytest.mark.parametrize("end", [20, 260])
def test_attention_s_tiles(end: int) -> None:
    """More heads than a tile has, in a decode and in a chunk of a prompt."""
    case = Case(((end - 1, end), (3, 9)), 40, 128, 64, 32, "selected", 40)
    out = torch.full(case.q.shape, torch.nan, dtype=torch.bfloat16)
    inputs = case.q, case.rotary, EPS, case.tokens, case.window, case.entries
    load_ops(AMD).sparse_attention(*inputs, case.sink, case.scale, out)
    check(out.float(), case.wanted())

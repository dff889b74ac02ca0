"""New weights in a running engine: the bits of a fresh start, or nothing changes."""

import json
import pickle
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tests.support.integrity import check_engine
from tests.support.tensors import read_tensors
from tests.support.tiny import (
    random_weights,
    tiny_config,
    write_plain_checkpoint,
    write_quantised_checkpoint,
)
from torch import Tensor

from finwhale import (
    LLM,
    CheckpointError,
    EngineDeadError,
    RequestError,
    RequestOutput,
    ResourceError,
    SamplingParams,
)
from finwhale.checkpoint.stored import DTYPE_NAMES
from finwhale.engine.loop import weight_updates
from finwhale.engine.loop.weight_updates import WeightUpdates, _as_bytes
from finwhale.engine.ranks.local_executor import on_weights
from finwhale.engine.ranks.rank_weights import RankWeights
from finwhale.engine.ranks.ranks import first_rank
from finwhale.engine.ranks.staged_weights import StagedWeights
from finwhale.ops import Ops, load_ops
from finwhale.ops.cpu_gemm import _Half, _rows_are_independent
from finwhale.ops.moe import ExpertWeight
from finwhale.weights.tree import tensors_of

from .weights import bits_of, forms_of, in_one_buffer, weights_of

LONG = [7 * i % 400 for i in range(300)]  # more than a block
PROMPTS = [LONG, [1, 2, 3], [5] * 40]
LAST = "norm.weight"


def params(max_tokens: int = 8) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True, logprobs=3)


outputs = partial(bits_of, prompts=PROMPTS, params=params())


@pytest.fixture(scope="module")
def config(tiny_path: Path) -> dict[str, Any]:
    return dict(json.loads((tiny_path / "config.json").read_text()))


@pytest.fixture(scope="module")
def tensors(config: dict[str, Any]) -> dict[str, Tensor]:
    return random_weights(config, seed=4)


@pytest.fixture(scope="module")
def other_path(
    config: dict[str, Any], tensors: dict[str, Tensor], tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """Other weights of the same model."""
    path = tmp_path_factory.mktemp("other") / "model"
    write_plain_checkpoint(path, config, tensors)
    return path


@pytest.fixture(scope="module")
def old_path(tiny_path: Path) -> Path:
    return tiny_path


@pytest.fixture(scope="module")
def shared(old_path: Path) -> LLM:
    return LLM(old_path, device="cpu", activations="exact", max_num_seqs=4)


@pytest.fixture
def engine(shared: LLM, old_path: Path, one_thread: None) -> Iterator[LLM]:
    """One engine for all tests of this module, which get it with its first weights."""
    shared.resume()
    yield shared
    shared.resume()
    shared.update_weights(old_path, requests="abort")
    check_engine(shared._engine)
    assert not shared._engine.outputs.streams
    assert first_rank(shared._engine.executor).weights.staged is None


@pytest.fixture(scope="module")
def expected(other_path: Path) -> list[object]:
    """The outputs of a fresh start with the other weights."""
    return outputs(LLM(other_path, device="cpu", activations="exact", max_num_seqs=4))


@pytest.fixture(scope="module")
def before(shared: LLM) -> list[object]:
    return outputs(shared)


def test_tensors_of_every_dtype_reach_the_processes_of_other_ranks() -> None:
    """Work for other ranks is pickled, and torch cannot unpickle a tensor of FP8."""
    bits = torch.arange(96, dtype=torch.uint8)
    sent = {str(dtype): bits.view(dtype).view(2, -1) for dtype in DTYPE_NAMES}
    sent["scalar"] = torch.tensor(1.5)
    found: dict[str, Tensor] = {}
    staging: Any = SimpleNamespace(add=found.update)
    executor: Any = SimpleNamespace(weights=RankWeights(None, None, 1))  # type: ignore[arg-type]
    executor.weights.staged = staging
    work = partial(on_weights, RankWeights.stage_bytes, tensors=[*map(_as_bytes, sent.items())])
    pickle.loads(pickle.dumps(work, 5))(executor)
    assert found.keys() == sent.keys()
    for name, tensor in sent.items():
        assert found[name].dtype == tensor.dtype and found[name].shape == tensor.shape
        assert torch.equal(
            found[name].reshape(-1).view(torch.uint8), tensor.reshape(-1).view(torch.uint8)
        )


def test_updated_weights_give_the_bits_of_a_fresh_start(
    engine: LLM,
    before: list[object],
    expected: list[object],
    tensors: dict[str, Tensor],
    old_path: Path,
    other_path: Path,
) -> None:
    addresses = [tensor.data_ptr() for tensor in weights_of(engine)]
    assert before != expected
    # In any order, and in one buffer for all.
    engine.update_weights(in_one_buffer(reversed(tensors.items())))
    assert outputs(engine) == expected
    engine.update_weights(old_path)
    assert outputs(engine) == before
    engine.update_weights(other_path)
    assert outputs(engine) == expected
    assert [tensor.data_ptr() for tensor in weights_of(engine)] == addresses


@pytest.mark.parametrize("activations", ["exact", "as-trained"])
def test_updated_quantised_weights_give_the_bits_of_a_fresh_start(
    activations: str, tmp_path: Path, one_thread: None
) -> None:
    """The operators pack weights that float16 holds, on their first use."""
    config = tiny_config(3, quantised=True)
    paths = [tmp_path / str(seed) for seed in (3, 4)]
    for path, seed in zip(paths, (3, 4), strict=True):
        write_quantised_checkpoint(path, config, random_weights(config, seed=seed))

    def start(path: Path) -> LLM:
        return LLM(path, device="cpu", dtype="float32", activations=activations, max_num_seqs=4)

    def tokens(llm: LLM) -> list[object]:
        return bits_of(llm, [[1, 2, 3], [5] * 40], params())

    before, expected = (tokens(start(path)) for path in paths)
    assert before != expected
    engine = start(paths[0])
    assert tokens(engine) == before
    packed = any(isinstance(form, _Half) for form in forms_of(engine))
    assert packed == _rows_are_independent()  # true on every CPU with AVX2
    engine.update_weights(paths[1])
    assert tokens(engine) == expected
    layer = {n: t for n, t in read_tensors(paths[0]).items() if n.startswith("layers.1.")}
    engine.update_weights(layer.items(), partial=True)
    assert tokens(engine) not in (before, expected)
    engine.update_weights(paths[0])
    assert tokens(engine) == before


def test_prefixes_of_the_old_weights_are_forgotten(engine: LLM, other_path: Path) -> None:
    engine.generate(LONG, params())
    assert engine.generate(LONG, params())[0].num_cached_tokens == 256
    engine.update_weights(other_path)
    assert engine.generate(LONG, params())[0].num_cached_tokens == 0


def broken(tensors: dict[str, Tensor], how: str) -> Iterator[tuple[str, Tensor]]:
    for name, tensor in tensors.items():
        if name != LAST:
            yield name, tensor
    last = tensors[LAST]
    if how == "raises":
        raise ConnectionError("the sender is gone")
    if how == "unknown":
        yield "layers.99.norm.weight", last
    if how == "twice":
        yield "head.weight", tensors["head.weight"]
    if how == "shape":
        yield LAST, last[:-1]
    if how == "dtype":
        yield LAST, last.to(torch.int64)
    if how == "complex":
        yield LAST, last.to(torch.complex64)
    if how == "nan":
        yield LAST, torch.full_like(last, torch.nan)
    if how == "scale":
        yield LAST, last
        yield "layers.0.attn.wq_a.scale", torch.ones(1, 1)


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("missing", f"lacks 1 of .*{LAST}"),
        ("raises", "the sender is gone"),
        ("unknown", "no tensor layers.99"),
        ("twice", "head.weight arrived twice"),
        ("shape", "norm.weight is F32"),
        ("dtype", "norm.weight is I64"),
        ("complex", "complex64"),
        ("nan", "not finite"),
        ("scale", "arrived without scales"),
    ],
)
def test_a_failed_update_changes_nothing(
    how: str,
    message: str,
    engine: LLM,
    tensors: dict[str, Tensor],
) -> None:
    kept = [tensor.clone() for tensor in weights_of(engine)]
    with pytest.raises((CheckpointError, ConnectionError), match=message):
        engine.update_weights(broken(tensors, how))
    assert all(map(torch.equal, weights_of(engine), kept))
    assert first_rank(engine._engine.executor).weights.staged is None


def test_a_failed_update_leaves_outputs_and_prefixes(
    engine: LLM, before: list[object], tensors: dict[str, Tensor]
) -> None:
    engine.generate(LONG, params())
    with pytest.raises(ConnectionError):
        engine.update_weights(broken(tensors, "raises"))
    assert engine.generate(LONG, params())[0].num_cached_tokens == 256
    assert outputs(engine) == before


def test_an_update_begins_only_when_the_failed_one_is_discarded(
    engine: LLM, before: list[object], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise, discarding would take the second one."""
    refused, call_ranks = [], engine._engine.call_ranks

    def between(work: Any) -> Any:
        if work.args == (RankWeights.discard,):
            with pytest.raises(RequestError, match="another update"):
                engine._updates.begin()
            refused.append(work)
        return call_ranks(work)

    monkeypatch.setattr(engine._engine, "call_ranks", between)
    with pytest.raises(RequestError, match="pairs"):
        engine.update_weights([1])  # type: ignore[list-item]
    assert refused and not engine._updates.begun
    assert outputs(engine) == before


def test_a_partial_update_of_weights_that_were_dropped(
    old_path: Path, tensors: dict[str, Tensor], one_thread: None
) -> None:
    """It ends, and the engine still waits for all weights."""
    llm = LLM(old_path, device="cpu", activations="exact", enable_sleep_mode=True)
    llm._updates.begin(partial=True)
    llm._updates.add([(LAST, tensors[LAST])])
    llm.sleep(drop_weights=True)
    llm.wake()
    with pytest.raises(RequestError, match="must have all of them"):
        llm._updates.finish()
    assert llm._engine.stops and not llm._updates.begun
    llm.update_weights(old_path)
    assert not llm._engine.stops


def test_weights_that_do_not_fit_the_host_are_refused(
    engine: LLM, before: list[object], other_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("finwhale.engine.ranks.memory_checks.available_memory", lambda: 1)
    with pytest.raises(ResourceError, match="staged in host memory, take"):
        engine.update_weights(other_path)
    # Each of two ranks would fit alone.
    size = sum(tensor.nbytes for tensor in weights_of(engine))
    monkeypatch.setattr(
        "finwhale.engine.ranks.memory_checks.available_memory", lambda: 2 * size - 1
    )
    monkeypatch.setattr(first_rank(engine._engine.executor).weights, "ranks_on_host", 2)
    with pytest.raises(ResourceError, match="staged in host memory, take"):
        engine.update_weights(other_path)
    assert outputs(engine) == before


def test_a_rank_that_fails_while_it_writes_ends_the_engine(
    old_path: Path, other_path: Path, one_thread: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def commit(staged: StagedWeights) -> None:
        raise RuntimeError("the copy failed")

    engine = LLM(old_path, device="cpu", activations="exact", max_num_seqs=4)
    monkeypatch.setattr(StagedWeights, "commit", commit)
    with pytest.raises(EngineDeadError, match="the copy failed"):
        engine.update_weights(other_path)
    assert engine._updates.version == "0" and not engine._updates.begun
    with pytest.raises(EngineDeadError, match="start a new one"):
        engine.update_weights(other_path)


def test_another_models_directory_is_refused(
    engine: LLM, tmp_path: Path, config: dict[str, Any], tensors: dict[str, Tensor]
) -> None:
    config = config | {"routed_scaling_factor": 3.25}
    write_plain_checkpoint(tmp_path / "other", config, tensors)
    with pytest.raises(CheckpointError, match="another model"):
        engine.update_weights(tmp_path / "other")
    with pytest.raises(RequestError, match="pairs"):
        engine.update_weights([tensors[LAST]])  # type: ignore[list-item]


def test_a_partial_update(
    engine: LLM, before: list[object], tensors: dict[str, Tensor], old_path: Path
) -> None:
    layer = {name: t for name, t in tensors.items() if name.startswith("layers.1.")}
    with pytest.raises(CheckpointError, match="lacks"):
        engine.update_weights(layer.items())
    kept = {id(t): t.clone() for t in weights_of(engine)}
    engine.update_weights(layer.items(), partial=True)
    changed = sum(not torch.equal(t, kept[id(t)]) for t in weights_of(engine))
    model = first_rank(engine._engine.executor).runner.model.weights
    assert changed == len(tensors_of(model.layers[1]))
    assert outputs(engine) != before
    # A packed tensor must be complete.
    for lacking in ("layers.1.attn.wkv.weight", "layers.1.ffn.experts.2.w1.weight"):
        with pytest.raises(CheckpointError, match="packed tensor"):
            some = [(name, t) for name, t in layer.items() if name != lacking]
            engine.update_weights(some, partial=True)


@dataclass(frozen=True, slots=True)
class Converted(ExpertWeight):
    """Experts with a tensor that no checkpoint has, as the tables of GPUs make them."""

    largest: Tensor | None = None


def converted(w: ExpertWeight) -> ExpertWeight:
    return Converted(*(w.w13, w.w2, w.input_group, w.scale13, w.scale2), largest=w.w13.amax((1, 2)))


def test_a_partial_update_where_the_operators_convert_experts(
    tensors: dict[str, Tensor], old_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def ops(*given: Any, **named: Any) -> Ops:
        return replace(load_ops(*given, **named), finish_experts=converted)

    monkeypatch.setattr("finwhale.engine.start.decisions.load_ops", ops)
    engine = LLM(old_path, device="cpu", dtype="float32", max_num_seqs=2)
    model = first_rank(engine._engine.executor).runner.model.weights
    kept = {id(t): t.clone() for t in weights_of(engine)}

    def changed() -> int:
        return sum(not torch.equal(t, kept[id(t)]) for t in weights_of(engine))

    layer = {name: t for name, t in tensors.items() if name.startswith("layers.1.")}
    others = {name: t for name, t in layer.items() if ".experts." not in name}
    engine.update_weights(others.items(), partial=True)
    experts = model.layers[1].ffn.experts
    assert isinstance(experts, Converted)
    assert changed() == len(tensors_of(model.layers[1])) - len(tensors_of(experts))
    engine.update_weights(layer.items(), partial=True)
    assert changed() == len(tensors_of(model.layers[1]))
    assert torch.equal(experts.largest, experts.w13.amax((1, 2)))


# --- Running requests -----------------------------------------------------------------------------


def begin(llm: LLM, name: str, prompt: list[int], tokens: int) -> RequestOutput:
    """A request that has generated 4 tokens."""
    result = llm._engine.add_request(name, prompt, params(tokens))
    while len(result.outputs[0].token_ids) < 4:
        llm._engine.step()
    return result


def end(llm: LLM, result: RequestOutput) -> list[int]:
    while not result.finished:
        llm._engine.step()
    return result.outputs[0].token_ids


def test_requests_are_recomputed(engine: LLM, other_path: Path) -> None:
    result = begin(engine, "one", LONG, 12)
    so_far = list(result.outputs[0].token_ids)
    engine.update_weights(other_path)
    tokens = end(engine, result)
    (fresh,) = engine.generate([[*LONG, *so_far]], params(8))
    assert tokens == [*so_far, *fresh.outputs[0].token_ids]


def test_requests_are_kept(engine: LLM, other_path: Path) -> None:
    result = begin(engine, "one", LONG, 12)
    so_far = list(result.outputs[0].token_ids)
    preemptions = engine._engine.scheduler.counts.preemptions
    engine.update_weights(other_path, requests="keep")
    assert end(engine, result)[: len(so_far)] == so_far
    assert engine._engine.scheduler.counts.preemptions == preemptions
    # Its cached blocks are never reused.
    assert engine.generate(LONG, params())[0].num_cached_tokens == 0


def test_requests_are_aborted(engine: LLM, other_path: Path) -> None:
    result = begin(engine, "one", LONG, 12)
    so_far = list(result.outputs[0].token_ids)
    engine.update_weights(other_path, requests="abort")
    assert result.finished and result.outputs[0].finish_reason == "abort"
    assert result.outputs[0].token_ids == so_far
    assert engine._engine.step() == [result] and not engine._engine.has_work


def test_unknown_requests_are_refused_before_anything_is_read(
    engine: LLM, tensors: dict[str, Tensor]
) -> None:
    arriving = iter(tensors.items())
    with pytest.raises(RequestError, match="requests must be"):
        engine.update_weights(arriving, requests="drop")  # type: ignore[arg-type]
    assert len(list(arriving)) == len(tensors)


def test_a_paused_engine_waits(engine: LLM, before: list[object]) -> None:
    done: list[list[object]] = []
    engine.pause()
    thread = threading.Thread(target=lambda: done.append(outputs(engine)))
    thread.start()
    time.sleep(0.2)
    assert not done
    engine.resume()
    thread.join(300)
    assert done == [before]


def test_a_pause_aborts(engine: LLM) -> None:
    result = begin(engine, "one", LONG, 12)
    engine.pause("abort")
    assert result.finished and result.outputs[0].finish_reason == "abort"
    engine.resume()
    assert engine._engine.step() == [result]
    with pytest.raises(RequestError, match="mode must be"):
        engine.pause("drop")  # type: ignore[arg-type]


def test_an_update_does_not_get_the_version_of_a_dropped_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(weight_updates, "change_weights", lambda *_, **__: None)
    engine: Any = SimpleNamespace(stops=set(), call_ranks=lambda _: [])
    updates = WeightUpdates(engine)
    for version, wanted in (("dropped", None), (None, "1"), ("named", "named"), (None, "3")):
        updates.begin()
        updates.add("a directory", version=version)
        if wanted is None:
            updates.discard()
        else:
            updates.finish()
            assert updates.version == wanted


def test_a_compiled_engine_is_refused(engine: LLM, other_path: Path) -> None:
    weights = first_rank(engine._engine.executor).weights
    weights._form, form = None, weights._form
    with pytest.raises(Exception, match="compiled"):
        engine.update_weights(other_path)
    weights._form = form

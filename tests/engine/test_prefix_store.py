"""Prefixes that come back from a store: no logit changes, not in one bit."""

import random
import threading
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.distributed.test_equal_ranks import sharded_config
from tests.support.tiny import random_weights, tiny_config, with_dspark, write_plain_checkpoint

from finwhale import LLM, SamplingParams
from finwhale.engine.loop.engine import Engine
from finwhale.engine.plan import stored_prefixes
from finwhale.engine.plan.stored_prefixes import MOVING_STATES
from finwhale.engine.ranks.ranks import first_rank
from finwhale.engine.steps.page_copies import HEADER_BYTES, MARK_BYTES, PageCopies
from finwhale.engine.store.opening import attach_store
from finwhale.errors import FinwhaleError

from .conftest import EXACT_IN_CORE
from .running import assert_idle, run_until_idle
from .test_prefix import BLOCK, Model, Recorder, assert_as_alone, greedy, model, text

__all__ = ["model"]  # a fixture
# Around an entry of C128, the ends of blocks, and the window.
LENGTHS = sorted({b + d for b in (128, 256, 384, 512) for d in (-1, 0, 1)})


def server(model: Model, path: Path, *, blocks: int = 20, states: int = 8) -> Engine:
    """The model's engine as after a restart, with a store."""
    if (before := model.run.scheduler.admission.stored) is not None:
        before.close()
    engine = model.engine(blocks=blocks, states=states + MOVING_STATES)
    assert engine.scheduler.prefix is not None
    engine.scheduler.prefix.set_salt("salt")  # `start_engine` takes it from the store
    config = replace(engine.config, prefix_store=str(path / "store"))
    attach_store(config, engine.model_config, None, engine.executor, [engine.scheduler])
    return engine


def answer(model: Model, engine: Engine, name: str, prompt: list[int], output: int) -> Any:
    recorder = Recorder(engine)
    result = engine.add_request(name, prompt, greedy(output))
    run_until_idle(engine)
    assert_as_alone(model, recorder, result)
    return result


@EXACT_IN_CORE
def test_every_length(model: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a restarted server finds, and every logit behind it; then the conversation goes on."""
    monkeypatch.setattr(stored_prefixes, "LEAST_BLOCKS", 1)
    for length in LENGTHS:
        path, prompt = tmp_path / str(length), text(model, length)
        first = answer(model, server(model, path), "first", prompt, 5)
        assert first.num_cached_tokens == 0
        known = [*prompt, *first.outputs[0].token_ids, 1, 2]
        again = answer(model, server(model, path), "again", known, 5)
        # The last token of the first answer was not computed.
        assert again.num_cached_tokens == (length + 4) // BLOCK * BLOCK, length
        assert_idle(model.run)


@EXACT_IN_CORE
def test_a_cache_that_is_too_small_for_two_conversations(
    model: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What one evicts comes back when the other continues."""
    monkeypatch.setattr(stored_prefixes, "LEAST_BLOCKS", 1)
    engine = server(model, tmp_path, blocks=5, states=2)
    said: dict[str, list[int]] = {"a": [], "b": []}
    for turn in range(3):
        for name in said:
            known = max(0, len(said[name]) - 1)
            said[name] += text(model, 300, f"{name} {turn}")
            result = answer(model, engine, f"{name} {turn}", said[name], 40)
            assert result.num_cached_tokens == known // BLOCK * BLOCK, (name, turn)
            said[name] += result.outputs[0].token_ids
    assert_idle(engine)


def test_a_request_that_is_aborted_while_its_prefix_loads(model: Model, tmp_path: Path) -> None:
    prompt = text(model, 800)
    answer(model, server(model, tmp_path), "first", prompt, 3)
    engine = server(model, tmp_path)
    engine.add_request("leaves", prompt, greedy(3))
    engine.step()
    assert engine.scheduler.admission.stored is not None and engine.scheduler.admission.stored.loads
    engine.abort("leaves")
    run_until_idle(engine)
    assert answer(model, engine, "stays", prompt, 3).num_cached_tokens == 768
    assert_idle(engine)


def test_an_evicted_or_damaged_file_is_computed(model: Model, tmp_path: Path) -> None:
    prompt = text(model, 800)
    answer(model, server(model, tmp_path), "first", prompt, 3)
    files = sorted((tmp_path / "store").rglob("*.block"))
    files[1].write_bytes(bytes(files[1].stat().st_size))
    files[2].unlink()
    for name, found in ("missing", 0), ("damaged", 0), ("written again", 768):
        result = answer(model, server(model, tmp_path), name, prompt, 3)
        assert result.num_cached_tokens == found, name


# --- Whole engines --------------------------------------------------------------------------------


def draft_model(path: Path, kind: str) -> Path:
    config = tiny_config(3) | {
        "vocab_size": 300,
        "hidden_size": 64,
        "num_hidden_layers": 3,
        "num_hash_layers": 1,
        "compress_ratios": [0, 4, 128, 0],
        "sliding_window": 13,
        "max_position_embeddings": 1024,
    }
    if kind == "two ranks":
        config = sharded_config()
    if kind == "dspark":
        config = with_dspark(config)
    if kind == "long":
        config["max_position_embeddings"] = 8192
    write_plain_checkpoint(path / "model", config, random_weights(config, seed=3))
    return path / "model"


def open_llm(path: Path, store: Path | None, **options: Any) -> LLM:
    name = None if store is None else f"{store}:1GB"
    common = {"device": "cpu", "max_num_seqs": 4, "max_num_batched_tokens": 512}
    return LLM(path, **common, prefix_store=name, **options)


def tokens(llm: LLM, prompts: Sequence[list[int]], length: int) -> list[list[int]]:
    params = SamplingParams(temperature=0, max_tokens=length, ignore_eos=True)
    found = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params)
    return [list(one.outputs[0].token_ids) for one in found]


@pytest.mark.parametrize(
    "kind, options",
    [
        pytest.param("mtp", {"draft_tokens": 1}, id="mtp"),
        pytest.param("dspark", {"draft_tokens": "auto"}, id="dspark"),
        pytest.param("two ranks", {"tensor_parallel_size": 2}, id="two-ranks"),
    ],
)
def test_drafts_and_ranks(
    forked_ranks: None, tmp_path: Path, kind: str, options: dict[str, Any]
) -> None:
    """A restarted engine finds the prompts, and its tokens are those of an engine without store.

    The outputs complete entries of C128.
    """
    path = draft_model(tmp_path, kind)
    prompts = [
        [2 + (7 * i * i + n) % 290 for i in range(length)] for n, length in ((0, 630), (1, 890))
    ]
    with open_llm(path, None, **options) as llm:
        wanted = tokens(llm, prompts, 24)
    cached = []
    for _ in range(2):
        with open_llm(path, tmp_path / "store", **options) as llm:
            assert tokens(llm, prompts, 24) == wanted
            metrics = llm._engine.metrics()
            cached.append(metrics.cached_tokens)
    assert cached == [0, 512 + 768]
    assert metrics.store is not None and not metrics.store_off and metrics.cache_hits == 2
    counts = metrics.store
    assert (counts.loads, counts.loaded_tokens, counts.read_blocks) == (2, 512 + 768, 5)
    assert counts.read_bytes > 0 and counts.read_seconds > 0 and counts.failed == 0


def test_only_what_is_shared_is_saved(tmp_path: Path) -> None:
    path, prompt = draft_model(tmp_path, "mtp"), [[2 + i % 290 for i in range(800)]]
    for found in 0, 768:
        with open_llm(path, tmp_path / "store", prefix_store_saves="shared") as llm:
            tokens(llm, prompt, 3)
            assert llm._engine.metrics().cached_tokens == found
            if not found:
                assert not list((tmp_path / "store").rglob("*.block"))
                tokens(llm, prompt, 3)
    assert len(list((tmp_path / "store").rglob("*.block"))) == 3


@pytest.mark.long
def test_agents_whose_prompts_do_not_fit_the_cache(tmp_path: Path) -> None:
    """64 sessions in turn, with room for 5% of their blocks; two of five turns after a restart."""
    draw = random.Random(0)
    sessions = [[draw.randrange(3, 290) for _ in range(1100)] for _ in range(64)]
    path, reusable, reused = draft_model(tmp_path, "long"), [0, 0], [0, 0]
    for restart in range(2):
        with open_llm(path, tmp_path / "store", cache_memory_bytes=11_500_000) as llm:
            pages = llm._engine.metrics().pages["c4"].total  # one for each block
            for turn in range(3 - restart):
                for first in range(0, 64, 8):
                    some = sessions[first : first + 8]
                    known = [0 if turn + restart == 0 else len(one) - 1 for one in some]
                    for one in some:
                        one += [draw.randrange(3, 290) for _ in range(draw.randint(200, 500))]
                    params = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
                    prompts = [{"prompt_token_ids": list(one)} for one in some]
                    for one, count, result in zip(
                        some, known, llm.generate(prompts, params, show_progress=False), strict=True
                    ):
                        reusable[restart] += count // BLOCK * BLOCK
                        reused[restart] += min(result.num_cached_tokens, count // BLOCK * BLOCK)
                        one += result.outputs[0].token_ids
    assert pages <= 0.05 * sum(len(one) // BLOCK for one in sessions)
    print(f"{pages} pages; reused {reused} of {reusable} tokens")
    assert min(a / b for a, b in zip(reused, reusable, strict=True)) >= 0.97, (reused, reusable)


def test_closing_an_engine_ends_the_store_s_threads(tmp_path: Path) -> None:
    path, before = draft_model(tmp_path, "mtp"), set(threading.enumerate())
    with open_llm(path, tmp_path / "store") as llm:
        tokens(llm, [[2 + i % 290 for i in range(800)]], 3)
        new = set(threading.enumerate()) - before
        own = [thread for thread in new if thread.name.startswith("prefix-store")]
        assert own
    assert not any(thread.is_alive() for thread in own)
    assert len(list((tmp_path / "store").rglob("*.block"))) == 3


def test_other_options_share_nothing(tmp_path: Path) -> None:
    path = draft_model(tmp_path, "mtp")
    prompt = [[2 + i % 290 for i in range(800)]]
    for options, found in (
        ({}, 0),
        ({"activations": "exact"}, 0),
        ({"prefix_salt": "another"}, 0),
        ({}, 768),
    ):
        with open_llm(path, tmp_path / "store", **options) as llm:
            tokens(llm, prompt, 3)
            assert llm._engine.metrics().cached_tokens == found, options


def test_another_package_of_kernels_shares_nothing(
    model: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner = first_rank(model.run.executor).runner
    names = []
    for packages in ((), ("DeepGEMM 2.5",)):
        capabilities = replace(runner.ops.capabilities, packages=packages)
        monkeypatch.setattr(runner, "ops", replace(runner.ops, capabilities=capabilities))
        stored = server(model, tmp_path).scheduler.admission.stored
        assert stored is not None and stored.name is not None
        names.append(stored.name)
    first, second = names
    assert second.about == {**first.about, "libraries": f"{first.about['libraries']}, DeepGEMM 2.5"}
    assert first.fingerprint != second.fingerprint


def test_new_weights_share_nothing_with_the_old_ones(tmp_path: Path) -> None:
    path = draft_model(tmp_path, "mtp")
    prompt = [[2 + i % 290 for i in range(800)]]
    with open_llm(path, tmp_path / "store") as llm:
        before = tokens(llm, prompt, 3)
        weights = {"head.weight": torch.randn(300, 64)}
        llm.update_weights(weights.items(), partial=True)
        after = tokens(llm, prompt, 3)
        assert llm._engine.metrics().cached_tokens == 0 and after != before
    with open_llm(path, tmp_path / "store") as llm:
        assert tokens(llm, prompt, 3) == before
        assert llm._engine.metrics().cached_tokens == 768


def test_a_store_needs_prefixes() -> None:
    with pytest.raises(FinwhaleError, match="prefix_store needs enable_prefix_caching"):
        LLM(device="cpu", prefix_store="/somewhere", enable_prefix_caching=False)
    with pytest.raises(FinwhaleError, match="prefix_store_saves needs prefix_store"):
        LLM(device="cpu", prefix_store_saves="shared")
    with pytest.raises(FinwhaleError, match="prefix_store must be a string, got int"):
        LLM(device="cpu", prefix_store=5)  # type: ignore[arg-type]


def test_a_rank_on_another_host(tmp_path: Path) -> None:
    """It does not see the engine's memory: there is no such file, or it is another one."""
    file = tmp_path / "memory"
    for content in (None, b"", bytes(2 * HEADER_BYTES)):
        if content is not None:
            file.write_bytes(content)
        with pytest.raises(FinwhaleError, match="all ranks on one host, and rank 3 cannot open"):
            PageCopies(str(file), b"x" * MARK_BYTES, {}, torch.device("cpu"), (3, 4))


@pytest.mark.parametrize("given", ["", ":5GB", "/tmp/x:0GB"])
def test_a_wrong_option(given: str) -> None:
    with pytest.raises(FinwhaleError, match=r"prefix_store must be|must be more than 0"):
        LLM(device="cpu", prefix_store=given)

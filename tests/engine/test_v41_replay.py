"""DeepSeek-V4.1's bounded replay in the engine, and its exact prefill."""

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.models.oracle import in_float64
from tests.models.v41_reference import Replay, forward, text_config
from tests.support.stepping import Stepper
from tests.support.tiny_v41 import random_text, random_weights
from torch import Tensor

from finwhale import LLM, RequestOutput, SamplingParams
from finwhale.checkpoint.reader import Checkpoint
from finwhale.config import EngineConfig
from finwhale.distributed.peers import Peers
from finwhale.engine.loop.engine import Engine
from finwhale.engine.plan import stored_prefixes
from finwhale.engine.ranks.ranks import first_rank
from finwhale.engine.start.decisions import Decisions
from finwhale.engine.store.opening import attach_store
from finwhale.errors import FinwhaleError
from finwhale.models.registry import parse_config
from finwhale.models.weight_sources import Weights

from .running import assert_idle, run_until_idle
from .test_prefix import Model, Recorder, assert_as_alone, greedy
from .test_v41 import compressed, path

__all__ = ["path"]  # a fixture
OPTIONS: dict[str, Any] = {"device": "cpu", "max_model_len": 900, "cache_memory_bytes": 2**26}
WINDOW, REPLAY = 8, 12  # of the tiny model
PROMPT, OTHER = random_text(532, 1), random_text(150, 2)
SHORT = PROMPT[:276]


def start(path: Path, **options: Any) -> LLM:
    return LLM(path, activations="exact", **OPTIONS | options)


class Rule:
    """What requests must give one after the other. A cached block has the entries of the request
    that computed it.
    """

    def __init__(self, path: Path) -> None:
        self.config = json.loads((path / "config.json").read_text())
        self.weights = in_float64(random_weights(self.config, 0))
        self.numbers = compressed(path, text_config(self.config)["vocab_size"])
        self.entries: dict[tuple[int, ...], dict[int, tuple[Tensor, Tensor]]] = {}

    def check(self, result: RequestOutput, cached: int) -> None:
        """Check that each output token has the largest logit by the rule, after `cached` tokens."""
        assert result.num_cached_tokens == cached
        prompt, output = list(result.prompt_token_ids), list(result.outputs[0].token_ids)
        first, tail = max(0, cached - WINDOW), max(0, len(prompt) - WINDOW)
        before = self.entries.get(tuple(prompt[:cached]), {})
        ids, replay = [*prompt, *output[:-1]], Replay(cached, first, tail, before)
        found = forward(self.weights, self.config, ids, self.numbers, replay=replay)
        assert found.logits[len(prompt) - 1 :].argmax(1).tolist() == output
        for end in range(256, len(ids) + 1, 256):
            self.entries.setdefault(tuple(ids[:end]), found.entries)


def test_tokens_are_those_of_the_rule(path: Path) -> None:
    """Without a hit, and with hits at two boundaries, in small steps and beside others."""
    rule, last, params = Rule(path), OTHER[:20], greedy(3)
    with start(path, max_num_batched_tokens=200) as llm:
        for prompt, cached in ((PROMPT[:260], 0), (PROMPT[:515], 256), (PROMPT[:515], 512)):
            both = [{"prompt_token_ids": ids} for ids in (prompt, last)]
            result, beside = llm.generate(both, params)
            rule.check(result, cached)
        rule.check(beside, 0)


# --- Bits -----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def model_of(path: Path) -> Iterator[Callable[[bool], Model]]:
    """The model in both modes, by whether its prefill is exact."""
    models: dict[bool, Model] = {}

    def of(exact: bool) -> Model:
        if exact not in models:
            llm, other = (start(path, exact_prefill=exact) for _ in range(2))
            models[exact] = Model(llm._engine, Stepper(other._engine))
        return models[exact]

    yield of


def rows_of(
    engine: Engine, prompt: Sequence[int], beside: Sequence[int] = (), count: int = 3
) -> tuple[int, list[Tensor]]:
    """Run a request. Returns how many of its tokens were cached, and each output token's logits."""
    recorder = Recorder(engine)
    if beside:
        engine.add_request("beside", list(beside), greedy(5))
        engine.step()
    result = engine.add_request("it", list(prompt), greedy(count))
    run_until_idle(engine)
    first = len(prompt)
    rows = [recorder.rows["it/0", end] for end in range(first, first + count)]
    assert all(len(row) == 1 for row in rows)
    return result.num_cached_tokens, [row[0] for row in rows]


def same(left: Sequence[Tensor], right: Sequence[Tensor]) -> bool:
    return all(map(torch.equal, left, right))


def test_bits_depend_on_the_cached_tokens_alone(model_of: Callable[[bool], Model]) -> None:
    model = model_of(False)
    wanted: dict[tuple[int, int], list[Tensor]] = {}
    for step, beside in ((532, ()), (131, OTHER)):
        engine = model.engine(blocks=12, states=0, step=step)
        for length, cached in ((532, 0), (532, 512), (300, 256), (256, 0)):
            if length == 256:
                engine.reset_prefix_cache()
                assert rows_of(engine, PROMPT[:256])[0] == 0
                length, cached = 532, 256
            found, rows = rows_of(engine, PROMPT[:length], beside)
            assert found == cached
            assert same(wanted.setdefault((length, cached), rows), rows), (step, length, cached)
        assert_idle(engine)
    assert not same(wanted[532, 0], wanted[532, 512])


def test_cached_entries_are_not_written(model_of: Callable[[bool], Model]) -> None:
    """A request computes the last cached tokens again, and reports them as cached."""
    engine = model_of(False).engine(blocks=12, states=0, step=REPLAY - 2)
    rows_of(engine, SHORT)
    assert engine.scheduler.prefix is not None
    pages = first_rank(engine.executor).runner.cache.pages
    blocks = list(engine.scheduler.prefix.blocks.values())
    assert len(blocks) == 1 and not any(block.state for block in blocks)

    def content() -> list[Tensor]:
        held = [part for block in blocks for part in block.pages.items()]
        return [pages[name][list(numbers)].clone() for name, numbers in held]

    before, recorder = content(), Recorder(engine)
    result = engine.add_request("it", SHORT, greedy(1))
    engine.step()
    progress = engine.prompt_progress("it")
    assert progress is not None and progress.cached == progress.processed == 256
    run_until_idle(engine)
    assert (result.num_cached_tokens, recorder.num_read) == (256, 276 - 256 + REPLAY)
    assert len(before) == 2 and all(map(torch.equal, before, content()))


def test_preemption_abort_and_eviction(model_of: Callable[[bool], Model]) -> None:
    model = model_of(False)
    engine = model.engine(blocks=3, states=0)
    _, miss = rows_of(engine, SHORT)
    _, hit = rows_of(engine, SHORT)
    # Preempted, with its blocks evicted: it computes what it would have computed.
    for resets, wanted in ((True, miss), (False, hit)):
        engine.reset_prefix_cache()
        if not resets:
            rows_of(engine, SHORT)
        recorder = Recorder(engine)
        engine.add_request("it", SHORT, greedy(3))
        while engine.scheduler.running[0].remaining > 1 if engine.scheduler.running else True:
            engine.step()
        if resets:
            engine.reset_prefix_cache()
        engine.scheduler.preempt_all()
        run_until_idle(engine)
        for end in range(276, 279):
            assert torch.equal(recorder.rows["it/0", end][-1], wanted[end - 276])
    # Aborted in its replay.
    engine.add_request("leaves", SHORT, greedy(3))
    engine.step()
    engine.abort("leaves")
    run_until_idle(engine)
    found, rows = rows_of(engine, SHORT)
    assert found == 256 and same(rows, hit)
    # Another text evicts the blocks.
    rows_of(engine, random_text(600, 5))
    found, rows = rows_of(engine, SHORT)
    assert found == 0 and same(rows, miss)
    assert_idle(engine)


def test_drafts_change_no_token(path: Path) -> None:
    found = []
    for drafts in (0, 4):
        with start(path, draft_tokens=drafts) as llm:
            prompts = [{"prompt_token_ids": PROMPT[:300]}] * 2
            results = [llm.generate([prompt], greedy(8))[0] for prompt in prompts]
        assert [r.num_cached_tokens for r in results] == [0, 256]
        found.append([list(r.outputs[0].token_ids) for r in results])
    assert found[0] == found[1]


def test_log_probabilities_of_a_prompt_need_all_layers(path: Path) -> None:
    params = SamplingParams(temperature=0, max_tokens=3, prompt_logprobs=1, ignore_eos=True)
    found = []
    for exact in (False, True):
        with start(path, exact_prefill=exact) as llm:
            given = [{"prompt_token_ids": PROMPT[:270]}]
            llm.generate(given, greedy(1))
            (result,) = llm.generate(given, params)
            found.append((result.prompt_logprobs, result.outputs[0].token_ids))
    assert found[0] == found[1] and result.num_cached_tokens == 0


# --- The store ------------------------------------------------------------------------------------


def with_store(model: Model, directory: Path) -> Engine:
    """The engine as after a restart, with a store."""
    engine = model.engine(blocks=12, states=8 + stored_prefixes.MOVING_STATES)
    assert engine.scheduler.prefix is not None
    engine.scheduler.prefix.set_salt("salt")
    config = replace(engine.config, prefix_store=str(directory))
    attach_store(config, engine.model_config, None, engine.executor, [engine.scheduler])
    return engine


def close(engine: Engine) -> None:
    assert engine.scheduler.admission.stored is not None
    engine.scheduler.admission.stored.close()


def test_what_a_store_restores(model_of: Callable[[bool], Model], tmp_path: Path) -> None:
    """The bits of a hit in memory, in both modes, which do not read each other's records."""
    names = set()
    for exact in (False, True):
        engine = with_store(model_of(exact), tmp_path)
        found, _ = rows_of(engine, PROMPT)
        assert found == 0
        _, hit = rows_of(engine, PROMPT)
        close(engine)
        engine = with_store(model_of(exact), tmp_path)
        found, rows = rows_of(engine, PROMPT)
        assert found == 512 and same(rows, hit)
        stored = engine.scheduler.admission.stored
        assert stored is not None and stored.name is not None and stored.counts.loads == 1
        names.add(stored.name.fingerprint)
        close(engine)
        assert_idle(engine)
        assert any(tmp_path.rglob("*.state")) == exact
    assert len(names) == 2


# --- Exact prefill --------------------------------------------------------------------------------


def test_exact_prefill_changes_no_bit(model_of: Callable[[bool], Model]) -> None:
    """Hits, chunks, batches and preemption against the text computed as a whole."""
    model = model_of(True)
    engine = model.engine(blocks=8, states=8, step=70)
    recorder = Recorder(engine)
    for number, cached in enumerate((0, 256)):
        engine.add_request(f"beside {number}", OTHER, greedy(4))
        result = engine.add_request(f"it {number}", SHORT, greedy(4))
        for _ in range(3):
            engine.step()
        engine.scheduler.preempt_all()
        run_until_idle(engine)
        assert result.num_cached_tokens == cached
        assert_as_alone(model, recorder, result)
    assert_idle(engine)


def test_steps_that_replay_are_not_captured(path: Path) -> None:
    checkpoint = Checkpoint.open(path)
    config = parse_config(checkpoint.config)
    for own, captured in ((config, False), (config.with_exact_prefill(), True)):
        chosen = Decisions(EngineConfig(device="cpu"), own, Weights(own, checkpoint), Peers(), 1)
        chosen.capabilities = replace(chosen.capabilities, captures_steps=True)
        limits = chosen.step_limits(900)
        assert limits.captures_decodes and bool(limits.prefill_graphs) == captured


def test_a_model_without_replay_refuses_the_option() -> None:
    with pytest.raises(FinwhaleError, match="always exact"):
        LLM(device="cpu", exact_prefill=True)

"""Data-parallel ranks: each serves requests of its own, and all share the experts."""

import itertools
import os
import random
import signal
from collections import Counter
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import event, settings
from hypothesis import given as given_examples
from hypothesis import strategies as st
from tests.support.integrity import check_engine
from tests.support.tiny import random_weights, with_dspark, write_plain_checkpoint

from finwhale import LLM, EngineDeadError, FinwhaleError, RequestOutput, SamplingParams
from finwhale.bench.engine import call_ranks_collectively, draft_on_device
from finwhale.chat.grammar import regex_guide
from finwhale.config import DraftTokens, EngineConfig
from finwhale.engine.loop.engine import Engine
from finwhale.engine.plan.pages import PageManager
from finwhale.engine.plan.scheduler import Scheduler
from finwhale.engine.ranks import ranks
from finwhale.engine.ranks.lane_ranks import LaneRanks
from finwhale.engine.ranks.local_executor import LocalExecutor
from finwhale.engine.ranks.ranks import first_rank
from finwhale.models.deepseek_v4.model import DeepseekV4

from . import faults
from .in_slices import add_in_slices
from .test_equal_ranks import greedy, random_requests, sharded_config, text

pytestmark = pytest.mark.usefixtures("forked_ranks")
OPTIONS: dict[str, Any] = {
    "device": "cpu",
    "max_num_seqs": 4,
    "max_num_batched_tokens": 96,
    "max_model_len": 1024,
    "cache_memory_bytes": 2**24,
}


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory, tiny_path: Path) -> Path:
    path, config = tmp_path_factory.mktemp("lanes") / "model", sharded_config()
    write_plain_checkpoint(path, config, random_weights(config, 3, torch.bfloat16))
    (path / "tokenizer.json").symlink_to(tiny_path / "tokenizer.json")
    return path


def open_lanes(path: Path, size: int, **options: Any) -> LLM:
    return LLM(path, data_parallel_size=size, **{"activations": "exact", **OPTIONS, **options})


@pytest.fixture(scope="module")
def two(path: Path) -> Iterator[LLM]:
    """Two lanes that draft."""
    llm = open_lanes(path, 2, draft_tokens=2)
    yield llm
    llm.close()


@pytest.fixture(scope="module")
def reference(path: Path) -> LLM:
    return sliced(path, 2)


def sliced(path: Path, size: int, **options: Any) -> LLM:
    """One rank that adds the experts' parts as `size` ranks do. Its attention is whole."""
    llm = LLM(path, **{"activations": "exact", **OPTIONS, **options})
    model = first_rank(llm._engine.executor).runner.model
    assert isinstance(model, DeepseekV4)
    add_in_slices(model, size, whole_from=0)
    return llm


Told = list[tuple[list[int], Any]]


def told(results: Sequence[RequestOutput]) -> list[Told]:
    """Tokens and log-probabilities, to the last bit."""
    assert not [one.error for one in results if one.error]
    return [[(each.token_ids, each.logprobs) for each in one.outputs] for one in results]


def requests(seed: int, count: int) -> tuple[list[list[int]], list[SamplingParams]]:
    return random_requests(random.Random(seed), seed, count)


CASES = [
    (4, "as-trained", 3),
    pytest.param(2, "as-trained", 0, marks=pytest.mark.long),
    pytest.param(2, "exact", 1, marks=pytest.mark.long),
    pytest.param(4, "exact", 0, marks=pytest.mark.long),
]


def exchange_beside(executor: LocalExecutor) -> None:
    """Exchange rows as in steps of many tokens."""
    model = executor.runner.model
    assert isinstance(model, DeepseekV4)
    model.ranks.divided_tokens = 1


@pytest.mark.parametrize(("size", "activations", "drafts"), CASES)
def test_every_lane_computes_the_bits_of_one_rank(
    path: Path, size: int, activations: str, drafts: int
) -> None:
    """A lane without sequences takes part in the others' steps and drafts."""
    prompts, params = requests(size, 6)
    lanes = open_lanes(path, size, activations=activations, draft_tokens=drafts)
    found = told(lanes.generate(prompts, params))
    used = [lane.scheduler.counts.prompt_tokens for lane in lanes._engine.lanes]
    proposed = lanes.metrics().drafts_proposed[:drafts]
    assert told(lanes.generate(prompts[:1], params[:1])) == found[:1]
    call_ranks_collectively(lanes._engine.executor, exchange_beside)
    lanes._engine.reset_prefix_cache()
    again = told(lanes.generate(prompts, params))
    lanes.close()
    assert all(used) and all(proposed) and again == found
    assert found == told(sliced(path, size, activations=activations).generate(prompts, params))


@pytest.fixture(scope="module")
def dspark_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    config, path = with_dspark(sharded_config()), tmp_path_factory.mktemp("dspark") / "model"
    write_plain_checkpoint(path, config, random_weights(config, 3, torch.bfloat16))
    return path


def test_dspark(dspark_path: Path) -> None:
    prompts, params = requests(9, 5)
    lanes = open_lanes(dspark_path, 2, draft_tokens=5)
    found = told(lanes.generate(prompts, params))
    assert lanes.metrics().drafts_proposed[4]
    assert told(lanes.generate(prompts[:1], params[:1])) == found[:1]
    lanes.close()
    assert found == told(sliced(dspark_path, 2).generate(prompts, params))


def continue_drafts(config: EngineConfig, executor: LocalExecutor) -> None:
    draft_on_device(executor, config)


@pytest.mark.parametrize(
    "model, drafts",
    [
        ("dspark_path", 5),
        pytest.param("dspark_path", "auto", marks=pytest.mark.long),
        pytest.param("path", "auto", marks=pytest.mark.long),
        pytest.param("path", 2, marks=pytest.mark.long),
    ],
)
def test_the_device_continues_with_the_drafts_of_all_lanes(
    model: str, drafts: DraftTokens, request: pytest.FixtureRequest
) -> None:
    """As on a GPU, one step ahead; a lane may be idle, end first, or read a prompt."""
    path = request.getfixturevalue(model)
    llm, reference = open_lanes(path, 2, draft_tokens=drafts), sliced(path, 2)
    engine = llm._engine
    call_ranks_collectively(engine.executor, partial(continue_drafts, engine.config))
    engine.steps_ahead = 1
    prompts = [text(40 + 9 * i, i) for i in range(5)]
    params = [
        SamplingParams(temperature=0, max_tokens=60, ignore_eos=True, logprobs=1),
        SamplingParams(temperature=0.7, seed=5, max_tokens=25, ignore_eos=True),
        SamplingParams(temperature=0, max_tokens=30, ignore_eos=True),
        SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, frequency_penalty=0.3),
        SamplingParams(temperature=0, max_tokens=9, ignore_eos=True),
    ]
    lanes_ahead, arrivals, made = Counter[int](), {0: 1, 12: 2, 30: 2}, list[RequestOutput]()
    for number in itertools.count():
        for _ in range(arrivals.get(number, 0)):
            index = len(made)
            made.append(engine.add_request(str(index), prompts[index], params[index]))
        engine.step()
        check_engine(engine)
        for parts in engine._loop.in_flight:
            assert len({part.on_device for _, part in parts}) == 1
            assert all(lane.in_flight for lane in engine.lanes if lane.scheduler.running)
            lanes_ahead[len(parts)] += 1
        if not engine.has_work:
            break
    metrics = engine.metrics()
    llm.close()
    assert told(made) == told(reference.generate(prompts, params))
    assert lanes_ahead[1] > 8 and lanes_ahead[2] > 8
    assert metrics.drafts_proposed[0]
    assert metrics.drafts_accepted[0] or drafts == "auto"  # which drafts rarely here


def test_what_works_with_one_lane_only_says_so(two: LLM) -> None:
    with pytest.raises(FinwhaleError, match="does not work with data_parallel_size"):
        _ = two._engine.scheduler


def test_grammars_and_scores(two: LLM, reference: LLM) -> None:
    params = [
        SamplingParams(seed=4, guide=regex_guide("[a-z]{2,5}-[0-9]{1,3}"), max_tokens=12),
        SamplingParams(temperature=0, guide=regex_guide("(yes|no) [0-9]+"), max_tokens=8),
        SamplingParams(temperature=0, max_tokens=2, prompt_logprobs=3),
        SamplingParams(temperature=0, max_tokens=9, min_tokens=4),
    ]
    prompts = [text(20, i) for i in range(len(params))]
    found, wanted = (llm.generate(prompts, params) for llm in (two, reference))
    assert [one.outputs[0].token_ids for one in found] == [
        one.outputs[0].token_ids for one in wanted
    ]
    assert found[2].prompt_logprobs == wanted[2].prompt_logprobs


def test_a_prefix_is_found_on_its_lane(two: LLM) -> None:
    prompts = [text(600, i) for i in range(2)]
    two.generate(prompts, greedy(1))
    cached = [one.num_cached_tokens for one in two.generate(prompts[::-1], greedy(1))]
    assert cached == [512, 512]
    assert [lane.outputs.work for lane in two._engine.lanes] == [0, 0]


def limited(engine: Engine, blocks: int) -> Scheduler:
    groups = engine.executor.description.groups
    num_pages = dict(engine.executor.description.num_pages)
    for group in groups:
        if group.keep is None:
            num_pages[group.name] = 1 + blocks * (256 // group.tokens_per_page)
    tokens = engine.model_config.draft_block_tokens
    pages = PageManager(groups, num_pages)
    return Scheduler(pages, sizes=engine.sizes, prefix_salt="x", draft_block_tokens=tokens)


@settings(max_examples=max(3, settings().max_examples // 20))
@given_examples(st.integers(0, 2**32))
def test_random_schedules(two: LLM, reference: LLM, seed: int) -> None:
    """Requests that come and go at random, few pages, idle lanes; every token is right."""
    draw, engine = random.Random(seed), two._engine
    prompts, params = requests(seed, draw.randint(1, 8))
    engine.begin(*(limited(engine, draw.choice((3, 8))) for _ in engine.lanes))
    waiting = list(enumerate(zip(prompts, params, strict=True)))
    made: dict[int, RequestOutput] = {}
    while waiting or engine.has_work:
        while waiting and (draw.random() < 0.3 or not engine.has_work):
            number, (prompt, one) = waiting.pop(0)
            made[number] = engine.add_request(str(number), prompt, one)
        if draw.random() < 0.02:
            engine.abort(str(draw.randrange(len(prompts))))
        engine.step()
        check_engine(engine)
    wanted = told(reference.generate(prompts, params))
    for number, result in made.items():
        for each, (tokens, _) in zip(result.outputs, wanted[number], strict=True):
            whole = tokens if each.finish_reason == "length" else tokens[: len(each.token_ids)]
            assert each.token_ids == whole
    counts = [lane.scheduler.counts for lane in engine.lanes]
    event(f"preempted: {any(one.preemptions for one in counts)}")
    event(f"a lane was idle: {not all(one.prompt_tokens for one in counts)}")


def test_pause_sleep_and_new_weights(path: Path, reference: LLM) -> None:
    """One step ahead, as on a GPU."""
    llm = open_lanes(path, 2, enable_sleep_mode=True)
    llm._engine.steps_ahead = 1
    case = requests(3, 4)
    wanted = told(llm.generate(*case))
    assert wanted == told(reference.generate(*case))
    running = [llm._engine.add_request(str(i), one, greedy(8)) for i, one in enumerate(case[0])]
    llm._engine.step()
    assert llm._engine._loop.in_flight
    llm._engine.add_request("leaves", text(9, 0), greedy(8))
    llm._engine.step()
    llm._engine.abort("leaves")
    llm.sleep()
    llm.wake()
    while llm._engine.has_work:
        llm._engine.step()
    assert all(one.finished and not one.error for one in running)
    llm.update_weights(path)
    assert told(llm.generate(*case)) == wanted
    llm.pause("abort")
    llm.resume()
    assert told(llm.generate(*case)) == wanted
    llm.close()


@pytest.mark.parametrize(
    "number", [signal.SIGKILL, pytest.param(signal.SIGSTOP, marks=pytest.mark.long)]
)
def test_a_rank_that_a_signal_ends_or_stops(path: Path, number: signal.Signals) -> None:
    """All requests of all lanes get the error."""
    llm = open_lanes(path, 2)
    engine, executor = llm._engine, llm._engine.executor
    assert isinstance(executor, LaneRanks)
    begun = [engine.add_request(str(i), text(9, i), greedy(500)) for i in range(4)]
    engine.step()
    os.kill(executor.workers.states()[0].process.pid, number)
    with pytest.raises(EngineDeadError, match=r"rank 1 \(cpu\) was (killed|stopped)"):
        while True:
            engine.step()
    assert all(one.finished and "rank 1 (cpu)" in (one.error or "") for one in begun)
    llm.close()


def test_any_lane_takes_a_stored_prefix(path: Path, reference: LLM, tmp_path: Path) -> None:
    """Evicted, on another lane, and after a restart: with the same bits."""
    prompts = [text(520, i) for i in range(4)]
    params = SamplingParams(temperature=0, max_tokens=3, logprobs=1, ignore_eos=True)
    wanted = told(reference.generate(prompts, params))
    for start in range(2):
        llm = open_lanes(path, 2, prefix_store=str(tmp_path / "store"), draft_tokens=1)
        for seed in range(2):
            mixed = random.Random(seed + start).sample(range(4), 4)
            found = llm.generate([prompts[i] for i in mixed], params)
            assert told(found) == [wanted[i] for i in mixed]
            cached = [one.num_cached_tokens for one in found]
            assert cached == ([512] * 4 if seed or start else [0] * 4)
            while llm._engine.has_work:  # saves are on their way
                llm._engine.step()
            llm._engine.reset_prefix_cache()
        used = [lane.scheduler.admission.stored for lane in llm._engine.lanes]
        assert all(stored is not None and stored.counts.loaded_tokens for stored in used)
        counts = llm.metrics().store
        assert counts is not None and counts.loads >= 4 and not counts.failed
        llm.close()


def test_a_result_that_is_lost_on_its_rank(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(Path(__file__).parents[2])
    monkeypatch.setattr(ranks, "run_worker", faults.lost_result)
    llm = open_lanes(path, 2)
    with pytest.raises(EngineDeadError, match=r"rank 1 \(cpu\): RuntimeError: the device has"):
        llm.generate([text(9, i) for i in range(2)], greedy(4))
    llm.close()


def test_options_that_contradict_each_other(path: Path) -> None:
    for options in (
        {"tensor_parallel_size": 2},
        {"whole_attention": True},
        {"kv_events": "127.0.0.1:0"},
    ):
        with pytest.raises(FinwhaleError, match="data_parallel_size does not work with"):
            open_lanes(path, 2, **options)
    with pytest.raises(FinwhaleError, match="data_parallel_size must be one of 1, 2, 4, 8, got 3"):
        open_lanes(path, 3)

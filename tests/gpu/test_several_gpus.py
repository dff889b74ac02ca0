"""Two ranks on two GPUs: four layers of Flash with random weights, beside one rank.

About 4 minutes on two H200s if the kernels are cached, and 9 if not (estimates).
"""

import gc
import json
import os
import random
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.gpu.test_v41_engine import wide
from tests.support.integrity import check_engine
from tests.support.processes import importable_tests
from tests.support.stepping import Stepper
from tests.support.stored_pages import digests, run, saved

from finwhale import SamplingParams
from finwhale.bench.engine import call_ranks_collectively
from finwhale.config import EngineConfig
from finwhale.engine.loop.engine import Engine
from finwhale.engine.loop.opening import start_engine
from finwhale.engine.plan.sequences import Chunk
from finwhale.engine.ranks.devices import fewest_ranks
from finwhale.engine.ranks.local_executor import LocalExecutor
from finwhale.engine.ranks.ranks import Ranks
from finwhale.engine.steps.inputs import with_bounds
from finwhale.engine.store.opening import attach_store
from finwhale.models.deepseek_v4.presets import published
from finwhale.models.step_inputs import Inline
from finwhale.models.weight_sources import Weights
from tools import accuracy

pytestmark = [
    pytest.mark.alone,
    pytest.mark.skipif(
        torch.cuda.device_count() < 2,
        reason=f"needs two GPUs, and torch sees {torch.cuda.device_count()}",
    ),
]
ROOT = Path(__file__).parents[2]
# Two correct engines with as-trained roundings differ by this much (tools/accuracy.py: chunked
# against whole is 0.05, the table against float32 is 0.1).
CLOSE = 0.1
END_S = 10.0
FREE = {"max_tokens": 24, "ignore_eos": True}
PARAMS = [
    SamplingParams(temperature=0, **FREE),
    SamplingParams(temperature=0.9, seed=4, logprobs=2, **FREE),
    SamplingParams(temperature=0.9, seed=5, top_p=0.9, n=2, **FREE),
    SamplingParams(temperature=0.9, seed=6, presence_penalty=0.4, **FREE),
]


def test_a_rank_that_makes_no_call_is_named() -> None:
    """By every kernel that waits for it, after about a second."""
    subprocess.run([sys.executable, "-m", "tests.gpu.lost_rank"], cwd=ROOT, check=True)


def new_engine(
    size: int, draft_tokens: int = 0, device: str | None = None, whole_attention: bool = False
) -> Engine:
    model = published("flash").with_layers(4)
    config = EngineConfig(
        device=device,
        tensor_parallel_size=size,
        draft_tokens=draft_tokens,
        batch_invariant=not whole_attention,
        whole_attention=whole_attention,
        max_num_seqs=8,
        max_model_len=4096,
        max_num_batched_tokens=4096 if whole_attention else 1024,
        cache_memory_bytes=2**31,
    )
    return start_engine(config, model, Weights(model), None)


def text(seed: int, length: int) -> list[int]:
    draw = random.Random(seed)
    return [draw.randrange(4000) for _ in range(length)]


def tokens(engine: Engine) -> list[list[int]]:
    engine.reset_prefix_cache()
    results = [
        engine.add_request(f"{i}", text(i, length), PARAMS[i % len(PARAMS)])
        for i, length in enumerate((3, 700, 129, 1, 1300, 260))
    ]
    while engine.has_work:
        engine.step()
    check_engine(engine)
    return [output.token_ids for result in results for output in result.outputs]


@pytest.fixture(scope="module")
def two() -> Iterator[Engine]:
    with importable_tests():  # the ranks import this module
        engine = new_engine(2)
        yield engine
        assert isinstance(engine.executor, Ranks)
        engine.executor.close()


@pytest.fixture(scope="module")
def wanted(two: Engine) -> list[list[int]]:
    return tokens(two)


def odd_sum(length: int, executor: LocalExecutor) -> None:
    """A message whose number of words needs kernels that models do not need."""
    executor.collectives.all_reduce(torch.ones(length, device=executor.runner.device))
    torch.cuda.synchronize()


def serve_random(engine: Engine, requests: int) -> None:
    """Serve prompts of random lengths, which arrive while others run."""
    draw = random.Random(0)
    for number in range(requests):
        length = int(4000 ** draw.random())
        engine.add_request(f"late-{number}", text(number, length), PARAMS[number % len(PARAMS)])
        for _ in range(draw.randint(0, 2)):
            engine.step()
    while engine.has_work:
        engine.step()


def pinned_blocks(executor: LocalExecutor) -> int:
    """How often this rank has asked the driver for pinned memory."""
    return int(torch.cuda.host_memory_stats()["num_host_alloc"])


def test_nothing_is_compiled_or_reserved_late_and_every_rank_counts(two: Engine) -> None:
    """The first test: others launch what the engine would not."""
    reserved = call_ranks_collectively(two.executor, pinned_blocks)
    assert all(reserved)
    serve_random(two, 60)
    assert not any(two.metrics().late_compilations.values())
    assert call_ranks_collectively(two.executor, pinned_blocks) == reserved
    call_ranks_collectively(two.executor, partial(odd_sum, 37))
    end = time.monotonic() + 5  # the other rank reports its count with a heartbeat
    while two.metrics().late_compilations["triton"] < 2 and time.monotonic() < end:
        time.sleep(0.1)
    assert two.metrics().late_compilations["triton"] == 2


def test_two_ranks_are_close_to_one_and_equal_each_other(two: Engine) -> None:
    ids = text(0, 1500)
    given = accuracy.SampleText(ids, torch.arange(0, 1500, 5), [130, 700, 1025], 8)
    two.reset_prefix_cache()
    found, other = call_ranks_collectively(two.executor, partial(accuracy.compute, given, True))
    assert found.digest == other.digest
    one = new_engine(1)
    (alone,) = call_ranks_collectively(one.executor, partial(accuracy.compute, given, True))
    for way, logits in found.logits.items():
        assert accuracy.compare(logits, alone.logits[way])["relative_error"] < CLOSE, way
    assert accuracy.overlap(found.selected, alone.selected) > 0.98
    # Sums over ranks have one order at every size.
    assert torch.equal(found.logits[accuracy.WHOLE], found.logits[accuracy.CHUNKED])


def test_ranks_that_hold_attention_whole_are_close_to_one_and_equal_each_other(
    two: Engine,
) -> None:
    """Steps of 1,152 tokens and more, launched by the host and captured; `two` has none."""
    given = accuracy.SampleText(text(0, 3800), torch.arange(0, 3800, 5), [1300, 2900, 3000], 8)
    one = new_engine(1)
    (alone,) = call_ranks_collectively(one.executor, partial(accuracy.compute, given, True))
    del one
    gc.collect()
    engine = new_engine(2, whole_attention=True)
    assert isinstance(engine.executor, Ranks)
    serve_random(engine, 30)
    assert not any(engine.metrics().late_compilations.values())
    # The comparisons below also run steps that the engine never runs, so they compile kernels.
    found, other = call_ranks_collectively(engine.executor, partial(accuracy.compute, given, True))
    assert found.digest == other.digest
    for way, logits in found.logits.items():
        # The text is longer than above, and the single rank is batch-invariant.
        assert accuracy.compare(logits, alone.logits[way])["relative_error"] < 1.5 * CLOSE, way
    assert accuracy.overlap(found.selected, alone.selected) > 0.98
    assert call_ranks_collectively(engine.executor, captured_prefills) == [[True] * 5] * 2
    engine.executor.close()


def captured_prefills(executor: LocalExecutor) -> list[bool]:
    """Whether captured steps of several sizes give the bits that the host's launches give."""
    stepper, runner, found = Stepper(executor), executor.runner, []
    assert runner.prefill_graphs is not None
    for lengths in ([1280], [700, 1, 600], [1900, 5], [3000], [3500, 1, 500]):
        sequences = [stepper.sequence(text(9, n)) for n in lengths]
        chunks = []
        for sequence, length in zip(sequences, lengths, strict=True):
            stepper.pages.grow(sequence.tables, 0, length)
            chunks.append(Chunk(sequence, 0, length))
        plan = stepper.plan(chunks)
        captured = runner.prefill_graphs.run(plan).clone()
        inputs = with_bounds(runner.prefill_graphs.captured(sum(lengths)).inputs, plan)
        with torch.inference_mode():
            eager = runner.model(inputs, runner.cache, Inline())[: sum(lengths)]
        found.append(torch.equal(captured, eager))
        for sequence in sequences:
            stepper.release(sequence)
    return found


@torch.inference_mode()
def decodes(lengths: Sequence[int], executor: LocalExecutor) -> list[str]:
    """What differs between decodes alone, together, captured and launched by the host."""
    stepper, runner, wrong = Stepper(executor), executor.runner, []
    assert runner.graphs is not None
    chunks = stepper.prefilled([text(seed, length) for seed, length in enumerate(lengths)])
    alone = torch.cat([runner.graphs.run(stepper.plan([chunk])).clone() for chunk in chunks])
    if not alone.isfinite().all():
        wrong.append("a logit is not finite")
    for size in (2, 3, 5, len(chunks)):
        if not torch.equal(runner.graphs.run(stepper.plan(chunks[-size:])), alone[-size:]):
            wrong.append(f"{size} together differ from each alone")
    _, streams = runner.forward(stepper.plan(chunks))
    if not torch.equal(runner.model.compute_logits(streams), alone):
        wrong.append("the host's launches differ from the graph")
    return wrong


def test_graphs_and_batches_change_no_bit(two: Engine) -> None:
    two.reset_prefix_cache()
    found = call_ranks_collectively(two.executor, partial(decodes, [700, 3, 129, 1, 1300, 260]))
    assert found == [[], []]


def test_seeds_decide_the_tokens(two: Engine, wanted: list[list[int]]) -> None:
    """A second run, in other slots and without cached prefixes, gives them again."""
    assert tokens(two) == wanted


def test_prefixes_come_back_to_both_ranks(two: Engine, tmp_path: Path) -> None:
    """The ranks hold equal pages, when they have computed them and when rank 0's were loaded."""
    two.reset_prefix_cache()
    config = replace(two.config, prefix_store=str(tmp_path))
    attach_store(config, two.model_config, None, two.executor, [two.scheduler])
    prompts = [text(seed, length) for seed, length in ((3, 1300), (4, 700), (5, 3900))]
    found = []
    for _ in range(2):
        results = [run(two, prompt, PARAMS[0]) for prompt in prompts]
        saved(two)
        pages = [digests(two, prompt) for prompt in prompts]
        found.append(([result.outputs[0].token_ids for result in results], pages))
        cached = [result.num_cached_tokens for result in results]
        two.reset_prefix_cache()
    stored, two.scheduler.admission.stored = two.scheduler.admission.stored, None
    assert stored is not None
    stored.close()
    assert found[0] == found[1] and cached == [1280, 512, 3840]


def test_drafting_changes_no_token(wanted: list[list[int]]) -> None:
    engine = new_engine(2, draft_tokens=2)
    assert tokens(engine) == wanted
    assert sum(engine.metrics().drafts_proposed) > 0
    assert not any(engine.metrics().late_compilations.values())
    assert isinstance(engine.executor, Ranks)
    engine.executor.close()


def test_the_fewest_gpus_that_hold_the_model() -> None:
    model, count = published("flash"), torch.cuda.device_count()
    memory = torch.cuda.get_device_properties(0).total_memory
    config = EngineConfig()
    assert fewest_ranks(config, model.with_layers(4), count) == 1
    wanted = 1 if memory > 250e9 else 2 if memory > 110e9 else 4
    assert fewest_ranks(config, model, count) == min(wanted, 2 ** (count.bit_length() - 1))


# --- Processes ------------------------------------------------------------------------------------


def compiled(executor: LocalExecutor) -> int:
    builds: Any = executor.builds
    count: int = builds._counter.compiled
    return count


def main(what: str) -> None:
    """A process of its own: prints a line of JSON for its test."""
    sys.path.insert(0, str(ROOT))
    # Functions of this module must have a name that the ranks can import.
    from tests.gpu import test_several_gpus as here  # noqa: PLC0415

    engine = here.new_engine(2)
    executor = engine.executor
    assert isinstance(executor, Ranks)
    if what == "twice":
        found = [here.tokens(engine)]
        counts = call_ranks_collectively(executor, here.compiled)
        del engine, executor
        gc.collect()
        other = here.new_engine(2)
        found.append(here.tokens(other))
        del other
        gc.collect()
        here.tokens(here.new_engine(2, whole_attention=True))  # allocates memory of copies late
        print(json.dumps({"compiled": counts, "tokens": found}), flush=True)
        return
    (worker,) = executor.workers.states()
    print(json.dumps({"worker": worker.process.pid}), flush=True)
    engine.add_request("endless", [1, 2, 3], SamplingParams(max_tokens=4000, ignore_eos=True))
    while True:
        engine.step()


def used() -> list[int]:
    """Bytes in use on each of the two GPUs."""
    found = []
    for index in range(2):
        free, total = torch.cuda.mem_get_info(index)
        found.append(total - free)
    return found


def start(what: str) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        [sys.executable, __file__, what], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def test_a_second_start_compiles_nothing_and_a_process_can_open_two_engines(
    wanted: list[list[int]],
) -> None:
    """The second engine of a process, after the first; and its end leaves no complaint."""
    process = start("twice")
    output, errors = process.communicate(timeout=300)
    assert process.returncode == 0, errors[-3000:]
    found = json.loads(output.splitlines()[-1])
    assert found == {"compiled": [0, 0], "tokens": [wanted, wanted]}
    for complaint in ("destroy_process_group", "leaked", "Traceback"):
        assert complaint not in errors, errors[-3000:]


@pytest.mark.parametrize("who", ["rank 1 is killed", "rank 1 is stopped", "rank 0 is killed"])
def test_the_end_of_a_rank_ends_everything(two: Engine, who: str) -> None:
    """`two` has built the kernels."""
    torch.cuda.synchronize()
    before = used()
    process = start("endless")
    assert process.stdout is not None
    worker = json.loads(process.stdout.readline())["worker"]
    time.sleep(1)  # some steps
    began = time.monotonic()
    if who == "rank 0 is killed":
        process.kill()
    else:
        os.kill(worker, 9 if who == "rank 1 is killed" else 19)
    _, errors = process.communicate(timeout=60)
    while Path(f"/proc/{worker}").exists() and time.monotonic() < began + 60:
        time.sleep(0.05)
    assert time.monotonic() < began + END_S
    if who != "rank 0 is killed":
        assert "rank 1 (cuda:1) was" in errors and process.returncode
    while max(b - a for a, b in zip(before, used(), strict=True)) > 2**29:
        assert time.monotonic() < began + END_S + 5, (before, used())
        time.sleep(0.1)


if __name__ == "__main__":
    main(sys.argv[1])


def v41_engine(size: int, **options: Any) -> Engine:
    """Eight layers of DeepSeek-V4.1 with a draft head, and random weights."""
    config = EngineConfig(
        tensor_parallel_size=size,
        max_num_seqs=8,
        max_model_len=4096,
        max_num_batched_tokens=1024,
        cache_memory_bytes=2**30,
        **options,
    )
    return start_engine(config, wide(), Weights(wide()), None)


@torch.inference_mode()
def hidden_states(ids: Sequence[int], executor: LocalExecutor) -> torch.Tensor:
    return Stepper(executor).read(list(ids), (300, 301))[:, 0].float().cpu()


def test_v41_on_two_ranks_is_close_to_one_and_equal_on_both() -> None:
    """As close as the definitions on one rank are: both only add in another order."""
    found = partial(hidden_states, text(1, 900))

    def distance(a: torch.Tensor, b: torch.Tensor) -> float:
        return float(((a - b).norm(dim=1) / b.norm(dim=1)).median())

    with importable_tests():
        two = v41_engine(2, draft_tokens=5)
        assert isinstance(two.executor, Ranks)
        serve_random(two, 30)
        check_engine(two)
        assert not any(two.metrics().late_compilations.values())
        first, second = call_ranks_collectively(two.executor, found)
        two.executor.close()
    (alone,) = call_ranks_collectively(v41_engine(1).executor, found)
    (defined,) = call_ranks_collectively(v41_engine(1, reference=True).executor, found)
    assert torch.equal(first, second) and first.shape == alone.shape
    far, spread = distance(first, alone), distance(defined, alone)
    print(f"two ranks differ from one by {far:.3f}, the definitions by {spread:.3f}")
    assert 0 < far < 1.5 * spread

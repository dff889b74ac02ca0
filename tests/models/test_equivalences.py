"""Equivalences of the CPU table: a token's bits depend neither on the steps nor on the batch.

In float32, with exact and with as-trained activations. As-trained activations are rounded to FP8
and FP4: one different bit before a rounding can move a value by a sixteenth of itself, so only
bitwise equality is a useful promise there. The reference table promises values to a tolerance:
the last test.
"""

import random
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support.integrity import check_scheduler
from tests.support.stepping import Stepper
from tests.support.tiny import random_weights, tiny_config, write_plain_checkpoint
from torch import Tensor

from finwhale import LLM, SamplingParams
from finwhale.config import Activations
from finwhale.models.deepseek_v4.attention import COMPRESS_STREAM
from finwhale.models.deepseek_v4.compressor import C4Compressor

from .oracle import relative_error, torch_threads

SEEDS = (0, 3, 8, 16)
MODES: tuple[Activations, ...] = ("exact", "as-trained")
# Seed, activations, torch threads, dtype of the weights' values. The CPU table multiplies float32
# values with OpenBLAS and the values that checkpoints store (here bfloat16) with FBGEMM.
MODELS = (
    *((seed, mode, 1, torch.float32) for seed in SEEDS for mode in MODES),
    *((3, mode, 1, torch.bfloat16) for mode in MODES),
    (3, "exact", 2, torch.float32),
    (8, "as-trained", 2, torch.bfloat16),
)
# Only the long tests run these models. The other models include one with the same activations and
# dtype as each of them, and both numbers of threads.
LONG_MODELS = (
    (0, "exact", 1, torch.float32),
    (0, "as-trained", 1, torch.float32),
    (3, "exact", 1, torch.float32),
    (3, "as-trained", 1, torch.float32),
    (8, "exact", 1, torch.float32),
    (8, "as-trained", 1, torch.float32),
    (16, "exact", 1, torch.float32),
    (3, "exact", 1, torch.bfloat16),
    (3, "as-trained", 1, torch.bfloat16),
)
LENGTH = 290
# Of the reference table, relative to the largest value: sums of float32 in any order.
TOLERANCE = 2e-5


@dataclass
class Model:
    seed: int
    path: Path
    options: dict[str, Any]
    vocab_size: int
    stepper: Stepper
    whole: Tensor

    def text(self, length: int = LENGTH, salt: int = 0) -> list[int]:
        draw = random.Random(f"{self.seed} {salt}")
        return [draw.randrange(self.vocab_size) for _ in range(length)]

    def llm(self, **options: Any) -> LLM:
        return LLM(self.path, device="cpu", dtype="float32", **self.options, **options)


def _param(model: tuple[Any, ...]) -> Any:
    marks = [pytest.mark.long] if model in LONG_MODELS else []
    return pytest.param(model, id="-".join(map(str, model)), marks=marks)


@pytest.fixture(scope="module", params=[_param(model) for model in MODELS])
def model(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Model]:
    seed, activations, threads, dtype = request.param
    yield from _model(tmp_path_factory.mktemp("tiny") / "model", seed, activations, threads, dtype)


def _model(
    path: Path,
    seed: int,
    activations: Activations,
    threads: int,
    dtype: torch.dtype,
    reference: bool = False,
) -> Iterator[Model]:
    config = tiny_config(seed)
    write_plain_checkpoint(path, config, random_weights(config, seed, dtype))
    options = {"activations": activations, "reference": reference}
    with torch_threads(threads):
        llm = LLM(path, device="cpu", dtype="float32", **options)
        model = Model(
            seed, path, options, config["vocab_size"], Stepper(llm._engine), torch.empty(0)
        )
        model.whole = model.stepper.read(model.text())
        assert model.whole.isfinite().all()
        yield model


SHORT, LONG = (2, 3, 5), (127, 128, 129)


def test_a_decode_prepares_the_indexer_s_queries_while_the_compressors_run(
    model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A prefill prepares them later, in the part of the layer that no graph contains."""
    layers: Any = model.stepper.runner.model
    attn = next(a.attn for a in layers.layers if isinstance(a.attn.compressor, C4Compressor))
    calls: list[str] = []

    def noted(target: Any, name: str) -> None:
        run = getattr(target, name)

        def call(*args: Any) -> Any:
            if name != "join" or args == (COMPRESS_STREAM,):
                calls.append(name)
            return run(*args)

        monkeypatch.setattr(target, name, call)

    class Streams:
        start, join = attn.side_streams.start, attn.side_streams.join

    monkeypatch.setattr(attn, "side_streams", Streams())
    for target, name in (
        (attn.side_streams, "join"),
        (attn.compressor, "prepare_index_queries"),
        (attn.compressor, "select_entries"),
    ):
        noted(target, name)
    sequence = model.stepper.sequence(model.text(12))
    model.stepper.step([(sequence, 11)])
    assert calls == ["join", "prepare_index_queries", "select_entries"]
    calls.clear()
    model.stepper.step([(sequence, 1)])
    assert calls == ["prepare_index_queries", "join", "select_entries"]
    model.stepper.release(sequence)


@pytest.mark.parametrize(
    "size", [1, 127, *(pytest.param(n, marks=pytest.mark.long) for n in (128, 129))]
)
def test_chunks_of_one_size(model: Model, size: int) -> None:
    """Size 1 is decode, token by token from the first."""
    found = model.stepper.read(model.text(), range(size, LENGTH, size))
    assert torch.equal(found, model.whole)


def test_short_chunks(model: Model) -> None:
    """In any order, so that each size begins at every offset within an entry and a window."""
    draw = random.Random(model.seed)
    cuts = accumulate(draw.choice(SHORT) for _ in range(LENGTH))
    found = model.stepper.read(model.text(), [cut for cut in cuts if cut < LENGTH])
    assert torch.equal(found, model.whole)


@pytest.mark.parametrize(
    "draw_seed", [0, *(pytest.param(seed, marks=pytest.mark.long) for seed in (1, 2))]
)
def test_chunks_of_random_sizes(model: Model, draw_seed: int) -> None:
    draw = random.Random(draw_seed)
    sizes = (draw.choice((1, *SHORT, *LONG, draw.randint(1, 60))) for _ in range(LENGTH))
    cuts = accumulate(sizes)
    found = model.stepper.read(model.text(), [cut for cut in cuts if cut < LENGTH])
    assert torch.equal(found, model.whole)


def test_batched_with_others(model: Model) -> None:
    """Five texts of different lengths in the same steps, cut differently, starting at once."""
    stepper, draw = model.stepper, random.Random(model.seed)
    texts = [model.text()] + [model.text(n, salt=n) for n in (1, 4, 131, 260)]
    alone = [stepper.read(text) for text in texts]
    sequences = [stepper.sequence(text) for text in texts]
    found: list[list[Tensor]] = [[] for _ in texts]
    while True:
        left = [len(s.token_ids) - s.num_computed for s in sequences]
        parts = [(i, min(draw.choice((1, 1, 4, 50)), n)) for i, n in enumerate(left) if n]
        if not parts:
            break
        streams = stepper.step([(sequences[i], count) for i, count in parts])
        for (i, _), part in zip(parts, streams, strict=True):
            found[i].append(part)
    for sequence in sequences:
        stepper.release(sequence)
    for pieces, wanted in zip(found, alone, strict=True):
        assert torch.equal(torch.cat(pieces), wanted)


def test_logits_do_not_depend_on_their_batch(model: Model) -> None:
    together = model.stepper.runner.model.compute_logits(model.whole[:40])
    assert torch.equal(together, model.stepper.logits(model.whole[:40]))


def test_freed_pages_leave_nothing_behind(model: Model) -> None:
    """Pages are not cleared: rows of earlier sequences, here NaN, must never be read."""
    for layers in model.stepper.runner.cache.pools.values():
        for pool in layers.values():
            pool[model.stepper.runner.groups[0].rows_per_page :].fill_(torch.nan)
    found = model.stepper.read(model.text(), range(37, LENGTH, 37))
    assert torch.equal(found, model.whole)


@pytest.mark.parametrize("cut", [3, 130, 256, 259])
def test_a_page_is_one_piece_of_memory(model: Model, cut: int) -> None:
    """The bytes of a sequence's pages, copied to other pages, are all of its state."""
    stepper = model.stepper
    sequence = stepper.sequence(model.text())
    stepper.step([(sequence, cut)])
    sequence = stepper.moved(sequence)
    (found,) = stepper.step([(sequence, LENGTH - cut)])
    assert torch.equal(found, model.whole[cut:])
    stepper.release(sequence)


SAMPLED = SamplingParams(max_tokens=12, temperature=0.9, top_p=0.95, seed=7, ignore_eos=True)


def test_a_seeded_request_ignores_its_company(model: Model) -> None:
    prompts = [model.text(n, salt=n) for n in (9, 140, 33)]
    llm = model.llm()
    alone = [llm.generate([p], SAMPLED)[0].outputs[0].token_ids for p in prompts]
    together = llm.generate(prompts, SAMPLED)
    crowded = model.llm(max_num_seqs=2, max_num_batched_tokens=16).generate(prompts, SAMPLED)
    assert [out.outputs[0].token_ids for out in together] == alone
    assert [out.outputs[0].token_ids for out in crowded] == alone
    assert alone[0] != alone[1]


def test_several_continuations_of_one_prompt(model: Model) -> None:
    """n continuations are n draws; the first is that of n=1; greedy ones are all the same."""
    prompt = model.text(50)
    several = SamplingParams(n=3, max_tokens=12, temperature=0.9, seed=7, ignore_eos=True)
    single = SamplingParams(n=1, max_tokens=12, temperature=0.9, seed=7, ignore_eos=True)
    greedy = SamplingParams(n=3, max_tokens=12, temperature=0, ignore_eos=True)
    llm = model.llm()
    drawn, one, same = llm.generate([prompt] * 3, [several, single, greedy])
    assert [out.index for out in drawn.outputs] == [0, 1, 2]
    assert drawn.outputs[0].token_ids == one.outputs[0].token_ids
    assert len({tuple(out.token_ids) for out in drawn.outputs}) == 3
    assert len({tuple(out.token_ids) for out in same.outputs}) == 1
    check_scheduler(llm._engine.scheduler)
    assert not llm._engine.has_work


@pytest.mark.parametrize("seed", [pytest.param(3, marks=pytest.mark.long), 16])
def test_the_reference_agrees_to_a_tolerance(tmp_path: Path, seed: int) -> None:
    """Chunks and batches give the reference the same values, but not the same bits."""
    for model in _model(tmp_path / "model", seed, "exact", 1, torch.float32, reference=True):
        text, stepper = model.text(), model.stepper
        # Decodes from the first token, and over the ends of entries, windows and pages.
        decodes = (*range(1, 20), *range(120, 140), *range(250, LENGTH))
        for cuts in (decodes, range(3, LENGTH, 3), range(128, LENGTH, 128)):
            found = stepper.read(text, cuts)
            assert relative_error(found, model.whole) < TOLERANCE
        sequences = [stepper.sequence(text[:count]) for count in (260, 7, 131)]
        together = stepper.step([(sequence, len(sequence.token_ids)) for sequence in sequences])
        for found in together:
            assert relative_error(found, model.whole[: len(found)]) < TOLERANCE

"""Bounded replay and the ends of prompts in DeepSeek-V4.1, against the rule in float64."""

import random
from collections.abc import Sequence
from functools import cache

import pytest
import torch
from tests.support.op_case import step_tokens
from tests.support.reads_nothing import ReadsNothing
from tests.support.tiny_v41 import compressed_ids, tiny_config
from torch import Tensor

from finwhale.models.deepseek_v41.config_json import config_of
from finwhale.models.deepseek_v41.step_parts import step_parts
from finwhale.models.step_inputs import DraftStart, Inline

from .v41_reference import Output, Replay, draft, forward, text_config
from .v41_runner import TEXTS, TOLERANCE, Runner, exact_weights, relative, step_inputs

CONFIG = config_of(tiny_config())
WINDOW, REPLAY = CONFIG.sliding_window, CONFIG.replay_tokens
# (text, cached tokens, end of the prompt), for texts of 61, 43 and 9 tokens.
NO_HIT, HIT, LATER, SHORT = (0, 0, 50), (0, 30, 61), (0, 44, 53), (1, 14, 21)
WHOLE = 0, 30, 30  # a request for the logits of all tokens
TINY = 2, 0, 9
Sequences = Sequence[tuple[int, int, int]]


@cache
def wanted(text: int, cached: int, tail_end: int) -> Output:
    config, ids = text_config(tiny_config()), TEXTS[text]
    before = forward(exact_weights(), config, ids[: cached or 1], compressed_ids()).entries
    replay = Replay(cached, max(0, cached - WINDOW), max(0, tail_end - WINDOW), before)
    return forward(exact_weights(), config, ids, compressed_ids(), replay=replay)


def resume(runner: Runner, sequences: Sequences) -> None:
    """Compute the cached tokens, and keep nothing but their entries and keys."""
    texts, cached = [s[0] for s in sequences], [s[1] for s in sequences]
    if any(cached):
        runner.step(texts, [(0, n) for n in cached], [(0, n) for n in cached])
    for group in runner.groups:
        if group.keep is not None:
            runner.cache.pages[group.name][1:] = 255


def first_token(cached: int) -> int:
    return max(0, cached - REPLAY)


def run(runner: Runner, sequences: Sequences, cuts: Sequence[int]) -> list[Tensor]:
    """Resume sequences, which compute up to each of some positions in a step; returns the logits
    of their tails.
    """
    resume(runner, sequences)
    texts, bounds = [s[0] for s in sequences], [s[1:] for s in sequences]
    starts = [first_token(cached) for cached, _ in bounds]
    found: list[list[Tensor]] = [[] for _ in sequences]
    for cut in cuts:
        ends = [max(s, min(cut, len(TEXTS[t]))) for s, t in zip(starts, texts, strict=True)]
        chunks = list(zip(starts, ends, strict=True))
        if starts == ends:
            continue
        for part, own in zip(found, runner.step(texts, chunks, bounds), strict=True):
            part.append(own)
        starts = ends
    logits = [torch.cat(part) for part in found]
    tails = [max(0, e - WINDOW) - first_token(c) for c, e in bounds]
    for own, tail in zip(logits, tails, strict=True):
        assert not own[:tail].any()  # the last layers compute none of these
    return [own[tail:] for own, tail in zip(logits, tails, strict=True)]


@cache
def whole(sequence: tuple[int, int, int], rounds: bool, reference: bool = False) -> Tensor:
    return run(Runner(rounds=rounds, reference=reference), [sequence], [99])[0]


@pytest.mark.parametrize("reference", [True, False], ids=["reference", "cpu"])
@pytest.mark.parametrize("sequence", [NO_HIT, HIT, LATER, SHORT, WHOLE, TINY])
def test_logits_are_those_of_the_rule(sequence: tuple[int, int, int], reference: bool) -> None:
    found = whole(sequence, False, reference)
    exact = wanted(*sequence).logits[-len(found) :]
    assert relative(found, exact) < TOLERANCE
    assert torch.equal(found.argmax(1), exact.argmax(1))


def test_the_rule_differs_from_computing_all() -> None:
    everything = forward(exact_weights(), text_config(tiny_config()), TEXTS[0], compressed_ids())
    for sequence in (NO_HIT, HIT, WHOLE):
        assert relative(wanted(*sequence).logits[-1:], everything.logits[-1:]) > 100 * TOLERANCE


@pytest.mark.parametrize("rounds", [False, True], ids=["exact", "as-trained"])
def test_bits_do_not_depend_on_the_steps(rounds: bool) -> None:
    """Cuts in the replay, at an odd position, before and in the tail; decodes; a batch."""
    cuts = [21, 23, 44, 50, 51, 52, 53, 56, 60, 61]
    for sequence in (HIT, NO_HIT):
        found = run(Runner(rounds=rounds), [sequence], cuts)[0]
        assert torch.equal(found, whole(sequence, rounds))
    batch = [NO_HIT, SHORT, TINY, HIT]
    for found, sequence in zip(run(Runner(rounds=rounds), batch, [7, 20, 61]), batch, strict=True):
        assert torch.equal(found, whole(sequence, rounds))


def test_the_host_knows_every_size() -> None:
    """The parts of a step are made without reading a tensor's values."""
    draw = random.Random(0)
    for _ in range(50):
        chunks = [(start, start + draw.randint(1, 30)) for start in draw.choices(range(60), k=4)]
        bounds = [(draw.randint(0, start), draw.randint(0, 99)) for start, _ in chunks]
        inputs = step_inputs(chunks, bounds)
        with ReadsNothing():
            tail = step_parts(inputs, CONFIG).tail
        assert tail is not None and inputs.prompts is not None
        inside = [
            (n, p, b)
            for n, (p, b) in enumerate((p, b) for b, c in enumerate(chunks) for p in range(*c))
            if p >= bounds[b][1] - WINDOW
        ]
        found = tail.parts.inputs.tokens
        numbers = tail.rows, found.positions, found.sequence
        assert list(zip(*(each.tolist() for each in numbers), strict=True)) == inside
        owners = [b for _, _, b in inside]
        assert found.query_start.diff().tolist() == [owners.count(b) for b in range(4)]
        assert found.max_query == max(map(owners.count, range(4)))


def test_entries_of_cached_tokens_are_not_written() -> None:
    """The replay would write other values, because its windows are shorter."""
    runner, cached = Runner(rounds=True), HIT[1]
    resume(runner, [HIT])
    tables, before = runner.tables(1), {}
    for when in ("before", "after"):
        for group in runner.groups:
            for field in group.fields if group.keep is None else ():
                for layer in field.layers:
                    rows = runner.cache.rows(field.name, layer, tables)
                    number = torch.arange(cached // group.tokens_per_row).numpy()
                    own = rows.pool[rows.table.slots(0 * number, number)].clone()
                    assert own.isfinite().all()
                    if when == "before":
                        before[field.name, layer] = own
                    else:
                        assert torch.equal(own, before[field.name, layer])
        runner.step([0], [(first_token(cached), 61)], [HIT[1:]])


@pytest.mark.parametrize("sequence", [NO_HIT, LATER, SHORT])
def test_drafts_are_those_of_the_rule(sequence: tuple[int, int, int]) -> None:
    text, cached, anchor = sequence
    runner, count = Runner(rounds=False), 4
    resume(runner, [sequence])
    runner.step([text], [(first_token(cached), anchor)], [sequence[1:]])
    newest, given = TEXTS[text][anchor], TEXTS[text][anchor + 1 : anchor + 1 + count]
    start = DraftStart(
        hidden=torch.empty(1, 0),
        newest_ids=torch.tensor([newest]),
        tokens=step_tokens(((anchor - 1, anchor),)),
        tables=runner.tables(1),
    )
    logits: list[Tensor] = []

    def choose(own: Tensor, k: int) -> Tensor:
        logits.append(own)
        return torch.tensor(given[k : k + 1])

    assert runner.model.draft_head is not None
    with torch.inference_mode():
        runner.model.draft_head.draft(start, count, runner.cache, Inline(), choose)
    features = wanted(*sequence).features[:anchor]
    block = draft(exact_weights(), text_config(tiny_config()), features, newest, given)
    assert relative(torch.cat(logits), block.logits) < TOLERANCE

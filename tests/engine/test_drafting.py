"""Drafting changes no token: random schedules with drafts of 0 to 3 tokens, and what is undone."""

import random
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import event, given, settings
from hypothesis import strategies as st
from torch import Tensor

from finwhale import LLM, RequestOutput, SamplingParams
from finwhale.chat.grammar import regex_guide
from finwhale.engine.engine import Engine
from finwhale.engine.pages import PageManager, pages_at_block_end, windowed_pages
from finwhale.engine.scheduler import Chunk, Scheduler
from finwhale.engine.speculative import Forward
from finwhale.errors import FinwhaleError
from finwhale.testing.stepping import Stepper
from finwhale.testing.tiny import random_weights, tiny_config, write_plain_checkpoint

from .test_async import play, random_params

BLOCK = 256
EOS = 1


class Oracle:
    """In place of the MTP layer's guesses: what will come, or anything, by the toss of a coin.

    With random weights the layer is almost never right, and nothing would ever be accepted.
    """

    def __init__(self, engine: Engine, right: float, seed: int = 0) -> None:
        self.engine, self.right = engine, right
        self.draw = random.Random(seed)
        self.known: dict[str, list[int]] = {}
        drafter = engine.runner.drafter
        assert drafter is not None
        self.real = drafter.propose
        drafter.propose = self.propose  # type: ignore[method-assign]

    def learn(self, results: Sequence[RequestOutput]) -> None:
        for result in results:
            for output in result.outputs:
                key = f"{result.request_id}/{output.index}"
                self.known[key] = [*result.prompt_token_ids, *output.token_ids]

    def propose(
        self, forward: Forward, chunks: Sequence[Chunk], chosen: Tensor | None
    ) -> Tensor | None:
        drafts = self.real(forward, chunks, chosen)
        if drafts is None or chosen is None:
            return drafts
        out = drafts.clone()
        vocab = self.engine.model_config.vocab_size
        at, column = 0, 0
        for chunk in chunks:
            mine = chosen[at : at + chunk.num_logits].tolist()
            at += chunk.num_logits
            if not chunk.propose:
                continue
            accepted = 0
            while accepted < len(chunk.drafts) and mine[accepted] == chunk.drafts[accepted]:
                accepted += 1
            text = self.known.get(chunk.sequence.key, [])
            for step in range(chunk.propose):
                place = chunk.known + accepted + 1 + step
                if self.draw.random() < self.right and place < len(text):
                    out[step, column] = text[place]
                elif self.draw.random() < 0.7:
                    out[step, column] = self.draw.randrange(vocab)
            column += 1
        return out


@pytest.mark.parametrize("seed", range(6))
def test_no_token_changes(new_llm: Callable[..., LLM], seed: int) -> None:
    """Every way to choose and to end, n, penalties, grammars, logprobs: equal to the last field."""
    options = {"max_num_seqs": 4, "max_num_batched_tokens": 40, "max_model_len": 300}
    wanted = play(new_llm(**options).engine, seed)
    for draft_tokens in (1, 2, 3):
        engine = new_llm(**options, draft_tokens=draft_tokens).engine
        oracle = Oracle(engine, right=0.75, seed=seed)
        oracle.learn(wanted)
        assert play(engine, seed) == wanted
        accepted = engine._meter.drafts_accepted[:draft_tokens]
        assert all(n > 5 for n in accepted), accepted


# --- Bitwise, over schedules with shared prefixes and preemption -----------------------------------


class Machine:
    """One model: an engine that drafts, and the same weights read as a whole."""

    def __init__(self, path: Path, activations: Any, reference: bool) -> None:
        options: dict[str, Any] = {
            "device": "cpu",
            "activations": activations,
            "reference": reference,
            "max_num_seqs": 4,
            "max_num_batched_tokens": 2048,
        }
        self.engine = LLM(path, **options, draft_tokens=3).engine
        self.read = type(self.engine.runner).read.__get__(self.engine.runner)
        drafter = self.engine.runner.drafter
        assert drafter is not None
        self.propose = drafter.propose
        self.stepper = Stepper(LLM(path, **options).engine)
        self.rows: dict[tuple[str, int], list[tuple[list[int], Tensor]]] = {}

    def begin(self, *, blocks: int, states: int, seqs: int, step: int, drafts: int) -> Engine:
        """The engine with a new scheduler that has so many blocks and states, and no more."""
        engine, groups = self.engine, self.engine.runner.groups
        # A test that failed may have left something behind.
        for left in (engine._requests, engine._streams, engine._flying, engine.sampler._requests):
            left.clear()  # type: ignore[attr-defined]
        num_pages = {}
        for group in groups:
            num_pages[group.name] = 1 + blocks * (BLOCK // group.tokens_per_page)
            if group.keep is not None:
                more = states * pages_at_block_end(group)
                num_pages[group.name] = windowed_pages(group, seqs, step, True, True) + more
        engine.scheduler = Scheduler(
            PageManager(groups, num_pages), max_num_seqs=seqs, max_num_batched_tokens=step
        )
        engine.scheduler.draft_tokens = drafts
        self.rows = {}
        engine.runner.read = self.record  # type: ignore[method-assign]
        drafter = engine.runner.drafter
        assert drafter is not None
        drafter.propose = self.propose  # type: ignore[method-assign]
        return engine

    def record(self, chunks: Sequence[Chunk]) -> Forward:
        """Note every row of logits with the text that it came after, drafts included."""
        forward: Forward = self.read(chunks)
        at = 0
        for chunk in chunks:
            if chunk.completes:
                whole = [*chunk.sequence.token_ids, *chunk.drafts]
                for end in range(chunk.known, chunk.end + 1):
                    row = forward.logits[at].clone()
                    self.rows.setdefault((chunk.sequence.key, end), []).append((whole[:end], row))
                    at += 1
        return forward

    def check(self, result: RequestOutput) -> int:
        """Every logit after a text that became output is that of the text read as a whole.

        Returns:
            How many rows were of drafts that were wrong.
        """
        wrong = 0
        for output in result.outputs:
            tokens = [*result.prompt_token_ids, *output.token_ids]
            first = len(result.prompt_token_ids)
            wanted = self.stepper.logits(self.stepper.read(tokens[:-1])[first - 1 :])
            for end in range(first, len(tokens)):
                rows = self.rows[f"{result.request_id}/{output.index}", end]
                right = [row for text, row in rows if text == tokens[:end]]
                wrong += len(rows) - len(right)
                assert right
                for row in right:
                    assert torch.equal(row, wanted[end - first]), (result.request_id, end)
        return wrong


# Seed, window, activations, whether the operators are the references.
MODELS = ((3, 13, "exact", False), (4, 128, "as-trained", False), (5, 100, "as-trained", True))


@pytest.fixture(scope="module", params=MODELS, ids=["cpu-exact", "cpu-as-trained", "reference"])
def machine(request: pytest.FixtureRequest) -> Iterator[Machine]:
    seed, window, activations, reference = request.param
    config = tiny_config(seed) | {
        "vocab_size": 300,
        "hidden_size": 64,
        "num_attention_heads": 2,
        "o_groups": 2,
        "head_dim": 48,
        "num_hidden_layers": 3,
        "num_hash_layers": 1,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "compress_ratios": [128, 4, 4, 0],
        "index_topk": 16,
        "sliding_window": window,
        "max_position_embeddings": 2048,
    }
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "model"
        write_plain_checkpoint(path, config, random_weights(config, seed))
        yield Machine(path, activations, reference)
    torch.set_num_threads(threads)


def text(length: int, salt: object = 0) -> list[int]:
    draw = random.Random(f"{length} {salt}")
    return [draw.randrange(2, 300) for _ in range(length)]


def run(engine: Engine) -> None:
    while engine.has_work:
        engine.step()
        engine.check_integrity()


def assert_idle(engine: Engine) -> None:
    engine.check_integrity()
    assert not engine.has_work
    engine.reset_prefix_cache()
    for pool in engine.scheduler.pages.pools.values():
        assert pool.num_free == pool.num_pages - 1


@pytest.mark.parametrize("drafts", [1, 2, 3])
@pytest.mark.parametrize("edge", [4, 128, 256])
def test_every_edge(machine: Machine, drafts: int, edge: int) -> None:
    """Drafts that are right, wrong or partly right over the ends of entries, states and blocks.

    Then the same text goes on from what was kept of it.
    """
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    prompts = [text(edge - before, drafts) for before in range(1, 4)] + [text(edge + 1)]
    engine = machine.begin(blocks=20, states=20, seqs=4, step=600, drafts=0)
    plain = [engine.add_request(f"{i}", p, params) for i, p in enumerate(prompts)]
    run(engine)
    for right in (0.0, 0.6, 1.0):
        engine = machine.begin(blocks=20, states=20, seqs=4, step=600, drafts=drafts)
        oracle = Oracle(engine, right, seed=edge)
        oracle.learn(plain)
        results = [engine.add_request(f"{i}", p, params) for i, p in enumerate(prompts)]
        run(engine)
        assert [r.outputs for r in results] == [r.outputs for r in plain]
        wrong = sum(machine.check(result) for result in results)
        assert right == 1.0 or wrong > 0
        for i, result in enumerate(results):
            longer = [*result.prompt_token_ids, *result.outputs[0].token_ids, 7, 8, 9]
            again = engine.add_request(f"again {i}", longer, params)
            run(engine)
            assert again.num_cached_tokens == (len(longer) - 4) // BLOCK * BLOCK
            machine.check(again)
        assert_idle(engine)


@settings(max_examples=max(6, settings().max_examples // 16))
@given(data=st.data())
def test_random_schedules(machine: Machine, data: st.DataObject) -> None:
    """Arrivals, aborts, preemption, common beginnings, evictions; twice, so that drafts are right."""
    crowded = data.draw(st.booleans(), "crowded")
    blocks = data.draw(st.integers(2, 3 if crowded else 5), "blocks")
    sizes: dict[str, int] = {
        "blocks": blocks,
        "states": data.draw(st.sampled_from([0, 1, 4]), "states"),
        "seqs": 4 if crowded else data.draw(st.integers(1, 4), "sequences"),
        "step": data.draw(st.sampled_from([300, 3, 70, 130, 520]), "tokens a step"),
    }
    seed = data.draw(st.integers(0, 2**32), "draws")
    drafts = data.draw(st.integers(1, 3), "drafts")
    engine = machine.begin(**sizes, drafts=0)
    plain = arrivals(engine, seed, crowded, BLOCK * blocks - 1, aborts=False)
    assert_idle(engine)
    engine = machine.begin(**sizes, drafts=drafts)
    before = list(engine._meter.drafts_accepted)
    oracle = Oracle(engine, data.draw(st.sampled_from([0.5, 0.9]), "right"), seed)
    oracle.learn(plain)
    results = arrivals(engine, seed, crowded, BLOCK * blocks - 1, aborts=True)
    wanted = {result.request_id: result for result in plain}
    for result in results:
        assert result.outputs == wanted[result.request_id].outputs and result.error is None
        machine.check(result)
    event(f"preempted: {engine.scheduler.counts.preemptions > 0}")
    event(f"found: {engine.scheduler.counts.cached_tokens > 0}")
    event(f"accepted: {engine._meter.drafts_accepted[drafts - 1] > before[drafts - 1]}")
    assert_idle(engine)


def arrivals(
    engine: Engine, seed: int, crowded: bool, longest: int, *, aborts: bool
) -> list[RequestOutput]:
    """The same requests for one seed, run to their ends, except for some that are given up."""
    draw, chance = random.Random(seed), random.Random(seed + 1)
    trunks = [text(longest, salt) for salt in range(2)]
    rate = 1.0 if crowded else draw.choice((0.1, 1.0))
    cuts = (236,) if crowded else (0, 128, 256, 256, 512)
    ends = (5, 9) if crowded else (1, 5, 140)
    results: list[RequestOutput] = []
    left = draw.randint(3, 6)
    while left or engine.has_work:
        if left and (chance.random() < rate or not engine.has_work):
            left -= 1
            cut = draw.choice(cuts) + draw.choice((0, 1, -1, 4, -4, -40))
            prompt = draw.choice(trunks)[: max(0, cut)]
            prompt = (prompt + text(draw.choice(ends), left))[: longest - 2]
            params = SamplingParams(
                n=draw.choice((1, 1, 2)),
                temperature=draw.choice((0.0, 0.8)),
                seed=left,
                presence_penalty=draw.choice((0.0, 0.4)),
                max_tokens=min(draw.choice((2, 20, 50)), longest - len(prompt)),
                ignore_eos=True,
            )
            priority = draw.choice((0, 0, 1))
            name = f"r{left}"
            results.append(engine.add_request(name, prompt, params, priority=priority))
        engine.step()
        engine.check_integrity()
        if aborts and chance.random() < 0.01 and results:
            gone = results.pop(chance.randrange(len(results)))
            engine.abort(gone.request_id)
            engine.check_integrity()
    return results

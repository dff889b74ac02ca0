"""The per-request sampler: seeds, penalties, batches, errors."""

import math
from collections.abc import Hashable
from typing import Any

import numpy as np
import pytest
import torch

from finwhale.engine.loop.results import NOT_FINITE, SampledToken, TokenReader
from finwhale.engine.plan.sampling import RequestSampling
from finwhale.engine.plan.sequences import SequenceState
from finwhale.engine.plan.step_plan import SlotAdmission
from finwhale.engine.plan.step_planner import SamplingInputs, StepPlanner
from finwhale.engine.steps.draft_noise import StaticDraftNoise, choose_drafts
from finwhale.engine.steps.executor import StepTransfer, token_parts
from finwhale.engine.steps.host_transfer import Transfer
from finwhale.engine.steps.inputs import NO_STEP
from finwhale.engine.steps.sampler import Sampler as RankSampler
from finwhale.engine.steps.sampler import draw_arrays
from finwhale.errors import RequestError
from finwhale.ops.sampling import Filters, Sample, SampledTokens, SamplingBatch
from finwhale.ops.sampling.ref import sample
from finwhale.request import SamplingParams

VOCAB_SIZE = 97
PARAMS = (
    SamplingParams(seed=1),
    SamplingParams(temperature=0),
    SamplingParams(seed=2, top_k=10, temperature=0.7),
    SamplingParams(seed=3, top_p=0.8, logprobs=3),
    SamplingParams(seed=4, min_p=0.1, repetition_penalty=1.4, frequency_penalty=0.3),
    SamplingParams(temperature=0, presence_penalty=0.7, logprobs=0),
    SamplingParams(temperature=1e-60, seed=5),
)


class Sampler:
    """The engine's side of sampling and a rank's, one step at a time."""

    def __init__(self, sample: Sample, vocab_size: int = VOCAB_SIZE) -> None:
        self.rank = RankSampler(sample, vocab_size)
        self.reader = TokenReader()
        self.sequences: dict[Hashable, SequenceState] = {}
        self.slots = 0

    def add(
        self,
        key: Hashable,
        params: SamplingParams,
        prompt: list[int],
        vocab_size: int,
        index: int = 0,
    ) -> None:
        sampling = RequestSampling(params, prompt, vocab_size, index)
        self.slots += 1
        self.sequences[key] = SequenceState(
            str(key), str(key), index, list(prompt), len(prompt), 10**6, params,
            sampling=sampling, slot=self.slots,
        )  # fmt: skip
        self.rank.admit([SlotAdmission(self.slots, sampling.settings)])

    def remove(self, key: Hashable) -> None:
        self.rank.admit([], [self.sequences.pop(key).slot])

    def sample(self, keys: list[Any], logits: torch.Tensor) -> list[SampledToken]:
        sequences = [self.sequences[key] for key in keys]
        positions, histories = [], []
        for sequence in sequences:
            assert sequence.sampling is not None
            histories.append(sequence.sampling.history)
            if not sequence.sampling.settings.greedy:
                positions.append(len(sequence.token_ids) - sequence.num_prompt)
        plan = StepPlanner(logits.shape[1]).plan_sampling(
            tuple(sequence.slot for sequence in sequences), SamplingInputs(positions, histories)
        )
        if not plan.slots:
            return []
        sampled = self.rank.sample(plan, logits)
        result = StepTransfer(NO_STEP, Transfer(token_parts(sampled))).wait()
        tokens = self.reader.read(result, sequences, histories)
        for sequence, history, token in zip(sequences, histories, tokens, strict=True):
            if token.error is None:
                sequence.token_ids.append(token.token_id)
                history.accept(token.token_id)
        return tokens


def logits_of(request: int, step: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 * request + step)
    return torch.randn(VOCAB_SIZE, generator=generator) * 2


def generate(batches: list[list[int]]) -> dict[int, list[SampledToken]]:
    """Runs requests 0..6 in the given batches; a request's n-th step always has the same logits."""
    sampler = Sampler(sample)
    for i, params in enumerate(PARAMS):
        sampler.add(i, params, [5, 6, i], VOCAB_SIZE)
    out: dict[int, list[SampledToken]] = {i: [] for i in range(len(PARAMS))}
    for keys in batches:
        logits = torch.stack([logits_of(i, len(out[i])) for i in keys])
        for i, token in zip(keys, sampler.sample(keys, logits), strict=True):
            out[i].append(token)
    return out


def test_tokens_do_not_depend_on_the_batch_or_on_pauses() -> None:
    together = generate([list(range(7))] * 12)
    alone = generate([[i] for i in range(7) for _ in range(12)])
    rng = np.random.default_rng(0)
    shuffled: list[list[int]] = []
    left = dict.fromkeys(range(7), 12)
    while left:
        keys = rng.permutation(list(left))[: rng.integers(1, 8)].tolist()
        shuffled.append(keys)
        for i in keys:
            left[i] -= 1
            if not left[i]:
                del left[i]
    assert together == alone == generate(shuffled)


def test_a_temperature_that_float32_cannot_hold_is_greedy() -> None:
    tokens = generate([[6]] * 8)[6]
    assert [t.token_id for t in tokens] == [int(logits_of(6, step).argmax()) for step in range(8)]


def test_penalties_follow_the_output() -> None:
    tokens = [t.token_id for t in generate([[5]] * 30)[5]]
    seen: set[int] = set()
    for step, token in enumerate(tokens):
        x = logits_of(5, step).numpy().copy()
        x[list(seen)] -= np.float32(0.7)
        assert token == int(np.argmax(x))
        seen.add(token)

    sampler = Sampler(sample)
    params = SamplingParams(temperature=0, repetition_penalty=1.5, frequency_penalty=0.25)
    prompt = [1, 2, 2, 3]
    sampler.add("a", params, prompt, VOCAB_SIZE)
    counts: dict[int, int] = {}
    fixed = logits_of(0, 0)
    for _ in range(60):
        x = fixed.numpy().copy()
        for t in {*prompt, *counts}:
            x[t] = x[t] / np.float32(1.5) if x[t] > 0 else x[t] * np.float32(1.5)
            x[t] -= np.float32(0.25) * counts.get(t, 0)
        (got,) = sampler.sample(["a"], fixed[None])
        assert got.token_id == int(np.argmax(x))
        counts[got.token_id] = counts.get(got.token_id, 0) + 1
    assert len(counts) > 10


@pytest.mark.parametrize("frequency", [0.0, 0.25])
@pytest.mark.parametrize("presence", [0.0, 2.0])
@pytest.mark.parametrize("repetition", [1.0, 1.5])
def test_only_repetition_penalties_count_the_prompt(
    frequency: float, presence: float, repetition: float
) -> None:
    """The prompt's tokens are the most likely, and one of them occurs three times."""
    sampler = Sampler(sample)
    params = SamplingParams(
        temperature=0,
        frequency_penalty=frequency,
        presence_penalty=presence,
        repetition_penalty=repetition,
    )
    fixed = logits_of(0, 0)
    prompt = fixed.argsort(descending=True)[[0, 1, 1, 1, 2]].tolist()
    sampler.add("a", params, prompt, VOCAB_SIZE)
    output: list[int] = []
    for _ in range(40):
        x = fixed.numpy().copy()
        for t in {*prompt, *output}:
            if repetition != 1:
                x[t] = x[t] / np.float32(repetition) if x[t] > 0 else x[t] * np.float32(repetition)
            x[t] -= np.float32(frequency) * output.count(t) + np.float32(presence) * (t in output)
        (got,) = sampler.sample(["a"], fixed[None])
        assert got.token_id == int(np.argmax(x))
        output.append(got.token_id)


def test_seeds() -> None:
    def run(seed: int | None, index: int = 0) -> list[int]:
        sampler = Sampler(sample)
        sampler.add(0, SamplingParams(seed=seed, n=4), [], VOCAB_SIZE, index)
        return [sampler.sample([0], torch.zeros(1, VOCAB_SIZE))[0].token_id for _ in range(20)]

    assert run(9) == run(9)
    assert len(set(run(9))) > 10
    assert run(9) != run(10)
    assert run(9, 1) == run(9, 1) != run(9, 0)
    assert run(9, 1) != run(9, 2)
    assert run(9, 1) != run(10, 0)
    assert run(None) != run(None)
    assert run(-1) == run(-1)
    assert run(10**40) == run(10**40)
    # Each of the 64 bits counts; only those beyond do not.
    assert len({tuple(run(9 ^ 1 << bit)) for bit in range(64)} | {tuple(run(9))}) == 65
    assert run(9) == run(9 + 2**64) == run(9 - 2**64)


def test_logprobs() -> None:
    tokens = generate([[3, 0, 5]] * 20)
    assert all(t.logprobs is None for t in tokens[0])
    for step, token in enumerate(tokens[3]):
        want = logits_of(3, step).double().log_softmax(-1)
        order = want.argsort(descending=True).tolist()
        assert token.logprobs is not None
        assert list(token.logprobs) == list(dict.fromkeys([token.token_id, *order[:3]]))
        for token_id, entry in token.logprobs.items():
            assert entry.rank == order.index(token_id) + 1
            assert entry.logprob == pytest.approx(want[token_id].item(), abs=1e-6)
    assert all(list(t.logprobs or ()) == [t.token_id] for t in tokens[5])


def test_more_logprobs_and_top_k_than_tokens() -> None:
    sampler = Sampler(sample, 5)
    sampler.add(0, SamplingParams(seed=0, logprobs=100, top_k=2**31 - 1), [], 5)
    (token,) = sampler.sample([0], torch.zeros(1, 5))
    assert token.logprobs is not None and len(token.logprobs) == 5


def test_a_bad_row_fails_its_request_alone() -> None:
    keys = [0, 1, 2, 3, 4, 5, 6]
    logits = torch.stack([logits_of(i, 0) for i in keys])
    sampler = Sampler(sample)
    for i, params in enumerate(PARAMS):
        sampler.add(i, params, [5, 6, i], VOCAB_SIZE)
    logits[2, 7] = math.nan
    logits[4, 7] = math.inf
    got = sampler.sample(keys, logits)
    want = generate([keys])
    for i in keys:
        if i in (2, 4):
            assert got[i] == SampledToken(-1, error=NOT_FINITE)
        else:
            assert got[i] == want[i][0]


def test_plain_greedy_asks_for_nothing_more() -> None:
    batches: list[SamplingBatch] = []

    def spy(logits_SV: torch.Tensor, batch: SamplingBatch) -> SampledTokens:
        batches.append(batch)
        return sample(logits_SV, batch)

    sampler = Sampler(spy)
    for key in range(3):
        sampler.add(key, SamplingParams(temperature=0, top_k=5, top_p=0.5), [1], VOCAB_SIZE)
    sampler.sample([0, 1, 2], torch.zeros(3, VOCAB_SIZE))
    assert batches == [SamplingBatch()]


def test_requests_come_and_go() -> None:
    sampler = Sampler(sample)
    assert sampler.sample([], torch.zeros(0, VOCAB_SIZE)) == []
    sampler.add("a", SamplingParams(temperature=0), [], VOCAB_SIZE)
    sampler.sample(["a"], torch.zeros(1, VOCAB_SIZE))
    sampler.remove("a")
    with pytest.raises(KeyError):
        sampler.sample(["a"], torch.zeros(1, VOCAB_SIZE))
    sampler.add("a", SamplingParams(seed=0, logprobs=1), [], VOCAB_SIZE)
    (token,) = sampler.sample(["a"], torch.zeros(1, VOCAB_SIZE))
    assert token.logprobs is not None


def test_prompt_ids_outside_the_vocabulary() -> None:
    sampler = Sampler(sample)
    for wrong in (-1, VOCAB_SIZE):
        with pytest.raises(RequestError, match=r"is not in 0\.\.96"):
            sampler.add(0, SamplingParams(repetition_penalty=1.1), [wrong], VOCAB_SIZE)


def test_drafts_have_the_noise_of_the_model_s_draws_at_their_positions() -> None:
    """A head with the model's logits drafts the tokens that the model draws."""
    params = [SamplingParams(seed=i, temperature=0.5 + i) for i in range(4)]
    prompts = [[5] * (1 + i) for i in range(4)]
    settings = [
        RequestSampling(one, prompt, VOCAB_SIZE, index=i).settings
        for i, (one, prompt) in enumerate(zip(params, prompts, strict=True))
    ]
    num_output = torch.tensor([1, 2, 9, 30])  # with the newest token
    last = torch.tensor([len(prompt) for prompt in prompts]) + num_output - 2
    temperature, seeds, indices = (torch.from_numpy(array) for array in draw_arrays(settings))
    filters = Filters(rows_R=None, temperature_R=temperature, seeds_R=seeds, indices_R=indices)
    fixed = StaticDraftNoise(5, 3, torch.device("cpu"))
    fixed.fill(range(4), dict(enumerate(settings)))
    logits = torch.randn(4, VOCAB_SIZE, generator=torch.Generator().manual_seed(0))
    for choose in (choose_drafts(sample, settings, last), fixed.choose_drafts(sample, last)):
        for k in range(3):
            batch = SamplingBatch(filters=filters, positions_R=num_output + k)
            assert torch.equal(choose(logits, k), sample(logits, batch).ids_S)

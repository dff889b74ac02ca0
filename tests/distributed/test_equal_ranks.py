"""Several ranks compute what one rank computes."""

import itertools
import random
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import event, settings
from hypothesis import given as given_examples
from hypothesis import strategies as st
from tests.support.tiny import random_weights, tiny_config, with_dspark, write_plain_checkpoint

from finwhale import SamplingParams
from finwhale.chat.grammar import regex_guide
from finwhale.demo import DSPARK_PATH
from finwhale.distributed.collectives import Alone, Collectives
from finwhale.distributed.rank import Rank
from finwhale.engine.ranks.ranks import first_rank
from finwhale.engine.start.launch_signatures import LaunchEnumerator
from finwhale.engine.steps.step_limits import StepLimits
from finwhale.models.deepseek_v4.model import DeepseekV4
from finwhale.models.deepseek_v4.tensor_parallel import SampleFromParts, TensorParallel
from finwhale.ops.launch.sizes import ModelSizes
from finwhale.ops.linear import LinearWeight
from finwhale.ops.sampling import SampledTokens, SamplingBatch
from finwhale.ops.tables.reference import OPS as REFERENCE

from .in_slices import add_in_slices
from .rank_engines import SCENARIOS, Given, Ran, open_engine
from .rank_processes import RankProcesses

SIZES = (2, 4)
FEWER_SIZES = (pytest.param(2, marks=pytest.mark.long), 4)
ACTIVATIONS = ("exact", "as-trained")
VOCAB = 400  # as many as the tokenizer of `tiny_path` has
# Of the difference to one rank, which adds in another order, relative to the values' norm.
BOUND = 1e-5
# Where activations are rounded, a difference in the last bit can become a step of E4M3, which the
# following tokens see. In twelve cases, 60% to 99% of 150 tokens stay within BOUND. If a rounding
# is left out, none does.
AGREEING = 0.2


def sharded_config() -> dict[str, Any]:
    """The contents of a config.json: small sizes that 4 ranks divide in whole rounding groups."""
    return tiny_config(3) | {
        "vocab_size": VOCAB,
        "hidden_size": 64,
        "num_attention_heads": 8,
        "o_groups": 4,
        "o_lora_rank": 128,
        "head_dim": 48,
        "num_hidden_layers": 3,
        "num_hash_layers": 1,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 512,
        "compress_ratios": [128, 4, 0, 0],
        "index_topk": 16,
        "sliding_window": 13,
        "max_position_embeddings": 1024,
    }


@pytest.fixture(scope="module")
def processes() -> Iterator[RankProcesses]:
    processes = RankProcesses(max(SIZES))
    yield processes
    processes.close()


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint whose weights bfloat16 represents, as in the released ones."""
    path = tmp_path_factory.mktemp("sharded") / "model"
    config = sharded_config()
    write_plain_checkpoint(path, config, random_weights(config, 3, torch.bfloat16))
    return path


@pytest.fixture(scope="module")
def tokenizer_path(path: Path, tiny_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same checkpoint with a tokenizer."""
    with_tokenizer = tmp_path_factory.mktemp("with tokenizer")
    for file in (*path.iterdir(), tiny_path / "tokenizer.json"):
        (with_tokenizer / file.name).symlink_to(file)
    return with_tokenizer


def given(path: Path, activations: str, **options: Any) -> Given:
    return Given(
        path,
        {"activations": activations, "max_num_seqs": 4, "max_num_batched_tokens": 300, **options},
    )


def divide_tokens(model: DeepseekV4, least: int) -> None:
    """Let steps of `least` tokens and more divide their tokens among the ranks."""
    model.ranks.divided_tokens = least


def alone(
    slices: int,
    scenario: str,
    given: Given,
    *args: Any,
    whole_from: int | None = None,
    **kwargs: Any,
) -> Any:
    """The result of one rank that adds its partial sums as `slices` ranks do."""
    change = None
    if slices > 1:
        change = partial(add_in_slices, size=slices, whole_from=whole_from)
    one = Given(given.path, given.options, given.collectives, change)
    return SCENARIOS[scenario](one, *args, **kwargs)


def assert_close(found: torch.Tensor, wanted: torch.Tensor, activations: str) -> None:
    """Of residual streams or logits of each token."""
    if activations == "exact":
        assert (found - wanted).norm() < BOUND * wanted.norm()
        return
    errors_T = (found - wanted).flatten(1).norm(dim=1) / wanted.flatten(1).norm(dim=1)
    assert (errors_T < BOUND).float().mean() > AGREEING, errors_T


def forward_cases() -> list[Any]:
    """Every combination. Most are marked long; the others contain each pair of choices."""
    choices = (("forward", "mtp"), SIZES, ACTIVATIONS, (None, 6), (False, True))
    cases = [  # without divided tokens, whole weights have no effect
        case for case in itertools.product(*choices) if not (case[-1] and case[-2] is None)
    ]
    pairs = {case: set(itertools.combinations(enumerate(case), 2)) for case in cases}
    left: set[Any] = set.union(*pairs.values())
    core: set[Any] = set()
    while left:
        best = max(cases, key=lambda case: len(pairs[case] & left))
        core.add(best)
        left -= pairs[best]
    return [
        pytest.param(
            *case, id="-".join(map(str, case)), marks=[] if case in core else pytest.mark.long
        )
        for case in cases
    ]


@pytest.mark.parametrize(
    ("scenario", "size", "activations", "divided_tokens", "whole"), forward_cases()
)
def test_forward(
    processes: RankProcesses,
    path: Path,
    scenario: str,
    size: int,
    activations: str,
    divided_tokens: int | None,
    whole: bool,
) -> None:
    """Residual streams and logits, of the model and of its MTP layer."""
    case = given(path, activations, whole_attention=whole), 150, 1
    divide = None if divided_tokens is None else partial(divide_tokens, least=divided_tokens)
    ranks = processes.run(size, scenario, replace(case[0], change=divide), *case[1:])
    whole_from = divided_tokens if whole else None
    sliced = alone(size, scenario, *case, whole_from=whole_from)
    one = alone(1, scenario, *case)
    for rank in ranks:
        assert all(torch.equal(a, b) for a, b in zip(rank, sliced, strict=True))
    for a, b in zip(ranks[0], one, strict=True):
        assert_close(a, b, activations)


def assert_equal(
    processes: RankProcesses,
    size: int,
    case: Given,
    *args: Any,
    divided_tokens: int | None = None,
    **more: Any,
) -> Ran:
    """Run requests on `size` ranks; every bit on every rank is that of one rank with slices."""
    whole_from = divided_tokens if case.options.get("whole_attention") else None
    wanted: Ran = alone(size, "generate", case, *args, whole_from=whole_from, **more)
    if divided_tokens is not None:
        case = replace(case, change=partial(divide_tokens, least=divided_tokens))
    for rank in processes.run(size, "generate", case, *args, **more):
        assert rank == wanted
    assert not any(error for _, error, _ in wanted.outputs)
    return wanted


def text(length: int, salt: object) -> list[int]:
    draw = random.Random(f"{length} {salt}")
    return [draw.randrange(2, VOCAB) for _ in range(length)]


def greedy(max_tokens: int) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)


@pytest.mark.parametrize("size", FEWER_SIZES)
def test_greedy(processes: RankProcesses, path: Path, size: int) -> None:
    prompts = [text(length, 0) for length in (1, 130)]
    case = given(path, "exact"), prompts, [greedy(32)] * 2
    ran = assert_equal(processes, size, *case)
    one: Ran = alone(1, "generate", *case)
    assert ran.outputs == one.outputs


@pytest.mark.parametrize("size", SIZES)
def test_sampling(processes: RankProcesses, tokenizer_path: Path, size: int) -> None:
    """Seeds, filters, penalties, log-probabilities and grammars."""
    params = [
        SamplingParams(n=2, seed=1, max_tokens=12),
        SamplingParams(seed=2, top_k=20, top_p=0.9, min_p=0.01, max_tokens=12, logprobs=3),
        SamplingParams(seed=3, repetition_penalty=1.2, presence_penalty=0.3, max_tokens=12),
        SamplingParams(seed=4, guide=regex_guide("[a-z]{2,5}-[0-9]{1,3}"), max_tokens=12),
        SamplingParams(temperature=0, guide=regex_guide("(yes|no) [0-9]+"), max_tokens=8),
    ]
    prompts = [text(20, i) for i in range(len(params))]
    ran = assert_equal(processes, size, given(tokenizer_path, "exact"), prompts, params)
    assert (
        ran.outputs == alone(1, "generate", given(tokenizer_path, "exact"), prompts, params).outputs
    )


@pytest.mark.parametrize(("size", "on_device"), [(2, True), (4, False)])
def test_drafts(processes: RankProcesses, path: Path, size: int, on_device: bool) -> None:
    prompts = [text(length, 0) for length in (3, 40, 130)]
    params = [greedy(12), greedy(20), SamplingParams(seed=5, max_tokens=12, ignore_eos=True)]
    case = given(path, "exact", draft_tokens=2)
    ran = assert_equal(processes, size, case, prompts, params, on_device=on_device)
    assert ran.outputs == alone(1, "generate", given(path, "exact"), prompts, params).outputs


def test_dspark(processes: RankProcesses, tmp_path: Path) -> None:
    """Proposals have equal bits on all ranks, and no token changes, also with divided tokens."""
    config = with_dspark(sharded_config())
    path = tmp_path / "dspark"
    write_plain_checkpoint(path, config, random_weights(config, 3, torch.bfloat16))
    prompts = [text(length, 0) for length in (3, 40)]
    params = [greedy(12), SamplingParams(seed=5, max_tokens=12, ignore_eos=True)]
    case = given(path, "exact", draft_tokens=5)
    ran = assert_equal(processes, 2, case, prompts, params, on_device=True)
    assert ran.outputs == alone(1, "generate", given(path, "exact"), prompts, params).outputs
    divided = replace(case, change=partial(divide_tokens, least=6))
    for rank in processes.run(2, "generate", divided, prompts, params, on_device=True):
        assert rank == ran
    whole = replace(divided, options={**divided.options, "whole_attention": True})
    wanted = alone(2, "generate", case, prompts, params, on_device=True, whole_from=6)
    for rank in processes.run(2, "generate", whole, prompts, params, on_device=True):
        assert rank == wanted


@pytest.mark.parametrize("whole", [False, True])
def test_divided_tokens_with_drafts(processes: RankProcesses, path: Path, whole: bool) -> None:
    """Steps of all sizes divide their tokens, so that some ranks may have none."""
    prompts = [text(length, 0) for length in (3, 130)]
    case = given(path, "exact", draft_tokens=2, whole_attention=whole)
    whole_from = 1 if whole else None
    wanted: Ran = alone(4, "generate", case, prompts, [greedy(6)] * 2, whole_from=whole_from)
    divided = replace(case, change=partial(divide_tokens, least=1))
    assert processes.run(4, "generate", divided, prompts, [greedy(6)] * 2) == [wanted] * 4


def test_shared_prefixes_and_preemption(processes: RankProcesses, path: Path) -> None:
    trunk = text(300, "trunk")
    prompts = [trunk + text(length, length) for length in (1, 9)] + [text(250, i) for i in range(3)]
    params = [greedy(12)] * len(prompts)
    case = given(path, "as-trained"), prompts, params
    ran = assert_equal(processes, 2, *case, rounds=2, blocks=3)
    assert ran.preemptions > 0
    assert any(cached for _, _, cached in ran.outputs)


def random_requests(
    draw: random.Random, seed: int, count: int
) -> tuple[list[list[int]], list[SamplingParams]]:
    """Prompts, some of which begin alike, and what is asked for each."""
    trunk = text(300, seed)
    prompts = [
        trunk[: draw.choice((0, 255, 256, 257))] + text(draw.choice((1, 5, 100)), (seed, i))
        for i in range(count)
    ]
    params = [
        SamplingParams(
            n=draw.choice((1, 1, 2)),
            temperature=draw.choice((0.0, 0.8)),
            seed=i,
            presence_penalty=draw.choice((0.0, 0.4)),
            max_tokens=draw.choice((1, 2, 8, 20)),
            logprobs=draw.choice((None, 2)),
            ignore_eos=True,
        )
        for i in range(count)
    ]
    return prompts, params


@settings(max_examples=max(2, settings().max_examples // 50))
@given_examples(st.integers(0, 2**32), st.sampled_from(SIZES), st.sampled_from(ACTIVATIONS))
def test_random_schedules(
    processes: RankProcesses, path: Path, seed: int, size: int, activations: str
) -> None:
    """Requests that arrive at random, common beginnings, few pages, drafts, divided tokens."""
    draw = random.Random(seed)
    prompts, params = random_requests(draw, seed, draw.randint(3, 6))
    divided_tokens = draw.choice((None, 6, 40))
    case = given(
        path,
        activations,
        draft_tokens=draw.choice((0, 0, 1, 3)),
        whole_attention=divided_tokens is not None and draw.random() < 0.7,
    )
    blocks = draw.choice((None, 3))
    ran = assert_equal(
        processes,
        size,
        case,
        prompts,
        params,
        blocks=blocks,
        arrivals=draw.choice((None, seed)),
        divided_tokens=divided_tokens,
    )
    event(f"preempted: {ran.preemptions > 0}")


@pytest.mark.parametrize("size", FEWER_SIZES)
def test_demo_model(processes: RankProcesses, short_demo_path: Path, size: int) -> None:
    case = given(short_demo_path, "as-trained", max_model_len=1024), [text(200, 0)], [greedy(16)]
    assert_equal(processes, size, *case)


def test_demo_model_with_dspark(processes: RankProcesses) -> None:
    engine = given(DSPARK_PATH, "as-trained", max_model_len=1024, draft_tokens=5)
    draws = SamplingParams(temperature=0.8, seed=1, max_tokens=16, ignore_eos=True)
    assert_equal(processes, 2, engine, [text(200, 0), text(200, 0)], [greedy(16), draws])


# --- Parts ----------------------------------------------------------------------------------------


class Absent(Collectives):
    """Collectives of a rank whose peers never come."""

    def __init__(self, rank: Rank) -> None:
        self.rank = rank

    def all_reduce(self, x: torch.Tensor, *, overwrite: bool = False) -> torch.Tensor:
        raise AssertionError("this rank would wait for ever")

    def all_gather(self, x: torch.Tensor, dim: int) -> torch.Tensor:
        raise AssertionError("this rank would wait for ever")

    def reduce_scatter_rows(self, x: torch.Tensor) -> torch.Tensor:
        raise AssertionError("this rank would wait for ever")

    def all_gather_rows(self, x: torch.Tensor, num_rows: int) -> torch.Tensor:
        raise AssertionError("this rank would wait for ever")


@pytest.mark.filterwarnings("ignore:overflow")  # the contents of the tensors are arbitrary
@torch.inference_mode()
def test_building_kernels_waits_for_no_rank(path: Path) -> None:
    """The ranks build one after the other. Nothing else may skip a collective."""
    engine = open_engine(path, Absent(Rank(0, 2)), max_num_seqs=2, draft_tokens=1)
    runner = first_rank(engine.executor).runner
    largest = StepLimits(num_tokens=8, num_seqs=2, max_len=300, draft_kinds=((2, 1),))
    widths: set[int] = set()
    own = replace(runner.ops, sample=lambda logits, batch: widths.add(logits.shape[1]))
    LaunchEnumerator(runner.model, runner.groups, own, runner.cache, largest)()
    assert widths == {VOCAB}
    with pytest.raises(AssertionError, match="for ever"):
        streams = torch.zeros(1, *runner.model.residual_shape)
        runner.model.sample(runner.model.compute_logits(streams), SamplingBatch())


@pytest.mark.filterwarnings("ignore:overflow")
@torch.inference_mode()
def test_kernels_are_built_for_whole_rows_and_for_parts(path: Path) -> None:
    """Each row count that one rank builds for, and both kinds of candidates."""

    def calls(collectives: Collectives) -> tuple[set[Any], set[Any], set[Any]]:
        runner = first_rank(open_engine(path, collectives, max_num_seqs=2).executor).runner
        ops, model, whole, parts, merged = runner.ops, runner.model, set(), set(), set()

        def sample(logits_SV: torch.Tensor, batch: SamplingBatch) -> SampledTokens:
            whole.add((*logits_SV.shape, batch.filters is not None, batch.needs_whole_rows))
            return ops.sample(logits_SV, batch)

        def candidates(logits_SV: torch.Tensor, batch: SamplingBatch, first: int) -> torch.Tensor:
            parts.add((*logits_SV.shape, batch.filters is not None, first))
            return ops.best_candidates(logits_SV, batch, first)

        def merge(candidates_SC: torch.Tensor) -> SampledTokens:
            merged.add(tuple(candidates_SC.shape))
            return ops.merge_candidates(candidates_SC)

        own = replace(ops, sample=sample, best_candidates=candidates, merge_candidates=merge)
        assert isinstance(model, DeepseekV4)
        one = collectives.rank.size == 1
        model.sample = sample if one else SampleFromParts(own, model.ranks, model.vocab_part.start)
        largest = StepLimits(num_tokens=8, num_seqs=3, max_len=300)
        LaunchEnumerator(model, runner.groups, own, runner.cache, largest)()
        return whole, parts, merged

    one_rank, no_parts, _ = calls(Alone())
    whole, parts, merged = calls(Absent(Rank(1, 2)))
    assert whole == one_rank and not no_parts
    rows = {shape[0] for shape in whole}
    assert parts == {(n, VOCAB // 2, False, VOCAB // 2) for n in rows} | {
        (1, VOCAB // 2, True, VOCAB // 2)
    }
    assert merged == {(n, 2) for n in rows}


@torch.inference_mode()
def test_launch_sizes_are_those_of_a_rank(path: Path) -> None:
    def sizes(rank: Rank) -> ModelSizes:
        engine = open_engine(path, Absent(rank), max_num_seqs=2)
        return first_rank(engine.executor).runner.model.launch_sizes

    whole, part = sizes(Rank(0, 1)), sizes(Rank(1, 4))
    assert (part.num_heads, part.vocab_size) == (whole.num_heads // 4, whole.vocab_size)
    assert (1, 1, 512) in whole.linears - part.linears
    assert (1, 1, 128) in part.linears - whole.linears


def test_partial_sums_in_float32() -> None:
    """Two ranks of bfloat16 activations: the blocks' outputs are rounded once, after the sum."""
    links = TensorParallel(Alone())
    total = links.reduce(torch.ones(1, 2), torch.bfloat16)
    assert isinstance(total, torch.Tensor)
    assert total.dtype == torch.bfloat16
    generator = torch.Generator().manual_seed(0)
    x, weight = (torch.randn(8, 64, generator=generator).bfloat16() for _ in range(2))
    each = torch.randn(8, 3, 64, generator=generator).bfloat16()
    ids = torch.zeros(8, 3, dtype=torch.int64)
    wide = REFERENCE.linear(x, LinearWeight(weight, out_dtype=torch.float32))
    assert torch.allclose(wide, x.float() @ weight.float().T, atol=1e-5)
    assert wide.dtype == torch.float32
    mixed = REFERENCE.experts_combine(each.clone(), ids, x, torch.float32)
    assert torch.equal(mixed, each.float().sum(1) + x.float())

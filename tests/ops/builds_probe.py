"""A script that test_builds.py runs without TRITON_INTERPRET. It records the sm90 table's launches.

The table runs on CPU tensors with a driver that only names SM90, and no launch is made. The script
prints one JSON object; with the argument "few", one of fewer steps and kernels. With the argument
"walk" it only compares the recorded launches. Then it prints a list of two objects: with wo_a
inputs in FP8, and in bfloat16.
"""

import contextlib
import importlib
import json
import logging
import random
import sys
import tempfile
import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, replace
from itertools import islice
from logging.handlers import BufferingHandler
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from tests.support.cases import sampling as sampling
from torch import Tensor
from triton import next_power_of_2
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import ConstexprFunction

from finwhale.artefacts import Artefacts
from finwhale.checkpoint.config_files import read_config
from finwhale.demo import DSPARK_PATH
from finwhale.distributed.collectives import Alone
from finwhale.distributed.rank import ALONE, Rank
from finwhale.engine.plan.draft_policy import step_kinds
from finwhale.engine.start.launch_signatures import LaunchEnumerator
from finwhale.engine.start.memory import LargestSteps
from finwhale.engine.steps.draft_decode import VerificationSteps
from finwhale.engine.steps.slot_tables import SlotTables
from finwhale.engine.steps.step_limits import StepLimits, prefill_sizes
from finwhale.errors import ResourceError
from finwhale.models.deepseek_v4.cache_spec import cache_spec
from finwhale.models.deepseek_v4.config import DeepseekV4Config
from finwhale.models.deepseek_v4.config_json import config_of
from finwhale.models.deepseek_v4.kernel_sizes import launch_sizes
from finwhale.models.deepseek_v4.model import DeepseekV4
from finwhale.models.deepseek_v4.presets import published
from finwhale.models.deepseek_v4.tensor_parallel import NoCollectives
from finwhale.models.deepseek_v4.weights import assembler, weight_specs
from finwhale.models.step_inputs import StepInputs
from finwhale.ops import load_ops
from finwhale.ops.builds import Built, launches, triton_cache
from finwhale.ops.builds.kernel_builds import KernelBuilds
from finwhale.ops.builds.launches import Counter, Variant, collect
from finwhale.ops.builds.pool import Pool
from finwhale.ops.builds.sizes import LaunchSizes
from finwhale.ops.builds.worker import NoDriver
from finwhale.ops.moe import dispatch_triton, experts_hopper
from finwhale.ops.norm.rms_norm_triton import rms_norm
from finwhale.platform import Platform
from finwhale.weights.allocation import WeightForm
from finwhale.weights.dummy import DummySource

CALL = ConstexprFunction.__call__


def without_values(operator: Any) -> Any:
    """The operator, as it is while launches are recorded: no kernel runs. What only a kernel would
    write gets values that no index may have.
    """

    def call(*args: Any) -> Any:
        # torch then fills memory that it does not initialise.
        torch.use_deterministic_algorithms(True, warn_only=True)
        try:
            return operator(*args)
        finally:
            torch.use_deterministic_algorithms(False)

    return call


TABLE = load_ops(Platform("nvidia", "sm90"))
OPS = replace(
    TABLE,
    accept_drafts=without_values(TABLE.accept_drafts),
    make_blocks=without_values(TABLE.make_blocks),
)
LARGEST = StepLimits(
    num_tokens=1040,
    num_seqs=8,
    max_len=40000,
    decode_graphs=(1, 2, 4, 8),
    prefill_graphs=(16, 48, 64),
)

# As by default, every step with a prefill is captured.
ALL_CAPTURED = replace(
    LARGEST,
    num_tokens=512,
    num_seqs=1,
    decode_graphs=(1,),
    prefill_graphs=tuple(prefill_sizes(512)),
)


# Every decode verifies drafts, on the device or planned by the host.
DRAFTING = replace(
    LARGEST,
    num_tokens=24,
    prefill_graphs=(16, 24),
    verify_graphs=(1, 2, 3, 8),
    draft_kinds=tuple([(kind.width, kind.drafts) for kind in step_kinds(5, block=True)]),
)

# No step is captured, so decodes also have any number of tokens and any context.
EAGER = replace(LARGEST, num_tokens=300, num_seqs=64, decode_graphs=(), prefill_graphs=())

# The steps of data-parallel ranks. In each decode, they verify five drafts of every sequence.
LANES = replace(EAGER, num_seqs=16, verify_graphs=(1, 2, 4, 8, 16), draft_kinds=((6, 5),))


def small_flash(preset: str = "flash") -> DeepseekV4Config:
    """A small model with Flash's heads and one layer of each kind; with DSpark if that is Flash's
    draft head.
    """
    config = published(preset).with_layers(4)
    if config.dspark is None:
        config = config.without_draft_head()
    else:
        config = replace(config, dspark=replace(config.dspark, noise_token_id=1023))
    return replace(
        config,
        hidden_size=256,
        vocab_size=1024,
        q_lora_rank=128,
        o_lora_rank=128,
        moe_intermediate_size=128,
        n_routed_experts=16,
    )


class Sample(LaunchEnumerator):
    """Steps of every number of tokens, with random contexts."""

    stride = 1  # between numbers of more than 128 tokens

    def steps(self) -> Iterator[tuple[int, int, list[tuple[int, int]]]]:
        draw = random.Random(0)

        def length() -> int:
            return draw.choice((draw.randint(1, 3000), draw.randint(1, self.largest.max_len)))

        for n in self.largest.prefill_graphs:
            yield n, n, [(length(), draw.choice((1, 2, n))) for _ in range(16)]
        captured = max(self.largest.prefill_graphs, default=1)
        for n in range(captured + 1, self.largest.num_tokens + 1):
            # From 1,021 tokens on, a small model's quantisation lets no kernel start early.
            if 700 < n <= 1020 or (n > 128 and n % self.stride):
                continue
            yield n, n, [(length(), n) for _ in range(10 if n <= 64 else 1)]
            # Prompts of up to 8 tokens.
            yield n, min(n, 8), [(length(), min(n, 8))]
        for n in self.largest.decode_graphs:
            yield n, 1, [(self.largest.max_len, 1)]
        for n in range(1, self.largest.num_seqs + 1) if not self.largest.captures_decodes else ():
            yield n, 1, [(length(), 1) for _ in range(8)]


class CoarseSample(Sample):
    """Fewer steps, with every remainder modulo 16: for a variant of a table that Sample covers."""

    stride = 5


class FewSteps(Sample):
    """A part of Sample's steps, for the core suite."""

    def steps(self) -> Iterator[tuple[int, int, list[tuple[int, int]]]]:
        return islice(super().steps(), 0, None, 61)


class DividedSample(LaunchEnumerator):
    """Steps around the number of tokens from which the ranks divide them, and larger ones."""

    def steps(self) -> Iterator[tuple[int, int, list[tuple[int, int]]]]:
        draw = random.Random(0)
        assert self.divided is not None
        least, most = self.divided.least, self.largest.num_tokens
        for n in (*range(least - 3, least + 36), *range(least + 36, most + 1, 23), most):
            lengths = [draw.choice((100, 3000, self.largest.max_len)) for _ in range(2)]
            yield n, n, [(draw.randint(1, length), n) for length in lengths]


class LaneSample(LaunchEnumerator):
    """Steps of any number of tokens, in which another data-parallel rank has as many or more."""

    def steps(self) -> Iterator[tuple[int, int, list[tuple[int, int]]]]:
        draw = random.Random(0)
        for n in (*range(1, 70), *range(70, self.largest.num_tokens + 1, 17)):
            for _ in range(2):
                yield n, n, [(draw.randint(1, self.largest.max_len), n)]
        for n in range(1, self.largest.num_seqs + 1):
            yield n, 1, [(draw.randint(1, self.largest.max_len), 1)]
            if self.drafts:
                longest = 1 + self.drafts
                yield n * longest, longest, [(draw.randint(1, self.largest.max_len), longest)]

    def _inputs(self, num_tokens: int, max_len: int, max_query: int) -> StepInputs:
        inputs = super()._inputs(num_tokens, max_len, max_query)
        most = self.largest.num_seqs if max_query == 1 else self.largest.num_tokens
        most = max(num_tokens, most)
        return replace(inputs, lane_rows=random.Random(num_tokens).randint(num_tokens, most))


class DraftingSample(LaunchEnumerator):
    """Steps of an engine that drafts: of every size and width, and passes of any draft head."""

    def steps(self) -> Iterator[tuple[int, int, list[tuple[int, int]]]]:
        largest, longest = self.largest, 1 + self.drafts
        for n in range(1, largest.num_tokens + 1):
            # Also by the host: from one to all of a sequence's tokens.
            yield n, n, [(self.largest.max_len, query) for query in (1, 2, longest, n)]
        for size in range(1, largest.num_seqs + 1):
            for width in range(1, longest + 1):
                query = longest if width > 1 else 1
                yield size * width, query, [(largest.max_len, query)]

    def _draft_passes(self) -> list[int]:
        return list(range(1, self.largest.num_seqs + 1))


def empty_gemm(a_GNK: Tensor, b_GKM: Tensor, *, out_dtype: torch.dtype | None = None) -> Tensor:
    """In place of torch.bmm: the values of results have no meaning here."""
    return a_GNK.new_empty(*a_GNK.shape[:2], b_GKM.shape[2], dtype=out_dtype)


def empty_float(x: Tensor) -> Tensor:
    """In place of Tensor.float."""
    return x if x.dtype == torch.float32 else torch.empty_like(x, dtype=torch.float32)


def empty_index_select(x: Tensor, dim: int, index: Tensor) -> Tensor:
    """In place of Tensor.index_select. On a GPU, an index that does not exist ends the process."""
    assert index.is_meta or not len(index) or 0 <= index.min() <= index.max() < x.shape[dim]
    return x.new_empty(*x.shape[:dim], len(index), *x.shape[dim + 1 :])


def call_on_host(self: ConstexprFunction, *args: Any, _semantic: Any = None, **kwargs: Any) -> Any:
    """In place of a constexpr function's call: on the host, such as in cdiv, no argument is a
    constexpr, and looking for them takes a fifth of the time.
    """
    if _semantic is None:
        return self.fn(*args, **kwargs)
    return CALL(self, *args, _semantic=_semantic, **kwargs)


def names(variants: list[Variant]) -> set[tuple[str, str]]:
    return {(v.name, v.specialization) for v in variants}


def left_out(experts: int, topk: int, last: int, lanes: int = 1) -> list[str]:
    """The experts' launch plans that no size in LaunchSizes meets. They change most often."""

    def keys(counts: Iterable[int]) -> set[tuple[object, ...]]:
        found: set[tuple[object, ...]] = set()
        for n in counts:
            pairs = n * lanes * topk
            block_n = experts_hopper.plan(pairs, experts).block_rows
            padded = -(-(pairs + 7 * min(pairs, experts)) // 8) * 8
            slots = experts + padded // block_n
            if pairs > dispatch_triton.FEW_PAIRS:
                found.add((block_n, "many"))
                continue
            sizes = pairs, min(1024, pairs, slots)
            found.add((block_n, *(next_power_of_2(size) for size in sizes)))
        return found

    model = replace(
        launch_sizes(small_flash()),
        num_experts=experts,
        experts_per_token=topk,
        num_lanes=lanes,
    )
    sizes = LaunchSizes(OPS, model)
    return [
        f"{experts} experts from {first} tokens on: {key}"
        for first in (1, 513)
        for key in keys(range(first, last + 1)) - keys(sizes.tokens(first, last))
    ]


def compile_twice(variants: list[Variant]) -> dict[str, Any]:
    """Compile in workers, load from their cache after a move, and load again after damage."""
    with tempfile.TemporaryDirectory() as directory:
        artefacts = Artefacts(f"{directory}/made", {"device": "none"})
        cache = artefacts.path / "triton"
        first = {
            "cache": str(cache),
            "target": {"backend": "cuda", "arch": 90, "warp_size": 32},
            "modules": [],
        }
        unknown = {
            "module": "finwhale.ops.norm.rms_norm_triton",
            "name": "nothing",
            "specialization": "{}",
        }
        pool = Pool("finwhale.ops.builds.worker", first, 2)
        answers = pool.start([asdict(v) for v in variants] + [unknown])()
        Path(directory, "made").rename(Path(directory, "moved"))
        artefacts = Artefacts(f"{directory}/moved", {"device": "none"})
        moved = artefacts.check()
        cache = artefacts.path / "triton"
        triton_cache.use_folder(str(cache))
        counter = Counter()
        artefacts.mark_complete("this")
        load_all(variants)
        found = {
            "errors": [a["error"] for a in answers if "error" in a],
            "compiled": counter.compiled,
            "damaged by moving": moved,
        }
        cubin = next(Path(cache).rglob("*.cubin"))
        cubin.write_bytes(cubin.read_bytes()[:-9] + b"x" * 9)
        found["damaged"] = [artefacts.check(), artefacts.check()]
        load_all(variants)
        found["compiled after damage"] = counter.compiled
        log = BufferingHandler(100)
        logging.getLogger(launches.__name__).addHandler(log)
        counter.warns = True
        # There is no GPU to launch on.
        with contextlib.suppress(Exception):
            rms_norm(torch.zeros(3, 65), torch.ones(65), 1e-6)
        found["late"] = [counter.late, *(record.getMessage() for record in log.buffer)]
        return found


def another_thread_waits() -> list[bool]:
    """Whether another thread's launch waits during `collect`, and after it."""

    def launch() -> None:
        # There is no GPU to launch on.
        with contextlib.suppress(Exception):
            rms_norm(torch.zeros(3, 1117), torch.ones(1117), 1e-6)

    other = threading.Thread(target=launch)

    def walk() -> None:
        other.start()
        other.join(0.5)

    found = collect(walk)
    assert not found
    waited = other.ident is not None and other.is_alive()
    other.join(60)
    return [waited, other.is_alive()]


def build_for_several() -> list[int | str]:
    """Compiled kernels for several configurations in one directory.

    The first needs a kernel, the second needs the same one and must not start a process, the third
    needs another one too. Then the directory is read-only: the fourth needs both kernels, and the
    fifth, which needs a third kernel, is refused.
    """
    one, other, third = torch.zeros(3, 1104), torch.zeros(3, 1111), torch.zeros(3, 4096)

    def norms(*inputs: Tensor) -> Callable[[], None]:
        def walk() -> None:
            for x in inputs:
                rms_norm(x, x[0], 1e-6)

        return walk

    def refuse(num_jobs: int = 0) -> Pool:
        raise AssertionError("a process is started")

    with tempfile.TemporaryDirectory() as directory:
        builds = KernelBuilds(Platform("nvidia", "sm90"), 0, directory)
        builds._loaded = lambda launch_all: Built()  # type: ignore[method-assign]
        first = builds.prepare("one", norms(one)).compiled
        new_pool = builds._new_pool
        builds._new_pool = refuse  # type: ignore[method-assign]
        builds.expect("two")
        second = builds.prepare("two", norms(one)).compiled
        builds._new_pool = new_pool  # type: ignore[method-assign]
        found: list[int | str] = [first, second]
        found.append(builds.prepare("three", norms(one, other)).compiled)
        builds._artefacts.writable = False
        found.append(builds.prepare("four", norms(other, one)).compiled)
        try:
            builds.prepare("five", norms(one, third))
        except ResourceError as error:
            return [*found, str(error).split(":")[0].split(" ", 1)[1]]
        return found


def build_before() -> list[int | bool]:
    """Compiled kernels if `begin` has built one of two; whether the configuration is complete
    before and after `prepare`; compiled kernels of a further configuration.
    """
    one, other = torch.zeros(3, 1104), torch.zeros(3, 1111)
    with tempfile.TemporaryDirectory() as directory:
        builds = KernelBuilds(Platform("nvidia", "sm90"), 0, directory)
        builds._loaded = lambda launch_all: Built()  # type: ignore[method-assign]
        sizes: list[int] = []
        new_pool = builds._new_pool

        def counted(num_jobs: int = 0) -> Pool:
            sizes.append(num_jobs)
            return new_pool(num_jobs)

        builds._new_pool = counted  # type: ignore[method-assign]
        builds.begin("one", lambda: rms_norm(one.to("meta"), one[0].to("meta"), 1e-6))
        found: list[int | bool] = [builds._artefacts.is_complete("one")]

        def launch_both() -> None:
            rms_norm(one, one[0], 1e-6)
            rms_norm(other, other[0], 1e-6)

        found.append(builds.prepare("one", launch_both).compiled)
        found.append(builds._artefacts.is_complete("one"))
        builds.begin("one", launch_both)
        found.append(builds.prepare("two", launch_both).compiled)
        return [*found, *sizes]


def rounds(variant: Variant) -> bool:
    """Whether this is a kernel of attention that rounds its output."""
    if variant.name not in ("_attend_kernel", "_combine_kernel"):
        return False
    return bool(json.loads(variant.specialization)["signature"]["out_ptr"] == "*fp8e4nv")


def load_all(variants: list[Variant]) -> None:
    for variant in variants:
        kernel = getattr(importlib.import_module(variant.module), variant.name)
        kernel.preload(variant.specialization)


def new_model(config: DeepseekV4Config, round_wo_a: bool, rank: Rank = ALONE) -> DeepseekV4:
    cpu = torch.device("cpu")
    weights: list[Any] = []

    def load() -> None:
        source = DummySource(weight_specs(config, rank), cpu)
        weights.append(
            assembler(
                config,
                WeightForm(
                    storages=source.storages,
                    dtype=torch.bfloat16,
                    round_activations=True,
                    round_wo_a=round_wo_a,
                    ops=OPS,
                    rank=rank,
                ),
                cpu,
            ).fill(source)
        )

    collect(load)  # folds experts
    return DeepseekV4(
        config,
        OPS,
        weights[0],
        round_activations=True,
        max_positions=40000,
        collectives=NoCollectives(rank) if rank.size > 1 else Alone(),
    )


def without_weights(
    config: DeepseekV4Config, round_wo_a: bool, largest: StepLimits
) -> set[tuple[str, str]]:
    """The launches of a model whose tensors have no memory, as `Builds.begin` gets them."""

    def launch_all() -> None:
        form = WeightForm(
            dtype=torch.bfloat16, round_activations=True, round_wo_a=round_wo_a, ops=OPS
        )
        weights = assembler(config, form, torch.device("meta")).finish_unfilled()
        model = DeepseekV4(config, OPS, weights, round_activations=True, max_positions=40000)
        groups = cache_spec(config)
        cache = LargestSteps.alone(model, groups, OPS).cache
        LaunchEnumerator(model, groups, OPS, cache, largest)()

    return names(collect(launch_all))


def compare_drafting_launches(config: DeepseekV4Config, max_len: int) -> dict[str, Any]:
    """The missing launches of an engine that drafts with DSpark, and the launches of verifications.

    A verification of 5 to 8 tokens must have the launches of one of 4.
    """
    model, groups = new_model(config, True), cache_spec(config)
    cache = LargestSteps.alone(model, groups, OPS).cache
    largest = replace(DRAFTING, max_len=max_len)
    run = LaunchEnumerator(model, groups, OPS, cache, largest)
    every = collect(DraftingSample(model, groups, OPS, cache, largest))
    steps = VerificationSteps(
        model,
        cache,
        groups,
        SlotTables([group.name for group in groups]),
        OPS,
        largest,
    )

    def around_the_layers() -> None:
        for width, _ in largest.draft_kinds:
            for size in range(1, largest.num_seqs + 1):
                inputs = steps._inputs(size, size * width, max_len)
                steps._take_over(inputs)
                steps._accept(inputs)

    found = collect(torch.inference_mode()(around_the_layers))
    assert {variant.name for variant in found} == {"_continue_kernel", "_accept_kernel"}
    every += found

    def verification(query: int) -> set[tuple[str, str]]:
        inference = torch.inference_mode()
        return names(collect(inference(lambda: run._launch_step(48, query, [(max_len, query)]))))

    walked = names(collect(run))
    return {
        "missing": sorted(names(every) - walked)[:5],
        "missing without weights": sorted(walked - without_weights(config, True, largest))[:5],
        "other verifications": [
            query for query in range(5, 9) if verification(query) != verification(4)
        ],
    }


def compare_divided_launches() -> list[tuple[str, str]]:
    """The launches of large steps on the last of two ranks that the first has not built ahead.

    Each rank attends with all heads to its share of the tokens, and both have the same sizes.
    """
    # The scales of a token's groups lie a multiple of 16 apart, as in real models.
    config = replace(small_flash(), hidden_size=512, moe_intermediate_size=256)
    largest = replace(LARGEST, num_tokens=1900)
    found = []
    for index, run in enumerate((LaunchEnumerator, DividedSample)):
        model = new_model(config, True, Rank(index, 2, whole_attention=True))
        groups = cache_spec(config)
        cache = LargestSteps.alone(model, groups, OPS).cache
        found.append(names(collect(run(model, groups, OPS, cache, largest))))
    walked, every = found
    assert len(every) > 20
    return sorted(every - walked)


def compare_lane_launches(preset: str, largest: StepLimits) -> list[tuple[str, str]]:
    """The launches of data-parallel ranks that are not built ahead."""
    config = replace(small_flash(preset), moe_intermediate_size=512)
    model = new_model(config, True, Rank(0, 4, data_parallel=True))
    groups = cache_spec(model.config)
    cache = LargestSteps.alone(model, groups, OPS).cache
    walked, every = (
        names(collect(run(model, groups, OPS, cache, largest)))
        for run in (LaunchEnumerator, LaneSample)
    )
    assert len(every) > 20
    return sorted(every - walked)


def compare_launches(
    round_wo_a: bool, sample: type[Sample] = Sample
) -> tuple[list[Variant], dict[str, Any]]:
    """The launches that are built ahead, and a report: none may be missing from them."""
    config = small_flash()
    model = new_model(config, round_wo_a)
    groups = cache_spec(config)
    cache = LargestSteps.alone(model, groups, OPS).cache
    walked = collect(LaunchEnumerator(model, groups, OPS, cache, LARGEST))
    every = collect(sample(model, groups, OPS, cache, LARGEST))
    missing = names(every) - names(walked)
    missing |= names(collect(sample(model, groups, OPS, cache, ALL_CAPTURED))) - names(
        collect(LaunchEnumerator(model, groups, OPS, cache, ALL_CAPTURED))
    )

    missing |= names(collect(sample(model, groups, OPS, cache, EAGER))) - names(
        collect(LaunchEnumerator(model, groups, OPS, cache, EAGER))
    )

    def choices() -> None:
        for case in sampling.CASES:
            logits = torch.zeros(len(case.rows), config.vocab_size)
            batch = sampling.batch(case.rows, config.vocab_size)
            # No token is sampled here, so none can have log-probabilities.
            OPS.sample(logits, replace(batch, logprobs=()))

    missing |= names(collect(choices)) - names(walked)
    report: dict[str, Any] = {
        "kernels": sorted({v.name for v in walked}),
        "walked": len(walked),
        "rounding": sorted({v.name for v in walked if rounds(v)}),
        "every": len(every),
        "missing": sorted(missing)[:5],
        "missing without weights": sorted(
            names(walked) - without_weights(config, round_wo_a, LARGEST)
        )[:5],
    }
    return walked, report


class EagerSample(LaunchEnumerator):
    """Steps with prefill: all captured ones, and every 37th number of tokens of the others."""

    def steps(self) -> Iterator[tuple[int, int, list[tuple[int, int]]]]:
        largest = self.largest
        eager = range(largest.always_captured + 1, largest.num_tokens + 1, 37)
        for n in (*largest.prefill_graphs, *eager, largest.num_tokens):
            yield n, n, [(n, n)]


def gemms_left_out(rank: Rank, largest: StepLimits) -> list[str]:
    """The kernels of DeepGEMM that are not built ahead."""
    builds = importlib.import_module("finwhale.ops.builds.deepgemm_builds")  # needs DeepGEMM
    config = replace(small_flash(), hidden_size=512, moe_intermediate_size=256)
    model = new_model(config, True, rank)
    groups = cache_spec(config)
    cache = LargestSteps.alone(model, groups, OPS).cache
    found = set()

    def record(
        kind: str, weight: tuple[Tensor, Tensor], rows: int, run: Callable[[], None]
    ) -> None:
        shape = tuple(weight[0].shape)
        if builds.needed(kind, shape, rows):
            found.add(builds.class_of(kind, shape, rows))

    with tempfile.TemporaryDirectory() as directory:
        kernels = builds.of_process(Path(directory))
        with kernels.collecting():
            collect(LaunchEnumerator(model, groups, OPS, cache, largest))
        with patch.object(kernels, "_run", record):
            collect(EagerSample(model, groups, OPS, cache, largest))
    built = {
        builds.class_of(job["kind"], tuple(job["weight"]), rows)
        for job in kernels.take_jobs()
        for rows in job["rows"]
    }
    assert len(found) > 100
    return sorted(map(str, found - built))[:5]


def pretend_to_be_hopper() -> None:
    """Let this process list launches as on a Hopper GPU, without values."""
    driver.set_active(NoDriver(GPUTarget("cuda", 90, 32)))
    torch.bmm = empty_gemm  # type: ignore[assignment]
    Tensor.float = empty_float  # type: ignore[assignment, method-assign]
    Tensor.index_select = empty_index_select  # type: ignore[assignment, method-assign]
    ConstexprFunction.__call__ = call_on_host


def main() -> None:
    pretend_to_be_hopper()
    if "walk" in sys.argv[1:]:
        reports = [compare_launches(rounds, CoarseSample)[1] for rounds in (True, False)]
        two = Rank(0, 2, whole_attention=True)
        reports[0]["gemms left out"] = [
            *gemms_left_out(ALONE, replace(LARGEST, num_tokens=8192)),
            *gemms_left_out(two, replace(LARGEST, num_tokens=6000)),
            *gemms_left_out(two, replace(EAGER, num_tokens=1900)),
        ]
        print(json.dumps(reports))
        return
    few = "few" in sys.argv[1:]
    walked, report = compare_launches(True, FewSteps if few else Sample)
    cheap = [v for v in walked if v.name in ("_rms_norm_kernel", "_pick_kernel", "_best_kernel")]
    report |= {
        "left out": [
            line
            for experts, topk in ((256, 6), (384, 6), (384, 8), (64, 6), (16, 4))
            for lanes in (1, 4)
            for line in left_out(experts, topk, 8192 // lanes, lanes)
        ],
        "compiling": compile_twice(cheap),
    }
    if few:
        print(json.dumps(report))
        return
    demo = config_of(read_config(DSPARK_PATH))
    report |= {
        "drafting": compare_drafting_launches(small_flash("flash-0731"), 40000),
        # Its heads are not those of the Hopper kernels, so portable ones run.
        "demo": compare_drafting_launches(demo, 32768),
        "several configurations": build_for_several(),
        "built before": build_before(),
        "another thread waits": another_thread_waits(),
        "divided": compare_divided_launches(),
        "lanes": compare_lane_launches("flash", EAGER),
        "drafting lanes": compare_lane_launches("flash-0731", LANES),
    }
    print(json.dumps(report))


if __name__ == "__main__":
    main()

"""An engine on one rank of this process, and what the tests run on it.

Every rank runs a whole engine of its own. The engines get the same requests and decide by them
alone, so they make the same plans; the test compares everything that they compute.
"""

import hashlib
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from tests.support.integrity import check_engine
from tests.support.stepping import Stepper
from torch import Tensor

from finwhale import RequestOutput, SamplingParams
from finwhale.bench.engine import draft_on_device
from finwhale.chat.tokenizer import Tokenizer
from finwhale.checkpoint.reader import Checkpoint
from finwhale.config import EngineConfig
from finwhale.distributed.collectives import Alone, Collectives
from finwhale.distributed.peers import Peers
from finwhale.engine.loop.engine import Engine
from finwhale.engine.plan.executor import MemoryUse, RankDescription
from finwhale.engine.plan.pages import PageManager, pages_at_block_end, windowed_pages
from finwhale.engine.plan.scheduler import Scheduler
from finwhale.engine.plan.step_sizes import choose_step_sizes
from finwhale.engine.ranks.local_executor import LocalExecutor
from finwhale.engine.ranks.ranks import first_rank
from finwhale.engine.start.kv_cache import allocate_cache, plan_cache
from finwhale.engine.steps.drafter import Drafter
from finwhale.engine.steps.runner import ModelRunner
from finwhale.engine.steps.slot_tables import SlotTables
from finwhale.models.deepseek_v4.model import DeepseekV4
from finwhale.models.deepseek_v41.model import DeepseekV41
from finwhale.models.registry import architecture_of, parse_config
from finwhale.ops import load_ops
from finwhale.ops.builds import Builds
from finwhale.platform import Platform
from finwhale.weights.allocation import WeightForm
from finwhale.weights.source import WeightSource

CPU = torch.device("cpu")
CACHE_BYTES = 2**24
BLOCK = 256


class CollectivePeers(Peers):
    """Peers that communicate by collectives."""

    def __init__(self, collectives: Collectives) -> None:
        super().__init__(collectives.rank)
        self._collectives = collectives

    def gather_text(self, text: str) -> list[str]:
        sent = torch.tensor([[*text.encode().ljust(64, b"\0")]], dtype=torch.uint8)
        received = self._collectives.all_gather(sent, 0).tolist()
        return [bytes(one).rstrip(b"\0").decode() for one in received]


def open_engine(path: Path, collectives: Collectives, **options: Any) -> Engine:
    """The engine of one rank on a CPU. Options are those of EngineConfig."""
    config = EngineConfig(device="cpu", **options)
    checkpoint = Checkpoint.open(path)
    model_config = parse_config(checkpoint.config)
    architecture = architecture_of(model_config)
    rank = collectives.rank
    if rank.size > 1 and config.whole_attention:
        rank = replace(rank, whole_attention=True)
    ops = load_ops(Platform.cpu(), reference=config.reference)
    rounded = config.activations == "as-trained"
    source = WeightSource(checkpoint, architecture.weight_specs(model_config, rank))
    form = WeightForm(
        storages=source.storages,
        dtype=torch.float32,
        round_activations=rounded,
        round_wo_a=config.wo_a_input == "fp8",
        ops=ops,
        rank=rank,
        peers=CollectivePeers(collectives),
    )
    weights = architecture.assembler(model_config, form, CPU).fill(source)
    if any(spec.lookup for spec in architecture.weight_specs(model_config).values()):
        form.peers.barrier()
    longest = config.max_model_len or model_config.max_position_embeddings
    model = architecture.build(
        model_config,
        ops,
        weights,
        checkpoint,
        round_activations=rounded,
        max_positions=longest,
        collectives=collectives,
    )
    groups = architecture.cache_groups(model_config)
    sizes = choose_step_sizes(config, num_ranks=1, room=None)
    plan = plan_cache(
        groups,
        itemsize=4,
        packed=False,
        budget_bytes=config.cache_memory_bytes or CACHE_BYTES,
        max_num_seqs=sizes.num_seqs,
        max_step_tokens=sizes.num_tokens,
        wanted_tokens=longest * sizes.num_seqs,
        prefix_caching=config.enable_prefix_caching,
        drafts=bool(config.draft_tokens),
    )
    runner = ModelRunner(
        device=CPU,
        ops=ops,
        groups=groups,
        model=model,
        cache=allocate_cache(groups, plan, torch.float32, CPU),
        max_model_len=longest,
        tables=SlotTables([group.name for group in groups]),
        sampled=torch.zeros(sizes.num_seqs, dtype=torch.int64),
    )
    if config.draft_tokens and model.draft_head is not None:
        runner.drafter = Drafter(model.draft_head, model.sample, runner.cache, CPU)
    description = RankDescription(
        device="cpu",
        asynchronous=False,
        groups=groups,
        num_pages=plan.num_pages,
        max_model_len=longest,
        sizes=sizes,
        can_draft=runner.drafter is not None,
        memory=MemoryUse(weights=0, workspace=0, cache=plan.total_bytes),
    )
    tokenizer = Tokenizer.open(path) if (path / "tokenizer.json").exists() else None
    executor = LocalExecutor(runner, Builds(), description)
    return Engine(config, model_config, executor, tokenizer)


class Digest:
    """Collects the bits of every residual stream and logit that an engine computes."""

    def __init__(self, engine: Engine) -> None:
        self._hash = hashlib.sha256()
        model = first_rank(engine.executor).runner.model
        assert isinstance(model, DeepseekV4 | DeepseekV41)
        self._ranks = model.ranks
        for part in (model, model.draft_head):
            if part is not None:
                part.compute_logits = self._noting(part.compute_logits)  # type: ignore

    def _noting(self, compute: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def noted(streams: Tensor, *args: Any) -> Tensor:
            logits = compute(streams, *args)
            for tensor in (streams, self._ranks.collectives.all_gather(logits, 1)):
                self._hash.update(tensor.contiguous().numpy().tobytes())
            return logits

        return noted

    def __str__(self) -> str:
        return self._hash.hexdigest()


@dataclass(frozen=True)
class Given:
    """What a scenario runs on.

    Attributes:
        path: a checkpoint.
        options: of EngineConfig.
        change: changes the model before it runs.
    """

    path: Path
    options: Mapping[str, Any]
    collectives: Collectives = field(default_factory=Alone)
    change: Callable[[Any], None] | None = None

    def engine(self, **more: Any) -> Engine:
        engine = open_engine(self.path, self.collectives, **{**self.options, **more})
        model = first_rank(engine.executor).runner.model
        if self.change is not None:
            assert isinstance(model, DeepseekV4 | DeepseekV41)
            self.change(model)
        return engine


# --- Scenarios ------------------------------------------------------------------------------------


@torch.inference_mode()
def forward(given: Given, length: int, seed: int) -> tuple[Tensor, Tensor]:
    """Residual streams [T,H,D] and logits [T,V] of a text that is read in chunks beside another."""
    stepper = Stepper(given.engine())
    draw = random.Random(seed)
    vocab = stepper.runner.model.config.vocab_size
    one, other = ([draw.randrange(vocab) for _ in range(length)] for _ in range(2))
    first, second = stepper.sequence(one), stepper.sequence(other)
    read = []
    while first.num_computed < length:
        parts = []
        for sequence in (first, second):
            left = length - sequence.num_computed
            count = min(left, draw.choice((1, 1, 2, 5, 64, 130)))
            if count:
                parts.append((sequence, count))
        read.append(stepper.step(parts)[0])
    streams, model = torch.cat(read), stepper.runner.model
    assert isinstance(model, DeepseekV4)
    return streams, model.ranks.collectives.all_gather(model.compute_logits(streams), 1)


@torch.inference_mode()
def mtp(given: Given, length: int, seed: int) -> tuple[Tensor, Tensor]:
    """The same of the MTP layer."""
    stepper = Stepper(given.engine())
    draw, runner = random.Random(seed), stepper.runner
    text = [draw.randrange(stepper.runner.model.config.vocab_size) for _ in range(length + 1)]
    (streams,) = stepper.step([(stepper.sequence(text[:-1]), length)])
    head = runner.model.draft_head
    assert isinstance(runner.model, DeepseekV4)
    assert head is not None and stepper.inputs is not None
    following = torch.tensor(text[1:])
    found = head(stepper.inputs, streams, following, runner.cache, runner.segments)
    return found, runner.model.ranks.collectives.all_gather(head.compute_logits(found), 1)


Outputs = list[tuple[list[list[int]], str | None, int]]


def outputs(results: Sequence[RequestOutput]) -> Outputs:
    """Tokens, error and cached tokens of each request."""
    return [
        ([output.token_ids for output in one.outputs], one.error, one.num_cached_tokens)
        for one in results
    ]


@dataclass(frozen=True)
class Ran:
    """What an engine did: its outputs, the bits that it computed, and its counts."""

    outputs: Outputs
    bits: str
    steps: int
    preemptions: int
    accepted: int


def generate(
    given: Given,
    prompts: Sequence[Sequence[int]],
    params: Sequence[SamplingParams],
    *,
    rounds: int = 1,
    on_device: bool = False,
    blocks: int | None = None,
    arrivals: int | None = None,
) -> Ran:
    """Run requests to their ends.

    Args:
        rounds: how often the requests are run, one round after the other.
        on_device: draft in steps that continue on the device, planned one step ahead.
        blocks: blocks of memory; None: enough.
        arrivals: seed of the steps at which requests arrive; None: all at once.
    """
    engine = given.engine()
    bits = Digest(engine)
    if on_device:
        draft_on_device(first_rank(engine.executor), engine.config)
        engine.begin(engine.scheduler)
        engine.steps_ahead = 1
    if blocks is not None:
        _limit(engine, blocks)
    draw = random.Random(arrivals)
    results: list[RequestOutput] = []
    for number in range(rounds):
        waiting = list(zip(prompts, params, strict=True))
        while waiting or engine.has_work:
            while waiting and (arrivals is None or draw.random() < 0.3 or not engine.has_work):
                prompt, one = waiting.pop(0)
                results.append(engine.add_request(f"{number}/{len(waiting)}", prompt, one))
            engine.step()
            check_engine(engine)
    counts = engine.scheduler.counts
    metrics = engine.metrics()
    return Ran(
        outputs(results), str(bits), metrics.steps, counts.preemptions, sum(metrics.drafts_accepted)
    )


def _limit(engine: Engine, blocks: int) -> None:
    """Give the engine a scheduler with few pages."""
    config, runner = engine.config, first_rank(engine.executor).runner
    num_pages = {}
    for group in runner.groups:
        num_pages[group.name] = 1 + blocks * (BLOCK // group.tokens_per_page)
        if group.keep is not None:
            seqs, step = engine.sizes.num_seqs, engine.sizes.num_tokens
            most = windowed_pages(group, seqs, step, True, bool(config.draft_tokens))
            num_pages[group.name] = most + 2 * pages_at_block_end(group)
        assert num_pages[group.name] <= engine.executor.description.num_pages[group.name]
    engine.begin(
        Scheduler(
            PageManager(runner.groups, num_pages),
            sizes=engine.sizes,
            prefix_caching=True,
            draft_block_tokens=engine.model_config.draft_block_tokens,
        )
    )


SCENARIOS: dict[str, Callable[..., Any]] = {
    "forward": forward,
    "mtp": mtp,
    "generate": generate,
}

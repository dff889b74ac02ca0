"""The model on one device, and one forward over a batch of chunks."""

import logging
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from finwhale.artefacts import default_directory
from finwhale.compiled import CompiledMode
from finwhale.config import EngineConfig
from finwhale.engine.plan.sequences import Chunk
from finwhale.engine.rank.batch import Batch, BatchBuilder
from finwhale.engine.rank.draft_decode import Verifications, verification_sizes
from finwhale.engine.rank.drafter import Drafter, Forward, check_can_draft
from finwhale.engine.rank.graphs import GraphMemory, Graphs, decode_sizes, prefill_sizes
from finwhale.engine.rank.host_transfer import send
from finwhale.engine.rank.kv_cache import CachePlan, allocate_cache, plan_cache
from finwhale.engine.rank.launch_signatures import SignatureRun
from finwhale.engine.rank.memory import Largest, LargestSteps, MemoryUse, left_bytes, tensor_bytes
from finwhale.engine.rank.start_times import Phases
from finwhale.engine.rank.static_inputs import StaticInputs
from finwhale.errors import FinwhaleError, ResourceError
from finwhale.models.protocol import (
    Inline,
    Model,
    ModelConfig,
    Segments,
    StepInputs,
    WeightStream,
)
from finwhale.models.registry import architecture_of
from finwhale.ops import load_ops
from finwhale.ops.builds import Built, load_builds
from finwhale.ops.paging import BLOCK_TOKENS
from finwhale.platform import Platform

logger = logging.getLogger(__name__)

CPU_CACHE_BYTES = 2**30


class ModelRunner:
    """Owns the weights, the paged cache and the operators of one device.

    Args:
        stream: the weights as they are read, in any order.

    Attributes:
        sampled: [max_num_seqs] int64 on the device: ids for the tokens of the next step that are
            pending (Sequence.sampled_row).
        num_compiled: in the compiled mode, the graphs that were compiled, not loaded.
        drafter: None: the engine does not draft.
        verifications: decodes of a drafting engine that stay on the device; None: all go over the
            host, as on a CPU.
        memory: what is held on the device, measured where it is a GPU.
        phases: how long the parts of the start took.
        builds, built: the compilers behind the operators, and what they built ahead.

    Raises:
        ResourceError: no such device, or model and cache do not fit it.
        CheckpointError: the weights are not those of the configuration.
    """

    def __init__(
        self, config: EngineConfig, model_config: ModelConfig, stream: WeightStream
    ) -> None:
        self.platform, self.device = choose_device(config.device)
        self.use_device()
        self.dtype = _choose_dtype(config.dtype, self.platform)
        self._round = config.activations == "as-trained"
        self._architecture = architecture_of(model_config)
        if self._round:
            self._architecture.check_rounding(model_config)
        serves = _table_serves(self.platform, self.dtype, config, model_config, stream)
        self.ops = load_ops(
            self.platform, reference=not serves, batch_invariant=config.batch_invariant
        )
        compiled_mode: CompiledMode | None = None
        if config.compile:
            if self.ops.capabilities.compiled_layers is None:
                raise FinwhaleError(
                    "the compiled mode is for the platform's own operators, and here the plain "
                    "definitions would run"
                )
            compiled_mode = CompiledMode(self.ops)
            self.ops = compiled_mode.ops
        self.phases = Phases()
        self.builds = load_builds(self.ops, self.platform, self.device.index or 0, config.cache_dir)
        longest = _longest(config, model_config)
        check_can_draft(config.draft_tokens, model_config)
        self.model_config = model_config
        self.groups = self._architecture.cache_groups(model_config)
        self.segments = Inline()
        self.builds.expect(self._launches(config, longest))
        self.num_compiled = 0
        allocated = 0
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
            allocated = torch.cuda.memory_allocated(self.device)
            self._reserved_before = torch.cuda.memory_reserved(self.device)
        try:
            weights = self._architecture.load_weights(
                model_config,
                stream,
                dtype=self.dtype,
                device=self.device,
                round_activations=self._round,
                round_wo_a=config.wo_a_input == "fp8",
                ops=self.ops,
            )
            if self.device.type == "cuda":
                self._weight_bytes = torch.cuda.memory_allocated(self.device) - allocated
            else:
                self._weight_bytes = tensor_bytes(weights)
            self.phases.end("weights")
            model, self.built = None, Built()
            if self.device.type == "cuda" and self.ops.capabilities.builds_kernels:
                model = self._build(weights, longest)
                self.built = self._prepare(config, model, longest)
            self.phases.end("kernels")
            self.plan = self._plan(config, model, longest)
            if self.device.type == "cuda":
                torch.cuda.empty_cache()  # of what building and measuring left behind
            self.max_model_len = min(longest, self.plan.capacity_tokens)
            if config.max_model_len is not None and self.max_model_len < config.max_model_len:
                raise ResourceError(
                    f"max_model_len {config.max_model_len} was asked for, but the cache's memory "
                    f"({self.plan.total_bytes:,} bytes) holds {self.plan.capacity_tokens} tokens: "
                    "raise gpu_memory_utilization or cache_memory_bytes"
                )
            self.model = model or self._build(weights, self.max_model_len)
            self.model.limit_positions(self.max_model_len)
            self.cache = allocate_cache(
                self.groups,
                self.plan,
                self.dtype,
                self.device,
                self.ops.capabilities.packed_cache,
            )
            self.phases.end("memory")
            if model is not None and self.max_model_len != longest:
                self._prepare(config, self.model, self.max_model_len)
                self.phases.end("kernels")
            if compiled_mode is not None:
                kept = config.cache_dir and Path(config.cache_dir).expanduser()
                directory = (kept or default_directory()) / "layers"
                self.num_compiled = compiled_mode.compile_layers(self.model, self.cache, directory)
                self.phases.end("compiled layers")
            self.drafter: Drafter | None = None
            self.verifications: Verifications | None = None
            if config.draft_tokens and self.model.draft_head is not None:
                self.drafter = Drafter(self.model.draft_head, self.cache, self.device)
                if self.ops.capabilities.captures_steps and config.enforce_eager:
                    self.verifications = self.new_verifications(config, None)
            self.graphs: Graphs | None = None
            self.prefill_graphs: Graphs | None = None
            self.sampled = self._capture(config)
            self.phases.end("graphs")
            self.memory = self._hold(config)
            self.phases.end("memory")
        except (RuntimeError, MemoryError) as error:
            if not _is_out_of_memory(error):
                raise
            raise ResourceError(
                f"the model does not fit {self.device}: {str(error).splitlines()[0]}"
            ) from error
        self.batches = BatchBuilder(self.groups, self.device, self.sampled)

    def use_device(self) -> None:
        """Make the device the current one of this thread: kernels are launched there."""
        if self.device.index:
            torch.cuda.set_device(self.device)

    def _build(self, weights: Any, max_positions: int) -> Model:
        return self._architecture.build(
            self.model_config,
            self.ops,
            weights,
            round_activations=self._round,
            max_positions=max_positions,
        )

    def _launches(self, config: EngineConfig, max_len: int) -> object:
        """What determines every launch: for the same, a cache that was filled has everything."""
        return {
            "model": asdict(self.model_config),  # type: ignore[call-overload]
            "steps": asdict(self._largest(config, max_len)),
            "batch_invariant": config.batch_invariant,
            "wo_a_input": config.wo_a_input,
            "eager": config.enforce_eager,
            "compile": config.compile,
        }

    def _prepare(self, config: EngineConfig, model: Model, max_len: int) -> Built:
        """Build every kernel that a request can need."""
        steps = LargestSteps.alone(model, self.groups, self.ops)
        launch_all = SignatureRun(
            model,
            self.groups,
            self.ops,
            steps.cache,
            self._largest(config, max_len),
            eager=config.enforce_eager,
        )
        return self.builds.prepare(self._launches(config, max_len), launch_all)

    def _largest(self, config: EngineConfig, max_len: int) -> Largest:
        """The largest steps, and the graphs that there are to be."""
        decodes: tuple[int, ...] = ()
        prefills: tuple[int, ...] = ()
        most = config.max_num_batched_tokens
        if self.ops.capabilities.captures_steps and not config.enforce_eager:
            sizes = verification_sizes if config.draft_tokens else decode_sizes
            decodes = config.graph_sizes or tuple(sizes(config.max_num_seqs))
            if config.graph_sizes is None:
                prefills = tuple(prefill_sizes(most))
        return Largest(
            num_tokens=most,
            num_seqs=config.max_num_seqs,
            max_len=max_len,
            decode_graphs=tuple(sorted(set(decodes))),
            prefill_graphs=prefills,
            drafts=numbers_of_drafts(config, self.model_config),
        )

    def _hold(self, config: EngineConfig) -> MemoryUse:
        """Run the largest steps once, so that what they need is there and compiled.

        Returns:
            What is held from then on.
        """
        weights, cache = self._weight_bytes, self.plan.total_bytes
        if self.device.type != "cuda" or not self.ops.capabilities.bounded_workspace:
            return MemoryUse(weights=weights, workspace=0, cache=cache)
        largest = self._largest(config, self.max_model_len)
        LargestSteps(self.model, self.groups, self.ops, self.cache).run(largest)
        torch.cuda.synchronize(self.device)
        held = torch.cuda.memory_reserved(self.device) - self._reserved_before
        free, total = torch.cuda.mem_get_info(self.device)
        allowed = int(total * config.gpu_memory_utilization)
        if config.cache_memory_bytes is None and total - free > allowed:
            logger.warning(
                "%s bytes of the GPU are in use, of %s that gpu_memory_utilization allows",
                f"{total - free:,}",
                f"{allowed:,}",
            )
        return MemoryUse(weights=weights, workspace=max(0, held - weights - cache), cache=cache)

    @torch.inference_mode()
    def _capture(self, config: EngineConfig) -> Tensor:
        """Record decodes whole, logits included, and steps of few tokens up to the streams.

        Returns:
            `sampled` of the inputs that they read; where nothing is captured, one of its own.
        """

        def streams(inputs: StepInputs, segments: Segments) -> Tensor:
            return self.model(inputs, self.cache, segments)

        def logits(inputs: StepInputs, segments: Segments) -> Tensor:
            return self.model.compute_logits(streams(inputs, segments))

        largest = self._largest(config, self.max_model_len)
        if not largest.decode_graphs:
            return torch.zeros(config.max_num_seqs, dtype=torch.int64, device=self.device)
        memory = GraphMemory(self.device)
        static = StaticInputs(
            max(largest.decode_graphs + largest.prefill_graphs),
            config.max_num_seqs,
            self.groups,
            self.max_model_len,
            self.device,
        )
        if largest.prefill_graphs:
            self.prefill_graphs = Graphs(
                streams,
                static,
                sizes=largest.prefill_graphs,
                decode=False,
                device=self.device,
                memory=memory,
            )
        if self.drafter is not None:
            self.verifications = self.new_verifications(config, memory)
            return torch.zeros(config.max_num_seqs, dtype=torch.int64, device=self.device)
        self.graphs = Graphs(
            logits,
            static,
            sizes=largest.decode_graphs,
            decode=True,
            device=self.device,
            memory=memory,
        )
        return static.sampled

    def new_verifications(self, config: EngineConfig, memory: GraphMemory | None) -> Verifications:
        """The decodes of a drafting engine, captured; without memory, launched from the host."""
        largest = self._largest(config, self.max_model_len)
        return Verifications(
            self.model,
            self.cache,
            self.groups,
            drafts=numbers_of_drafts(config, self.model_config),
            sizes=largest.decode_graphs or (config.max_num_seqs,),
            max_len=self.max_model_len,
            device=self.device,
            memory=memory,
        )

    def _plan(self, config: EngineConfig, model: Model | None, longest: int) -> CachePlan:
        """The cache; `model` runs the largest steps to see what they need beside it."""
        budget = config.cache_memory_bytes
        if budget is None and self.device.type != "cuda":
            budget = CPU_CACHE_BYTES
        elif budget is None and model is not None:
            steps = LargestSteps.alone(model, self.groups, self.ops)
            workspace = steps.workspace_bytes(self._largest(config, longest))
            del steps
            budget = max(0, left_bytes(self.device, config.gpu_memory_utilization) - workspace)
        elif budget is None:
            # The references are for comparing: nothing bounds their temporaries.
            budget = left_bytes(self.device, config.gpu_memory_utilization) // 2
        wanted = -(-longest // BLOCK_TOKENS) * BLOCK_TOKENS * config.max_num_seqs
        if config.enable_prefix_caching:
            wanted = max(wanted, self.ops.capabilities.prefix_cache_tokens)
        return plan_cache(
            self.groups,
            itemsize=self.dtype.itemsize,
            packed=self.ops.capabilities.packed_cache,
            budget_bytes=budget,
            max_num_seqs=config.max_num_seqs,
            max_step_tokens=config.max_num_batched_tokens,
            wanted_tokens=wanted,
            least_tokens=longest,
            shares=config.enable_prefix_caching,
            drafts=bool(config.draft_tokens),
        )

    @torch.inference_mode()
    def forward(self, chunks: Sequence[Chunk]) -> tuple[Batch, Tensor]:
        """Read the chunks' tokens; returns the batch and the streams [N,H,D] of its tokens."""
        batch = self.batches.build(chunks)
        return batch, self.model(batch.inputs, self.cache, self.segments)

    @torch.inference_mode()
    def logits(self, chunks: Sequence[Chunk]) -> Tensor:
        """Logits [M,V] float32 after each chunk that completes its sequence."""
        if self.graphs is not None and self.graphs.fits(chunks):
            return self.graphs.run(chunks)
        if self.prefill_graphs is not None and self.prefill_graphs.fits(chunks):
            streams, rows = self.prefill_graphs.run(chunks), self.batches.logits_rows(chunks)
        else:
            batch, streams = self.forward(chunks)
            rows = batch.logits_rows
        if rows.shape[0] == 0:
            return streams.new_empty(0, self.model.config.vocab_size, dtype=torch.float32)
        logits: Tensor = self.model.compute_logits(streams.index_select(0, rows))
        return logits

    @torch.inference_mode()
    def read(self, chunks: Sequence[Chunk]) -> Forward:
        """The same forward with what the drafter reads of it; logits after each draft as well."""
        batch = self.batches.build(chunks)
        if self.prefill_graphs is not None and self.prefill_graphs.fits(chunks):
            streams = self.prefill_graphs.run(chunks)
        else:
            streams = self.model(batch.inputs, self.cache, self.segments)
        rows = batch.logits_rows
        if not len(rows):
            none = streams.new_empty(0, self.model.config.vocab_size, dtype=torch.float32)
            return Forward(batch, streams, none)
        return Forward(batch, streams, self.model.compute_logits(streams.index_select(0, rows)))

    @torch.inference_mode()
    def rows(self, logits: Tensor, rows: Sequence[int]) -> Tensor:
        """Some rows of a step's logits."""
        return logits.index_select(0, send(self.device, np.array(rows, np.int64))[0])

    @torch.inference_mode()
    def feed(self, ids: Tensor) -> None:
        """Keep the ids [M] int64 that were sampled from a step's logits for the next step."""
        self.sampled[: len(ids)].copy_(ids)


def numbers_of_drafts(config: EngineConfig, model_config: ModelConfig) -> tuple[int, ...]:
    """How many drafts the decodes of a step may have."""
    if config.draft_tokens == "auto":
        return tuple(range(model_config.max_draft_tokens + 1))
    return (config.draft_tokens,)


def _table_serves(
    platform: Platform,
    dtype: torch.dtype,
    config: EngineConfig,
    model_config: ModelConfig,
    stream: WeightStream,
) -> bool:
    """Whether the platform's own table computes what is asked for; else the references do."""
    if config.reference:
        return False
    if platform.vendor == "cpu":
        return dtype == torch.float32
    reasons = []
    if dtype != torch.bfloat16:
        reasons.append("dtype is not bfloat16")
    if config.activations != "as-trained":
        reasons.append("activations are not as trained")
    reasons += architecture_of(model_config).kernel_obstacles(model_config, stream.storages)
    if reasons:
        logger.warning("the slow references run, because %s", " and ".join(reasons))
    return not reasons


def _longest(config: EngineConfig, model_config: ModelConfig) -> int:
    """Tokens of one sequence at most, as asked for or as the model allows."""
    limit = model_config.max_position_embeddings
    if config.max_model_len is not None and config.max_model_len > limit:
        raise FinwhaleError(
            f"max_model_len is {config.max_model_len}, but the model's context is {limit} tokens"
        )
    return config.max_model_len or limit


def _is_out_of_memory(error: Exception) -> bool:
    """A CPU allocation that fails is a plain RuntimeError to torch, a MemoryError to numpy."""
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or "allocate" in str(error)


def choose_device(name: str | None) -> tuple[Platform, torch.device]:
    """The device asked for, or a GPU where there is one. Raises FinwhaleError, ResourceError."""
    if name is None:
        platform = Platform.detect()
        return platform, torch.device(platform.device_type)
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise FinwhaleError(f'device must be "cpu", "cuda" or "cuda:N", got {name!r}') from error
    if device.type == "cpu" and device.index is None:
        return Platform.cpu(), device
    if device.type != "cuda":
        raise FinwhaleError(f'device must be "cpu", "cuda" or "cuda:N", got {name!r}')
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if (device.index or 0) >= count:
        raise ResourceError(f"device {name!r} asked for, but torch sees {count} GPUs")
    return Platform.detect(device.index or 0), device


def _choose_dtype(name: str | None, platform: Platform) -> torch.dtype:
    if name is None:
        return torch.float32 if platform.vendor == "cpu" else torch.bfloat16
    return {"float32": torch.float32, "bfloat16": torch.bfloat16}[name]

"""Opens a rank: weights, kernels built ahead, memory budget, cache, captured steps."""

import logging
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from finwhale.artefacts import default_directory
from finwhale.compiled import CompiledMode
from finwhale.config import EngineConfig
from finwhale.distributed.collectives import Alone, Collectives
from finwhale.distributed.connect import connect
from finwhale.distributed.peers import Peers
from finwhale.engine.plan.executor import MemoryUse, RankDescription, RoutedExpertsForm
from finwhale.engine.plan.step_sizes import StepSizes, choose_step_sizes
from finwhale.engine.rank.arena import Arena
from finwhale.engine.rank.capture import add_steps
from finwhale.engine.rank.devices import choose_device, choose_dtype
from finwhale.engine.rank.drafter import check_can_draft
from finwhale.engine.rank.executor import LocalExecutor
from finwhale.engine.rank.host_transfer import hold_pinned_memory
from finwhale.engine.rank.kv_cache import CachePlan, allocate_cache, plan_cache
from finwhale.engine.rank.launch_signatures import LaunchEnumerator, build_configuration
from finwhale.engine.rank.memory import (
    LargestSteps,
    largest_transfer,
    remaining_bytes,
    tensor_bytes,
)
from finwhale.engine.rank.memory_checks import (
    check_cache_memory,
    check_gpu_memory,
    check_host_memory,
)
from finwhale.engine.rank.runner import ModelRunner
from finwhale.engine.rank.slot_tables import SlotTables
from finwhale.engine.rank.start_times import Phases
from finwhale.engine.rank.step_limits import StepLimits, step_limits
from finwhale.errors import FinwhaleError, ResourceError, first_line
from finwhale.models.cache import CacheGroup
from finwhale.models.protocol import BuildableModel, ModelConfig
from finwhale.models.registry import architecture_of
from finwhale.models.weight_sources import Weights
from finwhale.ops import load_ops
from finwhale.ops.builds import Built
from finwhale.ops.builds.loading import load_builds
from finwhale.ops.paging import BLOCK_TOKENS
from finwhale.platform import Platform
from finwhale.weights.allocation import WeightForm
from finwhale.weights.assembler import Assembler, WeightStream
from finwhale.weights.joint_ranks import JointRanks
from finwhale.weights.tree import tensors_of

logger = logging.getLogger(__name__)

CPU_CACHE_BYTES = 2**30


def open_rank(
    config: EngineConfig,
    model_config: ModelConfig,
    weights: Weights,
    peers: Peers,
    sharers: int = 1,
) -> LocalExecutor:
    """Open the rank of this process.

    Args:
        config: names the device of this rank.
        peers: all ranks of the model. They open at the same time.
        sharers: number of ranks that share the device.

    Raises:
        ResourceError: the device does not exist, or model and cache do not fit its memory.
        CheckpointError: the weights do not match the configuration.
    """
    start = _Start(config, model_config, weights, peers, sharers)
    try:
        return start.open()
    except (RuntimeError, MemoryError) as error:
        if not _is_out_of_memory(error):
            raise
        raise ResourceError(
            f"the model does not fit {start.device}: {first_line(error)}"
        ) from error


class _Start:
    """Starts one rank. The constructor checks the options and allocates no memory.

    Attributes:
        longest: the most tokens of one sequence that the options allow. The cache may hold fewer.
        builds_ahead: kernels are built before the first step that launches them.
        allocated_before, reserved_before: bytes of the GPU that torch had when the start began.
        weight_bytes: bytes of the loaded weights.
        routed: where the model records the experts of a step's tokens; None: it does not.
    """

    def __init__(
        self,
        config: EngineConfig,
        model_config: ModelConfig,
        weights: Weights,
        peers: Peers,
        sharers: int,
    ) -> None:
        self.config, self.model_config, self.peers = config, model_config, peers
        self.sharers = sharers
        self.platform, self.device = choose_device(config.device)
        if self.device.index:
            torch.cuda.set_device(self.device)
        self.dtype = choose_dtype(config.dtype, self.platform)
        self.round_activations = config.activations == "as-trained"
        self.architecture = architecture_of(model_config)
        if self.round_activations:
            self.architecture.check_rounding(model_config)
        self.architecture.rank_config(
            model_config, peers.rank.size, round_activations=self.round_activations
        )  # refuses sizes that do not divide
        total = self._gpu_bytes()
        self.rank = replace(peers.rank, whole_attention=self._holds_whole_attention(total))
        self.stream = weights.open(self.device, self.rank)
        serves = _table_serves(self.platform, self.dtype, config, model_config, self.stream)
        self.ops = load_ops(
            self.platform, reference=not serves, batch_invariant=config.batch_invariant
        )
        self.compiled_mode = self._new_compiled_mode()
        if self.compiled_mode is not None:
            self.ops = self.compiled_mode.ops
        self.capabilities = self.ops.capabilities
        self.sizes = self._step_sizes(total)
        self.builds_ahead = self.device.type == "cuda" and self.capabilities.builds_kernels
        self.weight_form = WeightForm(
            ops=self.ops,
            dtype=self.dtype,
            rank=self.rank,
            round_activations=self.round_activations,
            round_wo_a=config.wo_a_input == "fp8",
            storages=dict(self.stream.storages),
        )
        self.phases = Phases()
        cache = None if config.cache_dir is None else str(config.cache_dir)
        self.builds = load_builds(self.ops, self.platform, self.device.index or 0, cache)
        self.longest = _longest(config, model_config)
        check_can_draft(config.draft_tokens, model_config)
        self.groups: tuple[CacheGroup, ...] = self.architecture.cache_groups(model_config)
        self.allocated_before = self.reserved_before = self.weight_bytes = 0
        self.routed: Tensor | None = None
        self.arenas = self._new_arenas()
        if not peers.rank.index:  # rank 0 builds for all
            self.builds.expect(self._build_configuration(self.longest))

    def open(self) -> LocalExecutor:
        """Run the start's phases in order."""
        unfilled = self._check_gpu()
        self.peers.barrier()  # here every rank has checked its options
        self.collectives = self._connect()
        self._begin_builds(unfilled)
        weights = self._load()
        model, built = self._prepare_kernels(weights)
        cache_plan = self._plan_cache(model)
        runner = self._allocate_cache(cache_plan, weights, model)
        self._prepare_shorter_context(runner)
        compiled_layers = self._compile_layers(runner)
        add_steps(runner, self.config, self._step_limits(runner.max_model_len))
        self.phases.end("graphs")
        memory = self._reserve_memory(runner)
        return self._new_executor(runner, memory, built, compiled_layers)

    # --- Options ----------------------------------------------------------------------------------

    def _gpu_bytes(self) -> int:
        """A rank's share of the smallest GPU of all ranks; 0 on a CPU."""
        if self.device.type != "cuda":
            return 0
        total = torch.cuda.get_device_properties(self.device).total_memory
        return self.peers.minimum(total // self.sharers)

    def _step_sizes(self, total: int) -> StepSizes:
        """The sizes of steps, on GPUs of `total` bytes. All ranks decide alike."""
        room = None
        if self.device.type == "cuda" and self.capabilities.bounded_workspace:
            weights = self.architecture.weight_bytes(
                self.model_config, self.dtype, self.ops, self.rank.size
            )
            room = int(total * self.config.gpu_memory_utilization) - weights
        return choose_step_sizes(self.config, self.rank.size, room)

    def _holds_whole_attention(self, total: int) -> bool:
        """Whether each rank holds the weights of all heads, on GPUs of `total` bytes. All ranks
        decide alike.
        """
        config = self.config
        if self.peers.rank.size == 1:
            return False
        if config.whole_attention is not None:
            return config.whole_attention
        if self.device.type != "cuda" or config.batch_invariant or config.reference:
            return False
        return bool(self.architecture.fits_whole_attention(self.model_config, total))

    def _new_compiled_mode(self) -> CompiledMode | None:
        """The compiled mode, if the options ask for it."""
        if not self.config.compile:
            return None
        if self.peers.rank.size > 1:
            raise FinwhaleError("the compiled mode runs on one rank: leave out compile")
        if not self.ops.capabilities.compiles_layers:
            raise FinwhaleError(
                "the compiled mode is for the platform's own operators, and here the plain "
                "definitions would run"
            )
        return CompiledMode(self.ops)

    def _new_arenas(self) -> dict[str, Arena]:
        """The arenas of weights and cache in an engine that can sleep; else none."""
        if not self.config.enable_sleep_mode:
            return {}
        if self.config.compile:
            raise FinwhaleError("the compiled mode cannot sleep: leave out compile")
        return {tag: Arena(self.device) for tag in ("weights", "cache")}

    # --- Kernels and weights ----------------------------------------------------------------------

    def _check_gpu(self) -> Assembler[Any] | None:
        """Note the memory in use on a GPU, and check that weights and cache fit the rest.

        Returns:
            The weights without memory; None: the device is no GPU.
        """
        if self.device.type != "cuda":
            return None
        torch.cuda.empty_cache()
        self.allocated_before = torch.cuda.memory_allocated(self.device)
        self.reserved_before = torch.cuda.memory_reserved(self.device)
        unfilled = self._assembler(torch.device("meta"))
        self._check_fits_gpu(unfilled.num_bytes)
        return unfilled

    def _check_fits_gpu(self, weights: int) -> None:
        """Check that the weights (bytes) and the smallest cache fit, before anything is read."""
        cache = self.config.cache_memory_bytes
        share = self.config.gpu_memory_utilization if cache is None else 1.0
        room = remaining_bytes(self.device, share) // self.sharers
        check_gpu_memory(weights, room, self.peers.rank.size)
        self._divide_cache(room - weights if cache is None else cache)

    def _connect(self) -> Collectives:
        if self.peers.store is None:
            return Alone()
        collectives = connect(
            self.peers.rank,
            self.device,
            self.peers.store,
            ordered=self.config.batch_invariant,
            check=self.peers.check,
        )
        self.phases.end("connect")
        return collectives

    def _begin_builds(self, unfilled: Assembler[Any] | None) -> None:
        """Compile missing kernels while the GPU's memory is free. Rank 0 does it for all ranks."""
        if self.capabilities.builds_kernels and not self.peers.rank.index and unfilled is not None:
            launch_all = partial(self._launch_without_weights, unfilled)
            self.builds.begin(self._build_configuration(self.longest), launch_all)
            self.phases.end("kernels")

    def _load(self) -> Any:
        """Load the weights, and count their bytes."""
        ranks: JointRanks | None = None
        if self.device.type == "cpu":
            # Ranks on a CPU share its memory. Together they hold at least all weights.
            check_host_memory(
                self.architecture.weight_bytes(self.model_config, self.dtype, self.ops)
            )
        else:
            ranks = JointRanks(self.peers, self.device)
        weights = self._assembler(self.device).fill(self.stream, ranks)
        if self.arenas:
            self.arenas["weights"].adopt(tensors_of(weights))
            self.weight_bytes = self.arenas["weights"].num_bytes
        elif self.device.type == "cuda":
            self.weight_bytes = torch.cuda.memory_allocated(self.device) - self.allocated_before
        else:
            self.weight_bytes = tensor_bytes(weights)
        self.phases.end("weights")
        return weights

    def _assembler(self, device: torch.device) -> Assembler[Any]:
        weights: Assembler[Any] = self.architecture.assembler(
            self.model_config, self.weight_form, device
        )
        return weights

    def _prepare_kernels(self, weights: Any) -> tuple[BuildableModel | None, Built]:
        """Load the kernels, and compile those that are still missing.

        Returns:
            The model that has launched them, and the kernels. None: none are built ahead.
        """
        model, built = None, Built()
        if self.builds_ahead:
            model = self._build_model(weights, self.longest)
            built = self._prepare_in_turn(model, self.longest)
        self.phases.end("kernels")
        return model, built

    def _prepare_in_turn(self, model: BuildableModel, max_len: int) -> Built:
        """Build the kernels on rank 0. The other ranks then find them in the cache."""
        if self.peers.rank.index:
            self.peers.barrier()
        built = self._prepare(model, max_len)
        if not self.peers.rank.index:
            self.peers.barrier()
        return built

    def _prepare(self, model: BuildableModel, max_len: int) -> Built:
        """Build every kernel that a request may use."""
        return self.builds.prepare(
            self._build_configuration(max_len), self._every_launch(model, max_len)
        )

    def _every_launch(self, model: BuildableModel, max_len: int) -> LaunchEnumerator:
        return LaunchEnumerator(
            model,
            self.groups,
            self.ops,
            LargestSteps.alone(model, self.groups, self.ops).cache,
            self._step_limits(max_len),
            eager=self.config.enforce_eager,
        )

    def _launch_without_weights(self, unfilled: Assembler[Any]) -> None:
        """Call the operators with a model and a cache that have no memory."""
        model = self._build_model(unfilled.finish_unfilled(), self.longest)
        self._every_launch(model, self.longest)()

    def _build_model(self, weights: Any, max_positions: int) -> BuildableModel:
        model: BuildableModel = self.architecture.build(
            self.model_config,
            self.ops,
            weights,
            round_activations=self.round_activations,
            max_positions=max_positions,
            collectives=self.collectives,
        )
        # All ranks choose the same experts, and only rank 0 transfers results to the host.
        if self.config.enable_return_routed_experts and not self.peers.rank.index:
            largest = self._step_limits(max_positions)
            most = max(largest.num_tokens, largest.num_seqs * (1 + largest.draft_tokens))
            self.routed = model.record_routed_experts(most)
        return model

    # --- Cache ------------------------------------------------------------------------------------

    def _plan_cache(self, model: BuildableModel | None) -> CachePlan:
        """Plan the cache; `model` runs the largest steps to measure their workspace."""
        config = self.config
        budget = config.cache_memory_bytes
        if budget is None and self.device.type != "cuda":
            budget = CPU_CACHE_BYTES
        elif budget is None and model is not None:
            steps = LargestSteps.alone(model, self.groups, self.ops)
            workspace = steps.workspace_bytes(self._step_limits(self.longest))
            del steps
            self.peers.barrier()  # here every rank of this GPU holds its weights
            remaining = remaining_bytes(self.device, config.gpu_memory_utilization)
            budget = max(0, remaining // self.sharers - workspace)
        elif budget is None:
            # The reference operators are for comparisons, and nothing bounds their workspace.
            budget = remaining_bytes(self.device, config.gpu_memory_utilization) // 2
        # Every rank plans the same pages.
        return self._divide_cache(self.peers.minimum(budget))

    def _divide_cache(self, budget: int) -> CachePlan:
        config = self.config
        wanted = -(-self.longest // BLOCK_TOKENS) * BLOCK_TOKENS * self.sizes.num_seqs
        if config.enable_prefix_caching:
            wanted = max(wanted, self.capabilities.prefix_cache_tokens)
        plan = plan_cache(
            self.groups,
            itemsize=self.dtype.itemsize,
            packed=self.capabilities.packed_cache,
            budget_bytes=budget,
            max_num_seqs=self.sizes.num_seqs,
            max_step_tokens=self.sizes.num_tokens,
            wanted_tokens=wanted,
            least_tokens=self.longest,
            prefix_caching=config.enable_prefix_caching,
            drafts=bool(config.draft_tokens),
        )
        if self.device.type == "cpu":
            check_cache_memory(plan.total_bytes)
        return plan

    def _allocate_cache(
        self, cache_plan: CachePlan, weights: Any, model: BuildableModel | None
    ) -> ModelRunner:
        """Allocate the cache, and build the model unless its kernels are prepared already."""
        max_model_len = self._max_model_len(cache_plan)
        if self.device.type == "cuda":
            torch.cuda.empty_cache()  # free what building and measuring left cached
        if model is None:
            model = self._build_model(weights, max_model_len)
        model.limit_positions(max_model_len)
        packed = self.capabilities.packed_cache
        arena = self.arenas.get("cache")
        cache = allocate_cache(self.groups, cache_plan, self.dtype, self.device, packed, arena)
        runner = ModelRunner(
            platform=self.platform,
            device=self.device,
            dtype=self.dtype,
            ops=self.ops,
            groups=self.groups,
            model=model,
            cache=cache,
            cache_plan=cache_plan,
            max_model_len=max_model_len,
            tables=SlotTables([group.name for group in self.groups]),
            sampled=torch.zeros(self.sizes.num_seqs, dtype=torch.int64, device=self.device),
            routed=self.routed,
        )
        self.phases.end("memory")
        return runner

    def _max_model_len(self, cache_plan: CachePlan) -> int:
        length, wanted = min(self.longest, cache_plan.capacity_tokens), self.config.max_model_len
        if wanted is not None and length < wanted:
            raise ResourceError(
                f"max_model_len {wanted} was asked for, but the cache's memory "
                f"({cache_plan.total_bytes:,} bytes) holds {cache_plan.capacity_tokens} tokens: "
                "raise gpu_memory_utilization or cache_memory_bytes"
            )
        return length

    def _prepare_shorter_context(self, runner: ModelRunner) -> None:
        """Prepare the kernels of a shorter context, if the cache does not hold the longest one."""
        if self.builds_ahead and runner.max_model_len != self.longest:
            self._prepare_in_turn(runner.model, runner.max_model_len)
            self.phases.end("kernels")

    # --- Compiled layers --------------------------------------------------------------------------

    def _compile_layers(self, runner: ModelRunner) -> int:
        """Compile the decoder layers to graphs; returns how many were not in the cache."""
        if self.compiled_mode is None:
            return 0
        cache_dir = self.config.cache_dir
        directory = Path(cache_dir).expanduser() if cache_dir else default_directory()
        count = self.compiled_mode.compile_layers(runner.model, runner.cache, directory / "layers")
        self.phases.end("compiled layers")
        return count

    # --- Memory and result ------------------------------------------------------------------------

    def _reserve_memory(self, runner: ModelRunner) -> MemoryUse:
        """Reserve the memory of the largest steps.

        Returns:
            The memory that the rank holds from then on.
        """
        workspace, cache = 0, runner.cache_plan.total_bytes
        if self.device.type == "cuda" and self.capabilities.bounded_workspace:
            workspace = self._run_largest_steps(runner)
        self.phases.end("memory")
        return MemoryUse(weights=self.weight_bytes, workspace=workspace, cache=cache)

    def _run_largest_steps(self, runner: ModelRunner) -> int:
        """Run the largest steps once to reserve their memory and load their kernels.

        Pinned memory of the host is reserved too.

        Returns:
            Bytes of the GPU that the rank holds besides weights and cache.
        """
        largest = self._step_limits(runner.max_model_len)
        LargestSteps(runner.model, self.groups, runner.cache).run(largest)
        with torch.inference_mode():
            rows = largest.num_seqs * (1 + largest.draft_tokens)
            runner.model.run_library_gemms(rows, largest.num_tokens)
        vocab_size = self.model_config.vocab_size
        hold_pinned_memory(self.device, largest_transfer(self.groups, largest, vocab_size))
        torch.cuda.synchronize(self.device)
        held = torch.cuda.memory_reserved(self.device) - self.reserved_before
        free, total = torch.cuda.mem_get_info(self.device)
        allowed = int(total * self.config.gpu_memory_utilization)
        if self.config.cache_memory_bytes is None and total - free > allowed:
            logger.warning(
                "%s bytes of the GPU are in use, of %s that gpu_memory_utilization allows",
                f"{total - free:,}",
                f"{allowed:,}",
            )
        # Arenas hold their memory outside torch's allocator.
        elsewhere = 0 if self.arenas else self.weight_bytes + runner.cache_plan.total_bytes
        return max(0, held - elsewhere)

    def _new_executor(
        self, runner: ModelRunner, memory: MemoryUse, built: Built, compiled_layers: int
    ) -> LocalExecutor:
        steps = runner.verification_steps
        description = RankDescription(
            device=str(self.device),
            num_ranks=self.peers.rank.size,
            asynchronous=self.device.type != "cpu",
            needs_warm_up=self.device.type != "cpu" and self.capabilities.builds_kernels,
            groups=self.groups,
            num_pages=runner.cache_plan.num_pages,
            max_model_len=runner.max_model_len,
            sizes=self.sizes,
            can_draft=runner.drafter is not None,
            device_drafts=None if steps is None else steps.description,
            memory=memory,
            kernels=built.kernels,
            compiled_kernels=built.compiled,
            compiled_layers=compiled_layers,
            start_seconds=dict(self.phases.seconds),
            routed_experts=_form(self.routed),
        )
        # Weights under compiled layers were never updated.
        form = self.weight_form if self.compiled_mode is None else None
        return LocalExecutor(
            runner,
            self.builds,
            description,
            self.collectives,
            form,
            self.arenas,
            self.peers.on_this_host(),
        )

    # --- Limits -----------------------------------------------------------------------------------

    def _step_limits(self, max_len: int) -> StepLimits:
        captures = self.capabilities.captures_steps
        return step_limits(self.config, self.sizes, self.model_config, captures, max_len)

    def _build_configuration(self, max_len: int) -> object:
        captures = self.capabilities.captures_steps
        return build_configuration(self.config, self.sizes, self.model_config, captures, max_len)


def _table_serves(
    platform: Platform,
    dtype: torch.dtype,
    config: EngineConfig,
    model_config: ModelConfig,
    stream: WeightStream,
) -> bool:
    """Whether the platform's own operators support the options; else the references run."""
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
        logger.warning("running the slow reference operators, because %s", " and ".join(reasons))
    return not reasons


def _form(routed: Tensor | None) -> RoutedExpertsForm | None:
    if routed is None:
        return None
    return RoutedExpertsForm((routed.shape[1], routed.shape[2]), str(routed.dtype)[len("torch.") :])


def _longest(config: EngineConfig, model_config: ModelConfig) -> int:
    """The most tokens of one sequence, from the configuration or else from the model."""
    limit = model_config.max_position_embeddings
    if config.max_model_len is not None and config.max_model_len > limit:
        raise FinwhaleError(
            f"max_model_len is {config.max_model_len}, but the model's context is {limit} tokens"
        )
    return config.max_model_len or limit


def _is_out_of_memory(error: Exception) -> bool:
    """If a CPU allocation fails, torch raises a plain RuntimeError and numpy a MemoryError."""
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or "allocate" in str(error)

"""Opens the ranks of a model: weights, kernels built ahead, cache, captured steps."""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from finwhale.artefacts import default_directory
from finwhale.config import EngineConfig
from finwhale.distributed.collectives import Alone, Collectives
from finwhale.distributed.connect import connect
from finwhale.distributed.peers import Peers
from finwhale.distributed.rank import Placement
from finwhale.engine.plan.executor import MemoryUse, RankDescription, RoutedExpertsForm
from finwhale.engine.ranks.devices import choose_devices, fewest_ranks, num_sharers
from finwhale.engine.ranks.lane_ranks import LaneRanks
from finwhale.engine.ranks.local_executor import LocalExecutor
from finwhale.engine.ranks.memory_checks import check_host_memory
from finwhale.engine.ranks.rank_processes import connect_launched, on_ray, spawn
from finwhale.engine.ranks.ranks import Ranks, open_ranks
from finwhale.engine.start.budget import MemoryBudget
from finwhale.engine.start.capture import add_steps
from finwhale.engine.start.decisions import Decisions
from finwhale.engine.start.kernels import Kernels
from finwhale.engine.start.kv_cache import allocate_cache
from finwhale.engine.start.start_times import Phases
from finwhale.engine.steps.runner import ModelRunner
from finwhale.engine.steps.slot_tables import SlotTables
from finwhale.errors import ResourceError, first_line
from finwhale.models.protocol import Model, ModelConfig
from finwhale.models.weight_sources import Weights
from finwhale.ops.builds import Built
from finwhale.weights.joint_ranks import JointRanks
from finwhale.weights.tree import device_tensors


def open_executor(
    config: EngineConfig,
    model_config: ModelConfig,
    weights: Weights,
    placement: Placement | None = None,
) -> LocalExecutor | Ranks:
    """Open the ranks of a model: the one of this process, and worker processes for others.

    Args:
        placement: that of this process, which has rank 0; None: no launcher has placed ranks.

    Raises:
        ResourceError: a device does not exist or has too little memory.
        CheckpointError: the weights do not match the configuration.
    """
    if placement is not None:
        processes = connect_launched(config, placement)
    elif config.distributed_executor == "ray":
        processes = on_ray(config)
    else:
        devices = choose_devices(config, partial(fewest_ranks, config, model_config))
        if len(devices) == 1:
            return open_rank(config, model_config, weights, devices, Peers())
        processes = spawn(devices)
    return open_ranks(
        partial(open_rank, config, model_config, weights, processes.devices),
        partial(
            open_rank, config, model_config, replace(weights, progress=None), processes.devices
        ),
        processes,
        LaneRanks if config.data_parallel_size > 1 else None,
    )


def open_rank(
    config: EngineConfig,
    model_config: ModelConfig,
    weights: Weights,
    devices: Sequence[str],
    peers: Peers,
) -> LocalExecutor:
    """Open the rank of this process.

    Args:
        devices: the device of each rank.
        peers: all ranks of the model. They open at the same time.

    Raises:
        ResourceError: the device does not exist, or model and cache do not fit its memory.
        CheckpointError: the weights do not match the configuration.
    """
    mine = replace(config.of_lane(), device=devices[peers.rank.index])
    if config.data_parallel_size == 1:
        mine = replace(mine, tensor_parallel_size=len(devices))
    chosen = Decisions(mine, model_config, weights, peers, num_sharers(config.device))
    try:
        return _Start(chosen).open()
    except (RuntimeError, MemoryError) as error:
        # If a CPU allocation fails, torch raises a plain RuntimeError and numpy a MemoryError.
        is_known = isinstance(error, torch.OutOfMemoryError | MemoryError)
        if not is_known and "allocate" not in str(error):
            raise
        raise ResourceError(
            f"the model does not fit {chosen.device}: {first_line(error)}"
        ) from error


class _Start:
    """Starts one rank. The constructor checks the options and allocates no memory.

    Attributes:
        weight_bytes: bytes of the loaded weights.
        routed: where the model records the experts of a step's tokens; None: it does not.
    """

    def __init__(self, decisions: Decisions) -> None:
        self.chosen, self.peers, self.device = decisions, decisions.peers, decisions.device
        self.phases = Phases()
        self.kernels, self.budget = Kernels(decisions), MemoryBudget(decisions)
        self.weight_bytes = 0
        self.routed: Tensor | None = None

    def open(self) -> LocalExecutor:
        """Run the start's phases in order."""
        chosen = self.chosen
        unfilled = None
        what = "the model's lookup tables, which all ranks share,"
        check_host_memory(chosen.table_bytes, what, "use a host with more memory")
        if self.device.type == "cuda":
            unfilled = chosen.assembler(torch.device("meta"))
            self.budget.check_fits_gpu(unfilled.num_bytes)
        self.peers.barrier()  # here every rank has checked its options
        self.collectives = self._connect()
        if unfilled is not None:
            self.kernels.begin(unfilled, self.collectives)
            self.phases.end("kernels")
        weights = self._load()
        model, built = None, Built()
        if chosen.builds_ahead:
            model = self._build_model(weights, chosen.longest)
            built = self.kernels.prepare(model, chosen.longest)
        self.phases.end("kernels")
        self.cache_plan = self.budget.plan_cache(model)
        runner = self._allocate_cache(weights, model)
        self.phases.end("memory")
        if chosen.builds_ahead and runner.max_model_len != chosen.longest:
            # The cache does not hold the longest context, and kernels depend on it.
            self.kernels.prepare(runner.model, runner.max_model_len)
            self.phases.end("kernels")
        compiled_layers = self._compile_layers(runner)
        add_steps(runner, chosen.config, chosen.step_limits(runner.max_model_len))
        self.phases.end("graphs")
        cache = self.cache_plan.total_bytes
        workspace = self.budget.reserve_workspace(runner, self.weight_bytes + cache)
        self.phases.end("memory")
        memory = MemoryUse(weights=self.weight_bytes, workspace=workspace, cache=cache)
        return self._new_executor(runner, memory, built, compiled_layers)

    def _connect(self) -> Collectives:
        if self.peers.store is None:
            return Alone()
        collectives = connect(
            self.chosen.rank,
            self.device,
            self.peers.store,
            ordered=self.chosen.config.batch_invariant,
            check=self.peers.check,
        )
        self.phases.end("connect")
        return collectives

    def _load(self) -> Any:
        """Load the weights, and count their bytes."""
        chosen, ranks = self.chosen, None
        if self.device.type == "cpu":
            # Ranks on a CPU share its memory. Together they hold at least all weights.
            size = chosen.architecture.weight_bytes(chosen.model_config, chosen.dtype, chosen.ops)
            check_host_memory(size + chosen.table_bytes)
        else:
            ranks = JointRanks(self.peers, self.device)
        weights = chosen.assembler(self.device).fill(chosen.stream, ranks)
        if chosen.table_bytes:
            self.peers.barrier()  # here the lookup tables have the rows that other ranks read
        if chosen.arenas:
            chosen.arenas["weights"].adopt(device_tensors(weights))
            self.weight_bytes = chosen.arenas["weights"].num_bytes
        elif self.device.type == "cuda":
            allocated = torch.cuda.memory_allocated(self.device)
            self.weight_bytes = allocated - self.budget.allocated_before
        else:
            self.weight_bytes = sum(
                {id(each): each.nbytes for each in device_tensors(weights)}.values()
            )
        self.phases.end("weights")
        return weights

    def _build_model(self, weights: Any, max_positions: int) -> Model:
        model, self.routed = self.chosen.build_model(weights, max_positions, self.collectives)
        return model

    def _allocate_cache(self, weights: Any, model: Model | None) -> ModelRunner:
        """Allocate the cache, and build the model unless its kernels are prepared already."""
        chosen = self.chosen
        max_model_len = self.budget.max_model_len(self.cache_plan)
        if self.device.type == "cuda":
            torch.cuda.empty_cache()  # free what building and measuring left cached
        if model is None:
            model = self._build_model(weights, max_model_len)
        model.limit_positions(max_model_len)
        cache = allocate_cache(
            chosen.groups,
            self.cache_plan,
            chosen.dtype,
            self.device,
            chosen.capabilities.packed_cache,
            chosen.arenas.get("cache"),
        )
        return ModelRunner(
            device=self.device,
            ops=chosen.ops,
            groups=chosen.groups,
            model=model,
            cache=cache,
            max_model_len=max_model_len,
            tables=SlotTables([group.name for group in chosen.groups]),
            sampled=torch.zeros(chosen.sizes.num_seqs, dtype=torch.int64, device=self.device),
            routed=self.routed,
        )

    def _compile_layers(self, runner: ModelRunner) -> int:
        """Compile the decoder layers to graphs; returns how many were not in the cache."""
        mode, cache_dir = self.chosen.compiled_mode, self.chosen.config.cache_dir
        if mode is None:
            return 0
        directory = Path(cache_dir).expanduser() if cache_dir else default_directory()
        count = mode.compile_layers(runner.model, runner.cache, directory / "layers")
        self.phases.end("compiled layers")
        return count

    def _new_executor(
        self, runner: ModelRunner, memory: MemoryUse, built: Built, compiled_layers: int
    ) -> LocalExecutor:
        chosen, steps = self.chosen, runner.verification_steps
        description = RankDescription(
            device=str(self.device),
            num_ranks=chosen.rank.size,
            asynchronous=self.device.type != "cpu",
            needs_warm_up=self.device.type != "cpu" and chosen.capabilities.builds_kernels,
            groups=chosen.groups,
            num_pages=self.cache_plan.num_pages,
            max_model_len=runner.max_model_len,
            sizes=chosen.sizes,
            can_draft=runner.drafter is not None,
            device_drafts=None if steps is None else steps.description,
            memory=memory,
            kernels=built.kernels,
            compiled_kernels=built.compiled,
            compiled_layers=compiled_layers,
            start_seconds=dict(self.phases.seconds),
            routed_experts=_form(self.routed),
        )
        return LocalExecutor(
            runner,
            self.kernels.builds,
            description,
            self.collectives,
            # Weights under compiled layers were never updated.
            chosen.weight_form if chosen.compiled_mode is None else None,
            chosen.arenas,
            self.peers.on_this_host(),
        )


def _form(routed: Tensor | None) -> RoutedExpertsForm | None:
    if routed is None:
        return None
    return RoutedExpertsForm((routed.shape[1], routed.shape[2]), str(routed.dtype)[len("torch.") :])

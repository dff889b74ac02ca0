"""Decides how a rank runs, from the options and the device, before any memory is allocated."""

import logging
from dataclasses import asdict, replace
from typing import Any

import torch
from torch import Tensor

from finwhale.compiled import CompiledMode
from finwhale.config import EngineConfig
from finwhale.distributed.collectives import Collectives
from finwhale.distributed.peers import Peers
from finwhale.engine.plan.step_sizes import StepSizes, choose_step_sizes
from finwhale.engine.ranks.arena import Arena
from finwhale.engine.ranks.devices import choose_device, choose_dtype
from finwhale.engine.steps.drafter import check_can_draft
from finwhale.engine.steps.step_limits import StepLimits, step_limits
from finwhale.errors import FinwhaleError
from finwhale.models.cache import CacheGroup
from finwhale.models.protocol import Model, ModelConfig
from finwhale.models.registry import architecture_of
from finwhale.models.weight_sources import Weights
from finwhale.ops import load_ops
from finwhale.weights.allocation import WeightForm
from finwhale.weights.assembler import Assembler
from finwhale.weights.table import table_bytes

logger = logging.getLogger(__name__)

# With this many requests at once (1,024 tokens in, 256 out), two data-parallel H200s gave 5% more
# tokens per second than two tensor-parallel ones (docs/notes/2026-11-29-lanes.md).
DATA_PARALLEL_SEQS = 128


class Decisions:
    """How one rank runs. All ranks of a model decide alike.

    Args:
        config: names the device of this rank.
        peers: all ranks of the model.
        sharers: number of ranks that share the device.

    Attributes:
        rank: this rank, and whether it holds the weights of all heads.
        stream: the weights, opened.
        table_bytes: bytes of the checkpoint's lookup tables, in host memory, once for all ranks.
        compiled_mode: None: the options do not ask for it.
        sizes: of the largest steps.
        builds_ahead: kernels are built before the first step that launches them.
        longest: the most tokens of one sequence that the options allow. The cache may hold fewer.
        arenas: the memory of "weights" and "cache" in an engine that can sleep; else empty.

    Raises:
        FinwhaleError: an option contradicts another, the model or the device.
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
        self.sharers, self._checkpoint = sharers, weights.checkpoint
        self.platform, self.device = choose_device(config.device)
        if self.device.index:
            torch.cuda.set_device(self.device)
        self.dtype = choose_dtype(config.dtype, self.platform)
        self.round_activations = config.activations == "as-trained"
        self.architecture = architecture_of(model_config)
        if self.round_activations:
            self.architecture.check_rounding(model_config)
        lanes = config.data_parallel_size > 1
        part = replace(peers.rank, data_parallel=lanes)
        # refuses sizes that do not divide
        self.architecture.rank_config(model_config, part, round_activations=self.round_activations)
        total = self._gpu_bytes()
        self.rank = replace(part, whole_attention=self._holds_whole_attention(total))
        if total and not part.index and (advice := data_parallel_advice(config, part.size)):
            logger.info("%s", advice)
        self.stream = weights.open(self.device, self.rank)
        self.ops = load_ops(
            self.platform,
            reference=not self._table_serves(),
            batch_invariant=config.batch_invariant,
            group=self.architecture.GROUP,
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
            peers=peers,
            dummy=weights.checkpoint is None,
        )
        specs = self.architecture.weight_specs(model_config, self.rank)
        self.table_bytes = table_bytes(specs, self.stream.storages) if weights.checkpoint else 0
        self.longest = self._longest()
        check_can_draft(config.draft_tokens, model_config)
        self.groups: tuple[CacheGroup, ...] = self.architecture.cache_groups(model_config)
        self.arenas = self._new_arenas()

    def step_limits(self, max_len: int) -> StepLimits:
        """The sizes of steps, if the longest sequence has max_len tokens."""
        captures = self.capabilities.captures_steps
        limits = step_limits(self.config, self.sizes, self.model_config, captures, max_len)
        # The number of tokens in the tails of prompts (Prompts) is not one of a graph's sizes.
        replays = any(group.rebuilt for group in self.groups)
        return replace(limits, prefill_graphs=()) if replays else limits

    def build_configuration(self, max_len: int) -> object:
        """The values that determine launch signatures. Equal values need the same kernels."""
        config = self.config
        return {
            "model": asdict(self.model_config),  # type: ignore[call-overload]
            "steps": asdict(self.step_limits(max_len)),
            "batch_invariant": config.batch_invariant,
            "wo_a_input": config.wo_a_input,
            "eager": config.enforce_eager,
            "compile": config.compile,
            "ranks": config.num_ranks,
            "data_parallel": config.data_parallel_size,
        }

    def assembler(self, device: torch.device) -> Assembler[Any]:
        """What allocates this rank's weights on `device`, and fills them."""
        assembler: Assembler[Any] = self.architecture.assembler(
            self.model_config, self.weight_form, device
        )
        return assembler

    def build_model(
        self, weights: Any, max_positions: int, collectives: Collectives
    ) -> tuple[Model, Tensor | None]:
        """The model, and the tensor in which it records routed experts; None: it does not."""
        model: Model = self.architecture.build(
            self.model_config,
            self.ops,
            weights,
            self._checkpoint,
            round_activations=self.round_activations,
            max_positions=max_positions,
            collectives=collectives,
        )
        # Tensor-parallel ranks choose the same experts, and rank 0 transfers results to the host.
        records = self.rank.data_parallel or not self.rank.index
        if self.config.enable_return_routed_experts and records:
            largest = self.step_limits(max_positions)
            most = max(largest.num_tokens, largest.num_seqs * (1 + largest.draft_tokens))
            return model, model.record_routed_experts(most)
        return model, None

    def _gpu_bytes(self) -> int:
        """A rank's share of the smallest GPU of all ranks; 0 on a CPU."""
        if self.device.type != "cuda":
            return 0
        total = torch.cuda.get_device_properties(self.device).total_memory
        return self.peers.minimum(total // self.sharers)

    def _step_sizes(self, total: int) -> StepSizes:
        """The sizes of steps, on GPUs of `total` bytes."""
        room = None
        if self.device.type == "cuda" and self.capabilities.bounded_workspace:
            part = replace(self.rank, whole_attention=False)
            weights = self.architecture.weight_bytes(self.model_config, self.dtype, self.ops, part)
            room = int(total * self.config.gpu_memory_utilization) - weights
        return choose_step_sizes(self.config, self.rank.size, room)

    def _holds_whole_attention(self, total: int) -> bool:
        """Whether each rank holds the weights of all heads, on GPUs of `total` bytes."""
        config = self.config
        if self.peers.rank.size == 1 or config.data_parallel_size > 1:
            return False
        if config.whole_attention is not None:
            return config.whole_attention
        if self.device.type != "cuda" or config.batch_invariant or config.reference:
            return False
        return bool(self.architecture.fits_whole_attention(self.model_config, total))

    def _table_serves(self) -> bool:
        """Whether the platform's own operators support the options; else the references run."""
        if self.config.reference:
            return False
        if self.platform.vendor == "cpu":
            return self.dtype == torch.float32
        reasons = []
        if self.dtype != torch.bfloat16:
            reasons.append("dtype is not bfloat16")
        if not self.round_activations:
            reasons.append("activations are not as trained")
        reasons += self.architecture.kernel_obstacles(self.model_config, self.stream.storages)
        if reasons:
            why = " and ".join(reasons)
            logger.warning("running the slow reference operators, because %s", why)
        return not reasons

    def _new_compiled_mode(self) -> CompiledMode | None:
        if not self.config.compile:
            return None
        if self.peers.rank.size > 1:
            raise FinwhaleError("the compiled mode runs on one rank: leave out compile")
        if not self.ops.capabilities.compiles_layers:
            raise FinwhaleError(
                "the compiled mode is for the platform's own operators, and here the plain "
                "definitions would run"
            )
        return CompiledMode(self.ops, self.model_config)

    def _new_arenas(self) -> dict[str, Arena]:
        if not self.config.enable_sleep_mode:
            return {}
        if self.config.compile:
            raise FinwhaleError("the compiled mode cannot sleep: leave out compile")
        return {tag: Arena(self.device) for tag in ("weights", "cache")}

    def _longest(self) -> int:
        """The most tokens of one sequence, from the options or else from the model."""
        wanted, limit = self.config.max_model_len, self.model_config.max_position_embeddings
        if wanted is not None and wanted > limit:
            raise FinwhaleError(
                f"max_model_len is {wanted}, but the model's context is {limit} tokens"
            )
        return wanted or limit


def data_parallel_advice(config: EngineConfig, num_ranks: int) -> str:
    """What to say to users whose options suggest data-parallel ranks; empty: nothing."""
    few = (config.max_num_seqs or 0) < DATA_PARALLEL_SEQS
    if num_ranks == 1 or config.data_parallel_size > 1 or few:
        return ""
    try:
        replace(config, tensor_parallel_size=None, data_parallel_size=num_ranks)
    except FinwhaleError:
        return ""  # another option contradicts it
    return (
        f"with {DATA_PARALLEL_SEQS} or more sequences at once, data_parallel_size={num_ranks} may "
        f"give more tokens per second than tensor_parallel_size={num_ranks}, and holds "
        f"{num_ranks} times as many cached tokens (docs/production.md)"
    )

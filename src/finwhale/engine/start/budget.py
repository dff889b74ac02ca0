"""Divides a rank's memory among weights, steps and cache."""

import logging

import torch

from finwhale.engine.plan.stored_prefixes import MOVING_STATES
from finwhale.engine.ranks.memory_checks import check_cache_memory, check_gpu_memory
from finwhale.engine.start.decisions import Decisions
from finwhale.engine.start.kv_cache import CachePlan, plan_cache
from finwhale.engine.start.memory import LargestSteps, largest_transfer, remaining_bytes
from finwhale.engine.steps.host_transfer import hold_pinned_memory
from finwhale.engine.steps.runner import ModelRunner
from finwhale.errors import ResourceError
from finwhale.models.protocol import Model
from finwhale.ops.paging import BLOCK_TOKENS

logger = logging.getLogger(__name__)

CPU_CACHE_BYTES = 2**30


class MemoryBudget:
    """The memory of one rank's device. On a GPU, it notes at construction what is in use.

    Attributes:
        allocated_before: bytes that torch had allocated on the GPU when the start began.
    """

    def __init__(self, decisions: Decisions) -> None:
        self._chosen, self._device = decisions, decisions.device
        self.allocated_before = self._reserved_before = 0
        if self._device.type == "cuda":
            torch.cuda.empty_cache()
            self.allocated_before = torch.cuda.memory_allocated(self._device)
            self._reserved_before = torch.cuda.memory_reserved(self._device)

    def check_fits_gpu(self, weights: int) -> None:
        """Check that the weights (bytes) and the smallest cache fit, before anything is read.

        Raises:
            ResourceError: they do not.
        """
        chosen = self._chosen
        cache = chosen.config.cache_memory_bytes
        share = chosen.config.gpu_memory_utilization if cache is None else 1.0
        room = remaining_bytes(self._device, share) // chosen.sharers
        check_gpu_memory(weights, room, chosen.rank.size)
        self._divide_cache(room - weights if cache is None else cache)

    def plan_cache(self, model: Model | None) -> CachePlan:
        """Plan the cache. `model` runs the largest steps to measure their workspace; None: the
        options do not bound it.

        Raises:
            ResourceError: the memory is too small for the smallest cache.
        """
        chosen, config = self._chosen, self._chosen.config
        budget = config.cache_memory_bytes
        if budget is None and self._device.type != "cuda":
            budget = CPU_CACHE_BYTES
        elif budget is None and model is not None:
            steps = LargestSteps.alone(model, chosen.groups, chosen.ops)
            workspace = steps.workspace_bytes(chosen.step_limits(chosen.longest))
            del steps
            chosen.peers.barrier()  # here every rank of this GPU holds its weights
            remaining = remaining_bytes(self._device, config.gpu_memory_utilization)
            budget = max(0, remaining // chosen.sharers - workspace)
        elif budget is None:
            # The reference operators are for comparisons, and nothing bounds their workspace.
            budget = remaining_bytes(self._device, config.gpu_memory_utilization) // 2
        # Every rank plans the same pages.
        return self._divide_cache(chosen.peers.minimum(budget))

    def _divide_cache(self, budget: int) -> CachePlan:
        chosen, config, sizes = self._chosen, self._chosen.config, self._chosen.sizes
        wanted = -(-chosen.longest // BLOCK_TOKENS) * BLOCK_TOKENS * sizes.num_seqs
        if config.enable_prefix_caching:
            wanted = max(wanted, chosen.capabilities.prefix_cache_tokens)
        plan = plan_cache(
            chosen.groups,
            itemsize=chosen.dtype.itemsize,
            packed=chosen.capabilities.packed_cache,
            budget_bytes=budget,
            max_num_seqs=sizes.num_seqs,
            max_step_tokens=sizes.num_tokens,
            wanted_tokens=wanted,
            least_tokens=chosen.longest,
            prefix_caching=config.enable_prefix_caching,
            drafts=bool(config.draft_tokens),
            moving_states=MOVING_STATES if config.prefix_store else 0,
        )
        if self._device.type == "cpu":
            check_cache_memory(plan.total_bytes)
        return plan

    def max_model_len(self, plan: CachePlan) -> int:
        """The most tokens of a sequence. Raises ResourceError if the options ask for more."""
        wanted = self._chosen.config.max_model_len
        length = min(self._chosen.longest, plan.capacity_tokens)
        if wanted is not None and length < wanted:
            raise ResourceError(
                f"max_model_len {wanted} was asked for, but the cache's memory "
                f"({plan.total_bytes:,} bytes) holds {plan.capacity_tokens} tokens: "
                "raise gpu_memory_utilization or cache_memory_bytes"
            )
        return length

    def reserve_workspace(self, runner: ModelRunner, weights_and_cache: int) -> int:
        """Run the largest steps once to reserve their memory and load their kernels.

        If graphs run every prefill, the largest graph runs without tokens. Pinned memory of the
        host is reserved too.

        Args:
            weights_and_cache: their bytes.

        Returns:
            Bytes of the GPU that the rank holds besides weights and cache; 0 on a CPU.
        """
        chosen = self._chosen
        if self._device.type != "cuda" or not chosen.capabilities.bounded_workspace:
            return 0
        largest = chosen.step_limits(runner.max_model_len)
        LargestSteps(runner.model, chosen.groups, runner.cache).run(largest)
        with torch.inference_mode():
            if largest.captures_all_prefills:
                assert runner.prefill_graphs is not None
                runner.prefill_graphs.hold_memory(largest.max_len)
            rows = largest.num_seqs * (1 + largest.draft_tokens)
            runner.model.run_library_gemms(rows, largest.num_tokens)
        vocab_size = chosen.model_config.vocab_size
        hold_pinned_memory(self._device, largest_transfer(chosen.groups, largest, vocab_size))
        torch.cuda.synchronize(self._device)
        held = torch.cuda.memory_reserved(self._device) - self._reserved_before
        free, total = torch.cuda.mem_get_info(self._device)
        allowed = int(total * chosen.config.gpu_memory_utilization)
        if chosen.config.cache_memory_bytes is None and total - free > allowed:
            logger.warning(
                "%s bytes of the GPU are in use, of %s that gpu_memory_utilization allows",
                f"{total - free:,}",
                f"{allowed:,}",
            )
        # Arenas hold their memory outside torch's allocator.
        return max(0, held - (0 if chosen.arenas else weights_and_cache))

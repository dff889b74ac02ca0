"""The sizes of the largest steps: what the options say, or else the engine chooses.

Throughput wants large steps, because a prompt's tokens are cheaper in a large step. Running
requests want small ones, because their next tokens wait for the step. So a step in which requests
decode has fewer tokens of prompts than one in which none does.

docs/notes/2026-11-28-sizes-of-steps.md has the measurements.
"""

from dataclasses import dataclass

from finwhale.config import EngineConfig

SMALL_STEP, SMALL_NUM_SEQS = 2048, 64
LARGE_STEP, LARGE_MIXED_STEP = 8192, 2560
# The same for each of several data-parallel ranks. Calculated: Flash's 43 layers take 55 us for a
# token (8 layers on one H200: 84 ms for 8,192), so 85 ms for these, beside about 20 for decodes.
LANE_STEP, LANE_MIXED_STEP = 4096, 1536
MOST_SEQS = 256  # each further size of a decode is captured at the start
# Steps are large if the weights leave a GPU at least this many bytes. Flash's steps took 4.6 GiB of
# them: 8,192 tokens with 8 layers on one H200, 16,384 tokens with all layers on two.
ROOM_FOR_LARGE_STEPS = 24 * 2**30
# Steps are small if the option gives the cache less: a step's own tokens take a part of it.
CACHE_FOR_LARGE_STEPS = 4 * 2**30
# Share of max_num_batched_tokens that a step may have if sequences decode in it.
MIXED_SHARE = (3, 4)


@dataclass(frozen=True, slots=True)
class StepSizes:
    """The largest steps.

    Attributes:
        num_seqs: maximum number of sequences that run at once.
        num_tokens: maximum number of tokens of a step.
        mixed_tokens: the same, of a step in which sequences decode.
    """

    num_seqs: int
    num_tokens: int
    mixed_tokens: int

    @classmethod
    def given(cls, num_seqs: int, num_tokens: int) -> "StepSizes":
        """The sizes that follow from both options."""
        share, whole = MIXED_SHARE
        return cls(num_seqs, num_tokens, max(1, num_tokens * share // whole))


def choose_step_sizes(config: EngineConfig, num_ranks: int, room: int | None) -> StepSizes:
    """The sizes of an engine's steps.

    Args:
        room: bytes of each GPU that may hold something else than weights; None: no GPU.
    """
    cache = config.cache_memory_bytes
    large = room is not None and room >= ROOM_FOR_LARGE_STEPS
    large = large and (cache is None or cache >= CACHE_FOR_LARGE_STEPS)
    num_seqs = config.max_num_seqs
    if num_seqs is None:
        most = min(MOST_SEQS, SMALL_NUM_SEQS * num_ranks) if large else SMALL_NUM_SEQS
        num_seqs = max(most, *(config.graph_sizes or (1,)))
    if config.max_num_batched_tokens is None and large:
        if config.data_parallel_size > 1:
            return StepSizes(num_seqs, LANE_STEP, LANE_MIXED_STEP)
        return StepSizes(num_seqs, LARGE_STEP, LARGE_MIXED_STEP)
    return StepSizes.given(num_seqs, config.max_num_batched_tokens or SMALL_STEP)

"""The sizes of the largest steps and of captured steps, which follow from the configuration."""

from collections.abc import Iterable
from dataclasses import dataclass

from finwhale.config import EngineConfig
from finwhale.engine.plan.draft_policy import step_kinds
from finwhale.engine.plan.step_sizes import StepSizes
from finwhale.models.protocol import ModelConfig

# Numbers of tokens of captured steps with prefill.
PREFILL_SIZES = (
    *(16, 32, 64, 96, 128, 192, 256, 384, 512, 640, 768, 896, 1024, 1280, 1536, 1792, 2048),
    *(2304, 2560, 3072, 3584, 4096, 5120, 6144, 7168, 8192, 10240, 12288, 14336, 16384),
)
# The most tokens of a captured step with prefill on one GPU, and for each of several. The kernels
# of larger steps run longer than most hosts take to launch them: 2.5 ms a layer with one rank, and
# 4 to 8 with two (H200s, Intel Xeon), where the kernels of 8,192 tokens take 5.
CAPTURED_ALONE, CAPTURED_PER_RANK = 2048, 4096


def decode_sizes(max_num_seqs: int) -> list[int]:
    """Batch sizes to capture, closest together where padding costs most."""
    sizes = [1, 2, 4, *range(8, 64, 8), *range(64, 256, 16), *range(256, 1025, 64)]
    return [size for size in sizes if size < max_num_seqs] + [max_num_seqs]


def verification_sizes(max_num_seqs: int) -> list[int]:
    """Batch sizes to capture, fewer than for plain decodes: each needs graphs of every width."""
    sizes = [1, 2, 4, 8, 16, 24, 32, 48, *range(64, 257, 32), *range(384, 1025, 128)]
    return [size for size in sizes if size < max_num_seqs] + [max_num_seqs]


def prefill_sizes(max_num_tokens: int, num_ranks: int = 1, *, lanes: bool = False) -> list[int]:
    """Numbers of tokens to capture for steps with prefill of up to max_num_tokens.

    No size is below PREFILL_SIZES[0]; smaller steps are padded to it.

    Args:
        num_ranks: that divide these tokens.
        lanes: the ranks are data-parallel.
    """
    most = CAPTURED_ALONE if num_ranks == 1 and not lanes else CAPTURED_PER_RANK * num_ranks
    sizes = [size for size in PREFILL_SIZES if size <= min(most, max_num_tokens)]
    within = PREFILL_SIZES[0] <= max_num_tokens <= most
    return sorted({*sizes, max_num_tokens}) if within else sizes


@dataclass(frozen=True, slots=True, kw_only=True)
class StepLimits:
    """The sizes of the largest steps, and of captured steps.

    Attributes:
        num_tokens: tokens of a step with prefill.
        num_seqs: sequences of a decode.
        max_len: tokens of the longest sequence.
        decode_graphs: sizes of captured steps with one token of each sequence.
        verify_graphs: sizes of captured steps that verify drafts, in sequences.
        prefill_graphs: sizes of captured steps with prefill, in tokens.
        draft_kinds: the kinds of decodes with drafts (DeviceDrafts.kinds). The draft head never
            runs if this is ((1, 0),).
    """

    num_tokens: int
    num_seqs: int
    max_len: int
    decode_graphs: tuple[int, ...] = ()
    verify_graphs: tuple[int, ...] = ()
    prefill_graphs: tuple[int, ...] = ()
    draft_kinds: tuple[tuple[int, int], ...] = ((1, 0),)

    @property
    def drafts(self) -> tuple[int, ...]:
        """Numbers of drafts that a decode may verify for each sequence."""
        return tuple(sorted({width - 1 for width, _ in self.draft_kinds}))

    @property
    def draft_tokens(self) -> int:
        return max(self.drafts)

    @property
    def always_captured(self) -> int:
        """The largest number of tokens up to which every step with prefill has a graph."""
        return max(self.prefill_graphs, default=0)

    @property
    def captures_all_prefills(self) -> bool:
        """Whether graphs run every step with prefill: not with drafts, whose head runs outside."""
        return self.always_captured >= self.num_tokens and not self.draft_tokens

    @property
    def graphs(self) -> tuple[int, ...]:
        """Sizes of all captured steps."""
        return self.decode_graphs + self.verify_graphs + self.prefill_graphs

    @property
    def captures_decodes(self) -> bool:
        return bool(self.decode_graphs or self.verify_graphs)

    @property
    def num_graphs(self) -> int:
        """Number of captured graphs. A step of a drafting engine has a verify graph for each width,
        and a draft graph for each kind.
        """
        count = len(self.decode_graphs) + len(self.prefill_graphs)
        if self.draft_tokens:
            wide = [width for width, _ in self.draft_kinds if width > 1]
            count += len(self.decode_graphs)
            count += len(self.verify_graphs) * (len(set(wide)) + len(wide))
        return count


def step_limits(
    config: EngineConfig,
    sizes: StepSizes,
    model_config: ModelConfig,
    can_capture: bool,
    max_len: int,
) -> StepLimits:
    """The sizes of the largest steps and of the graphs to capture."""
    decodes: Iterable[int] = ()
    verifies: Iterable[int] = ()
    prefills: tuple[int, ...] = ()
    kinds = draft_kinds(config, model_config)
    if can_capture and not config.enforce_eager:
        captures_decodes = config.role != "prefill"
        if captures_decodes and any(width == 1 for width, _ in kinds):
            # "auto" pads steps without drafts as an engine that does not draft.
            decodes = config.graph_sizes or decode_sizes(sizes.num_seqs)
        if captures_decodes and config.draft_tokens:
            verifies = config.graph_sizes or verification_sizes(sizes.num_seqs)
        if config.graph_sizes is None:
            ranks, lanes = config.tensor_parallel_size or 1, config.data_parallel_size > 1
            prefills = tuple(prefill_sizes(sizes.num_tokens, ranks, lanes=lanes))
    return StepLimits(
        num_tokens=sizes.num_tokens,
        num_seqs=sizes.num_seqs,
        max_len=max_len,
        decode_graphs=tuple(sorted(set(decodes))),
        verify_graphs=tuple(sorted(set(verifies))),
        prefill_graphs=prefills,
        draft_kinds=kinds,
    )


def draft_kinds(config: EngineConfig, model_config: ModelConfig) -> tuple[tuple[int, int], ...]:
    """The kinds of decodes: tokens for each sequence, and drafts that it gets after the step."""
    if config.draft_tokens == "auto":
        most, block = model_config.max_draft_tokens, model_config.draft_block_tokens > 0
        return tuple([(kind.width, kind.drafts) for kind in step_kinds(most, block=block)])
    return ((1 + config.draft_tokens, config.draft_tokens),)

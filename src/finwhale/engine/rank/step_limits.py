"""The sizes of the largest steps and of captured steps, which follow from the configuration."""

from collections.abc import Iterable
from dataclasses import dataclass

from finwhale.config import EngineConfig
from finwhale.engine.plan.draft_policy import step_kinds
from finwhale.engine.rank.draft_decode import verification_sizes
from finwhale.engine.rank.graphs import decode_sizes, prefill_sizes
from finwhale.models.protocol import ModelConfig


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
    def graphs(self) -> tuple[int, ...]:
        """Sizes of all captured steps."""
        return self.decode_graphs + self.verify_graphs + self.prefill_graphs

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
    config: EngineConfig, model_config: ModelConfig, can_capture: bool, max_len: int
) -> StepLimits:
    """The sizes of the largest steps and of the graphs to capture."""
    decodes: Iterable[int] = ()
    verifies: Iterable[int] = ()
    prefills: tuple[int, ...] = ()
    most = config.max_num_batched_tokens
    kinds = draft_kinds(config, model_config)
    if can_capture and not config.enforce_eager:
        if any(width == 1 for width, _ in kinds):
            # "auto" pads steps without drafts as an engine that does not draft.
            decodes = config.graph_sizes or decode_sizes(config.max_num_seqs)
        if config.draft_tokens:
            verifies = config.graph_sizes or verification_sizes(config.max_num_seqs)
        if config.graph_sizes is None:
            prefills = tuple(prefill_sizes(most, config.tensor_parallel_size or 1))
    return StepLimits(
        num_tokens=most,
        num_seqs=config.max_num_seqs,
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

"""Loaded FP4 experts to what the Triton kernels read, with a warning where a value is lost."""

import logging

from finwhale.ops.moe import ExpertWeight
from finwhale.ops.moe.triton_fold import finish

logger = logging.getLogger(__name__)


def finish_experts(w: ExpertWeight) -> ExpertWeight:
    """In place; see triton_fold.finish for what it keeps exactly."""
    folded, changed = finish(w)
    count = int(changed)
    if count:
        logger.warning(
            "%d values of FP4 experts are rounded: their row's exponents lie too far apart", count
        )
    return folded

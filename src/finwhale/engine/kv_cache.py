"""The tensors behind the pages: sized from a memory budget and the model's declaration."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from finwhale.engine.pages import windowed_pages
from finwhale.errors import ResourceError
from finwhale.models.deepseek_v4.cache_spec import CacheGroup, FieldName, PagedCache


@dataclass(frozen=True, slots=True)
class CachePlan:
    """How many pages each group gets.

    Attributes:
        num_pages: by group, page 0 included.
        capacity_tokens: tokens that the groups which keep everything hold together.
        reserve_multiple: the tokens of one of their pages.
        total_bytes: of all pools.
    """

    num_pages: dict[str, int]
    capacity_tokens: int
    reserve_multiple: int
    total_bytes: int


def plan_cache(
    groups: Sequence[CacheGroup],
    *,
    itemsize: int,
    packed: bool = False,
    budget_bytes: int,
    max_num_seqs: int,
    max_step_tokens: int,
    wanted_tokens: int,
) -> CachePlan:
    """Share budget_bytes out: what forgets gets what it can ever need, the rest what is left.

    Args:
        itemsize, packed: bytes of an activation, and whether rows are packed.
        wanted_tokens: no more capacity than this.

    Raises:
        ResourceError: the budget does not hold one page of everything.
    """
    windowed = [g for g in groups if g.keep is not None]
    keeping = [g for g in groups if g.keep is None]
    num_pages: dict[str, int] = {
        g.name: windowed_pages(g, max_num_seqs, max_step_tokens) for g in windowed
    }
    fixed = sum(num_pages[g.name] * g.page_bytes(itemsize, packed) for g in windowed)
    multiple = max((g.tokens_per_page for g in keeping), default=1)
    assert all(multiple % g.tokens_per_page == 0 for g in keeping)
    per_multiple = sum(
        multiple // g.tokens_per_page * g.page_bytes(itemsize, packed) for g in keeping
    )
    wanted = -(-wanted_tokens // multiple)
    if keeping:
        # One page of each is page 0.
        fixed += sum(g.page_bytes(itemsize, packed) for g in keeping)
        wanted = min(wanted, (budget_bytes - fixed) // per_multiple)
    if wanted < 1 or (not keeping and fixed > budget_bytes):
        raise ResourceError(
            f"the cache needs at least {fixed + per_multiple:,} bytes for {max_num_seqs} sequences "
            f"and {max_step_tokens} tokens a step, but {budget_bytes:,} are available: lower "
            "max_num_seqs or max_num_batched_tokens, or give cache_memory_bytes"
        )
    num_pages |= {g.name: 1 + wanted * (multiple // g.tokens_per_page) for g in keeping}
    return CachePlan(
        num_pages=num_pages,
        capacity_tokens=wanted * multiple,
        reserve_multiple=multiple,
        total_bytes=fixed + wanted * per_multiple,
    )


def allocate_cache(
    groups: Sequence[CacheGroup],
    plan: CachePlan,
    dtype: torch.dtype,
    device: torch.device,
    packed: bool = False,
) -> PagedCache:
    """The pools of every field and layer, as PagedCache describes them."""
    pools: dict[FieldName, dict[int, torch.Tensor]] = {}
    for group in groups:
        pages, rows = plan.num_pages[group.name], group.rows_per_page
        for field in group.fields:
            pools[field.name] = {}
            for layer in field.layers:
                if packed and not field.full_precision:
                    page_bytes = field.page_bytes(rows, dtype.itemsize, packed)
                    pool = torch.empty(pages, page_bytes, dtype=torch.uint8, device=device)
                    pool[:1].zero_()
                else:
                    field_dtype = torch.float32 if field.full_precision else dtype
                    pool = torch.empty(pages * rows, field.width, dtype=field_dtype, device=device)
                    pool[:rows].zero_()
                # Masked slots read page 0: it must hold numbers.
                pools[field.name][layer] = pool
    return PagedCache(pools)

"""Plans and allocates the cache tensors from a memory budget and the model's declaration."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from finwhale.engine.plan.pages import pages_at_block_end, windowed_pages
from finwhale.engine.ranks.arena import Arena
from finwhale.errors import ResourceError
from finwhale.models.cache import CacheField, CacheGroup, PagedCache, PageLayout

# Once every sequence can run, 1/STATE_SHARE of the remaining memory is for the states at block ends
# from which other sequences resume. A state of Flash takes as much memory as five blocks, and a
# conversation of some thousand tokens needs one or two states.
STATE_SHARE = 8


@dataclass(frozen=True, slots=True)
class CachePlan:
    """The number of pages of each group.

    Attributes:
        num_pages: number of pages by group, including page 0.
        capacity_tokens: number of tokens for which the groups that keep every row have pages.
        num_states: number of block-end states that fit beside the running sequences' pages.
        total_bytes: bytes of all pools.
    """

    num_pages: dict[str, int]
    capacity_tokens: int
    num_states: int
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
    least_tokens: int = 1,
    prefix_caching: bool = False,
    drafts: bool = False,
    moving_states: int = 0,
) -> CachePlan:
    """Divide budget_bytes among the groups.

    A group that drops old rows gets all pages that its sequences can need. The other groups and the
    states at block ends share the rest.

    Args:
        itemsize, packed: bytes of an activation, and whether rows are packed.
        wanted_tokens: upper limit of the capacity.
        least_tokens: states get memory only once the capacity is at least this.
        prefix_caching: the cache also keeps states at block ends.
        moving_states: number of states on their way to or from a prefix store.

    Raises:
        ResourceError: budget_bytes cannot hold one page of each group.
    """
    windowed = [g for g in groups if g.keep is not None]
    keeping = [g for g in groups if g.keep is None]
    page_bytes = {g.name: g.page_bytes(itemsize, packed) for g in groups}
    num_pages = {g.name: 1 for g in keeping}  # page 0
    num_pages |= {
        g.name: windowed_pages(g, max_num_seqs, max_step_tokens, prefix_caching, drafts)
        + moving_states * pages_at_block_end(g)
        for g in windowed
    }
    fixed = sum(count * page_bytes[name] for name, count in num_pages.items())
    left = budget_bytes - fixed
    block = windowed[0].block_tokens if keeping else 1
    per_block = sum(g.pages_of_block * page_bytes[g.name] for g in keeping)
    per_state = sum(pages_at_block_end(g) * page_bytes[g.name] for g in windowed)
    wanted, states = -(-wanted_tokens // block), 0
    if keeping:
        wanted = min(wanted, left // per_block)
        if prefix_caching and wanted > 0 and per_state:
            least = min(wanted, -(-least_tokens // block))
            for_states = left // STATE_SHARE // per_state * per_state
            wanted = min(wanted, max(least, (left - for_states) // per_block))
            states = min(wanted, (left - wanted * per_block) // per_state)
    if wanted < 1 or left < 0:
        raise ResourceError(
            f"the cache needs at least {fixed + per_block:,} bytes for {max_num_seqs} sequences "
            f"and {max_step_tokens} tokens a step, but {budget_bytes:,} are available: lower "
            "max_num_seqs or max_num_batched_tokens, or give cache_memory_bytes"
        )
    num_pages |= {g.name: 1 + wanted * g.pages_of_block for g in keeping}
    for g in windowed:
        num_pages[g.name] += states * pages_at_block_end(g)
    return CachePlan(
        num_pages=num_pages,
        capacity_tokens=wanted * block,
        num_states=states,
        total_bytes=fixed + wanted * per_block + states * per_state,
    )


def allocate_cache(
    groups: Sequence[CacheGroup],
    plan: CachePlan,
    dtype: torch.dtype,
    device: torch.device,
    packed: bool = False,
    arena: Arena | None = None,
) -> PagedCache:
    """Allocate the memory of every group, with each layer's views (see PagedCache).

    Args:
        arena: allocate the memory there; None: with torch.
    """
    pools: dict[str, dict[int, torch.Tensor]] = {}
    memory: dict[str, torch.Tensor] = {}
    groups_of = {field.name: group.name for group in groups for field in group.fields}
    for group in groups:
        layout = group.layout(dtype.itemsize, packed)
        num_pages = plan.num_pages[group.name]
        shape = num_pages, layout.page_bytes
        if arena is None:
            pages = torch.empty(shape, dtype=torch.uint8, device=device)
        else:
            pages = arena.empty(num_pages * layout.page_bytes).view(shape)
        # Kernels read page 0 for masked slots, so it must hold finite numbers. On a GPU, memory was
        # used before, and the bytes that no step writes must be the same on all ranks.
        pages[: 1 if device.type == "cpu" else num_pages].zero_()
        memory[group.name] = pages
        for field in group.fields:
            pools[field.name] = {
                layer: _pool(pages, group, field, layout, layout.offsets[field.name, layer], dtype)
                for layer in field.layers
            }
    return PagedCache(pools, groups_of, memory)


def _pool(
    pages: torch.Tensor,
    group: CacheGroup,
    field: CacheField,
    layout: PageLayout,
    offset: int,
    dtype: torch.dtype,
) -> torch.Tensor:
    """View of one layer's rows in all pages; its part of a page begins at `offset`."""
    if not layout.row_bytes:
        return pages[:, offset : offset + field.record.page_bytes(group.rows_per_page)]
    dtype = torch.float32 if field.full_precision else dtype
    rows = pages.view(dtype).view(-1, layout.row_bytes // dtype.itemsize)
    first = offset // dtype.itemsize
    return rows[:, first : first + field.width]

"""Page tables by slot, as the step plans have told them."""

from collections.abc import Sequence

from finwhale.engine.plan.pages import BlockTable, BlockTables
from finwhale.engine.plan.step_plan import StepPlan


class SlotTables:
    """What a rank knows of the engine's page tables.

    Args:
        groups: names of the model's cache groups.
    """

    def __init__(self, groups: Sequence[str]) -> None:
        self._groups = tuple(groups)
        self._tables: dict[int, BlockTables] = {}

    def __getitem__(self, slot: int) -> BlockTables:
        return self._tables[slot]

    def versions(self, slots: Sequence[int]) -> list[object]:
        """An object for each slot that changes whenever its tables change."""
        tables = self._tables
        return [tables[slot].version for slot in slots]

    def apply(self, plan: StepPlan) -> None:
        """Take over what a plan says."""
        for slot in plan.freed:
            self._tables.pop(slot, None)
        for slot, group, first, begin, pages in plan.pages:
            tables = self._tables.get(slot)
            if tables is None:
                tables = self._tables[slot] = BlockTables(
                    (name, BlockTable()) for name in self._groups
                )
            name = self._groups[group]
            if begin:
                table = tables[name]
                assert table.first == first and len(table.pages) >= begin
                table.pages[begin:] = pages
            else:
                # A new object: whoever has the old one sends all of this one.
                table = tables[name] = BlockTable(first, list(pages))
            # Never shared between slots: a version names the contents.
            table.version = tables.version = object()

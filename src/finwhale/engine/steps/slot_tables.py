"""The rank's copy of the engine's page tables, by slot, updated by step plans."""

from collections.abc import Sequence

from finwhale.engine.plan.pages import BlockTable, BlockTables
from finwhale.engine.plan.step_plan import StepPlan


class SlotTables:
    """The page tables of all slots. `groups` are the names of the model's cache groups."""

    def __init__(self, groups: Sequence[str]) -> None:
        self._groups = tuple(groups)
        self._tables: dict[int, BlockTables] = {}

    def __getitem__(self, slot: int) -> BlockTables:
        return self._tables[slot]

    def versions(self, slots: Sequence[int]) -> list[object]:
        """The version of each slot's tables: a new object whenever they change."""
        tables = self._tables
        return [tables[slot].version for slot in slots]

    def apply(self, plan: StepPlan) -> None:
        """Apply the page updates of a plan."""
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
                # StaticInputs sends a table in full if its object is new.
                table = tables[name] = BlockTable(first, list(pages))
            # A version identifies the contents, so two slots never share one.
            table.version = tables.version = object()

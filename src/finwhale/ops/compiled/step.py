"""What a compiled graph reads of a step, as a flat list of tensors, and back."""

from dataclasses import dataclass

from torch import Tensor

from finwhale.ops.paging import PageTable, Tokens
from finwhale.ops.slots import write_slots


@dataclass(frozen=True, slots=True)
class StepTensors:
    """How a table's `prepare_qkv` finds positions and rows.

    Attributes:
        packed: kernels read page tables; else the rotation and the slots are read, which the
            step's memo holds.
        rows_per_page: of the window's pages.
    """

    packed: bool
    rows_per_page: int

    def flat(self, tokens: Tokens, table: PageTable, rotary_LR: Tensor) -> list[Tensor]:
        """Of one step and one kind of layer."""
        if self.packed:
            places = [tokens.positions, tokens.sequence, tokens.query_start]
            return [*places, table.pages, table.first, rotary_LR]
        return [tokens.positions, tokens.rotation(rotary_LR), write_slots(tokens, table)]

    def back(self, tensors: list[Tensor]) -> tuple[Tokens, PageTable, Tensor]:
        """Tokens, the window's table and the rotary table of what `flat` gave."""
        if self.packed:
            positions, sequence, query_start, pages, first, rotary = tensors
            tokens = Tokens(positions, sequence, query_start, max_len=0, max_query=0)
            return tokens, PageTable(pages, first, self.rows_per_page), rotary
        positions, rotation, slots = tensors
        tokens = Tokens(positions, positions, positions, max_len=0, max_query=0)
        table = PageTable(positions, positions, self.rows_per_page)
        # Where Tokens.rotation and slots.write_slots look first: the rows stand for their table.
        tokens.memo["rotation", id(rotation)] = rotation, rotation
        tokens.memo["write", table] = slots
        return tokens, table, rotation

"""The tables that the compiled mode traces: operators that a compiler can follow or call.

An operator is either plain torch, which is compiled into the graph (cpu.py), or a custom operator of
torch.library (registered.py), which the graph calls. The default mode needs neither.
"""

from dataclasses import dataclass

from finwhale.ops import Ops
from finwhale.ops.compiled import cpu
from finwhale.ops.compiled.registered import namespace, registered


@dataclass(frozen=True, slots=True)
class TracedTable:
    """The table to trace, and the name under which its custom operators are registered."""

    ops: Ops
    namespace: str


def traced_table(ops: Ops) -> TracedTable:
    """The table to trace in place of `ops`; registers its custom operators, once a process.

    To be called when a model is constructed: a compiled graph finds its operators only if they are
    registered before it is loaded, and a process that loads one never traces.
    """
    table = registered(ops)
    return TracedTable(table if ops.packed else cpu.traced(table), namespace(ops))

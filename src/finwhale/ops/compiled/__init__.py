"""The tables that the compiled mode traces: operators that a compiler can follow or call.

An operator is either plain torch, which is compiled into the graph (cpu.py), or a custom operator
of torch.library (registered.py), which the graph calls. The default mode needs neither.
"""

from dataclasses import dataclass, replace

from finwhale.ops import Ops
from finwhale.ops.compiled import cpu
from finwhale.ops.compiled.registered import custom, namespace
from finwhale.ops.linear.ref import grouped_input
from finwhale.ops.moe import ExpertWeight


@dataclass(frozen=True, slots=True)
class TracedTable:
    """The table to trace, and the name under which its custom operators are registered.

    Attributes:
        whole: attention and experts can be in the graph as well.
    """

    ops: Ops
    namespace: str
    whole: bool

    def expert_weight(self, w: ExpertWeight) -> ExpertWeight:
        """Routed experts' weights as a graph reads them."""
        return cpu.columns(w)


def table_of_compiled(ops: Ops) -> Ops:
    """The table of a model whose layers are compiled: graphs take attention's output in one form,
    however many tokens there are, and larger steps beside them must have the same bits.
    """
    return replace(ops, grouped_input=grouped_input)


def traced_table(ops: Ops) -> TracedTable:
    """The table to trace in place of `ops`; registers its custom operators, once a process.

    To be called when a model is constructed: a compiled graph finds its operators only if they are
    registered before it is loaded, and a process that loads one never traces.
    """
    table = custom(ops)
    whole = ops.capabilities.compiled_layers == "whole"
    if whole:
        table = cpu.traced(table)
    return TracedTable(table, namespace(ops), whole=whole)

"""The compiled mode: decoder layers run as graphs that are compiled ahead of time and cached.

    (x, post_mix, res_mix, residual) -> [enter] -> compress, select, attend -> [leave] -> experts

`CompiledMode` is the entry point. LayerTracer traces a graph from DecoderLayer's own methods,
GraphStore compiles it with inductor or loads it, and a CompiledLayer calls it. Weights, caches and
the step are arguments of the graph, so layers of one kind share it.

An operator in a graph is a custom operator of torch.library, which the graph calls (custom_ops.py);
on a CPU most are plain torch, which is compiled with the graph (cpu_ops.py). Without the compiled
mode, no custom operators are registered.
"""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from finwhale.compiled.compiled_layer import CompiledLayer
from finwhale.compiled.cpu_ops import traced
from finwhale.compiled.custom_ops import custom, namespace
from finwhale.compiled.graph_store import GraphStore
from finwhale.compiled.layer_tracer import LayerTracer
from finwhale.errors import FinwhaleError
from finwhale.models.cache import PagedCache
from finwhale.models.deepseek_v4.cache_spec import cache_spec
from finwhale.models.deepseek_v4.config import DeepseekV4Config
from finwhale.models.deepseek_v4.dspark import DsparkHead
from finwhale.models.deepseek_v4.model import DeepseekV4
from finwhale.models.deepseek_v4.mtp import MtpLayer
from finwhale.models.protocol import Model, ModelConfig
from finwhale.ops import Ops
from finwhale.ops.linear.ref import grouped_form


class CompiledMode:
    """Compiles a model's decoder layers.

    Create this object before the model, and create the model with its operator table `ops`. The
    constructor registers the custom operators, because they must be registered before a graph that
    calls them is loaded.

    Args:
        ops: the platform's operator table.

    Raises:
        FinwhaleError: these layers cannot be compiled.

    Attributes:
        ops: the operator table for the model. It uses one form of attention's output for any number
            of tokens, because a graph accepts only one.
    """

    def __init__(self, ops: Ops, config: ModelConfig) -> None:
        if not isinstance(config, DeepseekV4Config):
            raise FinwhaleError("the compiled mode is for DeepSeek-V4 alone: leave out compile")
        self.ops = replace(ops, grouped_form=grouped_form)
        self._namespace = namespace(self.ops)
        registered = custom(self.ops)
        self._traced = registered if ops.capabilities.packed_cache else traced(registered)

    def compile_layers(self, model: Model, cache: PagedCache, directory: Path) -> int:
        """Replace the decoder layers of a model and of its draft head by compiled ones.

        Args:
            directory: the directory of the graphs; created if missing.

        Returns:
            Number of graphs that were compiled. The others were loaded.

        Raises:
            ResourceError: a graph cannot be traced, compiled, kept or loaded.
        """
        store = GraphStore(directory, model.device, self._namespace)
        for part, tracers in self.tracers(model, cache):
            part.layers = [CompiledLayer(tracer, store) for tracer in tracers]
        return store.num_compiled

    def tracers(
        self, model: Model, cache: PagedCache
    ) -> Iterator[tuple[DeepseekV4 | MtpLayer | DsparkHead, list[LayerTracer]]]:
        """The model and its draft head, each with the tracers of its decoder layers."""
        assert isinstance(model, DeepseekV4)
        (window,) = (g for g in cache_spec(model.config) if g.name == "window")
        rows = window.rows_per_page
        for part in (model, model.draft_head):
            if part is not None:
                yield (
                    part,
                    [
                        LayerTracer(model, self._traced, layer, cache, rows, first=i == 0)
                        for i, layer in enumerate(part.layers)
                    ],
                )

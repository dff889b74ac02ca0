"""What all layers of a rank share."""

from dataclasses import dataclass, replace

from finwhale.models.deepseek_v4.config import DeepseekV4Config
from finwhale.models.deepseek_v4.streams import SideStreams
from finwhale.models.deepseek_v4.tensor_parallel import TensorParallel
from finwhale.ops import Ops


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerContext:
    """The model of one rank, as its layers and its draft head see it.

    Attributes:
        config: the sizes of this rank's part.
        round_activations: round activations, cached kv and indexer inputs as the model was trained.
    """

    config: DeepseekV4Config
    ops: Ops
    round_activations: bool
    side_streams: SideStreams
    ranks: TensorParallel

    def of_layer(self, layer: int) -> "LayerContext":
        """The context of a layer. The draft head's layers follow the model's."""
        return replace(self, config=self.config.of_layer(layer))

"""Fills a rank's weights from a checkpoint or an update, and checks that they are complete."""

from collections.abc import Iterable, Mapping
from dataclasses import fields, replace

import torch
from torch import Tensor

from finwhale.checkpoint.collection import no_collection
from finwhale.checkpoint.destinations import Destinations
from finwhale.checkpoint.joint import JointRanks
from finwhale.checkpoint.loading import StoredWeight
from finwhale.checkpoint.spec import Storage, WeightSpec
from finwhale.distributed.rank import ALONE, Rank
from finwhale.errors import CheckpointError
from finwhale.models.deepseek_v4.config import DeepseekV4Config
from finwhale.models.deepseek_v4.layer import LayerWeights
from finwhale.models.deepseek_v4.model import ModelWeights
from finwhale.models.deepseek_v4.weight_builder import WeightBuilder
from finwhale.models.weight_protocol import WeightStream, tensors_of
from finwhale.ops import Ops
from finwhale.ops.moe import ExpertWeight


class WeightLoading:
    """A rank's weights during loading, one tensor after the other, in any order.

    Args:
        config: the configuration of the whole model.
        storages: the stored format of each weight.
    """

    def __init__(
        self,
        config: DeepseekV4Config,
        *,
        storages: Mapping[str, Storage],
        dtype: torch.dtype,
        device: torch.device,
        round_activations: bool,
        ops: Ops,
        round_wo_a: bool = True,
        rank: Rank = ALONE,
    ) -> None:
        with no_collection():
            self._builder = WeightBuilder(
                config,
                dtype=dtype,
                device=device,
                round_activations=round_activations,
                round_wo_a=round_wo_a,
                ops=ops,
                storages=storages,
                rank=rank,
            )
        self._ops = ops
        self._waiting = dict(self._builder.setters)
        self._read_directly: list[str] = []

    @property
    def num_bytes(self) -> int:
        return self._builder.num_bytes

    @property
    def destinations(self) -> Destinations:
        """See WeightBuilder.destinations."""
        return self._builder.destinations

    def add(self, spec: WeightSpec, stored: StoredWeight | None) -> None:
        """Copy a stored weight to its targets; None: its bytes have gone to its destination.

        Raises:
            CheckpointError: the weight occurs twice, is unknown, or has invalid values.
        """
        setter = self._waiting.pop(spec.name, None)
        if setter is None:
            raise CheckpointError(f"tensor {spec.name} occurs twice or is not in this model")
        assert spec.slice == self._builder.specs[spec.name].slice, "a stream of another rank"
        if stored is None:
            self._read_directly.append(spec.name)
        else:
            setter(stored)

    def fill(self, stream: WeightStream, ranks: JointRanks | None = None) -> ModelWeights:
        """Add every weight of `stream`, one at a time, and return the loaded weights.

        Args:
            ranks: the ranks that load together, if they can read for each other.

        Raises:
            CheckpointError: a tensor occurs twice, is unknown, or is missing.
        """
        with no_collection():
            for spec, stored in stream.into(self.destinations, ranks):
                self.add(spec, stored)
        return self.finish()

    def finish_unfilled(self) -> ModelWeights:
        """The weights without their values, on the meta device."""
        self._waiting.clear()
        return self.finish()

    def finish(self) -> ModelWeights:
        """The loaded weights. Raises CheckpointError if one is missing."""
        if self._waiting:
            waiting = self._waiting
            raise CheckpointError(f"{len(waiting)} tensors are missing, such as {min(waiting)}")
        self._builder.complete(self._read_directly)
        if self._builder.device.type == "cuda":
            # Free the temporary tensors of loading now. Otherwise converting the experts allocates
            # small tensors in their segments, and each one keeps up to a gigabyte reserved.
            torch.cuda.empty_cache()
        weights = self._builder.weights
        return _with_experts(weights, map(self._ops.finish_experts, _experts_of(weights)))

    def finish_part(
        self, device: torch.device, current: ModelWeights
    ) -> tuple[ModelWeights, frozenset[int]]:
        """The weights, some of which may be missing.

        A tensor that contains several weights must have all of them, or none.

        Args:
            device: the device on which the operators convert the experts. The results return to the
                device of the other weights.
            current: the weights that are updated. Missing experts are taken from them, because the
                operators may convert experts to other tensors than those that were loaded.

        Returns:
            The weights, and the ids (`id`) of the tensors in them that are complete.

        Raises:
            CheckpointError: a tensor has only some of its weights.
        """
        targets = self._builder.targets
        arrived = {_memory(t) for name in targets.keys() - self._waiting for t in targets[name]}
        for name in sorted(self._waiting):
            if any(_memory(target) in arrived for target in targets[name]):
                raise CheckpointError(
                    f"the update lacks {name}, which shares a packed tensor with weights that it "
                    "has: send them together"
                )
        complete: set[int] = set()

        def convert(experts: ExpertWeight, known: ExpertWeight) -> ExpertWeight:
            if _memory(experts.w13) not in arrived or _memory(experts.w2) not in arrived:
                if _memory(experts.w13) in arrived or _memory(experts.w2) in arrived:
                    raise CheckpointError("the update has only some matrices of a layer's experts")
                return known
            home = experts.w13.device
            done = self._ops.finish_experts(_moved(experts, device))
            done = _moved(done, home)
            complete.update(map(id, tensors_of(done)))
            return done

        staged = self._builder.weights
        converted = map(convert, _experts_of(staged), _experts_of(current))
        weights = _with_experts(staged, converted)
        complete.update(id(t) for t in tensors_of(weights) if _memory(t) in arrived)
        return weights, frozenset(complete)


def _memory(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _moved(experts: ExpertWeight, device: torch.device) -> ExpertWeight:
    tensors = {
        field.name: getattr(experts, field.name).to(device)
        for field in fields(experts)
        if isinstance(getattr(experts, field.name), Tensor)
    }
    return replace(experts, **tensors)


def _experts_of(weights: ModelWeights) -> list[ExpertWeight]:
    """The routed experts of all layers, those of the draft head last."""
    layers = list(weights.layers)
    if weights.mtp is not None:
        layers.append(weights.mtp.layer)
    if weights.dspark is not None:
        layers.extend(weights.dspark.layers)
    return [layer.ffn.experts for layer in layers]


def _with_experts(weights: ModelWeights, experts: Iterable[ExpertWeight]) -> ModelWeights:
    """The weights with other routed experts, in the order of `_experts_of`."""
    rest = iter(experts)

    def changed(layer: LayerWeights) -> LayerWeights:
        return replace(layer, ffn=replace(layer.ffn, experts=next(rest)))

    layers = tuple(changed(layer) for layer in weights.layers)
    mtp, dspark = weights.mtp, weights.dspark
    if mtp is not None:
        mtp = replace(mtp, layer=changed(mtp.layer))
    if dspark is not None:
        dspark = replace(dspark, layers=tuple(changed(layer) for layer in dspark.layers))
    return replace(weights, layers=layers, mtp=mtp, dspark=dspark)

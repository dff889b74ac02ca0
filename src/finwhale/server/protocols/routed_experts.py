"""Routed experts in answers: arrays in base64."""

from typing import Any

from finwhale.request import ExpertIds
from finwhale.server.link.wire import Delta


class RoutedExpertFields:
    """The routed experts of one prompt's continuations, as fields of an answer. `prompt` is the
    field of the prompt; empty: the request wants none."""

    def __init__(self) -> None:
        self.prompt: dict[str, Any] = {}
        self._outputs: dict[int, ExpertIds] = {}

    def add(self, delta: Delta) -> None:
        """Take the experts that a continuation's delta has, if any."""
        if delta.milestone is None:
            return
        if delta.milestone.prompt_routed_experts is not None:
            self.prompt = {"prompt_routed_experts": encoded(delta.milestone.prompt_routed_experts)}
        if delta.milestone.routed_experts is not None:
            self._outputs[delta.index] = delta.milestone.routed_experts

    def choice(self, index: int, num_tokens: int) -> dict[str, Any]:
        """The field `routed_experts` of a choice; empty: the request wants none.

        Args:
            num_tokens: number of tokens of the answer. The last one has no experts.
        """
        if index not in self._outputs:
            return {}
        return {"routed_experts": encoded(self._outputs[index][: max(0, num_tokens - 1)])}


def encoded(ids: ExpertIds) -> dict[str, Any]:
    """An array as JSON: its bytes in C order (`json_pieces` writes base64), shape and dtype."""
    return {"data": ids.tobytes(), "shape": list(ids.shape), "dtype": ids.dtype.name}

"""The start of Ray's actors fails: the placement group is freed. A stand-in replaces Ray."""

import sys
from importlib.util import find_spec, module_from_spec
from types import ModuleType
from typing import Any

import pytest

from finwhale.errors import FinwhaleError


class RayError(Exception):
    pass


class GetTimeoutError(RayError):
    pass


class FakeRay:
    """The functions of Ray that Actors calls. `get` raises `error` for the actor's answer.

    Attributes:
        groups: the placement groups that exist.
    """

    def __init__(self, error: BaseException) -> None:
        self.error = error
        self.groups: list[FakeRay] = []

    def placement_group(self, *_: Any, **__: Any) -> "FakeRay":
        self.groups.append(self)
        return self

    def ready(self) -> str:
        return "ready"

    def get(self, reference: object, timeout: float) -> None:
        if reference != "ready":
            raise self.error

    def __call__(self, *_: Any, **__: Any) -> "FakeRay":
        return self

    def __getattr__(self, name: str) -> "FakeRay":
        return self  # an actor's class, the actor, and its methods


def actors_module(fake: FakeRay, monkeypatch: pytest.MonkeyPatch) -> Any:
    def module(name: str, **values: Any) -> None:
        made = ModuleType(name)
        vars(made).update(values)
        monkeypatch.setitem(sys.modules, name, made)

    module("ray", get=fake.get, remote=fake, is_initialized=lambda: True)
    module("ray.exceptions", RayError=RayError, GetTimeoutError=GetTimeoutError)
    module("ray.util", get_node_ip_address=lambda: "127.0.0.1")
    module(
        "ray.util.placement_group",
        placement_group=fake.placement_group,
        remove_placement_group=fake.groups.remove,
    )
    module("ray.util.scheduling_strategies", PlacementGroupSchedulingStrategy=fake)
    spec = find_spec("finwhale.distributed.ray_actors")
    assert spec is not None and spec.loader is not None
    found = module_from_spec(spec)
    spec.loader.exec_module(found)
    return found


@pytest.mark.parametrize(
    ("error", "kind", "message"),
    [
        (RayError("Traceback:\n  ...\nOSError: no GPU\n"), FinwhaleError, "ranks: OSError: no"),
        (RayError(), FinwhaleError, "Ray cannot start the ranks: RayError$"),
        (GetTimeoutError(), FinwhaleError, "Ray has not placed the ranks within"),
        (KeyboardInterrupt(), KeyboardInterrupt, None),
    ],
)
def test_the_placement_group_is_freed(
    error: BaseException,
    kind: type[BaseException],
    message: str | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fake = FakeRay(error)
    with pytest.raises(kind, match=message):
        actors_module(fake, monkeypatch).Actors(2, "cuda")
    assert not fake.groups

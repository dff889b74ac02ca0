"""The endpoints for trainers: vLLM's, and SGLang's names for the same.

A body holds plain data. Nothing that a client sends is unpickled.
"""

from collections.abc import Callable, Coroutine
from operator import methodcaller
from typing import Annotated, Any, Literal

from fastapi import Depends, FastAPI, Query, Request
from pydantic import Field
from starlette.responses import Response

from finwhale.errors import EngineDeadError, FinwhaleError, RequestError
from finwhale.request import Requests
from finwhale.server.edge.listening import check_origin
from finwhale.server.errors import ApiError, StoppingError
from finwhale.server.protocols.body_route import BodyRoute
from finwhale.server.protocols.schemas import Body, described
from finwhale.server.sse import unless_disconnected
from finwhale.server.state import ServerState
from finwhale.weights.group_defaults import GROUP_NAME, TIMEOUT_S

Name = Annotated[str, Field(min_length=1, max_length=512)]
Names = Annotated[list[Name], Field(fail_fast=True)]
Size = Annotated[int, Field(ge=0, lt=2**48)]
Shapes = Annotated[list[Annotated[list[Size], Field(max_length=8)]], Field(fail_fast=True)]
Tag = Literal["weights", "kv_cache", "cache"]
Tags = Annotated[list[Tag], Field(max_length=8)]
# SGLang's words for keeping requests are "in_place" and "retract".
PauseMode = Literal["abort", "keep", "in_place", "retract"]
_NO_EFFECT = "no effect"


class PauseBody(Body):
    mode: PauseMode | None = None


class NoBody(Body):
    """An object without fields."""


class TagsBody(Body):
    tags: Tags | None = None


class GroupBody(Body):
    """A process group: `init_info` of vLLM, or the body of SGLang."""

    master_address: Name
    master_port: Annotated[int, Field(ge=1, lt=2**16)]
    rank_offset: Annotated[int, Field(ge=1, lt=2**16)] = 1
    world_size: Annotated[int, Field(ge=2, lt=2**16)] | None = None
    group_name: Name = GROUP_NAME
    backend: Literal["nccl", "gloo"] | None = None
    timeout_seconds: Annotated[float, Field(gt=0, le=86_400)] = described(
        "extension: time limit for connecting and for a broadcast", TIMEOUT_S
    )


class InitBody(Body):
    init_info: GroupBody | None = Field(description="null: CUDA IPC, which needs no group")


class GroupNameBody(Body):
    group_name: Name = GROUP_NAME


class StartBody(Body):
    partial: bool = described("extension: accept some of the weights", False)
    is_checkpoint_format: Literal[True] = described(_NO_EFFECT, True)


class HandleBody(Body):
    """A handle of CUDA IPC (finwhale.distributed.cuda_ipc); the strings are base64."""

    memory: Name
    size_bytes: Size
    offset_bytes: Size
    counter: Name
    counter_offset: Size
    event: Name
    waits: bool


class UpdateInfo(Body):
    names: Names
    dtype_names: Names
    shapes: Shapes
    group_name: Name = described("extension", GROUP_NAME)
    packed: Literal[False] = described(_NO_EFFECT, False)
    ipc_handles: Annotated[dict[str, HandleBody], Field(max_length=64)] | None = described(
        "handles by the UUID of their GPU, whose buffer holds the tensors one after "
        "the other; null: the trainer broadcasts the tensors"
    )


class UpdateBody(Body):
    update_info: UpdateInfo


class DistributedBody(Body):
    """SGLang's body of an update over a process group."""

    names: Names
    dtypes: Names
    shapes: Shapes
    group_name: Name = GROUP_NAME
    weight_version: Name | None = None
    flush_cache: bool = described("no effect: the cache is always cleared", True)
    abort_all_requests: Literal[False] = described(_NO_EFFECT, False)
    load_format: None = described(_NO_EFFECT)


class FinishBody(Body):
    weight_version: Name | None = None
    requests: Requests = described("extension: what becomes of running requests", "recompute")


class DiskBody(Body):
    model_path: Annotated[str, Field(min_length=1, max_length=4096)]
    weight_version: Name | None = None
    abort_all_requests: bool = False
    load_format: None = described(_NO_EFFECT)
    flush_cache: bool = described("no effect: the cache is always cleared", True)
    is_async: Literal[False] = described(_NO_EFFECT, False)


# Bodies that a client may leave out.
_PAUSE, _NOTHING, _ALL_TAGS = PauseBody(), NoBody(), TagsBody()
_START, _FINISH = StartBody(), FinishBody()
OK = {"success": True, "message": "done"}


class CallRoute(BodyRoute):
    """A route whose call ends when its client leaves."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()

        async def watched(request: Request) -> Response:
            await request.body()  # only one may receive at a time
            return await unless_disconnected(request, handle(request))

        return watched


class Endpoints:
    """The endpoints of one server. Each may have several paths."""

    def __init__(self, app: FastAPI, state: ServerState, responses: dict[int | str, Any]) -> None:
        """Adds the endpoints, if the server has them; otherwise each answers why it has not."""
        self._app, self._state, self._responses = app, state, responses
        get, post = ["GET"], ["POST"]
        for methods, handler, *paths in (
            (post, self.pause, "/pause", "/pause_generation"),
            (post, self.resume, "/resume", "/continue_generation"),
            (get, self.is_paused, "/is_paused"),
            (post, self.sleep, "/sleep"),
            (post, self.wake, "/wake_up"),
            (post, self.release, "/release_memory_occupation"),
            (post, self.reclaim, "/resume_memory_occupation"),
            (get, self.is_sleeping, "/is_sleeping"),
            (post, self.reset_cache, "/reset_prefix_cache"),
            (get + post, self.reset_cache, "/flush_cache"),
            (post, self.init, "/init_weight_transfer_engine"),
            (post, self.init_group, "/init_weights_update_group"),
            (post, self.destroy_group, "/destroy_weights_update_group"),
            (post, self.start, "/start_weight_update"),
            (post, self.update, "/update_weights"),
            (post, self.update_distributed, "/update_weights_from_distributed"),
            (post, self.update_from_disk, "/update_weights_from_disk"),
            (post, self.finish, "/finish_weight_update"),
            (get, self.version, "/weight_info", "/get_weight_version"),
            (get, self.world_size, "/get_world_size"),
        ):
            for path in paths:
                for method in methods:
                    self._add(path, method, handler)

    def _add(self, path: str, method: str, handler: Callable[..., Any]) -> None:
        if self._state.config.enable_rollout_endpoints:
            self._app.router.add_api_route(
                path,
                handler,
                route_class_override=CallRoute,
                methods=[method],
                name=f"{method} {path}",
                responses=self._responses,
                dependencies=[Depends(self._check)],
            )
        else:
            self._app.add_api_route(path, _refuse, methods=[method], include_in_schema=False)

    def _check(self, request: Request) -> None:
        """Checks what FastAPI does not. Raises ApiError."""
        check_origin(request, self._state.config.cors_origins)
        known = {one.name for one in request.scope["route"].dependant.query_params}
        for name in request.query_params:
            if name not in known:
                message = f"unknown parameter: {name}"
                raise ApiError(400, message, code="unknown_parameter", param=name)

    async def _call(self, method: str, **arguments: Any) -> dict[str, Any]:
        """Calls RolloutControl.METHOD. Raises ApiError and what `EngineClient.call` raises."""
        try:
            return await self._state.client.call(methodcaller(method, **arguments)) or OK
        except (RequestError, EngineDeadError, StoppingError):
            raise
        except FinwhaleError as error:
            raise ApiError(400, str(error), code="rollout_refused") from error

    async def pause(
        self, mode: PauseMode = "abort", clear_cache: bool = False, body: PauseBody = _PAUSE
    ) -> dict[str, str]:
        """Runs no more steps until /resume. `abort` ends all requests; otherwise they wait."""
        await self._call("pause", abort=(body.mode or mode) == "abort")
        if clear_cache:
            await self.reset_cache()
        return {"status": "paused"}

    async def resume(self, body: NoBody = _NOTHING) -> dict[str, str]:
        """Ends an update that has begun, then continues. The engine stays paused if that fails."""
        await self._call("resume")
        return {"status": "resumed"}

    async def is_paused(self) -> dict[str, bool]:
        return {"is_paused": (await self._call("status"))["is_paused"]}

    async def sleep(
        self,
        level: Annotated[int, Query(ge=1, le=2)] = 1,
        mode: Literal["abort", "keep"] = "abort",
        tags: Annotated[list[Tag] | None, Query()] = None,
    ) -> dict[str, Any]:
        """Frees memory. Level 2 drops the weights, level 1 saves them."""
        return await self._call(
            "sleep", tags=_tags(tags), drop_weights=level == 2, abort=mode == "abort"
        )

    async def wake(self, tags: Annotated[list[Tag] | None, Query()] = None) -> dict[str, Any]:
        """Allocates memory again. Ends an update that has begun, unless the engine is paused or
        still sleeps.
        """
        return await self._call("wake", tags=_tags(tags))

    async def release(self, body: TagsBody = _ALL_TAGS) -> dict[str, Any]:
        """/sleep of level 1, which keeps requests."""
        return await self.sleep(1, "keep", body.tags)

    async def reclaim(self, body: TagsBody = _ALL_TAGS) -> dict[str, Any]:
        """/wake_up."""
        return await self.wake(body.tags)

    async def is_sleeping(self) -> dict[str, bool]:
        return {"is_sleeping": (await self._call("status"))["is_sleeping"]}

    async def reset_cache(self) -> dict[str, Any]:
        """Clears the prefix cache: later requests reuse no prefix that is cached now."""
        return await self._call("reset_prefix_cache")

    async def init(self, body: InitBody) -> dict[str, str]:
        """Joins a process group with a trainer."""
        if body.init_info is not None:
            await self.init_group(body.init_info)
        return {"message": "Weight transfer initialized"}

    async def init_group(self, body: GroupBody) -> dict[str, Any]:
        """Joins a process group with a trainer. Answers when all members have joined."""
        return await self._call("join", **body.model_dump())

    async def destroy_group(self, body: GroupNameBody) -> dict[str, Any]:
        """Leaves a process group."""
        return await self._call("leave", group_name=body.group_name)

    async def start(self, body: StartBody = _START) -> dict[str, str]:
        """Begins an update; /update_weights then sends its weights."""
        await self._call("begin", partial=body.partial)
        return {"message": "Weight update started"}

    async def update(self, body: UpdateBody) -> dict[str, str]:
        """Receives weights over a process group or over CUDA IPC.

        If an update has begun, or the engine is paused or sleeps, the weights are staged until
        /finish_weight_update, or until the engine goes on. Otherwise the call must send all
        weights, and they take effect now.
        """
        info = body.update_info
        await self._call(
            "update", names=info.names, dtypes=info.dtype_names, shapes=info.shapes, version=None,
            group=info.group_name, handles=info.model_dump(include={"ipc_handles"})["ipc_handles"],
        )  # fmt: skip
        return {"message": "Weights updated"}

    async def update_distributed(self, body: DistributedBody) -> dict[str, Any]:
        """/update_weights over a process group."""
        return await self._call(
            "update", names=body.names, dtypes=body.dtypes, shapes=body.shapes,
            version=body.weight_version, group=body.group_name, handles=None,
        )  # fmt: skip

    async def update_from_disk(self, body: DiskBody) -> dict[str, Any]:
        """Replaces all weights by those of a checkpoint's directory on the server's host."""
        return await self._call(
            "update_from_directory", path=body.model_path,
            version=body.weight_version, abort=body.abort_all_requests,
        )  # fmt: skip

    async def finish(self, body: FinishBody = _FINISH) -> dict[str, str]:
        """Writes the weights of the update that has begun."""
        await self._call("finish", version=body.weight_version, requests=body.requests)
        return {"message": "Weight update finished"}

    async def version(self) -> dict[str, str]:
        """The version of the current weights."""
        return {"weight_version": (await self._call("status"))["weight_version"]}

    async def world_size(self) -> dict[str, int]:
        """The number of ranks."""
        return {"world_size": (await self._call("status"))["world_size"]}


def _tags(given: list[Tag] | None) -> tuple[str, ...]:
    """The engine's words for tags; None: all."""
    wanted = given or ["weights", "cache"]
    return tuple("weights" if tag == "weights" else "cache" for tag in dict.fromkeys(wanted))


async def _refuse() -> None:
    message = "this server has no rollout endpoints: start it with --enable-rollout-endpoints"
    raise ApiError(404, message, code="no_rollout_endpoints")

"""The endpoints for trainers, over a real socket. tests/long/test_rollout_endpoints.py has more."""

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import httpx2 as httpx
import pytest
from tests.engine.trainers import HOST, InThread, free_port, listening, port_of
from tests.support.tensors import read_tensors

from finwhale import LLM
from finwhale.demo import DEMO_PATH
from finwhale.engine.loop import weight_updates
from finwhale.engine.ranks.staged_weights import StagedWeights
from finwhale.errors import FinwhaleError
from finwhale.server.link.rollout_control import RolloutControl

from .rollouts import Asked, info_of, leave, send
from .running import RunningServer

Start = Callable[..., RunningServer]
REFUSAL = "this server has no rollout endpoints: start it with --enable-rollout-endpoints"


@pytest.fixture
def server(start: Start, demo_llm: LLM) -> Iterator[Asked]:
    yield Asked(start(enable_rollout_endpoints=True).url)
    demo_llm.resume()
    if demo_llm._engine.stops:
        demo_llm.wake()


def test_a_trainer_changes_some_weights(server: Asked) -> None:
    tensors = [("norm.weight", read_tensors(DEMO_PATH)["norm.weight"])]
    other = [(name, tensor.flip(0)) for name, tensor in tensors]
    before = server.answer()
    assert server.get("/get_world_size") == {"world_size": 1}
    assert server.get("/weight_info") == {"weight_version": "0"}
    trainer = server.group("weight_update_group", "/init_weight_transfer_engine")
    assert server.post("/pause?mode=keep") == {"status": "paused"}
    for sent, version in ((other, "step 7"), (tensors, None)):
        server.post("/start_weight_update", {"partial": True})
        sending = send(trainer, sent)
        server.post("/update_weights", {"update_info": info_of(sent)})
        sending.end()
        server.post("/finish_weight_update", {"weight_version": version})
        assert server.get("/weight_info") == {"weight_version": version or "2"}
        assert server.post("/resume") == {"status": "resumed"}
        assert (server.answer() == before) == (sent is tensors)
    server.post("/destroy_weights_update_group", {})
    trainer.close()


def test_a_trainer_that_says_nothing(server: Asked, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch would wait for ever."""
    monkeypatch.setattr(weight_updates, "LATE_S", 0.3)
    with listening() as listener:
        place = {"master_address": HOST, "master_port": port_of(listener)}
        refusal = server.refusal(
            "/init_weights_update_group", place | {"timeout_seconds": 0.2, "world_size": 2}
        )
    assert "has not answered within 0.2 s" in refusal
    assert server.answer()


def test_a_call_without_a_trainer(server: Asked) -> None:
    """It has a time limit, ends when its client leaves, and stops no request meanwhile."""
    before = server.answer()
    place = {"master_address": HOST, "master_port": free_port(), "timeout_seconds": 300}
    waiting = InThread(lambda: httpx.post(f"{server.url}/init_weights_update_group", json=place,
                                          timeout=3))  # fmt: skip
    assert server.answer() == before, "while the call waits"
    with pytest.raises(httpx.ReadTimeout):
        waiting.end()
    leave(server.url)
    assert "was not complete within 0.2 s" in server.refusal(
        "/init_weights_update_group", place | {"timeout_seconds": 0.2}
    )
    trainer = server.group("weight_update_group", "/init_weight_transfer_engine")
    tensors = [("norm.weight", read_tensors(DEMO_PATH)["norm.weight"])]
    server.post("/start_weight_update", {"partial": True})
    body = {"update_info": info_of(tensors)}
    with pytest.raises(httpx.ReadTimeout):  # the trainer sends nothing
        httpx.post(f"{server.url}/update_weights", json=body, timeout=0.5)
    assert server.answer() == before
    assert "no update" in server.refusal("/finish_weight_update", {})
    trainer.close()


def test_an_unexpected_error_is_no_fault_of_the_client(
    server: Asked, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(StagedWeights, "read", lambda self, path: 1 / 0)
    error = server.post("/update_weights_from_disk", {"model_path": "x"}, status=500)["error"]
    assert error["code"] == "internal_error" and "Zero" not in error["message"]
    assert server.answer()


def test_ipc_handles_are_plain_data(server: Asked) -> None:
    handle = {"memory": "AAAA", "size_bytes": 8, "offset_bytes": 0, "counter": "AAAA",
              "counter_offset": 0, "event": "AAAA", "waits": False}  # fmt: skip
    info = {"names": ["norm.weight"], "dtype_names": ["float32"], "shapes": [[64]]}

    def refused(**more: object) -> str:
        return server.refusal("/update_weights", {"update_info": info | more})

    server.post("/init_weight_transfer_engine", {"init_info": None})
    assert "ipc_handles_pickled" in refused(ipc_handles_pickled="gASVAAAA")
    size = {"GPU-1": handle | {"size_bytes": "8"}}
    assert "Input should be a valid integer" in refused(ipc_handles=size)
    assert "not base64" in refused(ipc_handles={"GPU-1": handle | {"event": "!"}})
    server.post("/start_weight_update", {"partial": True})
    assert "norm.weight is F32 [1]" in refused(ipc_handles={"GPU-1": handle}, shapes=[[1]])
    server.post("/update_weights_from_tensor", {"serialized_named_tensors": ["gASV"]}, status=404)


def test_only_an_option_serves_them(start: Start) -> None:
    server = Asked(start().url)
    for path in ("/pause", "/sleep", "/update_weights", "/init_weights_update_group"):
        assert server.post(path, {}, status=404)["error"]["message"] == REFUSAL
    assert httpx.get(server.url + "/flush_cache").json()["error"]["message"] == REFUSAL
    assert "/pause" not in server.get("/openapi.json")["paths"]


def test_they_need_a_key_and_no_foreign_page(start: Start) -> None:
    server = start(enable_rollout_endpoints=True, api_keys=("secret-of-ann",))
    assert httpx.post(server.url + "/pause").status_code == 401
    headers = {"authorization": "Bearer secret-of-ann"}
    assert httpx.get(server.url + "/is_paused", headers=headers).json() == {"is_paused": False}
    foreign = httpx.post(server.url + "/pause", headers=headers | {"origin": "http://a.example"})
    assert foreign.status_code == 403
    unknown = httpx.post(server.url + "/pause?wait_for_inflight_requests=true", headers=headers)
    assert unknown.json()["error"]["param"] == "wait_for_inflight_requests"
    assert not server.engine.stops


def test_an_engine_resumes_only_after_its_update_has_finished() -> None:
    events: list[str] = []
    engine: Any = SimpleNamespace(lock=nullcontext(), allow=lambda _: events.append("resume"))
    control = RolloutControl(engine, lambda _: None)
    for failure in (FinwhaleError("a scale is missing"), None):
        finish = Mock(side_effect=failure or (lambda: events.append("finish")))
        control.updates = SimpleNamespace(begun=True, finish=finish)  # type: ignore[assignment]
        with nullcontext() if failure is None else pytest.raises(FinwhaleError):
            control.resume()
    assert events == ["finish", "resume"]

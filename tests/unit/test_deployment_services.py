"""The systemd unit and the Kubernetes manifests: valid, hardened, and in step with how a node behaves."""

import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from kmirror_dagster.coordination.http_guard import OPEN_PATHS
from kmirror_dagster.coordination.runtime import NodeRuntime
from kmirror_dagster.settings import load_node, node_from_document
from tests.helpers.dockerfiles import read_dockerfile

ROOT = Path(__file__).parents[2]
UNIT = ROOT / "deploy" / "systemd" / "kmirror-node@.service"
MANIFESTS = sorted((ROOT / "deploy" / "kubernetes").glob("*.yaml"))
DOCUMENTS = [
    (file, document)
    for file in MANIFESTS
    for document in yaml.safe_load_all(file.read_text(encoding="utf-8"))
]
ANALYZE = shutil.which("systemd-analyze")
KUBERNETES = ("1.28", "1.31", kubernetes_validate.latest_version())


def drain_s() -> float:
    defaults: dict[str, Any] = NodeRuntime.__init__.__kwdefaults__ or {}
    return float(defaults["drain_s"])


def directives() -> dict[str, list[str]]:
    """Settings of the unit's service section, each with all its values."""
    found: dict[str, list[str]] = {}
    for line in UNIT.read_text(encoding="utf-8").splitlines():
        if line and line[0] not in "#[":
            name, _, value = line.partition("=")
            found.setdefault(name, []).append(value)
    return found


def manifest(kind: str, name: str = "kmirror") -> dict[str, Any]:
    (found,) = (d for _, d in DOCUMENTS if d["kind"] == kind and d["metadata"]["name"] == name)
    return found


def container() -> dict[str, Any]:
    (found,) = manifest("StatefulSet")["spec"]["template"]["spec"]["containers"]
    return found


def test_unit_is_restarted_and_drained() -> None:
    """A node comes back whatever ended it, for as long as it takes, and is not killed while it drains."""
    unit = directives()
    assert unit["Restart"] == ["always"]
    assert unit["StartLimitIntervalSec"] == ["0"]
    assert unit["KillSignal"] == ["SIGTERM"]
    assert float(unit["TimeoutStopSec"][0]) >= drain_s() + 10


@pytest.mark.parametrize(
    ("directive", "value"),
    [
        ("DynamicUser", "yes"),
        ("NoNewPrivileges", "yes"),
        ("ProtectSystem", "strict"),
        ("ProtectHome", "yes"),
        ("PrivateTmp", "yes"),
        ("PrivateDevices", "yes"),
        ("CapabilityBoundingSet", ""),
        ("RestrictAddressFamilies", "AF_INET AF_INET6 AF_UNIX"),
        ("SystemCallFilter", "@system-service"),
        ("StateDirectoryMode", "0700"),
    ],
)
def test_unit_is_hardened(directive: str, value: str) -> None:
    """The service has a user of its own, sees what it needs, and may write to its state directory only."""
    assert directives()[directive] == [value]


def test_instances_have_directories_ports_and_tokens() -> None:
    """Instances share settings and token, not their state directory and port; the token is a credential."""
    environment = dict(entry.split("=", 1) for entry in directives()["Environment"])
    assert environment["KMIRROR_STATE_DIR"] == f"%S/{directives()['StateDirectory'][0]}"
    assert "%i" in environment["KMIRROR_STATE_DIR"]
    assert "%i" in environment["KMIRROR_API_PORT"]
    credentials = {entry.split(":")[0] for entry in directives()["LoadCredential"]}
    assert environment["KMIRROR_TOKEN_FILE"] == "%d/api_token"
    assert "api_token" in credentials
    example = ROOT / "deploy" / "systemd" / "node.yaml"
    settings = load_node(
        example,
        {
            "KMIRROR_API_PORT": "8081",
            "DESTINATION_PASSWORD": "p",
            "CREDENTIALS_DIRECTORY": "/run/credentials/x",
        },
    )
    assert settings.api_port == 8081
    assert settings.api_tls_key == "/run/credentials/x/api_key"
    assert "api_key" in credentials


def test_systemd_accepts_the_unit(tmp_path: Path) -> None:
    """systemd, where it is installed, knows every directive and finds the service little exposed."""
    text = UNIT.read_text(encoding="utf-8")
    assert re.findall(r"^\[(\w+)\]$", text, re.MULTILINE) == ["Unit", "Service", "Install"]
    assert all(re.match(r"([A-Za-z]+=|#|\[|$)", line) for line in text.splitlines())
    if ANALYZE is None:
        return  # the form is what can be checked here
    # the command is not installed where the tests run
    unit = tmp_path / UNIT.name
    unit.write_text(text.replace("/opt/kmirror/bin/kmirror", shutil.which("true") or "/bin/true"))
    for arguments in (("verify", "--man=no"), ("security", "--offline=yes", "--threshold=20", "--no-pager")):
        command = [ANALYZE, *arguments, str(unit)]
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
        assert done.returncode == 0, done.stdout + done.stderr
        assert arguments[0] != "verify" or not done.stderr, done.stderr


@pytest.mark.parametrize("version", KUBERNETES)
def test_manifests_are_valid(version: str) -> None:
    """Every manifest has the form that Kubernetes of these versions asks for, with no unknown field."""
    for file, document in DOCUMENTS:
        try:
            kubernetes_validate.validate(document, version, strict=True)
        except kubernetes_validate.ValidationError as error:
            pytest.fail(f"{file.name}: {document['kind']}: {error}")


def test_a_mistake_in_a_manifest_is_found() -> None:
    """The validator is one: a misspelt field is refused."""
    wrong = {**manifest("PodDisruptionBudget"), "spec": {"maxUnavailabel": 1}}
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(wrong, KUBERNETES[-1], strict=True)


def test_manifests_fit_together() -> None:
    """Selectors find the pods, the governing service exists, what is mounted is defined."""
    labels = manifest("StatefulSet")["spec"]["template"]["metadata"]["labels"]
    spec = manifest("StatefulSet")["spec"]
    selectors = [
        spec["selector"]["matchLabels"],
        manifest("Service")["spec"]["selector"],
        manifest("Service", "kmirror-nodes")["spec"]["selector"],
        manifest("PodDisruptionBudget")["spec"]["selector"]["matchLabels"],
        manifest("NetworkPolicy")["spec"]["podSelector"]["matchLabels"],
    ]
    assert all(selector == labels for selector in selectors)
    assert manifest("Service", spec["serviceName"])["spec"]["clusterIP"] == "None"
    pod = spec["template"]["spec"]
    assert {mount["name"] for mount in container()["volumeMounts"]} == {v["name"] for v in pod["volumes"]}
    assert pod["serviceAccountName"] == manifest("ServiceAccount")["metadata"]["name"]
    ports = {port["name"]: port["containerPort"] for port in container()["ports"]}
    for name in ("kmirror", "kmirror-nodes"):
        (port,) = manifest("Service", name)["spec"]["ports"]
        assert port["targetPort"] in ports
        assert port["port"] == ports[port["targetPort"]]


def test_three_nodes_of_which_one_may_be_away() -> None:
    """Three replicas, of which a drain of a machine or an update takes one at a time."""
    spec = manifest("StatefulSet")["spec"]
    assert spec["replicas"] == 3
    assert manifest("PodDisruptionBudget")["spec"]["maxUnavailable"] == 1
    assert spec["minReadySeconds"] > 0


def test_probes_ask_what_needs_no_token() -> None:
    """Liveness and start ask whether the process answers, readiness whether it leads what it was assigned."""
    paths = {
        name: container()[f"{name}Probe"]["httpGet"]["path"] for name in ("startup", "liveness", "readiness")
    }
    assert paths == {"startup": "/health/live", "liveness": "/health/live", "readiness": "/health/ready"}
    assert set(paths.values()) <= OPEN_PATHS
    assert (
        manifest("StatefulSet")["spec"]["template"]["spec"]["terminationGracePeriodSeconds"] >= drain_s() + 10
    )


def test_pods_are_hardened() -> None:
    """Not root, nothing to gain, a root file system that cannot be written, no token of the cluster's API."""
    pod = manifest("StatefulSet")["spec"]["template"]["spec"]
    _, stages = read_dockerfile(ROOT / "docker" / "Dockerfile")
    user = int(stages["node"].all("USER")[-1].partition(":")[0])
    assert pod["securityContext"]["runAsNonRoot"] is True
    assert pod["securityContext"]["runAsUser"] == user
    assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    assert pod["automountServiceAccountToken"] is False
    assert container()["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }


def test_pods_get_settings_and_secrets() -> None:
    """The node's settings load with what the pod is given, secrets come as files, and fit the memory limit."""
    environment = {entry["name"]: entry.get("value", "kmirror-1") for entry in container()["env"]}
    mounts = {mount["name"]: mount["mountPath"] for mount in container()["volumeMounts"]}
    keys = manifest("Secret")["stringData"]
    files = {name: value for name, value in environment.items() if name.endswith("_FILE")}
    assert {value.removeprefix(f"{mounts['secrets']}/") for value in files.values()} == set(keys)
    values = {name.removesuffix("_FILE"): "secret" for name in files}
    text = manifest("ConfigMap")["data"]["node.yaml"]
    settings = node_from_document(yaml.safe_load(text), {**environment, **values})
    assert settings.api_advertised_host == "kmirror-1.kmirror-nodes"
    assert settings.api_port == container()["ports"][0]["containerPort"]
    assert settings.memory_budget_bytes == 256 * 1024 * 1024
    assert container()["resources"]["limits"] == {"memory": "1Gi"}
    assert mounts["settings"] == "/etc/kmirror"
    assert mounts["state"] == environment["KMIRROR_STATE_DIR"]

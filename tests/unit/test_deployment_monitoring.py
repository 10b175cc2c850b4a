"""Prometheus and Grafana as they are delivered: what they name exists, and each alert is explained and tested."""

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.helpers.exposition import busy_exposition
from tests.helpers.promql import TARGET_LABELS, read_expression

ROOT = Path(__file__).parents[2]
DOCKER = ROOT / "docker"
ALERTS = DOCKER / "prometheus" / "alerts.yaml"
ALERTS_TEST = DOCKER / "prometheus" / "alerts_test.yaml"
DASHBOARD = DOCKER / "grafana" / "dashboards" / "kmirror.json"
PROMTOOL = shutil.which("promtool")


def loaded(path: Path) -> Any:
    return yaml.safe_load(path.read_text(encoding="utf-8"))


def rules() -> list[dict[str, Any]]:
    return [rule for group in loaded(ALERTS)["groups"] for rule in group["rules"]]


def alerts() -> dict[str, dict[str, Any]]:
    return {rule["alert"]: rule for rule in rules() if "alert" in rule}


def panels() -> list[dict[str, Any]]:
    return [panel for panel in json.loads(DASHBOARD.read_text())["panels"] if panel["type"] != "row"]


def queries() -> list[tuple[str, str, str]]:
    """Title, expression and legend of everything the dashboard asks for."""
    return [(p["title"], t["expr"], t["legendFormat"]) for p in panels() for t in p["targets"]]


@pytest.fixture(scope="module")
def labels() -> dict[str, set[str]]:
    """Labels of every metric there is: exported by a node, made by Prometheus, or recorded by a rule."""
    known = busy_exposition().labels
    known["up"] = set()
    for rule in rules():
        if "record" in rule:
            known[rule["record"]] = read_expression(rule["expr"]).grouped
    return known


def assert_exported(expression: str, labels: dict[str, set[str]]) -> None:
    found = read_expression(expression)
    assert found.metrics, expression
    for metric, selected in found.metrics.items():
        assert metric in labels, f"{metric} is not exported: {expression}"
        assert selected <= labels[metric] | TARGET_LABELS, f"{metric}{selected}: {expression}"
    every = set().union(TARGET_LABELS, *(labels[metric] for metric in found.metrics))
    assert found.grouped <= every, expression


def test_alerts_name_what_nodes_export(labels: dict[str, set[str]]) -> None:
    """Every metric and label in a rule is one that a node really exports."""
    for rule in rules():
        assert_exported(rule["expr"], labels)


def test_dashboard_names_what_nodes_export(labels: dict[str, set[str]]) -> None:
    """Every metric and label in a panel, its legend and the variables is one that a node really exports."""
    for title, expression, legend in queries():
        assert_exported(expression, labels)
        metrics = read_expression(expression).metrics
        for label in re.findall(r"\{\{(\w+)\}\}", legend):
            assert label in set().union(TARGET_LABELS, *(labels[m] for m in metrics)), title
    for variable in json.loads(DASHBOARD.read_text())["templating"]["list"]:
        if variable["type"] == "query":
            matched = re.fullmatch(r"label_values\((.+), (\w+)\)", variable["definition"])
            assert matched is not None
            assert_exported(matched[1], labels)


@pytest.mark.parametrize(
    "metric",
    [
        "kmirror_lag_records",
        "kmirror_lag_seconds",
        "kmirror_partitions",
        "kmirror_failed_partition_info",
        "kmirror_copied_records_total",
        "kmirror_copied_bytes_total",
        "kmirror_copied_resyncs_total",
        "kmirror_refresh_duration_seconds",
        "kmirror_refresh_errors_total",
        "kmirror_refresh_step_errors",
        "kmirror_rebalances_total",
        "process_cpu_seconds_total",
        "process_resident_memory_bytes",
    ],
)
def test_dashboard_shows_what_people_look_for(metric: str) -> None:
    """Lag, states, throughput, resyncs, refreshes, rebalances, CPU and memory each have a panel."""
    assert any(metric in expression for _, expression, _ in queries())


@pytest.mark.parametrize(
    ("alert", "metric"),
    [
        ("KmirrorNodeDown", "up"),
        ("KmirrorPartitionWithoutLeader", "kmirror_led_coordinator_partitions"),
        ("KmirrorPartitionFailed", "kmirror_failed_partitions"),
        ("KmirrorLagOverRpo", "kmirror_rpo_seconds"),
        ("KmirrorRefreshStale", "kmirror_refresh_finished_timestamp_seconds"),
        ("KmirrorRefreshErrors", "kmirror_refresh_step_errors"),
        ("KmirrorQuarantinedRecords", "kmirror_quarantined_records"),
        ("KmirrorRebalancing", "kmirror_rebalances_total"),
    ],
)
def test_what_must_not_go_unnoticed_has_an_alert(alert: str, metric: str) -> None:
    """Nodes, leaders, states, lag, refreshes, unreadable state and a restless group are watched."""
    assert metric in read_expression(alerts()[alert]["expr"]).metrics


def test_alerts_are_explained() -> None:
    """Each says how bad it is, what it means and what to do, in the rule and in docs/operations.md."""
    page = (ROOT / "docs" / "operations.md").read_text(encoding="utf-8")
    for name, rule in alerts().items():
        assert rule["labels"]["severity"] in ("critical", "warning"), name
        assert {"summary", "description", "runbook"} <= rule["annotations"].keys(), name
        assert f"`{name}`" in page, f"{name} is not in docs/operations.md"
    assert set(re.findall(r"`(Kmirror\w+)`", page)) <= alerts().keys()


def test_alerts_are_tested() -> None:
    """For each alert promtool is given a case in which it fires."""
    fired = {
        case["alertname"]
        for test in loaded(ALERTS_TEST)["tests"]
        for case in test.get("alert_rule_test", ())
        if case["exp_alerts"]
    }
    assert fired == alerts().keys()


def test_alert_tests_use_what_nodes_export(labels: dict[str, set[str]]) -> None:
    """The series that promtool is fed have the labels that nodes give them."""
    for test in loaded(ALERTS_TEST)["tests"]:
        for series in test["input_series"]:
            ((metric, given),) = read_expression(series["series"]).metrics.items()
            assert given == labels[metric] | TARGET_LABELS, series["series"]


def test_prometheus_accepts_rules_dashboard_and_settings(tmp_path: Path) -> None:
    """promtool, where there is one, accepts the rules, runs their tests, and parses every query of the dashboard."""
    asked = [
        {"record": f"panel:{number}", "expr": re.sub(r"\$__rate_interval", "1m", expression)}
        for number, (_, expression, _) in enumerate(queries())
    ]
    for rule in asked:
        assert rule["expr"].count("(") == rule["expr"].count(")")
        assert rule["expr"].count("{") == rule["expr"].count("}")
    if PROMTOOL is None:
        return  # the structure is what can be checked here
    generated = tmp_path / "dashboard.yaml"
    generated.write_text(yaml.safe_dump({"groups": [{"name": "dashboard", "rules": asked}]}))
    for arguments in (
        ("check", "rules", str(ALERTS)),
        ("test", "rules", str(ALERTS_TEST)),
        ("check", "rules", str(generated)),
        ("check", "config", "--syntax-only", str(DOCKER / "prometheus" / "prometheus.yaml")),
    ):
        done = subprocess.run(
            [PROMTOOL, *arguments], capture_output=True, text=True, check=False, timeout=120
        )
        assert done.returncode == 0, done.stdout + done.stderr


def test_dashboard_is_laid_out_and_refers_to_its_variables() -> None:
    """Panels do not overlap, have ids of their own, and ask the data source that was chosen."""
    document = json.loads(DASHBOARD.read_text())
    ids = [panel["id"] for panel in document["panels"]]
    assert len(ids) == len(set(ids))
    taken: set[tuple[int, int]] = set()
    for panel in document["panels"]:
        grid = panel["gridPos"]
        assert grid["x"] + grid["w"] <= 24
        cells = {
            (x, y)
            for x in range(grid["x"], grid["x"] + grid["w"])
            for y in range(grid["y"], grid["y"] + grid["h"])
        }
        assert not cells & taken, panel["title"]
        taken |= cells
    variables = {variable["name"] for variable in document["templating"]["list"]}
    for title, expression, _ in queries():
        used = set(re.findall(r"\$(\w+)", expression)) - {"__rate_interval"}
        assert used <= variables, title
        assert "job" in used, title
    assert {panel["datasource"]["uid"] for panel in panels()} == {"${datasource}"}


def test_grafana_finds_what_is_provisioned() -> None:
    """The data source the dashboard starts with, Prometheus's address and the dashboards' directory fit together."""
    services = loaded(DOCKER / "compose.yaml")["services"]
    (source,) = loaded(DOCKER / "grafana" / "provisioning" / "datasources" / "prometheus.yaml")["datasources"]
    chosen = json.loads(DASHBOARD.read_text())["templating"]["list"][0]["current"]["value"]
    assert source["uid"] == chosen
    assert source["url"] == "http://prometheus:9090"
    assert "prometheus" in services
    (provider,) = loaded(DOCKER / "grafana" / "provisioning" / "dashboards" / "kmirror.yaml")["providers"]
    mounts = dict(volume.split(":")[:2] for volume in services["grafana"]["volumes"])
    assert mounts["./grafana/dashboards"] == provider["options"]["path"]
    assert mounts["./grafana/provisioning"] == "/etc/grafana/provisioning"
    home = services["grafana"]["environment"]["GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH"]
    assert home == f"{provider['options']['path']}/{DASHBOARD.name}"


def test_prometheus_scrapes_every_node_with_the_token() -> None:
    """Targets are the nodes of compose.yaml on the port of node.yaml; the job is the one the rules name."""
    settings = loaded(DOCKER / "prometheus" / "prometheus.yaml")
    (scrape,) = settings["scrape_configs"]
    services = loaded(DOCKER / "compose.yaml")["services"]
    port = loaded(DOCKER / "node.yaml")["api_port"]
    nodes = [name for name in services if name.startswith("node-")]
    assert scrape["static_configs"][0]["targets"] == [f"{name}:{port}" for name in nodes]
    assert scrape["authorization"]["credentials_file"] == "/run/secrets/api_token"
    assert "api_token" in services["prometheus"]["secrets"]
    assert set(re.findall(r'job="(\w+)"', ALERTS.read_text())) == {scrape["job_name"]}
    mounted = {volume.split(":")[1] for volume in services["prometheus"]["volumes"]}
    assert set(settings["rule_files"]) <= mounted

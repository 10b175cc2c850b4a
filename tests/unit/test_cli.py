"""The command line: tables, JSON, errors, exit codes."""

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest

from kmirror_dagster.errors import (
    ClusterUnreachableError,
    IllegalTransitionError,
    KmirrorError,
    MirrorExistsError,
    NodeUnavailableError,
    SameClusterError,
    UnknownMirrorError,
)
from kmirror_dagster.lifecycle import DesiredState, MirrorState
from tests.helpers.command_line import FakeNode, install, kmirror, partition, refused


@pytest.fixture
def node(monkeypatch: pytest.MonkeyPatch) -> FakeNode:
    """The node every command of the test talks to."""
    return install(monkeypatch)


DOCUMENT = """\
mirror: orders
source:
  bootstrap.servers: source.example:9092
destination:
  bootstrap.servers: destination.example:9092
filters:
  topics.include: ["orders.*"]
"""


def test_list_prints_the_columns_of_the_reference(node: FakeNode) -> None:
    """Name, number of topics, source cluster id and bootstrap servers come first, as in KIP-1279."""
    result = kmirror("list")
    assert result.exit_code == 0
    header, row = result.stdout.splitlines()
    assert header.split()[:4] == ["MIRROR", "TOPICS", "SOURCE-CLUSTER-ID", "SOURCE-BOOTSTRAP-SERVER"]
    assert row.split()[:4] == ["orders", "2", "source-id", "source.example:9092"]
    assert row.endswith("4 MIRRORING")


@pytest.mark.parametrize("arguments", [("--json", "list"), ("list", "--json")])
def test_json_is_all_there_is_on_stdout(node: FakeNode, arguments: tuple[str, ...]) -> None:
    """With --json, before or behind the command, stdout is one JSON document."""
    result = kmirror(*arguments)
    assert [m["mirror"] for m in json.loads(result.stdout)] == ["orders"]
    assert result.stderr == ""


def test_describe_prints_the_columns_of_the_reference(node: FakeNode) -> None:
    """Offsets and lag are shown while MIRRORING, and are a dash otherwise or when unknown."""
    node.partitions = [
        partition("orders-eu", 0, MirrorState.MIRRORING),
        partition("orders-eu", 1, MirrorState.PAUSED),
        partition("orders-eu", 2, MirrorState.MIRRORING, source_end_offset=None, lag_records=-1),
        partition("orders-eu", 3, None, desired=DesiredState.MIRRORING),
    ]
    lines = kmirror("describe", "orders").stdout.splitlines()
    assert [line.split() for line in lines] == [
        ["MIRROR", "TOPIC", "PARTITION", "SOURCE-OFFSET", "DESTINATION-OFFSET", "LAG", "STATE"],
        ["orders", "orders-eu", "0", "1000", "990", "10", "MIRRORING"],
        ["orders", "orders-eu", "1", "-", "-", "-", "PAUSED"],
        ["orders", "orders-eu", "2", "-", "992", "-", "MIRRORING"],
        ["orders", "orders-eu", "3", "-", "-", "-", "NONE"],
    ]


def test_describe_failed_shows_retries_and_reasons(node: FakeNode) -> None:
    """FAILED partitions are shown with their retry, or that nobody retries them, and the reason."""
    failed = MirrorState.FAILED
    node.partitions += [
        partition("orders-eu", 7, failed, retry_attempt=3, error="source leader moved"),
        partition("orders-eu", 8, failed, retriable=False, error="foreign write at offset 5"),
    ]
    lines = kmirror("describe", "orders", "--failed").stdout.splitlines()
    assert lines[0].split() == ["MIRROR", "TOPIC", "PARTITION", "RETRY", "ERROR"]
    assert lines[1].split(maxsplit=4)[2:] == ["7", "3/20", "source leader moved"]
    assert lines[2].split(maxsplit=4)[2:] == ["8", "non-retryable", "foreign write at offset 5"]


def test_describe_json_uses_the_names_of_the_reference(node: FakeNode) -> None:
    """JSON has KIP-1279's field names."""
    found = json.loads(kmirror("describe", "orders", "--json").stdout)
    names = {"mirror", "topic", "partition", "sourceOffset", "destinationOffset", "lag", "state"}
    assert names | {"retryAttempt", "errorMessage"} <= found[0].keys()
    assert (found[0]["sourceOffset"], found[0]["state"]) == (1000, "MIRRORING")


def test_describe_selects_partitions(node: FakeNode) -> None:
    """Topic, pattern and state each narrow what is shown."""
    node.partitions[0] = partition("orders-eu", 0, MirrorState.PAUSED)

    def shown(*arguments: str) -> list[tuple[str, int]]:
        found = json.loads(kmirror("describe", "orders", "--json", *arguments).stdout)
        return [(p["topic"], p["partition"]) for p in found]

    assert shown("--topic", "orders-us") == [("orders-us", 0)]
    assert shown("--topics", ".*-us") == [("orders-us", 0)]
    assert shown("--state", "paused") == [("orders-eu", 0)]
    assert shown("--failed") == []


def test_describe_tells_what_cannot_be_mirrored(node: FakeNode) -> None:
    """Errors of topics and of the newest refresh are told below the table."""
    node.topic_error, node.refresh_ok = "exists at the destination and is not empty", False
    below = kmirror("describe", "orders").stdout.split("\n\n")[1]
    assert "topic orders-eu: exists at the destination and is not empty" in below
    assert "topics: orders-eu: not allowed to CREATE topic" in below


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "orders.yaml"
    path.write_text(DOCUMENT)
    return path


def test_create_sends_the_document_as_written(node: FakeNode, file: Path) -> None:
    """The document goes to the node, and both clusters are named."""
    result = kmirror("create", str(file), "--replace", "--wait")
    assert result.exit_code == 0, result.output
    [(_, request)] = node.log
    assert request.replace
    assert request.document["source"] == {"bootstrap.servers": "source.example:9092"}
    assert "source-id" in result.stdout
    assert "destination-id" in result.stdout


def test_create_of_an_empty_mirror_does_not_wait_for_partitions(node: FakeNode, file: Path) -> None:
    """A mirror that no topic belongs to yet is ready after its first refresh."""
    node.partitions = []
    assert kmirror("create", str(file), "--wait", "--timeout", "5").exit_code == 0


def test_a_misspelt_setting_is_refused_before_a_node_is_asked(node: FakeNode, file: Path) -> None:
    """The line names file, line number and the nearest setting; nothing is sent."""
    file.write_text(DOCUMENT.replace("  bootstrap.servers: source", "  bootstrap.server: source"))
    line = refused(kmirror("create", str(file)))
    assert f"{file.name}:3" in line
    assert "bootstrap.servers" in line
    assert node.log == []


def test_a_file_that_does_not_exist_is_named(node: FakeNode, tmp_path: Path) -> None:
    """A missing file is one line and exit code 2."""
    assert "none.yaml" in refused(kmirror("create", str(tmp_path / "none.yaml")))


def test_delete_passes_force_on(node: FakeNode) -> None:
    """--force reaches the node."""
    assert kmirror("delete", "orders").exit_code == 0
    assert kmirror("delete", "orders", "--force").exit_code == 0
    assert node.log == [("delete", False), ("delete", True)]


def test_a_refresh_with_errors_is_exit_code_1(node: FakeNode) -> None:
    """Errors of a refresh are told, the steps printed."""
    assert kmirror("refresh", "orders").exit_code == 0
    node.refresh_ok = False
    result = kmirror("refresh", "orders")
    assert result.exit_code == 1
    assert "orders-eu: not allowed to CREATE topic" in result.stderr
    assert result.stdout.splitlines()[1].split() == ["topics", "failed", "1", "5"]


def test_node_status_tells_what_is_quarantined(node: FakeNode) -> None:
    """Identity, leadership and unreadable records are shown."""
    result = kmirror("node", "status")
    assert "2 of 50 coordinator partitions" in result.stdout
    assert "quarantined record: __mirror_state-3@17" in result.stdout
    assert json.loads(kmirror("node", "status", "--json").stdout)["ready"] is True


def test_node_start_wants_its_settings(tmp_path: Path) -> None:
    """Without a settings file the line says how to name one."""
    line = refused(kmirror("--state-dir", str(tmp_path), "node", "start"))
    assert "node.yaml" in line
    assert "--config" in line


def test_node_stop_is_harmless(tmp_path: Path) -> None:
    """Stopping where no node runs is no error."""
    result = kmirror("node", "stop", "--state-dir", str(tmp_path))
    assert (result.exit_code, result.stdout.strip()) == (0, f"no node runs on {tmp_path}")


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (UnknownMirrorError("there is no mirror 'x'"), 2),
        (IllegalTransitionError("orders/t is STOPPED: use 'start'"), 2),
        (NodeUnavailableError("no node answers"), 2),
        (SameClusterError("source and destination are the same cluster (abc)"), 2),
        (ClusterUnreachableError("cannot reach source"), 2),
        (MirrorExistsError("mirror exists with other settings"), 2),
        (KmirrorError("it did not work"), 1),
        (KeyboardInterrupt(), 130),
        (RuntimeError("a fault\nof two lines"), 1),
    ],
)
def test_each_error_is_one_line_and_its_exit_code(node: FakeNode, error: BaseException, code: int) -> None:
    """No traceback: one line on stderr, the exit code tells whose turn it is."""
    node.error = error
    line = refused(kmirror("resume", "orders"), code)
    if isinstance(error, KeyboardInterrupt):
        assert line == "interrupted"
    elif isinstance(error, KmirrorError):
        assert line == str(error)
    else:
        assert line == (
            "unexpected RuntimeError: a fault of two lines; run again with 'kmirror --debug' for the traceback"
        )


def test_debug_shows_the_traceback(node: FakeNode) -> None:
    """--debug adds the traceback, the exit code stays."""
    node.error = RuntimeError("a fault")
    result = kmirror("--debug", "list")
    assert result.exit_code == 1
    assert "Traceback" in result.stderr
    assert result.stderr.splitlines()[-1] == "kmirror: unexpected RuntimeError: a fault"


def test_an_unknown_mirror_is_named(node: FakeNode) -> None:
    """A name no mirror has is exit code 2."""
    assert "no mirror 'nope'" in refused(kmirror("describe", "nope"))


@pytest.mark.parametrize(
    "arguments",
    [("lst",), ("list", "--jsn"), ("describe",), ("describe", "orders", "--state", "RUNNING"), ("--bogus",)],
)
def test_wrong_usage_is_exit_code_2(node: FakeNode, arguments: tuple[str, ...]) -> None:
    """Unknown commands, options, values and missing arguments are usage errors."""
    result = kmirror(*arguments)
    assert result.exit_code == 2
    assert "Traceback" not in result.output


def test_completion_offers_mirror_names(node: FakeNode, monkeypatch: pytest.MonkeyPatch) -> None:
    """A shell is offered the names of mirrors, and nothing when no node answers."""
    monkeypatch.setenv("_KMIRROR_COMPLETE", "complete_zsh")
    monkeypatch.setenv("_TYPER_COMPLETE_ARGS", "kmirror describe or")
    assert "orders" in kmirror().stdout
    node.error = NodeUnavailableError("none")
    assert "orders" not in kmirror().stdout


def test_help_names_the_exit_codes() -> None:
    """Exit codes are documented in --help."""
    text = " ".join(kmirror("--help").stdout.split())
    assert "2 something has to be changed first" in text
    assert "130 interrupted" in text


def test_help_comes_at_once_and_loads_nothing_heavy() -> None:
    """--help takes less than half a second and imports neither Dagster nor a Kafka client."""
    heavy = ["dagster", "confluent_kafka", "kafka", "fastapi", "httpx", "pydantic.main", "rich.progress"]
    script = (
        "import sys; from kmirror_dagster.cli.main import run; sys.argv[1:] = ['--help']; run(); "
        f"print([name for name in {heavy!r} if name in sys.modules])"
    )
    best = 10.0
    for _ in range(3):
        began = time.monotonic()
        done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
        best = min(best, time.monotonic() - began)
    assert done.stdout.splitlines()[-1] == "[]"
    assert best < 0.5


def test_the_sandbox_extra_is_named_when_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the sandbox's packages the line says how to install them."""

    def missing(name: str) -> None:
        raise ModuleNotFoundError("No module named 'jgo'", name="jgo")

    monkeypatch.setattr("kmirror_dagster.cli.sandbox_group.import_module", missing)
    line = refused(kmirror("sandbox", "status"))
    assert "pip install 'kmirror-dagster[sandbox]'" in line

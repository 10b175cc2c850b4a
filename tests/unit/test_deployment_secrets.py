"""Secrets as containers and service managers hand them over: in files."""

from pathlib import Path

import pytest

from kmirror_dagster.coordination.client import NodeClient
from kmirror_dagster.coordination.state_directory import StateDirectory
from kmirror_dagster.errors import SettingsError
from kmirror_dagster.orchestration import KMirrorResource
from kmirror_dagster.settings import node_from_document, parse_mirror
from kmirror_dagster.settings.references import variable

DOCUMENT = """\
mirror: orders
source: {bootstrap.servers: "s:9092", sasl.username: u, sasl.password: "${SOURCE_PASSWORD}",
         security.protocol: SASL_SSL, sasl.mechanism: PLAIN}
destination: {bootstrap.servers: "d:9092"}
"""


def secret_file(directory: Path, content: str = "hidden\n") -> str:
    file = directory / "secret"
    file.write_text(content)
    return str(file)


def test_reference_is_read_from_a_file(tmp_path: Path) -> None:
    """`${NAME}` takes the content of the file that NAME_FILE names, without the line end."""
    environ = {"SOURCE_PASSWORD_FILE": secret_file(tmp_path)}
    password = parse_mirror(DOCUMENT, "orders.yaml", environ).source.sasl_password
    assert password is not None
    assert password.get_secret_value() == "hidden"


@pytest.mark.parametrize(
    ("content", "value"),
    [
        (b"hidden", "hidden"),
        (b"hidden\n", "hidden"),
        (b"hidden\r\n", "hidden"),
        (b" hid den \n", " hid den "),
        (b"one\r\ntwo\n\n", "one\r\ntwo\n"),
    ],
)
def test_one_line_end_is_not_part_of_a_secret(tmp_path: Path, content: bytes, value: str) -> None:
    """Editors end files with a line end; blanks and further line ends belong to the secret."""
    file = tmp_path / "secret"
    file.write_bytes(content)
    assert variable("S", {"S_FILE": str(file)}) == value


def test_variable_beats_file(tmp_path: Path) -> None:
    """What is set directly is the closer word."""
    assert variable("S", {"S": "direct", "S_FILE": secret_file(tmp_path)}) == "direct"
    assert variable("S", {}) is None
    assert variable("S", {"S_FILE": ""}) is None


def test_changed_file_is_read_again(tmp_path: Path) -> None:
    """A rotated secret is seen without a restart by whoever asks next."""
    environ = {"S_FILE": secret_file(tmp_path, "old")}
    assert variable("S", environ) == "old"
    secret_file(tmp_path, "new")
    assert variable("S", environ) == "new"


@pytest.mark.parametrize(
    ("content", "reason"),
    [(None, "No such file or directory"), (b"", "is empty"), (b"\n", "is empty"), (b"\xff\xfe", "not UTF-8")],
)
def test_unusable_file_is_named(tmp_path: Path, content: bytes | None, reason: str) -> None:
    """A missing, empty or binary file ends in one line that names the setting, the variable and the file."""
    file = tmp_path / "secret"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(SettingsError, match=reason) as caught:
        parse_mirror(DOCUMENT, "orders.yaml", {"SOURCE_PASSWORD_FILE": str(file)})
    message = str(caught.value)
    assert message.startswith("orders.yaml:2: source.sasl.password: SOURCE_PASSWORD_FILE: ")
    assert str(file) in message
    assert "\n" not in message


def test_token_of_a_node_is_read_from_a_file(tmp_path: Path) -> None:
    """All nodes of a group take their token from KMIRROR_TOKEN_FILE; a changed one is stored at the next start."""
    environ = {"KMIRROR_TOKEN_FILE": secret_file(tmp_path)}
    directory = StateDirectory(tmp_path / "state")
    assert directory.ensure_token(environ).get_secret_value() == "hidden"
    assert (directory.path / "token").stat().st_mode & 0o777 == 0o600
    secret_file(tmp_path, "rotated")
    assert directory.ensure_token(environ).get_secret_value() == "rotated"
    stored = directory.token({})
    assert stored is not None
    assert stored.get_secret_value() == "rotated"


def test_node_without_a_readable_token_file_does_not_start(tmp_path: Path) -> None:
    """A token file that is missing must not end in a node with a token of its own, which the others refuse."""
    directory = StateDirectory(tmp_path / "state")
    with pytest.raises(SettingsError, match="KMIRROR_TOKEN_FILE"):
        directory.ensure_token({"KMIRROR_TOKEN_FILE": str(tmp_path / "missing")})


def test_clients_read_the_token_from_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The command line and Dagster find the token the same way."""
    environ = {
        "KMIRROR_ENDPOINT": "http://node-1:8080,http://node-2:8080",
        "KMIRROR_TOKEN_FILE": secret_file(tmp_path),
        "KMIRROR_STATE_DIR": str(tmp_path / "none"),
    }
    with NodeClient.discover(environ=environ) as client:
        assert client.endpoints == ["http://node-1:8080", "http://node-2:8080"]
        assert client._token.get_secret_value() == "hidden"
    monkeypatch.delenv("KMIRROR_TOKEN", raising=False)
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    for resource in (KMirrorResource(), KMirrorResource(endpoint="http://node-1:8080")):
        client = resource.open(budget_s=1.0)
        assert isinstance(client, NodeClient)
        assert client._token.get_secret_value() == "hidden"
        client.close()


def test_advertised_host_may_come_from_the_environment() -> None:
    """A pod's own address is known only when it starts."""
    document = {
        "destination": {"bootstrap.servers": "d:9092"},
        "api_host": "0.0.0.0",
        "api_insecure": True,
        "api_port": "${PORT}",
        "api_advertised_host": "${POD_NAME}.kmirror-nodes",
    }
    settings = node_from_document(document, {"POD_NAME": "kmirror-2", "PORT": "8080"})
    assert settings.api_advertised_host == "kmirror-2.kmirror-nodes"
    assert settings.api_port == 8080

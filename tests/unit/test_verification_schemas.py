"""Schema ids of sampled records, and whether a registry knows them."""

import struct
from collections.abc import Mapping
from typing import Any

import httpx
import pytest

from kmirror_dagster.broker.log_records import CREATE_TIME, LogRecord
from kmirror_dagster.errors import KmirrorError, SettingsError, UsageError
from kmirror_dagster.settings import (
    MirrorSettings,
    SchemaRegistrySettings,
    mirror_from_document,
    refuse_literal_secrets,
)
from kmirror_dagster.verification import schemas
from kmirror_dagster.verification.schemas import Registry, SchemaReport, SchemaUse, SchemaUses, schema_id
from tests.helpers.command_line import FakeNode, install, kmirror

DOCUMENT: dict[str, Any] = {
    "mirror": "orders",
    "source": {"bootstrap.servers": "source:9092"},
    "destination": {"bootstrap.servers": "destination:9092"},
    "schema_registry": {"url": "http://registry:8081/", "basic.auth.user.info": "${REGISTRY}"},
}


def coded(number: int) -> bytes:
    return struct.pack(">bI", 0, number) + b"data"


def record(offset: int, key: bytes | None, value: bytes | None) -> LogRecord:
    return (offset, CREATE_TIME, 0, key, value, None)


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (None, None),
        (b"", None),
        (b"\0\0\0\0\1", None),
        (coded(7), 7),
        (b"{}" * 5, None),
        (coded(2**32 - 1), 2**32 - 1),
    ],
)
def test_an_id_is_read_where_there_is_one(data: bytes | None, expected: int | None) -> None:
    """A zero byte, four bytes of id, and something behind it; anything else is none."""
    assert schema_id(data) == expected


def test_only_what_is_coded_throughout_is_looked_up() -> None:
    """One plain value and a topic's values are no schema's; tombstones say nothing; each id counts once."""
    uses = SchemaUses()
    for offset, (key, value) in enumerate(
        [(b"k", coded(1)), (b"k", None), (coded(9), coded(1)), (b"k", coded(2))]
    ):
        uses.add("t", 0, record(offset, key, value))
    uses.add("mixed", 0, record(0, None, coded(5)))
    uses.add("mixed", 1, record(0, None, b"plain text"))
    uses.add("other", 3, record(8, coded(1), None))

    assert uses.records == 7
    assert uses.topics == ["other", "t"]
    assert [(use.schema_id, use.topic, use.partition, use.offset, use.part) for use in uses] == [
        (1, "other", 3, 8, "key"),
        (2, "t", 0, 3, "value"),
    ]


def answering(statuses: Mapping[int, int]) -> httpx.Client:
    def answer(request: httpx.Request) -> httpx.Response:
        number = int(request.url.path.removeprefix("/schemas/ids/"))
        return httpx.Response(statuses[number], json={"schema": "{}"})

    return httpx.Client(transport=httpx.MockTransport(answer))


def test_a_registry_knows_an_id_or_does_not_or_says_why_not() -> None:
    """404 is an answer; anything else than 200 is an error, and so is no registry at all."""
    settings = SchemaRegistrySettings(url="http://registry:8081")
    registry = Registry(settings, answering({1: 200, 2: 404, 3: 401}))

    assert registry.knows(1)
    assert not registry.knows(2)
    with pytest.raises(KmirrorError, match="http://registry:8081 answered 401 for id 3"):
        registry.knows(3)
    with pytest.raises(UsageError, match=r"schema_registry\.url"):
        Registry(SchemaRegistrySettings())


def test_credentials_of_the_registry_are_secrets() -> None:
    """Taken from the environment, never in an address, never shown; a literal one is not stored."""
    settings = mirror_from_document(DOCUMENT, {"REGISTRY": "user:hidden"}).schema_registry

    assert settings.url == "http://registry:8081"
    assert settings.basic_auth_user_info is not None
    assert "hidden" not in repr(settings)
    refuse_literal_secrets(DOCUMENT)
    with pytest.raises(SettingsError, match=r"basic\.auth\.user\.info"):
        refuse_literal_secrets({**DOCUMENT, "schema_registry": {"basic.auth.user.info": "user:hidden"}})
    with pytest.raises(SettingsError, match="credentials"):
        mirror_from_document({**DOCUMENT, "schema_registry": {"url": "http://user:hidden@registry"}}, {})


def test_the_command_ends_with_1_when_an_id_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    """The id is named with the record it was found in; when all resolve it ends with 0."""
    node: FakeNode = install(monkeypatch)
    monkeypatch.setattr(
        FakeNode, "document", lambda _self, _name: {**DOCUMENT, "schema_registry": {"url": "http://r"}}
    )
    missing = [SchemaUse(schema_id=8, topic="orders-eu", partition=1, offset=5, part="value")]
    asked: list[list[str]] = []

    def check(settings: MirrorSettings, topics: list[str], _registry: Registry, **_: object) -> SchemaReport:
        asked.append(topics)
        return SchemaReport(
            mirror=settings.mirror,
            registry="http://r",
            records=3,
            topics=topics,
            resolved=[7],
            missing=missing,
            unreadable={},
        )

    monkeypatch.setattr(schemas, "check_schemas", check)
    bad = kmirror("schemas", "orders", "--topics", "orders-eu")
    missing = []
    good = kmirror("schemas", "orders")

    assert (bad.exit_code, good.exit_code) == (1, 0)
    assert "id 8 is not known there: value of orders-eu/1@5" in bad.stdout
    assert asked == [["orders-eu"], ["orders-eu", "orders-us"]]
    assert node.log == []

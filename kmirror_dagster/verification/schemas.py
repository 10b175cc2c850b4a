"""Do the schema ids in mirrored records resolve at the destination's registry? Asked for a sample of records.

The form checked is the common one: a zero byte, four bytes of id, the data (Confluent's wire format). A topic's keys
or values count as such when every one of the sample has it; anything else is not looked at.
"""

import ssl
import struct
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Literal, Protocol, TypeAlias

import httpx
from pydantic import BaseModel, ConfigDict

from kmirror_dagster.broker.admin import ClusterAdmin
from kmirror_dagster.broker.admin_types import Partition
from kmirror_dagster.broker.log_records import KEY, OFFSET, VALUE, LogRange, LogRecord
from kmirror_dagster.errors import KmirrorError, SettingsError, UsageError
from kmirror_dagster.settings import MirrorSettings, SchemaRegistrySettings
from kmirror_dagster.verification.range_reads import ReadLimits, read_ranges
from kmirror_dagster.verification.ranges import read_ends
from kmirror_dagster.verification.report import Isolation

Part: TypeAlias = Literal["key", "value"]

_HEADER = struct.Struct(">bI")
_TIMEOUT_S = 10.0


class SchemaUse(BaseModel):
    """A schema id and the first record of the sample that names it."""

    model_config = ConfigDict(frozen=True)

    schema_id: int
    topic: str
    partition: int
    offset: int
    part: Part


class SchemaReport(BaseModel):
    """Result of a check.

    Attributes:
        records: records looked at.
        topics: topics with records in the form that is checked.
        resolved: ids that the registry knows.
        missing: ids that it does not know.
        unreadable: topics that could not be looked at, with the reason.
    """

    model_config = ConfigDict(frozen=True)

    mirror: str
    registry: str
    records: int
    topics: list[str]
    resolved: list[int]
    missing: list[SchemaUse]
    unreadable: dict[str, str]

    @property
    def ok(self) -> bool:
        """Whether every id of the sample can be resolved."""
        return not self.missing and not self.unreadable


class Lookup(Protocol):
    """Whether a registry knows a schema id."""

    def knows(self, schema_id: int) -> bool: ...


class Registry:
    """A schema registry's look-up by id, over HTTP.

    Args:
        settings: where it is.
        client: for tests.
    """

    def __init__(self, settings: SchemaRegistrySettings, client: httpx.Client | None = None) -> None:
        if settings.url is None:
            raise UsageError("no schema registry is named: set schema_registry.url in the mirror's settings")
        self.url = settings.url
        secret = settings.basic_auth_user_info
        user, _, password = secret.get_secret_value().partition(":") if secret is not None else ("", "", "")
        self._client = client or httpx.Client(
            timeout=_TIMEOUT_S,
            auth=httpx.BasicAuth(user, password) if secret is not None else None,
            verify=_trust(settings),
        )

    def knows(self, schema_id: int) -> bool:
        """Whether it has a schema of that id.

        Raises:
            KmirrorError: it does not answer, or refuses to.
        """
        try:
            answer = self._client.get(f"{self.url}/schemas/ids/{schema_id}")
        except httpx.HTTPError as error:
            raise KmirrorError(f"schema registry {self.url}: {error or type(error).__name__}") from error
        if answer.status_code == HTTPStatus.NOT_FOUND:
            return False
        if answer.status_code != HTTPStatus.OK:
            raise KmirrorError(f"schema registry {self.url} answered {answer.status_code} for id {schema_id}")
        return True

    def close(self) -> None:
        """End its connections."""
        self._client.close()


def _trust(settings: SchemaRegistrySettings) -> ssl.SSLContext | bool:
    if settings.ssl_ca_location is None:
        return True
    try:
        return ssl.create_default_context(cafile=settings.ssl_ca_location)
    except (OSError, ssl.SSLError) as error:
        raise SettingsError(f"schema_registry.ssl.ca.location {settings.ssl_ca_location}: {error}") from error


def schema_id(data: bytes | None) -> int | None:
    """The id that a key or value begins with; None when it has not that form."""
    if data is None or len(data) <= _HEADER.size:
        return None
    magic, found = _HEADER.unpack_from(data)
    return found if magic == 0 else None


@dataclass
class SchemaUses:
    """Ids of a sample, by topic and part of the record; what has another form anywhere is left out."""

    records: int = 0
    _uses: dict[tuple[str, Part], dict[int, SchemaUse]] = field(
        default_factory=dict[tuple[str, Part], dict[int, SchemaUse]]
    )
    _plain: set[tuple[str, Part]] = field(default_factory=set[tuple[str, Part]])

    def add(self, topic: str, partition: int, record: LogRecord) -> None:
        """Take in one record."""
        self.records += 1
        self._add(topic, partition, record[OFFSET], "key", record[KEY])
        self._add(topic, partition, record[OFFSET], "value", record[VALUE])

    def _add(self, topic: str, partition: int, offset: int, part: Part, data: bytes | None) -> None:
        if data is None:
            return
        found = schema_id(data)
        if found is None:
            self._plain.add((topic, part))
            return
        use = SchemaUse(schema_id=found, topic=topic, partition=partition, offset=offset, part=part)
        self._uses.setdefault((topic, part), {}).setdefault(found, use)

    @property
    def topics(self) -> list[str]:
        """Topics with keys or values of that form."""
        return sorted({topic for topic, part in self._uses if (topic, part) not in self._plain})

    def __iter__(self) -> Iterator[SchemaUse]:
        """Each id once, with the first record that names it."""
        seen: set[int] = set()
        for key in sorted(self._uses):
            if key in self._plain:
                continue
            for use in self._uses[key].values():
                if use.schema_id not in seen:
                    seen.add(use.schema_id)
                    yield use


def check_schemas(
    settings: MirrorSettings,
    topics: Iterable[str],
    registry: Lookup,
    *,
    last: int = 100,
    deadline_s: float = 60.0,
    progress: Callable[[str, int, int], None] = lambda _phase, _done, _total: None,
) -> SchemaReport:
    """Look up the schema ids of the newest records of each partition at the destination.

    Args:
        settings: of the mirror.
        topics: mirrored topics.
        registry: the destination's.
        last: offsets to look at in each partition.
        deadline_s: seconds the reading may take.

    Raises:
        KmirrorError: when the destination cannot be read or the registry does not answer.
    """
    ranges, unreadable = _newest(settings, topics, last)
    uses = SchemaUses()
    limits = ReadLimits(stall_s=deadline_s, deadline_s=deadline_s)
    isolation = Isolation.READ_COMMITTED
    for chunk in read_ranges(
        settings.destination, ranges, isolation=isolation, limits=limits, progress=progress, phase="sampling"
    ):
        for record in chunk.records:
            uses.add(chunk.topic, chunk.partition, record)
    found = list(uses)
    known = {use.schema_id for use in found if registry.knows(use.schema_id)}
    return SchemaReport(
        mirror=settings.mirror,
        registry=settings.schema_registry.url or "",
        records=uses.records,
        topics=uses.topics,
        resolved=sorted(known),
        missing=[use for use in found if use.schema_id not in known],
        unreadable=unreadable,
    )


def _newest(
    settings: MirrorSettings, topics: Iterable[str], last: int
) -> tuple[Mapping[Partition, LogRange], dict[str, str]]:
    admin = ClusterAdmin(settings.destination)
    try:
        described = admin.topics(topics)
        wanted = [
            (name, index) for name, topic in described.values.items() for index in range(topic.partitions)
        ]
        ends, errors = read_ends(admin, wanted)
    finally:
        admin.close()
    unreadable = {name: str(error) for name, error in described.errors.items()}
    unreadable |= {topic: str(error) for (topic, _), error in errors.items()}
    return {
        key: LogRange(*key, max(found.start, found.stable_end - last), found.stable_end)
        for key, found in ends.items()
    }, unreadable

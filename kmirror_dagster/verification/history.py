"""Recorded histories of producers and consumers: what each sent, had acknowledged and polled, line by line.

A history is a file of JSON lines in the order in which things happened (one recorder, or several merged by time).
Values are unique: each names one sent record for ever. The checker (`history_checker`) reads nothing else.
"""

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Annotated, Literal, NamedTuple, TypeAlias

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from kmirror_dagster.errors import UsageError
from kmirror_dagster.verification.report import Isolation


class _Event(BaseModel):
    model_config = ConfigDict(frozen=True, extra="ignore")

    at_ms: int = 0


class Send(_Event):
    """A producer is about to send a value.

    Attributes:
        process: the producer; what one process sends has an order.
        partition: None when the client library chooses it; the acknowledgement says which it was.
        transaction: name of the transaction it is part of, None when it is part of none.
    """

    op: Literal["send"] = "send"
    process: str
    cluster: str
    topic: str
    partition: int | None = None
    value: str
    transaction: str | None = None


class Ack(_Event):
    """A sent value was acknowledged. `offset` is None when the broker did not tell (a repeated batch)."""

    op: Literal["ack"] = "ack"
    cluster: str
    topic: str
    partition: int
    offset: int | None = None
    value: str


class Fail(_Event):
    """A send failed.

    Attributes:
        certain: it was not written for sure (refused, or never sent); else it may be there or not.
    """

    op: Literal["fail"] = "fail"
    value: str
    certain: bool = False
    error: str | None = None


class EndTransaction(_Event):
    """A transaction was committed or aborted, acknowledged by the coordinator; not known: no event."""

    op: Literal["commit", "abort"]
    transaction: str


class PolledRecord(NamedTuple):
    """One record that a consumer got; an array of four in the file."""

    topic: str
    partition: int
    offset: int
    value: str


class Poll(_Event):
    """A consumer got records, in this order."""

    op: Literal["poll"] = "poll"
    process: str
    cluster: str
    isolation: Isolation = Isolation.READ_UNCOMMITTED
    records: list[PolledRecord]


class Position(NamedTuple):
    """A partition a consumer reads from now on; `offset` None: it goes on at an offset nobody recorded."""

    topic: str
    partition: int
    offset: int | None = None


class Assign(_Event):
    """A consumer was given partitions or moved within them: offsets may go back here without being wrong."""

    op: Literal["assign"] = "assign"
    process: str
    cluster: str
    positions: list[Position]


class Stop(_Event):
    """Mirroring of a partition ended at `offset`: what the source has from there on is not in the copy.

    Those records are counted as `unmirrored` and have to be those of the loss manifest; they are not lost
    records of the mirror, and their offsets may be taken by other records at the destination.
    """

    op: Literal["stop"] = "stop"
    source: str
    destination: str
    topic: str
    partition: int
    offset: int


class Rebuilt(_Event):
    """A topic of a cluster has been made anew from the other cluster (failback): its former tail is gone."""

    op: Literal["rebuilt"] = "rebuilt"
    cluster: str
    topic: str


Event: TypeAlias = Send | Ack | Fail | EndTransaction | Poll | Assign | Stop | Rebuilt
_EVENT: TypeAdapter[Event] = TypeAdapter(Annotated[Event, Field(discriminator="op")])


def parse_history(lines: Iterable[str | bytes], name: str = "history") -> Iterator[Event]:
    """Read events from JSON lines; empty lines are passed over.

    Raises:
        UsageError: naming the line that is no event.
    """
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            yield _EVENT.validate_json(line)
        except ValidationError as error:
            problem = error.errors()[0]
            where = ".".join(str(part) for part in problem["loc"]) or "line"
            raise UsageError(f"{name}:{number}: {where}: {problem['msg']}") from error


def read_history(path: Path) -> Iterator[Event]:
    """Read a history file.

    Raises:
        UsageError: when it cannot be opened, or a line is no event.
    """
    try:
        with path.open("rb") as lines:
            yield from parse_history(lines, str(path))
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror or error}") from error


def event_line(event: Event) -> str:
    """An event as one line, without its line end."""
    return event.model_dump_json(exclude_none=True)

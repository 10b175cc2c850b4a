"""`kmirror offsets`: which offset of one side an offset of the other side is."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

import typer

from kmirror_dagster.cli.options import JsonOption, MirrorArgument
from kmirror_dagster.cli.session import session_of
from kmirror_dagster.errors import UsageError
from kmirror_dagster.offset_map import OffsetMap, Run

if TYPE_CHECKING:
    from kmirror_dagster.coordination.models import PartitionOffsets


@dataclass(frozen=True)
class Answer:
    """One offset at both sides.

    Attributes:
        source_range, destination_range: log start and end of each side; None: not known to the node.
        left_out: the source offset holds no record and is left out; `destination` is that of the record behind it.
        note: what else is to be known; None: nothing.
    """

    source: int
    destination: int
    translated: bool
    runs: int
    source_range: tuple[int, int] | None
    destination_range: tuple[int, int] | None
    left_out: bool
    note: str | None


def offsets(
    ctx: typer.Context,
    mirror: MirrorArgument,
    partition: Annotated[str, typer.Argument(metavar="TOPIC/P", help="A partition, as orders/3.")],
    offset: Annotated[int, typer.Argument(metavar="OFFSET", min=0, help="Offset at the source.")],
    reverse: Annotated[
        bool, typer.Option("--reverse", help="The offset is the destination's; tell the source's.")
    ] = False,
    json: JsonOption = False,
) -> None:
    """Tell the destination's offset of a source offset, or the other way round.

    They are the same, except where a mirror translates offsets (policies.offsets): there, long runs of offsets without
    a record are left out, and the map of what follows is exact in both directions.
    """
    from kmirror_dagster.cli.output import print_json, print_pairs

    topic, number = _named(partition)
    session = session_of(ctx)
    with session.client() as client:
        answer = answer_of(client.offsets_of(mirror, topic, number), offset, reverse=reverse)
    if session.json or json:
        print_json(
            {
                "mirror": mirror,
                "topic": topic,
                "partition": number,
                "offsets": "translated" if answer.translated else "exact",
                "source": answer.source,
                "destination": answer.destination,
                "leftOut": answer.left_out,
                "runs": answer.runs,
                "sourceRange": answer.source_range,
                "destinationRange": answer.destination_range,
                "note": answer.note,
            }
        )
        return
    print_pairs(
        {
            "partition": f"{topic}/{number}",
            "offsets": f"translated ({answer.runs} runs)" if answer.translated else "exact",
            "source": _place(answer.source, answer.source_range),
            "destination": _place(answer.destination, answer.destination_range),
            **({"note": answer.note} if answer.note else {}),
        }
    )


def answer_of(told: "PartitionOffsets", offset: int, *, reverse: bool) -> Answer:
    """Both sides of an offset.

    Args:
        told: what the node knows of the partition.
        offset: the source's, or with `reverse` the destination's.
    """
    found = OffsetMap(tuple(Run(*run) for run in told.runs))
    status = told.status
    source_range = destination_range = None
    if status is not None:
        source_range = _range(status.source_start_offset, status.source_end_offset)
        destination_range = _range(status.destination_start_offset, status.destination_end_offset)
    left_out = not reverse and found.left_out(offset)
    destination = offset if reverse else found.to_destination(offset)
    return Answer(
        source=found.to_source(offset) if reverse else offset,
        destination=destination,
        translated=bool(found),
        runs=len(found),
        source_range=source_range,
        destination_range=destination_range,
        left_out=left_out,
        note=_note(destination, destination_range, left_out=left_out, translated=bool(found)),
    )


def _note(
    destination: int, destination_range: tuple[int, int] | None, *, left_out: bool, translated: bool
) -> str | None:
    if destination_range is not None and destination < destination_range[0]:
        return "before the destination's log start: deleted there"
    if destination_range is not None and destination >= destination_range[1]:
        more = "; what lies in between may yet be left out" if translated else ""
        return f"not mirrored yet{more}"
    return "no record at the source; the destination's offset is that of the next one" if left_out else None


def _range(start: int | None, end: int | None) -> tuple[int, int] | None:
    return None if start is None or end is None else (start, end)


def _place(offset: int, log: tuple[int, int] | None) -> str:
    return f"{offset} (log: {log[0]} to {log[1]})" if log else f"{offset}"


def _named(text: str) -> tuple[str, int]:
    """Topic and partition of `topic/partition`.

    Raises:
        UsageError: when it is not written so.
    """
    topic, _, number = text.rpartition("/")
    if not topic or not number.isascii() or not number.isdecimal():
        raise UsageError(f"{text!r} is no partition: write TOPIC/P, as orders/3")
    return topic, int(number)

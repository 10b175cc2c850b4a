"""Forecast: what a failover at this moment would mean, group by group. Pure planner, and the look it needs.

Per partition, with the source's end S, the destination's end D, the group's position G at the source and its
position H at the destination (all offsets):

- resumes at H, kept within the destination's log: where its members go on after the failover;
- re-reads min(G, D) - H: what it has read at the source already and will get again;
- loses S - max(D, G): what it has not read yet and will never get, unless the source comes back;
- has read max(0, G - D) records that the destination does not have.

An offset without a record (markers, aborted and compacted ones) counts as one: the figures are upper bounds.
"""

import time
from collections.abc import Mapping, Sequence
from contextlib import closing

from pydantic import BaseModel, ConfigDict, Field, computed_field

from kmirror_dagster.broker.admin import ClusterAdmin
from kmirror_dagster.broker.admin_types import OFFSET_GROUP_TYPES, CommittedOffset, Partition
from kmirror_dagster.errors import KmirrorError
from kmirror_dagster.recovery.positions import KnownPartition
from kmirror_dagster.settings import MirrorSettings
from kmirror_dagster.verification.ranges import LogEnds, read_ends

Positions = Mapping[Partition, CommittedOffset]

# Looks at the source end by then: it may be what is gone.
_SOURCE_TIMEOUT_S = 8.0


class PartitionForecast(BaseModel):
    """One partition of one group.

    Attributes:
        resumes_at: offset at the destination; None: it has no position there, `auto.offset.reset` decides.
        re_reads: None when the source's position is not known.
        loses: None when the source's end is not known.
        read_ahead: None when the source's position is not known.
    """

    model_config = ConfigDict(frozen=True)

    topic: str
    partition: int
    resumes_at: int | None
    re_reads: int | None
    loses: int | None
    read_ahead: int | None


class GroupForecast(BaseModel):
    """One group; sums over its partitions, of what is known."""

    model_config = ConfigDict(frozen=True)

    group: str
    partitions: list[PartitionForecast]

    @computed_field
    @property
    def re_reads(self) -> int:
        """Offsets it gets a second time."""
        return sum(each.re_reads or 0 for each in self.partitions)

    @computed_field
    @property
    def loses(self) -> int:
        """Offsets it never gets."""
        return sum(each.loses or 0 for each in self.partitions)

    @computed_field
    @property
    def read_ahead(self) -> int:
        """Offsets it has read that the destination does not have."""
        return sum(each.read_ahead or 0 for each in self.partitions)

    @computed_field
    @property
    def without_position(self) -> int:
        """Partitions it has a position in at the source only."""
        return sum(each.resumes_at is None for each in self.partitions)


class Forecast(BaseModel):
    """What a failover of a mirror would mean at one moment.

    Attributes:
        at_ms: of the look, epoch milliseconds.
        source_reachable: False: the source's ends are the last that a node saw, and positions there are unknown.
        loses_records: offsets of all partitions that the destination lacks.
        loses_seconds: age of the oldest of them, as the nodes measure it.
        rpo_seconds: what the mirror's policy allows.
        problems: what could not be looked up, with the reasons.
    """

    model_config = ConfigDict(frozen=True)

    mirror: str
    at_ms: int
    source_reachable: bool
    loses_records: int
    loses_seconds: float
    rpo_seconds: float
    groups: list[GroupForecast] = Field(default_factory=list[GroupForecast])
    problems: list[str] = Field(default_factory=list)

    @computed_field
    @property
    def within_rpo(self) -> bool:
        """Whether no more would be lost than is allowed."""
        return self.loses_seconds <= self.rpo_seconds


def forecast_partition(
    key: Partition,
    *,
    source_end: int | None,
    destination: LogEnds,
    source_position: int | None,
    destination_position: int | None,
) -> PartitionForecast:
    """Work out one partition of one group; see the module for the rules."""
    end = destination.end
    resumes_at = None
    if destination_position is not None:
        resumes_at = max(destination.start, min(destination_position, end))
    re_reads = read_ahead = None
    if source_position is not None:
        read_ahead = max(0, source_position - end)
        if resumes_at is not None:
            re_reads = max(0, min(source_position, end) - resumes_at)
    loses = None
    if source_end is not None:
        loses = max(0, source_end - max(end, source_position if source_position is not None else end))
    return PartitionForecast(
        topic=key[0],
        partition=key[1],
        resumes_at=resumes_at,
        re_reads=re_reads,
        loses=loses,
        read_ahead=read_ahead,
    )


def forecast_groups(
    source_ends: Mapping[Partition, int],
    destination_ends: Mapping[Partition, LogEnds],
    source: Mapping[str, Positions],
    destination: Mapping[str, Positions],
) -> list[GroupForecast]:
    """Forecast every group that has a position in one of the partitions, on either side.

    Args:
        source_ends: log ends of the source, of the partitions where they are known.
        destination_ends: of all partitions to look at.
        source: positions at the source; empty while it does not answer.
        destination: positions at the destination.
    """
    found: list[GroupForecast] = []
    for group in sorted(source.keys() | destination.keys()):
        here, there = source.get(group, {}), destination.get(group, {})
        partitions = [
            forecast_partition(
                key,
                source_end=source_ends.get(key),
                destination=destination_ends[key],
                source_position=here[key].offset if key in here else None,
                destination_position=there[key].offset if key in there else None,
            )
            for key in sorted((here.keys() | there.keys()) & destination_ends.keys())
        ]
        if partitions:
            found.append(GroupForecast(group=group, partitions=partitions))
    return found


def look_ahead(settings: MirrorSettings, known: Sequence[KnownPartition]) -> Forecast:
    """Look at both clusters and forecast a failover; the source need not answer.

    Args:
        settings: the mirror, its secrets resolved.
        known: its partitions, as a node knows them.

    Raises:
        KmirrorError: when the destination cannot be asked.
    """
    keys = [each.key for each in known]
    problems: list[str] = []
    source_ends = {each.key: each.source_end for each in known if each.source_end is not None}
    positions: Mapping[str, Positions] = {}
    with closing(ClusterAdmin(settings.source, timeout_s=_SOURCE_TIMEOUT_S)) as admin:
        try:
            # positions first: an end that is looked up later is not below them
            positions = _positions(admin, settings, problems)
            ends, errors = read_ends(admin, keys)
            source_ends.update({key: each.end for key, each in ends.items()})
            problems += [f"source: {error}" for error in errors.values()]
            reachable = True
        except KmirrorError as error:
            problems.append(f"source: {error}")
            reachable = False
    with closing(ClusterAdmin(settings.destination)) as admin:
        destination_ends, errors = read_ends(admin, keys)
        problems += [f"destination: {error}" for error in errors.values()]
        there = _positions(admin, settings, problems)
    missing = [
        max(0, source_ends[key] - each.end) for key, each in destination_ends.items() if key in source_ends
    ]
    return Forecast(
        mirror=settings.mirror,
        at_ms=time.time_ns() // 1_000_000,
        source_reachable=reachable,
        loses_records=sum(missing),
        loses_seconds=round(max((each.lag_seconds for each in known), default=0.0), 3),
        rpo_seconds=settings.policies.rpo_seconds,
        groups=forecast_groups(source_ends, destination_ends, positions, there),
        problems=problems,
    )


def _positions(admin: ClusterAdmin, settings: MirrorSettings, problems: list[str]) -> Mapping[str, Positions]:
    listed = admin.groups()
    problems += [str(error) for error in listed.errors]
    names = [
        each.group
        for each in listed.groups
        if each.type in OFFSET_GROUP_TYPES and settings.filters.selects_group(each.group)
    ]
    answers = admin.group_offsets(names)
    problems += [f"group {group}: {error}" for group, error in answers.errors.items()]
    return answers.values

"""Log starts: what the source has deleted at its head is deleted at the destination. Pure."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

from kmirror_dagster.broker.admin_types import Partition
from kmirror_dagster.metadata.configs import CLEANUP, allows_cutting
from kmirror_dagster.metadata.snapshot import ClusterSnapshot


@dataclass(frozen=True)
class LogStartsPlan:
    """Offsets below which destination partitions are cut, and what is left alone."""

    cuts: Mapping[Partition, int] = field(default_factory=dict[Partition, int])
    errors: Mapping[str, str] = field(default_factory=dict[str, str])
    notes: tuple[str, ...] = ()


def plan_log_starts(
    topics: Iterable[str],
    *,
    source: ClusterSnapshot,
    destination: ClusterSnapshot,
    mirroring: Callable[[Partition], bool],
) -> LogStartsPlan:
    """Decide which destination partitions are cut, and where.

    A partition is cut only while it is MIRRORING, up to the source's log start and never past its own end: a
    source start beyond the end is a loss that the partition itself has to settle first. The destination's
    cleanup policy has to include "delete", brokers refuse otherwise; the configuration step provides for it.
    """
    cuts: dict[Partition, int] = {}
    errors: dict[str, str] = {}
    notes: list[str] = []
    for topic in sorted(topics):
        for partition in source.partitions_of(topic):
            key = (topic, partition)
            wanted = source.starts.get(key)
            if not mirroring(key):
                continue
            if wanted is None:
                reason = source.offset_errors.get(key, "not answered")
                errors[topic] = f"log start of partition {partition} at the source is not known: {reason}"
                continue
            start, end = destination.starts.get(key), destination.ends.get(key)
            if start is None or end is None:
                if key in destination.offset_errors:
                    errors[topic] = str(destination.offset_errors[key])
                continue
            if wanted <= start:
                continue
            if wanted > end:
                notes.append(f"{topic}/{partition}: the source starts at {wanted}, the copy ends at {end}")
            elif not _cuttable(destination, topic):
                notes.append(f"{topic}/{partition}: cut to {wanted} once cleanup.policy includes delete")
            else:
                cuts[key] = wanted
    return LogStartsPlan(cuts, errors, tuple(notes))


def _cuttable(destination: ClusterSnapshot, topic: str) -> bool:
    policy = destination.configs.get(topic, {}).get(CLEANUP)
    return policy is not None and policy.value is not None and allows_cutting(policy.value)

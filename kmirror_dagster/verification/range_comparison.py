"""Record-by-record comparison of given ranges, where a digest or a proof needs to know what differs."""

import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import closing
from typing import Protocol

from kmirror_dagster.broker.admin_types import Answers, Configs, Partition
from kmirror_dagster.broker.log_records import LogRange
from kmirror_dagster.broker.reader import RangeReader
from kmirror_dagster.settings import ClusterSettings
from kmirror_dagster.verification.lockstep import Lockstep
from kmirror_dagster.verification.ranges import waves
from kmirror_dagster.verification.report import DifferenceLog, Isolation
from kmirror_dagster.verification.streams import Compaction, PartitionComparison

_WAVE = 500
_STALL_S = 60.0
_DAY_MS = 86_400_000


class ConfigLookup(Protocol):
    """The part of `broker.admin.ClusterAdmin` that reads configurations."""

    def topic_configs(self, names: Iterable[str]) -> Answers[str, Configs]:
        """Effective configurations of topics."""
        ...


def compare_ranges(
    source: ClusterSettings,
    destination: ClusterSettings,
    ranges: Mapping[Partition, LogRange],
    *,
    isolation: Isolation,
    compactions: Mapping[str, Compaction],
    progress: Callable[[int], None] = lambda _: None,
) -> dict[Partition, DifferenceLog]:
    """Differences in ranges that both sides hold, one log for each range.

    Args:
        source, destination: clusters to read.
        ranges: at most one per partition.
        isolation: level to read at.
        compactions: of topics that a cleaner works on.
        progress: told the number of offsets compared since it was last called.

    Raises:
        KmirrorError: when a cluster cannot be read.
    """
    found: dict[Partition, DifferenceLog] = {key: DifferenceLog() for key in ranges}
    for wave in waves(ranges, _WAVE):
        comparisons = {
            key: PartitionComparison(
                *key, isolation=isolation, differences=found[key], compaction=compactions.get(key[0])
            )
            for key in wave
        }
        level = isolation.value
        with (
            closing(RangeReader(source, wave.values(), isolation=level)) as left,
            closing(RangeReader(destination, wave.values(), isolation=level)) as right,
        ):
            Lockstep((left, right), comparisons, stall_s=_STALL_S).run(progress)
    return found


def compactions_of(
    source: ConfigLookup, destination: ConfigLookup, topics: Iterable[str]
) -> dict[str, Compaction]:
    """Topics that a cleaner works on, on either side."""
    wanted = sorted(set(topics))
    both = (source.topic_configs(wanted).values, destination.topic_configs(wanted).values)
    now_ms = time.time_ns() // 1_000_000
    found: dict[str, Compaction] = {}
    for topic in wanted:
        configs = [side[topic] for side in both if topic in side]
        if any("compact" in _config(side, "cleanup.policy") for side in configs):
            kept_ms = min(int(_config(side, "delete.retention.ms") or _DAY_MS) for side in configs)
            found[topic] = Compaction(tombstones_before_ms=now_ms - kept_ms)
    return found


def _config(configs: Configs, key: str) -> str:
    value = configs.get(key)
    return value.value or "" if value is not None else ""

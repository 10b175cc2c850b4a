"""Reading both clusters for one refresh: few batched calls, errors kept where they belong."""

from collections.abc import Iterable, Mapping

from kmirror_dagster.broker.admin import ClusterAdmin
from kmirror_dagster.broker.admin_types import (
    Answers,
    Configs,
    OffsetKind,
    Partition,
    TopicDescription,
)
from kmirror_dagster.broker.deadlines import Deadline
from kmirror_dagster.errors import KmirrorError
from kmirror_dagster.lifecycle import DesiredState
from kmirror_dagster.metadata.snapshot import ClusterSnapshot
from kmirror_dagster.metadata.topics import topics_of_interest
from kmirror_dagster.records import STATE_TOPIC, TopicRecord
from kmirror_dagster.settings import FilterSettings

# No single call may take longer, so that one cluster that hangs does not use up a refresh's whole time.
CALL_S = 10.0


def read_source(
    admin: ClusterAdmin,
    *,
    filters: FilterSettings,
    known: Mapping[str, TopicRecord],
    deadline: Deadline,
) -> ClusterSnapshot:
    """Look at the source: all names, then the topics of interest with configurations and log starts.

    Raises:
        KmirrorError: when topics cannot be listed; everything after that is kept per topic.
    """
    names = admin.topic_names(timeout_s=_wait(deadline))
    # what a person stopped is not looked at, unless the filters would bring it back
    active = {
        topic: record
        for topic, record in known.items()
        if record.desired is not DesiredState.STOPPED or filters.selects_topic(topic)
    }
    wanted = topics_of_interest(names, filters, active)
    described = admin.topics(wanted, timeout_s=_wait(deadline))
    configs = _read_configs(admin, described.values, deadline)
    partitions = [(name, i) for name, topic in described.values.items() for i in range(topic.partitions)]
    starts = read_offsets(admin, partitions, OffsetKind.EARLIEST, deadline)
    return ClusterSnapshot(
        names=names,
        topics=described.values,
        topic_errors=described.errors,
        configs=configs.values,
        config_errors=configs.errors,
        starts=starts.values,
        offset_errors=starts.errors,
    )


def read_destination(
    admin: ClusterAdmin,
    *,
    source: ClusterSnapshot,
    known: Mapping[str, TopicRecord],
    brokers: int,
    deadline: Deadline,
) -> ClusterSnapshot:
    """Look at the destination: all names, then the source's topics with configurations.

    Log starts and ends are looked up only where something depends on them: where the source's log starts
    above 0, and of topics that are not known to be the mirror's.

    Raises:
        KmirrorError: when topics cannot be listed; everything after that is kept per topic.
    """
    names = admin.topic_names(timeout_s=_wait(deadline))
    described = admin.topics(source.topics, timeout_s=_wait(deadline))
    configs = _read_configs(admin, described.values, deadline)
    partitions = [
        (name, index)
        for name, topic in described.values.items()
        for index in range(topic.partitions)
        if source.starts.get((name, index), 1) > 0 or not _is_ours(known.get(name), topic)
    ]
    starts = read_offsets(admin, partitions, OffsetKind.EARLIEST, deadline)
    ends = read_offsets(admin, partitions, OffsetKind.LATEST, deadline)
    return ClusterSnapshot(
        brokers=brokers,
        names=names,
        topics=described.values,
        topic_errors=described.errors,
        configs=configs.values,
        config_errors=configs.errors,
        starts=starts.values,
        ends=ends.values,
        offset_errors={**ends.errors, **starts.errors},
        config_keys=_config_keys(admin, names, configs.values, deadline),
    )


def _wait(deadline: Deadline) -> float:
    deadline.check("reading metadata")
    return deadline.remaining(at_most=CALL_S)


def _read_configs(
    admin: ClusterAdmin, topics: Mapping[str, TopicDescription], deadline: Deadline
) -> Answers[str, Configs]:
    try:
        return admin.topic_configs(topics, timeout_s=_wait(deadline))
    except KmirrorError as error:
        return Answers({}, dict.fromkeys(topics, error))


def _is_ours(record: TopicRecord | None, copy: TopicDescription) -> bool:
    return (
        record is not None and record.partitions > 0 and record.destination_topic_id in (None, copy.topic_id)
    )


def read_offsets(
    admin: ClusterAdmin, partitions: Iterable[Partition], at: OffsetKind, deadline: Deadline
) -> Answers[Partition, int]:
    """Look up one end of each partition's log; a call that fails as a whole is every partition's error."""
    partitions = list(partitions)
    try:
        listed = admin.list_offsets(partitions, at, timeout_s=_wait(deadline))
    except KmirrorError as error:
        return Answers({}, dict.fromkeys(partitions, error))
    return Answers({key: found.offset for key, found in listed.values.items()}, listed.errors)


def _config_keys(
    admin: ClusterAdmin, names: frozenset[str], configs: Mapping[str, Configs], deadline: Deadline
) -> frozenset[str] | None:
    """Topic configuration keys a cluster knows: every description lists them all."""
    for described in configs.values():
        return frozenset(described)
    if STATE_TOPIC not in names:
        return None
    for described in _read_state_topic(admin, deadline).values():
        return frozenset(described)
    return None


def _read_state_topic(admin: ClusterAdmin, deadline: Deadline) -> Mapping[str, Configs]:
    try:
        return admin.topic_configs([STATE_TOPIC], timeout_s=_wait(deadline)).values
    except KmirrorError:
        return {}  # not needed: a key that is refused is found out at creation

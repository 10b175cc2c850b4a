"""The state topic itself: made when missing, checked when there; blocking calls."""

import logging
import time
from dataclasses import dataclass

from kmirror_dagster.broker import codes
from kmirror_dagster.broker.admin import ClusterAdmin
from kmirror_dagster.broker.admin_types import NewTopic, TopicDescription
from kmirror_dagster.broker.missing_rights import Right, rights_error
from kmirror_dagster.errors import BrokerError, DeadlineError, KmirrorError, UsageError
from kmirror_dagster.records import STATE_TOPIC
from kmirror_dagster.settings import NodeSettings

logger = logging.getLogger(__name__)

_DEFAULT_REPLICAS = 3
_POLL_S = 0.1
_TOPIC_ALREADY_EXISTS = 36  # protocol guide, error codes
_SETTLE_S = 15.0
# Small segments and an eager cleaner keep a node's start quick: what is not compacted yet is read in vain.
_CONFIGS = {
    "cleanup.policy": "compact",
    "segment.bytes": str(16 * 1024 * 1024),
    "min.cleanable.dirty.ratio": "0.1",
    "compression.type": "producer",
    "unclean.leader.election.enable": "false",
}


@dataclass(frozen=True)
class StateTopic:
    """The state topic as it is.

    Attributes:
        topic_id: tells a topic that was deleted and made again; its name when the cluster has no topic ids.
        partitions: coordinator partitions; fixed at its creation, whatever the settings say later.
    """

    topic_id: str
    partitions: int


def ensure_state_topic(admin: ClusterAdmin, settings: NodeSettings) -> StateTopic:
    """Find the state topic, or make it with the configured number of partitions.

    Raises:
        UsageError: when a topic of that name would lose state (it is not purely compacted).
        AuthorizationError: when it may not be read or written, or the group of the nodes may not be joined.
        KmirrorError: when it can neither be described nor made.
    """
    found = _describe(admin)
    if found is None:
        _create(admin, settings)
        found = _await(admin)
    if found.partitions != settings.mirror_topic_num_partitions:
        logger.info(
            "%s has %d partitions, fixed when it was made; mirror.topic.num.partitions (%d) has no effect",
            STATE_TOPIC,
            found.partitions,
            settings.mirror_topic_num_partitions,
        )
    _check_policy(admin)
    _check_rights(admin, settings.group_id)
    return StateTopic(found.topic_id or STATE_TOPIC, found.partitions)


def identity_changed(admin: ClusterAdmin, *, cluster_id: str, topic_id: str) -> str | None:
    """Why the state in memory is no longer the stored one; None while it is, or while that cannot be told.

    A cluster that was rebuilt under the same address, or a state topic that was deleted, has nothing to do with
    what this node knows.
    """
    try:
        now = admin.cluster_id()
        found = _describe(admin)
    except KmirrorError as error:
        logger.info("identity of the destination not checked: %s", error)
        return None
    if now is not None and now != cluster_id:
        return f"the destination is another cluster now (id {now}, this node was started on {cluster_id})"
    if found is None:
        return f"{STATE_TOPIC} was deleted"
    if (found.topic_id or STATE_TOPIC) != topic_id:
        return f"{STATE_TOPIC} was deleted and made again"
    return None


def _describe(admin: ClusterAdmin) -> TopicDescription | None:
    answers = admin.topics([STATE_TOPIC])
    error = answers.errors.get(STATE_TOPIC)
    if isinstance(error, BrokerError) and error.code == codes.UNKNOWN_TOPIC_OR_PARTITION:
        return None
    if error is not None:
        raise error
    return answers.values[STATE_TOPIC]


def _create(admin: ClusterAdmin, settings: NodeSettings) -> None:
    brokers = admin.broker_count()
    replicas = settings.mirror_topic_replication_factor or min(_DEFAULT_REPLICAS, brokers)
    configs = _CONFIGS | {"min.insync.replicas": str(min(2, replicas))}
    new = NewTopic(STATE_TOPIC, settings.mirror_topic_num_partitions, replicas, configs)
    error = admin.create_topics([new])[STATE_TOPIC]
    if error is None:
        logger.info("%s made: %d partitions, %d replicas", STATE_TOPIC, new.partitions, replicas)
    elif not (isinstance(error, BrokerError) and error.code == _TOPIC_ALREADY_EXISTS):
        raise error  # another node may have been quicker, which is as good


def _await(admin: ClusterAdmin) -> TopicDescription:
    deadline = time.monotonic() + _SETTLE_S
    while time.monotonic() < deadline:
        found = _describe(admin)
        if found is not None:
            return found
        time.sleep(_POLL_S)
    raise DeadlineError(f"{STATE_TOPIC} was made and has not appeared within {_SETTLE_S:.0f} s")


def _check_rights(admin: ClusterAdmin, group_id: str) -> None:
    """Missing rights are named at the start: later they would only be a silence."""
    held = admin.rights([STATE_TOPIC]).topics.get(STATE_TOPIC)
    missing = [] if held is None else [each for each in ("READ", "WRITE") if each not in held]
    if missing:
        raise rights_error(Right(missing[0], "topic"), STATE_TOPIC, admin.settings, *missing[1:])
    allowed = admin.group_rights([group_id]).values.get(group_id)
    if allowed is not None and "READ" not in allowed:
        raise rights_error(Right("READ", "group"), group_id, admin.settings)


def _check_policy(admin: ClusterAdmin) -> None:
    answers = admin.topic_configs([STATE_TOPIC])
    error = answers.errors.get(STATE_TOPIC)
    if error is not None:
        logger.warning("configuration of %s not checked: %s", STATE_TOPIC, error)
        return
    policy = answers.values[STATE_TOPIC].get("cleanup.policy")
    if policy is not None and policy.value != "compact":
        raise UsageError(
            f"{STATE_TOPIC}: cleanup.policy is {policy.value!r} and would delete state by age: "
            "set it to 'compact' on the destination"
        )

"""Membership in a consumer group that shares out a topic's partitions; no records are read through it.

Partitions are spread by the group protocol (cooperative: those that stay are not interrupted, KIP-429).
"""

import logging
import threading
from collections.abc import Callable

from confluent_kafka import Consumer, KafkaError, TopicPartition

from kmirror_dagster.broker.clients import consumer
from kmirror_dagster.broker.missing_rights import Right, rights_error
from kmirror_dagster.settings import ClusterSettings

logger = logging.getLogger(__name__)

_POLL_S = 0.2
_ERROR_PAUSE_S = 0.5
# Far above what a revocation may take: the session, kept by heartbeats, is what decides about a node's life.
_MAX_POLL_INTERVAL_MS = 300_000
_HEARTBEATS_PER_SESSION = 6

Listener = Callable[[list[int]], None]


class GroupMember:
    """One member of the group, in a thread of its own.

    Args:
        settings: cluster whose brokers coordinate the group.
        topic: the topic that is shared out.
        group_id: the group.
        session_timeout_ms: a member silent for longer loses its partitions.
        on_assigned: newly assigned partitions; an empty list tells that the group was joined.
        on_revoked: partitions to give up; the rebalance waits for its return, so it must stop all work on
            them.
        on_lost: partitions that are gone already, maybe in use by another member.
    All three are called in the member's thread.
    """

    def __init__(
        self,
        settings: ClusterSettings,
        topic: str,
        *,
        group_id: str,
        session_timeout_ms: int,
        on_assigned: Listener,
        on_revoked: Listener,
        on_lost: Listener,
    ) -> None:
        self._settings = settings
        self._topic = topic
        self._group_id = group_id
        self._session_timeout_ms = session_timeout_ms
        self._on_assigned = on_assigned
        self._on_revoked = on_revoked
        self._on_lost = on_lost
        self._stopping = threading.Event()
        self._rejoin = threading.Event()
        self._thread = threading.Thread(target=self._run, name="group-member", daemon=True)

    def start(self) -> None:
        """Join the group."""
        self._thread.start()

    def rejoin(self) -> None:
        """Leave and join again: used when this process slept and cannot know what it still holds."""
        self._rejoin.set()

    def stop(self) -> None:
        """Ask the thread to give everything up, leave the group and end."""
        self._stopping.set()

    def is_alive(self) -> bool:
        """Whether the thread still runs."""
        return self._thread.is_alive()

    def join(self, timeout_s: float) -> bool:
        """Wait for the thread; whether it ended."""
        if self._thread.ident is None:
            return True
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        client = consumer(
            self._settings,
            group_id=self._group_id,
            partition_assignment_strategy="cooperative-sticky",
            session_timeout_ms=self._session_timeout_ms,
            heartbeat_interval_ms=max(100, self._session_timeout_ms // _HEARTBEATS_PER_SESSION),
            max_poll_interval_ms=max(_MAX_POLL_INTERVAL_MS, self._session_timeout_ms),
            auto_offset_reset="latest",
            # a new coordinator partition or broker is noticed within this
            topic_metadata_refresh_interval_ms=30_000,
        )
        try:
            self._subscribe(client)
            while not self._stopping.is_set():
                if self._rejoin.is_set():
                    self._rejoin.clear()
                    client.unsubscribe()
                    self._subscribe(client)
                message = client.poll(_POLL_S)
                error = message.error() if message is not None else None
                if error is not None and error.code() != KafkaError._PARTITION_EOF:  # noqa: SLF001
                    logger.warning("group %s: %s", self._group_id, self._reason(error))
                    self._stopping.wait(_ERROR_PAUSE_S)
        finally:
            client.close()

    def _reason(self, error: KafkaError) -> str:
        """Why the group cannot be joined; a missing right is named with the command that grants it."""
        if error.code() == KafkaError.GROUP_AUTHORIZATION_FAILED:
            return str(rights_error(Right("READ", "group"), self._group_id, self._settings))
        if error.code() == KafkaError.TOPIC_AUTHORIZATION_FAILED:
            return str(rights_error(Right("READ", "topic"), self._topic, self._settings))
        return error.str()

    def _subscribe(self, client: Consumer) -> None:
        client.subscribe([self._topic], on_assign=self._assigned, on_revoke=self._revoked, on_lost=self._lost)

    def _assigned(self, client: Consumer, partitions: list[TopicPartition]) -> None:
        client.incremental_assign(partitions)
        # membership is all that is wanted; the follower reads
        client.pause(partitions)
        self._tell(self._on_assigned, partitions)

    def _revoked(self, client: Consumer, partitions: list[TopicPartition]) -> None:
        self._tell(self._on_revoked, partitions)
        client.incremental_unassign(partitions)

    def _lost(self, client: Consumer, partitions: list[TopicPartition]) -> None:
        self._tell(self._on_lost, partitions)
        client.incremental_unassign(partitions)

    def _tell(self, listener: Listener, partitions: list[TopicPartition]) -> None:
        try:
            listener([partition.partition for partition in partitions])
        except Exception:  # the client's C code would end the process's poll with it
            logger.exception("group %s: handling a rebalance failed", self._group_id)

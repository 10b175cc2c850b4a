"""What operators ask of a mirror, carried out by the node that leads it: create, delete and the verbs."""

import asyncio
import logging
import re
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping
from concurrent.futures import Executor
from typing import Any, cast

from kmirror_dagster.coordination.decisions import VERBS, intent_after_verb
from kmirror_dagster.coordination.keys import PartitionKey
from kmirror_dagster.coordination.models import CreateMirror, VerbRequest, VerbResult
from kmirror_dagster.coordination.refreshes import RefreshCoordinator
from kmirror_dagster.coordination.shard import Shard, Write
from kmirror_dagster.coordination.view import StateView
from kmirror_dagster.errors import (
    DeadlineError,
    IllegalTransitionError,
    MirrorExistsError,
    NotLeaderError,
    SameClusterError,
    StaleEpochError,
    UnknownMirrorError,
    UsageError,
)
from kmirror_dagster.lifecycle import DesiredState, MirrorState
from kmirror_dagster.records import MirrorRecord, RecoveryRecord, TopicRecord, encode_key
from kmirror_dagster.settings import (
    ClusterSettings,
    FilterSettings,
    MirrorSettings,
    mirror_from_document,
    name_matcher,
    refuse_literal_secrets,
)

logger = logging.getLogger(__name__)

# cluster id of a cluster, waiting at most so many seconds; the last argument says "source" or "destination"
ClusterIdReader = Callable[[ClusterSettings, float, str], str]

_CLUSTER_ID_DEADLINE_S = 20.0
_FORCED_STOP_DEADLINE_S = 20.0
_POLL_S = 0.1
# a record has to fit a message of the state topic with room to spare (max.message.bytes is 1 MiB by default)
_MAX_RECOVERY_BYTES = 512 * 1024
_REMEMBERED_OPERATIONS = 1_000
# a name without any pattern character means one topic, whether it is mirrored already or not
_TOPIC_NAME = re.compile(r"[A-Za-z0-9._-]{1,249}")


class MirrorOperations:
    """Operations on mirrors this node leads; on others they raise `NotLeaderError`.

    Args:
        view: hot copy of the state topic.
        shard_of: the shard of a coordinator partition while this node leads it.
        refreshes: of the mirrors led here.
        cluster_id: asks a cluster for its id; blocking.
        executor: where blocking calls run.
        destination_cluster_id: the cluster this node writes to.
        environ: where `${ENV}` references are looked up.
        now_ms: epoch milliseconds.
    """

    def __init__(
        self,
        view: StateView,
        shard_of: Callable[[int], Shard | None],
        refreshes: RefreshCoordinator,
        cluster_id: ClusterIdReader,
        executor: Executor,
        *,
        destination_cluster_id: str,
        environ: Mapping[str, str],
        now_ms: Callable[[], int],
    ) -> None:
        self._view = view
        self._shard_of = shard_of
        self._refreshes = refreshes
        self._cluster_id = cluster_id
        self._executor = executor
        self._destination_cluster_id = destination_cluster_id
        self._environ = environ
        self._now_ms = now_ms
        self._locks: dict[str, asyncio.Lock] = {}
        self._done: OrderedDict[tuple[str, str, str], VerbResult] = OrderedDict()

    async def create(self, request: CreateMirror) -> MirrorRecord:
        """Store a mirror, or its changed settings; nothing is written before both clusters were identified.

        Raises:
            SettingsError, SameClusterError, MirrorExistsError, ClusterUnreachableError, AuthenticationError,
            UsageError, NotLeaderError.
        """
        settings = mirror_from_document(request.document, self._environ)
        refuse_literal_secrets(request.document)
        async with self._lock(settings.mirror):
            existing = self._view.mirrors.get(settings.mirror)
            if existing is not None and existing.document == request.document:
                return existing
            if existing is not None and not request.replace:
                raise MirrorExistsError(
                    f"mirror {settings.mirror!r} exists with other settings: "
                    "replace them on purpose (--replace), or choose another name"
                )
            shard = self._shard(settings.mirror)
            if existing is None and self._view.partitions_of(settings.mirror):
                raise DeadlineError(f"mirror {settings.mirror!r} is still being deleted: try again shortly")
            source_id = await self._identify(settings, existing)
            record = MirrorRecord(
                mirror=settings.mirror,
                document=request.document,
                source_cluster_id=source_id,
                destination_cluster_id=self._destination_cluster_id,
                created_ms=existing.created_ms if existing else self._now_ms(),
                revision=existing.revision + 1 if existing else 1,
            )
            await shard.write([Write.of(record)])
            logger.info("mirror %s stored", record.mirror, extra={"mirror": record.mirror})
            return record

    async def delete(self, mirror: str, *, force: bool, dry_run: bool = False) -> None:
        """Delete a mirror's records; the destination's topics and data stay.

        A dry run raises what the deletion would, and changes nothing.

        Raises:
            UnknownMirrorError: when there is none.
            IllegalTransitionError: when a partition is not STOPPED and `force` is not set.
        """
        async with self._lock(mirror):
            shard = self._shard(mirror)
            self._known(mirror)
            if not force:
                self._refuse_active(mirror)
            if dry_run:
                return
            if force:
                await self._stop_all(mirror, shard)
            topics = self._view.topics.get(mirror, {})
            keys = [encode_key(TopicRecord.TYPE, mirror, topic) for topic in topics]
            keys += [record.key() for record in self._view.acls.values() if record.mirror == mirror]
            keys += [record.key() for record in self._view.quotas.values() if record.mirror == mirror]
            if mirror in self._view.recoveries:
                keys.append(encode_key(RecoveryRecord.TYPE, mirror))
            # one batch: no node ever sees half of a mirror's intents
            await shard.write(
                [Write.tombstone(key) for key in (*keys, encode_key(MirrorRecord.TYPE, mirror))]
            )
            # a refresh that ended meanwhile may have stored further intents right before that
            while further := [
                encode_key(TopicRecord.TYPE, mirror, t) for t in self._view.topics.get(mirror, {})
            ]:
                await shard.write([Write.tombstone(key) for key in further])
            logger.info("mirror %s deleted", mirror, extra={"mirror": mirror})

    def recovery(self, mirror: str) -> RecoveryRecord | None:
        """How far the last failback or switchover of a mirror is; None when there was none."""
        return self._view.recoveries.get(mirror)

    async def record_recovery(self, mirror: str, record: RecoveryRecord) -> RecoveryRecord:
        """Store how far a failback or switchover is.

        Raises:
            StaleEpochError: when it was not decided by the stored revision.
            IllegalTransitionError: when another one is under way.
            UsageError: when it is of another mirror or too large for a record.
            UnknownMirrorError, NotLeaderError.
        """
        if record.mirror != mirror:
            raise UsageError(f"recovery of mirror {record.mirror!r} sent to mirror {mirror!r}")
        if len(record.value()) > _MAX_RECOVERY_BYTES:
            raise UsageError(
                f"the {record.operation} of mirror {mirror!r} has too many partitions for one record "
                f"({len(record.value())} bytes): do it by topics (--topics)"
            )
        async with self._lock(mirror):
            shard = self._shard(mirror)
            self._known(mirror)
            stored = self._view.recoveries.get(mirror)
            told = record.model_copy(update={"revision": record.revision + 1, "updated_ms": self._now_ms()})
            if stored is not None and stored == told.model_copy(update={"updated_ms": stored.updated_ms}):
                return stored  # asked again after a lost answer
            if record.revision != (stored.revision if stored else 0):
                raise StaleEpochError(
                    f"mirror {mirror!r}: somebody else goes on with its {stored.operation if stored else 'recovery'} "
                    "(a newer step is stored): look where it is, then run the command again"
                )
            if stored and not stored.finished and stored.operation_id != record.operation_id:
                raise IllegalTransitionError(
                    f"mirror {mirror!r}: a {stored.operation} is under way (step {stored.step}): end that first"
                )
            await shard.write([Write.of(told)])
            logger.info(
                "mirror %s: %s at step %s", mirror, told.operation, told.step, extra={"mirror": mirror}
            )
            return told

    async def verb(self, mirror: str, verb: str, request: VerbRequest) -> VerbResult:
        """Store what an operator wants of a mirror's topics; `recover` is not among these.

        Raises:
            UnknownMirrorError, IllegalTransitionError, UsageError, NotLeaderError.
        """
        if verb not in VERBS or verb == "recover":
            raise UsageError(f"unknown verb {verb!r}; there are {', '.join(VERBS)}")
        async with self._lock(mirror):
            shard = self._shard(mirror)
            record = self._known(mirror)
            operation = (mirror, verb, request.operation_id or "")
            if request.operation_id is not None and operation in self._done:
                return self._done[operation]
            selected = self.select(mirror, request.topics, must_match=verb != "start")
            intents, unchanged = self._intents(verb, selected, explicit=request.topics is not None)
            writes: list[Write] = [Write.of(intent) for intent in intents]
            if verb == "start" and request.topics is not None:
                writes += self._started_by_name(record, request.topics)
            if writes and not request.dry_run:
                await shard.write(writes)
            result = VerbResult(
                mirror=mirror,
                verb=verb,
                changed=sorted({w.record.topic for w in writes if isinstance(w.record, TopicRecord)}),
                unchanged=unchanged,
                partitions=sum(intent.partitions for intent in intents),
            )
            if request.dry_run:
                return result
            self._remember(operation, result)
        if verb in ("start", "resume") and writes:
            self._refreshes.request(mirror)
        return result

    def select(
        self, mirror: str, patterns: list[str] | None, *, must_match: bool = True
    ) -> list[TopicRecord]:
        """Topics of a mirror that whole-name patterns select, by name.

        Raises:
            UnknownMirrorError: when there is no such mirror.
            UsageError: when a pattern is malformed, or none of the topics is selected and one must be.
        """
        self._known(mirror)
        try:
            matches = name_matcher(patterns)
        except ValueError as error:
            raise UsageError(f"topics: {error}") from error
        topics = self._view.topics.get(mirror, {})
        selected = [topics[name] for name in sorted(topics) if matches(name)]
        if must_match and not selected:
            what = f"no topic matches {', '.join(patterns)}" if patterns else "no topic is mirrored yet"
            raise UsageError(f"mirror {mirror!r}: {what}; see 'kmirror describe {mirror}'")
        return selected

    def _lock(self, mirror: str) -> asyncio.Lock:
        return self._locks.setdefault(mirror, asyncio.Lock())

    def _shard(self, mirror: str) -> Shard:
        shard = self._shard_of(self._view.mirror_owner(mirror))
        if shard is None:
            raise NotLeaderError(f"mirror {mirror!r} is led by another node")
        return shard

    def _known(self, mirror: str) -> MirrorRecord:
        record = self._view.mirrors.get(mirror)
        if record is None:
            known = ", ".join(sorted(self._view.mirrors)) or "none yet"
            raise UnknownMirrorError(f"mirror {mirror!r} does not exist; there are: {known}")
        return record

    async def _identify(self, settings: MirrorSettings, existing: MirrorRecord | None) -> str:
        """Source cluster's id, once both clusters are known to be who they should be."""
        loop = asyncio.get_running_loop()
        source_id, destination_id = await asyncio.gather(
            loop.run_in_executor(
                self._executor, self._cluster_id, settings.source, _CLUSTER_ID_DEADLINE_S, "source"
            ),
            loop.run_in_executor(
                self._executor, self._cluster_id, settings.destination, _CLUSTER_ID_DEADLINE_S, "destination"
            ),
        )
        name = settings.mirror
        if source_id == destination_id:
            raise SameClusterError(
                f"mirror {name!r}: source and destination are the same cluster ({source_id}): "
                "check bootstrap.servers of both"
            )
        if destination_id != self._destination_cluster_id:
            raise UsageError(
                f"mirror {name!r}: its destination is cluster {destination_id}, this node writes to "
                f"{self._destination_cluster_id}: name that cluster, or ask a node of the other one"
            )
        if existing is not None and existing.source_cluster_id != source_id:
            raise UsageError(
                f"mirror {name!r}: its source is cluster {source_id} now, it was made for "
                f"{existing.source_cluster_id}: a mirror keeps its source; delete it and create another one"
            )
        return source_id

    def _refuse_active(self, mirror: str) -> None:
        states = self._view.states
        active = sorted(
            name
            for name in self._view.partitions_of(mirror)
            if (state := states.get(name)) is not None and state.state is not MirrorState.STOPPED
        )
        if active:
            first = active[0]
            raise IllegalTransitionError(
                f"mirror {mirror!r}: {len(active)} partition(s) are not STOPPED, "
                f"{first.topic}/{first.partition} is {states[first].state}: "
                f"run 'kmirror stop {mirror}' first, or delete with --force"
            )

    async def _stop_all(self, mirror: str, shard: Shard) -> None:
        """Give every partition the chance to end in order; deletion goes on without those that do not."""
        now = self._now_ms()
        topics = self._view.topics.get(mirror, {}).values()
        intents = [
            intent for topic in topics if (intent := intent_after_verb("stop", topic, now)) is not None
        ]
        if intents:
            await shard.write([Write.of(intent) for intent in intents])
        deadline = time.monotonic() + _FORCED_STOP_DEADLINE_S
        while time.monotonic() < deadline:
            try:
                self._refuse_active(mirror)
            except IllegalTransitionError:
                await asyncio.sleep(_POLL_S)
            else:
                return
        logger.warning(
            "mirror %s: deleted with partitions that did not stop", mirror, extra={"mirror": mirror}
        )

    def _intents(
        self, verb: str, topics: list[TopicRecord], *, explicit: bool
    ) -> tuple[list[TopicRecord], list[str]]:
        """Intents to store, and topics that stay as they are; a named one that cannot follow is an error."""
        now = self._now_ms()
        intents: list[TopicRecord] = []
        unchanged: list[str] = []
        refused: list[IllegalTransitionError] = []
        for topic in topics:
            try:
                intent = intent_after_verb(verb, topic, now)
            except IllegalTransitionError as error:
                refused.append(error)
                intent = None
            if intent is None:
                unchanged.append(topic.topic)
            else:
                intents.append(intent)
        if refused and (explicit or len(refused) == len(topics)):
            raise refused[0]
        return intents, unchanged

    def _started_by_name(self, record: MirrorRecord, patterns: list[str]) -> list[Write]:
        """Writes that start topics nobody has met yet: an intent for a name, the filter for a pattern."""
        filters = mirror_from_document(record.document, self._environ).filters
        known = self._view.topics.get(record.mirror, {})
        names = [pattern for pattern in patterns if _TOPIC_NAME.fullmatch(pattern)]
        excluded = [name for name in names if filters.excludes_topic(name)]
        if excluded:
            raise UsageError(
                f"mirror {record.mirror!r}: {', '.join(excluded)} is excluded by topics.exclude: "
                "change the mirror's filters first"
            )
        now = self._now_ms()
        writes = [
            Write.of(
                TopicRecord(
                    mirror=record.mirror,
                    topic=name,
                    partitions=0,
                    started_by="operator",
                    since_ms=now,
                    revision=1,
                )
            )
            for name in names
            if name not in known
        ]
        further = [p for p in patterns if p not in names and p not in filters.topics_include]
        if further:
            document = with_included_topics(record.document, filters, further)
            mirror_from_document(document, self._environ)
            update = {"document": document, "revision": record.revision + 1}
            writes.append(Write.of(record.model_copy(update=update)))
        return writes

    def _remember(self, operation: tuple[str, str, str], result: VerbResult) -> None:
        if not operation[2]:
            return
        self._done[operation] = result
        while len(self._done) > _REMEMBERED_OPERATIONS:
            self._done.popitem(last=False)


def with_included_topics(
    document: Mapping[str, Any], filters: FilterSettings, patterns: list[str]
) -> dict[str, Any]:
    """Copy of a mirror document whose filter selects further topics."""
    section: dict[str, Any] = dict(cast("Mapping[str, Any]", document.get("filters") or {}))
    section.pop("topics_include", None)  # the other spelling of the same setting
    section["topics.include"] = [*filters.topics_include, *patterns]
    return {**document, "filters": section}


def recoverable(view: StateView, topics: list[TopicRecord]) -> list[PartitionKey]:
    """FAILED partitions of topics, by name; those whose topic is to be stopped recover by their own stop."""
    wanted = {
        (topic.mirror, topic.topic): topic.partitions
        for topic in topics
        if topic.desired is not DesiredState.STOPPED
    }
    return [
        name
        for (mirror, topic), count in sorted(wanted.items())
        for name in (PartitionKey(mirror, topic, partition) for partition in range(count))
        if (state := view.states.get(name)) is not None and state.state is MirrorState.FAILED
    ]

"""Puts the workload onto a cluster: topics, records, transactions, consumer groups, a log start above 0."""

import dataclasses
import random
import threading
import time
from collections.abc import Callable, Iterator, Mapping

from kmirror_dagster.broker import clients
from kmirror_dagster.broker.admin import ClusterAdmin
from kmirror_dagster.broker.admin_types import CommittedOffset, NewTopic, OffsetKind, Partition
from kmirror_dagster.errors import BrokerError, DeadlineError, KmirrorError, SandboxError
from kmirror_dagster.sandbox import workload as shop
from kmirror_dagster.sandbox.seed_report import GroupReport, SeedReport, TopicReport
from kmirror_dagster.sandbox.seed_writer import SeedWriter
from kmirror_dagster.sandbox.workload import SeedRecord, SeedTopic, SeedTransaction, Workload
from kmirror_dagster.settings import ClusterSettings

DEFAULT_RECORDS = 20_000
DEFAULT_SEED = 1279

_TICK_S = 0.05
_COMMIT_EVERY_S = 5.0
_READ_DEADLINE_S = 30.0
_READY_S = 30.0
_TOPIC_ALREADY_EXISTS = 36
_HOUR_MS = 3_600_000

Item = SeedRecord | SeedTransaction
Progress = Callable[[int], None]


class Seeder:
    """One run of `kmirror sandbox seed`.

    The same `seed` and `base_ms` give the same records; running it again appends them again.
    """

    def __init__(
        self,
        settings: ClusterSettings,
        *,
        seed: int = DEFAULT_SEED,
        base_ms: int | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """Describe a run; nothing is written yet.

        Args:
            settings: cluster to write to.
            seed: seed number.
            base_ms: timestamp of the first record of each topic; default: an hour ago.
            clock: epoch seconds, for the timestamps of `stream`.
        """
        self._clock = clock
        self._seed = seed
        self._base_ms = round(clock() * 1000) - _HOUR_MS if base_ms is None else base_ms
        self._admin = ClusterAdmin(settings)
        self._settings = settings
        self._writer = SeedWriter(settings)
        self._groups: dict[str, Mapping[Partition, int]] = {}
        self._begin = time.monotonic()

    def __enter__(self) -> "Seeder":
        """Nothing is opened before it is needed."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close the clients."""
        self._writer.close()
        self._admin.close()

    def create_topics(self) -> None:
        """Create the topics that are missing.

        Raises:
            KmirrorError: a topic cannot be created.
        """
        replicas = min(3, self._admin.broker_count())
        topics = [NewTopic(each.name, each.partitions, replicas, dict(each.configs)) for each in shop.TOPICS]
        for error in self._admin.create_topics(topics).values():
            if error is not None and not (
                isinstance(error, BrokerError) and error.code == _TOPIC_ALREADY_EXISTS
            ):
                raise error
        self._await_leaders()

    def _await_leaders(self) -> None:
        """Wait until every partition answers: a created topic is not led at once."""
        deadline = time.monotonic() + _READY_S
        for topic in shop.TOPICS:
            while True:
                try:
                    self._range(topic)
                    break
                except KmirrorError as error:
                    if not error.retriable or time.monotonic() >= deadline:
                        raise
                    time.sleep(_TICK_S)

    def bulk(self, records: int = DEFAULT_RECORDS, progress: Progress = lambda count: None) -> None:
        """Write the workload as fast as it goes, then commit groups and cut the beginning of the audit log.

        Args:
            records: about how many; the records of the odd topic come on top.
            progress: called with the number of records just handed over.
        """
        for item in _bulk(Workload(self._seed, self._base_ms), records):
            progress(self._write(item))
        self._writer.flush()
        self._cut_audit_log()
        self.commit_groups()
        self._consume_and_commit("dashboards", shop.CLICKS[0])

    def stream(self, rate: float, stop: threading.Event, progress: Progress = lambda count: None) -> None:
        """Write records of all topics at a steady rate until told to stop; groups follow.

        Args:
            rate: records per second, over all topics.
            stop: ends it; what is written by then is complete.
            progress: called with the number of records just handed over.
        """
        items = _mixed(Workload(self._seed, self._base_ms), random.Random(self._seed))  # noqa: S311
        begin = committed = time.monotonic()
        done = 0
        while not stop.wait(_TICK_S):
            now = time.monotonic()
            while done < (now - begin) * rate:
                count = self._write(_at(next(items), round(self._clock() * 1000)))
                done += count
                progress(count)
            if now - committed >= _COMMIT_EVERY_S:
                self._writer.flush()
                self.commit_groups()
                committed = now
        self._writer.flush()
        self.commit_groups()

    def commit_groups(self) -> None:
        """Commit positions of groups without members: behind, at the end, at the start, at 0.

        Raises:
            KmirrorError: a commit was refused.
        """
        orders, payments = self._range(shop.ORDERS), self._range(shop.PAYMENTS)
        audit = self._range(shop.AUDIT)
        self._commit(
            "billing", {key: start + (end - start) * 6 // 10 for key, (start, end) in orders.items()}
        )
        self._commit("shipping", {key: end for key, (_, end) in (orders | payments).items()})
        self._commit("auditors", {key: start for key, (start, _) in audit.items()})
        self._commit("newcomers", {(shop.CLICKS[-1].name, 0): 0})

    def report(self) -> SeedReport:
        """What was written so far."""
        return SeedReport(
            seed=self._seed,
            base_ms=self._base_ms,
            seconds=round(time.monotonic() - self._begin, 3),
            topics=tuple(self._topic_report(topic) for topic in shop.TOPICS),
            groups=tuple(
                GroupReport(
                    group=group, offsets={f"{topic}/{number}": at for (topic, number), at in offsets.items()}
                )
                for group, offsets in sorted(self._groups.items())
            ),
        )

    def _topic_report(self, topic: SeedTopic) -> TopicReport:
        ranges = self._range(topic).values()
        return TopicReport(
            topic=topic.name,
            compression=topic.compression,
            written=self._writer.written[topic.name],
            aborted=self._writer.aborted[topic.name],
            log_starts=tuple(start for start, _ in ranges),
            log_ends=tuple(end for _, end in ranges),
        )

    def _write(self, item: Item) -> int:
        if isinstance(item, SeedTransaction):
            self._writer.transact(item)
            return len(item.records)
        self._writer.send(item)
        return 1

    def _range(self, topic: SeedTopic) -> dict[Partition, tuple[int, int]]:
        """Log start and end of each partition."""
        keys = [(topic.name, number) for number in range(topic.partitions)]
        starts = self._admin.list_offsets(keys, OffsetKind.EARLIEST)
        ends = self._admin.list_offsets(keys, OffsetKind.LATEST)
        _raise_first({**starts.errors, **ends.errors})
        return {key: (starts.values[key].offset, ends.values[key].offset) for key in keys}

    def _cut_audit_log(self) -> None:
        before = {key: start + (end - start) // 4 for key, (start, end) in self._range(shop.AUDIT).items()}
        _raise_first(self._admin.delete_records(before).errors)

    def _commit(self, group: str, offsets: Mapping[Partition, int]) -> None:
        positions = {key: CommittedOffset(offset) for key, offset in offsets.items()}
        deadline = time.monotonic() + _READY_S
        while True:
            try:
                answers = self._admin.alter_group_offsets({group: positions})
                _raise_first(answers.errors)
                _raise_first(answers.values[group])
                break
            except KmirrorError as error:
                # a cluster this young may still be loading its group coordinators
                if not error.retriable or time.monotonic() >= deadline:
                    raise
            time.sleep(_TICK_S)
        self._groups[group] = {**self._groups.get(group, {}), **offsets}

    def _consume_and_commit(self, group: str, topic: SeedTopic) -> None:
        """Be a member of a group, read a topic to its end, commit."""
        ends = {key: end for key, (_, end) in self._range(topic).items()}
        committed = self._admin.group_offsets([group]).values.get(group, {})
        positions = {key: committed[key].offset if key in committed else 0 for key in ends}
        read = 0
        consumer = clients.consumer(
            self._settings, group_id=group, auto_offset_reset="earliest", fetch_wait_max_ms=50
        )
        try:
            consumer.subscribe([topic.name])
            deadline = time.monotonic() + _READ_DEADLINE_S
            while any(positions[key] < end for key, end in ends.items()):
                message = consumer.poll(0.2)
                if time.monotonic() >= deadline:
                    raise DeadlineError(
                        f"group {group} cannot read {topic.name} to its end; see the broker's log"
                    )
                if message is None:
                    continue
                error = message.error()
                if error is not None:
                    raise SandboxError(f"group {group} cannot read {topic.name}: {error.str()}")
                positions[topic.name, message.partition() or 0] = (message.offset() or 0) + 1
                read += 1
            if read:
                consumer.commit(asynchronous=False)
        finally:
            consumer.close()
        self._groups[group] = ends


def _raise_first(errors: Mapping[Partition, KmirrorError | None] | Mapping[str, KmirrorError]) -> None:
    for error in errors.values():
        if error is not None:
            raise error


def _bulk(source: Workload, records: int) -> Iterator[Item]:
    """All items of a bulk run, topic after topic but in slices, so that all topics grow together."""
    yield from source.oddities()
    streams: list[tuple[Iterator[Item], int]] = [
        (stream, max(1, records * topic.share // 100)) for topic, stream in _streams(source)
    ]
    slices = 20
    done = [0] * len(streams)
    for turn in range(1, slices + 1):
        for index, (stream, total) in enumerate(streams):
            while done[index] < total * turn // slices:
                item = next(stream)
                done[index] += _size(item)
                yield item


def _streams(source: Workload) -> list[tuple[SeedTopic, Iterator[Item]]]:
    return [
        (shop.ORDERS, source.orders()),
        (shop.PAYMENTS, source.payments()),
        (shop.CUSTOMERS, source.customers()),
        (shop.AUDIT, source.audit()),
        *((topic, source.clicks(topic)) for topic in shop.CLICKS),
    ]


def _mixed(source: Workload, rng: random.Random) -> Iterator[Item]:
    """Items of all topics for ever, in proportion to their shares."""
    streams = _streams(source)
    # A transaction counts for all its records.
    weights = [
        topic.share / (shop.TRANSACTION_RECORDS if topic is shop.PAYMENTS else 1) for topic, _ in streams
    ]
    while True:
        (_, stream), *_ = rng.choices(streams, weights)
        yield next(stream)


def _size(item: Item) -> int:
    return len(item.records) if isinstance(item, SeedTransaction) else 1


def _at(item: Item, time_ms: int) -> Item:
    """The item with the given timestamp on every record."""
    if isinstance(item, SeedTransaction):
        return SeedTransaction(
            tuple(dataclasses.replace(record, timestamp_ms=time_ms) for record in item.records), item.commits
        )
    return dataclasses.replace(item, timestamp_ms=time_ms)

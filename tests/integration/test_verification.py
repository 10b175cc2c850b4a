"""Comparison of two real clusters that hold the same, or nearly the same."""

import threading
import time
from collections.abc import Callable, Iterable, Sequence

import pytest
from kafka import KafkaProducer

from kmirror_dagster.broker.log_records import LogRange
from kmirror_dagster.broker.reader import RangeReader
from kmirror_dagster.errors import ClusterUnreachableError, DeadlineError, SameClusterError
from kmirror_dagster.settings import ClusterSettings, FilterSettings, MirrorSettings
from kmirror_dagster.verification.compare import VerifyLimits, VerifyProgress, compare_mirror
from kmirror_dagster.verification.report import DifferenceKind, Isolation, VerifyReport
from tests.conftest import Clusters
from tests.helpers.kafka import (
    Record,
    commit_offsets,
    consume,
    create_topic,
    delete_records,
    produce,
    produce_transaction,
    producer,
    write,
)
from tests.helpers.waiting import unique_name, wait_until

pytestmark = pytest.mark.integration

# not older than the retention of the topics
BASE_MS = time.time_ns() // 1_000_000 - 60_000
AT_ONCE = VerifyLimits(settle_s=0, groups=False)


@pytest.fixture
def topic(clusters: Clusters) -> str:
    """A topic of this test alone, on both clusters."""
    return on_both(clusters, partitions=2)


def on_both(clusters: Clusters, *, partitions: int = 1, configs: dict[str, str] | None = None) -> str:
    name = unique_name("verified")
    for cluster in (clusters.source, clusters.destination):
        create_topic(cluster.bootstrap, name, partitions, configs)
    return name


def settings(clusters: Clusters, *, groups: Sequence[str] = ()) -> MirrorSettings:
    return MirrorSettings(
        mirror="verified",
        source=clusters.source.settings(),
        destination=clusters.destination.settings(),
        filters=FilterSettings(groups_include=tuple(groups)),
    )


def both(clusters: Clusters, action: Callable[[str], object]) -> None:
    for cluster in (clusters.source, clusters.destination):
        action(cluster.bootstrap)


def compare(clusters: Clusters, *topics: str, limits: VerifyLimits = AT_ONCE) -> VerifyReport:
    return compare_mirror(settings(clusters), topics, limits=limits)


def records(count: int, *, partition: int = 0, first: int = 0) -> list[Record]:
    return [
        Record(value=b"value-%d" % n, key=b"key-%d" % n, timestamp=BASE_MS + n, partition=partition)
        for n in range(first, first + count)
    ]


ODD_RECORDS = [
    Record(value=b"plain", timestamp=BASE_MS),
    Record(value=b"one", headers=(("h", b"1"),), timestamp=BASE_MS),
    Record(value=b"same name", headers=(("h", b"2"), ("h", b"1"), ("h", b"3")), timestamp=BASE_MS),
    Record(value=b"null header", headers=(("h", None),), timestamp=BASE_MS),
    Record(value=b"empty header", headers=(("h", b""), ("", b"")), timestamp=BASE_MS),
    Record(value=b"not text", headers=(("h", b"\xff\xfe\x00"), ("gr\u00fc\u00df", b"")), timestamp=BASE_MS),
    Record(value=b"many", headers=tuple((f"h{n}", b"%d" % n) for n in range(500)), timestamp=BASE_MS),
    Record(value=None, key=b"k", timestamp=BASE_MS - 50_000),
    Record(value=b"", key=b"k", timestamp=BASE_MS - 10_000),
    Record(value=b"v", key=None, timestamp=BASE_MS),
    Record(value=b"v", key=b"", timestamp=BASE_MS),
    Record(value=None, key=None, timestamp=BASE_MS),
    Record(value=b"x" * 900_000, key=b"large", timestamp=BASE_MS),
]


def test_equal_topics_are_equal_at_both_levels(clusters: Clusters, topic: str) -> None:
    """Equal logs of several partitions show no difference, and every record is counted at both levels."""
    for partition in (0, 1):
        both(
            clusters,
            lambda bootstrap, p=partition: produce(bootstrap, topic, records(5_000, partition=p)),
        )
    report = compare(clusters, topic)
    assert report.ok, report
    assert report.partitions == 2
    assert report.records == {Isolation.READ_UNCOMMITTED: 10_000, Isolation.READ_COMMITTED: 10_000}


@pytest.mark.case("C01")
@pytest.mark.case("C02")
def test_odd_records_are_equal_to_themselves(clusters: Clusters, topic: str) -> None:
    """Headers of every kind, null and empty keys and values are read alike from both sides."""
    both(clusters, lambda bootstrap: produce(bootstrap, topic, ODD_RECORDS))
    report = compare(clusters, topic)
    assert report.ok, report.differences
    assert report.records[Isolation.READ_COMMITTED] == len(ODD_RECORDS)


class NotText(str):
    """A header name that goes over the wire as bytes which are no UTF-8."""

    __slots__ = ()

    def encode(self, encoding: str = "utf-8", errors: str = "strict") -> bytes:
        return b"\xff\xfe"


def test_header_names_that_are_no_text_are_told(clusters: Clusters, topic: str) -> None:
    """Headers the client library cannot give are counted as not compared; the record itself is compared."""

    def put(bootstrap: str) -> None:
        client = KafkaProducer(bootstrap_servers=bootstrap)
        client.send(topic, b"v", headers=[(NotText("x"), b"1")], partition=0, timestamp_ms=BASE_MS).get(30)
        client.close()
        produce(bootstrap, topic, records(3))

    both(clusters, put)
    report = compare(clusters, topic)
    assert report.ok, report
    assert report.unreadable_headers == 2  # at both levels
    assert report.records[Isolation.READ_COMMITTED] == 4


@pytest.mark.case("C01")
@pytest.mark.case("C02")
@pytest.mark.parametrize(
    ("mine", "theirs", "kind"),
    [
        (Record(b"v", b"k", (("h", None),)), Record(b"v", b"k", (("h", b""),)), DifferenceKind.HEADERS),
        (
            Record(b"v", b"k", (("h", b"1"), ("h", b"2"))),
            Record(b"v", b"k", (("h", b"2"), ("h", b"1"))),
            DifferenceKind.HEADERS,
        ),
        (Record(b"v", b"k", (("h", b"1"),)), Record(b"v", b"k"), DifferenceKind.HEADERS),
        (Record(None, b"k"), Record(b"", b"k"), DifferenceKind.VALUE),
        (Record(b"v", None), Record(b"v", b""), DifferenceKind.KEY),
        (Record(b"v", b"k"), Record(b"w", b"k"), DifferenceKind.VALUE),
        (Record(b"v", b"k"), Record(b"v", b"k", timestamp=BASE_MS + 1), DifferenceKind.TIMESTAMP),
    ],
)
def test_a_differing_record_is_found(
    clusters: Clusters, topic: str, mine: Record, theirs: Record, kind: DifferenceKind
) -> None:
    """One planted difference of each kind is found at its offset, at both levels."""
    for cluster, odd in ((clusters.source, mine), (clusters.destination, theirs)):
        stamped = Record(odd.value, odd.key, odd.headers, odd.timestamp or BASE_MS)
        produce(cluster.bootstrap, topic, [*records(3), stamped, *records(3)])
    report = compare(clusters, topic)
    assert [(d.kind, d.partition, d.offset, d.isolation) for d in report.differences] == [
        (kind, 0, 3, level) for level in Isolation
    ]
    assert report.differences_total == 2


def test_a_lost_tail_and_a_foreign_tail_are_found(clusters: Clusters, topic: str) -> None:
    """A destination that ends too early or too late is a difference in its range."""
    produce(clusters.source.bootstrap, topic, [*records(10), *records(7, partition=1)])
    produce(clusters.destination.bootstrap, topic, [*records(7), *records(9, partition=1)])
    report = compare(clusters, topic)
    assert {(d.kind, d.partition) for d in report.differences} == {
        (DifferenceKind.OFFSET_RANGE, 0),
        (DifferenceKind.OFFSET_RANGE, 1),
    }
    assert report.records[Isolation.READ_COMMITTED] == 14
    assert "source 10, destination 7" in report.differences[0].detail


def test_a_duplicated_batch_is_found(clusters: Clusters, topic: str) -> None:
    """Records appended twice at the destination are counted as duplicates."""
    produce(clusters.source.bootstrap, topic, records(100))
    produce(
        clusters.destination.bootstrap, topic, [*records(50), *records(20, first=30), *records(30, first=50)]
    )
    report = compare(clusters, topic)
    assert report.duplicates == 2 * 20  # at both levels
    assert not report.ok


def test_a_differing_log_start_is_found(clusters: Clusters, topic: str) -> None:
    """Deleted heads are compared by log start, and what both still hold record by record."""
    both(clusters, lambda bootstrap: produce(bootstrap, topic, records(10)))
    delete_records(clusters.source.bootstrap, topic, 4)
    report = compare(clusters, topic)
    assert [d.detail for d in report.differences] == ["log start: source 4, destination 0 after 0 s"]
    assert report.records[Isolation.READ_COMMITTED] == 6
    delete_records(clusters.destination.bootstrap, topic, 4)
    assert compare(clusters, topic).ok


@pytest.mark.case("C10")
def test_a_commit_marker_at_the_tail_ends_the_comparison(clusters: Clusters, topic: str) -> None:
    """Control records at the end are never waited for, and their offsets count at both sides."""
    both(clusters, lambda bootstrap: produce_transaction(bootstrap, topic, records(1)))
    both(clusters, lambda bootstrap: produce_transaction(bootstrap, topic, records(2), commit=False))
    report = compare(clusters, topic, limits=VerifyLimits(settle_s=0, groups=False, deadline_s=20))
    assert report.ok, report
    assert report.records == {Isolation.READ_UNCOMMITTED: 3, Isolation.READ_COMMITTED: 1}


def test_a_missing_transaction_is_found_where_it_is_readable(clusters: Clusters, topic: str) -> None:
    """An aborted transaction in place of a committed one differs for read_committed readers only."""
    produce_transaction(clusters.source.bootstrap, topic, records(3))
    produce_transaction(clusters.destination.bootstrap, topic, records(3), commit=False)
    report = compare(clusters, topic)
    assert {(d.kind, d.isolation) for d in report.differences} == {
        (DifferenceKind.MISSING, Isolation.READ_COMMITTED)
    }
    assert report.differences_total == 3


def test_an_open_transaction_at_the_source_is_left_out(clusters: Clusters, topic: str) -> None:
    """What no transaction has decided yet need not be at the destination."""
    both(clusters, lambda bootstrap: produce(bootstrap, topic, records(5)))
    client = producer(clusters.source.bootstrap, {"transactional.id": unique_name("open")})
    client.init_transactions(30)
    client.begin_transaction()
    write(client, topic, records(2))
    assert client.flush(30) == 0
    try:
        report = compare(clusters, topic)
    finally:
        client.abort_transaction(30)
    assert report.ok, report
    assert report.records[Isolation.READ_UNCOMMITTED] == 5


def test_a_topic_that_is_written_to_is_compared_as_it_was(clusters: Clusters, topic: str) -> None:
    """While both sides grow, the source's end is taken first and the destination gets time to reach it."""
    ended = threading.Event()
    first = 0

    def grow() -> None:
        nonlocal first
        clients = [producer(cluster.bootstrap) for cluster in (clusters.source, clusters.destination)]
        while not ended.is_set():
            for client in clients:  # the destination a little later
                write(client, topic, records(200, first=first))
                assert client.flush(30) == 0
            first += 200

    writer = threading.Thread(target=grow)
    writer.start()
    try:
        for _ in range(3):
            report = compare(clusters, topic, limits=VerifyLimits(settle_s=20, groups=False))
            assert report.ok, report
    finally:
        ended.set()
        writer.join()


def test_only_the_end_of_each_partition(clusters: Clusters, topic: str) -> None:
    """With a limit only the newest offsets are compared."""
    both(clusters, lambda bootstrap: produce(bootstrap, topic, records(50)))
    report = compare(clusters, topic, limits=VerifyLimits(settle_s=0, groups=False, last_offsets=10))
    assert report.records[Isolation.READ_COMMITTED] == 10


def test_topics_and_partitions_that_exist_on_one_side_only(clusters: Clusters) -> None:
    """A topic or partition that the destination lacks is a difference, and the rest is compared."""
    wide, gone = unique_name("wide"), unique_name("gone")
    create_topic(clusters.source.bootstrap, wide, 3)
    create_topic(clusters.destination.bootstrap, wide, 1)
    create_topic(clusters.source.bootstrap, gone, 1)
    both(clusters, lambda bootstrap: produce(bootstrap, wide, records(5)))
    report = compare(clusters, wide, gone)
    assert [(d.topic, d.partition) for d in report.differences] == [(gone, -1), (wide, -1)]
    assert "cannot be read at the destination" in report.differences[0].detail
    assert "source has 3 partitions, destination 1" in report.differences[1].detail
    assert report.records[Isolation.READ_COMMITTED] == 5


def test_committed_group_offsets_are_compared(clusters: Clusters, topic: str) -> None:
    """Committed offsets have to be the source's, clamped to the destination's log."""
    group = unique_name("group")
    both(clusters, lambda bootstrap: produce(bootstrap, topic, records(10)))
    commit_offsets(clusters.source.bootstrap, group, [(topic, 0, 4), (topic, 1, 0)])
    chosen = settings(clusters, groups=[group])
    limits = VerifyLimits(settle_s=0)
    report = compare_mirror(chosen, [topic], limits=limits)
    assert {d.kind for d in report.differences} == {DifferenceKind.GROUP_OFFSET}
    assert report.groups == 2
    assert f"group {group}: expected 4, destination has no committed offset" in report.differences[0].detail
    commit_offsets(clusters.destination.bootstrap, group, [(topic, 0, 5), (topic, 1, 0)])
    report = compare_mirror(chosen, [topic], limits=limits)
    assert [d.detail for d in report.differences] == [f"group {group}: expected 4, destination has 5"]
    commit_offsets(clusters.destination.bootstrap, group, [(topic, 0, 4)])
    report = compare_mirror(chosen, [topic], limits=limits)
    assert report.ok, report
    delete_records(clusters.source.bootstrap, topic, 6)
    delete_records(clusters.destination.bootstrap, topic, 6)
    commit_offsets(clusters.destination.bootstrap, group, [(topic, 0, 6)])
    report = compare_mirror(chosen, [topic], limits=limits)
    assert report.ok, report


def test_progress_reaches_its_total(clusters: Clusters, topic: str) -> None:
    """Progress counts up to the offsets there are to compare."""
    both(clusters, lambda bootstrap: produce(bootstrap, topic, records(1_000)))
    seen: list[VerifyProgress] = []
    compare_mirror(settings(clusters), [topic], limits=AT_ONCE, progress=seen.append)
    assert seen[0].total is None
    assert (seen[-1].done, seen[-1].total) == (2_000, 2_000)


def test_an_unreachable_source_is_named(clusters: Clusters, monkeypatch: pytest.MonkeyPatch) -> None:
    """A source nobody answers at ends the comparison with its address."""
    monkeypatch.setattr("kmirror_dagster.verification.compare._REACH_DEADLINE_S", 1.0)
    dead = ClusterSettings.model_validate({"bootstrap.servers": "127.0.0.1:1"})
    broken = settings(clusters).model_copy(update={"source": dead})
    with pytest.raises(ClusterUnreachableError, match=r"cannot reach source cluster at 127\.0\.0\.1:1"):
        compare_mirror(broken, ["any"])


def test_a_cluster_is_not_compared_with_itself(clusters: Clusters) -> None:
    """One cluster under both names is refused."""
    same = settings(clusters).model_copy(update={"destination": clusters.source.settings()})
    with pytest.raises(SameClusterError, match="same cluster"):
        compare_mirror(same, ["any"])


def test_the_deadline_ends_the_wait_for_a_lagging_destination(clusters: Clusters, topic: str) -> None:
    """A destination that does not catch up ends the comparison at the deadline given."""
    produce(clusters.source.bootstrap, topic, records(5))
    with pytest.raises(DeadlineError, match="1 partitions of the destination are behind"):
        compare(clusters, topic, limits=VerifyLimits(settle_s=60, groups=False, deadline_s=2))


def test_a_compacted_topic_cleaned_on_one_side_is_equal(clusters: Clusters) -> None:
    """Records that only one side's cleaner removed yet are no differences."""
    configs = {
        "cleanup.policy": "compact",
        "segment.ms": "100",
        "min.cleanable.dirty.ratio": "0.01",
        "max.compaction.lag.ms": "200",
        "file.delete.delay.ms": "0",
    }
    name = unique_name("compacted")
    create_topic(clusters.source.bootstrap, name, 1, configs)
    create_topic(clusters.destination.bootstrap, name, 1, {"cleanup.policy": "compact"})
    keyed = [Record(b"%d" % n, b"k%d" % (n % 3), timestamp=BASE_MS + n) for n in range(30)]
    both(clusters, lambda bootstrap: produce(bootstrap, name, keyed))
    # a cleaner leaves the newest segment alone: the next record opens another one
    last = Record(b"end", b"last", timestamp=BASE_MS + 10_000)
    both(clusters, lambda bootstrap: produce(bootstrap, name, [last]))
    wait_until(lambda: len(consume(clusters.source.bootstrap, name)) == 4, 60, what="compaction")
    report = compare(clusters, name)
    assert report.ok, report.differences
    assert report.superseded == 2 * 27  # at both levels


def test_a_log_start_that_moves_meanwhile_is_no_difference(
    clusters: Clusters, topic: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Records that retention removes while they are compared are left out; the rest is compared again."""
    both(clusters, lambda bootstrap: produce(bootstrap, topic, records(1_000)))
    made = 0

    class LateReader(RangeReader):
        def __init__(self, settings: ClusterSettings, ranges: Iterable[LogRange], *, isolation: str) -> None:
            nonlocal made
            if made == 0:
                delete_records(clusters.source.bootstrap, topic, 300)
            made += 1
            super().__init__(settings, ranges, isolation=isolation)

    for room in ("compare", "translated"):
        monkeypatch.setattr(f"kmirror_dagster.verification.{room}.RangeReader", LateReader)
    report = compare(clusters, topic)
    assert report.ok, report.differences
    assert report.records[Isolation.READ_UNCOMMITTED] == 700

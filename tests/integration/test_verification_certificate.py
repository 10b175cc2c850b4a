"""Certificates of real clusters: a planted record is found, nothing is read twice, a window of time is read again."""

import json
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from kmirror_dagster.lifecycle import MirrorState
from kmirror_dagster.settings import FilterSettings, MirrorSettings
from kmirror_dagster.verification.both_sides import BothSides
from kmirror_dagster.verification.certificate import CertificateStore
from kmirror_dagster.verification.certifier import certify, recheck
from kmirror_dagster.verification.report import Isolation
from tests.conftest import Clusters
from tests.helpers.command_line import kmirror
from tests.helpers.kafka import Record, create_topic, delete_records, produce, produce_transaction
from tests.helpers.nodes import NodeProcess, mirrored
from tests.helpers.waiting import unique_name

pytestmark = pytest.mark.integration

BASE_MS = time.time_ns() // 1_000_000 - 600_000


def numbered(count: int, first: int = 0, *, altered: int | None = None, partition: int = 0) -> list[Record]:
    """Records one second apart; `altered` has another value of the same length."""
    return [
        Record(
            value=b"%s-%06d" % (b"other" if n == altered else b"value", n),
            key=b"k-%d" % (n % 7),
            headers=(("n", b"%d" % n),),
            timestamp=BASE_MS + 1_000 * n,
            partition=partition,
        )
        for n in range(first, first + count)
    ]


def both(clusters: Clusters, action: Callable[[str], object]) -> None:
    for cluster in (clusters.source, clusters.destination):
        action(cluster.bootstrap)


def settings(clusters: Clusters) -> MirrorSettings:
    return MirrorSettings(
        mirror="certified",
        source=clusters.source.settings(),
        destination=clusters.destination.settings(),
        filters=FilterSettings(),
    )


def on_both(clusters: Clusters, configs: dict[str, str] | None = None) -> str:
    name = unique_name("certified")
    both(clusters, lambda bootstrap: create_topic(bootstrap, name, 2, configs))
    return name


def test_planted_record_is_found(clusters: Clusters, tmp_path: Path) -> None:
    """One record with another value of the same length: the certificate ends right there, the rest is the same."""
    topic, store = on_both(clusters), CertificateStore(tmp_path / "c.json")
    produce(clusters.source.bootstrap, topic, numbered(400))
    produce(clusters.destination.bootstrap, topic, numbered(400, altered=123))
    both(clusters, lambda bootstrap: produce(bootstrap, topic, numbered(50, partition=1)))
    both(clusters, lambda bootstrap: produce_transaction(bootstrap, topic, numbered(9, 400), commit=False))
    with BothSides(settings(clusters)) as sides:
        for _ in range(2):
            made = certify(sides, store, [topic], round_offsets=300)
            found = made.by_key()
            assert not made.ok
            assert (found[topic, 0].verified_to, found[topic, 0].checked_to) == (123, 410)
            assert found[topic, 0].differing[0].examples[0].startswith("value at offset 123")
            assert (found[topic, 1].verified_to, found[topic, 1].ok) == (50, True)
        assert found[topic, 0].records == {Isolation.READ_UNCOMMITTED: 409, Isolation.READ_COMMITTED: 400}
        assert made.unchecked == 0


def test_window_of_time_is_read_again(clusters: Clusters) -> None:
    """The records of a window of time, found by the source's index, are the ones that are read."""
    topic = on_both(clusters)
    produce(clusters.source.bootstrap, topic, numbered(100))
    produce(clusters.destination.bootstrap, topic, numbered(100, altered=50))
    with BothSides(settings(clusters), isolations=[Isolation.READ_COMMITTED]) as sides:

        def read(first: int | None, end: int | None) -> tuple[int, int, bool]:
            report = recheck(
                sides,
                [topic],
                since_ms=None if first is None else BASE_MS + 1_000 * first,
                until_ms=None if end is None else BASE_MS + 1_000 * end,
                round_offsets=20,
            )
            found = report.certificate.by_key()[topic, 0]
            return found.verified_from, report.certificate.records, report.ok

        assert read(None, 50) == (0, 50, True)
        assert read(51, None) == (51, 49, True)
        assert read(10, 60) == (10, 50, False)
        assert read(1_000, None)[1:] == (0, True)


def test_what_a_cleaner_removed_on_one_side_is_explained(clusters: Clusters, tmp_path: Path) -> None:
    """Digests that differ because one side was cut or cleaned earlier are looked into, and are no difference."""
    topic, store = on_both(clusters), CertificateStore(tmp_path / "c.json")
    both(clusters, lambda bootstrap: produce(bootstrap, topic, numbered(100)))
    delete_records(clusters.source.bootstrap, topic, 40)
    with BothSides(settings(clusters)) as sides:
        found = certify(sides, store, [topic]).by_key()[topic, 0]
    assert (found.verified_from, found.verified_to, found.ok) == (40, 100, True)


def test_command_certifies_a_mirror(clusters: Clusters, node: NodeProcess) -> None:
    """`kmirror certify` goes on where it was, up to the last mirror position once the topic is stopped."""
    with mirrored(node, clusters.source.bootstrap, clusters.destination.bootstrap) as mirror:
        topic = mirror.topic()
        create_topic(mirror.source, topic)
        produce(mirror.source, topic, numbered(100))
        mirror.await_states(MirrorState.MIRRORING, topic)
        mirror.await_copied(topic)
        command = ("--state-dir", str(node.state_dir), "certify", mirror.name, "--json")
        assert [each["verified_to"] for each in json.loads(kmirror(*command).stdout)["partitions"]] == [100]
        produce(mirror.source, topic, numbered(50, 100))
        mirror.await_copied(topic)
        made = json.loads(kmirror(*command, "--continuous", "--interval", "0.2", "--timeout", "2").stdout)
        assert (made["partitions"][0]["verified_to"], made["ok"]) == (150, True)
        node.client.verb(mirror.name, "stop")
        mirror.await_states(MirrorState.STOPPED, topic)
        produce(mirror.destination, topic, numbered(10, 500))
        produce(mirror.source, topic, numbered(10, 150))
        stopped = kmirror(*command, "--topics", topic)
        assert json.loads(stopped.stdout)["partitions"][0]["verified_to"] == 150, stopped.output

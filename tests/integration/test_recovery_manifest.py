"""Loss manifest of a real failover."""

import json

import pytest

from kmirror_dagster.lifecycle import MirrorState
from tests.conftest import Clusters
from tests.helpers.command_line import kmirror
from tests.helpers.kafka import Record, create_topic, produce, produce_transaction
from tests.helpers.nodes import NodeProcess, mirrored

pytestmark = pytest.mark.integration


def numbered(count: int, first: int = 0) -> list[Record]:
    return [Record(b"v-%04d" % n, b"k-%04d" % n) for n in range(first, first + count)]


@pytest.mark.case("C31")
def test_manifest_lists_what_the_source_has_written_unseen(clusters: Clusters, node: NodeProcess) -> None:
    """A->B to 100; A writes 20 more unseen: the manifest says 20, from offset 100, and can be made again."""
    with mirrored(node, clusters.source.bootstrap, clusters.destination.bootstrap) as mirror:
        topic, quiet = mirror.topic(), mirror.topic("quiet")
        for name in (topic, quiet):
            create_topic(mirror.source, name)
            produce(mirror.source, name, numbered(100))
        mirror.await_states(MirrorState.MIRRORING, topic, quiet)
        mirror.await_copied(topic, quiet)
        node.client.verb(mirror.name, "stop")
        mirror.await_states(MirrorState.STOPPED, topic, quiet)
        produce(mirror.source, topic, numbered(20, first=100))
        command = ("--state-dir", str(node.state_dir), "manifest", mirror.name, "--json")
        for _ in range(2):
            made = json.loads(kmirror(*command).stdout)
            losses = {loss["topic"]: loss for loss in made["partitions"]}
            assert (made["records"], made["size_bytes"]) == (20, 20 * 12)
            assert (losses[topic]["first_offset"], losses[topic]["end_offset"]) == (100, 120)
            assert losses[topic]["first_timestamp_ms"] <= losses[topic]["last_timestamp_ms"]
            assert losses[quiet]["records"] == 0
            assert all(loss["problem"] is None for loss in made["partitions"])
        # offsets of markers and of aborted records are lost offsets, not lost records
        produce_transaction(mirror.source, topic, numbered(3, first=120), commit=False)
        made = json.loads(kmirror(*command).stdout)
        assert made["records"] == 20

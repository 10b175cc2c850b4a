"""Clusters of the sandbox: started, broken, stopped; nothing is left behind."""

import pytest

from tests.conftest import Clusters
from tests.helpers.kafka import (
    READ_UNCOMMITTED,
    Record,
    commit_offsets,
    committed_offsets,
    consume,
    create_topic,
    delete_records,
    log_range,
    produce,
    produce_transaction,
)
from tests.helpers.waiting import unique_name

pytestmark = [pytest.mark.integration, pytest.mark.unsecured("about the sandbox itself")]


def test_both_clusters_serve_and_are_two(clusters: Clusters) -> None:
    """The session's clusters have ids of their own and take and give records at both isolation levels."""
    assert clusters.source.cluster_id != clusters.destination.cluster_id
    for cluster in (clusters.source, clusters.destination):
        topic = unique_name("both")
        create_topic(cluster.bootstrap, topic, 2)
        headers = (("a", b"1"), ("a", None), ("a", b""))
        produce(cluster.bootstrap, topic, [Record(b"v", b"k", headers, 1234), Record(None, None)])
        produce_transaction(cluster.bootstrap, topic, [Record(b"gone")], commit=False)
        produce_transaction(cluster.bootstrap, topic, [Record(b"kept")])
        committed = consume(cluster.bootstrap, topic)
        everything = consume(cluster.bootstrap, topic, isolation=READ_UNCOMMITTED)
        assert [record.value for record in committed] == [b"v", None, b"kept"]
        assert [record.value for record in everything] == [b"v", None, b"gone", b"kept"]
        assert committed[0].headers == headers
        assert (committed[0].key, committed[0].timestamp, committed[1].key) == (b"k", 1234, None)
        assert log_range(cluster.bootstrap, topic) == (0, 6)
        delete_records(cluster.bootstrap, topic, 2)
        assert log_range(cluster.bootstrap, topic) == (2, 6)
        group = unique_name("group")
        commit_offsets(cluster.bootstrap, group, [(topic, 0, 3)])
        assert committed_offsets(cluster.bootstrap, group) == {(topic, 0): 3}

"""Forecast over real clusters, and what a failover then really does."""

import pytest

from kmirror_dagster.coordination.recovery_ports import known_partitions
from kmirror_dagster.lifecycle import MirrorState
from kmirror_dagster.recovery.forecast import look_ahead
from tests.conftest import Clusters
from tests.helpers.kafka import Record, commit_offsets, committed_offsets, create_topic, produce
from tests.helpers.nodes import NodeProcess, mirrored

pytestmark = pytest.mark.integration


def test_forecast_is_what_a_failover_does(clusters: Clusters, node: NodeProcess) -> None:
    """Re-read, lost and resumed-at are foretold, also while the source does not answer, and come true."""
    with mirrored(node, clusters.source.bootstrap, clusters.destination.bootstrap) as mirror:
        topic, group = mirror.topic(), f"{mirror.name}.readers"
        create_topic(mirror.source, topic)
        produce(mirror.source, topic, [Record(b"v")] * 100)
        mirror.await_states(MirrorState.MIRRORING, topic)
        mirror.await_copied(topic)
        commit_offsets(mirror.source, group, [(topic, 0, 60)])
        node.client.refresh(mirror.name)
        node.client.verb(mirror.name, "pause")
        mirror.await_states(MirrorState.PAUSED, topic)
        produce(mirror.source, topic, [Record(b"v")] * 20)
        commit_offsets(mirror.source, group, [(topic, 0, 110)])
        known = known_partitions(node.client, mirror.name)
        made = look_ahead(mirror.settings, known)
        (found,) = made.groups
        assert (made.loses_records, found.group) == (20, group)
        (each,) = found.partitions
        assert (each.resumes_at, each.re_reads, each.loses, each.read_ahead) == (60, 40, 10, 10)
        gone = mirror.settings.model_copy(
            update={
                "source": mirror.settings.source.model_copy(update={"bootstrap_servers": ("127.0.0.1:9",)})
            }
        )
        blind = look_ahead(gone, known)
        assert not blind.source_reachable
        assert blind.groups[0].partitions[0].resumes_at == 60
        assert blind.groups[0].partitions[0].re_reads is None
        node.client.verb(mirror.name, "stop")
        mirror.await_states(MirrorState.STOPPED, topic)
        assert committed_offsets(mirror.destination, group) == {(topic, 0): 60}

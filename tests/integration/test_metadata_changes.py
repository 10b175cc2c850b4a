"""Every kind of change at a source reaches the destination; nobody but the mirror's refreshes does anything."""

import pytest

from kmirror_dagster.broker.admin import ClusterAdmin
from tests.conftest import Clusters
from tests.helpers.nodes import NodeProcess, mirrored
from tests.helpers.secured import own_settings
from tests.helpers.source_changes import SourceChanges, measure

pytestmark = pytest.mark.integration


def test_every_change_at_the_source_is_right_at_the_destination(
    clusters: Clusters, node: NodeProcess
) -> None:
    """Topics, configurations, positions, quotas and log starts follow; deleted and recreated topics are named."""
    admins = ClusterAdmin(own_settings(clusters.source)), ClusterAdmin(own_settings(clusters.destination))
    try:
        with mirrored(node, clusters.source.bootstrap, clusters.destination.bootstrap) as mirror:
            changes = SourceChanges(mirror, *admins, with_acls=False)
            changes.prepare()
            made = changes.all()
            seconds = measure(made, deadline_s=90)
            changes.clean_up()
    finally:
        for admin in admins:
            admin.close()

    assert {change.name for change in made} - seconds.keys() == set()

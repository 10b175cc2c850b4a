"""Node keeper: in local mode it starts this machine's node when none runs, unless somebody stopped it."""

import dagster as dg

from kmirror_dagster.coordination.models import ClusterInfo
from kmirror_dagster.errors import KmirrorError
from kmirror_dagster.orchestration.node_api import NodeApi
from kmirror_dagster.orchestration.resources import KMirrorResource, resource_of

KEEPER_INTERVAL_S = 15
_ASK_BUDGET_S = 4.0


def keeper_sensor(*, prefix: str, resource_key: str) -> dg.SensorDefinition:
    """Build the keeper of the node behind one resource."""

    @dg.sensor(
        name=f"{prefix}_node_keeper",
        minimum_interval_seconds=KEEPER_INTERVAL_S,
        required_resource_keys={resource_key},
        default_status=dg.DefaultSensorStatus.RUNNING,
        description="Starts the local node when it died; says which nodes there are.",
    )
    def keeper(context: dg.SensorEvaluationContext) -> dg.SkipReason:
        try:
            return dg.SkipReason(keep(resource_of(context, resource_key)))
        except KmirrorError as error:
            return dg.SkipReason(str(error))

    return keeper


def keep(resource: KMirrorResource) -> str:
    """Start the node when it is missing; tells what was seen or done.

    Raises:
        KmirrorError: why no node answers, or why it did not start.
    """
    if resource.starts_nodes and not resource.is_node_running():
        if resource.is_node_stopped():
            return "the node was stopped on purpose; start it again with: kmirror node start"
        return f"no node ran: started {resource.ensure_node()}"
    cluster = resource.ask(_cluster, budget_s=_ASK_BUDGET_S, what="the node")
    if cluster is None:
        return "a node runs and is not ready yet"
    led = sorted(set(cluster.leaders.values()))
    return (
        f"node {cluster.node_id} answers; {len(led)} nodes lead {len(cluster.leaders)} coordinator partitions"
    )


def _cluster(node: NodeApi) -> ClusterInfo | None:
    return node.cluster() if node.ready() else None

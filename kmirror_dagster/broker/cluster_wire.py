"""Who a cluster is, over the wire client.

librdkafka is not used for this: its DescribeCluster call ends the process with an assertion when the answer is an
error, as a broker gives it while it shuts down (2.16), and its cluster id is the first one it ever heard of.
"""

from kafka.protocol.metadata.metadata import MetadataRequest

from kmirror_dagster.broker.admin_types import ClusterDescription
from kmirror_dagster.broker.wire import WireCluster


async def describe(cluster: WireCluster) -> ClusterDescription:
    """Cluster id and live brokers as one broker tells them now."""
    answer = await cluster.any_call(MetadataRequest(topics=[], allow_auto_topic_creation=False))
    brokers = {broker.node_id: f"{broker.host}:{broker.port}" for broker in answer.brokers}
    controller = answer.controller_id if answer.controller_id >= 0 else None
    return ClusterDescription(answer.cluster_id or None, brokers, controller)

"""Node keeper: in local mode it starts this machine's node when none runs, unless somebody stopped it."""

import dagster as dg
from pydantic import BaseModel, ConfigDict, ValidationError

from kmirror_dagster.coordination.models import ClusterInfo
from kmirror_dagster.errors import KmirrorError
from kmirror_dagster.orchestration.clocks import epoch_ms
from kmirror_dagster.orchestration.node_api import NodeApi
from kmirror_dagster.orchestration.resources import KMirrorResource, resource_of

KEEPER_INTERVAL_S = 15
_ASK_BUDGET_S = 4.0
# A node that does not start is tried again after 15 s, 30 s, ... 5 min: each try costs seconds of CPU.
_FIRST_PAUSE_MS, _LONGEST_PAUSE_MS = 15_000, 300_000


class KeeperCursor(BaseModel):
    """Starts that failed in a row, and when the next one is due."""

    model_config = ConfigDict(frozen=True)
    failures: int = 0
    not_before_ms: int = 0

    @classmethod
    def read(cls, text: str | None) -> "KeeperCursor":
        """Cursor of the tick before; an empty one when there is none, or one of another version."""
        try:
            return cls.model_validate_json(text) if text else cls()
        except ValidationError:
            return cls()

    def after_failure(self, now_ms: int) -> "KeeperCursor":
        """Cursor after one more start that failed."""
        pause_ms = min(_LONGEST_PAUSE_MS, _FIRST_PAUSE_MS * 2 ** min(self.failures, 10))
        return KeeperCursor(failures=self.failures + 1, not_before_ms=now_ms + pause_ms)


def keeper_sensor(*, prefix: str, resource_key: str) -> dg.SensorDefinition:
    """Build the keeper of the node behind one resource."""

    @dg.sensor(
        name=f"{prefix}_node_keeper",
        minimum_interval_seconds=KEEPER_INTERVAL_S,
        required_resource_keys={resource_key},
        default_status=dg.DefaultSensorStatus.RUNNING,
        description="Starts the local node when it died; says which nodes there are.",
    )
    def keeper(context: dg.SensorEvaluationContext) -> dg.SensorResult:
        cursor = KeeperCursor.read(context.cursor)
        seen, cursor = keep(resource_of(context, resource_key), cursor, now_ms=epoch_ms())
        return dg.SensorResult(skip_reason=seen, cursor=cursor.model_dump_json())

    return keeper


def keep(resource: KMirrorResource, cursor: KeeperCursor, *, now_ms: int) -> tuple[str, KeeperCursor]:
    """Start the node when it is missing; tells what was seen or done."""
    if not resource.starts_nodes or resource.is_node_running():
        return _look(resource), KeeperCursor()
    if resource.is_node_stopped():
        return "the node was stopped on purpose; start it again with: kmirror node start", KeeperCursor()
    if now_ms < cursor.not_before_ms:
        wait_s = (cursor.not_before_ms - now_ms) / 1000
        return f"no node runs; {cursor.failures} starts failed, the next is in {wait_s:.0f} s", cursor
    try:
        return f"no node ran: started {resource.ensure_node()}", KeeperCursor()
    except KmirrorError as error:
        return f"no node runs, and it does not start: {error}", cursor.after_failure(now_ms)


def _look(resource: KMirrorResource) -> str:
    try:
        cluster = resource.ask(_cluster, budget_s=_ASK_BUDGET_S, what="the node")
    except KmirrorError as error:
        return str(error)
    if cluster is None:
        return "a node runs and is not ready yet"
    led = len(set(cluster.leaders.values()))
    return f"node {cluster.node_id} answers; {led} nodes lead {len(cluster.leaders)} coordinator partitions"


def _cluster(node: NodeApi) -> ClusterInfo | None:
    return node.cluster() if node.ready() else None

"""Everything asked of a cluster besides moving records: typed, blocking, batched, errors kept apart per item.

All calls take `timeout_s` and end by then. An item's error is in the answer; only what concerns the whole
call is raised: ClusterUnreachableError, AuthenticationError, DeadlineError.
"""

from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from typing import TypeVar

from kmirror_dagster.broker import (
    admin_acls,
    admin_quotas,
    admin_rights,
    admin_users,
    cluster_wire,
    group_wire,
    share_wire,
)
from kmirror_dagster.broker.admin_calls import DEFAULT_TIMEOUT_S
from kmirror_dagster.broker.admin_groups import GroupCalls
from kmirror_dagster.broker.admin_offsets import OffsetCalls
from kmirror_dagster.broker.admin_rights import Rights
from kmirror_dagster.broker.admin_topics import TopicCalls
from kmirror_dagster.broker.admin_types import (
    Acl,
    Answers,
    ClusterDescription,
    CommittedOffset,
    GroupListings,
    Partition,
    QuotaEntity,
    Quotas,
)
from kmirror_dagster.broker.wire import WireCluster
from kmirror_dagster.broker.wire_thread import WireThread
from kmirror_dagster.errors import KmirrorError
from kmirror_dagster.settings import ClusterSettings

T = TypeVar("T")

SHARE_READ_API = share_wire.READ_API
SHARE_SET_API = share_wire.SET_API


class ClusterAdmin(TopicCalls, OffsetCalls, GroupCalls):
    """Admin client of one cluster; safe to share between threads, ended by `close`.

    Args:
        settings: cluster to talk to.
        timeout_s: seconds one call may take unless it is given its own.
    """

    def __init__(self, settings: ClusterSettings, *, timeout_s: float = DEFAULT_TIMEOUT_S) -> None:
        super().__init__(settings, timeout_s=timeout_s)
        self._wire = WireThread(settings)

    def close(self) -> None:
        """End: calls that wait in other threads give up. Harmless when closed."""
        super().close()
        self._wire.close()

    def describe_cluster(self, *, timeout_s: float | None = None) -> ClusterDescription:
        """Cluster id and live brokers, asked anew each time."""
        return self._over_wire(cluster_wire.describe, timeout_s, "describing the cluster")

    def cluster_id(self, *, timeout_s: float | None = None) -> str | None:
        """Cluster id as the brokers say it now."""
        return self.describe_cluster(timeout_s=timeout_s).cluster_id

    def broker_count(self, *, timeout_s: float | None = None) -> int:
        """Number of live brokers."""
        return len(self.describe_cluster(timeout_s=timeout_s).brokers)

    def groups(self, *, timeout_s: float | None = None) -> GroupListings:
        """List groups of all types with their states; brokers that did not answer are in `errors`."""
        return self._over_wire(group_wire.list_groups, timeout_s, "listing groups")

    def group_offsets(
        self, groups: Iterable[str], *, timeout_s: float | None = None
    ) -> Answers[str, Mapping[Partition, CommittedOffset]]:
        """All committed positions of groups; partitions without a commit are absent."""
        wanted = sorted(set(groups))
        if not wanted:
            return Answers()
        return self._over_wire(
            lambda cluster: group_wire.fetch_offsets(cluster, wanted), timeout_s, "reading positions"
        )

    def alter_group_offsets(
        self,
        offsets: Mapping[str, Mapping[Partition, CommittedOffset]],
        *,
        timeout_s: float | None = None,
    ) -> Answers[str, Mapping[Partition, KmirrorError | None]]:
        """Commit positions for groups without live members; brokers refuse it for others.

        The answer has, for each group, one entry per partition: None when it was committed.
        """
        if not any(offsets.values()):
            return Answers()
        return self._over_wire(
            lambda cluster: group_wire.commit_offsets(cluster, offsets), timeout_s, "committing positions"
        )

    def share_group_offsets(
        self, groups: Iterable[str], *, timeout_s: float | None = None
    ) -> Answers[str, Mapping[Partition, CommittedOffset]]:
        """Positions of share groups; partitions they have none in are absent."""
        wanted = sorted(set(groups))
        if not wanted:
            return Answers()
        return self._over_wire(
            lambda cluster: share_wire.fetch_share_offsets(cluster, wanted), timeout_s, "reading positions"
        )

    def alter_share_group_offsets(
        self,
        offsets: Mapping[str, Mapping[Partition, CommittedOffset]],
        *,
        timeout_s: float | None = None,
    ) -> Answers[str, Mapping[Partition, KmirrorError | None]]:
        """Set positions of share groups without live members; the answer is as for `alter_group_offsets`."""
        if not any(offsets.values()):
            return Answers()
        return self._over_wire(
            lambda cluster: share_wire.alter_share_offsets(cluster, offsets), timeout_s, "setting positions"
        )

    def delete_group_offsets(
        self, group: str, partitions: Iterable[Partition], *, timeout_s: float | None = None
    ) -> Mapping[Partition, KmirrorError | None]:
        """Delete committed positions of a group; None stands for done."""
        return self._over_wire(
            lambda cluster: group_wire.delete_offsets(cluster, group, partitions),
            timeout_s,
            f"deleting positions of group {group}",
        )

    def acls(self, *, timeout_s: float | None = None) -> frozenset[Acl]:
        """All ACLs of the cluster; BrokerError SECURITY_DISABLED when it has no authorizer."""
        return self._over_wire(admin_acls.list_acls, timeout_s, "listing ACLs")

    def create_acls(
        self, acls: Sequence[Acl], *, timeout_s: float | None = None
    ) -> Mapping[Acl, KmirrorError | None]:
        """Create ACLs in the given order; None stands for done."""
        return self._over_wire(
            lambda cluster: admin_acls.create_acls(cluster, acls), timeout_s, "creating ACLs"
        )

    def delete_acls(
        self, acls: Sequence[Acl], *, timeout_s: float | None = None
    ) -> Mapping[Acl, KmirrorError | None]:
        """Delete exactly these ACLs; None stands for done."""
        return self._over_wire(
            lambda cluster: admin_acls.delete_acls(cluster, acls), timeout_s, "deleting ACLs"
        )

    def rights(self, topics: Iterable[str] = (), *, timeout_s: float | None = None) -> Rights:
        """What this client's principal may do with the cluster and with topics."""
        wanted = tuple(topics)
        return self._over_wire(
            lambda cluster: admin_rights.read_rights(cluster, wanted), timeout_s, "asking for rights"
        )

    def group_rights(
        self, groups: Iterable[str], *, timeout_s: float | None = None
    ) -> Answers[str, frozenset[str]]:
        """What this client's principal may do with groups."""
        wanted = tuple(groups)
        if not wanted:
            return Answers()
        return self._over_wire(
            lambda cluster: admin_rights.read_group_rights(cluster, wanted), timeout_s, "asking for rights"
        )

    def api_versions(self, *, timeout_s: float | None = None) -> Mapping[int, int]:
        """Highest version of each API, by its key, that a broker serves."""
        return self._over_wire(admin_rights.highest_versions, timeout_s, "asking for versions")

    def scram_users(self, *, timeout_s: float | None = None) -> frozenset[str]:
        """Users with SCRAM credentials; AuthorizationError without DESCRIBE on the cluster."""
        return self._over_wire(admin_users.scram_users, timeout_s, "listing SCRAM users")

    def client_quotas(self, *, timeout_s: float | None = None) -> Quotas:
        """Client quotas by whom they are for; AuthorizationError without DESCRIBE_CONFIGS on the cluster."""
        return self._over_wire(admin_quotas.client_quotas, timeout_s, "listing client quotas")

    def alter_client_quotas(
        self,
        changes: Mapping[QuotaEntity, Mapping[str, float | None]],
        *,
        timeout_s: float | None = None,
    ) -> Mapping[QuotaEntity, KmirrorError | None]:
        """Set client quotas, or remove those whose value is None; None in the answer stands for done."""
        if not changes:
            return {}
        return self._over_wire(
            lambda cluster: admin_quotas.alter_client_quotas(cluster, changes), timeout_s, "changing quotas"
        )

    def is_exempt(self, *, timeout_s: float | None = None) -> bool:
        """Whether no DENY hits this client's principal; tried out on a group that nobody uses.

        Raises:
            AuthorizationError: the principal may not alter ACLs.
            BrokerError: SECURITY_DISABLED when the cluster has no authorizer.
        """
        return self._over_wire(admin_rights.is_exempt, timeout_s, "asking whether a DENY hits the mirror")

    def _over_wire(
        self, work: Callable[[WireCluster], Awaitable[T]], timeout_s: float | None, doing: str
    ) -> T:
        return self._wire.run(work, timeout_s=self.timeout(timeout_s), doing=doing)

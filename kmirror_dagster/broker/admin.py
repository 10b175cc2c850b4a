"""Everything asked of a cluster besides moving records: typed, blocking, batched, errors kept apart per item.

All calls take `timeout_s` and end by then. An item's error is in the answer; only what concerns the whole
call is raised: ClusterUnreachableError, AuthenticationError, DeadlineError.
"""

from collections.abc import Iterable, Mapping, Sequence

from kmirror_dagster.broker import admin_acls, admin_wire
from kmirror_dagster.broker.admin_groups import GroupCalls
from kmirror_dagster.broker.admin_offsets import OffsetCalls
from kmirror_dagster.broker.admin_topics import TopicCalls
from kmirror_dagster.broker.admin_types import Acl, GroupListings, Partition
from kmirror_dagster.errors import KmirrorError


class ClusterAdmin(TopicCalls, OffsetCalls, GroupCalls):
    """Admin client of one cluster; safe to share between threads, ended by `close`."""

    def all_groups(self, *, timeout_s: float | None = None) -> GroupListings:
        """List groups of all types; `groups` leaves share and streams groups out and is cheaper."""
        return admin_wire.list_all_groups(self.settings, timeout_s=self.timeout(timeout_s))

    def delete_group_offsets(
        self, group: str, partitions: Iterable[Partition], *, timeout_s: float | None = None
    ) -> Mapping[Partition, KmirrorError | None]:
        """Delete committed positions of a group; None stands for done."""
        return admin_wire.delete_group_offsets(
            self.settings, group, partitions, timeout_s=self.timeout(timeout_s)
        )

    def acls(self, *, timeout_s: float | None = None) -> frozenset[Acl]:
        """All ACLs of the cluster; BrokerError SECURITY_DISABLED when it has no authorizer."""
        return admin_acls.list_acls(self.settings, timeout_s=self.timeout(timeout_s))

    def create_acls(
        self, acls: Sequence[Acl], *, timeout_s: float | None = None
    ) -> Mapping[Acl, KmirrorError | None]:
        """Create ACLs in the given order; None stands for done."""
        return admin_acls.create_acls(self.settings, acls, timeout_s=self.timeout(timeout_s))

    def delete_acls(
        self, acls: Sequence[Acl], *, timeout_s: float | None = None
    ) -> Mapping[Acl, KmirrorError | None]:
        """Delete exactly these ACLs; None stands for done."""
        return admin_acls.delete_acls(self.settings, acls, timeout_s=self.timeout(timeout_s))

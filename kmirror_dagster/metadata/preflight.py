"""Can this mirror work? Both clusters asked before anything is changed: who they are, what may be done there."""

import re
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Literal

from pydantic import BaseModel, ConfigDict

from kmirror_dagster.broker import codes
from kmirror_dagster.broker.admin import ClusterAdmin
from kmirror_dagster.broker.admin_types import OFFSET_GROUP_TYPES, ClusterDescription, entity_text
from kmirror_dagster.broker.deadlines import Deadline
from kmirror_dagster.broker.missing_rights import principal_of
from kmirror_dagster.errors import AuthorizationError, BrokerError, KmirrorError
from kmirror_dagster.metadata.acls import freeze_of, writer_text, writers
from kmirror_dagster.metadata.reader import CALL_S
from kmirror_dagster.metadata.rights import (
    DESTINATION,
    SOURCE,
    Known,
    Need,
    Scope,
    kafka_acls_lines,
    needs,
)
from kmirror_dagster.settings import MirrorSettings

# a pattern without any pattern character names one topic, whether it can be seen or not
_NAME = re.compile(r"[A-Za-z0-9._-]{1,249}")
# more topics are checked by the first so many: their rights are rarely given one by one
_MAX_TOPICS = 2_000


class Finding(BaseModel):
    """One thing that was looked at.

    Attributes:
        level: "error" ends the check with 1; "unknown": it could not be told.
    """

    model_config = ConfigDict(frozen=True)

    level: Literal["ok", "warning", "unknown", "error"]
    subject: str
    text: str


class MissingRight(BaseModel):
    """A right that is missing, and what it would be for."""

    model_config = ConfigDict(frozen=True)

    side: str
    principal: str
    operation: str
    resource_type: str
    resource_name: str
    why: str


class PreflightReport(BaseModel):
    """Result of a check.

    Attributes:
        read_only: "enforced", "held-back" (permissions are held back, others' are not), "detected" or "unknown".
        commands: `kafka-acls` lines that grant what is missing.
    """

    model_config = ConfigDict(frozen=True)

    mirror: str
    source_cluster_id: str | None = None
    destination_cluster_id: str | None = None
    topics: list[str]
    findings: list[Finding]
    missing: list[MissingRight]
    commands: list[str]
    read_only: str = "unknown"

    @property
    def ok(self) -> bool:
        """Whether nothing stands in the way."""
        return not self.missing and all(finding.level != "error" for finding in self.findings)


@dataclass
class _Look:
    settings: MirrorSettings
    source: ClusterAdmin
    destination: ClusterAdmin
    deadline: Deadline
    findings: list[Finding] = field(default_factory=list[Finding])

    def timeout(self) -> float:
        self.deadline.check("checking the mirror")
        return self.deadline.remaining(at_most=CALL_S)

    def say(self, level: Literal["ok", "warning", "unknown", "error"], subject: str, text: str) -> None:
        self.findings.append(Finding(level=level, subject=subject, text=text))


def run_preflight(
    settings: MirrorSettings,
    source: ClusterAdmin,
    destination: ClusterAdmin,
    *,
    node_group: str = "kmirror",
    deadline_s: float = 60.0,
) -> PreflightReport:
    """Look at both clusters as a mirror would; changes nothing.

    Args:
        settings: of the mirror.
        source, destination: admin clients with the mirror's credentials.
        node_group: group id of the nodes.
        deadline_s: seconds it may take.
    """
    look = _Look(settings, source, destination, Deadline(deadline_s, clock=time.monotonic))
    at_source, at_destination = _identify(look, source, SOURCE), _identify(look, destination, DESTINATION)
    if at_source is None or at_destination is None:
        return PreflightReport(
            mirror=settings.mirror, topics=[], findings=look.findings, missing=[], commands=[]
        )
    if at_source.cluster_id == at_destination.cluster_id:
        look.say("error", "clusters", f"source and destination are the same cluster ({at_source.cluster_id})")
    scope = _scope(look, node_group)
    known = {
        SOURCE: _known(look, source, scope, scope.topics),
        DESTINATION: _known(look, destination, scope, scope.existing),
    }
    missing = _missing(look, scope, known)
    read_only = _read_only(look, scope, known[DESTINATION])
    _by_hand(look)
    commands = [
        line
        for side, admin in ((SOURCE, source), (DESTINATION, destination))
        for line in kafka_acls_lines(
            (need for need in missing if need.side == side),
            principal=known[side].principal,
            bootstrap=admin.settings.address,
        )
    ]
    return PreflightReport(
        mirror=settings.mirror,
        source_cluster_id=at_source.cluster_id,
        destination_cluster_id=at_destination.cluster_id,
        topics=sorted(scope.topics),
        findings=look.findings,
        missing=[_as_missing(need, known[need.side].principal) for need in missing],
        commands=commands,
        read_only=read_only,
    )


def _as_missing(need: Need, principal: str) -> MissingRight:
    return MissingRight(
        side=need.side,
        principal=principal,
        operation=need.operation,
        resource_type=need.resource_type,
        resource_name=need.resource_name,
        why=need.why,
    )


def _identify(look: _Look, admin: ClusterAdmin, side: str) -> ClusterDescription | None:
    try:
        described = admin.describe_cluster(timeout_s=look.timeout())
        versions = admin.api_versions(timeout_s=look.timeout())
    except KmirrorError as error:
        look.say("error", side, str(error))
        return None
    look.say("ok", side, f"cluster {described.cluster_id}, {len(described.brokers)} broker(s)")
    for api, version, level, consequence in _VERSIONS[side]:
        if versions.get(api[0], -1) < version:
            look.say(level, side, f"its brokers lack {api[1]} version {version}: {consequence}")
    return described


_Level = Literal["warning", "error"]
# (API key, name), version, what it means when that is missing
_VERSIONS: dict[str, tuple[tuple[tuple[int, str], int, _Level, str], ...]] = {
    SOURCE: (
        ((1, "Fetch"), 4, "error", "records cannot be read (Apache Kafka 0.11 or later is needed)"),
        ((3, "Metadata"), 10, "warning", "no topic ids, a recreated topic is noticed by its offsets only"),
        ((23, "OffsetForLeaderEpoch"), 3, "warning", "a truncation is noticed by offsets only"),
    ),
    DESTINATION: (
        (
            (61, "DescribeProducers"),
            0,
            "error",
            "copies cannot be fenced (Apache Kafka 2.8 or later is needed)",
        ),
        ((44, "IncrementalAlterConfigs"), 0, "error", "configurations cannot be kept equal"),
        ((3, "Metadata"), 10, "warning", "no topic ids, a recreated copy is not noticed"),
    ),
}


def _scope(look: _Look, node_group: str) -> Scope:
    filters = look.settings.filters
    try:
        names = look.source.topic_names(timeout_s=look.timeout())
        there = look.destination.topic_names(timeout_s=look.timeout())
        listings = look.source.groups(timeout_s=look.timeout())
    except KmirrorError as error:
        look.say("error", "topics", str(error))
        return Scope(frozenset(), node_group=node_group)
    selected = {name for name in names if filters.selects_topic(name)}
    # what may not be described is not listed: names written in full are asked for all the same
    selected |= {
        name for name in filters.topics_include if _NAME.fullmatch(name) and filters.selects_topic(name)
    }
    if not selected:
        look.say("warning", "topics", "no topic that can be seen is selected by topics.include")
    if len(selected) > _MAX_TOPICS:
        look.say("unknown", "topics", f"only the first {_MAX_TOPICS} of {len(selected)} topics are checked")
    groups = {
        item.group
        for item in listings.groups
        if item.type in OFFSET_GROUP_TYPES and filters.selects_group(item.group)
    }
    topics = frozenset(sorted(selected)[:_MAX_TOPICS])
    return Scope(
        topics, frozenset(groups), topics & there, bool(filters.acls_include), node_group, _has_quotas(look)
    )


def _has_quotas(look: _Look) -> bool:
    """Whether the source has client quotas to be kept equal, as far as it tells."""
    if look.settings.policies.client_quotas == "off":
        return False
    try:
        return bool(look.source.client_quotas(timeout_s=look.timeout()))
    except (AuthorizationError, BrokerError):
        return False  # told by `_by_hand`


def _known(look: _Look, admin: ClusterAdmin, scope: Scope, topics: Iterable[str]) -> Known:
    principal = principal_of(admin.settings)
    rights = admin.rights(topics, timeout_s=look.timeout())
    if rights.missing and admin is look.source:
        look.say("warning", "topics", f"not at the source (yet): {', '.join(sorted(rights.missing))}")
    acls, is_open = None, False
    try:
        acls = admin.acls(timeout_s=look.timeout())
    except AuthorizationError:
        pass  # told by the missing right itself
    except BrokerError as error:
        if error.code != codes.SECURITY_DISABLED:
            raise
        is_open = True
    groups = admin.group_rights([] if is_open else scope.groups, timeout_s=look.timeout())
    return Known(principal, rights.cluster, rights.topics, groups.values, acls, is_open)


def _missing(look: _Look, scope: Scope, known: dict[str, Known]) -> list[Need]:
    missing: list[Need] = []
    untold: dict[str, int] = {}
    for need in needs(scope):
        answer = known[need.side].may(need)
        if answer is False:
            missing.append(need)
        elif answer is None:
            untold[need.side] = untold.get(need.side, 0) + 1
    for side, count in untold.items():
        look.say("unknown", side, f"{count} right(s) cannot be told without DESCRIBE on the cluster")
    for side, what in known.items():
        if what.is_open:
            look.say("ok", side, "no authorizer: everybody may do everything, ACLs are not mirrored")
        elif not any(need.side == side for need in missing) and side not in untold:
            look.say("ok", side, f"{what.principal} has every right that is needed")
    return missing


def _read_only(look: _Look, scope: Scope, known: Known) -> str:
    if known.is_open:
        text = "no authorizer at the destination: writes by others are noticed afterwards, and fail the partition"
        look.say("warning", "read-only", text)
        return "detected"
    if look.settings.policies.read_only == "off":
        look.say("warning", "read-only", "policies.read_only is off: writes by others are noticed afterwards")
        return "detected"
    if known.acls is None:
        look.say(
            "unknown", "read-only", "who may write to copies cannot be told without DESCRIBE on the cluster"
        )
        return "unknown"
    if known.is_super:
        look.say("ok", "read-only", "enforced: everybody but super users is denied to write to copies")
        return "enforced"
    text = (
        f"permissions to write are held back until stop; {known.principal} is no super user, so what the "
        "destination itself allows others stays allowed"
    )
    look.say("ok", "read-only", text)
    there = {acl for acl in known.acls if acl not in {freeze_of(topic) for topic in scope.topics}}
    for writer in writers(there, scope.topics, principal=known.principal):
        look.say("warning", "read-only", writer_text(writer))
    return "held-back"


def _by_hand(look: _Look) -> None:
    """Name what is not mirrored and has to be made at the destination once, as far as it may be looked at."""
    try:
        users = look.source.scram_users(timeout_s=look.timeout())
        users -= look.destination.scram_users(timeout_s=look.timeout())
        if users:
            names = ", ".join(sorted(users))
            look.say("warning", "users", f"SCRAM users to be made at the destination: {names}")
    except KmirrorError as error:
        look.say("unknown", "users", f"SCRAM users, which are not mirrored: {error}")
    try:
        quotas = look.source.client_quotas(timeout_s=look.timeout())
        there = look.destination.client_quotas(timeout_s=look.timeout())
        differing = sorted(entity_text(whom) for whom, values in quotas.items() if there.get(whom) != values)
        if differing and look.settings.policies.client_quotas == "off":
            text = f"policies.client_quotas is off and client quotas differ for {'; '.join(differing)}"
            look.say("warning", "quotas", text)
    except KmirrorError as error:
        look.say("unknown", "quotas", f"client quotas are not mirrored without that right: {error}")

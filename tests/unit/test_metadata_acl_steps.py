"""The ACL step of a refresh against clusters in memory: order, two-step freezes, failures, settling."""

from collections.abc import Iterable, Mapping, Sequence

from kmirror_dagster.broker.admin_rights import Rights
from kmirror_dagster.broker.admin_types import Acl
from kmirror_dagster.broker.codes import SECURITY_DISABLED, broker_error
from kmirror_dagster.errors import AuthorizationError, KmirrorError
from kmirror_dagster.lifecycle import DesiredState, MirrorState
from kmirror_dagster.metadata import acl_steps
from kmirror_dagster.metadata.acls import freeze_of
from kmirror_dagster.metadata.context import RefreshContext
from kmirror_dagster.metadata.memory import Memory
from kmirror_dagster.metadata.outcome import Step, TopicIntent
from kmirror_dagster.metadata.steps import StepReport
from kmirror_dagster.records import HeldAcl, TopicRecord
from tests.helpers.step_context import step_context

READ = Acl("TOPIC", "t", "LITERAL", "User:a", "*", "READ", "ALLOW")
WRITE = Acl("TOPIC", "t", "LITERAL", "User:a", "*", "WRITE", "ALLOW")
HELD = HeldAcl(resource_name="t", pattern_type="LITERAL", principal="User:a", host="*", operation="WRITE")


class MemoryCluster:
    """The ACL calls of `ClusterAdmin`; `refused` are ACLs that cannot be created."""

    def __init__(self, *acls: Acl, exempt: bool = False, error: KmirrorError | None = None) -> None:
        self.present = set(acls)
        self.exempt = exempt
        self.error = error
        self.refused: set[Acl] = set()
        self.requests: list[tuple[str, tuple[Acl, ...]]] = []
        self.probes = 0

    def acls(self, *, timeout_s: float | None = None) -> frozenset[Acl]:
        if self.error is not None:
            raise self.error
        return frozenset(self.present)

    def create_acls(
        self, acls: Sequence[Acl], *, timeout_s: float | None = None
    ) -> Mapping[Acl, KmirrorError | None]:
        self.requests.append(("create", tuple(acls)))
        self.present |= set(acls) - self.refused
        return {acl: KmirrorError("refused") if acl in self.refused else None for acl in acls}

    def delete_acls(
        self, acls: Sequence[Acl], *, timeout_s: float | None = None
    ) -> Mapping[Acl, KmirrorError | None]:
        self.requests.append(("delete", tuple(acls)))
        self.present -= set(acls)
        return dict.fromkeys(acls)

    def rights(self, topics: Iterable[str] = (), *, timeout_s: float | None = None) -> Rights:
        told = frozenset({"READ", "WRITE"} if self.exempt else {"READ"})
        return Rights(topics=dict.fromkeys(topics, told))

    def is_exempt(self, *, timeout_s: float | None = None) -> bool:
        self.probes += 1
        return self.exempt


def refresh(
    source: MemoryCluster,
    destination: MemoryCluster,
    *,
    record: TopicRecord | None = None,
    memory: Memory | None = None,
    dry_run: bool = False,
    synced: Iterable[Acl] = (),
    read_only: str = "auto",
    state: MirrorState = MirrorState.MIRRORING,
) -> RefreshContext:
    """Run the step of a mirror of the topic t."""
    record = record or TopicRecord(mirror="m", topic="t", partitions=1)
    context = step_context(
        source,
        destination,
        policies={"read_only": read_only},
        known={"t": record},
        mirroring={("t", 0): state},
        memory=memory or Memory(),
        dry_run=dry_run,
        synced_acls=frozenset(synced),
    )
    if record.desired is not DesiredState.STOPPED:
        context.intents["t"] = TopicIntent("t", 1)
        acl_steps.sync_acls(context)
    acl_steps.settle(context)
    return context


def report(context: RefreshContext) -> StepReport:
    return context.reports[Step.ACLS]


def test_a_freeze_is_stored_before_it_is_made() -> None:
    """First the record says that there is one, then it is created, so that a stop always knows; then rest."""
    destination = MemoryCluster(exempt=True)
    memory = Memory()

    first = refresh(MemoryCluster(), destination, memory=memory)
    stored = TopicRecord(mirror="m", topic="t", partitions=1, read_only_acl=True)
    early = list(destination.requests)
    refresh(MemoryCluster(), destination, record=stored, memory=memory)
    made = list(destination.requests)
    rest = refresh(MemoryCluster(), destination, record=stored, memory=memory)

    assert early == []
    assert first.intents["t"].read_only_acl
    assert (first.look_again, rest.look_again) == (True, False)
    assert made == destination.requests == [("create", (freeze_of("t"),))]
    assert rest.intents["t"].read_only_acl
    assert report(rest).notes == ["read-only: only super users may write to copies"]
    assert destination.probes == 1


def test_somebody_else_s_freeze_is_not_taken_for_the_mirror_s() -> None:
    """One that is there and not in the mirror's state stays, also at stop."""
    context = refresh(MemoryCluster(), MemoryCluster(freeze_of("t"), exempt=True))

    assert context.intents["t"].read_only_acl is False


def test_a_freeze_goes_when_it_would_hit_the_mirror_or_is_switched_off() -> None:
    """A principal that is no super user any more must not be kept out by its own ACL."""
    stored = TopicRecord(mirror="m", topic="t", partitions=1, read_only_acl=True)
    lost, off = MemoryCluster(freeze_of("t")), MemoryCluster(freeze_of("t"), exempt=True)

    without = refresh(MemoryCluster(), lost, record=stored)
    switched = refresh(MemoryCluster(), off, record=stored, read_only="off")

    assert lost.present == off.present == set()
    assert "no super user" in report(without).errors["t"]
    assert without.intents["t"].read_only_acl is False
    assert switched.intents["t"].read_only_acl is False


def test_nobody_is_let_in_while_a_deny_that_belongs_to_it_is_missing() -> None:
    """An ALLOW waits for its principal's DENY; others do not; what failed is not taken for done."""
    deny = Acl("TOPIC", "t", "LITERAL", "User:a", "*", "DESCRIBE", "DENY")
    other = Acl("TOPIC", "t", "LITERAL", "User:b", "*", "READ", "ALLOW")
    destination = MemoryCluster()
    destination.refused = {deny}

    context = refresh(MemoryCluster(deny, READ, other), destination)

    assert destination.requests == [("create", (deny,)), ("create", (other,))]
    assert len(report(context).errors) == 2
    assert context.acls == {other}


def test_a_plan_sends_nothing() -> None:
    """The same changes are told, none is made, nobody's exemption is tried."""
    destination = MemoryCluster(WRITE, exempt=True)

    context = refresh(MemoryCluster(READ), destination, dry_run=True, synced=[WRITE])

    assert destination.requests == []
    assert destination.probes == 0
    assert [change.text for change in context.changes] == [
        "create ALLOW User:a READ on topic t",
        "delete ALLOW User:a WRITE on topic t",
    ]
    assert context.acls is None


def test_no_authorizer_is_a_note_and_a_missing_right_an_error_with_its_remedy() -> None:
    """On either side; what is stored as held back is kept."""
    disabled = broker_error(SECURITY_DISABLED, "listing ACLs")
    open_source = refresh(MemoryCluster(error=disabled), MemoryCluster())
    open_destination = refresh(MemoryCluster(WRITE), MemoryCluster(error=disabled))
    blind = refresh(MemoryCluster(error=AuthorizationError("User:m lacks DESCRIBE")), MemoryCluster())

    assert report(open_source).notes == ["the source has no authorizer: ACLs are not mirrored"]
    assert report(open_destination).notes == ["the destination has no authorizer: ACLs are not mirrored"]
    assert not report(open_source).errors
    assert not report(open_destination).errors
    assert report(blind).errors["*"].startswith("User:m lacks DESCRIBE; or set filters.acls.include")
    for context in (open_source, open_destination, blind):
        assert context.intents["t"].held_acls is None


def test_what_a_stop_could_not_grant_is_granted_without_the_source() -> None:
    """Only when all partitions are STOPPED; then the record is cleared, so that it happens once."""
    stopped = TopicRecord(
        mirror="m",
        topic="t",
        partitions=1,
        desired=DesiredState.STOPPED,
        held_acls=(HELD,),
        read_only_acl=True,
    )
    source = MemoryCluster(error=KmirrorError("not to be asked"))
    destination = MemoryCluster(freeze_of("t"))

    early = refresh(source, destination, record=stopped, state=MirrorState.STOPPING)
    settled = refresh(source, destination, record=stopped, state=MirrorState.STOPPED)

    assert early.intents == {}
    assert destination.requests == [("create", (WRITE,)), ("delete", (freeze_of("t"),))]
    intent = settled.intents["t"]
    assert (intent.settled, intent.held_acls, intent.read_only_acl) == (True, (), False)


def test_a_grant_that_fails_is_reported_and_kept() -> None:
    """The record keeps what is missing for the next refresh."""
    stopped = TopicRecord(
        mirror="m", topic="t", partitions=1, desired=DesiredState.STOPPED, held_acls=(HELD,)
    )
    destination = MemoryCluster()
    destination.refused = {WRITE}

    context = refresh(MemoryCluster(), destination, record=stopped, state=MirrorState.STOPPED)

    assert context.intents == {}
    assert "writers are kept out" in report(context).errors["t"]
    assert "ALLOW User:a WRITE on topic t" in report(context).errors["t"]

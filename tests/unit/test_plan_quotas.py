"""Client quotas: what is copied, left alone, removed; and the step that does it, against clusters in memory."""

from collections.abc import Mapping

import pytest

from kmirror_dagster.broker.admin_types import Quota, QuotaEntity, Quotas
from kmirror_dagster.broker.codes import UNSUPPORTED_VERSION, broker_error
from kmirror_dagster.errors import AuthorizationError, KmirrorError
from kmirror_dagster.metadata import quota_steps
from kmirror_dagster.metadata.context import RefreshContext
from kmirror_dagster.metadata.outcome import Step
from kmirror_dagster.metadata.quotas import QuotasPlan, QuotasWorld, plan_quotas
from tests.helpers.step_context import step_context

ALICE: QuotaEntity = (("user", "alice"),)
EVERY_USER: QuotaEntity = (("user", None),)
MIRROR: QuotaEntity = (("user", "mirror"),)
RATE = "producer_byte_rate"


def plan(source: Quotas, destination: Quotas | None = None, *synced: Quota) -> QuotasPlan:
    return plan_quotas(QuotasWorld(source, destination or {}, frozenset(synced), "mirror", "kmirror-dagster"))


def test_missing_quotas_are_set_and_the_mirror_s_follow_the_source() -> None:
    """What is missing or was put there by the mirror becomes the source's; what is equal is taken over unchanged."""
    source = {
        ALICE: {RATE: 2.0, "request_percentage": 50.0},
        (("ip", "10.0.0.1"),): {"connection_creation_rate": 5.0},
    }
    planned = plan(source, {ALICE: {RATE: 1.0, "request_percentage": 50.0}}, Quota(ALICE, RATE, 1.0))

    assert planned.changes == {ALICE: {RATE: 2.0}, (("ip", "10.0.0.1"),): {"connection_creation_rate": 5.0}}
    assert planned.notes == ()
    assert plan(source, source, *planned.synced) == QuotasPlan({}, planned.synced, ())


def test_quotas_that_left_the_source_are_removed_unless_somebody_else_changed_them() -> None:
    """Only the very value the mirror has set goes."""
    synced = Quota(ALICE, RATE, 1.0)

    assert plan({}, {ALICE: {RATE: 1.0}}, synced).changes == {ALICE: {RATE: None}}
    assert plan({}, {ALICE: {RATE: 9.0}}, synced).changes == {}
    assert plan({}, {ALICE: {RATE: 1.0}}).changes == {}


def test_a_quota_that_others_set_at_the_destination_is_kept_and_told() -> None:
    """Two owners of one value would otherwise change it in turn for ever."""
    planned = plan({ALICE: {RATE: 2.0}}, {ALICE: {RATE: 7.0}})

    assert planned.changes == {}
    assert planned.notes == (
        "user=alice: producer_byte_rate is 2 at the source and 7 here, set by others: kept",
    )


@pytest.mark.parametrize(
    "entity",
    [
        MIRROR,
        (("client-id", "kmirror-dagster"),),
        (("client-id", "x"), ("user", "mirror")),
        EVERY_USER,
        (("client-id", None),),
        (("client-id", None), ("user", None)),
    ],
    ids=["user", "client", "user-and-client", "any-user", "any-client", "anybody"],
)
def test_the_mirror_is_never_slowed_down_by_what_it_copies(entity: QuotaEntity) -> None:
    """Quotas of its own, and defaults that apply to it, are listed instead."""
    planned = plan({entity: {RATE: 1.0}})

    assert planned.changes == {}
    assert "would slow down the mirror itself" in planned.notes[0]


def test_defaults_are_copied_once_the_mirror_has_a_quota_of_its_own() -> None:
    """A quota by the user's name comes before every default."""
    planned = plan({EVERY_USER: {RATE: 1.0}}, {MIRROR: {RATE: 1e9}})

    assert planned.changes == {EVERY_USER: {RATE: 1.0}}


class MemoryCluster:
    """The calls about clients of `ClusterAdmin`; entities in `refused` cannot be changed."""

    def __init__(self, quotas: Quotas | None = None, users: frozenset[str] = frozenset()) -> None:
        self.quotas = {entity: dict(values) for entity, values in (quotas or {}).items()}
        self.users = users
        self.error: KmirrorError | None = None
        self.refused: set[QuotaEntity] = set()
        self.requests = 0

    def client_quotas(self, *, timeout_s: float | None = None) -> Quotas:
        if self.error is not None:
            raise self.error
        return {entity: dict(values) for entity, values in self.quotas.items()}

    def scram_users(self, *, timeout_s: float | None = None) -> frozenset[str]:
        if self.error is not None:
            raise self.error
        return self.users

    def alter_client_quotas(
        self, changes: Mapping[QuotaEntity, Mapping[str, float | None]], *, timeout_s: float | None = None
    ) -> Mapping[QuotaEntity, KmirrorError | None]:
        self.requests += 1
        for entity, values in changes.items():
            if entity in self.refused:
                continue
            for key, value in values.items():
                if value is None:
                    self.quotas[entity].pop(key)
                else:
                    self.quotas.setdefault(entity, {})[key] = value
        return {entity: KmirrorError("refused") if entity in self.refused else None for entity in changes}


def refresh(
    source: MemoryCluster,
    destination: MemoryCluster,
    *,
    synced: frozenset[Quota] = frozenset(),
    dry_run: bool = False,
    policy: str = "auto",
) -> RefreshContext:
    context = step_context(
        source, destination, policies={"client_quotas": policy}, synced_quotas=synced, dry_run=dry_run
    )
    quota_steps.sync_quotas(context)
    quota_steps.list_users(context)
    return context


def test_one_quota_that_is_refused_names_itself_and_others_are_in_step() -> None:
    """The failed one is tried again, the rest is not; at rest there is no request."""
    bob: QuotaEntity = (("user", "bob"),)
    source, destination = MemoryCluster({ALICE: {RATE: 1.0}, bob: {RATE: 2.0}}), MemoryCluster()
    destination.refused = {bob}

    first = refresh(source, destination)
    assert first.reports[Step.QUOTAS].errors == {"user=bob": "refused"}
    assert first.quotas == {Quota(ALICE, RATE, 1.0)}
    destination.refused = set()
    second = refresh(source, destination, synced=first.quotas or frozenset())
    assert second.quotas == {Quota(ALICE, RATE, 1.0), Quota(bob, RATE, 2.0)}
    third = refresh(source, destination, synced=second.quotas or frozenset())

    assert (destination.requests, third.changes) == (2, [])
    assert destination.quotas == source.quotas


def test_a_removal_that_failed_is_not_forgotten() -> None:
    """What could not be removed stays the mirror's."""
    synced = frozenset({Quota(ALICE, RATE, 1.0)})
    destination = MemoryCluster({ALICE: {RATE: 1.0}})
    destination.refused = {ALICE}

    assert refresh(MemoryCluster(), destination, synced=synced).quotas == synced


def test_a_plan_changes_no_quota_and_off_does_not_even_look() -> None:
    """The same change is told; nothing is sent."""
    source, destination = MemoryCluster({ALICE: {RATE: 1.0}}), MemoryCluster()

    planned = refresh(source, destination, dry_run=True)
    assert [(change.subject, change.text) for change in planned.changes] == [
        ("user=alice", "set producer_byte_rate=1")
    ]
    assert refresh(source, destination, policy="off").quotas is None
    assert destination.requests == 0


@pytest.mark.parametrize(
    "error",
    [AuthorizationError("User:mirror lacks DESCRIBE_CONFIGS"), broker_error(UNSUPPORTED_VERSION, "listing")],
    ids=["denied", "old"],
)
def test_a_source_that_does_not_tell_is_a_note(error: KmirrorError) -> None:
    """A right that a mirror may do without, and brokers before 2.6: nothing fails, what is stored is kept."""
    source = MemoryCluster()
    source.error = error
    context = refresh(source, MemoryCluster(), synced=frozenset({Quota(ALICE, RATE, 1.0)}))

    assert (context.quotas, context.reports[Step.QUOTAS].errors) == (None, {})
    assert context.reports[Step.QUOTAS].notes[0].startswith("client quotas are not mirrored")
    assert "are not known" in context.reports[Step.USERS].notes[0]


def test_users_to_be_made_by_hand_are_listed() -> None:
    """Those that the destination has are not."""
    context = refresh(MemoryCluster(users=frozenset({"a", "b"})), MemoryCluster(users=frozenset({"a"})))

    assert context.reports[Step.USERS].notes == ["SCRAM users to be made at the destination: b"]

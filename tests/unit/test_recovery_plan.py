"""What a failback decides about each topic, and what it asks of the mirror back."""

from dataclasses import replace

import pytest

from kmirror_dagster.broker.admin_types import Partition, TopicDescription
from kmirror_dagster.errors import UsageError
from kmirror_dagster.recovery.common_point import Proof, window
from kmirror_dagster.recovery.failback import reverse_document
from kmirror_dagster.recovery.failback_look import reverse_name
from kmirror_dagster.recovery.failback_plan import (
    FailbackPlan,
    FailbackWorld,
    TopicAction,
    TopicPlan,
    plan_topics,
)
from kmirror_dagster.recovery.positions import LastPosition
from kmirror_dagster.settings import mirror_from_document
from kmirror_dagster.verification.ranges import LogEnds

GOOD = Proof(point=100, first=0, compared=100)


def world(
    *,
    old: dict[int, tuple[int, int]] | None,
    new: dict[int, tuple[int, int]] | None,
    positions: dict[int, int],
    proofs: dict[int, Proof] | None = None,
    recorded_id: str = "id",
) -> FailbackWorld:
    """One topic at both sides: log start and end by partition; None: it is not there."""

    def ends(side: dict[int, tuple[int, int]] | None) -> dict[Partition, LogEnds]:
        return {("t", n): LogEnds(start, end, end) for n, (start, end) in (side or {}).items()}

    def topics(side: dict[int, tuple[int, int]] | None) -> dict[str, TopicDescription]:
        return {} if side is None else {"t": TopicDescription("t", "id", len(side), 1)}

    return FailbackWorld(
        positions=[
            LastPosition(topic="t", partition=n, offset=offset, source_topic_id=recorded_id)
            for n, offset in positions.items()
        ],
        old_topics=topics(old),
        new_topics=topics(new),
        old_ends=ends(old),
        new_ends=ends(new),
        proofs={("t", n): proof for n, proof in (proofs or {}).items()},
    )


def planned(case: FailbackWorld) -> TopicPlan:
    """The plan of the one topic."""
    (plan,) = plan_topics(case)
    return plan


def test_the_beginning_of_the_new_log_is_gone_on_with() -> None:
    """Nothing unmirrored and the records in front are equal: only what is new is copied."""
    plan = planned(world(old={0: (0, 100)}, new={0: (0, 150)}, positions={0: 100}, proofs={0: GOOD}))
    assert (plan.action, plan.tail, plan.copy_offsets) == (TopicAction.CONTINUE, 0, 50)


def test_a_shorter_old_log_is_gone_on_with() -> None:
    """An old source that lost some of its end is still a beginning."""
    proof = Proof(point=90, first=0, compared=90)
    plan = planned(world(old={0: (0, 90)}, new={0: (0, 150)}, positions={0: 100}, proofs={0: proof}))
    assert (plan.action, plan.copy_offsets) == (TopicAction.CONTINUE, 60)


def test_a_translated_topic_is_copied_anew() -> None:
    """Logs of different offsets are not one: the tail is what lies behind the source's own offset."""
    case = world(old={0: (0, 1_120)}, new={0: (0, 150)}, positions={0: 100})
    (position,) = case.positions
    case = replace(case, positions=[position.model_copy(update={"source_offset": 1_100})])
    plan = planned(case)
    assert (plan.action, plan.tail, plan.copy_offsets) == (TopicAction.RECREATE, 20, 150)
    assert plan.reason == "its offsets at the new source are translated: the two are not one log"


def test_a_tail_makes_the_topic_anew() -> None:
    """One partition's unmirrored records: all of the topic is copied anew, its tails are saved."""
    case = world(
        old={0: (0, 120), 1: (0, 100)},
        new={0: (20, 150), 1: (0, 100)},
        positions={0: 100, 1: 100},
        proofs={0: GOOD, 1: GOOD},
    )
    plan = planned(case)
    assert (plan.action, plan.tail, plan.copy_offsets) == (TopicAction.RECREATE, 20, 230)
    assert plan.reason == "20 offsets in 1 partitions were never mirrored"


def test_a_tail_that_retention_has_begun_to_delete() -> None:
    """What is deleted already cannot be saved any more."""
    plan = planned(world(old={0: (110, 120)}, new={0: (0, 150)}, positions={0: 100}, proofs={0: GOOD}))
    assert (plan.action, plan.tail) == (TopicAction.RECREATE, 10)


@pytest.mark.parametrize(
    ("case", "reason", "tail"),
    [
        (
            world(
                old={0: (0, 100)},
                new={0: (0, 150)},
                positions={0: 100},
                proofs={0: Proof(100, 0, 100, "value: x")},
            ),
            "differs in front of offset 100 (value: x)",
            100,
        ),
        (
            world(old={0: (0, 100)}, new={0: (0, 150)}, positions={0: 100}, recorded_id="former"),
            "deleted and created again",
            100,
        ),
        (
            world(old={0: (0, 100)}, new={0: (100, 150)}, positions={0: 100}, proofs={0: Proof(100, 100, 0)}),
            "can be compared",
            0,
        ),
        (
            world(
                old={0: (0, 100), 1: (0, 7)},
                new={0: (0, 150), 1: (0, 0)},
                positions={0: 100},
                proofs={0: GOOD},
            ),
            "partition 1 was never mirrored",
            7,
        ),
        (
            world(old={0: (0, 100), 1: (0, 0)}, new={0: (0, 150)}, positions={0: 100}, proofs={0: GOOD}),
            "2 partitions there and 1",
            0,
        ),
    ],
)
def test_what_cannot_be_proven_is_made_anew(case: FailbackWorld, reason: str, tail: int) -> None:
    """Another log, another topic, nothing to compare, further partitions: all that may be lost is saved first."""
    plan = planned(case)
    assert plan.action is TopicAction.RECREATE
    assert reason in (plan.reason or "")
    assert plan.tail == tail


def test_an_emptied_old_log_needs_no_proof() -> None:
    """Where the old source holds nothing there is nothing to contradict."""
    proof = Proof(point=100, first=100, compared=0, needed=False)
    plan = planned(world(old={0: (100, 100)}, new={0: (0, 150)}, positions={0: 100}, proofs={0: proof}))
    assert plan.action is TopicAction.CONTINUE


def test_a_topic_that_is_gone_is_made() -> None:
    """A topic that the old source lost is copied whole."""
    plan = planned(world(old=None, new={0: (10, 150)}, positions={0: 100}))
    assert (plan.action, plan.copy_offsets, plan.deletes) == (TopicAction.CREATE, 140, False)


@pytest.mark.parametrize("new", [None, {0: (0, 99)}])
def test_a_new_source_without_what_was_mirrored_is_refused(new: dict[int, tuple[int, int]] | None) -> None:
    """Nothing is done to the old source's topics when the new one has lost what was mirrored."""
    with pytest.raises(UsageError, match=r"leave (it|the topic) out"):
        plan_topics(world(old={0: (0, 100)}, new=new, positions={0: 100}, proofs={0: GOOD}))


def test_window_of_a_proof() -> None:
    """The last thousand offsets in front of the common point, as far as both sides hold them."""
    position = LastPosition(topic="t", partition=0, offset=5_000)
    wanted = window(position, LogEnds(0, 6_000, 6_000), LogEnds(4_500, 9_000, 9_000))
    assert (wanted.start, wanted.end) == (4_500, 5_000)
    wanted = window(position, LogEnds(0, 3_000, 3_000), LogEnds(0, 9_000, 9_000))
    assert (wanted.start, wanted.end) == (2_000, 3_000)
    wanted = window(position, LogEnds(5_500, 6_000, 6_000), LogEnds(0, 9_000, 9_000))
    assert wanted.start == wanted.end == 5_000


def test_document_of_the_mirror_back() -> None:
    """Clusters exchanged, references and filters kept; where to begin and replicas are of the other cluster."""
    document = {
        "mirror": "orders",
        "source": {"bootstrap.servers": "${A_SERVERS}"},
        "destination": {"bootstrap.servers": "b:9092"},
        "filters": {"topics_include": ["orders.*"], "groups.include": ["billing"]},
        "policies": {"start": "latest", "replication_factor": 1, "rpo_seconds": 5},
    }
    plan = FailbackPlan(
        mirror="orders",
        reverse="orders-back",
        old_source_id="a",
        new_source_id="b",
        stopped_ms=1,
        quarantine="q",
        topics=[TopicPlan(topic="t", action=TopicAction.CONTINUE)],
    )
    back = reverse_document(document, plan, ["orders.*", "t"], replication_factor=3)
    settings = mirror_from_document(back, {"A_SERVERS": "a:9092"})
    assert (settings.mirror, settings.source.address) == ("orders-back", "b:9092")
    assert back["destination"] == {"bootstrap.servers": "${A_SERVERS}"}
    assert settings.filters.topics_include == ("orders.*", "t")
    assert settings.filters.groups_include == ("billing",)
    policies = settings.policies
    assert (policies.adopt_topics, policies.replication_factor, policies.rpo_seconds) == (["t"], 3, 5)
    assert policies.start.at == "earliest"


def test_name_of_the_mirror_back() -> None:
    """There and back again is the first mirror's name."""
    assert reverse_name("orders") == "orders-back"
    assert reverse_name(reverse_name("orders")) == "orders"

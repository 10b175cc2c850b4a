"""Planning of topic configurations."""

from collections.abc import Mapping

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kmirror_dagster.broker.admin_types import ConfigChange, ConfigValue
from kmirror_dagster.metadata.configs import (
    ALIGNING,
    CLUSTER_LOCAL,
    FORCED,
    OPEN_LIMIT,
    desired_configs,
    held_configs,
    plan_configs,
    release_configs,
    replicas_problem,
    source_values,
)

DEFAULTS = {
    "cleanup.policy": "delete",
    "compression.type": "producer",
    "max.message.bytes": "1048588",
    "message.timestamp.type": "CreateTime",
    "message.timestamp.before.max.ms": OPEN_LIMIT,
    "message.timestamp.after.max.ms": "3600000",
    "min.insync.replicas": "1",
    "retention.ms": "604800000",
    "retention.bytes": "-1",
    "segment.ms": "604800000",
    "segment.bytes": "1073741824",
    "leader.replication.throttled.replicas": "",
    "follower.replication.throttled.replicas": "",
}
KEYS = frozenset(DEFAULTS)

VALUES: dict[str, st.SearchStrategy[str]] = {
    "cleanup.policy": st.sampled_from(["delete", "compact", "compact,delete"]),
    "compression.type": st.sampled_from(["producer", "zstd", "lz4"]),
    "max.message.bytes": st.integers(1, 10_000_000).map(str),
    "message.timestamp.type": st.sampled_from(["CreateTime", "LogAppendTime"]),
    "min.insync.replicas": st.integers(1, 3).map(str),
}
NUMBERS = st.integers(0, 10**9).map(str)
OVERRIDES = st.fixed_dictionaries({}, optional={key: VALUES.get(key, NUMBERS) for key in sorted(KEYS)})
EXCLUDED = st.frozensets(st.sampled_from(sorted(KEYS)))


def described(overrides: Mapping[str, str]) -> dict[str, ConfigValue]:
    """What a broker tells of a topic with these overrides."""
    defaults = {key: ConfigValue(value) for key, value in DEFAULTS.items()}
    return defaults | {key: ConfigValue(value, is_override=True) for key, value in overrides.items()}


def apply(overrides: Mapping[str, str], change: ConfigChange) -> dict[str, str]:
    """What a topic has after a change."""
    kept = {key: value for key, value in overrides.items() if key not in change.unsets}
    return kept | dict(change.sets)


@given(source=OVERRIDES, present=OVERRIDES, excluded=EXCLUDED, aligning=st.booleans(), synced=EXCLUDED)
def test_a_plan_applied_leaves_nothing_to_do(
    source: dict[str, str],
    present: dict[str, str],
    excluded: frozenset[str],
    aligning: bool,
    synced: frozenset[str],
) -> None:
    """Planning again after applying a plan is empty, whatever was there and whatever is excluded."""
    excludes = excluded.__contains__
    desired = desired_configs(
        described(source), excludes=excludes, replication_factor=2, aligning=aligning, destination_keys=KEYS
    )
    first = plan_configs(desired, described(present), excludes=excludes, synced=synced)

    after = apply(present, first.change)
    second = plan_configs(desired, described(after), excludes=excludes, synced=frozenset(first.synced))

    assert not second.change


@given(source=OVERRIDES, present=OVERRIDES, excluded=EXCLUDED, synced=EXCLUDED)
def test_excluded_and_foreign_keys_are_never_touched(
    source: dict[str, str], present: dict[str, str], excluded: frozenset[str], synced: frozenset[str]
) -> None:
    """No excluded key is set or unset, forced ones aside; no key of the destination's own is removed."""
    excludes = excluded.__contains__
    desired = desired_configs(described(source), excludes=excludes, replication_factor=2)
    change = plan_configs(desired, described(present), excludes=excludes, synced=synced).change

    touched = set(change.sets) | set(change.unsets)
    assert not touched & (excluded - FORCED)
    assert not (touched & CLUSTER_LOCAL) - synced
    assert set(change.unsets) <= synced


@pytest.mark.case("C20")
def test_drift_is_kept_and_listed_or_reverted() -> None:
    """What is set at the destination only stays, or goes by policy; excluded and cluster-local keys stay always."""
    throttled = "leader.replication.throttled.replicas"
    present = {"segment.ms": "1", "retention.bytes": "2", throttled: "0:1"}
    desired = desired_configs(
        described({}), excludes=lambda _: False, replication_factor=1, destination_keys=KEYS
    )

    def planned(*, revert: bool) -> tuple[tuple[str, ...], tuple[str, ...]]:
        plan = plan_configs(
            desired,
            described(present),
            excludes=frozenset({"retention.bytes"}).__contains__,
            synced=frozenset(),
            revert=revert,
        )
        return plan.change.unsets, plan.drift

    assert planned(revert=False) == ((), (throttled, "segment.ms"))
    assert planned(revert=True) == (("segment.ms",), (throttled,))


@given(source=OVERRIDES, excluded=EXCLUDED)
def test_creation_and_sync_agree(source: dict[str, str], excluded: frozenset[str]) -> None:
    """A topic created with its desired configurations needs no sync afterwards."""
    excludes = excluded.__contains__
    desired = desired_configs(described(source), excludes=excludes, replication_factor=3)
    created = described(dict(desired.values))

    assert not plan_configs(desired, created, excludes=excludes, synced=frozenset()).change


@given(source=OVERRIDES, aligning=st.booleans())
def test_release_puts_the_source_s_own_values_in_place(source: dict[str, str], aligning: bool) -> None:
    """After the release held keys are as the source has them, other keys as they were; twice is once."""
    nothing = frozenset[str]().__contains__
    desired = desired_configs(described(source), excludes=nothing, replication_factor=3, aligning=aligning)
    mirrored = dict(desired.values)

    released = apply(mirrored, release_configs(desired.held, described(mirrored)))

    for key in desired.held:
        assert released.get(key) == source.get(key)
    for key in set(mirrored) - set(desired.held):
        assert released[key] == mirrored[key]
    assert not release_configs(desired.held, described(released))


@pytest.mark.case("C19")
def test_a_key_the_destination_does_not_know_is_reported_and_left_out() -> None:
    """An older destination lacks a key: it is named, everything else is set."""
    source = described({"retention.ms": "1", "new.key": "x"})

    desired = desired_configs(
        source, excludes=lambda _key: False, replication_factor=1, destination_keys=KEYS
    )

    assert "new.key" not in desired.values
    assert desired.unsupported == {"new.key": "the destination does not know it"}
    assert desired.values["retention.ms"] == "1"


@pytest.mark.case("C19")
def test_more_in_sync_replicas_than_replicas_are_left_out() -> None:
    """min.insync.replicas that the destination's replica count cannot meet is not copied."""
    source = described({"min.insync.replicas": "2"})

    tight = desired_configs(source, excludes=lambda _key: False, replication_factor=1)
    wide = desired_configs(source, excludes=lambda _key: False, replication_factor=2)

    assert "min.insync.replicas" not in tight.values
    assert "min.insync.replicas" in tight.unsupported
    assert wide.values["min.insync.replicas"] == "2"


def test_timestamps_are_held_whatever_is_excluded() -> None:
    """Timestamp type and limits are held though excluded by default; size and compression obey the exclusion."""
    held = held_configs(described({"message.timestamp.type": "LogAppendTime"}), excludes=lambda _key: True)

    assert held == {
        "message.timestamp.type": "CreateTime",
        "message.timestamp.before.max.ms": OPEN_LIMIT,
        "message.timestamp.after.max.ms": OPEN_LIMIT,
    }


def test_the_largest_message_is_the_source_s_effective_one() -> None:
    """A limit the source topic has from its broker counts; a larger one at the destination stays."""
    source = described({}) | {"max.message.bytes": ConfigValue("5000000")}
    desired = desired_configs(source, excludes=lambda _key: False, replication_factor=1)

    def sets(present: dict[str, str]) -> Mapping[str, str]:
        plan = plan_configs(desired, described(present), excludes=lambda _key: False, synced=frozenset())
        return plan.change.sets

    assert desired.values["max.message.bytes"] == "5000000"
    assert desired.held["max.message.bytes"] is None
    assert sets({"max.message.bytes": "4999999"})["max.message.bytes"] == "5000000"
    assert "max.message.bytes" not in sets({"max.message.bytes": "6000000"})


def test_a_destination_before_3_6_gets_the_older_timestamp_limit() -> None:
    """Where the two limits are unknown the one for both directions is opened."""
    older = KEYS - FORCED | {"message.timestamp.type", "message.timestamp.difference.max.ms"}

    held = held_configs(described({}), excludes=lambda _key: False, destination_keys=older)

    assert held["message.timestamp.difference.max.ms"] == OPEN_LIMIT
    assert "message.timestamp.before.max.ms" not in held


def test_an_older_source_s_limit_is_released_into_both_newer_ones() -> None:
    """A source with one limit for both directions: at stop both of the destination's get its value."""
    source = described({"message.timestamp.difference.max.ms": "5000"})
    keys = frozenset({"message.timestamp.before.max.ms", "message.timestamp.after.max.ms"})

    assert source_values(source, keys) == dict.fromkeys(keys, "5000")


def test_only_a_policy_without_delete_is_held_back_while_aligning() -> None:
    """A compacted log with a cut head may be cut first; others keep their policy."""
    for policy, held in (("compact", True), ("compact,delete", False), ("delete", False)):
        desired = desired_configs(
            described({"cleanup.policy": policy}),
            excludes=lambda _key: False,
            replication_factor=1,
            aligning=True,
        )
        assert (desired.values.items() >= ALIGNING.items()) is held
        assert desired.held.get("cleanup.policy") == (policy if held else None)


@pytest.mark.case("E1")
def test_a_copy_that_cannot_be_written_is_reported() -> None:
    """A broker default of min.insync.replicas above the copy's replicas is named with the remedy."""
    current = described({}) | {"min.insync.replicas": ConfigValue("2")}

    assert "min.insync.replicas is 2" in (replicas_problem(current, 1) or "")
    assert replicas_problem(current, 2) is None


def test_a_refused_value_is_not_sent_again_until_it_changes() -> None:
    """What the destination has refused is left out of the plan and is not counted as the mirror's."""
    desired = desired_configs(
        described({"retention.ms": "7"}), excludes=lambda _key: False, replication_factor=1
    )
    present = described(dict(desired.values) | {"retention.ms": "1"})

    def plan(value: str) -> tuple[bool, bool]:
        planned = plan_configs(
            desired,
            present,
            excludes=lambda _key: False,
            synced=frozenset(),
            refused={"retention.ms": value},
        )
        return bool(planned.change), "retention.ms" in planned.synced

    assert plan("7") == (False, False)
    assert plan("8") == (True, True)

"""Filters: whole-name RE2 patterns, exclude wins, internal topics never."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from kmirror_dagster.settings import FilterSettings, matches_any, name_matcher
from kmirror_dagster.settings.filters import DEFAULT_TOPIC_PROPERTIES_EXCLUDE, split_list

NAMES = st.from_regex(r"[A-Za-z0-9._-]{1,40}", fullmatch=True)


def test_nothing_is_discovered_by_default() -> None:
    """Without topics.include only topics started by name are mirrored; all groups are."""
    filters = FilterSettings()
    assert not filters.selects_topic("orders")
    assert not filters.excludes_topic("orders")
    assert filters.selects_group("billing")


@pytest.mark.parametrize(
    ("name", "selected"),
    [
        ("orders", True),
        ("orders-eu", False),
        ("my-orders", False),
        ("payments", True),
        ("payments.eu", True),
        ("payments.test", False),
        ("Orders", False),
        ("", False),
        ("__mirror_state", False),
        ("__consumer_offsets", False),
        ("__mine", False),
    ],
)
def test_patterns_match_whole_names_and_exclude_wins(name: str, selected: bool) -> None:
    """A pattern has to match the whole name, and what is excluded is not selected whatever includes it."""
    filters = FilterSettings(topics_include=("orders", "pay.*", "__.*"), topics_exclude=(".*\\.test", "__.*"))
    assert filters.selects_topic(name) is selected


@pytest.mark.parametrize(
    "name", ["__mirror_state", "__consumer_offsets", "__transaction_state", "__share_group_state"]
)
def test_internal_topics_are_never_mirrored(name: str) -> None:
    """Kafka's and our own internal topics stay out even when nothing is excluded."""
    filters = FilterSettings(topics_include=(".*",), topics_exclude=())
    assert not filters.selects_topic(name)
    assert filters.excludes_topic(name)
    assert filters.selects_topic("__other")


def test_groups_are_selected_like_topics() -> None:
    """Groups have include and exclude of their own; their names may be any text."""
    filters = FilterSettings(groups_include=("gruppe-.*", "ω.*"), groups_exclude=("gruppe-ü",))
    assert filters.selects_group("gruppe-a")
    assert not filters.selects_group("gruppe-ü")
    assert filters.selects_group("ωmega\n2") is False
    assert filters.selects_group("ωmega")


def test_the_destinations_own_topic_properties_stay() -> None:
    """The default list is KIP-1279's; mirror.name is excluded unconditionally."""
    filters = FilterSettings()
    assert all(filters.excludes_property(key) for key in DEFAULT_TOPIC_PROPERTIES_EXCLUDE)
    assert not filters.excludes_property("retention.ms")
    own = FilterSettings(topic_properties_exclude=("retention.*",))
    assert own.excludes_property("retention.bytes")
    assert not own.excludes_property("min.insync.replicas")
    assert own.excludes_property("mirror.name")


@given(st.lists(NAMES, max_size=5), NAMES)
def test_a_plain_name_selects_itself_only(known: list[str], name: str) -> None:
    """Escaped names as patterns select exactly those names."""
    patterns = [item.replace(".", r"\.") for item in known]
    assert matches_any(patterns, name) is (name in known)


@given(st.lists(st.from_regex(r"[a-z]{1,3}(\.\*|\{1,2\}|\[a,b\]|\(c,d\)|\\,)?", fullmatch=True), min_size=1))
def test_a_comma_list_is_the_same_as_a_list(patterns: list[str]) -> None:
    """One text with commas means the same as a list, and commas inside a pattern are left alone."""
    assert split_list(" , ".join(patterns)) == patterns
    assert FilterSettings.model_validate({"topics.include": ",".join(patterns)}).topics_include == tuple(
        patterns
    )


@pytest.mark.parametrize(
    ("pattern", "reason"),
    [
        ("orders(", "missing )"),
        ("*", "no argument for repetition operator"),
        ("[", "missing ]"),
        (r"(a)\1", "invalid escape sequence"),
        ("(?=x)", "invalid perl operator"),
        ("", "must not be empty"),
    ],
)
def test_invalid_patterns_are_refused_by_name(
    pattern: str, reason: str, capfd: pytest.CaptureFixture[str]
) -> None:
    """What RE2 does not take is refused with the pattern and the reason, and RE2 writes nothing itself."""
    with pytest.raises(ValidationError) as caught:
        FilterSettings(groups_include=("fine", pattern))
    message = caught.value.errors()[0]["msg"]
    assert reason in message
    assert not pattern or repr(pattern) in message
    with pytest.raises(ValueError, match="pattern"):
        name_matcher([pattern])
    assert capfd.readouterr() == ("", "")


def test_verbs_take_patterns_or_nothing() -> None:
    """No patterns at all select everything, an empty list nothing."""
    assert name_matcher(None)("orders")
    assert not name_matcher([])("orders")
    assert name_matcher(["o.*"])("orders")
    assert not name_matcher(["o"])("orders")


@pytest.mark.parametrize(
    ("rules", "selected"),
    [
        (("*",), True),
        ((), False),
        (("topic",), True),
        (("group",), False),
        (("topic;orders.*",), True),
        (("topic;order",), False),
        (("*;*;read",), True),
        (("*;*;WRITE", "TOPIC;*;*;DENY"), False),
        (("*;*;WRITE", "TOPIC;*;*;ALLOW"), True),
        (("topic;orders-eu;READ;ALLOW;User:a.*",), True),
        (("topic;orders-eu;READ;ALLOW;User:b.*",), False),
    ],
)
def test_acl_rules_have_up_to_five_fields(rules: tuple[str, ...], selected: bool) -> None:
    """A rule names type, name, operation, permission and principal; * and missing fields match all."""
    filters = FilterSettings(acls_include=rules)
    assert (
        filters.selects_acl(
            resource_type="TOPIC",
            resource_name="orders-eu",
            operation="READ",
            permission="ALLOW",
            principal="User:alice",
        )
        is selected
    )


@pytest.mark.parametrize("rule", ["a;b;c;d;e;f", "topic;(", "topic;*;*;*;("])
def test_invalid_acl_rules_are_refused(rule: str) -> None:
    """Too many fields, and fields that are no patterns, are refused."""
    with pytest.raises(ValidationError):
        FilterSettings(acls_include=(rule,))

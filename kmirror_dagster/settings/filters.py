"""What belongs to a mirror: whole-name RE2 patterns, exclude wins."""

import functools
from collections.abc import Callable, Iterable
from typing import Any

import re2
from pydantic import ConfigDict, Field, field_validator

from kmirror_dagster.settings.base import Settings, dotted, refused

# Owned by each cluster for itself: a copy would corrupt the destination's own bookkeeping.
NEVER_MIRRORED_TOPICS = frozenset(
    {
        "__mirror_state",
        "__consumer_offsets",
        "__transaction_state",
        "__share_group_state",
        "__cluster_metadata",
    }
)

# KIP-1279, topic.properties.exclude: what belongs to a cluster's operation rather than to a topic's meaning.
DEFAULT_TOPIC_PROPERTIES_EXCLUDE = (
    "follower.replication.throttled.replicas",
    "leader.replication.throttled.replicas",
    "message.timestamp.difference.max.ms",
    "log.message.timestamp.before.max.ms",
    "log.message.timestamp.after.max.ms",
    "message.timestamp.type",
    "unclean.leader.election.enable",
    "min.insync.replicas",
    "mirror.replication.throttled.replicas",
    "mirror.support.unclean.leader.election",
)
ALWAYS_EXCLUDED_PROPERTIES = frozenset({"mirror.name"})

_ACL_FIELDS = ("resource type", "resource name", "operation", "permission", "principal")


def check_pattern(pattern: str) -> None:
    """Refuse what is no RE2 pattern.

    Raises:
        PydanticCustomError: (a ValueError) naming the pattern and what is wrong with it.
    """
    if not pattern:
        raise refused("a pattern must not be empty; leave it out, or write .* for every name")
    options = re2.Options()
    options.log_errors = False
    try:
        re2.compile(pattern, options)
    except re2.error as error:
        detail = error.args[0] if error.args else error
        text = detail.decode("utf-8", "replace") if isinstance(detail, bytes) else str(detail)
        text = text.removesuffix(f": {pattern}")  # RE2 names the part at fault, which may be all of it
        raise refused(f"{pattern!r} is not a valid RE2 pattern: {text}") from None


@functools.lru_cache(maxsize=1_024)
def _compiled(patterns: tuple[str, ...]) -> Any:
    options = re2.Options()
    options.log_errors = False
    return re2.compile("|".join(f"(?:{pattern})" for pattern in patterns), options)


def matches_any(patterns: Iterable[str], name: str) -> bool:
    """Tell whether one of the patterns matches the whole of `name`; no patterns match nothing."""
    known = tuple(patterns)
    return bool(known) and _compiled(known).fullmatch(name) is not None


def split_list(text: str) -> list[str]:
    """Split a comma list, leaving commas inside brackets or behind a backslash alone (`a{1,3},b`)."""
    parts, start, depth, escaped = list[str](), 0, 0, False
    for index, char in enumerate(text):
        if escaped:
            escaped = False
        elif char == "\\":
            escaped = True
        elif char in "([{":
            depth += 1
        elif char in ")]}":
            depth = max(0, depth - 1)
        elif char == "," and depth == 0:
            parts.append(text[start:index])
            start = index + 1
    parts.append(text[start:])
    return [part.strip() for part in parts if part.strip()]


class FilterSettings(Settings):
    """What of the source a mirror covers: lists of whole-name RE2 patterns; a plain name is a pattern too."""

    model_config = ConfigDict(alias_generator=dotted)

    topics_include: tuple[str, ...] = Field(
        default=(),
        description="Topics mirrored on sight; when empty, only those started by name.",
    )
    topics_exclude: tuple[str, ...] = Field(
        default=("__.*",), description="Topics never mirrored, whatever topics.include says."
    )
    groups_include: tuple[str, ...] = Field(
        default=(".*",), description="Consumer groups whose positions are kept equal."
    )
    groups_exclude: tuple[str, ...] = Field(default=(), description="Consumer groups left alone.")
    acls_include: tuple[str, ...] = Field(
        default=("*",),
        description="ACLs kept equal: type;namePattern;operation;permission;principalPattern; "
        "* for any, fields at the end may be left out.",
    )
    topic_properties_exclude: tuple[str, ...] = Field(
        default=DEFAULT_TOPIC_PROPERTIES_EXCLUDE,
        description="Topic configurations that stay the destination's own; replaces the default list.",
    )

    @field_validator("*", mode="before")
    @classmethod
    def _split(cls, value: object) -> object:
        return tuple(split_list(value)) if isinstance(value, str) else value

    @field_validator(
        "topics_include", "topics_exclude", "groups_include", "groups_exclude", "topic_properties_exclude"
    )
    @classmethod
    def _check_patterns(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        for pattern in value:
            check_pattern(pattern)
        return value

    @field_validator("acls_include")
    @classmethod
    def _check_acls(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        for rule in value:
            fields = rule.split(";")
            if len(fields) > len(_ACL_FIELDS):
                raise refused(
                    f"{rule!r} has {len(fields)} fields; expected at most 5: {', '.join(_ACL_FIELDS)}"
                )
            for index in (1, 4):
                if len(fields) > index and fields[index] != "*":
                    check_pattern(fields[index])
        return value

    def selects_topic(self, name: str) -> bool:
        """Tell whether discovery mirrors a topic of that name."""
        return matches_any(self.topics_include, name) and not self.excludes_topic(name)

    def excludes_topic(self, name: str) -> bool:
        """Tell whether a topic may not be mirrored even when it is started by name."""
        return name in NEVER_MIRRORED_TOPICS or matches_any(self.topics_exclude, name)

    def selects_group(self, name: str) -> bool:
        """Tell whether a consumer group's positions are kept equal."""
        return matches_any(self.groups_include, name) and not matches_any(self.groups_exclude, name)

    def excludes_property(self, key: str) -> bool:
        """Tell whether a topic configuration stays the destination's own."""
        return key in ALWAYS_EXCLUDED_PROPERTIES or matches_any(self.topic_properties_exclude, key)

    def selects_acl(
        self, *, resource_type: str, resource_name: str, operation: str, permission: str, principal: str
    ) -> bool:
        """Tell whether an ACL is kept equal (KIP-1279 `acls.include`); letter case of enums is ignored."""
        values = (resource_type, resource_name, operation, permission, principal)
        return any(_acl_rule_matches(rule, values) for rule in self.acls_include)


def _acl_rule_matches(rule: str, values: tuple[str, ...]) -> bool:
    for index, (field, value) in enumerate(zip(rule.split(";"), values, strict=False)):
        if field in ("", "*"):
            continue
        if index in (1, 4):
            if not matches_any((field,), value):
                return False
        elif field.upper() != value.upper():
            return False
    return True


def name_matcher(patterns: Iterable[str] | None) -> Callable[[str], bool]:
    """Build a test for names from patterns given with a verb; None selects every name.

    Raises:
        PydanticCustomError: (a ValueError) when one is no RE2 pattern.
    """
    if patterns is None:
        return lambda _name: True
    known = tuple(patterns)
    for pattern in known:
        check_pattern(pattern)
    return lambda name: matches_any(known, name)

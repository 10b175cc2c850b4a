"""Topic configurations: what the destination should have, held back while mirroring, and put in place at
stop.

Pure. Three kinds of keys:

- *mirrored*: what is set on the source topic itself, minus `topic.properties.exclude` and what belongs to a
  cluster.
- *held*: values the copy needs while it is one, whatever the source says (see `held_configs`).
- *the destination's own*: everything else; never touched, whoever set it, unless `policies.config_drift` says so.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from kmirror_dagster.broker.admin_types import ConfigChange, Configs, ConfigValue

CLEANUP = "cleanup.policy"
MAX_MESSAGE_BYTES = "max.message.bytes"
COMPRESSION = "compression.type"
MIN_INSYNC = "min.insync.replicas"
TIMESTAMP_TYPE = "message.timestamp.type"
TIMESTAMP_BEFORE = "message.timestamp.before.max.ms"
TIMESTAMP_AFTER = "message.timestamp.after.max.ms"
TIMESTAMP_DIFFERENCE = "message.timestamp.difference.max.ms"

# A broker's replica lists name broker ids of its own cluster.
CLUSTER_LOCAL = frozenset(
    {"leader.replication.throttled.replicas", "follower.replication.throttled.replicas"}
)
# Without these, timestamps would be rewritten or refused: held whatever topic.properties.exclude says.
FORCED = frozenset({TIMESTAMP_TYPE, TIMESTAMP_BEFORE, TIMESTAMP_AFTER, TIMESTAMP_DIFFERENCE})

OPEN_LIMIT = str(2**63 - 1)

# The head of a log that starts above 0 is filled and cut again. Brokers refuse to cut a log whose policy
# lacks "delete", and nothing may expire meanwhile.
ALIGNING = {CLEANUP: "compact,delete", "retention.ms": "-1", "retention.bytes": "-1"}

Excludes = Callable[[str], bool]


@dataclass(frozen=True)
class DesiredConfigs:
    """What the destination topic should have.

    Attributes:
        values: overrides to be in place.
        held: the source's own value of each held key, None where it has none.
        unsupported: key -> why it is left out though the source has it.
    """

    values: Mapping[str, str]
    held: Mapping[str, str | None]
    unsupported: Mapping[str, str] = field(default_factory=dict[str, str])


@dataclass(frozen=True)
class ConfigPlan:
    """Change of one topic's configurations.

    Attributes:
        change: what to set and unset; empty when the destination is in step.
        desired: what it leads to.
        synced: keys that are the mirror's once the change is applied.
        drift: keys set only at the destination, kept.
    """

    change: ConfigChange
    desired: DesiredConfigs
    synced: tuple[str, ...]
    drift: tuple[str, ...] = ()


def overrides(configs: Configs) -> dict[str, str]:
    """Values set on the topic itself."""
    return {
        key: entry.value
        for key, entry in configs.items()
        if entry.is_override and entry.value is not None and not entry.read_only
    }


def held_configs(
    source: Configs, *, excludes: Excludes, destination_keys: frozenset[str] | None = None
) -> dict[str, str]:
    """Values the copy has while it is mirrored.

    Brokers must neither rewrite nor refuse what is passed through: timestamps as they are (CreateTime, open
    limits), batches as they are compressed (`producer`), and as large as the source accepts them. The latter
    two are left alone when `topic.properties.exclude` names them: they cost time or fail loudly, but falsify
    nothing.

    Args:
        source: the source topic's effective configurations.
        excludes: `topic.properties.exclude`.
        destination_keys: keys the destination knows, None when that is not known.
    """
    held = {TIMESTAMP_TYPE: "CreateTime"}
    # brokers before 3.6 have one limit for both directions (KIP-937); 4.0 has dropped it
    if destination_keys is None or TIMESTAMP_BEFORE in destination_keys:
        held |= {TIMESTAMP_BEFORE: OPEN_LIMIT, TIMESTAMP_AFTER: OPEN_LIMIT}
    else:
        held[TIMESTAMP_DIFFERENCE] = OPEN_LIMIT
    if not excludes(COMPRESSION):
        held[COMPRESSION] = "producer"
    largest = source.get(MAX_MESSAGE_BYTES)
    if largest is not None and largest.value is not None and not excludes(MAX_MESSAGE_BYTES):
        held[MAX_MESSAGE_BYTES] = largest.value
    return held


def source_values(source: Configs, keys: frozenset[str]) -> dict[str, str | None]:
    """The source's own value of each key, None where the source has none (its cluster's default applies)."""
    own = overrides(source)
    # the newer two limits fall back to the older one where only that is set
    older = own.get(TIMESTAMP_DIFFERENCE)
    values: dict[str, str | None] = {}
    for key in sorted(keys):
        fallback = older if key in (TIMESTAMP_BEFORE, TIMESTAMP_AFTER) else None
        values[key] = own.get(key, fallback)
    return values


def needs_head(source: Configs, *, excludes: Excludes) -> bool:
    """Tell whether the mirrored cleanup policy is one under which a log cannot be cut."""
    policy = source.get(CLEANUP)
    if policy is None or policy.value is None or not policy.is_override or excludes(CLEANUP):
        return False
    return not allows_cutting(policy.value)


def allows_cutting(policy: str) -> bool:
    """Tell whether brokers accept DeleteRecords under a cleanup policy."""
    return "delete" in (part.strip() for part in policy.split(","))


def desired_configs(
    source: Configs,
    *,
    excludes: Excludes,
    replication_factor: int,
    aligning: bool = False,
    destination_keys: frozenset[str] | None = None,
) -> DesiredConfigs:
    """What the destination topic should have, at creation and at every refresh alike.

    Args:
        source: the source topic's effective configurations.
        excludes: `topic.properties.exclude`.
        replication_factor: replicas of the destination topic.
        aligning: the head of a log that starts above 0 is still to be cut at the destination.
        destination_keys: keys the destination knows, None when that is not known.
    """
    held = held_configs(source, excludes=excludes, destination_keys=destination_keys)
    if aligning and needs_head(source, excludes=excludes):
        held |= ALIGNING
    values: dict[str, str] = {}
    unsupported: dict[str, str] = {}
    for key, value in overrides(source).items():
        if key in held or key in CLUSTER_LOCAL or key in FORCED or excludes(key):
            continue
        if destination_keys is not None and key not in destination_keys:
            unsupported[key] = "the destination does not know it"
        elif key == MIN_INSYNC and _as_int(value, 1) > replication_factor:
            unsupported[key] = f"{value} is more than the destination's {replication_factor} replica(s)"
        else:
            values[key] = value
    return DesiredConfigs(values | held, source_values(source, frozenset(held)), unsupported)


def plan_configs(
    desired: DesiredConfigs,
    current: Configs,
    *,
    excludes: Excludes,
    synced: frozenset[str],
    refused: Mapping[str, str] | None = None,
    revert: bool = False,
) -> ConfigPlan:
    """Difference between what the destination topic has and what it should have.

    Args:
        desired: what it should have.
        current: its effective configurations now.
        excludes: `topic.properties.exclude`; a key that is excluded later stays as it is.
        synced: keys the mirror has put there before. One of these that the source no longer has is removed;
            any other is the destination's own and kept.
        refused: key -> value the destination has refused lately: not sent again.
        revert: remove what is set at the destination only, whoever set it, instead of keeping it.
    """
    own = overrides(current)
    refused = refused or {}
    sets = {
        key: value
        for key, value in desired.values.items()
        if not _in_place(key, value, own.get(key)) and refused.get(key) != value
    }
    foreign = [key for key in own if key not in desired.values and key not in desired.unsupported]
    taken_back = frozenset(foreign) - CLUSTER_LOCAL if revert else synced
    unsets = tuple(sorted(key for key in foreign if key in taken_back and not excludes(key)))
    drift = tuple(sorted(key for key in foreign if key not in unsets and not excludes(key)))
    kept = tuple(sorted(key for key, value in desired.values.items() if refused.get(key) != value))
    return ConfigPlan(ConfigChange(sets, unsets), desired, kept, drift)


def release_configs(held: Mapping[str, str | None], current: Configs) -> ConfigChange:
    """Change that ends holding back: the source's own values, nothing where the source has none.

    Args:
        held: `TopicIntent.held` as kept in the topic's record.
        current: the destination topic's effective configurations now.
    """
    own = overrides(current)
    sets = {key: value for key, value in held.items() if value is not None and own.get(key) != value}
    unsets = tuple(sorted(key for key, value in held.items() if value is None and key in own))
    return ConfigChange(sets, unsets)


def replicas_problem(current: Configs, replication_factor: int) -> str | None:
    """Why nothing can be written to a destination topic with so few replicas, None when it can."""
    entry = current.get(MIN_INSYNC, ConfigValue(None))
    needed = _as_int(entry.value, 1)
    if needed <= replication_factor:
        return None
    return (
        f"{MIN_INSYNC} is {needed} and the copy has {replication_factor} replica(s), nothing can be "
        f"written to it: lower {MIN_INSYNC} there or raise policies.replication_factor"
    )


def _in_place(key: str, value: str, present: str | None) -> bool:
    if present is None:
        return False
    if key == MAX_MESSAGE_BYTES:  # a larger limit set at the destination serves as well
        return _as_int(present, 0) >= _as_int(value, 0)
    return present == value


def _as_int(text: str | None, default: int) -> int:
    try:
        return int(text) if text is not None else default
    except ValueError:
        return default

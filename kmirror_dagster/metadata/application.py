"""Making the planned changes: batched, each topic's and group's error kept apart."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from kmirror_dagster.broker.admin import ClusterAdmin
from kmirror_dagster.broker.admin_types import ConfigChange, NewTopic
from kmirror_dagster.errors import BrokerError, KmirrorError
from kmirror_dagster.metadata.configs import (
    OPEN_LIMIT,
    TIMESTAMP_AFTER,
    TIMESTAMP_BEFORE,
    TIMESTAMP_DIFFERENCE,
    TIMESTAMP_TYPE,
)

_TOPIC_ALREADY_EXISTS = 36
_INVALID_CONFIG = 40
_TIERED_KEY = "remote.storage.enable"
# Each round leaves one key out; a topic has far fewer overrides than this.
_MAX_ROUNDS = 40

Timeout = Callable[[], float]


@dataclass(frozen=True)
class Applied:
    """Outcome for one topic.

    Attributes:
        error: why nothing was done, None when it was.
        refused: configuration key -> the broker's reason for refusing it; the rest was applied without it.
    """

    error: KmirrorError | None = None
    refused: Mapping[str, str] = field(default_factory=dict[str, str])


def create_topics(
    admin: ClusterAdmin, topics: Sequence[NewTopic], *, timeout: Timeout
) -> Mapping[str, Applied]:
    """Create topics; a configuration key that the destination refuses is left out and reported.

    Args:
        admin: the destination.
        topics: what to create.
        timeout: seconds the next call may take.
    """
    outcomes: dict[str, Applied] = {}
    refused: dict[str, dict[str, str]] = {topic.name: {} for topic in topics}
    pending = {topic.name: topic for topic in topics}
    for _ in range(_MAX_ROUNDS):
        if not pending:
            break
        answers = admin.create_topics(list(pending.values()), timeout_s=timeout())
        again: dict[str, NewTopic] = {}
        for name, error in answers.items():
            topic = pending[name]
            key = _guilty_key(error, topic.configs) or _probe(admin, topic, error, timeout)
            if key is None:
                outcomes[name] = Applied(error, refused[name])
                continue
            refused[name][key] = str(error)
            again[name] = replace(topic, configs=_without(topic.configs, key))
        pending = again
    return outcomes | _given_up(pending, refused)


def alter_configs(
    admin: ClusterAdmin, changes: Mapping[str, ConfigChange], *, timeout: Timeout
) -> Mapping[str, Applied]:
    """Change configurations; a key that the destination refuses is left out and reported."""
    outcomes: dict[str, Applied] = {}
    refused: dict[str, dict[str, str]] = {name: {} for name in changes}
    pending = {name: change for name, change in changes.items() if change}
    for _ in range(_MAX_ROUNDS):
        if not pending:
            break
        answers = admin.alter_configs(pending, timeout_s=timeout())
        again: dict[str, ConfigChange] = {}
        for name, error in answers.items():
            change = pending[name]
            key = _guilty_key(error, change.sets) or _only_key(error, change)
            if key is None:
                outcomes[name] = Applied(error, refused[name])
                continue
            refused[name][key] = str(error)
            rest = replace(change, sets={k: v for k, v in change.sets.items() if k != key})
            if rest:
                again[name] = rest
            else:
                outcomes[name] = Applied(None, refused[name])
        pending = again
    return outcomes | _given_up(pending, refused)


def _given_up(pending: Mapping[str, object], refused: Mapping[str, Mapping[str, str]]) -> dict[str, Applied]:
    return {
        name: Applied(KmirrorError(f"configurations of {name} are refused: {', '.join(refused[name])}"))
        for name in pending
    }


def _is_config_error(error: KmirrorError | None) -> bool:
    return isinstance(error, BrokerError) and error.code == _INVALID_CONFIG


def _guilty_key(error: KmirrorError | None, configs: Mapping[str, str]) -> str | None:
    """Key that a broker's message is about; messages name it, except the one about tiered storage."""
    if not _is_config_error(error):
        return None
    message = str(error)
    # never without the timestamp type: timestamps would be rewritten
    named = [key for key in configs if key in message and key != TIMESTAMP_TYPE]
    if named:
        return max(named, key=len)
    if _TIERED_KEY in configs and ("remote" in message.lower() or "tiered" in message.lower()):
        return _TIERED_KEY
    return None


def _only_key(error: KmirrorError | None, change: ConfigChange) -> str | None:
    keys = [key for key in change.sets if key != TIMESTAMP_TYPE]
    return keys[0] if _is_config_error(error) and len(change.sets) == len(keys) == 1 else None


def _probe(admin: ClusterAdmin, topic: NewTopic, error: KmirrorError | None, timeout: Timeout) -> str | None:
    """Find the key a broker does not name by asking about each one alone; nothing is created."""
    if not _is_config_error(error):
        return None
    for key, value in topic.configs.items():
        alone = replace(topic, configs={key: value})
        answer = admin.create_topics([alone], validate_only=True, timeout_s=timeout())[topic.name]
        if _is_config_error(answer) and key != TIMESTAMP_TYPE:
            return key
    return None


def _without(configs: Mapping[str, str], key: str) -> dict[str, str]:
    rest = {name: value for name, value in configs.items() if name != key}
    if key in (TIMESTAMP_BEFORE, TIMESTAMP_AFTER):
        # a broker before 3.6: its one limit stands for both
        rest = {n: v for n, v in rest.items() if n not in (TIMESTAMP_BEFORE, TIMESTAMP_AFTER)}
        rest[TIMESTAMP_DIFFERENCE] = OPEN_LIMIT
    return rest


def is_existing(error: KmirrorError | None) -> bool:
    """Tell whether a creation failed because somebody else was faster."""
    return isinstance(error, BrokerError) and error.code == _TOPIC_ALREADY_EXISTS

"""Ending the holding back of configurations when a topic stops being a mirror; needs the destination only."""

from collections.abc import Mapping

from kmirror_dagster.broker import codes
from kmirror_dagster.broker.admin import ClusterAdmin
from kmirror_dagster.broker.admin_types import ConfigChange
from kmirror_dagster.broker.deadlines import Deadline
from kmirror_dagster.errors import BrokerError, KmirrorError
from kmirror_dagster.metadata import application
from kmirror_dagster.metadata.configs import release_configs
from kmirror_dagster.metadata.reader import CALL_S


def release(
    destination: ClusterAdmin, held: Mapping[str, Mapping[str, str | None]], *, deadline_s: float
) -> Mapping[str, KmirrorError | None]:
    """Put the source's own values in place for stopped topics; the second time changes nothing.

    Args:
        destination: admin client of the destination.
        held: topic -> `TopicRecord.source_configs`.
        deadline_s: seconds it may take.

    Returns:
        For each topic None, or why (some of) its configurations are not as the source had them. A topic that
        is gone has nothing left to release.
    """
    deadline = Deadline(deadline_s)

    def timeout() -> float:
        deadline.check("releasing configurations")
        return deadline.remaining(at_most=CALL_S)

    described = destination.topic_configs(held, timeout_s=timeout())
    outcomes: dict[str, KmirrorError | None] = dict.fromkeys(held)
    changes: dict[str, ConfigChange] = {}
    for name, values in held.items():
        error = described.errors.get(name)
        if isinstance(error, BrokerError) and error.code == codes.UNKNOWN_TOPIC_OR_PARTITION:
            continue
        if error is None:
            changes[name] = release_configs(values, described.values.get(name, {}))
        else:  # not readable, may still be writable
            changes[name] = blind_release(values)
    wanted = {name: change for name, change in changes.items() if change}
    for name, outcome in application.alter_configs(destination, wanted, timeout=timeout).items():
        outcomes[name] = outcome.error
        if outcome.error is None and outcome.refused:
            refused = "; ".join(f"{key}: {reason}" for key, reason in sorted(outcome.refused.items()))
            outcomes[name] = KmirrorError(f"{name} keeps other values than the source had: {refused}")
    return outcomes


def blind_release(held: Mapping[str, str | None]) -> ConfigChange:
    """Change that ends holding back whatever is in place now."""
    sets = {key: value for key, value in held.items() if value is not None}
    return ConfigChange(sets, tuple(sorted(key for key, value in held.items() if value is None)))

"""Client quotas: the destination limits as the source does, and never the mirror itself. Pure.

Rules:

- a value that the destination lacks is set, one that the mirror has set follows the source, removal included.
- a value that somebody else set at the destination is theirs: kept, and told where it differs.
- *never copied*: what would slow down the mirror: quotas of its own user or client id, and defaults that apply
  to it because it has no quota of its own at the destination.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from kmirror_dagster.broker.admin_types import Quota, QuotaEntity, Quotas, entity_text

USER = "user"
CLIENT_ID = "client-id"
IP = "ip"


@dataclass(frozen=True)
class QuotasWorld:
    """What the decision rests on.

    Attributes:
        user: the mirror's at the destination, without "User:".
        client_id: its client id there.
        synced: quotas that were at the destination because of the mirror.
    """

    source: Quotas
    destination: Quotas
    synced: frozenset[Quota]
    user: str
    client_id: str


@dataclass(frozen=True)
class QuotasPlan:
    """What to set, or to remove where the value is None, by whom it is for.

    Attributes:
        synced: quotas that are the mirror's once the plan is carried out.
    """

    changes: Mapping[QuotaEntity, Mapping[str, float | None]] = field(
        default_factory=dict[QuotaEntity, Mapping[str, "float | None"]]
    )
    synced: frozenset[Quota] = frozenset()
    notes: tuple[str, ...] = ()


def plan_quotas(world: QuotasWorld) -> QuotasPlan:
    """Difference between what the destination has and what it should have."""
    changes: dict[QuotaEntity, dict[str, float | None]] = {}
    synced: set[Quota] = set()
    notes: list[str] = []
    for entity in sorted(world.source, key=entity_text):
        for key, value in sorted(world.source[entity].items()):
            present = world.destination.get(entity, {}).get(key)
            name = f"{entity_text(entity)}: {key}"
            if _hits_mirror(world, entity, key):
                notes.append(f"{name}={value:g} is not copied, it would slow down the mirror itself")
            elif present is None or present == value or Quota(entity, key, present) in world.synced:
                synced.add(Quota(entity, key, value))
                if present != value:
                    changes.setdefault(entity, {})[key] = value
            else:
                notes.append(f"{name} is {value:g} at the source and {present:g} here, set by others: kept")
    for quota in world.synced:
        here = world.destination.get(quota.entity, {}).get(quota.key)
        if quota.key not in world.source.get(quota.entity, {}) and here == quota.value:
            changes.setdefault(quota.entity, {})[quota.key] = None
    return QuotasPlan(changes, frozenset(synced), tuple(notes))


def _hits_mirror(world: QuotasWorld, entity: QuotaEntity, key: str) -> bool:
    parts = dict(entity)
    if IP in parts:
        return False
    if parts.get(USER) == world.user or (USER not in parts and parts.get(CLIENT_ID) == world.client_id):
        return True
    if parts.get(USER) is not None or parts.get(CLIENT_ID) is not None:
        return False
    # a quota by the user's name comes before every default (Kafka documentation, "Quota Configuration")
    return key not in world.destination.get(((USER, world.user),), {})


def change_text(values: Mapping[str, float | None]) -> str:
    """A change in one line."""
    return ", ".join(
        f"unset {key}" if value is None else f"set {key}={value:g}" for key, value in sorted(values.items())
    )

"""Admin calls about client quotas (KIP-546): how fast whom the brokers serve."""

from collections.abc import Mapping
from typing import Any

from kafka.protocol.admin.client_quotas import AlterClientQuotasRequest, DescribeClientQuotasRequest

from kmirror_dagster.broker.admin_acls import ask_controller
from kmirror_dagster.broker.admin_types import QuotaEntity, Quotas, entity_text
from kmirror_dagster.broker.missing_rights import Right
from kmirror_dagster.broker.wire import WireCluster
from kmirror_dagster.errors import KmirrorError


async def client_quotas(cluster: WireCluster) -> Quotas:
    """Client quotas by whom they are for.

    Raises:
        AuthorizationError: the principal lacks DESCRIBE_CONFIGS on the cluster.
    """
    answer = await cluster.any_call(DescribeClientQuotasRequest(components=[], strict=False))
    if answer.error_code:
        right = Right("DESCRIBE_CONFIGS", "cluster")
        raise cluster.refusal(answer.error_code, "listing client quotas", right)
    return {
        _entity(entry.entity): {value.key: value.value for value in entry.values}
        for entry in answer.entries or []
    }


async def alter_client_quotas(
    cluster: WireCluster, changes: Mapping[QuotaEntity, Mapping[str, float | None]]
) -> Mapping[QuotaEntity, KmirrorError | None]:
    """Set quotas, or remove those whose value is None; the answer has one entry for each entity, None: done."""
    kind = AlterClientQuotasRequest
    entries = [
        kind.EntryData(
            entity=[kind.EntryData.EntityData(entity_type=part, entity_name=name) for part, name in entity],
            ops=[
                kind.EntryData.OpData(key=key, value=value or 0.0, remove=value is None)
                for key, value in values.items()
            ],
        )
        for entity, values in changes.items()
    ]
    answer = await ask_controller(cluster, kind(entries=entries, validate_only=False))
    outcomes: dict[QuotaEntity, KmirrorError | None] = {}
    for result in answer.entries:
        entity = _entity(result.entity)
        doing = f"changing quotas of {entity_text(entity)}"
        right = Right("ALTER_CONFIGS", "cluster")
        code = result.error_code
        outcomes[entity] = cluster.refusal(code, doing, right) if code else None
    return outcomes


def _entity(parts: Any) -> QuotaEntity:
    return tuple(sorted(((part.entity_type, part.entity_name) for part in parts), key=lambda part: part[0]))

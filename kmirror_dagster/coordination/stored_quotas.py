"""Client quotas that a mirror has put at its destination, as they are kept in the state topic."""

from kmirror_dagster.broker.admin_types import Quota
from kmirror_dagster.coordination.shard import Write
from kmirror_dagster.coordination.view import StateView
from kmirror_dagster.records import QUOTA_CHUNKS, QuotaFields, QuotasRecord, quota_chunk


def stored_quotas(view: StateView, mirror: str) -> frozenset[Quota]:
    """Client quotas that are at the destination because of a mirror, as stored."""
    chunks = (view.quotas.get((mirror, chunk)) for chunk in range(QUOTA_CHUNKS))
    return frozenset(Quota(*fields) for record in chunks if record is not None for fields in record.quotas)


def changed_quotas(view: StateView, mirror: str, quotas: frozenset[Quota]) -> list[Write]:
    """Writes that store client quotas; those parts only that are others than before."""
    parts: dict[int, list[QuotaFields]] = {}
    for quota in sorted(quotas, key=repr):  # names may be None, which has no order
        fields = (quota.entity, quota.key, quota.value)
        parts.setdefault(quota_chunk(fields), []).append(fields)
    writes: list[Write] = []
    for chunk in range(QUOTA_CHUNKS):
        stored = view.quotas.get((mirror, chunk))
        wanted = tuple(parts.get(chunk, ()))
        if wanted != (stored.quotas if stored is not None else ()):
            writes.append(Write.of(QuotasRecord(mirror=mirror, chunk=chunk, quotas=wanted)))
    return writes

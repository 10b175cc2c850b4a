"""Who logs in and at what rate: SCRAM users and client quotas, which no ACL call tells."""

from collections.abc import Mapping

from kafka.protocol.admin import DescribeClientQuotasRequest
from kafka.protocol.admin.users import DescribeUserScramCredentialsRequest

from kmirror_dagster.broker import codes
from kmirror_dagster.broker.missing_rights import Right, refusal
from kmirror_dagster.broker.wire import WireCluster

# a user without credentials of this kind
_RESOURCE_NOT_FOUND = 91


async def scram_users(cluster: WireCluster) -> frozenset[str]:
    """Users with SCRAM credentials (KIP-554); the credentials themselves are told to nobody.

    Raises:
        AuthorizationError: the principal lacks DESCRIBE on the cluster.
    """
    answer = await cluster.any_call(DescribeUserScramCredentialsRequest(users=None))
    _check(answer.error_code, "listing SCRAM users", "DESCRIBE", cluster)
    return frozenset(
        result.user for result in answer.results if result.error_code in (codes.NONE, _RESOURCE_NOT_FOUND)
    )


async def client_quotas(cluster: WireCluster) -> Mapping[str, Mapping[str, float]]:
    """Client quotas (KIP-546) by whom they are for, as "user=alice, client-id=<default>".

    Raises:
        AuthorizationError: the principal lacks DESCRIBE_CONFIGS on the cluster.
    """
    answer = await cluster.any_call(DescribeClientQuotasRequest(components=[], strict=False))
    _check(answer.error_code, "listing client quotas", "DESCRIBE_CONFIGS", cluster)
    found: dict[str, Mapping[str, float]] = {}
    for entry in answer.entries or []:
        names = sorted((part.entity_type, part.entity_name or "<default>") for part in entry.entity)
        whom = ", ".join(f"{kind}={name}" for kind, name in names)
        found[whom] = {value.key: value.value for value in entry.values}
    return found


def _check(code: int, doing: str, operation: str, cluster: WireCluster) -> None:
    if code:
        raise refusal(code, doing, right=Right(operation, "cluster"), name="", settings=cluster.settings)

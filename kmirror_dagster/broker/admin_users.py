"""Who logs in: SCRAM users, which no ACL call tells."""

from kafka.protocol.admin.users import DescribeUserScramCredentialsRequest

from kmirror_dagster.broker import codes
from kmirror_dagster.broker.missing_rights import Right, refusal
from kmirror_dagster.broker.wire import WireCluster

# a user without credentials of this kind
_RESOURCE_NOT_FOUND = 91
_PROBE = "kmirror"


async def scram_users(cluster: WireCluster) -> frozenset[str]:
    """Users with SCRAM credentials (KIP-554); the credentials themselves are told to nobody.

    A single name is asked about first: brokers never answer the question for all users when the principal lacks the
    right to it (their error answer walks through a list of names that is not there), and everything asked behind it
    over the same connection would wait too.

    Raises:
        AuthorizationError: the principal lacks DESCRIBE on the cluster.
    """
    one = DescribeUserScramCredentialsRequest.UserName(name=_PROBE)
    answer = await cluster.any_call(DescribeUserScramCredentialsRequest(users=[one]))
    _check(answer.error_code, "listing SCRAM users", "DESCRIBE", cluster)
    answer = await cluster.any_call(DescribeUserScramCredentialsRequest(users=None))
    _check(answer.error_code, "listing SCRAM users", "DESCRIBE", cluster)
    return frozenset(
        result.user for result in answer.results if result.error_code in (codes.NONE, _RESOURCE_NOT_FOUND)
    )


def _check(code: int, doing: str, operation: str, cluster: WireCluster) -> None:
    if code:
        raise refusal(code, doing, right=Right(operation, "cluster"), name="", settings=cluster.settings)

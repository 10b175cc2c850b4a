"""Sandbox clusters with TLS, SASL and an authorizer."""

from typing import Any

import pytest
from confluent_kafka import KafkaError, KafkaException
from confluent_kafka.admin import (
    AclBinding,
    AclOperation,
    AclPermissionType,
    NewTopic,
    ResourcePatternType,
    ResourceType,
)

from kmirror_dagster.broker import clients
from kmirror_dagster.errors import AuthenticationError
from kmirror_dagster.sandbox.properties import Protocol
from kmirror_dagster.sandbox.security import ClusterSecurity, User
from tests.conftest import ClusterFactory

pytestmark = pytest.mark.integration

MIRROR = User("mirror", 'with "quotes" \\ and =', is_super=True)
ALICE = User("alice", "alice-secret")


@pytest.mark.parametrize(
    "security",
    [
        ClusterSecurity(Protocol.SASL_SSL, "SCRAM-SHA-512", (MIRROR, ALICE), authorizer=True),
        ClusterSecurity(Protocol.SASL_PLAINTEXT, "PLAIN", (MIRROR, ALICE)),
        ClusterSecurity(Protocol.SSL, users=(MIRROR, ALICE), authorizer=True, client_certificates=True),
    ],
    ids=["scram-tls-authorizer", "plain", "mutual-tls-authorizer"],
)
def test_only_known_users_get_in(cluster_factory: ClusterFactory, security: ClusterSecurity) -> None:
    """Users with the right password or certificate are served; a wrong password is refused as such."""
    cluster = cluster_factory(security=security)
    super_client = clients.admin(cluster.settings())
    topic = NewTopic("secret", num_partitions=1, replication_factor=1)
    super_client.create_topics([topic])["secret"].result(30)
    alice = clients.admin(cluster.settings("alice"))
    visible = "secret" in alice.list_topics(timeout=30).topics
    assert visible is not security.authorizer
    if security.authorizer:
        name = "User:alice" if security.protocol.is_sasl else "User:CN=alice"
        grant(super_client, name)
        assert "secret" in alice.list_topics(timeout=30).topics
        with pytest.raises(KafkaException) as caught:
            alice.delete_topics(["secret"])["secret"].result(30)
        assert caught.value.args[0].code() == KafkaError.TOPIC_AUTHORIZATION_FAILED
    if security.protocol.is_sasl:
        wrong = {**cluster.client_properties(), "sasl.password": "wrong"}
        with pytest.raises(AuthenticationError):
            clients.check_reachable(type(cluster.settings()).model_validate(wrong), 20)
    if security.mechanism != "PLAIN" and security.protocol.is_sasl:  # credentials are in the cluster itself
        cluster.stop()
        cluster.start()
    assert clients.check_reachable(cluster.settings("alice"), 30) == cluster.cluster_id


def grant(client: Any, principal: str) -> None:
    binding = AclBinding(
        ResourceType.TOPIC,
        "secret",
        ResourcePatternType.LITERAL,
        principal,
        "*",
        AclOperation.DESCRIBE,
        AclPermissionType.ALLOW,
    )
    client.create_acls([binding])[binding].result(30)

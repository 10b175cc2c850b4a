"""Fences on a cluster that has an authorizer."""

import pytest
from confluent_kafka import KafkaError, KafkaException, Producer

from kmirror_dagster.broker.admin import ClusterAdmin
from kmirror_dagster.broker.admin_types import Acl, NewTopic
from kmirror_dagster.broker.clients import librdkafka_config
from kmirror_dagster.recovery.fences import fence, unfence
from kmirror_dagster.sandbox.properties import Protocol
from kmirror_dagster.sandbox.security import ClusterSecurity, User
from kmirror_dagster.settings import ClusterSettings
from tests.conftest import ClusterFactory
from tests.helpers.waiting import wait_until

pytestmark = pytest.mark.integration

ROOT = User("root", "root-secret", is_super=True)
ALICE = User("alice", "alice-secret")


def may_write(settings: ClusterSettings, topic: str) -> bool:
    """Whether a record is accepted; anything but a missing right fails the test."""
    told: list[KafkaError | None] = []
    try:
        client = Producer(librdkafka_config(settings))
        client.produce(topic, b"value", on_delivery=lambda error, _: told.append(error))
        assert client.flush(30) == 0
    except KafkaException as error:
        told.append(error.args[0])
    (error,) = told
    assert error is None or error.code() == KafkaError.TOPIC_AUTHORIZATION_FAILED, error
    return error is None


def test_fence_shuts_writers_out_and_lets_them_in_again(cluster_factory: ClusterFactory) -> None:
    """Ordinary users cannot write behind a fence, super users can; taken away, everything is as it was."""
    users = (ROOT, ALICE)
    cluster = cluster_factory(
        security=ClusterSecurity(Protocol.SASL_PLAINTEXT, "PLAIN", users, authorizer=True)
    )
    root, alice = cluster.settings(), cluster.settings("alice")
    admin, others = ClusterAdmin(root), ClusterAdmin(alice)
    try:
        assert admin.create_topics([NewTopic("t", 1, 1), NewTopic("u", 1, 1)]) == {"t": None, "u": None}
        allows = [
            Acl("TOPIC", topic, "LITERAL", "User:alice", "*", operation, "ALLOW")
            for topic in "tu"
            for operation in ("WRITE", "DESCRIBE")
        ]
        admin.create_acls(allows)
        before = frozenset(allows)
        wait_until(lambda: admin.acls() == before, 30, what="rights")
        assert may_write(alice, "t")
        for _ in range(2):
            assert fence(admin, ["t"]) is None
        wait_until(lambda: not may_write(alice, "t"), 30, what="fenced")
        assert may_write(alice, "u")
        assert may_write(root, "t")
        assert "alice" in (fence(others, ["t"]) or "")
        for _ in range(2):
            assert unfence(admin, ["t"]) is None
        wait_until(lambda: may_write(alice, "t"), 30, what="let in again")
        assert admin.acls() == before
    finally:
        admin.close()
        others.close()

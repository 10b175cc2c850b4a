"""What brokers refuse for one item of a batch is told with the resource that the right is on."""

import concurrent.futures

from confluent_kafka import KafkaError, KafkaException

from kmirror_dagster.broker.admin import ClusterAdmin
from kmirror_dagster.broker.missing_rights import Right
from kmirror_dagster.settings import ClusterSettings


def test_the_right_of_a_partition_is_on_its_topic() -> None:
    """The command grants it on the topic, not on a name that no topic has; another item has its answer."""
    refused: concurrent.futures.Future[int] = concurrent.futures.Future()
    refused.set_exception(KafkaException(KafkaError(KafkaError.TOPIC_AUTHORIZATION_FAILED)))
    answered: concurrent.futures.Future[int] = concurrent.futures.Future()
    answered.set_result(7)
    admin = ClusterAdmin(ClusterSettings.model_validate({"bootstrap.servers": "127.0.0.1:1"}))
    try:
        answers = admin.gather(
            {("orders", 0): refused, ("orders", 1): answered},
            lambda _key, value: int(value),
            doing="cutting",
            right=Right("DELETE", "topic"),
            timeout_s=5,
            named=lambda key: f"{key[0]}/{key[1]}",
            resource=lambda key: key[0],
        )
    finally:
        admin.close()
    assert answers.values == {("orders", 1): 7}
    text = str(answers.errors["orders", 0])
    assert text.startswith("User:ANONYMOUS lacks DELETE on topic orders at 127.0.0.1:1: ")
    assert text.endswith(" --operation Delete --topic orders")

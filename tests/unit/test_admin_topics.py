"""Requests about many topics, as a controller takes them."""

from kmirror_dagster.broker.admin_topics import creatable
from kmirror_dagster.broker.admin_types import NewTopic


def new_topic(name: str, partitions: int, settings: int = 0) -> NewTopic:
    configs = {f"setting.{number}": "x" for number in range(settings)}
    return NewTopic(name, partitions=partitions, replication_factor=1, configs=configs)


def test_many_topics_are_made_by_several_requests() -> None:
    """A controller refuses more than 10,000 records for one request: no part comes near, and every topic is in one."""
    topics = [new_topic(f"t{number}", 100, 9) for number in range(100)]
    parts = list(creatable(topics))
    assert [topic for part in parts for topic in part] == topics
    assert max(sum(1 + topic.partitions + len(topic.configs) for topic in part) for part in parts) <= 5_000
    assert len(parts) == 3


def test_topic_larger_than_a_part_has_one_of_its_own() -> None:
    """Nothing is left out for its size: whether it is too large is for the controller to say."""
    large, small = new_topic("large", 9_000), new_topic("small", 1)
    assert list(creatable([small, large, small])) == [[small], [large], [small]]
    assert list(creatable([])) == []

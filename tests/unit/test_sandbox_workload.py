"""The seeded workload."""

import random
from collections import Counter
from itertools import islice

from kmirror_dagster.sandbox import workload as shop
from kmirror_dagster.sandbox.seed import _bulk, _mixed
from kmirror_dagster.sandbox.workload import SeedRecord, SeedTransaction, Workload

BASE_MS = 1_790_000_000_000


def bulk(seed: int, count: int = 2000) -> list[SeedRecord | SeedTransaction]:
    return list(_bulk(Workload(seed, BASE_MS), count))


def test_same_seed_same_records() -> None:
    """Seed number and base time decide every byte."""
    assert bulk(1) == bulk(1)
    assert bulk(1) != bulk(2)


def test_larger_run_begins_like_a_smaller_one() -> None:
    """What a topic gets does not depend on how much is written in all."""

    def orders(count: int) -> list[SeedRecord]:
        return [item for item in bulk(1, count) if isinstance(item, SeedRecord) and item.topic is shop.ORDERS]

    small, large = orders(500), orders(5000)
    assert large[: len(small)] == small


def test_size_is_about_what_was_asked_for() -> None:
    """Records of transactions count, the odd ones come on top."""
    sizes = [len(item.records) if isinstance(item, SeedTransaction) else 1 for item in bulk(1)]
    assert 2000 <= sum(sizes) <= 2100


def test_odd_headers_of_every_kind() -> None:
    """None, one, repeated, null, empty, no UTF-8, many."""
    headers = [record.headers for record in Workload(1, BASE_MS).oddities()]
    assert () in headers
    assert max(len(each) for each in headers) == 500
    flat = [header for each in headers for header in each]
    assert {None, b""} <= {value for _, value in flat}
    assert any(len({name for name, _ in each}) < len(each) for each in headers)
    assert b"\xff\xfe\x00\x80" in [value for _, value in flat]


def test_null_and_empty_in_all_positions() -> None:
    """Key and value are null, empty and present in all nine combinations."""
    pairs = {(record.key, record.value) for record in Workload(1, BASE_MS).oddities()}
    assert {(key, value) for key in (None, b"") for value in (None, b"", b"value")} <= pairs


def test_customers_are_deleted_and_emptied() -> None:
    """The compacted topic has keys always, tombstones often, empty values sometimes."""
    records = list(islice(Workload(1, BASE_MS).customers(), 2000))
    assert all(record.key is not None for record in records)
    values = [record.value for record in records]
    assert values.count(None) > 200
    assert values.count(b"") > 20


def test_a_key_stays_in_its_partition() -> None:
    """Keyed records of one key are all in one partition."""
    homes: dict[bytes | None, int] = {}
    for record in islice(Workload(1, BASE_MS).orders(), 2000):
        assert homes.setdefault(record.key, record.partition) == record.partition
    assert len(set(homes.values())) == shop.ORDERS.partitions


def test_some_transactions_abort() -> None:
    """Every fourth transaction aborts."""
    outcomes = [each.commits for each in islice(Workload(1, BASE_MS).payments(), 8)]
    assert outcomes == [True, True, True, False] * 2


def test_stream_has_all_topics_in_proportion() -> None:
    """The endless mix gives each topic about its share."""
    counts: Counter[str] = Counter()
    for item in islice(_mixed(Workload(1, BASE_MS), random.Random(1)), 5000):
        if isinstance(item, SeedTransaction):
            counts[shop.PAYMENTS.name] += len(item.records)
        else:
            counts[item.topic.name] += 1
    total = sum(counts.values())
    for topic in shop.TOPICS:
        assert abs(counts[topic.name] * 100 / total - topic.share) < 3, topic.name

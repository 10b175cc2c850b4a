"""What `kmirror sandbox seed` writes: pure, the same for the same seed number and base time.

A small shop: orders by key, payments in transactions of which some abort, a compacted table of customers with
deletions, clicks in every compression, an audit log whose beginning was deleted, and records that are odd in
every way Kafka allows.
"""

import json
import random
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

Header = tuple[str, bytes | None]

COMPRESSIONS = ("none", "gzip", "snappy", "lz4", "zstd")
TRANSACTION_RECORDS = 40
_ABORT_EVERY = 4
_MANY_HEADERS = 500
_COUNTRIES = ("AT", "BE", "CH", "DE", "DK", "ES", "FR", "IT", "NL", "SE")
_ARTICLES = ("kettle", "lamp", "chair", "rug", "clock", "mirror", "vase", "shelf", "blanket", "candle")
_PAGES = ("/", "/search", "/cart", "/checkout", "/account", "/help")


@dataclass(frozen=True)
class SeedTopic:
    """A topic of the workload.

    Attributes:
        share: part of all records that goes here, in percent.
        compression: what its producer compresses with.
        configs: overrides at creation.
    """

    name: str
    partitions: int
    share: int
    compression: str
    configs: Mapping[str, str] = field(default_factory=dict[str, str])


# Records of any --base-time stay, and a sandbox may run for weeks.
_KEPT = {"retention.ms": "-1"}

ORDERS = SeedTopic("orders", 6, 35, "lz4", _KEPT)
PAYMENTS = SeedTopic("payments", 3, 20, "zstd", _KEPT)
CUSTOMERS = SeedTopic("customers", 3, 10, "snappy", {"cleanup.policy": "compact"})
CLICKS = tuple(SeedTopic(f"clicks.{compression}", 2, 5, compression, _KEPT) for compression in COMPRESSIONS)
AUDIT = SeedTopic("audit-log", 2, 10, "gzip", _KEPT)
ODDITIES = SeedTopic("oddities", 1, 0, "none", {**_KEPT, "max.message.bytes": "2097152"})
EMPTY = SeedTopic("empty", 1, 0, "none")
TOPICS = (ORDERS, PAYMENTS, CUSTOMERS, *CLICKS, AUDIT, ODDITIES, EMPTY)


@dataclass(frozen=True)
class SeedRecord:
    """One record to write.

    Attributes:
        timestamp_ms: record timestamp, milliseconds since the epoch.
    """

    topic: SeedTopic
    partition: int
    key: bytes | None
    value: bytes | None
    headers: tuple[Header, ...]
    timestamp_ms: int


@dataclass(frozen=True)
class SeedTransaction:
    """Records that are written in one transaction, which then commits or aborts."""

    records: tuple[SeedRecord, ...]
    commits: bool


class Workload:
    """Endless streams of records, one per topic, each with a random generator of its own.

    So what one topic gets does not depend on how much was taken for another.
    """

    def __init__(self, seed: int, base_ms: int, step_ms: int = 50) -> None:
        """Describe a workload.

        Args:
            seed: seed number.
            base_ms: timestamp of the first record of each topic.
            step_ms: milliseconds between two records of a topic.
        """
        self._seed = seed
        self._base_ms = base_ms
        self._step_ms = step_ms

    def _rng(self, topic: SeedTopic) -> random.Random:
        return random.Random(f"{self._seed}/{topic.name}")  # noqa: S311 - reproducible data

    def _times(self) -> Iterator[int]:
        time_ms = self._base_ms
        while True:
            yield time_ms
            time_ms += self._step_ms

    def orders(self) -> Iterator[SeedRecord]:
        """Events of orders, keyed by order; most carry headers as tracing libraries add them."""
        rng = self._rng(ORDERS)
        open_orders: list[str] = []
        number = 0
        for time_ms in self._times():
            if open_orders and rng.random() < 0.6:
                order = open_orders[rng.randrange(len(open_orders))]
                event = rng.choice(("paid", "packed", "shipped"))
                if event == "shipped":
                    open_orders.remove(order)
            else:
                number += 1
                order, event = f"order-{number:07d}", "placed"
                open_orders.append(order)
            value = {
                "order": order,
                "event": event,
                "customer": f"customer-{rng.randrange(500):04d}",
                "article": rng.choice(_ARTICLES),
                "count": rng.randint(1, 9),
            }
            headers: tuple[Header, ...] = ()
            if rng.random() < 0.8:
                trace = f"00-{rng.getrandbits(128):032x}"
                headers = (("event", event.encode()), ("traceparent", trace.encode()))
            yield _keyed(ORDERS, order, _json(value), headers, time_ms)

    def payments(self) -> Iterator[SeedTransaction]:
        """Transactions of a bank's writer; every fourth aborts."""
        rng = self._rng(PAYMENTS)
        number = 0
        times = self._times()
        while True:
            records: list[SeedRecord] = []
            for _ in range(TRANSACTION_RECORDS):
                payment, cents = f"payment-{number:07d}", rng.randint(100, 50_000)
                value = _json({"payment": payment, "cents": cents, "country": rng.choice(_COUNTRIES)})
                records.append(_keyed(PAYMENTS, payment, value, (), next(times)))
                number += 1
            commits = number // TRANSACTION_RECORDS % _ABORT_EVERY != 0
            yield SeedTransaction(tuple(records), commits)

    def customers(self) -> Iterator[SeedRecord]:
        """A table: newest value per key wins, no value means deleted; empty is not the same as deleted."""
        rng = self._rng(CUSTOMERS)
        for time_ms in self._times():
            key = f"customer-{rng.randrange(500):04d}"
            dice = rng.random()
            value: bytes | None = _json({"customer": key, "country": rng.choice(_COUNTRIES), "seen": time_ms})
            if dice < 0.15:
                value = None
            elif dice < 0.18:
                value = b""
            yield _keyed(CUSTOMERS, "" if dice > 0.99 else key, value, (), time_ms)

    def clicks(self, topic: SeedTopic) -> Iterator[SeedRecord]:
        """Records without keys, spread over partitions."""
        rng = self._rng(topic)
        for time_ms in self._times():
            session = f"{rng.getrandbits(64):016x}"
            value = f"{rng.choice(_PAGES)} {rng.choice(_COUNTRIES)} {session} {'.' * rng.randrange(200)}"
            yield SeedRecord(topic, rng.randrange(topic.partitions), None, value.encode(), (), time_ms)

    def audit(self) -> Iterator[SeedRecord]:
        """Binary records."""
        rng = self._rng(AUDIT)
        for time_ms in self._times():
            key = rng.randbytes(8)
            value = rng.randbytes(rng.randrange(20, 200))
            headers: tuple[Header, ...] = (("actor", rng.randbytes(4)),)
            yield SeedRecord(AUDIT, key[0] % AUDIT.partitions, key, value, headers, time_ms)

    def oddities(self) -> list[SeedRecord]:
        """One record of every odd kind: headers, nulls, empties, timestamps, sizes."""
        rng = self._rng(ODDITIES)
        times = self._times()
        odd_headers: tuple[tuple[Header, ...], ...] = (
            (),
            (("one", b"1"),),
            (("same", b"b"), ("same", b"a"), ("other", b"x"), ("same", b"b")),
            (("null", None), ("empty", b"")),
            (("", b"empty name"), ("näme-☃", "wört".encode())),
            (("not-utf-8", b"\xff\xfe\x00\x80"),),
            tuple((f"header-{number}", str(number).encode()) for number in range(_MANY_HEADERS)),
            (("large", rng.randbytes(10_000)),),
        )
        records = [
            SeedRecord(ODDITIES, 0, f"headers-{number}".encode(), b"see headers", headers, next(times))
            for number, headers in enumerate(odd_headers)
        ]
        for key in (None, b"", b"\xff\x00key"):
            for value in (None, b"", b"value"):
                records.append(SeedRecord(ODDITIES, 0, key, value, (), next(times)))  # noqa: PERF401
        # Out of order and as old as can be: time index and look-ups must survive it.
        for time_ms in (self._base_ms, 1, self._base_ms - 3_600_000):
            records.append(SeedRecord(ODDITIES, 0, b"time", str(time_ms).encode(), (), time_ms))  # noqa: PERF401
        records.append(SeedRecord(ODDITIES, 0, b"large", rng.randbytes(1_200_000), (), next(times)))
        return records


def _keyed(
    topic: SeedTopic, key: str, value: bytes | None, headers: tuple[Header, ...], time_ms: int
) -> SeedRecord:
    """A record in the partition that its key belongs to."""
    data = key.encode()
    return SeedRecord(topic, zlib.crc32(data) % topic.partitions, data, value, headers, time_ms)


def _json(value: Mapping[str, object]) -> bytes:
    return json.dumps(value, separators=(",", ":")).encode()

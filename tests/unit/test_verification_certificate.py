"""Certificates: how they grow, what they refuse to forget, how they are kept."""

import multiprocessing
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kmirror_dagster.broker.admin_types import Partition
from kmirror_dagster.broker.log_records import CREATE_TIME, LogRange, LogRecord
from kmirror_dagster.errors import UsageError
from kmirror_dagster.verification.both_sides import Look
from kmirror_dagster.verification.certificate import (
    Certificate,
    CertificateStore,
    PartitionCertificate,
    WindowOutcome,
    begun,
    next_window,
)
from kmirror_dagster.verification.certifier import certify
from kmirror_dagster.verification.digests import digest_of
from kmirror_dagster.verification.ranges import LogEnds
from kmirror_dagster.verification.report import Difference, DifferenceKind, DifferenceLog, Isolation

LEVEL = Isolation.READ_COMMITTED
KEY = ("orders", 0)


def records(count: int, first: int = 0) -> list[LogRecord]:
    return [(n, CREATE_TIME, 1_000 + n, b"k", b"v-%d" % n, None) for n in range(first, first + count)]


class Sides:
    """Two logs in memory in place of two clusters; `read` lists the windows that were read."""

    def __init__(self, source: list[LogRecord], destination: list[LogRecord]) -> None:
        self.logs = [source, destination]
        self.starts = [0, 0]
        self.ids: tuple[str | None, str | None] = ("s1", "d1")
        self.isolations = (LEVEL,)
        self.source_id, self.destination_id = "A", "B"
        self.settings = SimpleNamespace(mirror="orders")
        self.read: list[LogRange] = []
        self.on_check: Any = lambda: None

    def look(self, topics: Sequence[str]) -> Look:
        source, destination = (
            LogEnds(start, log[-1][0] + 1 if log else 0, log[-1][0] + 1 if log else 0)
            for start, log in zip(self.starts, self.logs, strict=True)
        )
        return Look({KEY: source}, {KEY: destination}, {"orders": self.ids}, {})

    def check(self, windows: Mapping[Partition, LogRange]) -> dict[Partition, WindowOutcome]:
        self.on_check()
        found: dict[Partition, WindowOutcome] = {}
        for key, window in windows.items():
            if window.start < max(self.starts):
                continue
            self.read.append(window)
            mine, theirs = ([r for r in log if window.start <= r[0] < window.end] for log in self.logs)
            differences = DifferenceLog()
            for one, other in zip(mine, theirs, strict=False):
                if one != other:
                    differences.add(
                        Difference(
                            kind=DifferenceKind.VALUE,
                            topic=key[0],
                            partition=key[1],
                            offset=one[0],
                            isolation=LEVEL,
                            detail="source 3 bytes, destination 3 bytes",
                        )
                    )
            found[key] = WindowOutcome(
                source={LEVEL: digest_of(mine)},
                equal={LEVEL: digest_of(mine) == digest_of(theirs)},
                differences={LEVEL: differences},
            )
        return found


def run(sides: Sides, store: CertificateStore, **more: Any) -> PartitionCertificate:
    return certify(sides, store, ["orders"], **more).by_key()[KEY]  # type: ignore[arg-type]


@pytest.fixture
def store(tmp_path: Path) -> CertificateStore:
    """A store without a certificate."""
    return CertificateStore(tmp_path / "deep" / "orders.json")


def test_certificate_grows_and_reads_nothing_twice(store: CertificateStore) -> None:
    """Each pass reads what is new only; the digest is that of the whole log read at once."""
    sides = Sides(records(100), records(60))
    assert run(sides, store).verified_to == 60
    sides.logs[1] = records(100)
    assert run(sides, store).verified_to == 100
    grown = run(sides, store)
    assert [(w.start, w.end) for w in sides.read] == [(0, 60), (60, 100)]
    assert grown.digest(LEVEL) == digest_of(records(100))
    assert grown.unchecked == 0


@settings(max_examples=25, deadline=None)
@given(st.lists(st.integers(1, 40), max_size=6), st.integers(1, 50))
def test_passes_and_rounds_of_any_size_give_one_digest(
    tmp_path_factory: pytest.TempPathFactory, growth: list[int], round_offsets: int
) -> None:
    """However the log grew and however it was cut into rounds, the certificate is the same."""
    store = CertificateStore(tmp_path_factory.mktemp("c") / "c.json")
    total = 0
    for more in growth:
        total += more
        run(Sides(records(total), records(total)), store, round_offsets=round_offsets)
    found = run(Sides(records(total), records(total)), store)
    assert (found.checked_to, found.verified_to) == (total, total)
    assert found.digest(LEVEL) == digest_of(records(total))


def test_altered_record_ends_what_is_verified(store: CertificateStore) -> None:
    """One altered record: verified to just before it for good, read on behind it, and not read again."""
    altered = records(100)
    altered[42] = (*altered[42][:4], b"other", None)
    sides = Sides(records(100), altered)
    for _ in range(2):
        found = run(sides, store, round_offsets=10)
        assert (found.verified_to, found.checked_to, found.ok) == (42, 100, False)
        assert [(each.first, each.end, each.differences) for each in found.differing] == [(42, 50, 1)]
        assert "value at offset 42" in found.differing[0].examples[0]
    assert len(sides.read) == 10
    # once put right it has to be asked for
    sides.logs[1] = records(100)
    assert run(sides, store).verified_to == 42
    assert run(sides, store, restart=True).verified_to == 100


def test_interrupted_pass_is_gone_on_with(store: CertificateStore) -> None:
    """A pass that dies keeps every finished round."""
    sides = Sides(records(100), records(100))

    def die() -> None:
        if len(sides.read) == 3:
            raise KeyboardInterrupt

    sides.on_check = die
    with pytest.raises(KeyboardInterrupt):
        run(sides, store, round_offsets=10)
    kept = store.load()
    assert kept is not None
    assert kept.partitions[0].checked_to == 30
    sides.on_check = lambda: None
    assert run(sides, store, round_offsets=10).verified_to == 100
    assert sum(w.end - w.start for w in sides.read) == 100


def test_retention_is_told_from_difference(store: CertificateStore) -> None:
    """What was deleted before it was read is counted, and is no difference; also in mid-read."""
    sides = Sides(records(100), records(100))
    run(sides, store, go_on=iter([True, False]).__next__, round_offsets=10)
    sides.starts = [30, 25]
    found = run(sides, store)
    assert (found.verified_from, found.skipped_offsets, found.verified_to, found.ok) == (0, 20, 100, True)
    sides = Sides(records(200), records(200))
    sides.starts = [30, 25]

    def delete() -> None:
        sides.starts = [150, 150]

    sides.on_check = delete
    found = run(sides, store)
    assert (found.skipped_offsets, found.verified_to) == (70, 200)


def test_topic_made_anew_begins_anew(store: CertificateStore) -> None:
    """Another topic id, another certificate: offsets of the former topic prove nothing."""
    run(Sides(records(100), records(100)), store)
    sides = Sides(records(10), records(10))
    sides.ids = ("s2", "d1")
    found = run(sides, store)
    assert (found.verified_to, found.records[LEVEL], found.problem) == (10, 10, None)


def test_lost_tail_and_foreign_records_are_problems(store: CertificateStore) -> None:
    """A side that ends below what was read, and a copy that is longer than its source, are said to be wrong."""
    run(Sides(records(100), records(100)), store)
    found = run(Sides(records(100), records(90)), store)
    assert not found.ok
    assert "the destination ends at 90" in (found.problem or "")
    found = run(Sides(records(100), records(105)), store)
    assert "more than the source has" in (found.problem or "")
    assert run(Sides(records(100), records(100)), store).ok


def test_ceiling_ends_what_is_a_copy(store: CertificateStore) -> None:
    """Nothing behind the last mirror position is compared."""
    found = run(Sides(records(100), records(100)), store, ceilings={KEY: 70})
    assert found.verified_to == 70


def test_window_is_what_both_sides_have_decided() -> None:
    """A window ends at the lower of both stable ends and begins where both logs do."""
    known = PartitionCertificate(topic="orders", partition=0)
    window = next_window(known, LogEnds(5, 90, 80), LogEnds(3, 100, 70), limit=1_000)
    assert (window.start, window.end) == (5, 70)
    assert next_window(known, LogEnds(50, 50, 50), LogEnds(0, 40, 40), limit=10).end == 50  # empty
    assert begun(None, KEY, ("a", "b")).source_topic_id == "a"


def test_unreadable_file_is_named(store: CertificateStore) -> None:
    """A certificate that is not one is never written over."""
    store.path.parent.mkdir(parents=True)
    store.path.write_text("{}")
    with pytest.raises(UsageError, match="move it away"):
        run(Sides(records(1), records(1)), store)
    assert store.path.read_text() == "{}"


def test_other_clusters_begin_anew(store: CertificateStore) -> None:
    """A certificate of other clusters is not gone on with."""
    run(Sides(records(100), records(100)), store)
    sides = Sides(records(100), records(100))
    sides.source_id = "C"
    assert run(sides, store).verified_to == 100
    assert len(sides.read) == 1


def _hold(path: Path, held: Any, release: Any) -> None:
    with CertificateStore(path).locked():
        held.set()
        release.wait(30)


def test_two_at_once_are_kept_apart(store: CertificateStore) -> None:
    """The second process that goes on with a certificate is refused while the first one does."""
    context = multiprocessing.get_context("spawn")
    held, release = context.Event(), context.Event()
    other = context.Process(target=_hold, args=(store.path, held, release))
    other.start()
    try:
        assert held.wait(30)
        with pytest.raises(UsageError, match="another process"), store.locked():
            pass
    finally:
        release.set()
        other.join(30)
    with store.locked():
        pass


def test_json_says_what_is_verified(store: CertificateStore) -> None:
    """The file itself holds the answer, for readers that know nothing of this program."""
    run(Sides(records(3), records(3)), store)
    text = store.path.read_text()
    assert '"verified_to": 3' in text
    assert Certificate.model_validate_json(text).ok

"""Checks a recorded history for the anomalies that Jepsen's Kafka workload looks for. Pure, no I/O.

What is checked against is one log per partition that all clusters share: a mirror promises the same record at the
same offset everywhere. A failover cuts that log: what the source holds behind the last mirrored offset belongs to
a branch of its own from then on (see `history.Stop`), until the topic is rebuilt there.
"""

from collections import Counter, defaultdict
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from enum import Enum
from typing import TypeAlias

from pydantic import BaseModel, ConfigDict, Field

from kmirror_dagster.verification.history import (
    Ack,
    Assign,
    EndTransaction,
    Event,
    Fail,
    Poll,
    Rebuilt,
    Send,
    Stop,
)
from kmirror_dagster.verification.report import Isolation

MAX_LISTED_ANOMALIES = 100

TopicPartition: TypeAlias = tuple[str, int]


class AnomalyKind(str, Enum):
    """What went wrong, in the words of Jepsen's Kafka workload.

    `lost`: acknowledged, and a consumer read past its offset without getting it; `duplicate`: one value at several
    offsets; `reordered`: two values of one producer in the other order than sent; `unseen`: acknowledged and never
    read by anybody; `inconsistent_offsets`: several values at one offset; `aborted_read`: read though its
    transaction was aborted, or its send failed for certain; `nonmonotonic_poll`: a consumer's offsets went back;
    `unexpected`: read and never sent.
    """

    LOST = "lost"
    DUPLICATE = "duplicate"
    REORDERED = "reordered"
    UNSEEN = "unseen"
    INCONSISTENT_OFFSETS = "inconsistent_offsets"
    ABORTED_READ = "aborted_read"
    NONMONOTONIC_POLL = "nonmonotonic_poll"
    UNEXPECTED = "unexpected"

    def __str__(self) -> str:
        return self.value


class Anomaly(BaseModel):
    """One anomaly, where it is and who saw it."""

    model_config = ConfigDict(frozen=True)

    kind: AnomalyKind
    topic: str
    partition: int
    offset: int | None = None
    cluster: str | None = None
    detail: str


class HistoryReport(BaseModel):
    """Outcome of `check_history`.

    Attributes:
        acknowledged: values that have to be there: acknowledged, not part of a transaction that did not commit.
        unknown: sends nobody knows the outcome of; they may be there or not.
        polled: records read, repetitions included.
        unmirrored: acknowledged values that a failover cut off; the loss manifest has to name as many.
        anomalies: the first 100 of each kind.
    """

    model_config = ConfigDict(frozen=True)

    sent: int
    acknowledged: int
    unknown: int
    polled: int
    unmirrored: int
    anomalies_total: int
    anomalies_by_kind: dict[AnomalyKind, int] = Field(default_factory=dict)
    anomalies: list[Anomaly] = Field(default_factory=list[Anomaly])

    @property
    def ok(self) -> bool:
        """Whether nothing is wrong."""
        return self.anomalies_total == 0


def check_history(events: Iterable[Event], *, complete: Collection[str] = ()) -> HistoryReport:
    """Check a history.

    Args:
        events: in the order in which they happened.
        complete: clusters whose consumers read everything to the end, so that what they have not read is `unseen`
            there even if somebody read it at another cluster.
    """
    listed = list(events)
    checker = _Checker(_cuts(listed), frozenset(complete))
    for index, event in enumerate(listed):
        checker.take(index, event)
    return checker.finish()


@dataclass(frozen=True)
class _Cut:
    """Part of a history in which a cluster's log from `offset` on is a branch: event indexes [first, last)."""

    offset: int
    first: int
    last: int


_Cuts: TypeAlias = dict[tuple[str, str, int], list[_Cut]]


def _cuts(events: list[Event]) -> _Cuts:
    """Branches of all logs: from the last rebuilding before a stop to the next one behind it."""
    rebuilt: dict[tuple[str, str], list[int]] = defaultdict(list)
    for index, event in enumerate(events):
        if isinstance(event, Rebuilt):
            rebuilt[event.cluster, event.topic].append(index)
    cuts: _Cuts = defaultdict(list)
    for index, event in enumerate(events):
        if isinstance(event, Stop):
            times = rebuilt[event.source, event.topic]
            first = max((time for time in times if time < index), default=0)
            last = min((time for time in times if time > index), default=len(events))
            cuts[event.source, event.topic, event.partition].append(_Cut(event.offset, first, last))
    return cuts


_Place: TypeAlias = tuple[TopicPartition, int]


@dataclass
class _Log:
    """What everybody saw: the shared log of all partitions, or one branch."""

    value_at: dict[_Place, str] = field(default_factory=dict[_Place, str])
    place_of: dict[str, _Place] = field(default_factory=dict[str, _Place])


@dataclass
class _Session:
    """Reading of one partition by one consumer between two moves.

    Attributes:
        start: first offset it reads over, None until that is known.
        end: offset behind the last one it has read over in the shared log.
        position: offset behind the last record it got, in whatever branch.
        read: offsets it got records at, in the shared log.
    """

    start: int | None
    end: int = -1
    position: int = -1
    read: set[int] = field(default_factory=set[int])


@dataclass
class _Sent:
    process: str
    transaction: str | None
    acknowledged: bool = False
    failed: bool = False


class _Checker:
    def __init__(self, cuts: _Cuts, complete: frozenset[str]) -> None:
        self._cuts = cuts
        self._complete = complete
        self._sent: dict[str, _Sent] = {}
        self._log = _Log()
        self._branches: dict[tuple[str, TopicPartition, int], _Log] = defaultdict(_Log)
        self._sessions: dict[tuple[str, TopicPartition], list[_Session]] = defaultdict(list)
        self._reading: dict[tuple[str, str, TopicPartition], _Session] = {}
        self._ended: dict[str, str] = {}
        self._reads: dict[str, tuple[_Place, str]] = {}
        self._committed_reads: dict[str, tuple[_Place, str]] = {}
        self._topics: set[str] = set()
        self._polled = 0
        self._counts: Counter[AnomalyKind] = Counter()
        self._listed: list[Anomaly] = []

    def take(self, index: int, event: Event) -> None:
        match event:
            case Send():
                self._topics.add(event.topic)
                self._sent.setdefault(event.value, _Sent(event.process, event.transaction))
            case Ack():
                self._acknowledge(index, event)
            case Fail() if event.value in self._sent:
                self._sent[event.value].failed = event.certain
            case EndTransaction():
                self._ended[event.transaction] = event.op
            case Poll():
                self._poll(index, event)
            case Assign():
                for topic, partition, offset in event.positions:
                    self._begin(event.cluster, event.process, (topic, partition), offset)
            case Rebuilt():
                for cluster, process, tp in list(self._reading):
                    if (cluster, tp[0]) == (event.cluster, event.topic):
                        del self._reading[cluster, process, tp]
            case _:
                pass

    def finish(self) -> HistoryReport:
        self._check_reads()
        self._check_order()
        expected = {value for value, sent in self._sent.items() if self._must_exist(sent)}
        cut_off = {value for branch in self._branches.values() for value in branch.place_of}
        unmirrored = (expected & cut_off) - self._log.place_of.keys()
        self._check_coverage(expected - unmirrored)
        unknown = sum(
            not sent.failed and not sent.acknowledged and self._ended.get(sent.transaction or "") != "abort"
            for sent in self._sent.values()
        )
        return HistoryReport(
            sent=len(self._sent),
            acknowledged=len(expected),
            unknown=unknown,
            polled=self._polled,
            unmirrored=len(unmirrored),
            anomalies_total=self._counts.total(),
            anomalies_by_kind=dict(self._counts),
            anomalies=self._listed,
        )

    def _must_exist(self, sent: _Sent) -> bool:
        return sent.acknowledged and (
            sent.transaction is None or self._ended.get(sent.transaction) == "commit"
        )

    def _note(
        self, kind: AnomalyKind, tp: TopicPartition, offset: int | None, cluster: str | None, detail: str
    ) -> None:
        self._counts[kind] += 1
        if self._counts[kind] <= MAX_LISTED_ANOMALIES:
            anomaly = Anomaly(
                kind=kind, topic=tp[0], partition=tp[1], offset=offset, cluster=cluster, detail=detail
            )
            self._listed.append(anomaly)

    # what events say

    def _log_of(self, index: int, cluster: str, place: _Place) -> _Log:
        """The log an observation belongs to: the shared one, or a branch that a failover cut off."""
        tp, offset = place
        for number, cut in enumerate(self._cuts.get((cluster, *tp), ())):
            if cut.first <= index < cut.last and offset >= cut.offset:
                return self._branches[cluster, tp, number]
        return self._log

    def _observe(self, index: int, cluster: str, place: _Place, value: str) -> bool:
        """Note that a value is at an offset; True when that is in the shared log."""
        tp, offset = place
        log = self._log_of(index, cluster, place)
        known = log.value_at.setdefault(place, value)
        if known != value:
            detail = f"values {known!r} and {value!r} at one offset"
            self._note(AnomalyKind.INCONSISTENT_OFFSETS, tp, offset, cluster, detail)
        first = log.place_of.setdefault(value, place)
        if first != place:
            where = f"{first[0][0]}/{first[0][1]} offset {first[1]}"
            self._note(AnomalyKind.DUPLICATE, tp, offset, cluster, f"value {value!r} is at {where} as well")
        return log is self._log

    def _acknowledge(self, index: int, event: Ack) -> None:
        self._sent.setdefault(event.value, _Sent("", None)).acknowledged = True
        if event.offset is not None:
            place = ((event.topic, event.partition), event.offset)
            self._observe(index, event.cluster, place, event.value)

    def _begin(self, cluster: str, process: str, tp: TopicPartition, offset: int | None) -> _Session:
        session = _Session(offset)
        if offset is not None:
            session.end = session.position = offset
        self._sessions[cluster, tp].append(session)
        self._reading[cluster, process, tp] = session
        return session

    def _poll(self, index: int, event: Poll) -> None:
        for topic, partition, offset, value in event.records:
            tp = (topic, partition)
            self._polled += 1
            session = self._reading.get((event.cluster, event.process, tp))
            if session is None:
                session = self._begin(event.cluster, event.process, tp, None)
            if offset < session.position:
                detail = f"{event.process} got offset {offset} after {session.position - 1}"
                self._note(AnomalyKind.NONMONOTONIC_POLL, tp, offset, event.cluster, detail)
            session.position = max(session.position, offset + 1)
            if session.start is None:
                session.start = offset
            if self._observe(index, event.cluster, (tp, offset), value):
                session.end = max(session.end, offset + 1)
                session.read.add(offset)
            seen = ((tp, offset), event.cluster)
            self._reads.setdefault(value, seen)
            if event.isolation is Isolation.READ_COMMITTED:
                self._committed_reads.setdefault(value, seen)

    # what only the whole history tells

    def _check_reads(self) -> None:
        for value, ((tp, offset), cluster) in self._reads.items():
            sent = self._sent.get(value)
            if sent is None:
                if tp[0] in self._topics:
                    detail = f"value {value!r} was never sent"
                    self._note(AnomalyKind.UNEXPECTED, tp, offset, cluster, detail)
            elif sent.failed:
                detail = f"value {value!r} was read though its send failed"
                self._note(AnomalyKind.ABORTED_READ, tp, offset, cluster, detail)
        for value, ((tp, offset), cluster) in self._committed_reads.items():
            sent = self._sent.get(value)
            if sent is not None and sent.transaction and self._ended.get(sent.transaction) == "abort":
                detail = f"value {value!r} of aborted transaction {sent.transaction!r} was read"
                self._note(AnomalyKind.ABORTED_READ, tp, offset, cluster, detail)

    def _check_order(self) -> None:
        """Offsets of what one process sent grow in the order of sending, partition by partition."""
        newest: dict[tuple[str, TopicPartition], tuple[int, str]] = {}
        for value, sent in self._sent.items():
            place = self._log.place_of.get(value)
            if place is None or not sent.process:
                continue
            tp, offset = place
            before = newest.get((sent.process, tp))
            if before is not None and offset < before[0]:
                detail = f"{sent.process} sent {value!r} after {before[1]!r}, which is at {before[0]}"
                self._note(AnomalyKind.REORDERED, tp, offset, None, detail)
            else:
                newest[sent.process, tp] = (offset, value)

    def _check_coverage(self, expected: set[str]) -> None:
        wanted: dict[TopicPartition, list[tuple[int, str]]] = defaultdict(list)
        for value in expected:
            place = self._log.place_of.get(value)
            if place is not None:
                wanted[place[0]].append((place[1], value))
            else:
                detail = f"value {value!r} was acknowledged without an offset, nobody read it"
                self._note(AnomalyKind.UNSEEN, ("?", -1), None, None, detail)
        for tp in sorted(wanted):
            self._check_partition(tp, sorted(wanted[tp]))

    def _check_partition(self, tp: TopicPartition, wanted: list[tuple[int, str]]) -> None:
        read = {
            cluster: set[int]().union(*(session.read for session in sessions))
            for (cluster, key), sessions in self._sessions.items()
            if key == tp
        }
        read_anywhere = set[int]().union(*read.values())
        lost: set[int] = set()
        for cluster in sorted(read):
            lost |= self._check_skipped(cluster, tp, wanted, read[cluster])
        for offset, value in wanted:
            if offset in lost:
                continue
            if offset not in read_anywhere:
                detail = f"value {value!r} was acknowledged, nobody read it"
                self._note(AnomalyKind.UNSEEN, tp, offset, None, detail)
                continue
            for cluster in sorted(self._complete):
                if offset not in read.get(cluster, ()):
                    detail = f"value {value!r} was acknowledged and not read at this cluster"
                    self._note(AnomalyKind.UNSEEN, tp, offset, cluster, detail)

    def _check_skipped(
        self, cluster: str, tp: TopicPartition, wanted: list[tuple[int, str]], read: set[int]
    ) -> set[int]:
        """Offsets that a consumer of the cluster read past, though nobody has ever got them there."""
        covered = _merged(self._sessions[cluster, tp])
        lost: set[int] = set()
        index = 0
        for offset, value in wanted:
            while index < len(covered) and covered[index][1] <= offset:
                index += 1
            if index == len(covered):
                break
            if covered[index][0] <= offset and offset not in read:
                lost.add(offset)
                detail = f"value {value!r} was acknowledged, consumers read past it"
                self._note(AnomalyKind.LOST, tp, offset, cluster, detail)
        return lost


def _merged(sessions: list[_Session]) -> list[tuple[int, int]]:
    """Offsets that sessions read over, as disjoint ranges in order."""
    ranges = sorted((session.start, session.end) for session in sessions if session.start is not None)
    merged: list[tuple[int, int]] = []
    for start, end in ranges:
        if start >= end:
            continue
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], end))
        else:
            merged.append((start, end))
    return merged

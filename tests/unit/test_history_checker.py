"""The history checker finds each planted anomaly, and none in histories of a log that works."""

import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kmirror_dagster.errors import UsageError
from kmirror_dagster.verification.history import (
    Ack,
    Assign,
    EndTransaction,
    Event,
    Fail,
    Poll,
    PolledRecord,
    Position,
    Rebuilt,
    Send,
    Stop,
    event_line,
    parse_history,
    read_history,
)
from kmirror_dagster.verification.history_checker import AnomalyKind, HistoryReport, check_history
from kmirror_dagster.verification.report import Isolation

COMMITTED = Isolation.READ_COMMITTED


def sent(
    value: str, offset: int, *, process: str = "p", cluster: str = "A", partition: int = 0
) -> list[Event]:
    """A send and its acknowledgement."""
    return [
        Send(process=process, cluster=cluster, topic="t", value=value),
        Ack(cluster=cluster, topic="t", partition=partition, offset=offset, value=value),
    ]


def polled(*records: tuple[int, str], process: str = "c", cluster: str = "B", **more: object) -> Poll:
    """One poll of partition 0."""
    items = [PolledRecord("t", 0, offset, value) for offset, value in records]
    return Poll.model_validate({"process": process, "cluster": cluster, "records": items, **more})


def start(offset: int | None, *, process: str = "c", cluster: str = "B") -> Assign:
    """A consumer that begins at an offset of partition 0."""
    return Assign(process=process, cluster=cluster, positions=[Position("t", 0, offset)])


def kinds(report: HistoryReport) -> dict[str, int]:
    """Anomalies by kind."""
    return {str(kind): count for kind, count in report.anomalies_by_kind.items()}


CLEAN = [*sent("a", 0), *sent("b", 1), start(0), polled((0, "a"), (1, "b"))]


def test_clean_history() -> None:
    """What was acknowledged and read in order is right."""
    report = check_history(CLEAN, complete=["B"])
    assert report.ok
    assert (report.sent, report.acknowledged, report.polled) == (2, 2, 2)


def test_lost() -> None:
    """A consumer that read past an acknowledged record without getting it: lost, at that cluster."""
    report = check_history([*sent("a", 0), *sent("b", 1), start(0), polled((1, "b"))])
    assert kinds(report) == {"lost": 1}
    assert report.anomalies[0].cluster == "B"
    assert report.anomalies[0].offset == 0


def test_lost_at_one_cluster_only() -> None:
    """A record read at the source and skipped at the destination is lost."""
    at_source = polled((0, "a"), (1, "b"), cluster="A", process="d")
    report = check_history([*sent("a", 0), *sent("b", 1), at_source, start(0), polled((1, "b"))])
    assert kinds(report) == {"lost": 1}


def test_not_lost_where_nobody_read() -> None:
    """A consumer that began behind a record has not lost it; somebody has to have read it all the same."""
    history = [*sent("a", 0), *sent("b", 1), start(1), polled((1, "b"))]
    assert kinds(check_history(history)) == {"unseen": 1}
    history.append(polled((0, "a"), cluster="A", process="d"))
    assert check_history(history).ok


def test_unseen_at_a_complete_cluster() -> None:
    """What one cluster's consumers have not read though they read to the end is unseen there."""
    history = [
        *sent("a", 0),
        *sent("b", 1),
        polled((0, "a"), (1, "b"), cluster="A"),
        start(0),
        polled((0, "a")),
    ]
    assert check_history(history).ok
    assert kinds(check_history(history, complete=["B"])) == {"unseen": 1}


def test_unseen_without_an_offset() -> None:
    """An acknowledgement without an offset still promises that the record can be read."""
    history: list[Event] = [
        Send(process="p", cluster="A", topic="t", value="a"),
        Ack(cluster="A", topic="t", partition=0, value="a"),
    ]
    assert kinds(check_history(history)) == {"unseen": 1}
    assert check_history([*history, polled((0, "a"))]).ok


def test_duplicate() -> None:
    """One value at two offsets, or in two partitions, is there twice."""
    assert kinds(check_history([*CLEAN, polled((2, "b"))])) == {"duplicate": 1}
    other = Poll(process="d", cluster="B", records=[PolledRecord("t", 1, 0, "a")])
    assert kinds(check_history([*CLEAN, other])) == {"duplicate": 1}


def test_reordered() -> None:
    """A producer's records stand in the order in which they were sent."""
    history = [*sent("a", 1), *sent("b", 0), polled((0, "b"), (1, "a"))]
    assert kinds(check_history(history)) == {"reordered": 1}
    others = [*sent("a", 1), *sent("b", 0, process="q"), polled((0, "b"), (1, "a"))]
    assert check_history(others).ok
    partitions = [*sent("a", 1), *sent("b", 0, partition=1), polled((1, "a"))]
    assert "reordered" not in kinds(check_history(partitions))


def test_inconsistent_offsets() -> None:
    """Two values at one offset, in whichever clusters, are two logs."""
    history = [*sent("a", 0), polled((0, "a"), cluster="A"), *sent("b", 1), polled((1, "b"), (0, "b"))]
    assert kinds(check_history(history))["inconsistent_offsets"] == 1


def test_aborted_read() -> None:
    """A value of an aborted transaction may be read by read_uncommitted consumers only."""
    history: list[Event] = [
        Send(process="p", cluster="A", topic="t", value="a", transaction="x"),
        Ack(cluster="A", topic="t", partition=0, offset=0, value="a"),
        EndTransaction(op="abort", transaction="x"),
    ]
    assert check_history([*history, polled((0, "a"))]).ok
    assert kinds(check_history([*history, polled((0, "a"), isolation=COMMITTED)])) == {"aborted_read": 1}
    assert check_history(history).ok  # nobody has to see it


def test_read_of_a_failed_send() -> None:
    """A value whose send failed for certain must not be there; one of unknown outcome may."""
    send = Send(process="p", cluster="A", topic="t", value="a")
    certain, unsure = Fail(value="a", certain=True), Fail(value="a")
    assert kinds(check_history([send, certain, polled((0, "a"))])) == {"aborted_read": 1}
    report = check_history([send, unsure, polled((0, "a"))])
    assert report.ok
    assert report.unknown == 1


def test_committed_transaction_has_to_be_there() -> None:
    """A committed transaction's records are acknowledged; one without an outcome promises nothing."""
    history: list[Event] = [
        Send(process="p", cluster="A", topic="t", value="a", transaction="x"),
        Ack(cluster="A", topic="t", partition=0, offset=0, value="a"),
        start(0),
        polled((2, "z"), isolation=COMMITTED),
        *sent("z", 2),
    ]
    assert check_history(history).ok
    commit = EndTransaction(op="commit", transaction="x")
    assert kinds(check_history([*history, commit])) == {"lost": 1}


def test_nonmonotonic_poll() -> None:
    """A consumer's offsets go up until it is given the partition anew."""
    assert kinds(check_history([*CLEAN, polled((0, "a"))])) == {"nonmonotonic_poll": 1}
    assert check_history([*CLEAN, start(0), polled((0, "a"))]).ok
    assert check_history([*CLEAN, polled((0, "a"), process="d")]).ok
    within = [*sent("a", 0), *sent("b", 1), polled((1, "b"), (0, "a"))]
    assert kinds(check_history(within)) == {"nonmonotonic_poll": 1}


def test_unexpected_value() -> None:
    """A value nobody sent is reported, unless nothing is known about the topic's producers."""
    assert kinds(check_history([*CLEAN, polled((2, "z"))])) == {"unexpected": 1}
    assert check_history([polled((2, "z"))]).ok


def failed_over() -> list[Event]:
    """Ten mirrored records, three that only A has, then B goes on with three others at the same offsets."""
    events: list[Event] = [start(0, cluster="A", process="a"), start(0)]
    for offset in range(10):
        events += sent(f"v{offset}", offset)
    events.append(polled(*((o, f"v{o}") for o in range(10))))
    for offset in range(10, 13):
        events += sent(f"tail{offset}", offset)
    events.append(polled(*((o, f"v{o}") for o in range(10)), cluster="A", process="a"))
    events.append(polled(*((o, f"tail{o}") for o in range(10, 13)), cluster="A", process="a"))
    events.append(Stop(source="A", destination="B", topic="t", partition=0, offset=10))
    for offset in range(10, 13):
        events += sent(f"new{offset}", offset, cluster="B")
    events.append(polled(*((o, f"new{o}") for o in range(10, 13))))
    return events


def test_failover_cuts_the_log() -> None:
    """Records behind the last mirrored offset are counted, not mixed with those that took their offsets."""
    report = check_history(failed_over(), complete=["B"])
    assert report.ok, report.anomalies
    assert report.unmirrored == 3


def test_failback_joins_the_logs() -> None:
    """After the topic was rebuilt its records are the other cluster's: a rest of the former tail is found."""
    events = [*failed_over(), Rebuilt(cluster="A", topic="t"), start(0, cluster="A", process="a")]
    good = [*((o, f"v{o}") for o in range(10)), *((o, f"new{o}") for o in range(10, 13))]
    assert check_history([*events, polled(*good, cluster="A", process="a")], complete=["A", "B"]).ok
    bad = [*good[:10], (10, "tail10"), *good[11:]]
    report = check_history([*events, polled(*bad, cluster="A", process="a")])
    assert kinds(report)["inconsistent_offsets"] == 1


def test_undeclared_cut_is_found() -> None:
    """The same history without the stop is two logs."""
    events = [event for event in failed_over() if not isinstance(event, Stop)]
    assert kinds(check_history(events))["inconsistent_offsets"] >= 1


def test_report_lists_the_first_of_each_kind() -> None:
    """Thousands of anomalies are counted, a hundred of each kind listed."""
    events: list[Event] = []
    for offset in range(300):
        events += sent(f"v{offset}", offset)
    report = check_history([*events, start(0), polled((299, "v299"))])
    assert report.anomalies_total == 299
    assert len(report.anomalies) == 100


@st.composite
def clean_histories(draw: st.DrawFn) -> list[Event]:
    """A source log, a mirror that follows it, producers, consumers of both, and at most one failover and back."""
    events: list[Event] = []
    main: list[
        str | None
    ] = []  # what both clusters agree on: None is a transaction marker or an aborted record
    length = {"A": 0, "B": 0}
    tail: list[str] = []
    position: dict[tuple[str, str], int] = {}
    active = "A"
    serial = 0
    for step in draw(st.lists(st.sampled_from("ssstmmppppfrx"), max_size=60)):
        if step in "st" and not tail:
            if length[active] != len(main):
                continue
            transaction = f"x{serial}" if step == "t" else None
            values = [f"v{serial + i}" for i in range(draw(st.integers(1, 3)))]
            serial += len(values)
            process = draw(st.sampled_from("pq"))
            acknowledged = draw(st.booleans())
            commits = draw(st.booleans())
            for value in values:
                events.append(
                    Send(process=process, cluster=active, topic="t", value=value, transaction=transaction)
                )
                if acknowledged or transaction:
                    events.append(Ack(cluster=active, topic="t", partition=0, offset=len(main), value=value))
                else:
                    events.append(Fail(value=value))
                main.append(value if transaction is None or commits else None)
            if transaction:
                events.append(EndTransaction(op="commit" if commits else "abort", transaction=transaction))
                main.append(None)
            length[active] = len(main)
        elif step == "m" and not tail:
            other = "B" if active == "A" else "A"
            length[other] = min(len(main), length[other] + draw(st.integers(1, 5)))
        elif step == "p":
            cluster = draw(st.sampled_from("AB"))
            process = f"{cluster}{draw(st.integers(0, 1))}"
            at = position.get((cluster, process), -1)
            if at < 0 or draw(st.integers(0, 9)) == 0:
                at = draw(st.integers(0, length[cluster]))
                events.append(start(at, cluster=cluster, process=process))
            upto = min(length[cluster], at + draw(st.integers(1, 6)))
            records = [(o, v) for o in range(at, upto) if (v := main[o]) is not None]
            if records:
                events.append(polled(*records, cluster=cluster, process=process, isolation=COMMITTED))
            position[cluster, process] = max(at, upto)
        elif step == "f" and active == "A" and length["B"] == len(main) and not tail:
            # A gets three more that B never sees; B takes over
            for extra in range(3):
                value = f"tail{serial}"
                serial += 1
                tail.append(value)
                events += sent(value, len(main) + extra)
            events.append(Stop(source="A", destination="B", topic="t", partition=0, offset=len(main)))
            active = "B"
            length["A"] = 0
        elif step == "r" and active == "B" and tail:
            tail.clear()
            events.append(Rebuilt(cluster="A", topic="t"))
            position = {key: at for key, at in position.items() if key[0] != "A"}
    # final reads
    for cluster in "AB":
        if cluster == "A" and active == "B":
            continue
        events.append(start(0, cluster=cluster, process="last"))
        records = [(o, v) for o in range(length[cluster]) if (v := main[o]) is not None]
        if records:
            events.append(polled(*records, cluster=cluster, process="last", isolation=COMMITTED))
    return events


@settings(max_examples=300, deadline=None)
@given(clean_histories())
def test_clean_histories_have_no_anomaly(events: list[Event]) -> None:
    """Whatever works as a mirror works has no anomaly, with failovers and back."""
    report = check_history(events)
    unseen = report.anomalies_by_kind.get(AnomalyKind.UNSEEN, 0)
    assert report.anomalies_total == unseen, report.anomalies  # the copy may be behind at the end


@settings(max_examples=100, deadline=None)
@given(clean_histories(), st.data())
def test_planted_anomaly_is_found(events: list[Event], data: st.DataObject) -> None:
    """A record taken out of a good history's last reading, or shown twice, does not go unnoticed."""
    last = events[-1]
    if not isinstance(last, Poll) or len(last.records) < 2:
        return
    cluster = last.cluster
    others = {r.value for e in events[:-1] if isinstance(e, Poll) and e.cluster == cluster for r in e.records}
    index = data.draw(st.integers(0, len(last.records) - 2))
    victim = last.records[index]
    twice = [*last.records, victim._replace(offset=last.records[-1].offset + 1)]
    doubled = check_history([*events[:-1], last.model_copy(update={"records": twice})])
    assert doubled.anomalies_by_kind.get(AnomalyKind.DUPLICATE) == 1
    acks = {e.value for e in events if isinstance(e, Ack)}
    if victim.value in acks and victim.value not in others:
        rest = [*last.records[:index], *last.records[index + 1 :]]
        skipped = check_history([*events[:-1], last.model_copy(update={"records": rest})])
        assert skipped.anomalies_by_kind.get(AnomalyKind.LOST) == 1


def test_events_survive_the_file(tmp_path: Path) -> None:
    """Every event is a line that reads back as itself; empty lines are passed over."""
    events = failed_over()
    file = tmp_path / "history.jsonl"
    file.write_text("\n\n".join(event_line(event) for event in events))
    assert list(read_history(file)) == events


def test_line_that_is_no_event_is_named() -> None:
    """A malformed line is refused with its number."""
    lines = [event_line(CLEAN[0]), json.dumps({"op": "poll", "process": "c"})]
    with pytest.raises(UsageError, match=r"history:2: .*cluster"):
        list(parse_history(lines))


def test_missing_file_is_named(tmp_path: Path) -> None:
    """A file that is not there is named."""
    with pytest.raises(UsageError, match="nowhere"):
        list(read_history(tmp_path / "nowhere"))

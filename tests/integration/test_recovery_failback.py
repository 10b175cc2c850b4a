"""Failback on real clusters: A->B, failover, writes on both sides, B->A."""

import json
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from confluent_kafka import Consumer, TopicPartition
from typer.testing import Result

from kmirror_dagster.coordination.models import VerbResult
from kmirror_dagster.lifecycle import MirrorState
from kmirror_dagster.recovery.quarantine import read_tail
from kmirror_dagster.verification.history import read_history
from kmirror_dagster.verification.history_checker import check_history
from kmirror_dagster.verification.history_recorder import HistoryWriter, RecordedConsumer, RecordedProducer
from tests.conftest import Clusters
from tests.helpers.command_line import kmirror
from tests.helpers.kafka import (
    commit_offsets,
    committed_offsets,
    consume,
    create_topic,
    produce,
    producer,
    write,
)
from tests.helpers.nodes import NodeMirror, NodeProcess, mirrored, ranges
from tests.helpers.pairs import Pair, numbered
from tests.helpers.waiting import wait_until

pytestmark = [pytest.mark.integration, pytest.mark.usefixtures("turnable")]


@pytest.fixture(scope="module")
def back_node(clusters: Clusters, tmp_path_factory: pytest.TempPathFactory) -> Iterator[NodeProcess]:
    """A node that writes to the source cluster."""
    process = NodeProcess(tmp_path_factory.mktemp("back") / "state", clusters.source.bootstrap)
    try:
        yield process.start()
    finally:
        process.stop()


@pytest.fixture
def pair(clusters: Clusters, node: NodeProcess, back_node: NodeProcess, tmp_path: Path) -> Iterator[Pair]:
    with mirrored(node, clusters.source.bootstrap, clusters.destination.bootstrap) as forward:
        made = Pair(forward, back_node, tmp_path / "quarantine")
        yield made
        made.back.delete()


@pytest.mark.case("C31")
def test_failback_after_writes_on_both_sides(pair: Pair) -> None:
    """A->B to 100; A writes 20 unseen; B writes 50: A ends like B (150), the 20 are in quarantine, groups follow."""
    forward = pair.forward
    diverged, clean = forward.topic("diverged"), forward.topic("clean")
    for topic in (diverged, clean):
        create_topic(forward.source, topic)
        produce(forward.source, topic, numbered(100, 0, "a"))
    forward.await_states(MirrorState.MIRRORING, diverged, clean)
    forward.await_copied(diverged, clean)
    pair.fail_over(diverged, clean)
    produce(forward.source, diverged, numbered(20, 100, "a"))
    for topic in (diverged, clean):
        produce(forward.destination, topic, numbered(50, 100, "b"))
    group = f"{forward.name}.readers"
    commit_offsets(forward.destination, group, [(diverged, 0, 130)])

    planned = pair.failback("--plan")
    plan = planned["plan"]
    assert isinstance(plan, dict)
    actions = {topic["topic"]: (topic["action"], topic["copy_offsets"]) for topic in plan["topics"]}
    assert actions == {diverged: ("recreate", 150), clean: ("continue", 50)}
    assert plan["tail"] == 20
    assert not pair.quarantine.exists()
    assert ranges(forward.source, diverged) == {0: (0, 120)}

    done = pair.failback("--yes")
    assert done["finished"]
    saved = done["saved"]
    assert isinstance(saved, list)
    assert [(tail["topic"], tail["first"], tail["end"], tail["records"]) for tail in saved] == [
        (diverged, 100, 120, 20)
    ]
    rescued = read_tail(Path(saved[0]["file"]))
    assert [record["value"] for record in rescued] == [b"a-%04d" % n for n in range(100, 120)]

    back = pair.back
    back.await_copied(diverged, clean)
    back.compare(diverged, clean)
    values = [record.value for record in consume(forward.source, diverged)]
    assert values == [b"a-%04d" % n for n in range(100)] + [b"b-%04d" % n for n in range(100, 150)]
    wait_until(
        lambda: committed_offsets(forward.source, group) == {(diverged, 0): 130}, 30, what="group follows"
    )
    assert all(each.state is MirrorState.STOPPED for each in forward.partitions())

    again = pair.failback("--yes")
    assert again["finished"]
    assert again["saved"] == saved
    produce(forward.destination, clean, numbered(5, 150, "b"))
    back.await_copied(clean)
    assert ranges(forward.source, clean) == {0: (0, 155)}


@pytest.mark.case("C31")
@pytest.mark.timeout(300)
def test_there_and_back_again(pair: Pair) -> None:
    """Two failovers and failbacks in a row, writes on both sides each time: equal in the end, all tails saved."""
    topic = pair.forward.topic()
    create_topic(pair.forward.source, topic)
    produce(pair.forward.source, topic, numbered(10, 0, "first"))
    pair.forward.await_states(MirrorState.MIRRORING, topic)
    pair.forward.await_copied(topic)
    end = 10
    for turn, way in enumerate((pair, pair.turned)):
        way.fail_over(topic)
        produce(way.forward.source, topic, numbered(3, end, f"tail{turn}"))
        produce(way.forward.destination, topic, numbered(7, end, f"kept{turn}"))
        done = way.failback("--yes")
        saved = done["saved"]
        assert isinstance(saved, list)
        values = [record["value"] for tail in saved for record in read_tail(Path(tail["file"]))]
        assert values == [b"tail%d-%04d" % (turn, n) for n in range(end, end + 3)], done["plan"]
        end += 7
        way.back.await_copied(topic)
        way.back.compare(topic)
    assert ranges(pair.forward.source, topic) == ranges(pair.forward.destination, topic) == {0: (0, 24)}
    assert [each.state for each in pair.forward.partitions(topic)] == [MirrorState.MIRRORING]


@pytest.mark.case("C21")
def test_mirroring_back_what_is_mirrored_here_is_refused(pair: Pair) -> None:
    """A->B mirrors a topic: B->A of it is refused as a loop and changes nothing; after promotion it is no loop."""
    forward = pair.forward
    topic = forward.topic()
    create_topic(forward.source, topic)
    produce(forward.source, topic, numbered(10, 0, "a"))
    forward.await_states(MirrorState.MIRRORING, topic)
    forward.await_copied(topic)
    back = pair.back
    back.document["filters"]["topics.include"] = [topic.replace(".", r"\.")]
    back.create()

    def told() -> str:
        back.node.client.refresh(back.name)
        return back.errors().get(topic, "")

    wait_until(lambda: "would be a loop" in told(), 30, what="refused as a loop")
    assert forward.name in told()
    assert ranges(forward.source, topic) == {0: (0, 10)}
    pair.fail_over(topic)
    wait_until(lambda: "has been written to" in told(), 30, what="no loop any more")


def switchover(pair: Pair, *more: str) -> Result:
    """Run the command against both nodes."""
    return kmirror(
        "--state-dir",
        str(pair.forward.node.state_dir),
        "switchover",
        pair.forward.name,
        "--to-state-dir",
        str(pair.back_node.state_dir),
        "--quiet",
        "0.5",
        "--yes",
        "--json",
        *more,
    )


def test_switchover_and_back_copies_nothing_anew(pair: Pair) -> None:
    """Drain, verify, stop, mirror back: nothing in quarantine, nothing copied anew; the same way back again."""
    forward = pair.forward
    topic = forward.topic()
    create_topic(forward.source, topic)
    produce(forward.source, topic, numbered(100, 0, "a"))
    forward.await_states(MirrorState.MIRRORING, topic)
    group = f"{forward.name}.readers"
    commit_offsets(forward.source, group, [(topic, 0, 40)])
    result = switchover(pair)
    assert result.exit_code == 0, result.output
    done = json.loads(result.stdout)
    assert done["finished"]
    assert done["saved"] == []
    assert [(t["action"], t["copy_offsets"]) for t in done["plan"]["topics"]] == [("continue", 0)]
    assert committed_offsets(forward.destination, group) == {(topic, 0): 40}
    produce(forward.destination, topic, numbered(10, 100, "b"))
    pair.back.await_copied(topic)
    pair.back.compare(topic)


@pytest.mark.unsecured("about a cluster without an authorizer")
def test_switchover_with_a_writer_is_not_done(pair: Pair) -> None:
    """Where writers cannot be fenced and do not end, it says so; given up, the mirror is as it was."""
    forward = pair.forward
    topic = forward.topic()
    create_topic(forward.source, topic)
    produce(forward.source, topic, numbered(10, 0, "a"))
    forward.await_states(MirrorState.MIRRORING, topic)
    ended = threading.Event()

    def go_on() -> None:
        client = producer(forward.source)
        number = 10
        while not ended.wait(0.05):
            write(client, topic, numbered(1, number, "a"))
            assert client.flush(30) == 0
            number += 1

    with ThreadPoolExecutor(1) as pool:
        writer = pool.submit(go_on)
        try:
            result = switchover(pair, "--drain", "6", "--quiet", "3")
            assert result.exit_code == 1, result.output
            assert "the source is still written to (the cluster has no authorizer)" in result.stderr
        finally:
            ended.set()
            writer.result(30)
    given_up = switchover(pair, "--abort")
    assert given_up.exit_code == 0, given_up.output
    forward.await_copied(topic)
    assert [each.state for each in forward.partitions(topic)] == [MirrorState.MIRRORING]


def read_to(consumer: RecordedConsumer, end: int) -> None:
    """Poll one partition until the record before `end` was read."""

    def reached() -> bool:
        return any(message.offset() >= end - 1 for message in consumer.poll(0.5))

    wait_until(reached, 60, what=f"read to {end}")


def test_switchover_between_running_clients_has_no_anomaly(pair: Pair, tmp_path: Path) -> None:
    """Producers move from A to B with the switchover, consumers read at both: nothing lost, doubled or reordered."""
    forward = pair.forward
    topic = forward.topic()
    create_topic(forward.source, topic)
    file = tmp_path / "history.jsonl"
    with HistoryWriter(file) as history:
        sides = {"A": forward.source, "B": forward.destination}
        writers = {
            name: RecordedProducer(producer(where), history, cluster=name, process="p")
            for name, where in sides.items()
        }
        for number in range(1_000):
            writers["A"].send(topic, f"a-{number}", partition=0)
        assert writers["A"].flush(30) == 0
        forward.await_states(MirrorState.MIRRORING, topic)
        readers: list[RecordedConsumer] = []
        try:
            for name, where in sides.items():
                config = {"bootstrap.servers": where, "group.id": f"{forward.name}.{name}"}
                client = Consumer({**config, "enable.auto.commit": False})
                readers.append(RecordedConsumer(client, history, cluster=name, process=f"c{name}"))
                readers[-1].assign([TopicPartition(topic, 0, 0)])
                read_to(readers[-1], 1_000)
            for number in range(1_000, 1_500):
                writers["A"].send(topic, f"a-{number}", partition=0)
            assert writers["A"].flush(30) == 0
            result = switchover(pair)
            assert result.exit_code == 0, result.output
            for number in range(1_500, 2_000):
                writers["B"].send(topic, f"b-{number}", partition=0)
            assert writers["B"].flush(30) == 0
            for reader in readers:
                read_to(reader, 2_000)
        finally:
            for reader in readers:
                reader.close()
    report = check_history(read_history(file), complete=["A", "B"])
    assert report.ok, report.anomalies[:5]
    assert (report.acknowledged, report.polled, report.unmirrored) == (2_000, 4_000, 0)


@pytest.mark.case("C31")
def test_two_operators_fail_back_at_once(pair: Pair) -> None:
    """Both begin at the same moment: one carries it out, the other one is refused, nothing is done twice."""
    forward = pair.forward
    topic = forward.topic()
    create_topic(forward.source, topic)
    produce(forward.source, topic, numbered(10, 0, "a"))
    forward.await_states(MirrorState.MIRRORING, topic)
    forward.await_copied(topic)
    pair.fail_over(topic)
    produce(forward.source, topic, numbered(3, 10, "a"))
    produce(forward.destination, topic, numbered(5, 10, "b"))
    with ThreadPoolExecutor(2) as pool:
        ends = list(pool.map(lambda _: pair.ended("failback", "--yes"), range(2)))
    assert 0 in [code for code, _ in ends], ends
    assert all(code == 0 or "somebody else goes on" in said for code, said in ends), ends
    done = pair.failback("--yes")
    saved = done["saved"]
    assert isinstance(saved, list)
    values = [record["value"] for tail in saved for record in read_tail(Path(tail["file"]))]
    assert values == [b"a-%04d" % n for n in range(10, 13)]
    pair.back.await_copied(topic)
    pair.back.compare(topic)


def test_verbs_by_many_operators_at_once(pair: Pair) -> None:
    """Each verb four times at the same moment, and once more: it is done once, and all records are there."""
    forward = pair.forward
    topic = forward.topic()
    create_topic(forward.source, topic, 3)
    forward.create()  # the second time, by another operator
    produce(forward.source, topic, numbered(10, 0, "a"))
    forward.await_states(MirrorState.MIRRORING, topic, partitions=3)
    forward.await_copied(topic)
    steps = {
        "pause": (MirrorState.PAUSED, 2),
        "resume": (MirrorState.MIRRORING, 1),
        "recover": (MirrorState.MIRRORING, 0),
        "stop": (MirrorState.STOPPED, 2),
        "start": (MirrorState.MIRRORING, 2),
    }
    for number, (verb, (state, changes)) in enumerate(steps.items()):
        before = {each.partition: each.state_epoch for each in forward.partitions(topic)}
        with ThreadPoolExecutor(4) as pool:
            given = list(pool.map(lambda _, verb=verb: give(forward, verb), range(4)))
        forward.await_states(state, topic, partitions=3)
        assert sum(bool(result.changed) for result in given) == min(changes, 1), (verb, given)
        assert give(forward, verb).changed == []
        after = {each.partition: each.state_epoch for each in forward.partitions(topic)}
        assert {after[n] - before[n] for n in before} == {changes}, (verb, before, after)
        produce(forward.source, topic, numbered(10, 10 * number + 10, "a"))
    forward.await_copied(topic)
    forward.compare(topic)


def give(mirror: NodeMirror, verb: str) -> VerbResult:
    """A verb, by an operator of its own."""
    running = mirror.node.endpoint
    assert running is not None
    with running.client(timeout_s=15.0) as client:
        return client.verb(mirror.name, verb)

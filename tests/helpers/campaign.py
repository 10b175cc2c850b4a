"""A campaign of faults: one fault, met while copying and during failover, failback and switchover, under load.

Values that producers send and readers get at both clusters are one history, which has to be without anomaly.
"""

import random
import subprocess
import sys
import time
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

from kmirror_dagster.lifecycle import MirrorState
from kmirror_dagster.recovery.failback_look import reverse_name
from kmirror_dagster.recovery.quarantine import read_tail
from kmirror_dagster.settings import ClusterSettings
from kmirror_dagster.verification.history import Ack
from kmirror_dagster.verification.history_checker import HistoryReport, check_history
from kmirror_dagster.verification.history_clients import SteadyProducer, SteadyReader
from kmirror_dagster.verification.history_recorder import HistoryWriter
from tests.helpers.kafka import create_topic
from tests.helpers.nodes import NodeMirror, ranges
from tests.helpers.recovery_faults import Fault, Roles, Side, mend
from tests.helpers.waiting import unique_name, wait_until

PHASES = ("copying", "failover", "failback", "switchover")

_CONFIGS = {"retention.ms": "-1"}
_COMMAND_S = 240.0
_DEADLINE_S = 300.0
_RATE = 200.0
_TOPICS = 2
_PARTITIONS = 3


@dataclass
class Outcome:
    """What a fault did.

    Attributes:
        seconds: by phase. Copying: until all is copied again, counted from the end of a fault that ends copying,
            else from its beginning. Failover: from the call to writable. Failback, switchover: from the call to
            its end.
        runs: how often the command had to be run in each phase.
        total_s: seconds under load.
        quarantined: records of the divergent tails.
    """

    fault: str
    seconds: dict[str, float] = field(default_factory=dict[str, float])
    runs: dict[str, int] = field(default_factory=dict[str, int])
    total_s: float = 0.0
    quarantined: int = 0
    sent: int = 0
    acknowledged: int = 0
    polled: int = 0
    unmirrored: int = 0
    anomalies: int = 0


class Campaign:
    """One cycle of everything: A->B copied, failed over, written to on both sides, failed back (B->A), switched over.

    Args:
        first, second: the two clusters; the first one is the source in the beginning.
        home: for quarantine and what commands say.
        seed: of the moments at which faults happen.
    """

    def __init__(self, first: Side, second: Side, home: Path, *, seed: int) -> None:
        self.first, self.second = first, second
        self.history = HistoryWriter()
        self._rng = random.Random(seed)
        self._home = home
        self._quarantine = home / "quarantine"
        self._producers: list[SteadyProducer] = []
        self._readers: dict[str, SteadyReader] = {}
        self._healer: Future[None] | None = None
        name = unique_name("m")
        self.topics = {f"{name}.{number}": _PARTITIONS for number in range(_TOPICS)}
        self._name = name

    # the cycle

    def run(self, faults: Mapping[str, Fault]) -> tuple[Outcome, HistoryReport]:
        """Run it with a fault for each phase; the history's report is the proof."""
        outcome = Outcome(", ".join(dict.fromkeys(fault.name for fault in faults.values())))
        began = time.monotonic()
        try:
            self._begin()
            self._copy(faults["copying"], outcome)
            self._fail_over(faults["failover"], outcome)
            self._fail_back(faults["failback"], outcome)
            self._switch_over(faults["switchover"], outcome)
            self._end()
        finally:
            self._stop_clients()
        outcome.total_s = time.monotonic() - began
        report = check_history(self.history.events, complete=["A", "B"])
        outcome.sent, outcome.acknowledged = report.sent, report.acknowledged
        outcome.polled, outcome.unmirrored = report.polled, report.unmirrored
        outcome.anomalies = report.anomalies_total
        return outcome, report

    def delete(self) -> None:
        """Delete the mirrors of the cycle."""
        for mirror in (self.mirror, self.back):
            mirror.delete()

    @property
    def mirror(self) -> NodeMirror:
        """The mirror from the first cluster to the second."""
        return self._mirror(self.first, self.second, self._name)

    @property
    def back(self) -> NodeMirror:
        """The mirror back."""
        return self._mirror(self.second, self.first, reverse_name(self._name))

    def _mirror(self, source: Side, destination: Side, name: str) -> NodeMirror:
        mirror = NodeMirror(
            destination.nodes[-1], source.proxy.bootstrap, destination.proxy.bootstrap, name=name
        )
        mirror.document["filters"]["topics.include"] = [f"{self._name}\\..*"]
        return mirror

    def _begin(self) -> None:
        for topic, partitions in self.topics.items():
            create_topic(self.first.bootstrap, topic, partitions, _CONFIGS)
        self.mirror.create()
        self._produce(self.first)
        self.mirror.await_states(MirrorState.MIRRORING, *self.topics, partitions=_PARTITIONS, deadline_s=90)
        self._read(self.first)
        self._read(self.second)

    def _copy(self, fault: Fault, outcome: Outcome) -> None:
        roles = Roles(self.first, self.second)
        self._await_copied(roles)
        began = time.monotonic()
        fault.inject(roles)
        if fault.heals_itself:
            self._await_more_sent()
            self._await_copied(roles)
            outcome.seconds["copying"] = time.monotonic() - began
            fault.heal(roles)
        else:
            time.sleep(fault.hold_s)  # the fault lasts
            began = time.monotonic()
            fault.heal(roles)
            self._await_copied(roles)
            outcome.seconds["copying"] = time.monotonic() - began

    def _fail_over(self, fault: Fault, outcome: Outcome) -> None:
        roles = Roles(self.first, self.second)
        self._await_copied(roles)
        self._leave_a_tail(fault)
        began = time.monotonic()
        healer = self._break(fault, roles, at_once=True)
        runs = self._command(self.second, "stop", self._name, "--timeout", "60")
        self._produce(self.second)
        positions = self._positions()
        wait_until(
            lambda: all(end > positions[key] for key, end in self._ends(self.second).items()),
            _DEADLINE_S,
            what="written to at the new source",
        )
        outcome.seconds["failover"], outcome.runs["failover"] = time.monotonic() - began, runs
        for (topic, partition), offset in positions.items():
            self.history.stopped(self.first.name, self.second.name, topic, partition, offset)
        healer.result(_DEADLINE_S)
        if not self.first.cluster.is_alive():
            self.first.cluster.start_broker(1)
        # old clients go on at the old source, unmirrored
        wait_until(
            lambda: all(end > positions[key] for key, end in self._ends(self.first).items()),
            _DEADLINE_S,
            what="written to at the old source",
        )
        self._producers.pop(0).stop()

    def _leave_a_tail(self, fault: Fault) -> None:
        """End the source while it has records that are not copied."""
        self.first.proxy.stall()
        self._await_more_sent()
        if fault.ends_source:
            return
        self.first.cluster.kill_broker(1)

    def _fail_back(self, fault: Fault, outcome: Outcome) -> None:
        cut = self._positions()
        self._read_to_end(self.first)
        self._readers.pop(self.first.name).stop()
        roles = Roles(self.second, self.first)
        self.first.proxy.resume()
        began = time.monotonic()
        healer = self._break(fault, roles)
        more = ["--to-state-dir", self.first.state_dir, "--quarantine", str(self._quarantine), "--yes"]
        runs = self._command(self.second, "failback", self._name, *more, "--timeout", "60")
        outcome.seconds["failback"], outcome.runs["failback"] = time.monotonic() - began, runs
        healer.result(_DEADLINE_S)
        for topic in self.topics:
            self.history.rebuilt(self.first.name, topic)
        self._read(self.first)
        outcome.quarantined = self._check_quarantine(cut)
        self._await_copied(roles)

    def _switch_over(self, fault: Fault, outcome: Outcome) -> None:
        roles = Roles(self.second, self.first)
        self._producers[0].pause()
        began = time.monotonic()
        healer = self._break(fault, roles)
        more = ["--to-state-dir", self.second.state_dir, "--quiet", "0.5", "--yes", "--timeout", "60"]
        runs = self._command(self.first, "switchover", reverse_name(self._name), *more)
        outcome.seconds["switchover"], outcome.runs["switchover"] = time.monotonic() - began, runs
        healer.result(_DEADLINE_S)
        self._producers.pop().stop()
        self._produce(self.first)

    def _end(self) -> None:
        roles = Roles(self.first, self.second)
        self._await_more_sent()
        self._producers.pop().stop()
        self._await_copied(roles)
        for side in (self.first, self.second):
            self._read_to_end(side)
        self.mirror.compare(*self.topics)

    # faults and commands

    def _break(self, fault: Fault, roles: Roles, *, at_once: bool = False) -> "Future[None]":
        """Let a fault happen, now or some time after now, and end; the answer says when it has ended."""
        delay_s = self._rng.uniform(0.5, 4.0)

        def hold() -> None:
            time.sleep(fault.hold_s)  # the fault lasts
            fault.heal(roles)

        def work() -> None:
            time.sleep(delay_s)  # where the command is then is what differs
            fault.inject(roles)
            hold()

        if at_once:
            fault.inject(roles)
        with_one_thread = ThreadPoolExecutor(1, thread_name_prefix="fault")
        future = with_one_thread.submit(hold if at_once else work)
        with_one_thread.shutdown(wait=False)
        self._healer = future
        return future

    def _command(self, side: Side, *arguments: str) -> int:
        """Run a command until it has succeeded; how often it was run."""
        command = [
            sys.executable,
            "-m",
            "kmirror_dagster.cli.main",
            "--state-dir",
            side.state_dir,
            *arguments,
        ]
        deadline = time.monotonic() + _DEADLINE_S
        runs = 0
        said = self._home / "commands.log"
        while True:
            runs += 1
            with said.open("a") as log:
                print(f"--- {time.strftime('%X')} {arguments}", file=log, flush=True)
                done = subprocess.run(
                    command, stdout=log, stderr=log, stdin=subprocess.DEVNULL, timeout=_COMMAND_S, check=False
                )
            if done.returncode == 0:
                return runs
            if self._healer is not None and self._healer.done():
                self._healer.result()  # what cannot be put right again is no fault of the command
            assert time.monotonic() < deadline, f"{arguments}: {said.read_text()[-3000:]}"

    # clients

    def _produce(self, side: Side) -> None:
        client = SteadyProducer(
            settings_of(side),
            self.history,
            cluster=side.name,
            name=unique_name(f"p{side.name}"),
            topics=self.topics,
            rate=_RATE,
        )
        client.start()
        self._producers.append(client)

    def _read(self, side: Side) -> None:
        name = unique_name(f"c{side.name}")
        client = SteadyReader(
            settings_of(side), self.history, cluster=side.name, name=name, topics=self.topics
        )
        client.start()
        self._readers[side.name] = client

    def _stop_clients(self) -> None:
        clients = [*self._producers, *self._readers.values()]
        self._producers.clear()
        self._readers.clear()
        for client in clients:
            client.stop()

    def _await_more_sent(self) -> None:
        """Let about a second of records be sent."""
        client = self._producers[-1]
        target = client.sent + int(_RATE)
        wait_until(lambda: client.sent >= target, _DEADLINE_S, what="more records")

    # logs

    def _ends(self, side: Side) -> dict[tuple[str, int], int]:
        """Ends of all logs of a side, once all can be read."""
        found: dict[tuple[str, int], int] = {}
        for topic, partitions in self.topics.items():
            read = wait_until(
                lambda topic=topic, partitions=partitions: (
                    read if len(read := ranges(side.bootstrap, topic)) == partitions else None
                ),
                _DEADLINE_S,
                what=f"{topic} can be read at {side.name}",
            )
            found |= {(topic, number): end for number, (_, end) in read.items()}
        return found

    def _await_copied(self, roles: Roles) -> None:
        """Wait until all that the source has now is at the destination."""
        wanted = self._ends(roles.source)
        wait_until(
            lambda: all(self._ends(roles.destination)[key] >= end for key, end in wanted.items()),
            _DEADLINE_S,
            what=f"copied from {roles.source.name} to {roles.destination.name}",
        )

    def _read_to_end(self, side: Side) -> None:
        reader, ends = self._readers[side.name], self._ends(side)

        def reached() -> bool:
            reader.check()
            return all(reader.position(*key) >= end for key, end in ends.items())

        wait_until(reached, _DEADLINE_S, what=f"{side.name} read to its end")

    def _positions(self) -> dict[tuple[str, int], int]:
        """Last mirror positions of the stopped mirror."""
        statuses = self.mirror.partitions()
        assert all(status.last_mirror_offset is not None for status in statuses), statuses
        return {(s.topic, s.partition): s.last_mirror_offset or 0 for s in statuses}

    def _check_quarantine(self, cut: Mapping[tuple[str, int], int]) -> int:
        """All that was acknowledged at the old source and never mirrored has to be in quarantine."""
        stored = self.second.nodes[-1].client.recovery(self._name)
        assert stored is not None
        values: set[str] = set()
        for tail in stored.document["saved"]:
            values |= {record["value"].decode() for record in read_tail(Path(tail["file"]))}
        missing = {
            event.value
            for event in self.history.events
            if isinstance(event, Ack)
            and event.cluster == self.first.name
            and event.offset is not None
            and event.offset >= cut[event.topic, event.partition]
        } - values
        assert not missing, f"{len(missing)} divergent records are not in quarantine: {sorted(missing)[:5]}"
        assert values
        return len(values)


def settings_of(side: Side) -> ClusterSettings:
    """For clients that no line fault hits."""
    return ClusterSettings.model_validate({"bootstrap.servers": side.bootstrap})


def run_campaign(first: Side, second: Side, home: Path, faults: Mapping[str, Fault], *, seed: int) -> Outcome:
    """One cycle with a fault for each phase; any anomaly fails the test."""
    campaign = Campaign(first, second, home, seed=seed)
    try:
        outcome, report = campaign.run(faults)
        assert report.ok, (report.anomalies_by_kind, report.anomalies[:5])
        assert report.unmirrored > 0
    finally:
        for side in (first, second):
            mend(side)
        campaign.delete()
    return outcome

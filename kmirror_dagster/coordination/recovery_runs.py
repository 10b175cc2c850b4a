"""Runs of failback and switchover, step by step, as the command line and Dagster start them.

How far one is stands in the state topic, so it does not matter who began it and who goes on.
"""

import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from kmirror_dagster.coordination.client import NodeClient
from kmirror_dagster.coordination.recovery_nodes import (
    NodeJournal,
    NodeMirrors,
    NodeSwitch,
    exact_patterns,
    stopped_positions,
)
from kmirror_dagster.errors import IllegalTransitionError, KmirrorError, UsageError
from kmirror_dagster.lifecycle import DesiredState, MirrorState
from kmirror_dagster.records import RecoveryRecord
from kmirror_dagster.recovery import failback, switchover
from kmirror_dagster.recovery.failback import Failback, FailbackState, FailbackStep
from kmirror_dagster.recovery.failback_look import FailbackWish, plan_failback, reverse_name
from kmirror_dagster.recovery.formats import QuarantineFormat
from kmirror_dagster.recovery.switchover import Switchover, SwitchoverState, SwitchoverStep
from kmirror_dagster.settings import MirrorSettings, mirror_from_document, name_matcher

Tell = Callable[[str, int, int | None], None]


@dataclass(frozen=True)
class WayBack:
    """What is wanted of the mirror back.

    Attributes:
        name: of it; None for the usual one.
        quarantine, quarantine_format: where tails go.
    """

    quarantine: Path
    quarantine_format: QuarantineFormat = QuarantineFormat.JSONL
    name: str | None = None


def stored_recovery(client: NodeClient, mirror: str, operation: str) -> RecoveryRecord | None:
    """What is stored of a mirror's last recovery.

    Raises:
        IllegalTransitionError: when another operation is under way.
    """
    stored = client.recovery(mirror)
    if stored is not None and not stored.finished and stored.operation != operation:
        raise IllegalTransitionError(
            f"mirror {mirror!r}: a {stored.operation} is under way (step {stored.step}): end that first"
        )
    return stored


def settings_at(client: NodeClient, mirror: str) -> MirrorSettings:
    """Settings of a mirror, its secrets taken from this process's environment."""
    return mirror_from_document(client.document(mirror), name=f"mirror {mirror!r}")


def is_failed_back(
    client: NodeClient, mirror: str, stored: RecoveryRecord | None, patterns: list[str] | None
) -> bool:
    """Whether a stored failback has done it for these topics already.

    Raises:
        UsageError: when a topic is not stopped that would be mirrored back and forth.
    """
    positions, not_stopped = stopped_positions(client, mirror, patterns)
    if not_stopped and patterns is None:
        raise UsageError(
            f"mirror {mirror}: {', '.join(not_stopped)} is not stopped: a mirror back would make a loop of it; stop "
            "it too, or name the topics to fail back (--topics)"
        )
    if stored is None or stored.operation != failback.OPERATION or stored.step != FailbackStep.DONE.value:
        return False
    last = FailbackState.model_validate(stored.document).plan
    back = {topic.topic for topic in last.topics}
    return all(p.topic in back and p.recorded_ms <= last.stopped_ms for p in positions)


def planned_failback(
    client: NodeClient,
    mirror: str,
    stored: RecoveryRecord | None,
    patterns: list[str] | None,
    way: WayBack,
) -> RecoveryRecord:
    """A first record of a failback, with its plan; nothing is stored yet.

    Raises:
        KmirrorError: when clusters cannot be compared.
    """
    state = plan_failback(_wish(client, mirror, patterns, way, everything=patterns is None))
    return RecoveryRecord(
        mirror=mirror,
        operation=failback.OPERATION,
        operation_id=uuid.uuid4().hex,
        step=FailbackStep.SAVE.value,
        document=state.model_dump(mode="json"),
        started_ms=_now_ms(),
        revision=stored.revision if stored else 0,
    )


def _wish(
    client: NodeClient, mirror: str, patterns: list[str] | None, way: WayBack, *, everything: bool
) -> FailbackWish:
    positions, _ = stopped_positions(client, mirror, patterns)
    return FailbackWish(
        settings=settings_at(client, mirror),
        document=client.document(mirror),
        positions=positions,
        source_cluster_id=client.mirror(mirror).source_cluster_id,
        everything=everything,
        reverse=way.name or reverse_name(mirror),
        quarantine=way.quarantine,
        quarantine_format=way.quarantine_format,
    )


def carry_out(
    client: NodeClient, other: NodeClient, record: RecoveryRecord, *, follow_s: float, tell: Tell
) -> RecoveryRecord:
    """Do what is left of a failback; the finished record.

    Raises:
        StaleEpochError: when somebody else goes on with it.
        KmirrorError: when a step does not end; run it again once the reason is gone.
    """
    settings = settings_at(client, record.mirror)
    return Failback(
        settings.source,
        NodeJournal(client),
        NodeMirrors(other),
        new_source=settings.destination,
        tell=tell,
        follow_s=follow_s,
    ).run(record)


def begun_switchover(
    client: NodeClient,
    mirror: str,
    stored: RecoveryRecord | None,
    patterns: list[str] | None,
    *,
    quiet_s: float,
    drain_s: float,
) -> RecoveryRecord:
    """A first record of a switchover; nothing is stored yet.

    Raises:
        UsageError: when a topic is not MIRRORING, or none is meant.
    """
    try:
        selects = name_matcher(patterns)
    except ValueError as error:
        raise UsageError(str(error)) from error
    chosen: dict[str, set[MirrorState | None]] = {}
    for status in client.iter_partitions(mirror):
        if selects(status.topic) and status.desired is not DesiredState.STOPPED:
            chosen.setdefault(status.topic, set()).add(status.state)
    unready = sorted(topic for topic, states in chosen.items() if states != {MirrorState.MIRRORING})
    if unready or not chosen:
        what = f"{', '.join(unready[:5])} is not MIRRORING" if unready else "no topic is mirrored"
        raise UsageError(f"mirror {mirror}: {what}: nothing to switch over; see 'kmirror describe {mirror}'")
    translated = sorted({told.topic for told in client.offsets(mirror)} & chosen.keys())
    if translated:
        raise UsageError(
            f"mirror {mirror}: offsets of {', '.join(translated[:5])} are translated: it cannot be mirrored back as "
            "the same log; leave it out (--topics), or stop it and fail back, which copies it anew"
        )
    state = SwitchoverState(topics=sorted(chosen), quiet_s=quiet_s, drain_s=drain_s)
    return RecoveryRecord(
        mirror=mirror,
        operation=switchover.OPERATION,
        operation_id=uuid.uuid4().hex,
        step=SwitchoverStep.FENCE.value,
        document=state.model_dump(mode="json"),
        started_ms=_now_ms(),
        revision=stored.revision if stored else 0,
    )


def until_stopped(
    client: NodeClient, record: RecoveryRecord, *, wait: Callable[[Sequence[str]], None], tell: Tell
) -> tuple[RecoveryRecord, float | None]:
    """Carry out what is left of a switchover until the mirror is stopped.

    Args:
        client: a node.
        record: of the switchover.
        wait: waits until topics are stopped.
        tell: told what is being done.

    Returns:
        The record, and for how many seconds writers were shut out (None when not known).
    """
    if record.step not in {step.value for step in SwitchoverStep}:
        return record, None  # on the way back already
    switch = NodeSwitch(client, record.mirror, wait=wait)
    record = Switchover(settings_at(client, record.mirror), NodeJournal(client), switch, tell=tell).run(
        record
    )
    state = SwitchoverState.model_validate(record.document)
    return record, (state.stopped_ms - state.fenced_ms) / 1000


def planned_way_back(client: NodeClient, record: RecoveryRecord, way: WayBack) -> RecoveryRecord:
    """Turn a switchover whose mirror is stopped into its way back: nothing may have to go to quarantine.

    Raises:
        KmirrorError: when something was written at the source after it had come to rest; that ends it.
    """
    if record.step != SwitchoverStep.STOPPED.value:
        return record
    topics = SwitchoverState.model_validate(record.document).topics
    everything = len(client.mirror(record.mirror).topics) == len(topics)
    state = plan_failback(_wish(client, record.mirror, exact_patterns(topics), way, everything=everything))
    if state.plan.tail:
        update = {"finished": True, "error": "written to after the drain"}
        client.record_recovery(record.model_copy(update=update))
        raise KmirrorError(
            f"{record.mirror}: {state.plan.tail} offsets were written at the source after it had come to rest, the "
            f"mirror is stopped: see 'kmirror manifest {record.mirror}', then 'kmirror failback {record.mirror}'"
        )
    return record.model_copy(
        update={"step": FailbackStep.SAVE.value, "document": state.model_dump(mode="json")}
    )


def _now_ms() -> int:
    return time.time_ns() // 1_000_000

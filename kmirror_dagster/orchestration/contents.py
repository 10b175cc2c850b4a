"""Contents verified: the certificate of a mirror as a check, as figures to plot, and gone on with by runs."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import dagster as dg

from kmirror_dagster.broker.deadlines import Deadline
from kmirror_dagster.coordination.state_directory import default_state_dir
from kmirror_dagster.lifecycle import DesiredState, MirrorState
from kmirror_dagster.orchestration.figures import MAX_TABLE_ROWS, Metadata, seconds
from kmirror_dagster.orchestration.keys import PartitionKey
from kmirror_dagster.orchestration.node_api import NodeApi
from kmirror_dagster.orchestration.resources import KMirrorResource
from kmirror_dagster.orchestration.views import MirrorView
from kmirror_dagster.settings import MirrorSettings, load_mirror, mirror_from_document, name_matcher

if TYPE_CHECKING:
    from kmirror_dagster.verification.certificate import Certificate
    from kmirror_dagster.verification.certifier import WindowReport

CONTENTS = "contents_verified"

# A run that people wait for: what is left is read by the next one.
CERTIFY_BUDGET_S = 600.0
_CALL_BUDGET_S = 30.0
_LISTED = 3

_TABLE_COLUMNS = (
    ("partition", "string"),
    ("verified_from", "int"),
    ("verified_to", "int"),
    ("records", "int"),
    ("unread", "int"),
    ("digest", "string"),
    ("found", "string"),
)


@dataclass(frozen=True)
class Subject:
    """What is read of a mirror: settings with their secrets, topics, last mirror positions of stopped ones."""

    settings: MirrorSettings
    topics: list[str]
    ceilings: Mapping[tuple[str, int], int]


def subject_of(
    resource: KMirrorResource, view: MirrorView, patterns: list[str], *, with_stopped: bool = False
) -> Subject:
    """Ask a node which topics to read.

    Args:
        resource: how to reach it.
        view: the mirror.
        patterns: of topics; empty: all of them.
        with_stopped: stopped topics too, up to their last mirror positions.

    Raises:
        KmirrorError: when it cannot be asked, or the settings cannot be read.
    """
    with resource.connect(budget_s=_CALL_BUDGET_S) as node:
        return _subject(node, view, name_matcher(patterns or None), with_stopped=with_stopped)


def _subject(
    node: NodeApi, view: MirrorView, is_wanted: Callable[[str], bool], *, with_stopped: bool
) -> Subject:
    settings = settings_of(node, view)
    topics = [
        topic.topic
        for topic in node.mirror(view.mirror).topics
        if (with_stopped or topic.desired is not DesiredState.STOPPED) and is_wanted(topic.topic)
    ]
    wanted = set(topics)
    ceilings: dict[tuple[str, int], int] = {}
    if with_stopped:
        for status in node.iter_partitions(view.mirror, state=MirrorState.STOPPED):
            if status.topic in wanted and status.last_mirror_offset is not None:
                ceilings[status.topic, status.partition] = status.last_mirror_offset
    return Subject(settings, topics, ceilings)


def settings_of(node: NodeApi, view: MirrorView) -> MirrorSettings:
    """Settings of a mirror with their secrets: of its document where the code location has it, else the node's.

    Raises:
        SettingsError: when they cannot be read with this process's environment.
    """
    document = view.target.document
    return load_mirror(document) if document else mirror_from_document(node.document(view.mirror))


def certificate_path(resource: KMirrorResource, mirror: str) -> Path:
    """Where a mirror's certificate is kept: with the node's state directory, as `kmirror certify` does."""
    return state_directory(resource) / "certificates" / f"{mirror}.json"


def state_directory(resource: KMirrorResource) -> Path:
    """Where certificates, reports and quarantine are kept unless told otherwise."""
    return Path(resource.state_dir) if resource.state_dir else default_state_dir()


def go_on(subject: Subject, path: Path, *, budget_s: float, restart: bool = False) -> "Certificate":
    """Read on for at most `budget_s` seconds; the certificate as it is then.

    Raises:
        UsageError: when another process goes on with it.
        KmirrorError: when a cluster cannot be read.
    """
    # both Kafka clients come with it, which loading of definitions need not wait for
    from kmirror_dagster.verification.both_sides import BothSides
    from kmirror_dagster.verification.certificate import CertificateStore
    from kmirror_dagster.verification.certifier import certify

    store, deadline = CertificateStore(path), Deadline(budget_s)
    with store.locked(), BothSides(subject.settings) as sides:
        return certify(
            sides,
            store,
            subject.topics,
            ceilings=subject.ceilings,
            restart=restart,
            go_on=lambda: deadline.remaining() > 0,
        )


def read_again(subject: Subject, *, since_ms: int | None, until_ms: int | None) -> "WindowReport":
    """Read a window of time again on both sides.

    Raises:
        KmirrorError: when a cluster cannot be read.
    """
    from kmirror_dagster.verification.both_sides import BothSides
    from kmirror_dagster.verification.certifier import recheck

    with BothSides(subject.settings) as sides:
        return recheck(sides, subject.topics, since_ms=since_ms, until_ms=until_ms, ceilings=subject.ceilings)


def verdict(certificate: "Certificate") -> str:
    """What a certificate says, in one line."""
    wrong = [f"{topic}: {problem}" for topic, problem in sorted(certificate.problems.items())]
    for each in certificate.faults:
        found = each.problem or each.differing[0].examples[0]
        wrong.append(f"{PartitionKey(each.topic, each.partition)}: {found}")
    if wrong:
        left = f" (and {len(wrong) - _LISTED} more)" if len(wrong) > _LISTED else ""
        return f"not the same: {'; '.join(wrong[:_LISTED])}{left}"
    unread = f", {certificate.unchecked} offsets not read yet" if certificate.unchecked else ""
    return f"{certificate.records} records of {len(certificate.partitions)} partitions are the same{unread}"


def contents_metadata(certificate: "Certificate") -> dict[str, dg.MetadataValue]:
    """Figures of a certificate, and its partitions, those that differ first."""
    shown = sorted(certificate.partitions, key=lambda each: (each.ok, each.key))[:MAX_TABLE_ROWS]
    rows = [
        dg.TableRecord(
            {
                "partition": str(PartitionKey(each.topic, each.partition)),
                "verified_from": each.verified_from,
                "verified_to": each.verified_to,
                "records": max(each.records.values(), default=0),
                "unread": each.unchecked,
                "digest": next(iter(each.digests.values()), "")[:16],
                "found": each.problem or (each.differing[0].examples[0] if each.differing else "the same"),
            }
        )
        for each in shown
    ]
    schema = dg.TableSchema(columns=[dg.TableColumn(name, kind) for name, kind in _TABLE_COLUMNS])
    return {
        "certified_records": dg.MetadataValue.int(certificate.records),
        "certified_partitions": dg.MetadataValue.int(len(certificate.partitions)),
        "certified_offsets_unread": dg.MetadataValue.int(certificate.unchecked),
        "certified_partitions_differing": dg.MetadataValue.int(
            len(certificate.faults) + len(certificate.problems)
        ),
        "certificate": dg.MetadataValue.table(records=rows, schema=schema),
    }


def window_metadata(report: "WindowReport") -> Metadata:
    """Figures of a window that was read again."""
    figures = contents_metadata(report.certificate)
    figures["verify_seconds"] = seconds(report.duration_s)
    figures["partitions_behind"] = dg.MetadataValue.int(len(report.behind))
    return figures

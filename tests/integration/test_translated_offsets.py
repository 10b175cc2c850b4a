"""Translated offsets on real brokers: long stretches left out, exactly mapped, found again by the next owner."""

import asyncio
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from kmirror_dagster.broker import batches, codecs
from kmirror_dagster.broker.batches import RawRecord
from kmirror_dagster.coordination.models import VerbRequest
from kmirror_dagster.errors import ReplicationError
from kmirror_dagster.lifecycle import MirrorState
from kmirror_dagster.offset_map import OffsetMap, Run
from kmirror_dagster.settings import PolicySettings
from tests.conftest import Clusters
from tests.helpers.command_line import kmirror
from tests.helpers.comparison import log_ranges
from tests.helpers.copying import Copying, mirror_settings, run
from tests.helpers.crash_points import HOW, Point, side_by_side
from tests.helpers.crash_scenarios import BULK_HOLES
from tests.helpers.crashing import copy_with_fault
from tests.helpers.histories import (
    LONG,
    NOW_MS,
    RawWriter,
    alter_topic,
    raw_batch_records,
    wait_until_cleaned,
)
from tests.helpers.kafka import (
    Record,
    commit_offsets,
    committed_offsets,
    create_topic,
    delete_records,
    produce,
)
from tests.helpers.nodes import NodeMirror, NodeProcess
from tests.helpers.proxy import Action, Api
from tests.helpers.translated import KeptOffsets, translated_differences
from tests.helpers.waiting import unique_name, wait_until

pytestmark = pytest.mark.integration

_CONFIGS = {"retention.ms": "-1", "message.timestamp.after.max.ms": LONG}
_TRANSLATED = PolicySettings(offsets="translated", max_hole_records=100)
_ROUNDS = 25
_PARTITIONS = 34


@dataclass(frozen=True)
class Stretched:
    """Compacted topics of the source: `long` has a few long holes in many partitions, `often` many in one."""

    long: str
    often: str


async def _write_stretches(raw: RawWriter, topic: str, partitions: Sequence[int], rounds: int) -> None:
    """In each round 300 records of one key, of which the last will stay, and some that all stay."""
    for number in range(rounds):
        payloads = [batches.encode_payload(b"round-%d" % number, b"%d" % each) for each in range(300)]
        same = [RawRecord(index, NOW_MS, payload) for index, payload in enumerate(payloads)]
        await raw.plain(topic, dict.fromkeys(partitions, same), codecs.LZ4)
        others = raw_batch_records(number, 20 + number, keys=1_000_000)
        await raw.plain(topic, dict.fromkeys(partitions, others), codecs.LZ4)


@pytest.fixture(scope="module")
def stretched(clusters: Clusters) -> Stretched:
    """Topics with holes of more than 100 offsets, cleaned."""
    topics = Stretched(unique_name("stretched"), unique_name("often"))
    bootstrap = clusters.source.bootstrap
    create_topic(bootstrap, topics.long, _PARTITIONS, _CONFIGS | BULK_HOLES.configs)
    create_topic(bootstrap, topics.often, 1, _CONFIGS | BULK_HOLES.configs)

    async def write() -> None:
        raw = RawWriter(bootstrap, topics.long)
        for topic, partitions, rounds in (
            (topics.long, range(_PARTITIONS), 3),
            (topics.often, [0], _ROUNDS),
        ):
            await _write_stretches(raw, topic, partitions, rounds)
            await asyncio.to_thread(alter_topic, bootstrap, topic, {"internal.segment.bytes": "1000"})
            await raw.plain(topic, {p: raw_batch_records(4, 1, keys=5) for p in partitions})
        for topic, count in ((topics.long, _PARTITIONS), (topics.often, 1)):
            await asyncio.to_thread(wait_until_cleaned, clusters.source, topic, range(count))
            rest = {"cleanup.policy": "delete", "internal.segment.bytes": "2000000"}
            await asyncio.to_thread(alter_topic, bootstrap, topic, rest)
        await raw.close()

    run(write)
    create_topic(clusters.destination.bootstrap, topics.long, _PARTITIONS, _CONFIGS)
    return topics


def _settings(clusters: Clusters, policies: PolicySettings = _TRANSLATED):
    return mirror_settings(
        clusters.source.bootstrap, clusters.destination.bootstrap, unique_name("translated"), policies
    )


def _differences(clusters: Clusters, topic: str, maps: dict[int, OffsetMap]) -> dict[int, str]:
    return translated_differences(clusters.source.bootstrap, clusters.destination.bootstrap, topic, maps)


async def _copied(copying: Copying, topic: str, partition: int, end: int) -> None:
    """Wait until a partition has all up to a source offset."""

    def reached() -> bool:
        progress = copying.link.progress(topic, partition)
        return progress is not None and progress.source_end >= end and progress.lag_records == 0

    await copying.until(reached)


def test_long_stretches_are_left_out_and_mapped(clusters: Clusters, stretched: Stretched) -> None:
    """Where exact offsets fail naming the alternative, translated ones are exact by their map, for each owner."""
    topic, partition = stretched.long, _PARTITIONS - 1
    end = log_ranges(clusters.source.bootstrap, topic, [partition])[partition][1]
    kept = KeptOffsets()

    async def exact() -> ReplicationError:
        copying = Copying(_settings(clusters, PolicySettings(max_hole_records=100)))
        try:
            await copying.begin(topic, partition)
            with pytest.raises(ReplicationError, match=r"policies\.offsets to translated") as caught:
                await _copied(copying, topic, partition, end)
            return caught.value
        finally:
            await copying.link.close()

    async def translated(owner: int, end: int) -> None:
        copying = Copying(_settings(clusters), owner=owner)
        copying.offsets[topic, partition] = kept
        try:
            await copying.begin(topic, partition)
            await _copied(copying, topic, partition, end)
        finally:
            await copying.link.close()

    async def more() -> None:
        raw = RawWriter(clusters.source.bootstrap, topic)
        await raw.plain(topic, {partition: raw_batch_records(7, 50)})
        await raw.transactional(1, topic, {partition: raw_batch_records(8, 30)})
        await raw.end(1, commit=False)
        await raw.settled(topic, [partition])
        await raw.close()

    assert not run(exact).retriable
    run(lambda: translated(2, end))
    assert len(kept.offsets) >= 2
    assert _differences(clusters, topic, {partition: kept.offsets}) == {}
    saves = kept.saves
    run(more)
    run(lambda: translated(3, end + 81))
    assert kept.saves == saves
    assert _differences(clusters, topic, {partition: kept.offsets}) == {}


def test_a_mirror_hit_anywhere_finds_its_map_again(clusters: Clusters, stretched: Stretched) -> None:
    """Killed or cut off at each write, and right before and after a map is stored: exact afterwards."""
    topic = stretched.long
    ends = log_ranges(clusters.source.bootstrap, topic, range(_PARTITIONS))
    points = [Point(Api.PRODUCE, nth, *how) for nth in (1, 2, 3, 4) for how in HOW]
    crashes = [KeptOffsets(crash_at=nth, after=after) for nth in (1, 2, 3) for after in (False, True)]
    kept = {number: KeptOffsets() for number in range(len(points))}
    kept |= dict(enumerate(crashes, start=len(points)))
    hits: dict[int, bool] = {}

    async def one(partition: int) -> None:
        mirror = f"{topic}-{partition}"
        hit, is_crash = kept[partition].hit, True
        if partition < len(points):
            point = points[partition]
            hit = clusters.destination_proxy.arm(point.fault(f"{mirror}-first")).hit
            is_crash = point.action is Action.CRASH
        await copy_with_fault(
            clusters,
            mirror,
            (topic, partition),
            ends[partition][1],
            hit,
            crashes=is_crash,
            policies=_TRANSLATED,
            kept=kept[partition],
        )
        hits[partition] = hit.is_set()

    clusters.destination_proxy.reset()
    run(lambda: side_by_side([one(partition) for partition in kept]))
    maps = {partition: each.offsets for partition, each in kept.items()}
    assert _differences(clusters, topic, maps) == {}
    assert all(len(each) >= 2 for each in maps.values())
    assert sum(hits.values()) >= 0.8 * len(hits)


def test_a_log_that_begins_far_up_begins_at_the_destinations_start(clusters: Clusters) -> None:
    """A log start above the limit is not filled up to: the copy begins at 0, also for the next owner."""
    topic = unique_name("far")
    create_topic(clusters.source.bootstrap, topic, 1, _CONFIGS)
    create_topic(clusters.destination.bootstrap, topic, 1, _CONFIGS)
    kept = KeptOffsets()

    async def main() -> None:
        raw = RawWriter(clusters.source.bootstrap, topic)
        for seed in range(3):
            await raw.plain(topic, {0: raw_batch_records(seed, 500)})
        await raw.close()
        await asyncio.to_thread(delete_records, clusters.source.bootstrap, topic, 1_234)
        for owner in (1, 2):
            copying = Copying(_settings(clusters), owner=owner)
            copying.offsets[topic, 0] = kept
            try:
                await copying.begin(topic)
                await _copied(copying, topic, 0, 1_500)
            finally:
                await copying.link.close()

    run(main)
    assert kept.offsets == OffsetMap((Run(0, 1_234),))
    assert log_ranges(clusters.destination.bootstrap, topic, [0]) == {0: (0, 266)}
    assert _differences(clusters, topic, {0: kept.offsets}) == {}


# --- a whole mirror


@pytest.fixture
def translating(clusters: Clusters, stretched: Stretched, tmp_path: Path) -> Iterator[NodeMirror]:
    """A mirror of `often` on a node of its own, not yet created."""
    node = NodeProcess(tmp_path / "state", clusters.destination.bootstrap)
    mirror = NodeMirror(
        node,
        clusters.source.bootstrap,
        clusters.destination.bootstrap,
        include=[stretched.often],
        policies={"offsets": "translated", "max_hole_records": 100},
        filters={"topic.properties.exclude": [r"internal\..*", "min.cleanable.*"]},
    )
    node.start()
    try:
        mirror.create()
        yield mirror
    finally:
        mirror.delete()
        node.stop()


def _stored(mirror: NodeMirror, topic: str) -> OffsetMap:
    found = mirror.node.client.offsets_of(mirror.name, topic, 0)
    return OffsetMap(tuple(Run(*each) for each in found.runs))


def _told(mirror: NodeMirror, *arguments: str) -> dict[str, object]:
    done = kmirror("--state-dir", str(mirror.node.state_dir), "offsets", mirror.name, *arguments, "--json")
    assert done.exit_code == 0, done.output
    return json.loads(done.stdout)


@pytest.mark.timeout(300)
def test_a_node_killed_in_mid_copy_goes_on_by_its_stored_map(
    clusters: Clusters, stretched: Stretched, translating: NodeMirror
) -> None:
    """SIGKILL amid many runs, twice: exact; groups, verify, the manifest and `kmirror offsets` use the map."""
    mirror, topic = translating, stretched.often
    end = log_ranges(mirror.source, topic, [0])[0][1]
    reached: list[int] = []

    def copied() -> int:
        return log_ranges(mirror.destination, topic, [0])[0][1]

    mirror.await_states(MirrorState.MIRRORING, topic)
    for share in (0.2, 0.5):
        wait_until(lambda s=share: copied() > s * 30 * _ROUNDS, 60, what="copying", poll_s=0.001)
        mirror.node.kill()
        reached.append(copied())
        mirror.node.start()
    wait_until(lambda: _stored(mirror, topic).to_source(copied()) == end, 60, what="all of it")
    offsets = _stored(mirror, topic)
    assert len(offsets) >= _ROUNDS // 2
    assert _differences(clusters, topic, {0: offsets}) == {}
    # groups: at a record, in what was left out, at the end
    gap = offsets.runs[3].source - 5
    groups = {
        f"{mirror.name}-record": offsets.runs[3].source + 2,
        f"{mirror.name}-gap": gap,
        f"{mirror.name}-end": end,
    }
    for group, offset in groups.items():
        commit_offsets(mirror.source, group, [(topic, 0, offset)])
    mirror.node.client.refresh(mirror.name)
    for group, offset in groups.items():
        assert committed_offsets(mirror.destination, group) == {(topic, 0): offsets.to_destination(offset)}
    told = _told(mirror, f"{topic}/0", str(gap))
    assert (told["destination"], told["leftOut"]) == (offsets.runs[3].destination, True)
    told = _told(mirror, f"{topic}/0", str(offsets.runs[3].destination), "--reverse")
    assert (told["source"], told["offsets"]) == (offsets.runs[3].source, "translated")
    # proof, and where it ended
    report = mirror.compare(topic, groups=True)
    assert report.groups == len(groups)
    mirror.node.client.verb(mirror.name, "stop", VerbRequest())
    mirror.await_states(MirrorState.STOPPED, topic)
    (status,) = mirror.partitions(topic)
    assert (status.last_mirror_offset, status.last_mirror_source_offset) == (offsets.to_destination(end), end)
    produce(mirror.source, topic, [Record(b"after the stop")] * 3)
    done = kmirror("--state-dir", str(mirror.node.state_dir), "manifest", mirror.name, "--json")
    assert done.exit_code == 0, done.output
    (loss,) = json.loads(done.stdout)["partitions"]
    assert (loss["first_offset"], loss["records"]) == (end, 3)

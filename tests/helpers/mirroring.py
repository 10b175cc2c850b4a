"""Mirroring a whole random history, and comparing afterwards."""

import asyncio
from collections.abc import Sequence

from tests.conftest import Clusters
from tests.helpers.comparison import differences
from tests.helpers.copying import Copying, mirror_settings, run
from tests.helpers.histories import History, HistoryWriter, RawWriter
from tests.helpers.kafka import create_topic
from tests.helpers.waiting import unique_name


def mirror_history(clusters: Clusters, history: History, *, compaction_s: float = 240.0) -> dict[int, str]:
    """Write a history to a topic of its own, mirror it stage by stage, and say what differs."""
    topic = unique_name("history")
    create_topic(clusters.source.bootstrap, topic, history.partitions, history.topic_configs)
    create_topic(clusters.destination.bootstrap, topic, history.partitions, history.mirror_configs)
    partitions = range(history.partitions)

    async def main() -> None:
        raw = RawWriter(clusters.source.bootstrap, topic)
        writer = HistoryWriter(history, clusters.source, topic, raw)
        copying = new_copying(1)
        try:
            for number, stage in enumerate(history.stages):
                await writer.write(stage)
                if history.keys and number == 0:
                    await writer.end_transactions()
                    await writer.compact(compaction_s)
                if number == len(history.stages) - 1:
                    await writer.end_transactions()
                if number and history.restarts:
                    await copying.link.close()
                    records = copying.records
                    copying = new_copying(number + 1)
                    copying.records = records
                for partition in partitions:
                    if (topic, partition) not in copying.link.running():
                        await copying.begin(topic, partition)
                await copying.caught_up(await stable_ends(raw, topic, partitions))
        finally:
            await copying.link.close()
            await raw.close()

    def new_copying(owner: int) -> Copying:
        settings = mirror_settings(clusters.source.bootstrap, clusters.destination.bootstrap, topic)
        return Copying(settings, owner=owner)

    run(main)
    return differences(clusters.source.bootstrap, clusters.destination.bootstrap, topic, partitions, raw=True)


async def stable_ends(raw: RawWriter, topic: str, partitions: Sequence[int]) -> dict[tuple[str, int], int]:
    """Last stable offsets: as far as a mirror can see while transactions are open."""
    await asyncio.sleep(0)
    wanted = [(topic, partition) for partition in partitions]
    found = await raw.cluster.list_offsets(wanted, -1, isolation=1)
    return {tp: found[tp].value() for tp in wanted}

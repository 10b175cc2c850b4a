"""Copying in a process of its own, to be killed, frozen and woken; run as a module.

What a node keeps in the state topic lies in files here: the record of a partition is written before it is copied, and
an owner that is not the newest one may not write, so that it ends with its first failure.
"""

import argparse
import asyncio
import os
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from kmirror_dagster.errors import ReplicationError
from kmirror_dagster.records import PartitionRecord
from tests.helpers.copying import Copying, mirror_settings
from tests.helpers.crash_scenarios import by_transactions


@dataclass
class CopierProcess:
    """A running one."""

    process: "subprocess.Popen[bytes]"

    @classmethod
    def start(
        cls,
        source: str,
        destination: str,
        mirror: str,
        topic: str,
        partitions: int,
        folder: Path,
        *,
        owner: int,
        bulk: bool = True,
    ) -> "CopierProcess":
        """Start copying the first partitions of a topic; records are kept in `folder`."""
        command = [sys.executable, "-m", "tests.helpers.copier_process", source, destination, mirror, topic]
        command += [str(partitions), str(folder), str(owner), str(int(bulk))]
        return cls(subprocess.Popen(command, cwd=Path(__file__).parents[2]))

    def kill(self) -> None:
        """SIGKILL, and wait."""
        self.process.kill()
        self.process.wait(10)

    def freeze(self) -> None:
        """SIGSTOP."""
        os.kill(self.process.pid, signal.SIGSTOP)

    def wake(self) -> None:
        """SIGCONT."""
        os.kill(self.process.pid, signal.SIGCONT)

    def __enter__(self) -> "CopierProcess":
        """Itself."""
        return self

    def __exit__(self, *_: object) -> None:
        """Never left running."""
        if self.process.poll() is None:
            self.kill()


def load(folder: Path, topic: str, partition: int) -> PartitionRecord | None:
    """The stored record of a partition."""
    path = folder / f"{topic}-{partition}.json"
    return PartitionRecord.model_validate_json(path.read_text()) if path.exists() else None


def take_lead(folder: Path, owner: int) -> None:
    """Become the only one that may write."""
    (folder / "owner").write_text(str(owner))


def leads(folder: Path, owner: int) -> bool:
    """Whether nobody took over."""
    return (folder / "owner").read_text() == str(owner)


def store(folder: Path, record: PartitionRecord) -> None:
    """Write a record in one step."""
    path = folder / f"{record.topic}-{record.partition}.json"
    fresh = path.with_suffix(f".{os.getpid()}.new")
    fresh.write_text(record.model_dump_json())
    fresh.replace(path)


async def keep_copying(copying: Copying, topic: str, partition: int, folder: Path) -> None:
    """Copy for as long as this is the owner; what time may heal is tried again, as a node does."""
    while leads(folder, copying.owner):
        failed = asyncio.Event()

        def fail(_: ReplicationError, failed: asyncio.Event = failed) -> None:
            failed.set()

        try:
            await copying.begin(
                topic,
                partition,
                load(folder, topic, partition),
                before_start=lambda record: store(folder, record),
                on_failure=fail,
            )
            await failed.wait()
            error = copying.failures[topic, partition]
        except ReplicationError as refused:
            error = refused
        if not error.retriable:
            raise error
        await asyncio.sleep(0.1)


async def main() -> None:
    """Copy until killed."""
    parser = argparse.ArgumentParser()
    for name in ("source", "destination", "mirror", "topic"):
        parser.add_argument(name)
    parser.add_argument("partitions", type=int)
    parser.add_argument("folder", type=Path)
    parser.add_argument("owner", type=int)
    parser.add_argument("bulk", type=int)
    given = parser.parse_args()
    take_lead(given.folder, given.owner)
    copying = Copying(mirror_settings(given.source, given.destination, given.mirror), owner=given.owner)
    if not given.bulk:
        by_transactions(copying)
    await asyncio.gather(
        *(keep_copying(copying, given.topic, p, given.folder) for p in range(given.partitions))
    )


if __name__ == "__main__":
    asyncio.run(main())

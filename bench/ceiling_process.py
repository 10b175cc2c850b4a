"""Writes a workload's batches from memory, by the wire code the product uses: what the destination can take."""

import asyncio
import json
import signal
import sys

from bench import source_data
from bench.workloads import Workload
from kmirror_dagster.replication.appender import MAX_IN_FLIGHT
from kmirror_dagster.settings import ClusterSettings


def main() -> int:
    """Entry point; the job is JSON in the first argument. Ends at SIGTERM."""
    job = json.loads(sys.argv[1])
    workload = Workload(**job["workload"])
    settings = ClusterSettings(bootstrap_servers=(job["destination"],))
    ready = source_data.prebuilt(workload)
    writing = source_data.write_batches(
        settings, job["topic"], ready, workload, lambda text: None, in_flight=MAX_IN_FLIGHT
    )
    asyncio.run(writing)
    signal.pause()
    return 0


if __name__ == "__main__":
    sys.exit(main())

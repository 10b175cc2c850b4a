"""What is measured, full size and quick."""

from dataclasses import dataclass, replace

PARTITIONS = 8


@dataclass(frozen=True)
class Workload:
    """One kind of data to mirror.

    Attributes:
        name: as on the command line.
        records: data records at the source.
        value_bytes: bytes of each record's value.
        batch_records: records of one batch; for `eos`: of one transaction, spread over all partitions.
        codec: compression of the batches.
        transactional: whether the records are written in transactions.
        delay_ms: one-way delay between source and mirror, by a TCP proxy; None: neither delay nor proxy.
        rate: records a second while measuring latency; 0: all are there before the mirror starts.
        warm_up_s: time at that rate before the measured records.
        kept: whether the data stays at the source for the next run that keeps its clusters.
        measures_ceiling: whether writing the same batches from memory is measured as well.
        sample_s: time between two samples of memory, where it is sampled.
    """

    name: str
    records: int
    value_bytes: int
    batch_records: int
    codec: str = "none"
    transactional: bool = False
    delay_ms: float | None = None
    rate: int = 0
    warm_up_s: float = 0.0
    kept: bool = True
    measures_ceiling: bool = False
    sample_s: float | None = None

    @property
    def topic(self) -> str:
        """Topic at the source; workloads of the same data share it."""
        kind = "bulk" if self.name == "wan" else self.name
        return f"bench-{kind}-{self.records}"

    @property
    def written(self) -> int:
        """Data records that are really there: whole rounds of batches over all partitions."""
        unit = self.batch_records * (1 if self.transactional else PARTITIONS)
        return self.records // unit * unit


FULL = {
    each.name: each
    for each in (
        # the most requests first: brokers compile for some minutes, which no mirror that runs for months sees
        Workload("tiny", 1_000_000, 100, 1),
        Workload("eos", 400_000, 1_000, 100, transactional=True),
        Workload("bulk", 2_000_000, 1_000, 64, codec="lz4", measures_ceiling=True),
        Workload("wan", 2_000_000, 1_000, 64, codec="lz4", delay_ms=50.0),
        Workload("latency", 30_000, 100, 1, rate=1_000, warm_up_s=15.0, kept=False),
        Workload("backlog", 10_000_000, 1_000, 64, codec="lz4", kept=False, sample_s=1.0),
    )
}
_QUICK_RECORDS = {
    "bulk": 500_000,
    "wan": 500_000,
    "tiny": 300_000,
    "eos": 100_000,
    "latency": 10_000,
    "backlog": 1_000_000,
}


def shortened(workload: Workload, records: int) -> Workload:
    """The same kind of data, less of it."""
    return replace(
        workload,
        records=records,
        warm_up_s=min(workload.warm_up_s, records / workload.rate) if workload.rate else 0.0,
        sample_s=workload.sample_s and 0.1,
    )


QUICK = {name: shortened(each, _QUICK_RECORDS[name]) for name, each in FULL.items()}

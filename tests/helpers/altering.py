"""Requests that change something at a cluster, counted where they pass: at a proxy in front of its broker."""

from tests.helpers.proxy import FaultProxy

# Kafka protocol guide, "Api Keys": all requests of administrators that alter something, and Produce
ALTERING = {
    0: "Produce",
    8: "OffsetCommit",
    19: "CreateTopics",
    20: "DeleteTopics",
    21: "DeleteRecords",
    22: "InitProducerId",
    27: "WriteTxnMarkers",
    28: "TxnOffsetCommit",
    30: "CreateAcls",
    31: "DeleteAcls",
    33: "AlterConfigs",
    37: "CreatePartitions",
    42: "DeleteGroups",
    43: "ElectLeaders",
    44: "IncrementalAlterConfigs",
    45: "AlterPartitionReassignments",
    47: "OffsetDelete",
    49: "AlterClientQuotas",
    51: "AlterUserScramCredentials",
    57: "UpdateFeatures",
    91: "AlterShareGroupOffsets",
    92: "DeleteShareGroupOffsets",
}


def altering(*proxies: FaultProxy) -> dict[str, int]:
    """Altering requests that came since the proxies were reset, by name."""
    found: dict[str, int] = {}
    for proxy in proxies:
        for key, count in proxy.counts.items():
            if key in ALTERING:
                found[ALTERING[key]] = found.get(ALTERING[key], 0) + count
    return found


def requests(*proxies: FaultProxy) -> int:
    """All requests that came since the proxies were reset."""
    return sum(sum(proxy.counts.values()) for proxy in proxies)

"""What Dagster's UI shows, asked of its GraphQL endpoint as the UI does."""

from dataclasses import dataclass
from typing import Any

import httpx

from kmirror_dagster.errors import KmirrorError

_TIMEOUT_S = 5.0

_QUERY = """
query Demo($key: AssetKeyInput!) {
  assetNodeOrError(assetKey: $key) {
    __typename
    ... on AssetNode { partitionStats { numMaterialized numPartitions numFailed } }
  }
  workspaceOrError {
    ... on Workspace {
      locationEntries {
        loadStatus
        locationOrLoadError {
          ... on PythonError { message }
          ... on RepositoryLocation {
            repositories { sensors { name sensorState { status } } }
          }
        }
      }
    }
  }
}
"""


@dataclass(frozen=True)
class Shown:
    """What the UI shows of a mirror.

    Attributes:
        materialized: asset partitions with a materialization in the event log.
        partitions: asset partitions.
        sensors: sensor name -> RUNNING or STOPPED.
    """

    materialized: int = 0
    partitions: int = 0
    sensors: dict[str, str] | None = None


def ask(endpoint: str, mirror: str) -> Shown | None:
    """Ask once; None while the webserver does not answer or has not loaded the code location.

    Raises:
        KmirrorError: when the code location cannot be loaded.
    """
    variables = {"key": {"path": ["kafka_mirror", mirror]}}
    try:
        answer = httpx.post(
            f"{endpoint}/graphql", json={"query": _QUERY, "variables": variables}, timeout=_TIMEOUT_S
        )
        data = answer.raise_for_status().json()["data"]
    except (httpx.HTTPError, KeyError, ValueError):
        return None
    if data is None:
        return None
    stats: dict[str, int] = (data["assetNodeOrError"] or {}).get("partitionStats") or {}
    return Shown(
        materialized=stats.get("numMaterialized", 0),
        partitions=stats.get("numPartitions", 0),
        sensors=_sensors(data["workspaceOrError"]),
    )


def _sensors(workspace: dict[str, Any]) -> dict[str, str]:
    found: dict[str, str] = {}
    for entry in workspace.get("locationEntries", []):
        location = entry["locationOrLoadError"] or {}
        if "message" in location:
            raise KmirrorError(f"Dagster cannot load the code location: {location['message']}")
        for repository in location.get("repositories", []):
            for sensor in repository["sensors"]:
                found[sensor["name"]] = sensor["sensorState"]["status"]
    return found

"""A real Dagster: webserver, daemon and code server as `dagster dev` starts them, asked over GraphQL."""

import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import httpx
import psutil

from kmirror_dagster.orchestration.dagster_instance import write_dagster_yaml
from kmirror_dagster.sandbox.ports import PortClaim
from tests.helpers.waiting import wait_until

LOCATION = "location.py"
REPOSITORY = "__repository__"

_SENSOR = "{repositoryLocationName: $location, repositoryName: $repository, sensorName: $name}"
# Four interpreters that import Dagster: 10 s on an idle machine of two cores.
_LOAD_S = 180.0
_FINISHED = {"SUCCESS", "FAILURE", "CANCELED"}


class DagsterProcesses:
    """`dagster dev` on one code location, in a home of its own.

    Args:
        home: directory for Dagster's home, the location file and the log.
        location: text of the code location; none for a project of `dg`.
        environ: variables added to this process's.
    """

    def __init__(self, home: Path, location: str, environ: Mapping[str, str] | None = None) -> None:
        self.home = home
        self.log = home / "dagster.log"
        home.mkdir(parents=True, exist_ok=True)
        write_dagster_yaml(home)
        self.location = LOCATION
        if location:
            (home / LOCATION).write_text(location)
        self._environ = {**os.environ, "DAGSTER_HOME": str(home), **(environ or {})}
        self._process: subprocess.Popen[bytes] | None = None
        self.url = ""

    # --- processes

    @property
    def is_running(self) -> bool:
        """Whether it was started and has not ended."""
        return self._process is not None and self._process.poll() is None

    def start(self) -> None:
        """Start everything and wait until the code location has loaded."""
        with PortClaim() as claim:
            port = claim.take()
            self.url = f"http://127.0.0.1:{port}"
            self._launch_processes(port)
            wait_until(self._is_loaded, _LOAD_S, what=f"code location loaded; see {self.log}", poll_s=0.3)

    def _launch_processes(self, port: int) -> None:
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                self._command(port),
                cwd=self._directory,
                env=self._environ,
                stdout=log,
                stderr=log,
                start_new_session=True,
                # a shell's "&" leaves both ignored, and Dagster's processes then never end
                preexec_fn=_default_signals,
            )

    @property
    def _directory(self) -> Path:
        return self.home

    def _command(self, port: int) -> list[str]:
        return [sys.executable, "-m", "dagster", "dev", "-f", LOCATION, "-h", "127.0.0.1", "-p", str(port)]

    def stop(self, wait_s: float = 30.0) -> None:
        """End everything in order; what is left after `wait_s` is killed."""
        if self._process is None:
            return
        everybody = self.processes()
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGINT)
        _, left = psutil.wait_procs(everybody, timeout=wait_s)
        for process in left:
            process.kill()
        self._process.wait(10)
        self._process = None

    def kill(self) -> None:
        """Kill everything at once, with SIGKILL."""
        assert self._process is not None
        everybody = self.processes()
        for process in everybody:
            process.kill()
        psutil.wait_procs(everybody, timeout=10)
        self._process.wait(10)
        self._process = None

    def processes(self, word: str = "") -> list[psutil.Process]:
        """Processes of this Dagster whose command line holds a word; all of them without one.

        Found by their environment: some are children of children that have ended.
        """
        mark = str(self.home)
        found: list[psutil.Process] = []
        for process in psutil.process_iter():
            try:
                if process.environ().get("DAGSTER_HOME") != mark:
                    continue
                command = " ".join(process.cmdline())
            except psutil.Error:
                continue
            if "kmirror_dagster.coordination.node" not in command and word in command:
                found.append(process)
        return found

    def _is_loaded(self) -> bool:
        assert self._process is not None
        assert self._process.poll() is None, self.log.read_text()[-4000:]
        try:
            answer = self.query(
                "{ workspaceOrError { ... on Workspace { locationEntries { loadStatus } } } }"
            )
        except (httpx.TransportError, AssertionError):
            return False
        return [entry["loadStatus"] for entry in answer["workspaceOrError"]["locationEntries"]] == ["LOADED"]

    # --- GraphQL

    def query(self, text: str, **variables: Any) -> dict[str, Any]:
        """Answer of a query or mutation."""
        body = {
            "query": text,
            "variables": {"location": self.location, "repository": REPOSITORY, **variables},
        }
        answer = httpx.post(f"{self.url}/graphql", json=body, timeout=30)
        document = answer.json()
        assert answer.is_success and not document.get("errors"), document
        return document["data"]

    def reload(self) -> None:
        """Reload the code location, as the button does."""
        answer = self.query(
            "mutation ($location: String!) { reloadRepositoryLocation(repositoryLocationName: $location)"
            " { __typename } }"
        )
        assert answer["reloadRepositoryLocation"]["__typename"] == "WorkspaceLocationEntry", answer

    def arm(self, sensor: str) -> None:
        """Start a sensor."""
        answer = self.query(
            "mutation ($location: String!, $repository: String!, $name: String!)"
            f" {{ startSensor(sensorSelector: {_SENSOR}) {{ __typename }} }}",
            name=sensor,
        )
        assert answer["startSensor"]["__typename"] == "Sensor", answer

    def ticks(self, sensor: str, limit: int = 20) -> list[dict[str, Any]]:
        """Newest ticks of a sensor, newest first."""
        answer = self.query(
            "query ($location: String!, $repository: String!, $name: String!, $limit: Int!)"
            f" {{ sensorOrError(sensorSelector: {_SENSOR}) {{ ... on Sensor {{ sensorState"
            " { status ticks(limit: $limit) { timestamp status skipReason runIds error { message } } } } } }",
            name=sensor,
            limit=limit,
        )
        return answer["sensorOrError"]["sensorState"]["ticks"]

    def sensors(self) -> dict[str, str]:
        """Status of each sensor."""
        answer = self.query(
            "query ($location: String!, $repository: String!) { sensorsOrError(repositorySelector:"
            " {repositoryLocationName: $location, repositoryName: $repository})"
            " { ... on Sensors { results { name sensorState { status } } } } }"
        )
        return {each["name"]: each["sensorState"]["status"] for each in answer["sensorsOrError"]["results"]}

    def assets(self) -> set[tuple[str, ...]]:
        """Keys of all assets."""
        answer = self.query("{ assetNodes { assetKey { path } } }")
        return {tuple(node["assetKey"]["path"]) for node in answer["assetNodes"]}

    def partition_keys(self, *asset: str) -> list[str]:
        """Keys of an asset's partitions."""
        answer = self.query(
            "query ($key: AssetKeyInput!) { assetNodeOrError(assetKey: $key)"
            " { ... on AssetNode { partitionKeys } } }",
            key={"path": list(asset)},
        )
        return answer["assetNodeOrError"]["partitionKeys"]

    def newest_states(self, *asset: str) -> dict[str, str]:
        """State of the newest materialization of each partition."""
        answer = self.query(
            "query ($key: AssetKeyInput!) { assetOrError(assetKey: $key) { ... on Asset {"
            " assetMaterializations(limit: 1000) { partition timestamp metadataEntries"
            " { label ... on TextMetadataEntry { text } } } } } }",
            key={"path": list(asset)},
        )
        states: dict[str, str] = {}
        for event in answer["assetOrError"].get("assetMaterializations", []):
            if event["partition"]:
                text = {entry["label"]: entry.get("text") for entry in event["metadataEntries"]}
                states.setdefault(event["partition"], text["state"])
        return states

    def launch(self, job: str, config: dict[str, Any] | None = None, **tags: str) -> str:
        """Launch a job; id of its run."""
        return self._launch({"pipelineName": job}, config or {}, tags)

    def terminate(self, run_id: str) -> None:
        """Terminate a run, as the button does."""
        answer = self.query(
            "mutation ($id: String!) { terminateRun(runId: $id, terminatePolicy: SAFE_TERMINATE) { __typename } }",
            id=run_id,
        )
        assert answer["terminateRun"]["__typename"] == "TerminateRunSuccess", answer

    def materialize(self, asset: tuple[str, ...], partition: str) -> str:
        """Launch a run that materializes one partition; id of the run."""
        selector = {"pipelineName": "__ASSET_JOB", "assetSelection": [{"path": list(asset)}]}
        return self._launch(selector, {}, {"dagster/partition": partition})

    def backfill(self, asset: tuple[str, ...], partitions: list[str]) -> str:
        """Launch a backfill of several partitions; its id."""
        answer = self.query(
            "mutation ($params: LaunchBackfillParams!) { launchPartitionBackfill(backfillParams: $params)"
            " { __typename ... on LaunchBackfillSuccess { backfillId } } }",
            params={"assetSelection": [{"path": list(asset)}], "partitionNames": partitions},
        )["launchPartitionBackfill"]
        assert answer["__typename"] == "LaunchBackfillSuccess", answer
        return answer["backfillId"]

    def backfill_runs(self, backfill_id: str) -> list[str]:
        """Status of each run of a backfill."""
        answer = self.query(
            "query ($tags: [ExecutionTag!]) { runsOrError(filter: {tags: $tags})"
            " { ... on Runs { results { status } } } }",
            tags=[{"key": "dagster/backfill", "value": backfill_id}],
        )
        return [run["status"] for run in answer["runsOrError"]["results"]]

    def run(self, run_id: str) -> dict[str, Any]:
        """Status and tags of a run."""
        return self.query(
            "query ($id: ID!) { runOrError(runId: $id) { ... on Run { status jobName startTime endTime } } }",
            id=run_id,
        )["runOrError"]

    def runs(self, job: str) -> list[dict[str, Any]]:
        """Runs of a job, newest first."""
        return self.query(
            "query ($job: String!) { runsOrError(filter: {pipelineName: $job})"
            " { ... on Runs { results { runId status creationTime endTime } } } }",
            job=job,
        )["runsOrError"]["results"]

    def wait_run(self, run_id: str, deadline_s: float = 90.0) -> str:
        """Wait for the end of a run; its status."""
        wait_until(
            lambda: self.run(run_id)["status"] in _FINISHED,
            deadline_s,
            what=f"end of run {run_id}; see {self.log}",
            poll_s=0.5,
        )
        return self.run(run_id)["status"]

    def _launch(self, selector: dict[str, Any], config: dict[str, Any], tags: Mapping[str, str]) -> str:
        where = {"repositoryLocationName": self.location, "repositoryName": REPOSITORY}
        answer = self.query(
            "mutation ($params: ExecutionParams!) { launchPipelineExecution(executionParams: $params)"
            " { __typename ... on LaunchRunSuccess { run { runId } } ... on PythonError { message } } }",
            params={
                "selector": {**where, **selector},
                "runConfigData": config,
                "executionMetadata": {"tags": [{"key": key, "value": text} for key, text in tags.items()]},
            },
        )["launchPipelineExecution"]
        assert answer["__typename"] == "LaunchRunSuccess", answer
        return answer["run"]["runId"]


class DgProject(DagsterProcesses):
    """`dg dev` of a project, by the `dg` of another environment than the tests' own.

    Args:
        home: directory for Dagster's home and the log.
        project: directory of the project.
        dg: path of the command.
    """

    def __init__(self, home: Path, project: Path, dg: Path, environ: Mapping[str, str]) -> None:
        super().__init__(home, "", environ)
        self.location = project.name
        self._project, self._dg = project, dg

    @property
    def _directory(self) -> Path:
        return self._project

    def _command(self, port: int) -> list[str]:
        return [str(self._dg), "dev", "--host", "127.0.0.1", "--port", str(port)]


def _default_signals() -> None:
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_DFL)

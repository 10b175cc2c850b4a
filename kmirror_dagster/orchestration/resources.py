"""The resource: a control client of a node. It is set up at every tick and step, so that does no work."""

import os
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal, TypeVar, cast

import dagster as dg
from pydantic import Field, SecretStr

from kmirror_dagster.coordination.client import NodeClient
from kmirror_dagster.coordination.launcher import ensure_node, node_endpoint
from kmirror_dagster.coordination.state_directory import (
    TOKEN_VARIABLE,
    StateDirectory,
    default_state_dir,
)
from kmirror_dagster.coordination.tls import CA_VARIABLE, identity_of
from kmirror_dagster.errors import ApiAuthenticationError, SettingsError, UsageError
from kmirror_dagster.orchestration.budgets import run_within
from kmirror_dagster.orchestration.node_api import NodeApi
from kmirror_dagster.settings.references import variable

_T = TypeVar("_T")

# A node answers reads from memory; one that needs longer than this for one is unwell.
REQUEST_TIMEOUT_S = 3.0
# Election, broker connections and the replay of the state topic, on a busy laptop.
NODE_START_S = 35.0


class KMirrorResource(dg.ConfigurableResource[Any]):
    """Connection to a kmirror node, opened when something is asked.

    Which node: `endpoint` when given, else the one that runs on `state_dir` when that is given, else
    `KMIRROR_ENDPOINT`, else the one on the user's state directory. Any node will do, each knows all states.
    Give the token as `EnvVar("KMIRROR_TOKEN")`, or leave it to `KMIRROR_TOKEN`, `KMIRROR_TOKEN_FILE` or the
    state directory; Dagster shows none of them. A token as text is refused: that would be shown.
    """

    endpoint: str = Field(
        default="",
        description="Base URL of a node, or several with commas between them. Empty: the node on state_dir.",
    )
    token: str = Field(
        default="",
        repr=False,
        json_schema_extra={"dagster__is_secret": True},
        description='API token: EnvVar("KMIRROR_TOKEN"). Empty: KMIRROR_TOKEN, else from state_dir.',
    )
    state_dir: str = Field(
        default="",
        description="State directory of a node on this machine. Empty: KMIRROR_STATE_DIR, else the user's.",
    )
    mode: Literal["attach", "local"] = Field(
        default="attach",
        description="attach: nodes have their own supervisor. local: start one here when none runs.",
    )
    node_config: str = Field(
        default="", description="Path of the node's settings document; needed to start one in local mode."
    )

    def refuse_literal_token(self) -> None:
        """Refuse a token that stands in the code.

        Dagster marks secret fields for its forms only: the value of a resource is sent to whoever opens its page,
        unless it is the name of a variable.

        Raises:
            SettingsError: naming the remedy, never the token.
        """
        if self.token and not isinstance(self.token, dg.EnvVar):
            raise SettingsError(
                f'a secret must not be part of definitions, Dagster shows them: token=EnvVar("{TOKEN_VARIABLE}")'
            )

    def open(self, *, budget_s: float) -> NodeApi:
        """Client of the node; nothing is sent yet.

        Args:
            budget_s: longest a call may take with its repetitions.

        Raises:
            NodeUnavailableError: when no node is named and none runs on the state directory.
            ApiAuthenticationError: when there is no token.
        """
        timeout_s = min(REQUEST_TIMEOUT_S, budget_s)
        if self.endpoint:
            ca = os.environ.get(CA_VARIABLE)
            return NodeClient(
                self.endpoint,
                self._token(),
                timeout_s=timeout_s,
                deadline_s=budget_s,
                ca=Path(ca) if ca else None,
                identity=identity_of(os.environ),
            )
        directory = self._state_directory().path if self.state_dir or self.starts_nodes else None
        return NodeClient.discover(directory, timeout_s=timeout_s, deadline_s=budget_s)

    def ask(self, work: Callable[[NodeApi], _T], *, budget_s: float, what: str) -> _T:
        """Ask the node something; given up when the budget is spent, even when the node never answers.

        Raises:
            DeadlineError: when the budget is spent.
            KmirrorError: as the calls made by `work`.
        """
        client = self.open(budget_s=budget_s)
        try:
            return run_within(lambda: work(client), budget_s=budget_s, what=what, on_expiry=client.close)
        finally:
            client.close()

    @contextmanager
    def connect(self, *, budget_s: float) -> Generator[NodeApi]:
        """Connection for a run; in local mode a node is started when none runs.

        A run may wait: unlike a tick it is watched by a person and can be terminated.
        """
        if self.starts_nodes and not self._state_directory().is_stopped:
            self.ensure_node()
        client = self.open(budget_s=budget_s)
        try:
            yield client
        finally:
            client.close()

    @property
    def starts_nodes(self) -> bool:
        """Whether a node of this machine is started when none runs."""
        return self.mode == "local" and not self.endpoint

    def is_node_running(self) -> bool:
        """Whether a node process runs on the state directory."""
        return node_endpoint(self._state_directory().path) is not None

    def is_node_stopped(self) -> bool:
        """Whether somebody stopped the node of the state directory on purpose."""
        return self._state_directory().is_stopped

    def ensure_node(self, *, wait_s: float = NODE_START_S) -> str:
        """Start the node of the state directory when none runs; it is detached and outlives this process.

        Returns:
            Its node id.

        Raises:
            UsageError: in attach mode, or when `node_config` is not set.
            KmirrorError: why the node did not start.
        """
        if not self.starts_nodes:
            raise UsageError('nodes are not started in mode "attach"; set mode="local" or start one by hand')
        if not self.node_config:
            raise UsageError("no node settings: set node_config to the path of a node's document")
        return ensure_node(self._state_directory().path, Path(self.node_config), wait_s=wait_s).node_id

    def _token(self) -> SecretStr:
        # the variable was named for the endpoint, the directory's token belongs to the node that runs there
        token = self.token or variable(TOKEN_VARIABLE, os.environ)
        stored = SecretStr(token) if token else self._state_directory().token({})
        if stored is None:
            raise ApiAuthenticationError(f"no API token for {self.endpoint}: set {TOKEN_VARIABLE}")
        return stored

    def _state_directory(self) -> StateDirectory:
        return StateDirectory(Path(self.state_dir) if self.state_dir else default_state_dir())


def resource_of(context: object, key: str) -> KMirrorResource:
    """The resource of a context by its key, which the caller of the builder chose."""
    resources = cast("Any", context).resources
    return cast("KMirrorResource", getattr(resources, key))

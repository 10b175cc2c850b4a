"""What the global options say, and the client made from them. Heavy imports happen on first use only."""

import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import typer

if TYPE_CHECKING:
    from kmirror_dagster.coordination.client import NodeClient


@dataclass(frozen=True)
class Session:
    """Global options of one call of `kmirror`.

    Attributes:
        endpoint: URL of a node's API, None to look for the node of the state directory.
        state_dir: state directory named by the caller, None for the default one.
        json: print data as JSON.
        debug: show tracebacks and log lines.
    """

    endpoint: str | None = None
    state_dir: Path | None = None
    json: bool = False
    debug: bool = False

    def environ(self) -> dict[str, str]:
        """This process's variables, with what the options say in place of them."""
        variables = dict(os.environ)
        if self.endpoint is not None:
            variables["KMIRROR_ENDPOINT"] = self.endpoint
        if self.state_dir is not None:
            variables["KMIRROR_STATE_DIR"] = str(self.state_dir)
        return variables

    def client(self, *, timeout_s: float = 5.0, deadline_s: float = 30.0) -> "NodeClient":
        """Client of the node that the options, the environment or the state directory name.

        Raises:
            NodeUnavailableError: when none of them names a running node.
        """
        from kmirror_dagster.coordination.client import NodeClient

        # a directory given without an endpoint is a closer word than the environment's endpoint
        directory = self.state_dir if self.endpoint is None else None
        return NodeClient.discover(directory, self.environ(), timeout_s=timeout_s, deadline_s=deadline_s)

    def on(self, state_dir: Path) -> "Session":
        """The same session, looking for the node of another state directory."""
        return replace(self, state_dir=state_dir, endpoint=None)

    def node_directory(self) -> Path:
        """State directory of the local node."""
        from kmirror_dagster.coordination.state_directory import default_state_dir

        return self.state_dir or default_state_dir()


def session_of(ctx: typer.Context) -> Session:
    """The session of a command's context.

    While a shell completes a line no command runs, not even the root's: its options are only parsed.
    """
    found = ctx.find_object(Session)
    if found is not None:
        return found
    options = ctx.find_root().params
    endpoint, state_dir = options.get("endpoint"), options.get("state_dir")
    return Session(
        endpoint=str(endpoint) if endpoint else None,
        state_dir=Path(str(state_dir)) if state_dir else None,
        debug=bool(options.get("debug")),
    )

"""The node process: `python -m kmirror_dagster.coordination.node --config node.yaml --state-dir DIR`."""

import argparse
import asyncio
import json
import logging
import os
import signal
import socket
import sys
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path

from kmirror_dagster.broker.pauses import favour_the_loop
from kmirror_dagster.coordination.json_logs import set_up_logging
from kmirror_dagster.coordination.runtime import NodeRuntime
from kmirror_dagster.coordination.server import bind
from kmirror_dagster.coordination.state_directory import StateDirectory, default_state_dir
from kmirror_dagster.errors import KmirrorError, SettingsError
from kmirror_dagster.settings import NodeSettings, load_node, node_from_document

logger = logging.getLogger(__name__)

_STDIN = "-"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a node until it is stopped; the exit code is 0, or that of the error it ended with."""
    options = _parser().parse_args(arguments)
    document = sys.stdin.read() if options.config == _STDIN else None
    if options.detach:
        _detach()
    directory = StateDirectory(options.state_dir)
    set_up_logging(directory.node_id() or "-", level=getattr(logging, options.log_level))
    try:
        _run(options, directory, document, os.environ)
    except KmirrorError as error:
        # the launcher reads this line to tell its caller why
        logger.error("%s", error, extra={"error": type(error).__name__})  # noqa: TRY400 - one line, no trace
        return error.exit_code
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="kmirror-node", description="Run one replicator node.")
    parser.add_argument(
        "--config", required=True, help="node document (YAML); - reads JSON from standard input"
    )
    parser.add_argument(
        "--state-dir", type=Path, default=default_state_dir(), help="lock, token, endpoint, log"
    )
    parser.add_argument("--detach", action="store_true", help="go on in the background, print the process id")
    parser.add_argument(
        "--startup-wait", type=float, default=60.0, help="seconds to wait for the destination"
    )
    parser.add_argument("--log-level", default="INFO", choices=["DEBUG", "INFO", "WARNING", "ERROR"])
    return parser


def _detach() -> None:
    """Leave the caller: a child of nobody, in a session of its own, that no terminal and no parent ends."""
    pid = os.fork()
    if pid:
        sys.stdout.write(f"{pid}\n")
        sys.stdout.flush()
        os._exit(0)
    os.setsid()
    null = os.open(os.devnull, os.O_RDWR)
    os.dup2(null, 0)
    os.dup2(2, 1)
    os.close(null)


def _run(
    options: argparse.Namespace, directory: StateDirectory, document: str | None, environ: Mapping[str, str]
) -> None:
    directory.acquire()
    try:
        settings = _settings(options.config, document, environ)
        node_id = directory.ensure_node_id(f"{socket.gethostname()}-{uuid.uuid4().hex[:8]}")
        set_up_logging(node_id, level=getattr(logging, options.log_level))
        token = directory.ensure_token(environ)
        listener = bind(settings)

        favour_the_loop()

        async def live() -> None:
            runtime = NodeRuntime(
                settings, directory, node_id=node_id, token=token, listener=listener, environ=environ
            )
            loop = asyncio.get_running_loop()
            for number in (signal.SIGTERM, signal.SIGINT):
                loop.add_signal_handler(number, runtime.request_shutdown)
            await runtime.run(startup_wait_s=options.startup_wait)

        asyncio.run(live())
        logger.info("node ended")
    finally:
        directory.release()


def _settings(config: str, document: str | None, environ: Mapping[str, str]) -> NodeSettings:
    if document is None:
        return load_node(Path(config), environ)
    try:
        values = json.loads(document)
    except ValueError as error:
        raise SettingsError(f"node settings from standard input are not JSON: {error}") from None
    return node_from_document(values, environ)


def _exit(code: int) -> None:
    """End without waiting for threads: a call that hangs in one must not keep a drained node alive."""
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    _exit(main())

"""`kmirror`, killed at a chosen moment: before or after one of the calls by which it changes something.

``python -m tests.helpers.killed_command POINT ARGUMENTS...``: points are numbered from 1, two for each call; the
process ends itself with SIGKILL at that point. Point 0: never.
"""

import functools
import os
import signal
import sys
from collections.abc import Callable
from typing import Any

from kmirror_dagster.broker.admin import ClusterAdmin
from kmirror_dagster.cli.main import run
from kmirror_dagster.coordination.client import NodeClient
from kmirror_dagster.recovery.quarantine import Quarantine

CALLS: tuple[tuple[type, str], ...] = (
    (NodeClient, "record_recovery"),
    (NodeClient, "create"),
    (NodeClient, "delete"),
    (NodeClient, "refresh"),
    (NodeClient, "verb"),
    (Quarantine, "save"),
    (ClusterAdmin, "delete_topics"),
    (ClusterAdmin, "create_acls"),
    (ClusterAdmin, "delete_acls"),
)


class _Killer:
    def __init__(self, point: int) -> None:
        self._point = point
        self._passed = 0

    def pass_point(self) -> None:
        self._passed += 1
        if self._passed == self._point:
            os.kill(os.getpid(), signal.SIGKILL)

    def around(self, call: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(call)
        def wrapped(*arguments: Any, **named: Any) -> Any:
            self.pass_point()
            answer = call(*arguments, **named)
            self.pass_point()
            return answer

        return wrapped


def main() -> int:
    """Entry point."""
    killer = _Killer(int(sys.argv[1]))
    for owner, name in CALLS:
        setattr(owner, name, killer.around(getattr(owner, name)))
    return run(sys.argv[2:])


if __name__ == "__main__":
    sys.exit(main())

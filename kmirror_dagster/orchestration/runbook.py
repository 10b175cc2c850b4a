"""The run-book on a mirror's asset: what to do about what is seen, with the jobs and commands of this mirror."""

from kmirror_dagster.orchestration.targets import MirrorTarget

RUNBOOK = "run-book"

_TEXT = """\
### Mirror `{mirror}`: what to do

Records flow whether or not Dagster runs. State: the newest events of each partition, or `kmirror describe {mirror}`.

| What you see | What it means | What to do |
|---|---|---|
| `node_alive` failed | no node answers | look at sensor `{prefix}_node_keeper`; `kmirror node start` |
| `no_failed_partition` failed | FAILED, the check says why | put the reason right, then job `{prefix}_recover` |
| `lag_within_limits` failed | copying falls behind | start another node; see the worst partitions |
| `refresh_fresh` failed | topics and groups are not kept equal | `kmirror refresh {mirror}` tells each error |
| `nobody_else_writes` failed | others write, or may write, to copies | take their right away |
| the source is down | nothing new comes | job `{prefix}_failover`, or arm sensor `{name}_failover` |

| To | Job | Command |
|---|---|---|
| create it on the nodes, or change its settings | `{prefix}_create` | `kmirror create FILE` |
| bring a partition where it is wanted | materialize it | |
| hold it, go on | `{prefix}_pause`, `{prefix}_resume` | `kmirror pause {mirror}`, `kmirror resume {mirror}` |
| end mirroring, make topics writable | `{prefix}_stop` (asks for the name) | `kmirror stop {mirror}` |
| mirror stopped topics again | `{prefix}_start` | `kmirror start {mirror}` |
| retry FAILED partitions | `{prefix}_recover` | `kmirror recover {mirror}` |
| compare both clusters | `{prefix}_verify` | `kmirror verify {mirror}` |
| rebuild this history | `{prefix}_reconcile` | |

Jobs take topics as whole-name patterns; none means all. Stopping and failing over cannot be undone by another job: what
is written to a stopped topic has to be mirrored back first (`kmirror failback {mirror}`).
"""


def runbook(target: MirrorTarget, *, name: str, prefix: str) -> str:
    """Markdown for one mirror.

    Args:
        name: the mirror's name as a Dagster identifier.
        prefix: begins the names of the jobs.
    """
    return _TEXT.format(mirror=target.name, name=name, prefix=prefix)

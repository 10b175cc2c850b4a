"""A PostgreSQL server of a test's own, from the installed binaries (Debian: apt-get install postgresql)."""

import os
import pwd
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from kmirror_dagster.sandbox.ports import PortClaim

_START_S, _STOP_S = 120, 60


@contextmanager
def postgres() -> Iterator[str]:
    """Start a server on the loopback; its URL for SQLAlchemy. Ends it and removes its data.

    The server refuses to run as root, so root runs it as the user `postgres`, in a directory which that one reaches.
    """
    binaries = _binaries()
    user = "postgres" if os.geteuid() == 0 else None
    home = Path(tempfile.mkdtemp(prefix="kmirror-pg-"))
    if user is not None:
        os.chown(home, pwd.getpwnam(user).pw_uid, -1)
    data = home / "data"

    def run(command: str, *arguments: str, wait_s: int) -> None:
        subprocess.run(
            [str(binaries / command), "-D", str(data), *arguments],
            cwd=home,
            user=user,
            stdout=subprocess.DEVNULL,
            timeout=wait_s,
            check=True,
        )

    try:
        run("initdb", "-U", "dagster", "-A", "trust", wait_s=_START_S)
        with PortClaim() as claim:
            port = claim.take()
            options = f"-p {port} -k {home} -c listen_addresses=127.0.0.1"
            run("pg_ctl", "-w", "-l", str(home / "log"), "-o", options, "start", wait_s=_START_S)
        try:
            yield f"postgresql+psycopg2://dagster@127.0.0.1:{port}/postgres"
        finally:
            run("pg_ctl", "-w", "-m", "immediate", "stop", wait_s=_STOP_S)
    finally:
        shutil.rmtree(home, ignore_errors=True)


def _binaries() -> Path:
    found = shutil.which("pg_ctl")
    if found:
        return Path(found).parent
    versions = sorted(Path("/usr/lib/postgresql").glob("*/bin"), key=lambda path: int(path.parent.name))
    assert versions, "no PostgreSQL on this machine: apt-get install postgresql"
    return versions[-1]

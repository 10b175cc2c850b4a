"""Links that can be unplugged: a network namespace behind a pair of virtual interfaces. Needs root and iproute2."""

import ctypes
import os
import secrets
import shutil
import socket
import subprocess
import threading
from pathlib import Path
from types import TracebackType

_CLONE_NEWNET = 0x40000000
_NAMESPACES = Path("/run/netns")


def can_unplug() -> bool:
    """Whether this process may make network namespaces."""
    return os.geteuid() == 0 and shutil.which("ip") is not None


def _ip(*arguments: str) -> None:
    done = subprocess.run(["ip", *arguments], capture_output=True, text=True, timeout=20, check=False)
    assert done.returncode == 0, (arguments, done.stderr)


class Link:
    """A namespace that this machine reaches over one pair of interfaces.

    A socket made by `listen` is in the namespace: whoever connects to it comes over the link, and hears nothing
    any more while it is unplugged. No connection is ended by that; packets vanish, as on a cable that was cut.
    """

    def __init__(self) -> None:
        name = secrets.token_hex(3)
        self.namespace = f"kmirror-{name}"
        self._outer, self._inner = f"kmo{name}", f"kmi{name}"
        subnet = f"198.18.{secrets.randbelow(256)}.{secrets.randbelow(64) * 4}"  # RFC 2544: for tests
        base, last = subnet.rsplit(".", 1)
        self._near, self.host = f"{base}.{int(last) + 1}", f"{base}.{int(last) + 2}"

    def __enter__(self) -> "Link":
        """Make it, plugged in."""
        _ip("netns", "add", self.namespace)
        _ip("link", "add", self._outer, "type", "veth", "peer", "name", self._inner, "netns", self.namespace)
        _ip("addr", "add", f"{self._near}/30", "dev", self._outer)
        _ip("link", "set", self._outer, "up")
        _ip("-n", self.namespace, "addr", "add", f"{self.host}/30", "dev", self._inner)
        _ip("-n", self.namespace, "link", "set", self._inner, "up")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Remove it."""
        _ip("link", "del", self._outer)
        _ip("netns", "del", self.namespace)

    def listen(self) -> socket.socket:
        """A listening socket in the namespace, at a free port."""
        made: list[socket.socket] = []

        def enter() -> None:  # a namespace is a property of a thread
            libc = ctypes.CDLL(None, use_errno=True)
            with (_NAMESPACES / self.namespace).open("rb") as handle:
                if libc.setns(handle.fileno(), _CLONE_NEWNET) != 0:
                    return
            made.append(socket.create_server((self.host, 0)))

        thread = threading.Thread(target=enter)
        thread.start()
        thread.join(10)
        assert made, f"namespace {self.namespace} cannot be entered"
        return made[0]

    def unplug(self) -> None:
        """Set the interface in the namespace down."""
        _ip("-n", self.namespace, "link", "set", self._inner, "down")

    def plug_in(self) -> None:
        """Set it up again."""
        _ip("-n", self.namespace, "link", "set", self._inner, "up")

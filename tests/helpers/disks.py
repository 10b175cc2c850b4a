"""A disk of its own that can be filled: a file system in memory. Needs root."""

import os
import subprocess
from pathlib import Path
from types import TracebackType

_PIECE = 1 << 20


class SmallDisk:
    """A file system of a fixed size, mounted while the block runs.

    Args:
        path: where; made when missing.
        megabytes: its size.
    """

    def __init__(self, path: Path, megabytes: int) -> None:
        self.path = path
        self._size = megabytes
        self._ballast = path / "ballast"

    def __enter__(self) -> "SmallDisk":
        """Mount it."""
        self.path.mkdir(parents=True, exist_ok=True)
        command = ["mount", "-t", "tmpfs", "-o", f"size={self._size}m", "tmpfs", str(self.path)]
        subprocess.run(command, check=True, timeout=20)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Unmount it, also while something in it is still open."""
        subprocess.run(["umount", "--lazy", str(self.path)], check=True, timeout=20)

    def fill(self) -> None:
        """Leave not a byte."""
        with self._ballast.open("ab", buffering=0) as file:
            try:
                while True:
                    os.write(file.fileno(), bytes(_PIECE))
            except OSError:
                return  # full

    def empty(self) -> None:
        """Make room again."""
        self._ballast.unlink(missing_ok=True)

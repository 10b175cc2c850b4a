"""Writes docker/constraints.txt, the versions the image is built with: `python docker/freeze.py`.

Run it with the Python version of the image: what is needed depends on it. It installs this project into an
environment of its own, in a temporary directory, and writes down what that has come to.
"""

import subprocess
import sys
import tempfile
import venv
from pathlib import Path

HERE = Path(__file__).parent
CONSTRAINTS = HERE / "constraints.txt"
# all that any stage of the Dockerfile installs
EXTRAS = ("parquet", "postgres")
BUILD_TOOLS = ("hatchling",)

_HEAD = """\
# Written by docker/freeze.py with Python {major}.{minor}: pip freeze of kmirror-dagster[{extras}] and its build tool.
"""


def main() -> None:
    """Resolve, install, write."""
    with tempfile.TemporaryDirectory() as home:
        venv.create(home, with_pip=True)
        pip = [f"{home}/bin/python", "-m", "pip", "--disable-pip-version-check"]
        wanted = [f"{HERE.parent}[{','.join(EXTRAS)}]", *BUILD_TOOLS]
        subprocess.run([*pip, "install", "--quiet", "--only-binary=:all:", *wanted], check=True)
        frozen = subprocess.run([*pip, "freeze"], check=True, capture_output=True, text=True).stdout
    lines = [line for line in frozen.splitlines() if "==" in line]
    head = _HEAD.format(major=sys.version_info.major, minor=sys.version_info.minor, extras=",".join(EXTRAS))
    CONSTRAINTS.write_text(head + "\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()

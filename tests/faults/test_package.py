"""The package as its users get it: built, installed into an empty environment, used in an empty project."""

import logging
import os
import re
import subprocess
import sys
import tarfile
import time
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from kmirror_dagster import __version__
from tests.helpers.dagster_processes import DgProject

logger = logging.getLogger(__name__)

pytestmark = [pytest.mark.faults, pytest.mark.timeout(900)]

ROOT = Path(__file__).parents[2]
COMPONENT = "kmirror_dagster.KafkaMirrorComponent"
_INSTALL_S = 600
_COMMAND_S = 120
# what a source distribution holds besides the package: enough to run its tests and to build its pages
_SOURCES = {
    *("kmirror_dagster", "tests", "bench", "docs", "docker", "deploy"),
    *("definitions.py", "pyproject.toml", "Makefile", "mkdocs.yml"),
    *("README.md", "CHANGELOG.md", "LICENSE", "PKG-INFO", ".gitignore"),
}


@dataclass(frozen=True)
class Distribution:
    """Both files of a release."""

    wheel: Path
    sdist: Path


@dataclass(frozen=True)
class Installed:
    """An environment with the wheel in it and nothing of this checkout."""

    bin: Path
    environ: dict[str, str]

    def run(
        self, *command: str, cwd: Path, wait_s: float = _COMMAND_S, fails: bool = False
    ) -> subprocess.CompletedProcess[str]:
        """Run a command of the environment; its output."""
        done = subprocess.run(
            [str(self.bin / command[0]), *command[1:]],
            cwd=cwd,
            env=self.environ,
            capture_output=True,
            text=True,
            timeout=wait_s,
            check=False,
        )
        assert (done.returncode != 0) == fails, f"{command}: {done.returncode}\n{done.stdout}\n{done.stderr}"
        return done


@pytest.fixture(scope="module")
def distribution(tmp_path_factory: pytest.TempPathFactory) -> Distribution:
    """Sdist and wheel, built as for a release: the wheel from the sdist."""
    folder = tmp_path_factory.mktemp("dist")
    _python("-m", "build", "--no-isolation", "--outdir", str(folder), str(ROOT))
    (wheel,) = folder.glob("*.whl")
    (sdist,) = folder.glob("*.tar.gz")
    return Distribution(wheel, sdist)


@pytest.fixture(scope="module")
def installed(distribution: Distribution, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Installed]:
    """A new environment with the wheel, `dg` and the webserver."""
    home = tmp_path_factory.mktemp("installed")
    _python("-m", "venv", str(home / "venv"))
    binaries = home / "venv" / "bin"
    environ = {
        "PATH": f"{binaries}:/usr/bin:/bin",
        "HOME": str(home),
        "KMIRROR_STATE_DIR": str(home / "state"),
        "DAGSTER_DISABLE_TELEMETRY": "1",
        "COLUMNS": "160",
        **{
            name: text
            for name, text in os.environ.items()
            if name.lower().endswith("_proxy") or "PIP" in name
        },
    }
    made = Installed(binaries, environ)
    packages = (str(distribution.wheel), "dagster-dg-cli", "dagster-webserver", "create-dagster")
    made.run("python", "-m", "pip", "install", "--quiet", *packages, cwd=home, wait_s=_INSTALL_S)
    yield made


def _python(*arguments: str) -> str:
    done = subprocess.run(
        [sys.executable, *arguments], capture_output=True, text=True, timeout=_INSTALL_S, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_release_files_are_clean(distribution: Distribution) -> None:
    """`twine check --strict` finds nothing; the wheel holds the package alone, no test and no data of tests."""
    checked = _python("-m", "twine", "check", "--strict", str(distribution.wheel), str(distribution.sdist))
    assert checked.count("PASSED") == 2
    with zipfile.ZipFile(distribution.wheel) as wheel:
        tops = {name.split("/")[0] for name in wheel.namelist()}
        suffixes = {Path(name).suffix for name in wheel.namelist() if name.startswith("kmirror_dagster/")}
    assert tops == {"kmirror_dagster", f"kmirror_dagster-{__version__}.dist-info"}
    assert suffixes <= {".py", ".typed", ".json", ".yaml"}, suffixes


def test_source_distribution_has_sources_only(distribution: Distribution) -> None:
    """The sdist has what it takes to build, test and document: no results, no recorded data, nothing large."""
    with tarfile.open(distribution.sdist) as archive:
        members = [member for member in archive.getmembers() if member.isfile()]
    names = {member.name.partition("/")[2] for member in members}
    assert {name.split("/")[0] for name in names} <= _SOURCES
    assert {"bench/workloads.py", "tests/conftest.py", "docs/guarantees.md", "definitions.py"} <= names
    assert not [name for name in names if name.startswith(("bench/results", "tests/")) and ".py" not in name]
    large = [member.name for member in members if member.size > 400_000 and "/images/" not in member.name]
    assert large == []


def test_import_costs_little(installed: Installed, tmp_path: Path) -> None:
    """`import kmirror_dagster` adds at most 0.3 s of processor time to Dagster's own import, the component included."""
    code = (
        "import time; a = time.process_time(); import dagster; b = time.process_time();"
        "import kmirror_dagster; c = time.process_time();"
        "from kmirror_dagster import KafkaMirrorComponent; d = time.process_time();"
        "print(b - a, c - b, d - c)"
    )
    runs = [_floats(installed.run("python", "-c", code, cwd=tmp_path).stdout) for _ in range(4)]
    dagster, package, component = (min(run[part] for run in runs) for part in range(3))
    logger.info(
        f"import dagster {dagster:.3f} s, kmirror_dagster {package:.4f} s, its component {component:.3f} s"
    )
    # on a slow machine Dagster's own import is slow as well
    assert package + component <= 0.3 * max(1.0, dagster / 0.4)
    assert package < 0.05


def _floats(text: str) -> list[float]:
    return [float(part) for part in text.split()]


def test_scaffold_edit_check_dev(installed: Installed, tmp_path: Path) -> None:
    """In an empty project: scaffold, edit, check, dev; the webserver shows the mirror and what steers it."""
    begun = time.monotonic()
    installed.run("create-dagster", "project", "shop", "--no-uv-sync", cwd=tmp_path)
    project = tmp_path / "shop"
    where = installed.run(
        "python", "-c", "import kmirror_dagster as k; print(k.__file__)", cwd=project
    ).stdout
    assert where.startswith(str(installed.bin.parent))
    assert COMPONENT in installed.run("dg", "list", "components", cwd=project).stdout
    installed.run("dg", "scaffold", "defs", COMPONENT, "orders", "--topics", "orders.*", cwd=project)
    path = project / "src" / "shop" / "defs" / "orders" / "defs.yaml"
    assert (path.parent / "node.yaml").exists()
    _edit(path, "mode: local", "mode: attach")
    installed.run("dg", "check", "yaml", cwd=project)
    _edit(path, "rpo_seconds: 60", "rpo_second: 60")
    found = _plain(installed.run("dg", "check", "yaml", cwd=project, fails=True).stdout)
    line = path.read_text().splitlines().index("          rpo_second: 60") + 1
    assert f"{path}:{line} - {COMPONENT}" in found
    assert "Additional properties are not allowed ('rpo_second' was unexpected)" in found
    _edit(path, "rpo_second: 60", "rpo_seconds: 60\n          start: yesterday")
    refused = installed.run("dg", "check", "defs", cwd=project, fails=True)
    assert f"{path}:{line + 1}: policies.start: expected earliest" in _plain(refused.stdout + refused.stderr)
    _edit(path, "start: yesterday", "start: latest")
    installed.run("dg", "check", "yaml", cwd=project)
    installed.run("dg", "check", "defs", cwd=project)
    logger.info(f"scaffold to check: {time.monotonic() - begun:.0f} s")
    _see(DgProject(tmp_path / "home", project, installed.bin / "dg", installed.environ))
    logger.info(f"with dg dev: {time.monotonic() - begun:.0f} s")


def _see(project: DgProject) -> None:
    try:
        project.start()
        assert project.assets() >= {("kafka_mirror", "orders"), ("kafka_source", "orders-source")}
        assert project.partition_keys("kafka_mirror", "orders") == []
        assert project.sensors() == {
            "orders_node_keeper": "RUNNING",
            "orders_refresh": "RUNNING",
            "orders_states": "RUNNING",
            "orders_failover": "STOPPED",
        }
    finally:
        project.stop()


def _edit(path: Path, before: str, after: str) -> None:
    text = path.read_text()
    assert text.count(before) == 1, f"{before!r} in {text}"
    path.write_text(text.replace(before, after))


def _plain(text: str) -> str:
    """Text without colours and without the frame and the line breaks of a terminal."""
    plain = re.sub(r"\x1b\[[0-9;]*m", "", text)
    return re.sub(r"\s*\n[\s│|]*", " ", plain) if "│" in plain else plain

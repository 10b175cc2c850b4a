"""The container images: what is built, from what, in which versions, and what they run."""

import importlib.metadata
import runpy
import subprocess
from collections.abc import Collection
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name
from packaging.version import Version

from kmirror_dagster.orchestration.dagster_instance import DAGSTER_YAML
from tests.helpers.dockerfiles import Stage, read_dockerfile

ROOT = Path(__file__).parents[2]
DOCKER = ROOT / "docker"
ARGUMENTS, STAGES = read_dockerfile(DOCKER / "Dockerfile")
IMAGE_PYTHON = ".".join(ARGUMENTS["PYTHON_IMAGE"].partition(":")[2].split(".")[:2])


def constraints() -> dict[str, Version]:
    lines = (DOCKER / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pairs = [line.split("==") for line in lines if not line.startswith("#")]
    return {canonicalize_name(name): Version(version) for name, version in pairs}


def requirements(name: str, extras: Collection[str] = ()) -> list[Requirement]:
    """What an installed distribution needs, with some of its extras, under the image's Python."""
    found = [Requirement(text) for text in importlib.metadata.requires(name) or ()]
    environments = [{"extra": extra, "python_version": IMAGE_PYTHON} for extra in ("", *extras)]
    return [r for r in found if r.marker is None or any(r.marker.evaluate(e) for e in environments)]


def lineage(stage: Stage) -> list[Stage]:
    """A stage and those it is made from."""
    return [stage, *(lineage(STAGES[stage.base]) if stage.base in STAGES else [])]


def test_images_are_pinned_and_slim() -> None:
    """Every stage begins with one pinned Python image: the version the constraints were made with."""
    image = ARGUMENTS["PYTHON_IMAGE"]
    name, _, tag = image.partition(":")
    assert name == "python"
    version = tag.split("-")[0]
    assert version.count(".") == 2
    assert {lineage(stage)[-1].base for stage in STAGES.values()} == {"${PYTHON_IMAGE}"}
    head = (DOCKER / "constraints.txt").read_text(encoding="utf-8").splitlines()[0]
    assert f"Python {IMAGE_PYTHON}:" in head
    assert version in SpecifierSet(importlib.metadata.metadata("kmirror-dagster")["Requires-Python"])


def test_versions_are_pinned_and_fit_the_project() -> None:
    """The constraints hold every direct requirement, in a version that pyproject.toml allows."""
    pinned = constraints()
    extras = runpy.run_path(str(DOCKER / "freeze.py"))["EXTRAS"]
    assert set(extras) <= set(importlib.metadata.metadata("kmirror-dagster").get_all("Provides-Extra", []))
    for wanted in requirements("kmirror-dagster", extras):
        version = pinned.get(canonicalize_name(wanted.name))
        assert version is not None, f"{wanted.name}: write the constraints anew: python docker/freeze.py"
        assert version in wanted.specifier, f"{wanted.name}: python docker/freeze.py"
    assert "hatchling" in pinned


def test_requirements_of_requirements_are_pinned() -> None:
    """Whatever the product needs, directly or not, is pinned."""
    pinned, seen, todo = constraints(), set[str](), requirements("kmirror-dagster")
    while todo:
        requirement = todo.pop()
        name = canonicalize_name(requirement.name)
        if name not in seen:
            seen.add(name)
            assert name in pinned, f"{name}: write the constraints anew: python docker/freeze.py"
            todo += requirements(name, requirement.extras)
    assert len(seen) > 40


@pytest.mark.parametrize("name", ["node", "dagster"])
def test_images_do_not_run_as_root(name: str) -> None:
    """The last user is a number that is not root's, so that Kubernetes can see it."""
    user, _, group = STAGES[name].all("USER")[-1].partition(":")
    assert int(user) > 0
    assert int(group) > 0


@pytest.mark.parametrize("name", ["node", "dagster"])
def test_images_hold_no_secret_and_no_build_tool(name: str) -> None:
    """What runs is copied out of the build stage; nothing secret is set or copied."""
    for stage in lineage(STAGES[name]):
        for keyword, arguments in stage.instructions:
            assert keyword != "ADD"
            assert not (keyword == "RUN" and "pip" in arguments)
            assert not (keyword in ("ENV", "ARG") and ("PASSWORD" in arguments or "TOKEN=" in arguments))
            assert "secrets" not in arguments


def test_what_is_copied_exists_and_is_not_ignored() -> None:
    """Every source of a COPY is a file of the project, and the ignore file lets it through."""
    ignore = (DOCKER / "Dockerfile.dockerignore").read_text(encoding="utf-8").splitlines()
    allowed = [line[1:] for line in ignore if line.startswith("!")]
    assert "*" in ignore
    for stage in STAGES.values():
        for arguments in stage.all("COPY"):
            words = arguments.split()
            if words[0].startswith("--from="):
                assert words[0].removeprefix("--from=") in STAGES
                continue
            for source in (word for word in words[:-1] if not word.startswith("--")):
                assert (ROOT / source).exists(), source
                assert any(source == kept or source.startswith(f"{kept}/") for kept in allowed), source


def test_node_is_the_default_image() -> None:
    """Without --target the node is built: it is the last stage."""
    assert list(STAGES)[-1] == "node"


def test_node_is_healthy_when_it_is_ready() -> None:
    """The health check asks /health/ready on the port of the delivered settings, within its time."""
    check = STAGES["node"].all("HEALTHCHECK")[-1]
    port = yaml.safe_load((DOCKER / "node.yaml").read_text())["api_port"]
    assert f"http://127.0.0.1:{port}/health/ready" in check
    assert str(port) in STAGES["node"].all("EXPOSE")
    script = check.partition('"-c", "')[2].rpartition('"')[0]
    compile(script, "healthcheck", "exec")


def test_dagster_is_set_up_as_recommended() -> None:
    """docker/dagster/dagster.yaml is what the product recommends, on Postgres."""
    ours = yaml.safe_load((DOCKER / "dagster" / "dagster.yaml").read_text())
    storage = ours.pop("storage")
    assert ours == yaml.safe_load(DAGSTER_YAML)
    values = storage["postgres"]["postgres_db"]
    assert values["password"] == {"env": "DAGSTER_POSTGRES_PASSWORD"}


def test_dagster_loads_every_mirror_of_the_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The code location of the image shows each settings file there is, without any node or cluster."""
    for name in ("a", "b"):
        text = (DOCKER / "mirrors" / "demo.yaml").read_text().replace("mirror: demo", f"mirror: {name}")
        (tmp_path / f"{name}.yaml").write_text(text)
    monkeypatch.setenv("KMIRROR_MIRRORS", str(tmp_path))
    definitions = runpy.run_path(str(DOCKER / "dagster" / "definitions.py"))["defs"]
    keys = {key.to_user_string() for key in definitions.resolve_asset_graph().get_all_asset_keys()}
    assert {"kafka_mirror/a", "kafka_mirror/b"} <= keys


def test_entrypoint_takes_the_password_from_its_file(tmp_path: Path) -> None:
    """Dagster knows passwords from variables only; what runs under the entrypoint has it, and keeps its arguments."""
    secret = tmp_path / "password"
    secret.write_text('s p"$x\n')
    script = DOCKER / "dagster" / "entrypoint.sh"
    environ = {"DAGSTER_POSTGRES_PASSWORD_FILE": str(secret), "PATH": "/usr/bin:/bin"}
    command = [script, "sh", "-c", 'printf "%s|%s" "$DAGSTER_POSTGRES_PASSWORD" "$1"', "x", "two words"]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, check=True, timeout=30)
    assert done.stdout == 's p"$x|two words'
    del environ["DAGSTER_POSTGRES_PASSWORD_FILE"]
    assert subprocess.run([script, "true"], env=environ, check=False, timeout=30).returncode == 0
    environ["DAGSTER_POSTGRES_PASSWORD_FILE"] = str(tmp_path / "missing")
    refused = subprocess.run([script, "true"], env=environ, capture_output=True, check=False, timeout=30)
    assert refused.returncode != 0

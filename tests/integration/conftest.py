"""Fixtures of the tests that need real brokers."""

from collections.abc import Iterator

import pytest

from tests.conftest import Clusters
from tests.helpers.nodes import NodeProcess
from tests.helpers.secured import allowed, rehearsal_rights, way_back


@pytest.fixture(scope="module")
def node(clusters: Clusters, tmp_path_factory: pytest.TempPathFactory) -> Iterator[NodeProcess]:
    """A node of this module, as verbose as it can be, that writes to the session's destination.

    Mirrors on it are to be deleted by the test that made them.
    """
    home = tmp_path_factory.mktemp("node")
    process = NodeProcess(home / "state", clusters.destination.bootstrap, log_level="DEBUG")
    try:
        yield process.start()
    finally:
        process.stop()


@pytest.fixture(scope="module")
def turnable(clusters: Clusters) -> Iterator[None]:
    """While a module runs principals may do what mirrors back need of them; nothing on clusters without security."""
    with way_back(clusters.source, clusters.destination):
        yield


@pytest.fixture(scope="module")
def rehearsable(clusters: Clusters) -> Iterator[None]:
    """While a module runs the source's principal may make topics of drills, write to them and delete them."""
    with allowed(clusters.source, rehearsal_rights()):
        yield
